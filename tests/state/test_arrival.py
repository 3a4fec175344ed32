"""The contents of objects after their restore, and objects that are restored in place."""

import itertools
import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flashckpt.errors import DamagedError, StateError
from flashckpt.restore.filling import fill
from flashckpt.state.tree import Tree
from tests.restore.snapshots import snapshot_of
from tests.state.image import assert_same, capture, restore


class Meter:
    """Restores what it returned, unless configured otherwise."""

    def __init__(self, loses: str = "") -> None:
        self.loses = loses
        self.total, self.count, self.names = torch.zeros(3), 0, {"b", "a"}

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count, "names": self.names, "nested": [self.count * 1.5]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.loses != "count":
            self.count = state["count"]
        self.names = state["names"]
        self.total = state["total"]
        if self.loses == "dtype":
            self.total = self.total.half()
        if self.loses == "bytes":
            self.total = self.total * 2


def moved() -> Meter:
    meter = Meter()
    meter.total += 1.25
    meter.count = 3
    return meter


@pytest.mark.parametrize(
    ("loses", "message"),
    [
        ("count", "meter.count is 0; meter.nested.0"),
        ("dtype", r"meter.total was float32 \(3,\) and is float16"),
    ],
)
def test_an_object_that_does_not_restore_its_state_is_reported(loses: str, message: str) -> None:
    image = capture(Tree({"meter": moved()}))
    with pytest.raises(StateError, match=message) as caught:
        Tree({"meter": Meter(loses)}).restore(image.saved())
    assert caught.value.location == "meter"


def test_the_restored_object_is_digested_not_its_input() -> None:
    model = nn.Linear(2, 2)
    image = capture(Tree({"meter": moved(), "model": model}))
    with pytest.raises(StateError, match=r"step 4 .*\(meter.total\): either load_state_dict") as caught:
        fill(Tree({"meter": Meter("bytes"), "model": nn.Linear(2, 2)}), snapshot_of(image), 1)
    assert caught.value.location == "meter"
    other = Meter()
    fill(Tree({"meter": other, "model": nn.Linear(2, 2)}), snapshot_of(image), 1)
    assert other.total.tolist() == [1.25] * 3


def test_an_object_that_changes_another_is_named_as_a_cause() -> None:
    class Meddling(Meter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            model.weight.data.zero_()

    model = nn.Linear(2, 2)
    image = capture(Tree({"meter": Meddling(), "model": model}))
    with pytest.raises(DamagedError, match="of meter changed them, or the copy"):
        fill(Tree({"meter": Meddling(), "model": model}), snapshot_of(image), 1)


def test_values_that_differ_at_each_call_are_ignored() -> None:
    class Clock(Meter):
        ticks = itertools.count()

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "now": next(self.ticks)}

    saved, fresh = Clock(), Clock()
    saved.count = 7
    restore(Tree({"meter": fresh}), capture(Tree({"meter": saved})))
    assert fresh.count == 7


class Momentum(Optimizer):
    """Keeps its momentum in float32 for parameters of any dtype."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            held = self.state[parameter].get("m", torch.zeros(parameter.shape))
            self.state[parameter]["m"] = held * 0.9 + 0.3337


class Casting(Momentum):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)


def trained(kind: type[Momentum], hook: bool) -> tuple[nn.Module, Momentum, Tree]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).bfloat16()
    optimizer = kind(model.parameters())
    if hook:
        optimizer.register_state_dict_post_hook(lambda *_: None)
    return model, optimizer, Tree({"model": model, "optimizer": optimizer})


def test_hooks_of_an_optimizer_are_not_called(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer, tree = trained(Momentum, hook=True)
    assert "hooks on state_dict and load_state_dict of a Momentum are not called" in caplog.text
    optimizer.step()
    image = capture(tree)
    _, _, again = trained(Momentum, hook=True)
    restore(again, image)
    assert_same(tree, again)


def test_a_load_state_dict_that_casts_is_refused() -> None:
    _, optimizer, tree = trained(Casting, hook=False)
    optimizer.step()
    with pytest.raises(StateError, match="was float32 .* and is bfloat16"):
        trained(Casting, hook=False)[2].restore(capture(tree).saved())


def test_attributes_of_an_optimizer_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flashckpt"):
        trained(Momentum, hook=False)
    assert "attributes of a Momentum are not saved (steps)" in caplog.text
    caplog.clear()
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 2)
    Tree({"model": model, "optimizer": sgd, "scheduler": scheduler})
    assert caplog.text == ""


def test_a_scaler_with_values_of_its_own_keeps_them() -> None:
    class Scaler(torch.amp.GradScaler):
        mine = 0

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "mine": self.mine}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            state = dict(state)
            self.mine = state.pop("mine")
            super().load_state_dict(state)

    scaler, other = Scaler("cpu"), Scaler("cpu")
    scaler.mine = 7
    restore(Tree({"scaler": other}), capture(Tree({"scaler": scaler})))
    assert other.mine == 7


def test_objects_that_can_be_changed_in_place_stay_the_same() -> None:
    def build() -> dict[str, Any]:
        return {
            "array": np.zeros((2, 3)),
            "grows": np.zeros(2),
            "readonly": np.frombuffer(bytes(8), np.uint8),
            "set": {1, 2},
            "bytes": bytearray(4),
            "counter": Counter(a=1),
            "tuple": (np.zeros(2, np.int16),),
        }

    state, other = build(), build()
    state["array"][1] = [np.nan, -0.0, 3]
    state["grows"] = np.ones(5)
    state["readonly"] = np.frombuffer(b"abcdefgh", np.uint8)
    state["set"] = {"x"}
    state["bytes"] += b"tail"
    state["counter"].update("bb")
    state["tuple"][0][:] = 5
    tree, again = Tree({"state": state}), Tree({"state": other})
    before, inner = dict(other), other["tuple"][0]
    restore(again, capture(tree))
    assert_same(tree, again)
    kept = {key for key in other if other[key] is before[key]}
    assert kept == {"array", "set", "bytes", "counter"}
    assert other["tuple"][0] is inner


def test_a_named_counter_is_changed_in_place() -> None:
    counter, other = Counter(a=3), Counter(b=1)
    restore(Tree({"seen": other}), capture(Tree({"seen": counter})))
    assert other == counter


def test_one_array_in_the_places_of_two_saved_ones() -> None:
    shared: Any = np.zeros(2)
    other = {"a": shared, "b": shared}
    restore(Tree({"s": other}), capture(Tree({"s": {"a": np.zeros(2), "b": np.ones(2)}})))
    assert (other["a"].tolist(), other["b"].tolist()) == ([0, 0], [1, 1])


def test_a_leaf_without_an_owner_is_reported() -> None:
    held: dict[str, Tensor | int] = {"x": torch.ones(2)}
    saved = capture(Tree({"s": held})).saved()
    saved.value["entries"]["s"]["state"]["x"] = 1
    with pytest.raises(DamagedError, match="belong to no object"):
        Tree({"s": held}).restore(saved)
