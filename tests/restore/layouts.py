"""One state on many layouts, made in this process rank by rank: torch's process group that talks to nobody,
real modules, real DTensors. Every tensor is filled from one truth by its name and box, so that any rank of
any layout knows what it must hold.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from flashckpt.capture.plan import local
from flashckpt.format.typed import encode_json
from flashckpt.restore.step_tensors import TensorSlice
from flashckpt.state import rng
from flashckpt.state.leaves import LiveLeaf
from flashckpt.state.tensors import bits
from flashckpt.state.tree import Tree
from flashckpt.store.base import Store
from tests import run_view
from tests.restore.sharded import Held, committed


class Net(nn.Module):
    """Rows that no number of ranks divides, a tied weight, a buffer."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


@dataclass
class Live:
    """The state of one rank, as it is built."""

    tree: Tree
    model: nn.Module
    optimizer: torch.optim.Optimizer
    counters: dict[str, Any]


@contextmanager
def one_of(world: int, rank: int) -> Iterator[None]:
    """This process is that rank, for a while."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """torch keeps the meshes of DTensors that it has seen, and with them which rank this was."""
    from torch.distributed.tensor import debug  # imports dynamo

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:  # the first versions of torch that have DTensor
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()


STAGES = [["embed", "first"], ["second", "norm", "head"]]
# How many of these the first stage of a pipeline has.
EDGES = {"pp": 2, "pp of one": 1, "pp of three": 3}


def built(kind: str, world: int, *, is_tied: bool = True) -> Live:
    """A state whose tensors hold nothing yet. kind: "whole", "fsdp", "fsdp1", "fsdp1 flat", "hsdp",
    "fsdp+tp", or of EDGES."""
    model = Net(is_tied=is_tied)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "fsdp1":
        model.first = flat(model.first, use_orig_params=True)
        return live_of(model, flat(model, use_orig_params=True))
    elif kind == "fsdp1 flat":
        return live_of(model, flat(model, use_orig_params=False))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s")))
    elif kind == "fsdp+tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        _in_columns(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
    elif kind in EDGES:
        names = [name for stage in STAGES for name in stage]
        first, second = names[: EDGES[kind]], names[EDGES[kind] :]
        for name in second if dist.get_rank() == 0 else first:
            model._modules[name] = None
    return live_of(model)


def flat(module: nn.Module, *, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=use_orig_params)


def live_of(model: nn.Module, wrapped: nn.Module | None = None) -> Live:
    """A model with an optimizer of its stages and counters of its own."""
    optimizer = torch.optim.AdamW(_groups(model), lr=0.1)
    counters: dict[str, Any] = {"rank": -1, "seen": 0}
    wrapped = wrapped or model
    return Live(
        Tree({"model": wrapped, "optimizer": optimizer, "own": counters}), wrapped, optimizer, counters
    )


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """One for each stage, also where it is on another rank."""
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "lr": 0.5}]
    seen: set[int] = set()
    if "_flat_param" in model._parameters:
        groups[0]["params"].append(model._parameters["_flat_param"])
        return groups
    for group, names in zip(groups, STAGES, strict=True):
        modules = [model._modules[name] for name in names]
        for parameter in (each for module in modules if module is not None for each in module.parameters()):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                group["params"].append(parameter)
    return groups


def _in_columns(model: nn.Module, mesh: Any) -> None:
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def stepped(live: Live) -> None:
    """Make the optimizer's state, as its first step does."""
    for group in live.optimizer.param_groups:
        for parameter in group["params"]:
            # As in training: what FSDP1 has nothing of on this rank gets no gradient.
            parameter.grad = torch.zeros_like(parameter) if parameter.numel() else None
    live.optimizer.step()
    live.optimizer.zero_grad()


def truth_of(name: str, shape: tuple[int, ...], dtype: torch.dtype, salt: str = "") -> torch.Tensor:
    """What a tensor of this name holds, whole."""
    seed = np.random.default_rng(zlib.crc32(f"{salt}{name}".encode()))
    return torch.from_numpy(np.asarray(seed.integers(0, 100, shape))).to(dtype)


def region_of(leaf: LiveLeaf) -> TensorSlice:
    shape = tuple(local(leaf.tensor).shape)
    return TensorSlice(leaf.box.start if leaf.box is not None else (0,) * len(shape), shape)


def whole_shape(leaf: LiveLeaf) -> tuple[int, ...]:
    return leaf.box.shape if leaf.box is not None else tuple(local(leaf.tensor).shape)


