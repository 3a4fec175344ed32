"""Single tensors: names of dtypes, checks, strides, filling and creation; and tensor subclasses, taken apart
with `__tensor_flatten__` and assembled with `__tensor_unflatten__`; and the slice of a sharded tensor that a
rank holds.

Owns which tensor classes a restore may create: those registered here and those of the live state. Never
imports a class because a checkpoint names it. Owns the arithmetic of placements, and calls no collective.
Reads a tensor's bytes only to fill another tensor.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flashckpt.errors import DamagedError, StateError
from flashckpt.format.layout import DTYPES, Box, Leaf
from flashckpt.format.typed import check_roundtrip

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
PLAIN = frozenset((Tensor, torch.nn.Parameter))
_LAZY = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_known: dict[str, type[Tensor]] = {}


def refuse(location: str, why: str, remedy: str) -> NoReturn:
    """Raise StateError with the three sentences of every refusal."""
    raise StateError(
        f"{location} {why}, so it cannot be saved exactly. Nothing was saved or changed. {remedy}",
        location=location,
    )


def check(tensor: Tensor, location: str) -> None:
    """Raise StateError unless the tensor's own memory holds all of its data."""
    kind = type(tensor)
    if kind not in PLAIN:
        if (kind.__module__, kind.__name__) == ("torch._subclasses.fake_tensor", "FakeTensor"):
            refuse(location, "is a fake tensor without data", "Build the model outside FakeTensorMode.")
        if isinstance(tensor, _LAZY):
            why = "belongs to a lazy module that has not seen an input yet"
            refuse(location, why, "Run one forward pass before the state is attached.")
    if tensor.is_nested:
        refuse(location, "is a nested tensor", "Keep its values and offsets as plain tensors.")
    if tensor.layout is not torch.strided:
        refuse(location, f"has the layout {tensor.layout}", "Keep its indices and values as plain tensors.")
    device = tensor.device.type
    if device == "meta":
        refuse(location, "is on the meta device and has no data", "Give it memory: to_empty().")
    # A snapshot depends on the order of a device's streams and on its random number generators. Neither is
    # known for other devices.
    if device == "cuda" and torch.version.hip is not None:
        device = "ROCm, which torch calls cuda"
    if device not in ("cpu", "cuda"):
        why = f"is on {device}, which is not supported"
        refuse(location, why, "Keep it in host memory or on a CUDA device.")
    if tensor.dtype not in DTYPE_NAMES:
        refuse(location, f"has the dtype {tensor.dtype}", "Dequantize it, or keep its raw integers.")
    if tensor.is_conj() or tensor.is_neg():
        refuse(location, "is a lazily conjugated or negated view", "Use resolve_conj() or resolve_neg().")
    if not has_memory(tensor):
        why = "lies in a storage that is smaller than its elements (offloaders and FSDP resize storages)"
        refuse(location, why, "Give it its memory back before the boundary, or leave it out of the state.")
    if not tensor.is_contiguous() and _overlaps(tensor):
        refuse(location, "has elements that share memory", "Clone it: tensor.clone().")


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's storage holds all of its elements: `untyped_storage().resize_()` may have shrunk it.
    True for a tensor without an accessible storage (XLA's, for example)."""
    if type(tensor) not in PLAIN:
        with torch._C.DisableTorchFunctionSubclass():
            return _holds(tensor)
    return _holds(tensor)


def _holds(tensor: Tensor) -> bool:
    try:
        num_bytes = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return True
    reach = _reach(tensor)
    return not reach or num_bytes >= (tensor.storage_offset() + reach) * tensor.element_size()


def _reach(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last in memory, including gaps."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.numel()
    return 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, apart from dimensions of stride 0 (an expanded dimension is stored in
    full and filled through one element)."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides in elements, or None if they are exactly the row-major ones."""
    found = tensor.stride()
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(found), strict=True):
        if stride != expected:
            return tuple(found)
        expected *= max(size, 1)
    return None


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory; False for empty tensors."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.numel() > 0
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.stride() == b.stride()
        and a.device == b.device
    )


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte and the end of the memory that holds the tensor's elements."""
    start = tensor.data_ptr()
    return start, start + _reach(tensor) * tensor.element_size()


