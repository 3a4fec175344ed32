"""Large arrays and bytes among values, as leaves: their bytes stand in the shard, digested and checksummed,
and not in the JSON of the values.

Owns what is large, the tensor that has a value's bytes, and the way back. A reference to such a leaf says in
`about["value"]` what it was: its kind and, for an array, dtype, shape and order. Never changes a value.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashckpt.format.typed import LeafRef
from flashckpt.state.tensors import DTYPE_NAMES, refuse

# Of fewer bytes a leaf of its own (its row in the plan, its digest, its place in the image) saves nothing.
LARGE_BYTES = 64 << 10
_KEY = "value"
_ARRAY_DTYPE = re.compile(r"[<>|=][biufcSUMm]\d{1,9}(\[\d{0,9}[A-Za-z]{1,3}\])?")


def is_large(value: object) -> bool:
    """Whether a value is stored as a leaf."""
    if type(value) is np.ndarray:
        return value.nbytes > LARGE_BYTES
    return type(value) in (bytes, bytearray) and len(value) > LARGE_BYTES  # type: ignore[arg-type]


def is_stored(ref: LeafRef) -> bool:
    """Whether a reference stands for such a value, and not for a tensor."""
    return _KEY in ref.about


def stored(value: Any, name: str) -> tuple[Tensor, dict[str, object]]:
    """A tensor with a large value's bytes, and what a reference to it says. An array that lies row by row, or
    column by column, is not copied. Raises StateError for an array without an exact encoding."""
    if type(value) is not np.ndarray:
        # A bytearray that is exported cannot change its length: it is copied.
        array = np.frombuffer(bytes(value), dtype=np.uint8)
        return _tensor(array), {_KEY: [type(value).__name__]}
    try:
        check_array(value)
    except ValueError as error:
        refuse(name, f"is {error}", "Keep its content in arrays of numbers.")
    flags = value.flags
    fortran = value.ndim > 1 and flags.f_contiguous and not flags.c_contiguous
    array = value if flags.c_contiguous or fortran else np.ascontiguousarray(value)
    return _tensor(array), {_KEY: ["numpy.array", value.dtype.str, list(value.shape), fortran]}


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is read-only: no byte of it is written
        try:
            tensor = torch.from_numpy(array)
        except (TypeError, ValueError):  # of a type that torch has not, text and dates say
            tensor = None
        if tensor is None or tensor.dtype not in DTYPE_NAMES:
            tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return tensor


def check_array(array: np.ndarray[Any, Any]) -> None:
    """Raise ValueError for an array without an exact encoding."""
    if array.dtype.hasobject or not _ARRAY_DTYPE.fullmatch(array.dtype.str):
        raise ValueError(f"an array of dtype {array.dtype} has no exact encoding")


def array_dtype(text: object) -> np.dtype[Any]:
    """Return the dtype that was written as `text`. Raises ValueError for any other text."""
    if not isinstance(text, str) or not _ARRAY_DTYPE.fullmatch(text):
        raise ValueError(f"{text!r} is no dtype of an array")
    return np.dtype(text)


def check_stored(about: Mapping[str, object], num_bytes: int) -> None:
    """Raise ValueError or TypeError unless a value can be made of so many bytes."""
    facts = about[_KEY]
    if not isinstance(facts, list) or not facts:
        raise ValueError(f"{facts!r} is no kind of value")
    kind, *rest = facts
    if kind == "numpy.array" and len(rest) == 3:
        dtype, shape = array_dtype(rest[0]), rest[1]
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("a shape that cannot be")
        if len(shape) > 64 or dtype.itemsize * int(np.prod(shape, dtype=object)) != num_bytes:
            raise ValueError("an array of another length")
    elif kind not in ("bytes", "bytearray") or rest:
        raise ValueError(f"{kind!r} is no kind of value")


def value_of(about: Mapping[str, Any], source: Tensor) -> Any:
    """The value that was stored, with memory of its own; `source` is its leaf, row by row."""
    check_stored(about, source.numel() * source.element_size())
    kind, *rest = about[_KEY]
    flat = source.contiguous().reshape(-1).view(torch.uint8).numpy()
    if kind != "numpy.array":
        return flat.tobytes() if kind == "bytes" else bytearray(flat)
    text, shape, fortran = rest
    array = flat.copy().view(array_dtype(text)).reshape(shape)
    return np.asfortranarray(array) if fortran else array
