"""The state of random number generators as compact plain values, and the way back; and which generators an
object's parts own.

Owns the global generators (Python, NumPy's legacy one, torch on the CPU and on every CUDA device) and the
encoding of single generators. Never synchronises a device, never initialises CUDA, never seeds. Looks only at
attributes of what is the user's; calls nothing of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from flashckpt.errors import DamagedError, StateError

State = dict[str, Any]

_PYTHON_VERSION = 3
_PYTHON_TAIL = struct.Struct("<Bd")
_PYTHON_WORDS = 625
_NUMPY_WORDS = 624
_NUMPY_TAIL = struct.Struct("<IBd")
_TORCH_CPU_BYTES = 5056
_TORCH_HEAD_BYTES = 24
_TORCH_WORDS = 624
_TORCH_PACKED_BYTES = _TORCH_CPU_BYTES - 4 * _TORCH_WORDS


def _globals() -> dict[str, Any]:
    """The generators behind the functions of `random`, `numpy.random` and `torch`."""
    found: dict[str, Any] = {"python": random.getstate, "numpy": np.random.get_state}
    return {name: of.__self__ for name, of in found.items()} | {"torch": torch.default_generator}


def capture() -> State:
    """The global generators' states now: Python, NumPy, torch CPU, each CUDA device if CUDA is in use."""
    state: State = _packed(_record())
    return state


def capture_cpu() -> State:
    """The same without devices: what a loader's worker process has."""
    return {name: capture_one(generator) for name, generator in _globals().items()}


