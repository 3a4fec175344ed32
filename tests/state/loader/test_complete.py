"""Which states of streams say all, and which leave items out."""

import random
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from flashckpt.state import rng
from flashckpt.state.loader import complete
from flashckpt.state.loader.complete import is_same, keeps_its_place


class Stream:
    """kept: items that it has read and not given are in its state."""

    def __init__(self, *, kept: bool, buffer: int = 8, items: int = 60) -> None:
        self.kept, self.buffer, self.items = kept, buffer, items
        self.at, self.held = 0, list[int]()
        self.rows = np.arange(items)
        self.numbers = random.Random(3)
        self.convert = lambda row: row + random.random()

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.items or self.held:
            while self.at < self.items and len(self.held) < self.buffer:
                self.held.append(int(self.rows[self.at]))
                self.at += 1
            row = self.held.pop(self.numbers.randrange(len(self.held)))
            yield {"row": torch.tensor([self.convert(row)]), "of": self.buffer}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "held": list(self.held)} if self.kept else {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.held = state["at"], list(state.get("held", ()))


@pytest.mark.parametrize("buffer", [1, 2, 8, 100])
def test_what_follows_a_loaded_state_is_compared(buffer: int) -> None:
    """It draws from its own generator and from a global one, which a resume restores."""
    assert keeps_its_place(Stream(kept=True, buffer=buffer))
    assert keeps_its_place(Stream(kept=False, buffer=buffer)) == (buffer == 1)


def test_the_stream_and_the_random_numbers_are_not_touched() -> None:
    stream, states = Stream(kept=False), rng.capture()
    before = stream.numbers.getstate()
    assert not keeps_its_place(stream)
    assert (stream.at, stream.held, stream.numbers.getstate()) == (0, [], before)
    assert rng.capture() == states


class Reordering(Stream):
    """Shuffles its rows in place when an epoch begins."""

    seen: ClassVar[set[int]] = set()

    def __iter__(self) -> Iterator[Any]:
        self.seen.add(self.rows.ctypes.data)
        if self.rows.flags.writeable:
            np.random.default_rng(1).shuffle(self.rows)
        return super().__iter__()


@pytest.mark.parametrize("is_fixed", [False, True])
def test_data_that_may_be_written_is_copied(is_fixed: bool) -> None:
    stream = Reordering(kept=False)
    stream.rows.flags.writeable = not is_fixed
    Reordering.seen.clear()
    assert not keeps_its_place(stream)
    assert stream.rows.tolist() == list(range(60))
    assert (Reordering.seen == {stream.rows.ctypes.data}) == is_fixed


def test_a_stream_with_much_data_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete, "_MOST_BYTES", 100)
    assert keeps_its_place(Stream(kept=False))


def test_a_stream_that_cannot_be_copied_is_trusted() -> None:
    stream = Stream(kept=False)
    stream.lock = threading.Lock()  # type: ignore[attr-defined]
    assert keeps_its_place(stream)


def test_a_short_stream_is_complete() -> None:
    assert keeps_its_place(Stream(kept=False, items=2))


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), True),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (np.array([0.0]), np.array([-0.0]), False),
        ({"a": [1, (float("nan"), "x")]}, {"a": [1, (float("nan"), "x")]}, True),
        ({"a": [1, (2.0, "x")]}, {"a": [1, (2.0, "y")]}, False),
        ([1], (1,), False),
        (Plain([1]), Plain([1]), True),
        (Plain([1]), Plain([2]), False),
    ],
)
def test_items_are_compared_by_what_they_hold(one: object, other: object, expected: bool) -> None:
    assert is_same(one, other) is expected
