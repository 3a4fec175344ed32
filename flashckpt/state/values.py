"""Nested values, in which references replace the tensors; and the types that torch and NumPy add to the typed
encoding.

Owns the plain forms of those types. Checks what a file holds against fixed tables before it creates objects.
"""

from __future__ import annotations

import random
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashckpt.errors import DamagedError
from flashckpt.format.typed import MAX_DEPTH, SEQUENCES, Hole, LeafRef, children, register, same
from flashckpt.state import rng
from flashckpt.state.leaves import (
    CPU,
    Filling,
    Place,
    Sink,
    array_dtype,
    check_array,
    is_large,
    is_stored,
    value_of,
)
from flashckpt.state.tensors import DTYPE_NAMES, TORCH_DTYPES, bits, check, refuse

CONTAINERS = frozenset((dict, OrderedDict, defaultdict, *SEQUENCES))  # that may hold tensors
SIMPLE = frozenset((type(None), bool, int, float, str, bytes, complex))

# Nested values


def join(prefix: str, part: object) -> str:
    """Return the name of a part of the value with the name `prefix`."""
    text = part if isinstance(part, str) else repr(part)
    return f"{prefix}.{text}" if prefix and text else prefix or text


def holds_tensor(value: Any, depth: int = 0, *, or_large: bool = False) -> bool:
    """Whether the value contains a tensor or, with `or_large`, a value that is stored as a leaf."""
    if or_large and is_large(value):
        return True
    if type(value) in SIMPLE:
        return False
    if isinstance(value, Tensor):
        return True
    if depth > MAX_DEPTH or not isinstance(value, (dict, *SEQUENCES, set, frozenset)):
        return False  # the encoding refuses values that are nested too deep, with their path
    or_large = or_large and type(value) in CONTAINERS  # a set, for example, cannot hold a reference
    parts = value.values() if isinstance(value, dict) else value
    return any(holds_tensor(part, depth + 1, or_large=or_large) for part in parts)


def survey(
    value: Any,
    name: str,
    place: Place,
    sink: Sink,
    hole: Callable[[object, object], None] | None = None,
    depth: int = 0,
) -> Any:
    """Return `value` with references in place of its tensors, large arrays and large bytes. If `hole` is
    given, call it with the (container, key) of each part without tensors, whatever its size, and put a Hole
    in its place. Raises StateError for tensors in unsupported containers."""
    if isinstance(value, Tensor):
        return sink.add(name, value, place)
    if hole is None and is_large(value):
        return sink.store(name, value)
    if type(value) in SIMPLE or not holds_tensor(value, or_large=hole is None):
        if hole is None:
            return value
        hole(place.container, place.key)
        return Hole()
    kind = type(value)
    if depth > MAX_DEPTH:
        refuse(name, f"nests tensors deeper than {MAX_DEPTH} levels, or contains itself", "Flatten it.")
    if kind not in CONTAINERS:
        refuse(name, f"holds tensors in a {kind.__qualname__}", "Use a dict, list, tuple or deque for them.")
    sink.guard(value)
    sink.anchor(place.container, place.key, value)  # another container would hold other tensors
    container = None if place.container is None else value

    def below(key: object, item: object) -> Any:
        inner = place._replace(container=container, key=key)
        return survey(item, join(name, key), inner, sink, hole, depth + 1)

    return rebuild(value, [(key, below(key, item)) for key, item in children(value)])