def leaf_of(name: str, tensor: Tensor, aliases: tuple[str, ...] = (), box: Box | None = None) -> Leaf:
    """Return the record of a tensor that has no place in an image yet."""
    dtype, stride = DTYPE_NAMES[tensor.dtype], strides(tensor)
    return Leaf(name=name, dtype=dtype, shape=tuple(tensor.shape), stride=stride, aliases=aliases, box=box)


def described(thing: Tensor | Leaf, box: Box | None = None) -> str:
    """Return the description of a tensor in a table of differences: `float32 (3, 4)`, or `float32 (3, 4),
    from (6, 0) of (9, 4)`. `box`: the slice that a Tensor is; a Leaf has its own."""
    dtype = thing.dtype if isinstance(thing, Leaf) else DTYPE_NAMES[thing.dtype]
    box = thing.box if isinstance(thing, Leaf) else box
    piece = f", from {box.start} of {box.shape}" if box is not None else ""
    return f"{dtype} {tuple(thing.shape)}{piece}"


def fits(leaf: Leaf, tensor: Tensor, box: Box | None = None) -> bool:
    """Whether a leaf's bytes can fill the tensor in place. `box`: the slice of a larger tensor that it is."""
    if leaf.box != box or tuple(tensor.shape) != leaf.shape:
        return False
    recorded = leaf.stride or (1,) * len(leaf.shape)
    expanded = [s == 0 and size > 1 for s, size in zip(tensor.stride(), tensor.shape, strict=True)]
    pairs = zip(recorded, expanded, strict=True)
    return DTYPE_NAMES.get(tensor.dtype) == leaf.dtype and all(s == 0 for s, needed in pairs if needed)


def bits(tensor: Tensor) -> Tensor:
    """Return the same memory as integers, whose copies keep every bit, including NaN payloads."""
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_SAME_SIZE[tensor.element_size()])


def fill(live: Tensor, source: Tensor) -> None:
    """Copy the elements of `source` (same shape and dtype) into `live`, which may have any strides."""
    mode = torch.inference_mode() if live.is_inference() else torch.no_grad()
    with mode, torch._C.DisableTorchFunctionSubclass():
        target, origin = distinct_bits(live, source)
        target.copy_(origin)


