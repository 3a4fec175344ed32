"""Objects that are neither modules nor plain optimizers: scalers, objects, dicts, generators, values."""

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import flashckpt.state.values  # noqa: F401
from flashckpt.errors import StateError
from flashckpt.state.tree import Tree
from tests.ids import shown
from tests.state.image import Image, all_used_up, assert_same, capture, check_continues, restore


class Metric:
    """An object with the two methods that keeps the state it gets."""

    def __init__(self) -> None:
        self.total = torch.zeros(3)
        self.seen: dict[int, float] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total.clone(), "seen": dict(self.seen), "nested": [(self.total * 2,), 3]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.seen = state["total"], state["seen"]


def test_an_object_gets_copies_of_its_own() -> None:
    metric = Metric()
    metric.total += 1.5
    metric.seen[3] = 0.25
    tree = Tree({"metric": metric})
    image = capture(tree)
    assert {leaf.name for leaf in image.layout.leaves} == {"metric.total", "metric.nested.0.0"}
    other = Metric()
    again = Tree({"metric": other})
    saved = image.saved()
    handed: list[Tensor] = []

    def tensor(name: str) -> Tensor:
        handed.append(saved.tensor(name))
        return handed[-1]

    again.restore(type(saved)(saved.leaves, saved.value, tensor))
    for view in handed:
        view.fill_(-9)
    assert_same(tree, again)
    assert other.seen == {3: 0.25}


def test_objects_come_last() -> None:
    """A load_state_dict may read the rest of the state, which is already restored."""
    model, held = nn.Linear(1, 1), {"count": 1}
    saw: list[tuple[float, int]] = []

    class Looking(Metric):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            saw.append((model.weight.item(), held["count"]))

    looking = Looking()
    tree = Tree({"looking": looking, "held": held, "model": model})
    image = capture(tree)
    weight = model.weight.item()
    with torch.no_grad():
        model.weight.add_(1)
    held["count"] = 2
    restore(tree, image)
    assert saw == [(weight, 1)]


def test_an_object_that_refuses_its_state_is_named() -> None:
    class Refusing(Metric):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("no")

    tree = Tree({"metric": Refusing()})
    with pytest.raises(StateError, match="metric did not restore its state.*must not continue to train"):
        tree.restore(capture(tree).saved())


