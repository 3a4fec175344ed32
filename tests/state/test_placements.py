"""A DTensor's box and replicas follow from its placements: those that torch cut, on every rank of a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from flashckpt.errors import StateError
from flashckpt.format.coverage import check_coverage
from flashckpt.state.sharding import Meshes, Piece
from flashckpt.state.tensors import leaf_of

pytestmark = pytest.mark.filterwarnings("ignore")


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """This process is one rank of so many; nothing that it sends arrives."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(shape: Sequence[int]) -> Any:
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple("abc"[: len(shape)]))


def numbered(*shape: int) -> Tensor:
    """Each element says where it is."""
    return torch.arange(math.prod(shape), dtype=torch.int64).reshape(shape)


def check_cut(whole: Tensor, tensor: Any, piece: Piece) -> None:
    """The local part is what the box says."""
    for dimension, size in enumerate(tensor._local_tensor.shape):
        start = piece.box.start[dimension] if piece.box is not None else 0
        whole = whole.narrow(dimension, start, size)
    assert torch.equal(whole, tensor._local_tensor)


PLACEMENTS = [
    *[((world,), [Shard(0)]) for world in (1, 2, 3, 5, 9)],
    ((3,), [Shard(1)]),
    ((3,), [Replicate()]),
    ((2, 3), [Replicate(), Shard(0)]),
    ((2, 3), [Shard(0), Replicate()]),
    ((2, 3), [Shard(0), Shard(1)]),
    ((2, 3), [Shard(0), Shard(0)]),
    ((2, 2, 2), [Shard(1), Replicate(), Shard(1)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((3, 2), [_StridedShard(1, split_factor=2), Shard(1)]),
    ((2, 2, 2), [_StridedShard(0, split_factor=4), Shard(0), Shard(0)]),
    ((2, 2, 2), [_StridedShard(0, split_factor=2), Shard(0), Shard(0)]),
    ((2, 2, 2), [Shard(0), _StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2, 2), [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)]),
]


@pytest.mark.parametrize(("shape", "placements"), PLACEMENTS, ids=str)
def test_a_box_is_what_torch_cut(shape: tuple[int, ...], placements: list[Any]) -> None:
    strided = any(isinstance(each, _StridedShard) for each in placements)
    # torch cuts strided shards evenly alone.
    for size in ((8, 12), (16, 6)) if strided else ((8, 12), (7, 5), (2, 3), (1, 1), (0, 4)):
        whole, leaves, replicas = numbered(*size), {}, {}
        for rank in range(math.prod(shape)):
            with rank_of(rank, math.prod(shape)):
                tensor = distribute_tensor(whole, mesh_of(shape), placements, src_data_rank=None)
                piece = Meshes().piece(tensor, tensor._local_tensor, "w")
                check_cut(whole, tensor, piece)
                leaves[rank] = [leaf_of("w", tensor._local_tensor, box=piece.box)]
                replicas[rank] = piece.replicas
        assert check_coverage(leaves) == []
        for rank, ranks in replicas.items():
            alike = tuple(
                r for r in replicas if place(r, shape, placements) == place(rank, shape, placements)
            )
            assert ranks == (alike if len(alike) > 1 else ())


def place(rank: int, shape: Sequence[int], placements: Sequence[Any]) -> list[int]:
    """A rank's coordinate in the dimensions that are split."""
    found = []
    for size, placement in zip(reversed(shape), reversed(placements), strict=True):
        rank, at = divmod(rank, size)
        found += [] if placement == Replicate() else [at]
    return found


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (4, 2), (2, 3), (3, 4)])
@pytest.mark.parametrize("rows", [1, 5, 9, 16])
def test_of_what_tensor_parallelism_has_split_fsdp_has_a_box(data: int, tensor: int, rows: int) -> None:
    from torch.distributed.fsdp import fully_shard

    whole, leaves = numbered(rows, 4).float(), {}
    for rank in range(data * tensor):
        with rank_of(rank, data * tensor):
            mesh = mesh_of((data, tensor))
            net = nn.Linear(4, rows, bias=False)
            part = distribute_tensor(whole, mesh["b"], [Shard(0)], src_data_rank=None)
            net.weight = nn.Parameter(part)
            fully_shard(net, mesh=mesh["a"])
            cut = net.weight.detach()
            # torch keeps the mesh that it joined of both, with the coordinate of the first rank here.
            cut = DTensor.from_local(
                cut._local_tensor, mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
            )
            piece = Meshes().piece(cut, cut._local_tensor, "w")
            check_cut(whole, cut, piece)
            leaves[rank] = [leaf_of("w", cut._local_tensor, box=piece.box)]
    assert check_coverage(leaves) == []


def refused(placements: Sequence[Any], local: Tensor, shape: tuple[int, ...]) -> str:
    mesh = mesh_of((2,) * len(placements))
    stride = numbered(*shape).stride()
    tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    with pytest.raises(StateError) as caught:
        Meshes().piece(tensor, tensor._local_tensor, "model.w")
    assert caught.value.location == "model.w"
    return str(caught.value)


def test_what_is_no_box_is_refused_by_name() -> None:
    with rank_of(0, 2):
        assert "a part of a sum (P(sum))" in refused([Partial()], torch.zeros(4), (4,))
        strided = [_StridedShard(0, split_factor=2)]
        assert "is no single box (strided by 2)" in refused(strided, torch.zeros(4), (8,))
        text = refused([Shard(0)], torch.zeros(1), (4,))
        assert "local part is (1,), where its placements (Shard(dim=0),) say (2,)" in text


def test_a_rank_that_is_not_in_the_mesh_has_nothing() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    with rank_of(2, 3):
        mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
        tensor = DTensor.from_local(
            torch.empty(0), mesh, [Shard(0)], run_check=False, shape=(4,), stride=(1,)
        )
        assert Meshes().piece(tensor, tensor._local_tensor, "w") == Piece(None, ())


def test_the_ranks_of_a_mesh() -> None:
    for rank, shape in product(range(4), ((4,), (2, 2))):
        with rank_of(rank, 4):
            whole = numbered(4, 4)
            mesh = mesh_of(shape)
            tensor = distribute_tensor(whole, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
            assert Meshes().ranks(tensor) == (0, 1, 2, 3)
            if mesh.ndim == 2:
                inner = distribute_tensor(whole, mesh["b"], [Shard(0)], src_data_rank=None)
                assert Meshes().ranks(inner) == (rank // 2 * 2, rank // 2 * 2 + 1)
