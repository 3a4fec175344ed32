"""Tensor subclasses: taken apart with `__tensor_flatten__`, put together with `__tensor_unflatten__`.

Owns which classes may be made anew: only those registered here, and those of the live state itself. A class
that is only named in a checkpoint is never imported. Never copies bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashckpt.errors import DamagedError, StateError
from flashckpt.format.typed import check_roundtrip
from flashckpt.state.tensors import refuse

_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer}
_known: dict[str, type[Tensor]] = {}


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
    return type(tensor) not in _PLAIN and hasattr(type(tensor), "__tensor_flatten__")


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
    if like is not None and is_sharded(like):
        # What holds a DTensor together (mesh, placements) is that of the parameter it belongs to.
        made = torch.empty_like(like, dtype=next(iter(parts.values())).dtype)
        made._local_tensor = parts["_local_tensor"]  # type: ignore[attr-defined]
        return made.detach()
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
