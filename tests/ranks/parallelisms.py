"""Ranks that train under one parallelism after the other, each a snapshot's worth of leaves.

`python -m tests.ranks.rank tests.ranks.parallelisms CASE...`. Of each case a state is trained, walked into
bytes and trained on; another is built from another seed, restored from these bytes, and trained on: both are
equal to the bit. Prints "leaves CASE JSON", what the leaves say of themselves, and "same CASE".
"""

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flashckpt.state.tree import Tree, Walk
from tests.state.image import Image, all_used_up, assert_same, raw_bytes, restore

BEFORE, AFTER = 3, 2


class Job(NamedTuple):
    """What is trained: the named objects of its state, and one step of it, by its number."""

    state: dict[str, Any]
    step: Callable[[int], None]


CASES: dict[str, Callable[[int], Job]] = {}


def case(build: Callable[[int], Job]) -> Callable[[int], Job]:
    CASES[build.__name__] = build
    return build


class Net(nn.Module):
    """Sizes that no number of ranks but one divides, and fewer rows than four ranks."""

    def __init__(self, seed: int, hidden: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.norm, self.down = nn.Linear(5, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(torch.relu(self.up(x))))  # type: ignore[no-any-return]


def batch(step: int, part: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * step + part))


def job(
    net: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    part: int | None = None,
    after: Callable[[int], None] = lambda step: None,
    *,
    zeroes: bool = True,
) -> Job:
    """A plain loop; `part` of the data is this rank's own, unless it is told. Without `zeroes` gradients add
    up over the run."""
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=0.01)
    part = dist.get_rank() if part is None else part

    def step(number: int) -> None:
        if zeroes:
            optimizer.zero_grad()
        net(batch(number, part)).square().mean().backward()
        optimizer.step()
        after(number)

    return Job({"model": net, "optimizer": optimizer}, step)


def mesh_of(*names: str) -> DeviceMesh:
    """All ranks in one dimension, or two by the rest."""
    world = dist.get_world_size()
    return init_device_mesh("cpu", (world,) if len(names) == 1 else (2, world // 2), mesh_dim_names=names)


# Replicas


def replicated(net: nn.Module) -> nn.Module:
    """Without the buckets that DDP makes anew after its first step: on more than two ranks it then sums in
    another order than a fresh one does."""
    return nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)


@case
def ddp(seed: int) -> Job:
    net = nn.Sequential(Net(seed), nn.BatchNorm1d(3))
    net[0].down.bias.requires_grad_(False)
    return job(replicated(net))


@case
def ddp_never_zeroed(seed: int) -> Job:
    return job(replicated(Net(seed)), zeroes=False)


@case
def ddp_with_experts(seed: int) -> Job:
    """What DDP is told to leave alone is each rank's own."""
    net = nn.Sequential(Net(seed), nn.Linear(3, 3))
    torch.manual_seed(seed + dist.get_rank())
    nn.init.normal_(net[1].weight)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.weight"])
    return job(replicated(net))


# FSDP2


def sharded(net: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for child in net.children():
        fully_shard(child, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


@case
def fsdp2(seed: int) -> Job:
    return job(sharded(Net(seed), mesh_of("data")))


@case
def fsdp2_never_zeroed(seed: int) -> Job:
    return job(sharded(Net(seed), mesh_of("dp")), zeroes=False)


@case
def fsdp2_of_columns(seed: int) -> Job:
    mesh, columns = mesh_of("data"), 4 * dist.get_world_size()
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, columns, bias=False), nn.Linear(columns, 3, bias=False))
    from torch.distributed.fsdp import fully_shard

    fully_shard(net[1], mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))
    fully_shard(net, mesh=mesh)
    return job(net)


@case
def fsdp2_tied(seed: int) -> Job:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 5, bias=False), nn.ReLU(), nn.Linear(5, 5, bias=False))
    net[2].weight = net[0].weight
    from torch.distributed.fsdp import fully_shard

    return job(fully_shard(net, mesh=mesh_of("data")))


