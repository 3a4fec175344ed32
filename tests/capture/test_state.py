"""The capture of the real state tree: gradients, masks, several optimizers, dynamic leaves, DTensors."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashckpt import _native
from flashckpt.capture import Capture, Verdict
from flashckpt.capture.plan import Plan, local
from flashckpt.capture.schedule import Pace
from flashckpt.errors import StateError
from flashckpt.format.typed import encode_json
from flashckpt.memory.slot import SlotRing
from flashckpt.options import Options
from flashckpt.state.tree import Tree

from .content import Content, bytes_of, newest, resumed_dropping


class Loop:
    """Two linear layers, each with its own optimizer."""

    def __init__(self, ring: SlotRing, sealer: _native.Sealer, **named: Any) -> None:
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        self.one = torch.optim.AdamW(self.first.parameters())
        self.two = torch.optim.SGD(self.second.parameters(), lr=0.1, momentum=0.9)
        named = {"first": self.first, "second": self.second, "one": self.one, "two": self.two, **named}
        self.tree, self.ring, self.sealer, self.step = Tree(named), ring, sealer, 0
        optimizers = self.tree.optimizers
        self.capture = Capture(self.tree, ring, sealer, Options(), optimizers=optimizers, schedule=Pace(1))
        resumed_dropping(self.capture)

    def backward(self) -> None:
        self.second(self.first(torch.randn(3, 4))).sum().backward()

    def zero_grad(self) -> None:
        self.one.zero_grad()
        self.two.zero_grad()

    def values(self) -> bytes:
        return encode_json(self.tree.values(self.capture.hooks.used_up))

    def boundary(self, **how: Any) -> Content:
        self.step += 1
        outcome = self.capture.boundary(self.step, self.values, **how)
        assert outcome.captured, outcome
        assert self.sealer.drain(240)
        content = newest(self.ring)
        assert content.step == self.step
        assert content.torn == []
        for live in self.tree.current.leaves:
            assert content.leaves[live.name] == bytes_of(live.tensor), live.name
        return content


@pytest.fixture
def loop(ring: SlotRing, sealer: _native.Sealer) -> Iterator[Loop]:
    loop = Loop(ring, sealer)
    yield loop
    loop.capture.close()


def gradients(content: Content) -> set[str]:
    return {name for name in content.leaves if name.startswith("gradients.")}


def mask(content: Content) -> str:
    text = json.loads(content.values)
    found: list[str] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("kinds"), str):
                found.append(value["kinds"])
            for inner in value.values():
                look(inner)
        elif isinstance(value, list):
            for inner in value:
                look(inner)

    look(text)
    assert len(found) == 1, content.values
    return found[0]


def test_gradients_of_the_optimizer_that_did_not_step_are_leaves(loop: Loop) -> None:
    loop.backward()
    loop.one.step()
    content = loop.boundary()
    assert gradients(content) == {"gradients.second.weight", "gradients.second.bias"}
    loop.one.zero_grad()
    loop.two.step()
    assert gradients(loop.boundary()) == set()


def test_an_ordered_snapshot_in_an_accumulation_has_every_gradient(loop: Loop) -> None:
    loop.backward()
    assert len(gradients(loop.boundary(ordered=True))) == 4
    loop.backward()  # onto the same gradients, by the same objects
    assert len(gradients(loop.boundary(ordered=True))) == 4


def test_gradients_after_the_step_are_leaves_again(loop: Loop) -> None:
    loop.backward()
    loop.one.step()
    loop.two.step()
    assert gradients(loop.boundary()) == set()
    loop.zero_grad()
    loop.backward()
    loop.one.step()
    loop.two.step()
    loop.backward()
    assert len(gradients(loop.boundary())) == 4


def test_used_up_gradients_are_not_leaves(loop: Loop) -> None:
    loop.backward()
    loop.one.step()
    loop.two.step()
    assert gradients(loop.boundary()) == set()
    loop.zero_grad()
    loop.backward()
    assert len(gradients(loop.boundary(ordered=True))) == 4
    loop.one.step()
    loop.two.step()
    assert gradients(loop.boundary()) == set()


def test_the_mask_is_that_of_this_boundary(loop: Loop) -> None:
    """An idle expert's decay depends on whether it has a gradient."""
    loop.backward()
    loop.one.step()
    loop.two.step()
    assert mask(loop.boundary()) == "dddd"
    loop.zero_grad()
    loop.backward()
    loop.first.bias.grad = None
    loop.one.step()
    loop.two.step()
    assert mask(loop.boundary()) == "d-dd"
    loop.zero_grad()
    loop.backward()
    loop.one.step()
    loop.two.step()
    assert mask(loop.boundary()) == "dddd"
    loop.second.zero_grad()
    assert mask(loop.boundary(ordered=True)) == "dd--"