@pytest.mark.parametrize("before", [0, 3])
def test_grad_scaler_without_its_state_dict(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise AssertionError("it synchronises the device")

    monkeypatch.setattr(torch.amp.GradScaler, "state_dict", refuse)

    def build() -> tuple[nn.Module, Optimizer, torch.amp.GradScaler, Tree]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", growth_interval=2, init_scale=8.0)
        return model, optimizer, scaler, Tree({"model": model, "optimizer": optimizer, "scaler": scaler})

    def train(model: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss = model(torch.full((1, 2), torch.inf if step == 4 else 1.0)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    *parts, tree = build()
    walk = tree.walk(all_used_up)
    train(*parts, range(before))
    value = tree.values()
    assert (tree.current is walk) == (before == 0)
    image = Image.of(tree.current or walk, value)
    train(*parts, range(before, 6))
    *parts2, again = build()
    restore(again, image)
    train(*parts2, range(before, 6))
    assert parts2[2].get_scale() == parts[2].get_scale()
    assert_same(tree, again)


def test_a_scaler_that_is_off_is_a_difference() -> None:
    on, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    image = capture(Tree({"scaler": on}))
    assert Tree({"scaler": off}).differences(image.saved()) == [
        ("scaler", "an enabled GradScaler", "a GradScaler that is not enabled")
    ]
    restore(Tree({"scaler": off}), capture(Tree({"scaler": off})))


def test_dicts_lists_tensors_and_generators_are_filled_in_place() -> None:
    def build() -> dict[str, Any]:
        return {
            "meters": {
                "best": 0.0,
                "history": deque([1.0], maxlen=3),
                "w": torch.zeros(2),
                5: [torch.ones(1)],
            },
            "queue": [torch.zeros(2), None],
            "tensor": torch.zeros(3),
            "generator": torch.Generator().manual_seed(1),
            "numpy": np.random.default_rng(1),
            "python": random.Random(1),
            "inner": {"rng": torch.Generator().manual_seed(2)},
        }

    state = build()
    state["meters"].update(best=float("nan"), more=(1, torch.full((1,), 2.0)))
    state["meters"]["history"].extend([2.0, 3.0, 4.0])
    state["queue"].append(torch.arange(3))
    state["tensor"].fill_(4)
    torch.rand(3, generator=state["generator"])
    torch.rand(3, generator=state["inner"]["rng"])
    state["numpy"].random(3)
    state["python"].random()
    tree = Tree(state)
    image = capture(tree)
    other = build()
    kept = {name: id(target) for name, target in other.items()}
    filled = other["meters"]["w"]
    inner = other["inner"]["rng"]
    again = Tree(other)
    restore(again, image)
    assert_same(tree, again)
    assert {name: id(target) for name, target in other.items()} == kept
    assert other["meters"]["w"] is filled
    assert other["inner"]["rng"] is inner
    assert torch.equal(torch.rand(2, generator=inner), torch.rand(2, generator=state["inner"]["rng"]))
    assert other["numpy"].random() == state["numpy"].random()
    assert other["python"].random() == state["python"].random()


def test_a_tensor_twice_in_a_dict_stays_one() -> None:
    shared = torch.zeros(2)
    image = capture(Tree({"d": {"a": shared, "b": [shared]}}))
    fresh: dict[str, Any] = {"a": torch.zeros(2), "b": [torch.zeros(2)]}
    restore(Tree({"d": fresh}), image)
    assert fresh["a"] is fresh["b"][0]


def test_tensors_that_share_part_of_their_memory_are_refused() -> None:
    base = torch.zeros(4)
    with pytest.raises(StateError, match="shares part of its memory"):
        Tree({"d": {"all": base, "part": base[1:3]}})
    Tree({"d": {"left": base[:2], "right": base[2:]}})


class OwnSaving(torch.optim.SGD):
    """Saves in its own form, as ZeRO and NamedOptimizer do."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "mine": [self.state[p].get("momentum_buffer") for g in self.param_groups for p in g["params"]]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for p, buffer in zip(self.param_groups[0]["params"], state["mine"], strict=True):
            self.state[p]["momentum_buffer"] = buffer


def test_an_optimizer_with_its_own_saving_uses_it() -> None:
    def build(seed: int) -> tuple[Tree, nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(2, 1)
        optimizer = OwnSaving(model.parameters(), lr=0.1, momentum=0.9)
        return Tree({"optimizer": optimizer, "model": model}), model, optimizer

    def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
        for _ in steps:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()

    check_continues(build, train)


class Wrapper(Optimizer):
    """Holds the real optimizer, as accelerate's wrapper does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


def test_a_wrapped_optimizer_is_unwrapped() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    tree = Tree({"model": model, "optimizer": Wrapper(optimizer)})
    assert tree.optimizers == [optimizer]
    with pytest.raises(StateError, match="a and b are the same Adam"):
        Tree({"a": optimizer, "b": Wrapper(optimizer)})


def test_optimizers_inside_backward_must_be_named() -> None:
    model = nn.Linear(2, 1)
    inner = {name: torch.optim.SGD([p], lr=0.1) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p._in_backward_optimizers = [inner[name]]  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="inside backward") as caught:
        Tree({"model": model, "o": inner["weight"]})
    assert caught.value.location == "model.bias"
    Tree({"model": model, "o": inner["weight"], "o2": inner["bias"]})


def test_two_optimizers_on_two_modules() -> None:
    def build(seed: int) -> tuple[Tree, list[nn.Module], list[Optimizer]]:
        torch.manual_seed(seed)
        modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
        both = [{"params": modules[0].parameters()}, {"params": modules[1].parameters(), "lr": 0.3}]
        optimizers = [torch.optim.Adam(both), torch.optim.Adagrad(modules[1].parameters())]
        named = {"g": modules[0], "d": modules[1], "both": optimizers[0], "one": optimizers[1]}
        return Tree(named), modules, optimizers

    def train(modules: list[nn.Module], optimizers: list[Optimizer], steps: range) -> None:
        for step in steps:
            modules[1](modules[0](torch.ones(1, 2))).square().sum().backward()
            for optimizer in optimizers[: 1 + step % 2]:
                optimizer.step()
                optimizer.zero_grad()

    tree, *parts = build(0)
    train(*parts, range(3))
    names = {leaf.name for leaf in capture(tree).layout.leaves}
    assert {"both.state.g.weight.exp_avg", "both.state.d.weight.exp_avg", "one.state.d.weight.sum"} <= names
    check_continues(build, train)


@pytest.mark.parametrize(
    "named",
    [{"x": 3}, {"x": "text"}, {"x": object()}, {"": {}}, {"gradients": {}}, {"a": {}, "a.b": {}}, {"!x": {}}],
    ids=shown,
)
def test_unsupported_objects_and_names_are_refused(named: dict[str, Any]) -> None:
    with pytest.raises(StateError):
        Tree(named)


def test_a_value_that_cannot_be_saved_is_refused_with_its_path() -> None:
    class Bad(Metric):
        def state_dict(self) -> dict[str, Any]:
            return {"a": [1, {"f": lambda: 0}]}

    with pytest.raises(StateError) as caught:
        Tree({"metric": Bad()})
    assert caught.value.location == "metric.state.a.1.f"


def test_tensors_made_in_inference_mode_are_filled() -> None:
    with torch.inference_mode():
        held = {"average": torch.ones(3)}
    tree = Tree({"held": held})
    image = capture(tree)
    with torch.inference_mode():
        held["average"].zero_()
    restore(tree, image)
    assert held["average"].tolist() == [1.0, 1.0, 1.0]


class Consolidating:
    """Puts a new parameter into the model at its nth state_dict call."""

    def __init__(self, model: nn.Linear, at: frozenset[int]) -> None:
        self.model, self.at, self.calls = model, at, 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        if self.calls in self.at:
            self.model.weight = nn.Parameter(self.model.weight.detach().clone())
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_parameter_replaced_during_state_dict_is_restored(at: int) -> None:
    source, model = nn.Linear(4, 4), nn.Linear(4, 4)
    image = capture(Tree({"model": source, "odd": Consolidating(source, frozenset())}))
    tree = Tree({"model": model, "odd": Consolidating(model, frozenset({at}))})
    saved = image.saved()
    assert not tree.differences(saved)
    tree.restore(saved)
    assert torch.equal(model.weight, source.weight)


def test_a_model_replaced_at_each_read_is_not_filled() -> None:
    source, model = nn.Linear(4, 4), nn.Linear(4, 4)
    image = capture(Tree({"model": source, "odd": Consolidating(source, frozenset())}))
    tree = Tree({"model": model, "odd": Consolidating(model, frozenset(range(99)))})
    saved, before = image.saved(), model.weight.detach().clone()
    assert not tree.differences(saved)
    with pytest.raises(StateError, match="replaced at each read"):
        tree.restore(saved)
    assert torch.equal(model.weight, before)


def test_a_parameter_replaced_after_the_comparison_is_restored() -> None:
    source, model = nn.Linear(4, 4), nn.Linear(4, 4)
    image, tree = capture(Tree({"model": source})), Tree({"model": model})
    saved = image.saved()
    assert not tree.differences(saved)
    model.weight = nn.Parameter(torch.zeros(4, 4))
    tree.restore(saved)
    assert torch.equal(model.weight, source.weight)
