"""A growing list is encoded once for each entry, and restored exactly."""

import random
from typing import Any

import pytest

from flashckpt.errors import StateError
from flashckpt.format.typed import decode_json, encode_json
from flashckpt.state import growing
from flashckpt.state.growing import GrowingList
from flashckpt.state.tree import Tree
from tests.state.image import Image, capture, restore


def entry(step: int) -> dict[str, Any]:
    return {"loss": random.random(), "grad_norm": random.random() / 3, "epoch": step / 7, "step": step}


class Owner:
    def __init__(self, entries: list[Any] | None = None) -> None:
        self.entries: list[Any] = [] if entries is None else entries
        self.list = GrowingList(lambda: self.entries)

    def saved(self) -> Any:
        """Return the state as it is read from a snapshot."""
        return decode_json(encode_json(self.list.state_dict()))


def loaded(saved: Any) -> Owner:
    holder = Owner([{"of": "the new process"}])
    holder.list.load_state_dict(saved)
    return holder


@pytest.mark.parametrize("length", [0, 16, 17, 6000])
def test_saved_entries_are_restored_and_continued(length: int) -> None:
    holder = Owner()
    for step in range(length):
        holder.entries.append(entry(step))
        if step % 50 == 0:
            holder.list.state_dict()
    saved = holder.saved()
    again = loaded(saved)
    assert again.entries == holder.entries
    assert again.saved() == saved
    for step in range(400):
        for each in (holder, again):
            each.entries.append({"step": step})
    assert loaded(again.saved()).entries == holder.entries == loaded(holder.saved()).entries


def test_values_keep_their_types() -> None:
    entries = [1, -0.0, float("nan"), None, "a\nb", "\u2028ü", b"\n", (1, [2]), {3: 4}, {"!x": 1}, 10**400]
    holder = Owner(entries * 1000)
    assert repr(loaded(holder.saved()).entries) == repr(entries * 1000)


def test_each_entry_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Owner([entry(step) for step in range(2000)])
    holder.list.state_dict()
    encoded: list[Any] = []

    def counting(value: Any) -> bytes:
        encoded.append(value)
        return encode_json(value)

    monkeypatch.setattr(growing, "encode_json", counting)
    holder.entries.append(entry(2000))
    holder.list.state_dict()
    assert len(encoded) <= 50


@pytest.mark.parametrize("length", [20, 1500])
def test_another_list_and_a_shorter_one_are_encoded_again(length: int) -> None:
    holder = Owner([entry(step) for step in range(length)])
    holder.list.state_dict()
    del holder.entries[length // 2 :]
    assert loaded(holder.saved()).entries == holder.entries
    holder.entries += [entry(-step) for step in range(length)]
    assert loaded(holder.saved()).entries == holder.entries
    del holder.entries[5:]
    holder.entries += [entry(-step) for step in range(2 * length)]
    assert loaded(holder.saved()).entries == holder.entries
    holder.entries = [entry(step) for step in range(3 * length)]
    assert loaded(holder.saved()).entries == holder.entries
    holder.entries.clear()
    assert loaded(holder.saved()).entries == []


def test_the_newest_entries_may_change() -> None:
    holder = Owner([entry(step) for step in range(100)])
    holder.list.state_dict()
    holder.entries[-16]["eval_loss"] = 1.5
    holder.entries[-1] = {"other": 1}
    assert loaded(holder.saved()).entries == holder.entries
    del holder.entries[-10:]  # entries that are encoded are among the newest then
    holder.entries[-10] = {"other": 2}
    assert loaded(holder.saved()).entries == holder.entries


def test_a_snapshot_of_it_is_restored() -> None:
    """The older entries are a leaf; the newest entries are read again between two walks."""
    holder, other = Owner([entry(step) for step in range(9000)]), Owner()
    tree = Tree({"log": holder.list})
    assert capture(tree).layout.leaves
    for step in range(700):
        holder.entries.append(entry(step))
        if step % 100 == 0:
            values = tree.values()
    values = tree.values()
    assert tree.current is not None
    image = Image.of(tree.current, values)
    restore(Tree({"log": other.list}), image)
    assert other.entries == holder.entries


def test_unsupported_lists_and_entries_are_refused() -> None:
    with pytest.raises(StateError, match="no exact encoding"):
        Owner([object()]).list.state_dict()
    with pytest.raises(StateError, match="returned a tuple"):
        GrowingList(lambda: ()).state_dict()  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-3], lambda b: b[:90] + b"\0\0\0" + b[93:], lambda b: b + b"x"]
)
def test_damaged_entries_are_refused(spoil: Any) -> None:
    saved = Owner([entry(step) for step in range(2000)]).saved()
    saved["closed"] = spoil(saved["closed"])
    with pytest.raises(ValueError, match="the entries are"):
        loaded(saved)