def rebuild(like: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a container of the type of `like` with these (key or position, item) pairs."""
    if type(like) is defaultdict:
        return defaultdict(like.default_factory, items)
    if isinstance(like, dict):
        return Counter(dict(items)) if type(like) is Counter else type(like)(items)
    values = [item for _, item in items]
    return deque(values, like.maxlen) if type(like) is deque else type(like)(values)


def references(value: object, name: str) -> Iterator[tuple[str, LeafRef]]:
    """Yield (name of its place, LeafRef) of each reference in a nested value with the name `name`."""
    if type(value) is LeafRef:
        yield name, value
    for key, item in children(value):
        yield from references(item, join(name, key))


def _refill(live: Any, value: Any) -> bool:
    """Fill a live array, set, Counter or bytearray with the saved contents; return False if it cannot be."""
    if type(live) is np.ndarray:
        if live.dtype != value.dtype or live.shape != value.shape or not live.flags.writeable:
            return False
        np.copyto(live, value)
    elif type(live) in (set, Counter):
        live.clear()
        live.update(value)
    elif type(live) is bytearray:
        try:
            live[:] = value
        except BufferError:  # an exported buffer fixes the length
            return False
    else:
        return False
    return True


@dataclass
class Settling:
    """Restores nested values and keeps existing containers and tensors.

    like: the parameter to which the values belong.
    holes: the values for the holes, in order.
    scalars_on_cpu: keep the step counters of a run on a CPU there when its parameters move to a device.
    """

    filling: Filling
    home: torch.device = CPU
    like: Tensor | None = None
    holes: Iterator[object] = field(default_factory=lambda: iter(()))
    scalars_on_cpu: bool = False
    # Live objects that already hold saved contents: a second place gets an object of its own.
    _kept: dict[int, object] = field(default_factory=dict)

    def settle(self, value: Any, live: Any, name: str) -> Any:
        """Return the object that belongs in the place of `live`: `live` itself, changed, if possible."""
        kind = type(value)
        if kind is LeafRef and is_stored(value):
            return self._settle_stored(value, live, name)
        if kind is LeafRef:
            stays = self.scalars_on_cpu and not value.about and not self.filling.leaf(name).shape
            return self.filling.place(value, name, live, CPU if stays else self.home, self.like)
        if kind is Hole:
            for held in self.holes:
                return held
            raise DamagedError("The snapshot holds fewer values than its structure needs. It cannot be used.")
        if kind in CONTAINERS:
            return self._settle_items(value, live, name)
        if rng.is_generator(live) and type(live) is kind:
            rng.restore_one(live, rng.capture_one(value))
            return live
        if type(live) is kind and id(live) not in self._kept and _refill(live, value):
            self._kept[id(live)] = live
            return live
        return value

    def _settle_stored(self, ref: LeafRef, live: Any, name: str) -> Any:
        leaf = self.filling.leaf(name)
        made = value_of(ref.about, self.filling.saved.tensor(leaf.name))
        if type(live) is type(made) and id(live) not in self._kept:
            # To fill a view of an array that was already filled would change that array: keep such a view
            # only if it already has the saved contents.
            kept = [each for each in self._kept.values() if type(each) is type(live) is np.ndarray]
            is_view = any(np.may_share_memory(live, each) for each in kept)
            if same(live, made) if is_view else _refill(live, made):
                self._kept[id(live)] = made = live
        self.filling.add_value(name, made)
        return made

    def _settle_items(self, value: Any, live: Any, name: str) -> Any:
        same = type(live) is type(value)
        before = dict(children(live)) if same else {}
        items = [(key, self.settle(item, before.get(key), join(name, key))) for key, item in children(value)]
        same = same and getattr(live, "maxlen", None) == getattr(value, "maxlen", None)
        if not same or type(value) is tuple:
            return rebuild(value, items)
        live.clear()
        if isinstance(live, dict):
            live.update(items)
        else:
            live.extend(item for _, item in items)
        return live


@dataclass(frozen=True)
class StoredTensor:
    """A tensor among values, in a loader's state: dtype, shape, device and row-major bytes. Two are equal if
    all four fields are."""

    dtype: str
    shape: tuple[int, ...]
    device: str
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor, location: str) -> StoredTensor:
        """Convert a tensor. Raises StateError, with its path, if these fields do not describe it fully."""
        check(tensor, location)
        if type(tensor) is not Tensor or tensor.requires_grad:
            refuse(location, f"is a {type(tensor).__name__} with a gradient's history", "Detach it.")
        raw = bits(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
        device = str(tensor.device)
        return cls(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), device, raw.numpy().tobytes())

    def tensor(self) -> Tensor:
        """Return a new tensor, on the CPU if its device does not exist here."""
        made = torch.empty(self.shape, dtype=TORCH_DTYPES[self.dtype], device="cpu")
        if self.data:
            raw = np.frombuffer(self.data, dtype=np.uint8).copy()
            # Not torch.frombuffer: a default device that the user set would move it there.
            made = torch.from_numpy(raw).view(made.dtype).reshape(self.shape)
        device = torch.device(self.device)
        there = device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())
        return made.to(device) if there else made


# The plain forms of types, and their conversion back


_DEVICE = re.compile(r"[a-z_]{1,32}(:\d{1,5})?")
_BIT_GENERATORS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}


def _names_of(kind: type) -> dict[str, Any]:
    return {str(value): value for value in vars(torch).values() if isinstance(value, kind)}


def _device(text: str) -> torch.device:
    if not _DEVICE.fullmatch(text):
        raise ValueError(f"{text!r} is not a device")
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _tensor_back(plain: Any) -> StoredTensor:
    dtype, shape, device, data = plain
    expected = torch.Size(shape).numel() * TORCH_DTYPES[dtype].itemsize
    if type(data) is not bytes or len(data) != expected or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a tensor of another size")
    torch.device(device)
    return StoredTensor(dtype, tuple(shape), device, data)


def _array_plain(array: np.ndarray[Any, Any]) -> list[object]:
    check_array(array)
    fortran = array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous
    return [array.dtype.str, list(array.shape), array.tobytes("F" if fortran else "C"), fortran]


def _array_back(plain: Any) -> np.ndarray[Any, Any]:
    text, shape, data, fortran = plain
    dtype = array_dtype(text)
    if not all(type(size) is int and size >= 0 for size in shape) or len(shape) > 64:
        raise ValueError("an invalid shape")
    if dtype.itemsize * int(np.prod(shape, dtype=object)) != len(data):
        raise ValueError("an array of another length")
    flat = np.frombuffer(bytearray(data), dtype=dtype) if data else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def _scalar_back(plain: Any) -> np.generic:
    text, data = plain
    dtype = array_dtype(text)
    if dtype.itemsize != len(data):
        raise ValueError("a scalar of another length")
    return np.frombuffer(data, dtype=dtype)[0] if data else dtype.type()  # type: ignore[no-any-return]


def _numpy_generator_plain(generator: np.random.Generator) -> list[object]:
    name = type(generator.bit_generator).__name__
    if name not in _BIT_GENERATORS:
        raise ValueError(f"the bit generator {name} has no exact encoding")
    return [name, rng.capture_one(generator)]


def _in_state(generator: Any, state: Any) -> Any:
    rng.restore_one(generator, state)
    return generator


def _register(
    kinds: type | tuple[type, ...], tag: str, to_plain: Callable[[Any], Any], back: Callable[[Any], Any]
) -> None:
    """Register types whose values are equal if their plain forms are."""
    register(kinds, tag, to_plain, back, same=lambda a, b: bool(to_plain(a) == to_plain(b)))


# All dtypes of torch, including those that no leaf may have: options may hold them (a quantized dtype as an
# autocast argument).
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _names_of(torch.dtype).values()}

register(torch.Size, "torch.Size", list, torch.Size)
register(torch.dtype, "torch.dtype", lambda dtype: str(dtype).removeprefix("torch."), _DTYPES.__getitem__)
register(torch.layout, "torch.layout", str, _names_of(torch.layout).__getitem__)
register(torch.memory_format, "torch.memory_format", str, _names_of(torch.memory_format).__getitem__)
register(torch.device, "torch.device", str, _device)
register(StoredTensor, "torch.Tensor", lambda t: [t.dtype, list(t.shape), t.device, t.data], _tensor_back)
_register(
    torch.Generator,
    "torch.Generator",
    lambda generator: [str(generator.device), rng.capture_one(generator)],
    lambda plain: _in_state(torch.Generator(_device(plain[0])), plain[1]),
)
_register(
    np.random.Generator,
    "numpy.Generator",
    _numpy_generator_plain,
    lambda plain: _in_state(np.random.Generator(_BIT_GENERATORS[plain[0]](0)), plain[1]),
)
_register(
    np.random.RandomState,
    "numpy.RandomState",
    rng.capture_one,
    lambda plain: _in_state(np.random.RandomState(0), plain),
)
_register(random.Random, "random.Random", rng.capture_one, lambda plain: _in_state(random.Random(0), plain))
_register(np.ndarray, "numpy.array", _array_plain, _array_back)
register(
    tuple({type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUMm"}),
    "numpy.dtype",
    lambda dtype: dtype.str,
    array_dtype,
)
_register(
    (
        *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.bool_),
        *(np.float16, np.float32, np.float64, np.longdouble, np.complex64, np.complex128, np.clongdouble),
        *(np.bytes_, np.str_, np.datetime64, np.timedelta64),
    ),
    "numpy.scalar",
    lambda scalar: [scalar.dtype.str, scalar.tobytes()[: scalar.dtype.itemsize]],
    _scalar_back,
)