def due(leaf: LiveLeaf, rank: int) -> torch.Tensor:
    """What a leaf of a rank must hold. Buffers are each rank's own."""
    salt = str(rank) if leaf.kind == "buffer" else ""
    whole = truth_of(leaf.name, whole_shape(leaf), leaf.tensor.dtype, salt)
    if "_flat_param" in leaf.name and whole.ndim:
        whole[sum(each.numel() for each in Net().parameters()) :] = 0  # padding
    region = region_of(leaf)
    index = tuple(slice(at, at + n) for at, n in zip(region.start, region.shape, strict=True))
    return whole[index]


def fill(live: Live, rank: int) -> None:
    with torch.no_grad():
        for leaf in _walk(live).leaves:
            local(leaf.tensor).copy_(due(leaf, rank))
    live.counters.update(rank=rank, seen=7)


def _walk(live: Live) -> Any:
    return live.tree.walk(lambda parameter, gradient: True)


def saved(
    store: Store,
    kind: str,
    world: int,
    *,
    is_tied: bool = True,
    gradient: float | None = None,
    seed: Callable[[int], int] = int,
) -> run_view.Record:
    """A committed step of that layout. gradient: all values of the gradients of a micro-batch that no step
    has used yet. seed: that of the random numbers of a rank."""

    def is_used_up(parameter: object, of: object) -> bool:
        return gradient is None

    ranks, values = [], []
    for rank in range(world):
        with one_of(world, rank):
            live = built(kind, world, is_tied=is_tied)
            stepped(live)
            fill(live, rank)
            for parameter in live.model.parameters():
                if gradient is not None and local(parameter).numel():
                    parameter.grad = torch.full_like(parameter, gradient)
            ranks.append([_held(leaf) for leaf in live.tree.walk(is_used_up).leaves])
            torch.manual_seed(seed(rank))
            values.append(_encoded(live.tree.values(is_used_up), world))
    return committed(store, ranks, values=values)


def _held(leaf: LiveLeaf) -> Held:
    here, region = local(leaf.tensor).detach(), region_of(leaf)
    whole = np.zeros(whole_shape(leaf), here.numpy().dtype)
    index = tuple(slice(at, at + n) for at, n in zip(region.start, region.shape, strict=True))
    whole[index] = here.numpy()
    # What is declared to be alike is written once.
    writer = leaf.replicas[zlib.crc32(leaf.name.encode()) % len(leaf.replicas)] if leaf.replicas else None
    return Held(leaf.name, whole, region, tuple(leaf.aliases), writer, leaf.replicas)


def held_by(live: Live) -> dict[str, bytes]:
    """All bytes of a live state, by name."""
    return {leaf.name: local(leaf.tensor).detach().numpy().tobytes() for leaf in _walk(live).leaves}


def values_of(entries: Mapping[str, Any], world: int = 2) -> Mapping[str, Any]:
    """The values of a rank of a state that has these parts and no gradients."""
    return _encoded({"entries": entries, "gradients": {"names": [], "kinds": "", "exceptions": {}}}, world)


def _encoded(state: object, world: int) -> Mapping[str, Any]:
    values = {
        "state": state,
        "rng": rng.capture(),
        "progress": {
            "step": 7, "epoch": 1, "has_ended": False, "iterated": True,
            "integration": "", "taps": {}, "to_skip": 0, "sources": []
        },
        "environment": {"world": world},
    }  # fmt: skip
    found: Mapping[str, Any] = json.loads(encode_json(values))
    return found


def wrong(live: Live, source: int, rank: int, world: int, buffers: int | None = None) -> list[str]:
    """What a rank holds otherwise than it must, bit for bit. source: the old rank whose own things it has
    taken, buffers: the one whose buffers, where they are another's."""
    walk = _walk(live)
    found: list[str] = []
    for leaf in walk.leaves:
        expected = due(leaf, source if buffers is None else buffers).contiguous()
        if not torch.equal(bits(local(leaf.tensor).detach()), bits(expected)):
            found.append(f"{leaf.name} on rank {rank} of {world}")
    assert "optimizer" in {leaf.kind for leaf in walk.leaves}
    for group in live.optimizer.param_groups:
        for parameter in group["params"]:
            held = live.optimizer.state.get(parameter, {})
            if not parameter.numel():
                assert not held
                continue
            assert held.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert type(held["exp_avg"]) is type(torch.zeros_like(parameter))
            assert held["exp_avg"].shape == parameter.shape
            placements = [getattr(each, "placements", None) for each in (held["exp_avg"], parameter)]
            assert placements[0] == placements[1]
    if [group["lr"] for group in live.optimizer.param_groups] != [0.1, 0.5]:
        found.append("the learning rates")
    if live.counters != {"rank": source, "seen": 7}:
        found.append("the rank's own counters")
    return found
