"""The conditions of a plan: leaves, guards and anchors detect each change of structure."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flashckpt.capture.plan import Plan
from flashckpt.format.typed import encode_json
from flashckpt.state.tree import Tree
from tests.state.image import all_used_up, none_used_up


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("late", None)


CHANGES: dict[str, Callable[[Model, torch.optim.Optimizer, Any], object]] = {
    "replaced parameter": lambda m, o, s: setattr(m.body[0], "weight", nn.Parameter(torch.zeros(2, 2))),
    "untied": lambda m, o, s: setattr(m.head, "weight", nn.Parameter(torch.zeros(4, 2))),
    "new parameter": lambda m, o, s: m.register_parameter("more", nn.Parameter(torch.zeros(1))),
    "replaced module": lambda m, o, s: setattr(m, "head", nn.Linear(2, 4)),
    "new module": lambda m, o, s: m.body.append(nn.Linear(2, 2)),
    "buffer filled": lambda m, o, s: setattr(m, "late", torch.ones(1)),
    "buffer replaced": lambda m, o, s: setattr(m.body[1], "running_mean", torch.ones(2)),
    "new buffer": lambda m, o, s: m.register_buffer("x", torch.ones(1)),
    "new state": lambda m, o, s: o.state[m.embed.weight].update(more=torch.zeros(1)),
    "state of one replaced": lambda m, o, s: o.state.update({m.embed.weight: dict(o.state[m.embed.weight])}),
    "state gone": lambda m, o, s: o.state.pop(m.embed.weight),
    "state replaced": lambda m, o, s: o.load_state_dict(o.state_dict()),
    "new group": lambda m, o, s: o.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    "new option": lambda m, o, s: o.param_groups[0].update(rate=torch.zeros(1)),
    "parameter exchanged": lambda m, o, s: o.param_groups[0]["params"].__setitem__(
        0, nn.Parameter(torch.ones(1))
    ),
    "scale": lambda m, o, s: s.scale(torch.ones(1)),
}


def build() -> tuple[Model, torch.optim.Optimizer, Any, Tree]:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    model.head(model.body(model.embed(torch.tensor([0, 1])))).sum().backward()
    optimizer.step()
    return model, optimizer, scaler, Tree({"model": model, "optimizer": optimizer, "scaler": scaler})


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_structure_is_detected(change: str) -> None:
    """By a boundary, and by a comparison with a snapshot, which uses the last walk again."""
    model, optimizer, scaler, tree = build()
    plan, found = Plan(tree.walk(all_used_up)), tree.found()
    assert plan.update() == []
    assert tree.found() is found
    CHANGES[change](model, optimizer, scaler)
    assert plan.update() != []
    assert tree.found() is not found
    assert Plan(tree.found()).update() == []


def test_a_walk_for_a_snapshot_is_not_reused_for_comparisons() -> None:
    """In a snapshot, gradients that are still to be used are leaves."""
    _, _, _, tree = build()
    assert "gradient" in {leaf.kind for leaf in tree.walk(none_used_up).leaves}
    assert "gradient" not in {leaf.kind for leaf in tree.found().leaves}


def test_a_step_changes_no_structure() -> None:
    model, optimizer, _, tree = build()
    walk = tree.walk(all_used_up)
    plan = Plan(walk)
    optimizer.zero_grad()
    model.head(model.body(model.embed(torch.tensor([2, 1])))).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.125
    assert plan.update() == []
    values = encode_json(tree.values())
    assert tree.current is walk
    assert values == encode_json(tree.walk(all_used_up).value)


@pytest.mark.parametrize("change", ["new option", "scale", "new group"])
def test_values_walk_again_when_they_must(change: str) -> None:
    model, optimizer, scaler, tree = build()
    walk = tree.walk(all_used_up)
    CHANGES[change](model, optimizer, scaler)
    value = tree.values()
    assert tree.current is not walk
    assert tree.current.value is value


def test_a_value_that_becomes_a_tensor_is_detected() -> None:
    """LBFGS keeps numbers that become tensors, in lists of constant length."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"al": [None, None], "t": 1.0, "x": torch.zeros(1)}
    tree = Tree({"model": model, "optimizer": optimizer})
    walk = tree.walk(all_used_up)
    optimizer.state[model.weight]["al"][1] = torch.ones(2)
    tree.values()
    assert tree.current is not walk
    assert "optimizer.state.model.weight.al.1" in {leaf.name for leaf in tree.walk(all_used_up).leaves}
