"""Single tensors: their names for dtypes, what is refused, their strides, filling and making one; and tensor
subclasses, taken apart with `__tensor_flatten__` and put together with `__tensor_unflatten__`.

Owns which classes may be made anew: only those registered here, and those of the live state itself. A class
that is only named in a checkpoint is never imported. Never reads a tensor's bytes but to fill another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

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
    """Raise StateError in the three sentences every refusal has."""
    raise StateError(
        f"{location} {why}, so it cannot be saved exactly. Nothing was saved or changed. {remedy}",
        location=location,
    )


def check(tensor: Tensor, location: str) -> None:
    """Raise StateError unless the tensor's own memory holds all there is to it."""
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
    # Of other devices nothing is known that a snapshot rests on: the order of their streams, and their
    # random numbers.
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
    """Whether its storage holds all of its elements: `untyped_storage().resize_()` changes no tensor. What
    cannot say what its storage is (XLA's, say) is believed."""
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
    """Elements from its first one in memory to its last, with what lies between."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.numel()
    return 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory other than by dimensions of stride 0 (expanded ones are stored
    in full, and filled through one element)."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Strides in elements, or None where they are exactly the row-major ones."""
    found = tensor.stride()
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(found), strict=True):
        if stride != expected:
            return tuple(found)
        expected *= max(size, 1)
    return None


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory. Those without elements never are."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.numel() > 0
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.stride() == b.stride()
        and a.device == b.device
    )


def span(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of the memory that holds the tensor's elements."""
    start = tensor.data_ptr()
    return start, start + _reach(tensor) * tensor.element_size()


def leaf_of(name: str, tensor: Tensor, aliases: tuple[str, ...] = (), box: Box | None = None) -> Leaf:
    """The record of a tensor, not placed in an image yet."""
    dtype, stride = DTYPE_NAMES[tensor.dtype], strides(tensor)
    return Leaf(name=name, dtype=dtype, shape=tuple(tensor.shape), stride=stride, aliases=aliases, box=box)


def described(thing: Tensor | Leaf, box: Box | None = None) -> str:
    """A tensor in a table of differences: `float32 (3, 4)`, or `float32 (3, 4), from (6, 0) of (9, 4)`;
    `box` is that of a tensor."""
    dtype = thing.dtype if isinstance(thing, Leaf) else DTYPE_NAMES[thing.dtype]
    box = thing.box if isinstance(thing, Leaf) else box
    piece = f", from {box.start} of {box.shape}" if box is not None else ""
    return f"{dtype} {tuple(thing.shape)}{piece}"


def fits(leaf: Leaf, tensor: Tensor, box: Box | None = None) -> bool:
    """Whether a leaf's bytes can fill the tensor in place, which is that box of a larger one."""
    if leaf.box != box or tuple(tensor.shape) != leaf.shape:
        return False
    recorded = leaf.stride or (1,) * len(leaf.shape)
    expanded = [s == 0 and size > 1 for s, size in zip(tensor.stride(), tensor.shape, strict=True)]
    pairs = zip(recorded, expanded, strict=True)
    return DTYPE_NAMES.get(tensor.dtype) == leaf.dtype and all(s == 0 for s, needed in pairs if needed)


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: copies of them keep every bit, NaN payloads too."""
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_SAME_SIZE[tensor.element_size()])


def fill(live: Tensor, source: Tensor) -> None:
    """Give `live` the elements of `source` (same shape and dtype) in place, whatever its strides."""
    mode = torch.inference_mode() if live.is_inference() else torch.no_grad()
    with mode, torch._C.DisableTorchFunctionSubclass():
        target, origin = distinct_bits(live, source)
        target.copy_(origin)


def distinct_bits(live: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of both without the repetitions along dimensions that are expanded in `live`: what has to be
    copied to give it the elements of `source` (same shape and dtype)."""
    target, origin = bits(live.detach()), bits(source.detach())
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.size(dim) > 1:
            target, origin = target.narrow(dim, 0, 1), origin.narrow(dim, 0, 1)
    return target, origin


def make(leaf: Leaf, device: torch.device) -> Tensor:
    """A tensor with the shape, strides and dtype of a leaf, not filled yet."""
    dtype = TORCH_DTYPES[leaf.dtype]
    if leaf.stride is None:
        return torch.empty(leaf.shape, dtype=dtype, device=device)
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device=device)


# Subclasses


def register_tensor_class(kind: type[Tensor]) -> None:
    """Let tensors of this class be made anew where the live state does not hold one of them yet."""
    _known[_name(kind)] = kind


def kind_of(tensor: Tensor) -> str:
    """The class of a tensor as it is recorded; `Parameter` for parameters."""
    return "Parameter" if type(tensor) is torch.nn.Parameter else _name(type(tensor))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the tensor's data is in other tensors."""
    kind = type(tensor)
    return kind not in PLAIN and kind not in _LAZY and hasattr(kind, "__tensor_flatten__")


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, whose local part is what a rank saves."""
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "_local_tensor")


def part_name(name: str, attribute: str) -> str:
    """The name of an inner tensor: that of the whole where the rest of it is not saved (DTensor)."""
    return name if attribute == "_local_tensor" else f"{name}.{attribute}"


def flatten(tensor: Tensor, location: str) -> tuple[list[str], object]:
    """The attributes that hold the inner tensors, and what else it takes to put them together.
    Raises StateError if that cannot be saved exactly."""
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
    """Whether a tensor of the recorded class can be made here; `like` is the tensor it belongs to."""
    recorded = about.get("class")
    if recorded is None or recorded == "Parameter":
        return True
    return recorded in _known or (like is not None and kind_of(like) == recorded)


def assemble(about: Mapping[str, Any], parts: dict[str, Tensor], like: Tensor | None) -> Tensor:
    """A tensor of a wrapping class, made of its parts, which it keeps. Raises DamagedError when the
    class of the live state cannot be what was recorded."""
    kind = _class_of(about, like)
    size, stride = torch.Size(about["shape"]), tuple(about["stride"])
    return kind.__tensor_unflatten__(parts, about["context"], size, stride)  # type: ignore[attr-defined, no-any-return]


def dress(plain: Tensor, about: Mapping[str, object], like: Tensor | None) -> Tensor:
    """A plain tensor in its recorded class and with its recorded flag; the memory stays."""
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
        raise DamagedError(f"A tensor of the class {recorded} cannot be made here. Nothing was loaded.")
    return _known[recorded]
