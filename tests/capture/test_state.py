"""The capture of the real state tree: gradients, masks, several optimizers, dynamic leaves, ties."""

import json
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from flashckpt import _native
from flashckpt.capture import Capture, Verdict
from flashckpt.capture.plan import Plan
from flashckpt.capture.schedule import Pace
from flashckpt.errors import StateError
from flashckpt.format.typed import encode_json
from flashckpt.memory.slot import SlotRing
from flashckpt.options import Options
from flashckpt.state.tree import Tree
from tests.state.image import all_used_up, restore
from tests.state.image import capture as image_of

from .content import Content, bytes_of, newest, resumed_dropping


class Run:
    """A state and its capture. Each snapshot is compared with the live leaves."""

    def __init__(self, ring: SlotRing, sealer: _native.Sealer, **named: Any) -> None:
        self.tree, self.ring, self.sealer, self.step = Tree(named), ring, sealer, 0
        optimizers = self.tree.optimizers
        self.capture = Capture(self.tree, ring, sealer, Options(), optimizers=optimizers, schedule=Pace(1))
        resumed_dropping(self.capture)

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


class Loop(Run):
    """Two linear layers, each with its own optimizer."""

    def __init__(self, ring: SlotRing, sealer: _native.Sealer, **named: Any) -> None:
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        self.one = torch.optim.AdamW(self.first.parameters())
        self.two = torch.optim.SGD(self.second.parameters(), lr=0.1, momentum=0.9)
        named = {"first": self.first, "second": self.second, "one": self.one, "two": self.two, **named}
        super().__init__(ring, sealer, **named)

    def backward(self) -> None:
        self.second(self.first(torch.randn(3, 4))).sum().backward()

    def train(self) -> None:
        self.one.zero_grad()
        self.two.zero_grad()
        self.backward()
        self.one.step()
        self.two.step()


@pytest.fixture
def start(ring: SlotRing, sealer: _native.Sealer) -> Iterator[Callable[..., Any]]:
    """Runs of a kind, whose captures are closed in the end."""
    started: list[Run] = []

    def begin(kind: type[Run] = Run, **named: Any) -> Run:
        started.append(kind(ring, sealer, **named))
        return started[-1]

    yield begin
    for run in started:
        run.capture.close()


Start = Callable[..., Any]


@pytest.fixture
def loop(start: Start) -> Loop:
    return start(Loop)  # type: ignore[no-any-return]


def gradients(content: Content) -> set[str]:
    return {name for name in content.leaves if name.startswith("gradients.")}


def mask(content: Content) -> str:
    return str(json.loads(content.values)["gradients"]["kinds"])


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
    assert loop.capture.boundary(0, loop.values).verdict is Verdict.NOT_QUALIFIED
    assert len(gradients(loop.boundary(ordered=True))) == 4
    loop.backward()  # onto the same gradients, by the same objects
    assert len(gradients(loop.boundary(ordered=True))) == 4


def test_gradients_after_the_step_are_leaves_again(loop: Loop) -> None:
    loop.train()
    assert gradients(loop.boundary()) == set()
    loop.train()
    loop.backward()
    assert len(gradients(loop.boundary())) == 4


def test_the_mask_is_that_of_this_boundary(loop: Loop) -> None:
    """An idle expert's decay depends on whether it has a gradient."""
    loop.train()
    assert mask(loop.boundary()) == "dddd"
    loop.train()
    loop.first.bias.grad = None
    assert mask(loop.boundary()) == "d-dd"
    loop.train()
    assert mask(loop.boundary()) == "dddd"
    loop.second.zero_grad()
    assert mask(loop.boundary(ordered=True)) == "dd--"


