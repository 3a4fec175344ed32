"""A DTensor's box and replicas follow from its placements: compared with torch's own cut, on each rank of a
mesh."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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

from flashckpt.errors import DamagedError, MismatchError, StateError
from flashckpt.format.layout import Box, Leaf
from flashckpt.state.tensors import Meshes, TensorBox, fits, leaf_of
from flashckpt.state.tree import Tree
from tests.coverage_of_boxes import check_coverage
from tests.state.image import capture, contents

pytestmark = pytest.mark.filterwarnings("ignore")


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """Make this process one rank of `world`; its messages arrive nowhere."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(shape: Sequence[int]) -> Any:
    """Return a mesh with a new name: torch caches facts by the name of a mesh."""
    names = tuple(f"{letter}{dist.get_rank()}" for letter in "abc"[: len(shape)])
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)


def numbered(*shape: int) -> Tensor:
    """Return a tensor in which each element is its index."""
    return torch.arange(math.prod(shape), dtype=torch.int64).reshape(shape)


def check_cut(whole: Tensor, tensor: Any, piece: TensorBox) -> None:
    """Check that the local tensor equals the box."""
    for dimension, size in enumerate(tensor._local_tensor.shape):
        start = piece.box.start[dimension] if piece.box is not None else 0
        whole = whole.narrow(dimension, start, size)
    assert torch.equal(whole, tensor._local_tensor)


PLACEMENTS = [
    *[((world,), [Shard(0)]) for world in (1, 2, 5)],
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
def test_a_box_matches_the_cut_of_torch(shape: tuple[int, ...], placements: list[Any]) -> None:
    strided = any(isinstance(each, _StridedShard) for each in placements)
    # torch cuts strided shards only evenly.
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
            equal = tuple(
                r for r in replicas if place(r, shape, placements) == place(rank, shape, placements)
            )
            assert ranks == (equal if len(equal) > 1 else ())


def place(rank: int, shape: Sequence[int], placements: Sequence[Any]) -> list[int]:
    """Return a rank's coordinate in the dimensions that are split."""
    found = []
    for size, placement in zip(reversed(shape), reversed(placements), strict=True):
        rank, at = divmod(rank, size)
        found += [] if placement == Replicate() else [at]
    return found


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (3, 2)])
@pytest.mark.parametrize("rows", [1, 9, 16])
def test_fsdp_over_tensor_parallelism_has_a_box(data: int, tensor: int, rows: int) -> None:
    from torch.distributed.fsdp import fully_shard

    whole, leaves = numbered(rows, 4).float(), {}
    for rank in range(data * tensor):
        with rank_of(rank, data * tensor):
            mesh = mesh_of((data, tensor))
            net = nn.Linear(4, rows, bias=False)
            outer, inner = (mesh[name] for name in mesh.mesh_dim_names)
            net.weight = nn.Parameter(distribute_tensor(whole, inner, [Shard(0)], src_data_rank=None))
            fully_shard(net, mesh=outer)
            cut = net.weight.detach()
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


def test_local_tensors_without_a_box_are_refused_by_name() -> None:
    with rank_of(0, 2):
        assert "partial sums (P(sum))" in refused([Partial()], torch.zeros(4), (4,))
        strided = [_StridedShard(0, split_factor=2)]
        assert "is not a single slice (strided by 2)" in refused(strided, torch.zeros(4), (8,))
        text = refused([Shard(0)], torch.zeros(1), (4,))
        assert "local part is (1,), while its placements (Shard(dim=0),) give (2,)" in text


def test_a_rank_outside_the_mesh_has_no_box() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    with rank_of(2, 3):
        mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
        tensor = DTensor.from_local(
            torch.empty(0), mesh, [Shard(0)], run_check=False, shape=(4,), stride=(1,)
        )
        assert Meshes().piece(tensor, tensor._local_tensor, "w") == TensorBox(None, ())