def distinct_bits(live: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of both tensors (same shape and dtype) without the repetitions along the dimensions
    that are expanded in `live`: to copy the second into the first fills `live`."""
    target, origin = bits(live.detach()), bits(source.detach())
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.size(dim) > 1:
            target, origin = target.narrow(dim, 0, 1), origin.narrow(dim, 0, 1)
    return target, origin


def make(leaf: Leaf, device: torch.device) -> Tensor:
    """Return an uninitialized tensor with the shape, strides and dtype of a leaf."""
    dtype = TORCH_DTYPES[leaf.dtype]
    if leaf.stride is None:
        return torch.empty(leaf.shape, dtype=dtype, device=device)
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device=device)


# Subclasses


def register_tensor_class(kind: type[Tensor]) -> None:
    """Allow a restore to create tensors of this class even if the live state holds none yet."""
    _known[_name(kind)] = kind


def kind_of(tensor: Tensor) -> str:
    """Return the recorded class name of a tensor; `Parameter` for parameters."""
    return "Parameter" if type(tensor) is torch.nn.Parameter else _name(type(tensor))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the tensor stores its data in inner tensors."""
    kind = type(tensor)
    return kind not in PLAIN and kind not in _LAZY and hasattr(kind, "__tensor_flatten__")


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor. A rank saves its local tensor."""
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "_local_tensor")


def part_name(name: str, attribute: str) -> str:
    """Return the name of an inner tensor: the outer name for a DTensor's local tensor, its only part."""
    return name if attribute == "_local_tensor" else f"{name}.{attribute}"


def flatten(tensor: Tensor, location: str) -> tuple[list[str], object]:
    """Return the attributes that hold the inner tensors, and the context of `__tensor_unflatten__`. Raises
    StateError if the context cannot be saved exactly."""
    if is_sharded(tensor):
        return ["_local_tensor"], None
    parts, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    try:
        check_roundtrip(context, location)
    except StateError as error:
        why = f"is a {kind_of(tensor)} with metadata that has no exact encoding ({error})"
        refuse(location, why, "Keep its inner tensors in the state instead.")
    return list(parts), context


def can_make(about: Mapping[str, object], like: Tensor | None) -> bool:
    """Whether a tensor of the recorded class can be created. `like`: the tensor to which it belongs."""
    recorded = about.get("class")
    if recorded is None or recorded == "Parameter":
        return True
    return recorded in _known or (like is not None and kind_of(like) == recorded)


def assemble(about: Mapping[str, Any], parts: dict[str, Tensor], like: Tensor | None) -> Tensor:
    """Return a tensor of a wrapping class, assembled from its parts. Raises DamagedError for an unknown
    class."""
    kind = _class_of(about, like)
    size, stride = torch.Size(about["shape"]), tuple(about["stride"])
    return kind.__tensor_unflatten__(parts, about["context"], size, stride)  # type: ignore[attr-defined, no-any-return]


def dress(plain: Tensor, about: Mapping[str, object], like: Tensor | None) -> Tensor:
    """Return a tensor over the memory of `plain` with the recorded class and requires_grad."""
    recorded = about.get("class")
    requires_grad = bool(about.get("requires_grad"))
    if recorded == "Parameter":
        return torch.nn.Parameter(plain, requires_grad=requires_grad)
    if recorded is not None:
        plain = plain.as_subclass(_class_of(about, like))
    return plain.requires_grad_(requires_grad)


def _class_of(about: Mapping[str, object], like: Tensor | None) -> type[Tensor]:
    recorded = str(about.get("class"))
    if like is not None and kind_of(like) == recorded:
        return type(like)
    if recorded not in _known:
        raise DamagedError(f"A tensor of the class {recorded} cannot be created. Nothing was loaded.")
    return _known[recorded]


# Sharded tensors: slices and replicas, from a DTensor's placements on its mesh or FSDP1's flat parameters


Ranks = tuple[int, ...]
_CODE = re.compile(r"S(\d{1,2})(?:/(\d{1,9}))?")


class Whole(NamedTuple):
    """The facts on which all ranks of a mesh must agree, so that their slices form one DTensor: the sorted
    ranks, and a text of shape, mesh and placements. The slice of each rank follows from them."""

    ranks: Ranks
    words: str


class TensorBox(NamedTuple):
    """The slice of a tensor that this rank holds.

    box: None for a whole tensor.
    replicas: sorted global ranks that hold the same slice, including this one; empty if no other rank does.
    whole: None unless the tensor is a DTensor of several ranks.
    """

    box: Box | None
    replicas: Ranks
    whole: Whole | None = None


class _Split(NamedTuple):
    """A split of one tensor dimension by one mesh dimension.

    parts: the number of parts; here: the index of this rank's part.
    after: the number of parts that earlier splits made (`_StridedShard.split_factor`), at least 1.
    """

    parts: int
    here: int
    after: int


@dataclass(frozen=True)
class _Mesh:
    """The facts of a device mesh, read once. `coordinate` is None if this rank is not in the mesh."""

    mesh: Any
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    ranks: Tensor

    @cached_property
    def words(self) -> str:
        """A text of the mesh's shape and of the positions of its ranks."""
        listed = hashlib.sha256(repr(self.ranks.tolist()).encode()).hexdigest()
        return f"a mesh of {list(self.shape)} ({listed[:8]})"


class Meshes:
    """A cache of device meshes for one walk, in which many tensors share a few meshes."""

    def __init__(self) -> None:
        self._known: dict[int, _Mesh] = {}
        self._replicas: dict[tuple[int, tuple[int, ...]], Ranks] = {}

    def piece(self, tensor: Any, local: Tensor, name: str) -> TensorBox:
        """Return the slice of a DTensor that `local` is. Raises StateError, by name, if `local` is a partial
        sum, lies in several boxes, or has another size than its placements give."""
        mesh = self._mesh(tensor)
        if mesh.coordinate is None:
            return TensorBox(None, ())  # an empty tensor: this rank is not in the mesh
        shape, box = self._box(mesh, tensor.shape, tensor.placements, name)
        if tuple(local.shape) != shape:
            why = f"is a DTensor of {tuple(tensor.shape)} whose local part is {tuple(local.shape)}"
            remedy = "Let DTensor distribute it: distribute_tensor()."
            refuse(name, f"{why}, while its placements {tensor.placements} give {shape}", remedy)
        replicated = tuple(d for d, each in enumerate(tensor.placements) if each.is_replicate())
        ranks = self.ranks(tensor)
        words = f"{list(tensor.shape)} {' '.join(map(_code, tensor.placements))} on {mesh.words}"
        return TensorBox(box, self._ranks_along(mesh, replicated), Whole(ranks, words) if ranks else None)

    def to_make(self, about: Mapping[str, Any], leaf: Leaf, parameter: Any, name: str) -> Leaf:
        """Return the leaf that a saved DTensor would have on this rank, if it were created on its parameter's
        mesh. Raises as `piece`, and DamagedError."""
        mesh, (shape, placements) = self._mesh(parameter), _made_of(about, parameter, name)
        if mesh.coordinate is None:
            return leaf
        local, box = self._box(mesh, shape, placements, name)
        return replace(leaf, shape=local, box=box)

    def _box(
        self, mesh: _Mesh, whole: Sequence[int], placements: Sequence[Any], name: str
    ) -> tuple[tuple[int, ...], Box | None]:
        """Return the shape of the local tensor, and its box."""
        splits = _splits(placements, mesh, len(whole), name)
        ranges = []
        for size, each in zip(whole, splits, strict=True):
            start, stop = 0, size
            for parts, here, _ in _in_order(each, name):
                length = -(-(stop - start) // parts)  # as torch.chunk: the last parts are smaller or empty
                start, stop = min(start + here * length, stop), min(start + (here + 1) * length, stop)
            ranges.append((start, stop))
        shape = tuple(stop - start for start, stop in ranges)
        if shape == tuple(whole):
            return shape, None
        return shape, Box(shape=tuple(whole), start=tuple(start for start, _ in ranges))

    def ranks(self, tensor: Any) -> Ranks:
        """Return all ranks of a DTensor's mesh; empty if this rank is the only one or not in it."""
        mesh = self._mesh(tensor)
        return self._ranks_along(mesh, tuple(range(len(mesh.shape)))) if mesh.coordinate is not None else ()

    def _mesh(self, tensor: Any) -> _Mesh:
        mesh = tensor.device_mesh
        known = self._known.get(id(mesh))
        if known is None:
            coordinate = mesh.get_coordinate()
            here = None if coordinate is None else tuple(coordinate)
            known = self._known[id(mesh)] = _Mesh(mesh, tuple(mesh.mesh.shape), here, mesh.mesh)
        return known

    def _ranks_along(self, mesh: _Mesh, dimensions: tuple[int, ...]) -> Ranks:
        """Return the ranks whose coordinates differ from this rank's only in these dimensions of the mesh."""
        key = id(mesh.mesh), dimensions
        if key not in self._replicas:
            assert mesh.coordinate is not None
            here = [slice(None) if d in dimensions else at for d, at in enumerate(mesh.coordinate)]
            ranks = tuple(sorted(mesh.ranks[tuple(here)].flatten().tolist()))
            self._replicas[key] = ranks if len(ranks) > 1 else ()
        return self._replicas[key]


def _splits(placements: Sequence[Any], mesh: _Mesh, dimensions: int, name: str) -> list[list[_Split]]:
    """Return the splits of each dimension of a tensor, in the order of the mesh dimensions."""
    splits: list[list[_Split]] = [[] for _ in range(dimensions)]
    for number, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            why = f"is a DTensor of partial sums ({placement})"
            refuse(name, why, "Redistribute it: Replicate() or Shard().")
        if type(placement).__name__ not in ("Shard", "_StridedShard"):
            refuse(name, f"is a DTensor with the placement {placement}", "Redistribute it with Shard().")
        assert mesh.coordinate is not None
        after = int(getattr(placement, "split_factor", 1))
        splits[placement.dim].append(_Split(mesh.shape[number], mesh.coordinate[number], after))
    return splits


def _in_order(splits: Sequence[_Split], name: str) -> list[_Split]:
    """Return the splits in the order in which they are applied. FSDP2 splits parts that tensor parallelism
    has already split, although its mesh dimension comes first."""
    order: list[_Split] = []
    for split in reversed(splits):
        parts, place = 1, 0
        while parts < split.after and place < len(order):
            parts, place = parts * order[place].parts, place + 1
        if parts != split.after:
            why = f"is a DTensor whose local part is not a single slice (strided by {split.after})"
            refuse(name, why, "Redistribute it with Shard().")
        order.insert(place, split)
    return order


# DTensors in the state of a parameter: on the parameter's mesh, with its placements or with recorded ones


def own_placements(tensor: Any, parameter: Any, name: str) -> list[str] | None:
    """Return the placements to record for a DTensor; None if they are its parameter's, or if it belongs to no
    parameter. Raises StateError if it could not be created again."""
    if parameter is None:
        return None
    if not is_sharded(parameter) or tensor.device_mesh != parameter.device_mesh:
        why = "is a DTensor on another mesh than its parameter"
        refuse(name, why, "Keep it on the parameter's mesh.")
    if tensor.placements == parameter.placements:
        return None
    return [_code(placement) for placement in tensor.placements]


def assembled(about: Mapping[str, Any], local: Tensor, parameter: Any, name: str) -> Tensor:
    """Return a DTensor with this local tensor, as part of a parameter's state. Raises DamagedError."""
    shape, placements = _made_of(about, parameter, name)
    made: Tensor = type(parameter).from_local(
        local, parameter.device_mesh, placements, run_check=False, shape=shape, stride=tuple(about["stride"])
    )
    return made


def _made_of(about: Mapping[str, Any], parameter: Any, name: str) -> tuple[torch.Size, Sequence[Any]]:
    """Return the recorded shape and placements of a DTensor."""
    shape, codes = torch.Size(about["shape"]), about["context"]
    if codes is None:
        return shape, parameter.placements
    if not isinstance(codes, list) or len(codes) != parameter.device_mesh.ndim:
        raise DamagedError(f"The snapshot holds invalid placements for {name}. Nothing was loaded.")
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
        raise DamagedError(f"The snapshot holds an invalid placement for {name}. Nothing was loaded.")
    if found[2] is None:
        return Shard(int(found[1]))
    return _StridedShard(int(found[1]), split_factor=int(found[2]))


# FSDP2


def has_unreduced_gradients(module: Any) -> bool:
    """Whether an FSDPModule holds gradients that its sharded parameters do not show: those of unsharded
    parameters, or partly reduced ones, between two backward passes without gradient synchronization."""
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
    """This rank's slice of a parameter that FSDP1 flattens to one dimension.

    piece: the slice of the flat tensor, which includes the padding at its end.
    whole: the shape of the parameter, or the (name, shape) of each parameter that the flat tensor joins.
    """

    piece: TensorBox
    whole: list[Any]


def flat_pieces(module: Any) -> dict[Tensor, FlatPiece]:
    """Return the slice of each parameter that a FullyShardedDataParallel shards itself."""
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
        return {}  # the module shows its parameters unchanged
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
