"""Attributes that change while training, and are not saved, are reported once and by name."""

import gc
import random
import weakref
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from flashckpt.checkpointer import trainer_run
from flashckpt.checkpointer.trainer_run import FIRST, SECOND, Unsaved


class Color(str, Enum):
    RED = "red"


class Owner:
    """A trainer: its attributes are the test's."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def found_after(
    owner: object, change: Callable[[int], object], known: tuple[str, ...] = (), **how: Any
) -> tuple[str, ...]:
    """What is found when `change(n)` runs in each of the first iterations."""
    unsaved = Unsaved({"trainer": owner}, {"trainer": known}, **how)
    for number in range(1, SECOND + 3):
        change(number)
        unsaved.observe()
    return unsaved.found


def set_to(owner: Any, value: Callable[[int], Any]) -> Callable[[int], None]:
    return lambda number: setattr(owner, "value", value(number))


CHANGES: dict[str, Callable[[int], Any]] = {
    "None, and then a number": lambda n: None if n < SECOND else 1,
    "a dict that makes entries": lambda n: defaultdict(list, a=[n]),
    "a set": lambda n: {"a", n},
    "nested": lambda n: {"a": {"b": [{"c": (1, n)}]}},
    "a tensor": lambda n: torch.tensor(float(n)),
    "an array": lambda n: np.full(3, n),
    "the end of a long list": lambda n: [0] * 3000 + [n],
    "one that moves in every second iteration": lambda n: n // 2,
    "a generator": lambda n: random.Random(n),
}

SAME: dict[str, Callable[[int], Any]] = {
    "numbers": lambda n: {"a": 1, "b": [0.5, None, float("nan")]},
    "an equal tensor": lambda n: torch.ones(3),
    "sets": lambda n: {"a", "b", "c"} if n < SECOND else {"c", "b", "a"},
    "an object of the user's": lambda n: Color.RED,
    "a list of objects": lambda n: [Owner(count=n)] * n,
    "the global generator": lambda n: torch.default_generator,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found(name: str) -> None:
    owner = Owner(same=1, odd=torch.zeros(2, device="meta"))
    assert found_after(owner, set_to(owner, CHANGES[name])) == ("trainer.value",)


@pytest.mark.parametrize("name", SAME)
def test_nothing_is_found_where_nothing_changes(name: str) -> None:
    owner = Owner()
    assert found_after(owner, set_to(owner, SAME[name])) == ()


@pytest.mark.parametrize("size", [3, 1 << 19])
def test_a_change_in_place_is_found(size: int) -> None:
    owner = Owner(value={"sum": torch.ones(size)})
    assert found_after(owner, lambda n: owner.value["sum"].mul_(2)) == ("trainer.value",)
    assert found_after(owner, lambda n: None) == ()


def test_a_value_made_once_is_not_found_and_one_set_later_is() -> None:
    owner = Owner()
    assert found_after(owner, lambda n: setattr(owner, "cache", {"made": 1})) == ()
    assert found_after(owner, lambda n: n < SECOND or setattr(owner, "value", 1)) == ("trainer.value",)


def test_a_generator_of_the_state_needs_no_name() -> None:
    owner: Any = Owner(drawn=random.Random(1), noise=torch.Generator())

    def change(_: int) -> None:
        owner.drawn.random()
        torch.rand(1, generator=owner.noise)

    assert found_after(owner, change, saved=[owner.noise]) == ("trainer.drawn",)


@pytest.mark.parametrize(
    "named", [{"known": ("value",)}, {"own": ("value",)}, {"own": ("trainer.value",)}], ids=str
)
def test_a_known_name_is_silent(named: Any, caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    assert found_after(owner, set_to(owner, int), **named) == ()
    assert not caplog.records


def test_one_warning_names_class_attribute_and_remedy(caplog: pytest.LogCaptureFixture) -> None:
    owner, callback = Owner(), Owner()
    unsaved = Unsaved({"trainer": owner, "callback 0": callback}, {})
    for number in range(3 * SECOND):
        owner.count, callback.best, callback.count = number, -number, number
        unsaved.observe()
    (record,) = caplog.records
    message = record.getMessage()
    assert "Owner.count (trainer), Owner.best (callback 0), Owner.count (callback 0)" in message
    assert 'own=("count", "best")' in message
    assert "A resumed run begins with their first values" in message


def test_no_code_of_the_user_is_called_and_no_error_is_raised() -> None:
    class Loud:
        """A proxy whose every access is an error."""

        def __init__(self) -> None:
            self.count = 0

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    class LoudDict(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise AssertionError

        __len__ = __repr__ = __iter__ = items

    class Slotted:
        __slots__ = ()

    loud, inference = Loud(), Owner(inner=Loud(), table=LoudDict(a=0), kinds={Color.RED})
    with torch.inference_mode():
        inference.value = torch.zeros(1 << 19)
    counted = object.__getattribute__(loud, "__dict__")
    assert found_after(loud, lambda n: counted.update(count=n)) == ("trainer.count",)
    assert found_after(inference, lambda n: None) == ()
    assert found_after(Slotted(), lambda n: None) == ()


def test_the_work_for_an_attribute_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    compared = trainer_run._compared
    monkeypatch.setattr(trainer_run, "_compared", lambda *given: seen.append(1) or compared(*given))
    data: Any = [torch.zeros(64) for _ in range(900)]
    for _ in range(5):
        data = [data] * 10
    assert found_after(Owner(data=data), lambda number: None) == ()
    assert 5000 <= len(seen) <= 11_000, "two observations"


def test_nothing_is_kept_alive() -> None:
    owner = Owner(value=torch.zeros(1 << 19), rows=[torch.zeros(8)])
    unsaved = Unsaved({"trainer": owner}, {}, saved=[owner])
    for _ in range(FIRST):
        unsaved.observe()
    tensor = weakref.ref(owner.value)
    del owner.value
    gc.collect()
    assert tensor() is None
    for _ in range(SECOND):
        unsaved.observe()
    kept = weakref.ref(owner)
    del owner
    gc.collect()
    assert kept() is None