@case
def fsdp2_evaluated(seed: int) -> Job:
    """After each step the modules show other parameters: the whole ones."""
    net = sharded(Net(seed), mesh_of("data"), reshard_after_forward=False)

    def evaluate(step: int) -> None:
        with torch.no_grad():
            net(batch(99, step))
        assert not isinstance(net.up.weight, DTensor)

    return job(net, after=evaluate)


@case
def fsdp2_evaluated_on_fewer(seed: int) -> Job:
    """After each step the modules show other parameters: those of a smaller mesh."""
    net = sharded(Net(seed, 8), mesh_of("data"), reshard_after_forward=dist.get_world_size() // 2)

    def evaluate(step: int) -> None:
        with torch.no_grad():
            net(batch(99, step))
        assert dist.get_world_size() == 2 or net.up.weight.device_mesh.ndim == 2

    return job(net, after=evaluate)


@case
def fsdp2_unsharded(seed: int) -> Job:
    """Each rank has gathered the whole ones before the state is looked at for the first time, too."""
    net = sharded(Net(seed), mesh_of("data"))
    made = job(net, after=lambda step: net.up.unshard())
    net.up.unshard()
    return made


@case
def hsdp(seed: int) -> Job:
    return job(sharded(Net(seed), mesh_of("replicate", "shard")))


# Tensor parallelism, and both


def tensor_parallel(net: Net, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {
        "up": ColwiseParallel(output_layouts=Shard(0), use_local_output=True),
        "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "down": RowwiseParallel(input_layouts=Shard(0), use_local_output=True),
    }
    return parallelize_module(net, mesh, plan)


@case
def tp(seed: int) -> Job:
    return job(tensor_parallel(Net(seed, 8), mesh_of("tensor")), part=0)


@case
def tp_uneven(seed: int) -> Job:
    return job(tensor_parallel(Net(seed, 6), mesh_of("tensor")), part=0)


@case
def fsdp2_and_tp(seed: int) -> Job:
    mesh = mesh_of("data", "tensor")
    net = tensor_parallel(Net(seed, 8), mesh["tensor"])
    return job(sharded(net, mesh["data"]), part=mesh.get_local_rank("data"))


# Parts of a model


@case
def pipeline(seed: int) -> Job:
    """Each rank has some of the layers, under the names that they have in the whole."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(seed)
    layers = nn.ModuleDict({str(number): nn.Linear(5, 5) for number in range(2 * world)})
    for number in list(layers):
        if int(number) // 2 != rank:
            del layers[number]
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        x = torch.zeros(4, 5)
        if rank:
            dist.recv(x, rank - 1)
            x.requires_grad_(True)
        else:
            x = batch(number, 0)
        y = x
        for layer in layers.values():
            y = torch.tanh(layer(y))
        if rank < world - 1:
            dist.send(y.detach(), rank + 1)
            gradient = torch.zeros(4, 5)
            dist.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            y.square().mean().backward()
        if rank:
            dist.send(x.grad, rank - 1)
        optimizer.step()

    return Job({"model": layers, "optimizer": optimizer}, step)


class Experts(nn.Module):
    """One expert for each rank and more, of one tensor."""

    def __init__(self, seed: int, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(seed)
        count = 2 * mesh.size() + 1
        whole = torch.randn(count, 5, 3)
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        self.gate = nn.Parameter(distribute_tensor(torch.randn(5, count), mesh, [Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        x = DTensor.from_local(x, self.weight.device_mesh, [Replicate()])
        each = (x[None, :, :, None] * self.weight[:, None]).sum(2)
        return (each * torch.softmax(x @ self.gate, -1).t()[..., None]).sum(0).full_tensor()


@case
def expert_parallel(seed: int) -> Job:
    return job(Experts(seed, mesh_of("expert")), part=0)


# An optimizer on DTensors


class Curvature(torch.optim.Optimizer):
    """A state that is not split as its parameter is: sums over its columns, replicated on the whole mesh."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad.detach()
                state = self.state[parameter]
                sums = gradient.full_tensor().square().reshape(gradient.shape[0], -1).sum(1)
                if not state:
                    mesh = parameter.device_mesh
                    state["rows"] = distribute_tensor(sums, mesh, [Replicate()] * mesh.ndim)
                    state["local"] = torch.zeros_like(parameter.to_local().detach())
                state["rows"].mul_(0.9).add_(distribute_tensor(sums, parameter.device_mesh, [Replicate()]))
                state["local"].add_(gradient.to_local())
                with torch.no_grad():
                    parameter.to_local().sub_(0.01 * state["local"] / (1 + state["rows"].to_local().sum()))


@case
def unlike_its_parameter(seed: int) -> Job:
    net = sharded(Net(seed), mesh_of("data"))
    return job(net, Curvature(net.parameters(), {"lr": 0.01}))


# FSDP1


def flat(seed: int, **options: Any) -> Job:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    net = Net(seed)
    policy = ModuleWrapPolicy({nn.Linear})
    net = FullyShardedDataParallel(net, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)
    return job(net)


@case
def fsdp1(seed: int) -> Job:
    return flat(seed, use_orig_params=True)


@case
def fsdp1_flat(seed: int) -> Job:
    return flat(seed, use_orig_params=False)


@case
def fsdp1_evaluated(seed: int) -> Job:
    """After each step the modules show views of what was gathered, in the place of their parameters."""
    from torch.distributed.fsdp import ShardingStrategy

    made = flat(seed, use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    net: Any = made.state["model"]

    def step(number: int) -> None:
        made.step(number)
        net(batch(99, number))
        assert not isinstance(net.module.up.weight, nn.Parameter)

    return made._replace(step=step)


# What is done with each


def check_boxes(walk: Walk) -> None:
    """Each leaf is that box of its whole tensor, which all ranks together gather."""
    gathered = 0
    for leaf in walk.leaves:
        whole = leaf.container
        if not isinstance(whole, DTensor):
            assert leaf.box is None or len(leaf.box.shape) == 1, leaf.name  # FSDP1's
            continue
        full = whole.detach().full_tensor()
        start = leaf.box.start if leaf.box is not None else (0,) * full.ndim
        assert leaf.box is None or leaf.box.shape == tuple(full.shape), leaf.name
        for dimension, (first, size) in enumerate(zip(start, leaf.tensor.shape, strict=True)):
            full = full.narrow(dimension, first, size)
        assert raw_bytes(full) == raw_bytes(leaf.tensor), leaf.name
        gathered += 1
    tell = [0] * dist.get_world_size()
    dist.all_gather_object(tell, gathered)
    assert len(set(tell)) == 1


def describe(walk: Walk) -> str:
    rows = [
        [
            leaf.name,
            str(leaf.tensor.dtype).removeprefix("torch."),
            list(leaf.tensor.shape),
            None if leaf.box is None else [list(leaf.box.shape), list(leaf.box.start)],
            list(leaf.replicas),
        ]
        for leaf in walk.leaves
    ]
    return json.dumps(rows)


def run(name: str) -> None:
    first, second = CASES[name](0), CASES[name](1)
    tree = Tree(first.state)
    for step in range(BEFORE):
        first.step(step)
    walk = tree.walk(all_used_up)
    check_boxes(walk)
    image = Image.of(walk)
    print(f"leaves {name} {describe(walk)}", flush=True)
    again = Tree(second.state)
    restore(again, image)
    for step in range(BEFORE, BEFORE + AFTER):
        first.step(step)
        second.step(step)
    assert_same(tree, again, all_used_up)
    print(f"same {name}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    try:
        for name in sys.argv[1:]:
            run(name)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
