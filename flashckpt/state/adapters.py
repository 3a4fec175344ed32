"""Typed encoding of values that torch and NumPy add: sizes, dtypes, devices, generators, scalars, arrays.

Owns their plain forms. What is read is checked against fixed tables before anything is made of it.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashckpt.format.typed import encode_json, register
from flashckpt.state import rng
from flashckpt.state.tensors import DTYPE_NAMES, TORCH_DTYPES, bits, check, refuse

# Dtypes that are no tensor's here may stand in options all the same (a quantized one in an autocast
# argument): every dtype of torch has a name.
_DTYPES: dict[str, torch.dtype] = {
    name: value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)
} | TORCH_DTYPES
_LAYOUTS = {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)}
_FORMATS = {str(v): v for v in vars(torch).values() if isinstance(v, torch.memory_format)}
_DEVICE = re.compile(r"[a-z_]{1,32}(:\d{1,5})?")
_ARRAY_DTYPE = re.compile(r"[<>|=][biufcSUMm]\d{1,9}(\[\d{0,9}[A-Za-z]{1,3}\])?")
_BIT_GENERATORS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}

_DTYPE_KINDS = tuple({type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUMm"})


def _device(text: str) -> torch.device:
    if not _DEVICE.fullmatch(text):
        raise ValueError(f"{text!r} is no device")
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _array_plain(array: np.ndarray[Any, Any]) -> list[object]:
    if array.dtype.hasobject or not _ARRAY_DTYPE.fullmatch(array.dtype.str):
        raise ValueError(f"an array of dtype {array.dtype} has no exact encoding")
    fortran = array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous
    return [array.dtype.str, list(array.shape), array.tobytes("F" if fortran else "C"), fortran]


def _array_back(plain: Any) -> np.ndarray[Any, Any]:
    text, shape, data, fortran = plain
    dtype = _array_dtype(text)
    if not all(type(size) is int and size >= 0 for size in shape) or len(shape) > 64:
        raise ValueError("a shape that cannot be")
    if dtype.itemsize * int(np.prod(shape, dtype=object)) != len(data):
        raise ValueError("an array of another length")
    flat = np.frombuffer(bytearray(data), dtype=dtype) if data else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def _array_dtype(text: object) -> np.dtype[Any]:
    if not isinstance(text, str) or not _ARRAY_DTYPE.fullmatch(text):
        raise ValueError(f"{text!r} is no dtype of an array")
    return np.dtype(text)


def _same_arrays(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    orders = a.flags.c_contiguous == b.flags.c_contiguous or not a.flags.f_contiguous
    return orders and a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()


def _scalar_plain(scalar: np.generic) -> list[object]:
    return [scalar.dtype.str, scalar.tobytes()[: scalar.dtype.itemsize]]


def _scalar_back(plain: Any) -> np.generic:
    text, data = plain
    dtype = _array_dtype(text)
    if dtype.itemsize != len(data):
        raise ValueError("a scalar of another length")
    return np.frombuffer(data, dtype=dtype)[0] if data else dtype.type()  # type: ignore[no-any-return]


def _same_scalars(a: np.generic, b: np.generic) -> bool:
    return a.dtype.str == b.dtype.str and a.tobytes() == b.tobytes()


def _torch_generator(plain: Any) -> torch.Generator:
    device, state = plain
    generator = torch.Generator(_device(device))
    rng.restore_one(generator, state)
    return generator


def _numpy_generator(plain: Any) -> np.random.Generator:
    name, state = plain
    generator = np.random.Generator(_BIT_GENERATORS[name](0))
    rng.restore_one(generator, state)
    return generator


def _numpy_generator_plain(generator: np.random.Generator) -> list[object]:
    name = type(generator.bit_generator).__name__
    if name not in _BIT_GENERATORS:
        raise ValueError(f"the bit generator {name} has no exact encoding")
    return [name, rng.capture_one(generator)]


def _restored(generator: Any) -> Any:
    def back(plain: Any) -> Any:
        made = generator(0)
        rng.restore_one(made, plain)
        return made

    return back


def _same_states(a: object, b: object) -> bool:
    return encode_json(rng.capture_one(a)) == encode_json(rng.capture_one(b))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's dtype, shape, device and bytes, row-major. Equal if all of them are."""

    dtype: str
    shape: tuple[int, ...]
    device: str
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor, location: str) -> StoredTensor:
        """Raises StateError, with its path, for a tensor that is more than these four."""
        check(tensor, location)
        if type(tensor) is not Tensor or tensor.requires_grad:
            refuse(location, f"is a {type(tensor).__name__} with a gradient's history", "Detach it.")
        raw = bits(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
        device = str(tensor.device)
        return cls(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), device, raw.numpy().tobytes())

    def tensor(self) -> Tensor:
        """A tensor of its own; on the CPU where its device is none that is there."""
        made = torch.empty(self.shape, dtype=TORCH_DTYPES[self.dtype], device="cpu")
        if self.data:
            raw = np.frombuffer(self.data, dtype=np.uint8).copy()
            # Not torch.frombuffer: a default device that the user set would move it there.
            made = torch.from_numpy(raw).view(made.dtype).reshape(self.shape)
        device = torch.device(self.device)
        there = device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())
        return made.to(device) if there else made


def _tensor_plain(stored: StoredTensor) -> list[object]:
    return [stored.dtype, list(stored.shape), stored.device, stored.data]


def _tensor_back(plain: Any) -> StoredTensor:
    dtype, shape, device, data = plain
    stored = StoredTensor(dtype, tuple(shape), device, data)
    expected = torch.Size(shape).numel() * TORCH_DTYPES[dtype].itemsize
    if type(data) is not bytes or len(data) != expected or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a tensor of another size")
    torch.device(device)
    return stored


register(torch.Size, "torch.Size", lambda size: list(size), lambda plain: torch.Size(plain))
register(
    torch.dtype, "torch.dtype", lambda dtype: str(dtype).removeprefix("torch."), lambda text: _DTYPES[text]
)
register(torch.layout, "torch.layout", str, lambda text: _LAYOUTS[text])
register(torch.memory_format, "torch.memory_format", str, lambda text: _FORMATS[text])
register(torch.device, "torch.device", str, _device)
register(
    torch.Generator,
    "torch.Generator",
    lambda g: [str(g.device), rng.capture_one(g)],
    _torch_generator,
    same=_same_states,
)
register(np.random.Generator, "numpy.Generator", _numpy_generator_plain, _numpy_generator, same=_same_states)
register(
    np.random.RandomState,
    "numpy.RandomState",
    rng.capture_one,
    _restored(np.random.RandomState),
    same=_same_states,
)
register(random.Random, "random.Random", rng.capture_one, _restored(random.Random), same=_same_states)
register(np.ndarray, "numpy.array", _array_plain, _array_back, same=_same_arrays)
register(_DTYPE_KINDS, "numpy.dtype", lambda dtype: dtype.str, _array_dtype)
register(
    (
        *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.bool_),
        *(np.float16, np.float32, np.float64, np.longdouble, np.complex64, np.complex128, np.clongdouble),
        *(np.bytes_, np.str_, np.datetime64, np.timedelta64),
    ),
    "numpy.scalar",
    _scalar_plain,
    _scalar_back,
    same=_same_scalars,
)
register(StoredTensor, "torch.Tensor", _tensor_plain, _tensor_back)
