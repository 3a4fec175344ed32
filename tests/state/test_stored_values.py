"""Large arrays and bytes among plain values are stored as leaves and restored as the same types."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from flashckpt.errors import DamagedError, StateError
from flashckpt.format.typed import decode_json, encode_json, same
from flashckpt.state.leaves import LARGE_BYTES
from flashckpt.state.tree import Saved, Tree
from tests.state.image import Image, capture, restore

COUNT = LARGE_BYTES // 4 + 1  # elements of four bytes: one too many for the values


def grid(dtype: str = "<f4") -> np.ndarray[Any, Any]:
    return (np.arange(2 * COUNT) % 120).astype(dtype).reshape(2, COUNT)


VALUES: dict[str, Any] = {
    "float32": grid(),
    "bfloat-like bits": np.full(COUNT, 0x7FC00001, dtype="<u4").view("<f4"),
    "column by column": np.asfortranarray(grid()),
    "every second": grid()[:, ::2].copy()[:, ::-1],
    "big-endian": grid(">i4"),
    "text": np.array(["a", "bcd"] * COUNT),
    "dates": np.arange(COUNT, dtype="<i8").view("<M8[s]"),
    "bools": np.tile(grid("<i4") > 3, 4),
    "complex": grid("<c16"),
    "long double": grid("<f4").astype(np.longdouble),
    "uint16": grid("<u2"),
    "bytes": bytes(range(256)) * 300,
    "bytearray": bytearray(range(256)) * 300,
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_large_value_is_a_leaf_and_is_restored_exactly(kind: str) -> None:
    value = VALUES[kind]
    own: dict[str, Any] = {"nested": [1, {"value": copy.deepcopy(value)}], "small": b"x" * 100}
    tree = Tree({"own": own})
    image = capture(tree)
    assert [leaf.name for leaf in image.layout.leaves] == ["own.nested.1.value"]
    assert len(image.values) < 2000
    fresh: dict[str, Any] = {"nested": [1, {"value": None}], "small": b""}
    restore(Tree({"own": fresh}), image)
    back = fresh["nested"][1]["value"]
    assert same(back, value)
    if isinstance(value, np.ndarray):
        assert back.flags.f_contiguous == (value.ndim == 1 or kind == "column by column")
        assert back.flags.writeable
    assert fresh["small"] == b"x" * 100


def test_small_values_are_not_leaves() -> None:
    own = {"array": np.zeros(LARGE_BYTES, dtype=np.uint8), "bytes": b"y" * LARGE_BYTES}
    assert capture(Tree({"own": own})).layout.leaves == ()


def test_a_live_array_is_filled_in_place() -> None:
    image = capture(Tree({"own": {"a": grid()}}))
    held = np.zeros((2, COUNT), dtype="<f4")
    own = {"a": held}
    restore(Tree({"own": own}), image)
    assert own["a"] is held
    assert same(held, grid())


def test_one_array_in_two_places_and_its_view_are_restored_as_three() -> None:
    """As all values: only tensors stay tied."""
    array = grid()
    image = capture(Tree({"own": {"a": array, "b": array, "tail": array[:, 3:]}}))
    own: dict[str, Any] = {}
    restore(Tree({"own": own}), image)
    assert same(own["a"], own["b"])
    assert same(own["tail"], np.ascontiguousarray(array[:, 3:]))
    own["a"][:] = 0
    assert own["b"].any()


@pytest.mark.parametrize("is_view", [True, False])
def test_a_live_view_of_an_array_is_kept_only_if_a_view_was_saved(is_view: bool) -> None:
    saved = grid()
    image = capture(Tree({"own": {"a": saved, "first": saved[:1] if is_view else saved[:1] + 1}}))
    held = np.zeros((2, COUNT), dtype="<f4")
    own: dict[str, Any] = {"a": held, "first": held[:1]}
    restore(Tree({"own": own}), image)
    assert same(own["a"], saved)
    assert same(own["first"], saved[:1] if is_view else saved[:1] + 1)
    assert np.may_share_memory(own["a"], own["first"]) == is_view


def test_a_value_that_grows_is_followed_between_walks() -> None:
    own: dict[str, Any] = {"buffer": np.zeros(COUNT, dtype="<f4"), "seen": 0}
    tree = Tree({"own": own})
    first = tree.walk(lambda p, g: True)
    own["buffer"] = np.ones(COUNT, dtype="<f4")
    tree.values()
    assert tree.current is first
    [leaf] = first.leaves
    assert bool(leaf.tensor.all()), "the leaf is the array that is there now"
    own["buffer"] = np.append(own["buffer"], np.float32(2))
    tree.values()
    assert tree.current is not first
    own["buffer"] = own["buffer"][:3].copy()  # small again
    tree.values()
    assert tree.current.leaves == []


def test_another_type_of_as_many_bytes_is_followed_and_may_grow() -> None:
    own: dict[str, Any] = {"buffer": bytes(LARGE_BYTES + 8)}
    tree = Tree({"own": own})
    tree.walk(lambda p, g: True)
    own["buffer"] = bytearray(own["buffer"])
    value = decode_json(encode_json(tree.values()))
    assert value["entries"]["own"]["state"]["buffer"].about == {"value": ["bytearray"]}
    own["buffer"] += b"more"  # a bytearray that something holds the memory of could not
    assert len(own["buffer"]) == LARGE_BYTES + 12


def test_large_values_of_an_object_and_of_extra_state() -> None:
    class Replay:
        def __init__(self) -> None:
            self.items = grid()

        def state_dict(self) -> dict[str, Any]:
            return {"items": self.items.copy(), "raw": self.items.tobytes()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["raw"] == state["items"].tobytes()
            self.items = state["items"]

    class Extra(torch.nn.Linear):
        table = b""

        def get_extra_state(self) -> dict[str, bytes]:
            return {"table": self.table}

        def set_extra_state(self, state: dict[str, bytes]) -> None:
            self.table = state["table"]

    replay, module = Replay(), Extra(1, 1)
    replay.items += 1
    module.table = b"t" * (LARGE_BYTES + 1)
    image = capture(Tree({"replay": replay, "module": module}))
    fresh, other = Replay(), Extra(1, 1)
    restore(Tree({"replay": fresh, "module": other}), image)
    assert same(fresh.items, replay.items)
    assert other.table == module.table


@pytest.mark.parametrize(
    "facts",
    [None, [], ["object"], ["bytes", 3], ["numpy.array", "<f4", [3, COUNT], False],
     ["numpy.array", "|O", [2, COUNT], False], ["numpy.array", "<f4", [-2, -COUNT], False]],
)  # fmt: skip
def test_malformed_references_are_damaged(facts: object) -> None:
    own = {"a": grid()}
    tree = Tree({"own": own})
    saved = Image.of(tree.walk(lambda p, g: True)).saved()
    ref = saved.value["entries"]["own"]["state"]["a"]
    ref.about["value"] = facts
    with pytest.raises(DamagedError):
        tree.differences(Saved(saved.leaves, saved.value, saved.tensor))
    assert same(own["a"], grid())


def test_an_array_of_objects_is_refused_with_its_path() -> None:
    with pytest.raises(StateError, match=r"own\.a is an array of dtype object"):
        Tree({"own": {"a": np.array([object()] * LARGE_BYTES)}})


def test_values_too_large_for_a_part_are_refused_with_their_path() -> None:
    own = {"best": 0.5, "history": {"rows": [["x" * 1000] * 100] * 100, "few": [1, 2]}}
    with pytest.raises(
        StateError, match=r"own\.history\.rows takes 10,.* bytes .*\(list\).*1,000,000"
    ) as raised:
        Tree({"own": own}, most_values_bytes=1_000_000)
    assert raised.value.location == "own.history.rows"
    assert "NumPy arrays" in str(raised.value)
