"""Gradients between two iterations: leaves while they are needed, later a mask of their kinds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashckpt.state.tree import Tree
from tests.state.image import all_used_up, capture, check_continues, none_used_up, restore

UsedUp = Callable[[Any, Tensor], bool]


class Experts(nn.Module):
    """Two experts; each input uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.experts[which](x)


def build(seed: int) -> tuple[Tree, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5, momentum=0.9)
    return Tree({"model": model, "optimizer": optimizer}), model, optimizer


@pytest.mark.parametrize("to_none", [True, False])
def test_an_idle_expert_decays_as_before_the_snapshot(to_none: bool) -> None:
    """Expert 0 is used only before the snapshot: with a gradient of zeros it still decays, without a gradient
    it does not."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad(set_to_none=to_none)
            model(torch.full((2, 3), float(step)), int(step >= 2)).square().mean().backward()
            optimizer.step()

    check_continues(build, train)


def test_accumulation_continues_in_the_middle() -> None:
    def micro(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            model(torch.full((2, 3), float(step)), step % 2).square().mean().backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    check_continues(build, micro, range(4), range(4, 9), none_used_up)


def test_a_parameter_named_grad_is_not_a_gradient() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(1))
    model.grad = nn.Parameter(torch.zeros(1))
    model.w.grad = torch.tensor([5.0])
    walk = Tree({"model": model}).walk(none_used_up)
    assert [leaf.name for leaf in walk.leaves] == ["model.w", "model.grad", "gradients.model.w"]


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("used_up", [all_used_up, none_used_up])
def test_sparse_gradients(coalesced: bool, used_up: UsedUp) -> None:
    def build() -> tuple[Tree, nn.Embedding]:
        table = nn.Embedding(6, 2, sparse=True)
        return Tree({"table": table}), table

    tree, table = build()
    table(torch.tensor([1, 1, 4])).sum().backward()
    assert table.weight.grad is not None
    if coalesced:
        table.weight.grad = table.weight.grad.coalesce()
    image = capture(tree, used_up)
    again, table2 = build()
    restore(again, image)
    got, expected = table2.weight.grad, table.weight.grad
    assert got.is_sparse
    if used_up is all_used_up:
        assert got._nnz() == 0
    else:
        assert got.is_coalesced() == coalesced
        assert torch.equal(got._indices(), expected._indices())
        assert torch.equal(got._values(), expected._values())


@pytest.mark.parametrize("used_up", [all_used_up, none_used_up])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_new_gradients_and_state_have_the_strides_they_had(layout: Any, used_up: UsedUp) -> None:
    def build() -> tuple[Tree, nn.Conv2d, torch.optim.Optimizer]:
        torch.manual_seed(0)
        conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(conv.parameters())
        return Tree({"conv": conv, "optimizer": optimizer}), conv, optimizer

    tree, conv, optimizer = build()
    conv(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    conv.weight.grad = conv.weight.grad.contiguous(memory_format=layout)
    again, conv2, optimizer2 = build()
    restore(again, capture(tree, used_up))
    strides = conv.weight.stride()
    assert (conv.weight.grad.stride() == strides) == (layout is torch.channels_last)
    assert conv2.weight.grad.stride() == conv.weight.grad.stride()
    assert optimizer2.state[conv2.weight]["exp_avg"].stride() == strides


def test_gradients_of_parameters_that_only_an_optimizer_knows() -> None:
    def build(seed: int) -> tuple[Tree, Tensor, torch.optim.Optimizer]:
        w = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.Adam([w], lr=0.1)
        return Tree({"optimizer": optimizer}), w, optimizer

    def steps(w: Tensor, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            (w * (number + 1)).square().sum().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    tree, w, optimizer = build(0)
    steps(w, optimizer, range(3))
    walk = tree.walk(none_used_up)
    assert {leaf.name for leaf in walk.leaves} == {
        "optimizer.params.group0[0]",
        "optimizer.state.group0[0].step",
        "optimizer.state.group0[0].exp_avg",
        "optimizer.state.group0[0].exp_avg_sq",
        "gradients.optimizer.params.group0[0]",
    }
    check_continues(build, steps, used_up=none_used_up)