def _record() -> dict[str, Any]:
    """What `capture` packs."""
    raw: dict[str, Any] = {name: _raw(generator) for name, generator in _globals().items()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raw["cuda"] = [_raw(generator) for generator in torch.cuda.default_generators]
    return raw


def restore(state: State) -> None:
    """Put back what `capture` gave. All of it is read before any generator is touched.

    Devices that this process does not have are left out; CUDA that is not in use yet is set when it is.
    Raises DamagedError for anything that `capture` cannot have given.
    """
    with _damaged("the random numbers' state"):
        put_back = [_read(generator, state[name]) for name, generator in _globals().items()]
        cuda = [_torch_state(packed) for packed in state.get("cuda", ())]
        for put in put_back:
            put()
        # Without NVML the question for devices initialises CUDA: asked only where there is an answer to use.
        devices = torch.cuda.device_count() if cuda else 0
        for index, device_state in enumerate(cuda[:devices]):
            torch.cuda.set_rng_state(device_state, index)


def is_generator(value: object) -> bool:
    """Whether `capture_one` can take it."""
    return isinstance(value, torch.Generator | random.Random | np.random.RandomState | np.random.Generator)


def is_global(value: object) -> bool:
    """Whether it is one of those that `capture` takes."""
    return any(value is each for each in (*_globals().values(), *torch.cuda.default_generators))


def capture_one(generator: object) -> Any:
    """The state of one generator of torch, Python or NumPy, as plain values."""
    return _packed(_raw(generator))


class _Raw(NamedTuple):
    """The state of a generator as the generator gives it, in memory of its own, and the function that packs
    it."""

    state: Any
    pack: Callable[[Any], Any]


def _raw(generator: object) -> _Raw:
    if isinstance(generator, torch.Generator):
        return _Raw(generator.get_state(), _torch_bytes)
    if isinstance(generator, np.random.RandomState):
        is_global = generator is np.random.get_state.__self__  # type: ignore[attr-defined]
        state = _numpy_global.state() if is_global else generator.get_state(legacy=False)
        return _Raw(state, _numpy_plain)
    if isinstance(generator, np.random.Generator):
        # Packed now: a bit generator of another package may hand out the arrays that it draws from.
        return _Raw(_plain(dict(generator.bit_generator.state)), _as_it_is)
    if isinstance(generator, random.Random):
        return _Raw(generator.getstate(), _python_bytes)
    raise StateError(f"{type(generator).__name__} is not a random number generator that can be saved.")


def _as_it_is(state: Any) -> Any:
    return state


def _packed(raw: Any) -> Any:
    """Each `_Raw` in nested dicts and lists, packed."""
    if isinstance(raw, _Raw):
        return raw.pack(raw.state)
    if isinstance(raw, dict):
        return {name: _packed(each) for name, each in raw.items()}
    return [_packed(each) for each in raw]


class _NumpyGlobal:
    """Reads the state of NumPy's global generator. NumPy copies the 624 words of its twister one by one,
    which takes 30 us; a comparison of the twister's memory takes 1 us, and a training process that does not
    draw from NumPy has the same words each time.

    The words do not say whether a normal number waits, the second of a pair. A state is kept only where
    none waits: a pair that is drawn changes the words, and a state read with the same words as one in which a
    number waited is not kept either. What this cannot see is a `np.random.set_state` of the program that goes
    back to the middle of the newest pair, with no record taken in that middle before.
    """

    _NUM_BYTES = 4 * _NUMPY_WORDS + 4  # the words and the position

    def __init__(self) -> None:
        self._bits: Any = None
        self._address = 0
        self._words = b""
        self._state: Any = None
        self._waited_at = b""

    def state(self) -> Any:
        bits = np.random.get_bit_generator() if hasattr(np.random, "get_bit_generator") else None
        if type(bits) is not np.random.MT19937:
            return np.random.get_state(legacy=False)
        if bits is not self._bits:
            self._bits, self._address = bits, bits.ctypes.state_address
            self.forget()
        words = ctypes.string_at(self._address, self._NUM_BYTES)
        if self._state is not None and words == self._words:
            return self._state
        state: Any = np.random.get_state(legacy=False)
        self._state = None
        if state["has_gauss"]:
            self._waited_at = words
        elif words != self._waited_at:
            self._words, self._state = words, state
        return state

    def forget(self) -> None:
        """A state was set: the same words may have another number that waits."""
        self._state, self._waited_at = None, b""


_numpy_global = _NumpyGlobal()


def restore_one(generator: object, state: Any) -> None:
    """Put one generator back. Raises DamagedError if the state is of another kind of generator."""
    with _damaged(f"the state of a {type(generator).__name__}"):
        _read(generator, state)()


def _read(generator: Any, state: Any) -> Callable[[], object]:
    """Called, puts the generator back."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, _torch_state(state))
    if isinstance(generator, np.random.RandomState):
        _numpy_global.forget()
        return partial(generator.set_state, _numpy_state(state))
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", _array_back(state))
    return partial(generator.setstate, _python_state(state))


@contextlib.contextmanager
def _damaged(what: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, struct.error) as error:
        raise DamagedError(
            f"{what} in the checkpoint cannot be read ({error}). It was damaged or comes from another "
            "generator. Resume from an older step."
        ) from error


def _python_bytes(state: tuple[Any, ...]) -> bytes:
    version, words, gauss = state
    if version != _PYTHON_VERSION:
        raise StateError(f"random.Random states of version {version} are not known to this library.")
    tail = _PYTHON_TAIL.pack(gauss is not None, gauss if gauss is not None else 0.0)
    return array("I", words).tobytes() + tail


def _python_state(packed: bytes) -> tuple[Any, ...]:
    words = array("I", packed[: 4 * _PYTHON_WORDS])
    has_gauss, gauss = _PYTHON_TAIL.unpack(packed[4 * _PYTHON_WORDS :])
    return _PYTHON_VERSION, tuple(words), gauss if has_gauss else None


def _numpy_plain(state: Any) -> Any:
    if state["bit_generator"] != "MT19937":
        return _plain(state)
    tail = _NUMPY_TAIL.pack(state["state"]["pos"], state["has_gauss"], state["gauss"])
    return state["state"]["key"].tobytes() + tail


def _numpy_state(packed: Any) -> dict[str, Any]:
    if not isinstance(packed, bytes):
        state = _array_back(packed)
        if not isinstance(state, dict):
            raise TypeError("not a NumPy generator's state")
        return state
    key = np.frombuffer(packed[: 4 * _NUMPY_WORDS], dtype=np.uint32)
    position, has_gauss, gauss = _NUMPY_TAIL.unpack(packed[4 * _NUMPY_WORDS :])
    twister = {"key": key, "pos": position}
    return {"bit_generator": "MT19937", "state": twister, "has_gauss": has_gauss, "gauss": gauss}


def _torch_bytes(state: torch.Tensor) -> bytes:
    """torch keeps each 32-bit word of its twister in 64 bits: the zero halves are left out."""
    raw = state.numpy().tobytes()
    if len(raw) != _TORCH_CPU_BYTES or sys.byteorder != "little":
        return raw
    end = _TORCH_HEAD_BYTES + 8 * _TORCH_WORDS
    words = np.frombuffer(raw, dtype=np.uint32, count=2 * _TORCH_WORDS, offset=_TORCH_HEAD_BYTES)
    if words[1::2].any():
        return raw
    return raw[:_TORCH_HEAD_BYTES] + words[::2].tobytes() + raw[end:]


def _torch_state(packed: bytes) -> torch.Tensor:
    if len(packed) == _TORCH_PACKED_BYTES:
        end = _TORCH_HEAD_BYTES + 4 * _TORCH_WORDS
        words = np.frombuffer(packed[_TORCH_HEAD_BYTES:end], dtype=np.uint32)
        packed = packed[:_TORCH_HEAD_BYTES] + words.astype(np.uint64).tobytes() + packed[end:]
    # Not torch.frombuffer: a default device that the user set would move it there.
    return torch.from_numpy(np.frombuffer(packed, dtype=np.uint8).copy())


def _plain(value: Any) -> Any:
    """A bit generator's state (dict of ints, strings and arrays) without NumPy types."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "words": value.tobytes()}
    return value.item() if isinstance(value, np.generic) else value


def _array_back(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "words"}:
        return np.frombuffer(value["words"], dtype=np.dtype(value["dtype"]))
    return {key: _array_back(item) for key, item in value.items()}


# Those that an object's parts own


_DEPTH = 4
_MOST_OBJECTS = 256
_MOST_ITEMS = 32
_OPAQUE = (type, ModuleType, FunctionType, torch.Tensor, torch.nn.Module, np.ndarray, str, bytes)


class Recorded:
    """The states of generators at one moment. Later draws do not change it."""

    __slots__ = ("_raw", "_value")

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw: dict[str, Any] | None = raw
        self._value: dict[str, Any] = {}

    def value(self) -> dict[str, Any]:
        """As `Generators.capture_all` gives them. The same object each time: it is not to be changed."""
        if self._raw is not None:
            self._value, self._raw = _packed(self._raw), None
        return self._value


class Generators:
    """The generators reachable from named roots, each once, under the first path that led to it."""

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._found = {p: each for p, each in reached(roots) if is_generator(each) and not is_global(each)}

    def capture(self) -> dict[str, Any]:
        return {path: capture_one(generator) for path, generator in self._found.items()}

    def capture_all(self) -> dict[str, Any]:
        """With the global ones."""
        return self.record_all().value()

    def record_all(self) -> Recorded:
        """What `capture_all` gives, packed only when it is asked for."""
        own = {path: _raw(generator) for path, generator in self._found.items()}
        return Recorded({"global": _record(), "own": own})

    def restore(self, states: Mapping[str, Any]) -> None:
        """Put back those of the states that have a generator here; raises DamagedError."""
        for path, generator in self._found.items():
            if path in states:
                restore_one(generator, states[path])

    def restore_all(self, states: Mapping[str, Any]) -> None:
        restore(states["global"])
        self.restore(states["own"])

    def path_of(self, generator: object) -> str | None:
        """Where one was found."""
        return next((path for path, each in self._found.items() if each is generator), None)

    def strangers(self, states: Mapping[str, Any]) -> list[str]:
        """Paths that are only in the states or only here."""
        return sorted(self._found.keys() ^ states.keys())


def reached(roots: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Objects and what their attributes hold, each once, with its path. Breadth first, so that it is the
    shortest; bounded, so that a data set that holds a million objects costs nothing."""
    seen: set[int] = set()
    level = list(roots.items())
    for _ in range(_DEPTH):
        below: list[tuple[str, object]] = []
        for path, value in level:
            if id(value) in seen or len(seen) > _MOST_OBJECTS:
                continue
            seen.add(id(value))
            yield path, value
            if not is_generator(value):
                below.extend(_held_by(path, value))
        level = below


def _held_by(path: str, value: object) -> Iterator[tuple[str, object]]:
    """What a value holds that may be worth a look, with its path."""
    if isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
        yield from ((f"{path}.{index}", item) for index, item in enumerate(value))
    elif not isinstance(value, _OPAQUE):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            plain = (type(None), bool, int, float, str, bytes)
            yield from (
                (f"{path}.{n}", item) for n, item in attributes.items() if not isinstance(item, plain)
            )
