"""Where a rank's part of a tensor lies in the whole, and which ranks hold the very same part by declaration:
a DTensor's placements on its mesh.

Owns the arithmetic of placements: it asks no rank and calls no collective. What a DTensor cannot say in this
way is refused by name. Never reads a tensor's bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashckpt.errors import DamagedError
from flashckpt.format.layout import Box, Leaf
from flashckpt.state.tensors import is_sharded, refuse

Ranks = tuple[int, ...]
_CODE = re.compile(r"S(\d{1,2})(?:/(\d{1,9}))?")


class Whole(NamedTuple):
    """What all ranks of a mesh must say alike of a DTensor, for their parts to be one tensor: those ranks, in
    order, and its shape, mesh and placements in words. That each part is then the right one is arithmetic."""

    ranks: Ranks
    words: str


class TensorBox(NamedTuple):
    """The part of a tensor that is here. `box` is None where it is the whole; `replicas` are the global ranks
    that hold it too, in order and this one among them, empty where no other does; `whole` is None for what is
    no DTensor of several ranks."""

    box: Box | None
    replicas: Ranks
    whole: Whole | None = None


class _Split(NamedTuple):
    """One dimension of a mesh that splits a dimension of a tensor: into how many parts, which is here, and
    how many parts there are already when it does so (`_StridedShard`: 1 where there are none)."""

    parts: int
    here: int
    after: int


@dataclass(frozen=True)
class _Mesh:
    """A mesh as it is read once: its shape, this rank's coordinate (None: it is not in it), all ranks."""

    mesh: Any
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    ranks: Tensor

    @cached_property
    def words(self) -> str:
        """Its shape, and which rank is where in it."""
        listed = hashlib.sha256(repr(self.ranks.tolist()).encode()).hexdigest()
        return f"a mesh of {list(self.shape)} ({listed[:8]})"


class Meshes:
    """What is known of meshes during one walk: many tensors are on few."""

    def __init__(self) -> None:
        self._known: dict[int, _Mesh] = {}
        self._replicas: dict[tuple[int, tuple[int, ...]], Ranks] = {}

    def piece(self, tensor: Any, local: Tensor, name: str) -> TensorBox:
        """The piece of a DTensor that `local` is. Raises StateError, by name, for one that is a part of a
        sum, lies in several boxes, or is not of the size that its placements say."""
        mesh = self._mesh(tensor)
        if mesh.coordinate is None:
            return TensorBox(None, ())  # an empty tensor: the mesh is that of other ranks
        shape, box = self._box(mesh, tensor.shape, tensor.placements, name)
        if tuple(local.shape) != shape:
            why = f"is a DTensor of {tuple(tensor.shape)} whose local part is {tuple(local.shape)}"
            remedy = "Let DTensor distribute it: distribute_tensor()."
            refuse(name, f"{why}, where its placements {tensor.placements} say {shape}", remedy)
        replicated = tuple(d for d, each in enumerate(tensor.placements) if each.is_replicate())
        every = self.ranks(tensor)
        said = f"{list(tensor.shape)} {' '.join(map(_code, tensor.placements))} on {mesh.words}"
        return TensorBox(box, self._holders(mesh, replicated), Whole(every, said) if every else None)

    def to_make(self, about: Mapping[str, Any], leaf: Leaf, parameter: Any, name: str) -> Leaf:
        """A saved leaf as it would be here, were it made like the parameter that it belongs to. Raises as
        `piece`, and DamagedError."""
        mesh, (shape, placements) = self._mesh(parameter), _made_of(about, parameter, name)
        if mesh.coordinate is None:
            return leaf
        local, box = self._box(mesh, shape, placements, name)
        return replace(leaf, shape=local, box=box)

    def _box(
        self, mesh: _Mesh, whole: Sequence[int], placements: Sequence[Any], name: str
    ) -> tuple[tuple[int, ...], Box | None]:
        """The shape of what is here, and its box."""
        splits = _splits(placements, mesh, len(whole), name)
        ranges = [_range(size, each, name) for size, each in zip(whole, splits, strict=True)]
        shape = tuple(stop - start for start, stop in ranges)
        if shape == tuple(whole):
            return shape, None
        return shape, Box(shape=tuple(whole), start=tuple(start for start, _ in ranges))

    def ranks(self, tensor: Any) -> Ranks:
        """All ranks of a DTensor's mesh, empty where this is the only one."""
        mesh = self._mesh(tensor)
        return self._holders(mesh, tuple(range(len(mesh.shape)))) if mesh.coordinate is not None else ()

    def _mesh(self, tensor: Any) -> _Mesh:
        mesh = tensor.device_mesh
        known = self._known.get(id(mesh))
        if known is None:
            coordinate = mesh.get_coordinate()
            here = None if coordinate is None else tuple(coordinate)
            known = self._known[id(mesh)] = _Mesh(mesh, tuple(mesh.mesh.shape), here, mesh.mesh)
        return known

    def _holders(self, mesh: _Mesh, replicated: tuple[int, ...]) -> Ranks:
        """The ranks that differ from this one in these dimensions of the mesh alone."""
        key = id(mesh.mesh), replicated
        if key not in self._replicas:
            assert mesh.coordinate is not None
            here = [slice(None) if d in replicated else at for d, at in enumerate(mesh.coordinate)]
            ranks = tuple(sorted(mesh.ranks[tuple(here)].flatten().tolist()))
            self._replicas[key] = ranks if len(ranks) > 1 else ()
        return self._replicas[key]