def test_the_ranks_of_a_mesh() -> None:
    for rank, shape in product(range(4), ((4,), (2, 2))):
        with rank_of(rank, 4):
            whole = numbered(4, 4)
            mesh = mesh_of(shape)
            tensor = distribute_tensor(whole, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
            assert Meshes().ranks(tensor) == (0, 1, 2, 3)
            if mesh.ndim == 2:
                inner = distribute_tensor(whole, mesh[mesh.mesh_dim_names[1]], [Shard(0)], src_data_rank=None)
                assert Meshes().ranks(inner) == (rank // 2 * 2, rank // 2 * 2 + 1)


# Slices of another rank


def test_a_box_fills_only_the_same_box() -> None:
    here, empty = Box(shape=(8, 4), start=(2, 0)), torch.empty(2, 4)
    whole = Leaf(name="w", dtype="float32", shape=(2, 4))
    piece = replace(whole, box=here)
    assert fits(whole, empty)
    assert fits(piece, empty, here)
    for box in (None, Box(shape=(8, 4), start=(4, 0)), Box(shape=(9, 4), start=(2, 0))):
        assert not fits(piece, empty, box)
    assert not fits(whole, empty, here)
    assert not fits(piece, torch.empty(8, 4))
    assert not fits(piece, torch.empty(2, 4, dtype=torch.int32), here)


def stepped(rank: int, world: int) -> Tree:
    """Return FSDP2's state on one rank after a step of its optimizer."""
    from torch.distributed.fsdp import fully_shard

    net = nn.Linear(4, 5)
    fully_shard(net, mesh=mesh_of((world,)))
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return Tree({"net": net, "optimizer": optimizer})


def test_the_slice_of_another_rank_does_not_fit() -> None:
    with rank_of(0, 2):
        image = capture(stepped(0, 2))
        same = stepped(0, 2)
        assert same.differences(image.saved()) == []
    with rank_of(1, 2):
        rows = stepped(1, 2).differences(image.saved())
    assert sorted(rows) == [
        ("net.bias", "float32 (3,), from (0,) of (5,)", "float32 (2,), from (3,) of (5,)"),
        ("net.weight", "float32 (3, 4), from (0, 0) of (5, 4)", "float32 (2, 4), from (3, 0) of (5, 4)"),
    ]
    with rank_of(0, 4):  # three rows are not among these
        rows = stepped(0, 4).differences(image.saved())
    assert dict(row[::2] for row in rows)["net.weight"] == "float32 (2, 4), from (0, 0) of (5, 4)"
    plain = nn.Linear(4, 5)
    rows = Tree({"net": plain, "optimizer": torch.optim.AdamW(plain.parameters())}).differences(image.saved())
    assert ("net.weight", "float32 (3, 4), from (0, 0) of (5, 4)", "float32 (5, 4)") in rows


@pytest.mark.parametrize("is_there", [True, False])
def test_state_with_another_slice_than_its_parameter_does_not_fit(is_there: bool) -> None:
    """The parameter fits, and its momentum has other rows. Nothing is changed."""
    name = "optimizer.state.net.weight.exp_avg"
    with rank_of(0, 2):
        saved = capture(stepped(0, 2)).saved()
        leaf = saved.leaves[name]
        moved = replace(leaf, box=Box(shape=(5, 4), start=(1, 0)))
        saved = replace(saved, leaves={**saved.leaves, name: moved})
        tree = stepped(0, 2)
        if not is_there:
            tree.optimizers[0].state.clear()
        before = contents(tree)
        expected = [(name, "float32 (3, 4), from (1, 0) of (5, 4)", "float32 (3, 4), from (0, 0) of (5, 4)")]
        assert tree.differences(saved) == expected
        with pytest.raises(MismatchError):
            tree.restore(saved)
        assert contents(tree) == before


def test_invalid_placements_of_a_snapshot_are_refused() -> None:
    name = "optimizer.state.net.weight.exp_avg"
    with rank_of(0, 2):
        tree = stepped(0, 2)
        parameter = tree.optimizers[0].param_groups[0]["params"][0]
        leaf = capture(tree).saved().leaves[name]
        for codes in (["S7"], ["S0", "R"], ["X"], [3], "S0", ["S0/0/1"]):
            about = {"shape": (5, 4), "stride": (4, 1), "context": codes}
            with pytest.raises(DamagedError):
                Meshes().to_make(about, leaf, parameter, name)