class Meter:
    """State that each `state_dict` call creates again."""

    def __init__(self) -> None:
        self.total = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total.clone(), "scale": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def test_leaves_created_at_each_read_are_those_of_this_boundary(start: Start) -> None:
    meter = Meter()
    loop = start(Loop, meter=meter)
    for step in range(5):
        meter.total = torch.full((3 + step // 3,), float(step))
        loop.train()
        assert loop.boundary().leaves["meter.total"] == bytes_of(meter.total)


class Preconditioned(torch.optim.Optimizer):
    """Keeps tensors in a container that each step creates again, as SOAP does with its bases."""

    def __init__(self, parameters: Iterable[Any], kept_in: type) -> None:
        super().__init__(parameters, {})
        self._kept_in = kept_in

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            now = torch.randn(4)
            self.state[parameter]["bases"] = {"0": now} if self._kept_in is dict else self._kept_in([now])


@pytest.mark.parametrize("kept_in", [list, tuple, deque, dict])
def test_tensors_in_a_container_created_by_each_step_are_captured_and_restored(
    start: Start, kept_in: type
) -> None:
    """Those of the plan's first step were captured, with good digests."""

    def made() -> dict[str, Any]:
        model = torch.nn.Linear(4, 4, bias=False)
        return {"model": model, "optimizer": Preconditioned(model.parameters(), kept_in)}

    def kept(named: dict[str, Any]) -> torch.Tensor:
        bases = named["optimizer"].state[named["model"].weight]["bases"]
        assert type(bases) is kept_in
        [base] = bases.values() if kept_in is dict else bases
        return base

    named, other = made(), made()
    run = start(**named)
    for _ in range(4):
        named["optimizer"].step()
        content = run.boundary(ordered=True)
        assert content.leaves["optimizer.state.model.weight.bases.0"] == bytes_of(kept(named))
    restore(Tree(other), image_of(run.tree))
    assert torch.equal(kept(other), kept(named))


class Average:
    """A teacher as users write it: `state_dict` returns the live tensors, and `.data` replaces their
    memory."""

    def __init__(self) -> None:
        self.shadow = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def test_a_moved_tensor_of_a_state_dict_is_read_at_its_new_address(start: Start) -> None:
    average = Average()
    loop, held = start(Loop, average=average), []
    for step in range(6):
        held.append(average.shadow.data)  # the old memory stays readable
        average.shadow.data = torch.full((3 + step // 3,), float(step))
        loop.train()
        assert loop.boundary().leaves["average.shadow"] == bytes_of(average.shadow)


@pytest.mark.parametrize("gone", ["average.shadow", "box.held.0"])
def test_a_tensor_removed_from_a_state_dict_is_not_a_leaf(start: Start, gone: str) -> None:
    """A step with a leaf that no value refers to cannot be resumed."""
    average, box = Average(), {"held": [torch.zeros(2)]}
    loop = start(Loop, average=average, box=box)
    for step in range(3):
        if step == 2 and gone == "average.shadow":
            average.state_dict = dict  # type: ignore[method-assign, assignment]
        elif step == 2:
            box["held"] = None  # type: ignore[assignment]
        loop.train()
        content = loop.boundary()
    assert {"average.shadow", "box.held.0"} - content.leaves.keys() == {gone}


@pytest.mark.parametrize("undone", [0, 1])
@pytest.mark.parametrize("by", ["object", "memory"])
def test_an_ended_tie_is_detected(start: Start, by: str, undone: int) -> None:
    """In either place; also of two parameters over one memory, as `head.weight.data = embedding.weight.data`
    makes them."""
    first, second = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    if by == "object":
        second.weight = first.weight
    else:
        second.weight.data = first.weight.data
    model = torch.nn.Sequential(first, second)
    run = start(model=model)
    [leaf] = run.boundary().layout.leaves
    assert leaf.aliases
    if by == "object":
        model[undone].weight = torch.nn.Parameter(torch.randn(3, 3))
    else:
        model[undone].weight.data = torch.randn(3, 3)
    content = run.boundary()
    for place in (0, 1):
        assert content.leaves[f"model.{place}.weight"] == bytes_of(model[place].weight)


def test_the_gradient_of_a_parameter_in_anothers_place_is_a_leaf(start: Start) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    run = start(model=model)
    run.boundary()
    model.weight = torch.nn.Parameter(torch.randn(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert run.boundary().leaves["gradients.model.weight"] == bytes_of(model.weight.grad)


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


def test_values_and_tensors_belong_to_one_call(start: Start) -> None:
    loop = start(restless=Restless(renames=False))
    for _ in range(2):
        content = loop.boundary(ordered=True)
        calls = json.loads(content.values)["entries"]["restless"]["state"]["calls"]
        assert content.leaves["restless.made"] == bytes_of(torch.tensor([calls]))


def test_a_state_that_changes_at_each_read_is_not_captured(start: Start, ring: SlotRing) -> None:
    """A sealed snapshot would refer to missing tensors, and no step of the run could be resumed."""
    loop = start(restless=Restless(renames=True))
    with pytest.raises(StateError, match="replaced at each read"):
        loop.capture.boundary(1, loop.values, ordered=True)
    assert ring.newest_sealed() is None


def test_a_tensor_moved_to_another_device_is_planned_again() -> None:
    """`model.cuda()` keeps the objects. A device pointer must never be read as a host pointer."""
    box = {"w": torch.zeros(4)}
    plan = Plan(Tree({"box": box}).walk(all_used_up))
    torch.utils.swap_tensors(box["w"], torch.zeros(4, device="meta"))
    assert plan.update() is None
    plan.release()


def test_a_boundary_with_a_valid_plan_allocates_nothing(start: Start) -> None:
    """Small Python objects are temporary; no object stays, and none is as large as a leaf."""
    loop = start(Loop, more=torch.nn.Linear(500, 500))
    loop.train()
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