def _splits(placements: Sequence[Any], mesh: _Mesh, dimensions: int, name: str) -> list[list[_Split]]:
    """For each dimension of a tensor what splits it, in the order of the mesh."""
    splits: list[list[_Split]] = [[] for _ in range(dimensions)]
    for number, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            why = f"is a DTensor of which each rank has a part of a sum ({placement})"
            refuse(name, why, "Redistribute it: Replicate() or Shard().")
        if type(placement).__name__ not in ("Shard", "_StridedShard"):
            refuse(name, f"is a DTensor with the placement {placement}", "Redistribute it with Shard().")
        assert mesh.coordinate is not None
        after = int(getattr(placement, "split_factor", 1))
        splits[placement.dim].append(_Split(mesh.shape[number], mesh.coordinate[number], after))
    return splits


def _range(size: int, splits: Sequence[_Split], name: str) -> tuple[int, int]:
    """First index and end of what is here of a dimension."""
    start, stop = 0, size
    for parts, here, _ in _in_order(splits, name):
        length = -(-(stop - start) // parts)  # torch.chunk's: the last ones are smaller, or empty
        start, stop = min(start + here * length, stop), min(start + (here + 1) * length, stop)
    return start, stop


def _in_order(splits: Sequence[_Split], name: str) -> list[_Split]:
    """The same in the order in which they are made: FSDP2 splits what tensor parallelism has split before,
    and stands before it in the mesh."""
    order: list[_Split] = []
    for split in reversed(splits):
        parts, place = 1, 0
        while parts < split.after and place < len(order):
            parts, place = parts * order[place].parts, place + 1
        if parts != split.after:
            why = f"is a DTensor whose local part is no single box (strided by {split.after})"
            refuse(name, why, "Redistribute it with Shard().")
        order.insert(place, split)
    return order


# DTensors that belong to a parameter: their mesh is its mesh, and their placements are its own or recorded.


def own_placements(tensor: Any, parameter: Any, name: str) -> list[str] | None:
    """What of a DTensor's placements has to be known to make it anew: nothing where they are those of its
    parameter, or where it belongs to none. Raises StateError where it could not be made."""
    if parameter is None:
        return None
    if not is_sharded(parameter) or tensor.device_mesh != parameter.device_mesh:
        why = "is a DTensor on another mesh than the parameter that it belongs to"
        refuse(name, why, "Keep it on the parameter's mesh.")
    if tensor.placements == parameter.placements:
        return None
    return [_code(placement) for placement in tensor.placements]


def assembled(about: Mapping[str, Any], local: Tensor, parameter: Any, name: str) -> Tensor:
    """A DTensor of this local part that belongs to a parameter. Raises DamagedError."""
    shape, placements = _made_of(about, parameter, name)
    made: Tensor = type(parameter).from_local(
        local, parameter.device_mesh, placements, run_check=False, shape=shape, stride=tuple(about["stride"])
    )
    return made


def _made_of(about: Mapping[str, Any], parameter: Any, name: str) -> tuple[torch.Size, Sequence[Any]]:
    """Shape and placements of a DTensor as it was recorded."""
    shape, codes = torch.Size(about["shape"]), about["context"]
    if codes is None:
        return shape, parameter.placements
    if not isinstance(codes, list) or len(codes) != parameter.device_mesh.ndim:
        raise DamagedError(f"The snapshot holds no placements for {name} that can be. Nothing was loaded.")
    return shape, [_placement(code, len(shape), name) for code in codes]


def _code(placement: Any) -> str:
    if placement.is_replicate():
        return "R"
    after = int(getattr(placement, "split_factor", 1))
    return f"S{placement.dim}" + (f"/{after}" if after > 1 else "")


def _placement(code: object, dimensions: int, name: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if code == "R":
        return Replicate()
    found = _CODE.fullmatch(code) if isinstance(code, str) else None
    if found is None or int(found[1]) >= dimensions:
        raise DamagedError(f"The snapshot holds no placement for {name} that can be. Nothing was loaded.")
    if found[2] is None:
        return Shard(int(found[1]))
    return _StridedShard(int(found[1]), split_factor=int(found[2]))


# FSDP2


def has_unreduced_gradients(module: Any) -> bool:
    """Whether an FSDPModule holds gradients of its whole parameters, or of those of one replica, that its
    sharded parameters do not show: between two backward passes without `set_requires_gradient_sync`."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        if getattr(group, "_partial_reduce_output", None) is not None:
            return True
        for parameter in getattr(group, "fsdp_params", ()):
            whole = getattr(parameter, "_unsharded_param", None)
            if getattr(parameter, "unsharded_accumulated_grad", None) is not None:
                return True
            if whole is not None and whole.grad is not None:
                return True
    return False


# FSDP1


class FlatPiece(NamedTuple):
    """What this rank has of a parameter that FSDP1 lays out in one dimension. `piece` lies in what is so laid
    out, with the padding at its end; `whole` says what that is: the shape of a parameter, or the names and
    shapes of several that are one."""

    piece: TensorBox
    whole: list[Any]


def flat_pieces(module: Any) -> dict[Tensor, FlatPiece]:
    """Of the parameters that a FullyShardedDataParallel shards by itself."""
    handle = module._handle
    if handle is None:
        return {}
    flat, is_sharded = handle.flat_param, handle.uses_sharded_strategy
    if flat._params is None:
        size, parts = flat.numel(), handle.world_size if is_sharded else 1
        if is_sharded:
            size = flat._sharded_size.numel()
        whole = [[name, list(shape)] for name, shape in zip(flat._fqns, flat._shapes, strict=True)]
        return {flat: FlatPiece(_flat_piece(parts * size, handle.rank * size, size), whole)}
    if not is_sharded:
        return {}  # they are shown as they are
    rows = list(zip(flat._param_infos, flat._params, flat._shapes, flat._shard_param_infos, strict=True))
    found, by_place = {}, {}
    for info, parameter, shape, here in rows:
        start, size = here.intra_param_start_idx or 0, here.numel_in_shard or 0
        found[parameter] = FlatPiece(_flat_piece(shape.numel(), start, size), list(shape))
        by_place[info.module, info.param_name] = found[parameter]
    for info, parameter in zip(flat._shared_param_infos, flat._shared_params, strict=True):
        found[parameter] = by_place[info.prim_module, info.prim_param_name]
    return found


def _flat_piece(total: int, start: int, size: int) -> TensorBox:
    return TensorBox(Box(shape=(total,), start=(start,)) if size < total else None, ())