def test_accumulation_is_not_captured_unless_it_was_ordered(loop: Loop) -> None:
    loop.backward()
    outcome = loop.capture.boundary(1, loop.values)
    assert outcome.verdict is Verdict.NOT_QUALIFIED
    loop.step = 1
    loop.one.step()
    loop.boundary()


class Meter:
    """State that each `state_dict` call creates again."""

    def __init__(self) -> None:
        self.total = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total.clone(), "scale": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def test_leaves_created_at_each_read_are_those_of_this_boundary(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    meter = Meter()
    loop = Loop(ring, sealer, meter=meter)
    for step in range(5):
        meter.total = torch.full((3 + step // 3,), float(step))
        loop.backward()
        loop.one.step()
        loop.two.step()
        content = loop.boundary()
        assert content.leaves["meter.total"] == bytes_of(meter.total)
    loop.capture.close()


def test_optimizer_state_that_grows_changes_the_plan(ring: SlotRing, sealer: _native.Sealer) -> None:
    """LBFGS's history is a list that grows."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=4)
    tree = Tree({"model": model, "optimizer": optimizer})
    capture = Capture(tree, ring, sealer, Options(), optimizers=tree.optimizers, schedule=Pace(1))
    inputs = torch.randn(8, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - 1).pow(2).sum()
        loss.backward()
        return loss

    counts = []
    for step in range(1, 5):
        optimizer.step(closure)
        assert capture.boundary(step, lambda: encode_json(tree.values())).captured
        assert sealer.drain(240)
        content = newest(ring)
        assert content.step == step
        for live in tree.current.leaves:
            assert content.leaves[live.name] == bytes_of(live.tensor)
        counts.append(len(content.leaves))
    assert counts[-1] > counts[0]
    capture.close()


def test_an_ended_tie_is_detected(ring: SlotRing, sealer: _native.Sealer) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    tree = Tree({"model": model})
    capture = Capture(tree, ring, sealer, Options(), schedule=Pace(1))
    for step in (1, 2):
        assert capture.boundary(step, lambda: encode_json(tree.values())).captured
        assert sealer.drain(240)
    assert len(newest(ring).leaves) == 1
    assert newest(ring).layout.leaves[0].aliases
    model[1].weight = torch.nn.Parameter(torch.randn(3, 3))
    assert capture.boundary(3, lambda: encode_json(tree.values())).captured
    assert sealer.drain(240)
    assert len(newest(ring).leaves) == 2
    capture.close()


class Average:
    """A teacher as users write it: `state_dict` returns the live tensors, and `.data` replaces their
    memory."""

    def __init__(self) -> None:
        self.shadow = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def test_a_moved_tensor_of_a_state_dict_is_read_at_its_new_address(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    average = Average()
    loop = Loop(ring, sealer, average=average)
    held = []
    for step in range(6):
        held.append(average.shadow.data)  # the old memory stays readable
        average.shadow.data = torch.full((3 + step // 3,), float(step))
        loop.backward()
        loop.one.step()
        loop.two.step()
        assert loop.boundary().leaves["average.shadow"] == bytes_of(average.shadow)
    loop.capture.close()


def emptied(average: Average, box: dict[str, Any], way: str) -> None:
    """A state object that holds no tensor any more."""
    if way == "an object":
        average.state_dict = dict  # type: ignore[method-assign, assignment]
    else:
        box["held"] = None


@pytest.mark.parametrize("way", ["an object", "a nested list"])
def test_a_tensor_removed_from_a_state_dict_is_not_a_leaf(
    ring: SlotRing, sealer: _native.Sealer, way: str
) -> None:
    """A step with a leaf that no value refers to cannot be resumed."""
    average, box = Average(), {"held": [torch.zeros(2)]}
    loop = Loop(ring, sealer, average=average, box=box)
    for step in range(3):
        if step == 2:
            emptied(average, box, way)
        loop.backward()
        loop.one.step()
        loop.two.step()
        content = loop.boundary()
    name = "average.shadow" if way == "an object" else "box.held.0"
    assert name not in content.leaves
    assert len({"average.shadow", "box.held.0"} & content.leaves.keys()) == 1
    loop.capture.close()


@pytest.mark.parametrize("undone", [0, 1])
def test_an_ended_tie_by_memory_is_detected(ring: SlotRing, sealer: _native.Sealer, undone: int) -> None:
    """Two parameters over one memory, as `head.weight.data = embedding.weight.data` makes them."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight.data = model[0].weight.data
    tree = Tree({"model": model})
    capture = Capture(tree, ring, sealer, Options(), schedule=Pace(1))
    for step in (1, 2):
        if step == 2:
            model[undone].weight.data = torch.randn(3, 3)
        assert capture.boundary(step, lambda: encode_json(tree.values())).captured
        assert sealer.drain(240)
    content = newest(ring)
    for place in (0, 1):
        assert content.leaves[f"model.{place}.weight"] == bytes_of(model[place].weight)
    capture.close()


def test_a_tie_ended_in_its_first_place_is_detected(ring: SlotRing, sealer: _native.Sealer) -> None:
    model = torch.nn.Module()
    model.register_buffer("first", torch.zeros(3))
    model.register_buffer("second", model.first)
    tree = Tree({"model": model})
    capture = Capture(tree, ring, sealer, Options(), schedule=Pace(1))
    for step in (1, 2):
        if step == 2:
            model.first = torch.ones(3)
        assert capture.boundary(step, lambda: encode_json(tree.values())).captured
        assert sealer.drain(240)
    content = newest(ring)
    assert content.leaves["model.first"] == bytes_of(model.first)
    assert content.leaves["model.second"] == bytes_of(model.second)
    capture.close()


def test_the_gradient_of_a_parameter_in_anothers_place_is_a_leaf(
    ring: SlotRing, sealer: _native.Sealer
) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    tree = Tree({"model": model})
    capture = Capture(tree, ring, sealer, Options(), schedule=Pace(1))
    values = lambda: encode_json(tree.values(capture.hooks.used_up))  # noqa: E731
    assert capture.boundary(1, values).captured
    model.weight = torch.nn.Parameter(torch.randn(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert capture.boundary(2, values).captured
    assert sealer.drain(240)
    assert newest(ring).leaves["gradients.model.weight"] == bytes_of(model.weight.grad)
    capture.close()


class Restless:
    """Each `state_dict` call returns another number and another tensor of it, or even other names."""

    def __init__(self, *, renames: bool) -> None:
        self.calls, self.renames = 0, renames

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        name = f"made{self.calls % 2}" if self.renames else "made"
        return {"calls": self.calls, name: torch.tensor([self.calls])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def test_values_and_tensors_belong_to_one_call(ring: SlotRing, sealer: _native.Sealer) -> None:
    loop = Loop(ring, sealer, restless=Restless(renames=False))
    for _ in range(2):
        content = loop.boundary(ordered=True)
        calls = json.loads(content.values)["entries"]["restless"]["state"]["calls"]
        assert content.leaves["restless.made"] == bytes_of(torch.tensor([calls]))
    loop.capture.close()


def test_a_state_that_changes_at_each_read_is_not_captured(ring: SlotRing, sealer: _native.Sealer) -> None:
    """A sealed snapshot would refer to missing tensors, and no step of the run could be resumed."""
    loop = Loop(ring, sealer, restless=Restless(renames=True))
    with pytest.raises(StateError, match="replaced at each read"):
        loop.capture.boundary(1, loop.values, ordered=True)
    assert ring.newest_sealed() is None
    loop.capture.close()


def test_a_tensor_moved_to_another_device_is_planned_again() -> None:
    """`model.cuda()` keeps the objects. A device pointer must never be read as a host pointer."""
    from .content import Live, Walk

    box = {"w": torch.zeros(4)}
    plan = Plan(Walk([Live("w", box["w"], "buffer", None, box, "w")], [], []))
    torch.utils.swap_tensors(box["w"], torch.zeros(4, device="meta"))
    assert plan.update() is None
    plan.release()


class Sharded(torch.Tensor):
    """Like a DTensor: a tensor without memory of its own around a local tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Sharded:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made._local_tensor = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} must not be called: it could be a collective")


def test_the_local_tensor_of_a_dtensor_is_copied_and_watched() -> None:
    from .content import Live, Walk

    sharded = Sharded(torch.arange(4.0))
    box = {"w": sharded}
    assert local(sharded).data_ptr() != 0
    live = Live("w", sharded, "parameter", None, box, "w")
    plan = Plan(Walk([live], [], []))
    assert int(plan.addresses[0]) == sharded._local_tensor.data_ptr()
    assert plan.update() == []
    sharded._local_tensor = torch.arange(4.0) + 1
    assert plan.update() == [0]
    assert int(plan.addresses[0]) == sharded._local_tensor.data_ptr()
    plan.release()


def test_a_boundary_with_a_valid_plan_allocates_nothing(ring: SlotRing, sealer: _native.Sealer) -> None:
    """Small Python objects are temporary; no object stays, and none is as large as a leaf."""
    loop = Loop(ring, sealer, more=torch.nn.Linear(500, 500))
    loop.backward()
    loop.one.step()
    loop.two.step()
    values = loop.values()
    for step in range(1, 6):
        assert loop.capture.boundary(step, lambda: values, ordered=True).captured
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for step in range(6, 30):
        assert loop.capture.boundary(step, lambda: values, ordered=True).captured
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 20_000
    assert peak - before < 100_000  # a leaf of the model has a million bytes
    loop.capture.close()
