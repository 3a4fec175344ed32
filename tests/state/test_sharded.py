"""FSDP2's parameters: the local tensor is the leaf, and the optimizer's state is restored as DTensors."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flashckpt.capture.plan import Plan
from flashckpt.errors import StateError
from flashckpt.state.tree import Tree
from tests.state.image import all_used_up, capture, check_continues

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.dist]


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def build(mesh: Any, seed: int) -> tuple[Tree, nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    return Tree({"model": model, "optimizer": optimizer}), model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.full((2, 3), float(step))).square().mean().backward()
        optimizer.step()


def test_sharded_parameters_and_their_state(mesh: Any) -> None:
    tree, model, optimizer = build(mesh, 0)
    train(model, optimizer, range(1))
    names = {leaf.name for leaf in capture(tree).layout.leaves}
    assert {"model.0.weight", "optimizer.state.model.0.weight.exp_avg"} <= names
    check_continues(partial(build, mesh), train)


def test_unreduced_gradients_are_refused(mesh: Any) -> None:
    """Between two backward passes of an accumulation, no parameter of the state shows them."""
    tree, model, optimizer = build(mesh, 0)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(StateError, match="model has gradients that FSDP2 has accumulated"):
        tree.values()
    with pytest.raises(StateError):
        capture(tree)
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 3)).sum().backward()
    capture(tree)
    optimizer.step()
    capture(tree)


def test_a_replaced_local_tensor_is_detected(mesh: Any) -> None:
    """As after a reshard into other memory: the parameter is the same object."""
    tree, model, optimizer = build(mesh, 0)
    train(model, optimizer, range(2))
    plan = Plan(tree.walk(all_used_up))
    index = next(i for i, leaf in enumerate(plan.leaves) if leaf.name == "model.0.weight")
    assert plan.tensors[index] is model[0].weight._local_tensor
    assert plan.update() == []
    model[0].weight._local_tensor = model[0].weight._local_tensor.clone()
    assert plan.update() == [index]
    assert plan.tensors[index] is model[0].weight._local_tensor
    assert int(plan.addresses[index]) == model[0].weight._local_tensor.data_ptr()
    with torch.no_grad():
        model(torch.ones(2, 3))  # the modules may show other tensors now: the new plan has the same leaves
    again = Plan(tree.walk(all_used_up))
    assert again.plan_id == plan.plan_id
    plan.release()
    again.release()
