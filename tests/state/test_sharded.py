"""FSDP2's parameters: the local part is the leaf, and the optimizer's state comes back as DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flashckpt.state.tree import Tree
from tests.state.image import assert_same, capture, restore

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.dist]


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def build(mesh: Any, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Tree]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, Tree({"model": model, "optimizer": optimizer})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.full((2, 3), float(step))).square().mean().backward()
        optimizer.step()


def test_sharded_parameters_and_their_state(mesh: Any) -> None:
    model, optimizer, tree = build(mesh, 0)
    train(model, optimizer, range(3))
    image = capture(tree)
    names = {leaf.name for leaf in image.layout.leaves}
    assert {"model.0.weight", "optimizer.state.0.weight.exp_avg"} <= names
    train(model, optimizer, range(3, 5))
    model2, optimizer2, again = build(mesh, 1)
    restore(again, image)
    train(model2, optimizer2, range(3, 5))
    assert_same(tree, again)
