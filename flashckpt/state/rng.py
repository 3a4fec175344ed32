"""The states of random number generators as compact plain values, their restore, and the search for the
generators that an object holds.

Owns the global generators (Python, NumPy's legacy one, torch on the CPU and on each CUDA device) and the
encoding of single generators. Never synchronises a device, never initialises CUDA, never seeds. Reads only
attributes of the user's objects and calls none of their methods.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from flashckpt.errors import DamagedError, StateError

log = logging.getLogger(__name__)

State = dict[str, Any]

_PYTHON_VERSION = 3
_PYTHON = struct.Struct("<625I?d")
_WORDS = 624  # of a Mersenne twister
_NUMPY_TAIL = struct.Struct("<IBd")
_TORCH_CPU_BYTES = 5056
_TORCH_HEAD_BYTES = 24


def _globals() -> dict[str, Any]:
    """The generators behind the functions of `random`, `numpy.random` and `torch`."""
    found: dict[str, Any] = {"python": random.getstate, "numpy": np.random.get_state}
    return {name: of.__self__ for name, of in found.items()} | {"torch": torch.default_generator}


def capture() -> State:
    """Return the states of the global generators: Python, NumPy, torch CPU, each CUDA device if CUDA is
    initialised."""
    state = {name: capture_one(generator) for name, generator in _globals().items()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [capture_one(generator) for generator in torch.cuda.default_generators]
    return state


def restore(state: State) -> None:
    """Restore the states that `capture` returned. Decodes all of them before it changes a generator.

    Ignores devices that this process does not have. If CUDA is not initialised yet, torch sets its generators
    then. Raises DamagedError for states that `capture` cannot have returned.
    """
    with _damaged("the random numbers' state"):
        put_back = [_read(generator, state[name]) for name, generator in _globals().items()]
        cuda = [_torch_state(packed) for packed in state.get("cuda", ())]
        for put in put_back:
            put()
        # Without NVML, device_count initialises CUDA: call it only if there are states for devices.
        devices = torch.cuda.device_count() if cuda else 0
        for index, device_state in enumerate(cuda[:devices]):
            torch.cuda.set_rng_state(device_state, index)


def is_generator(value: object) -> bool:
    """Whether `capture_one` supports a value."""
    return isinstance(value, torch.Generator | random.Random | np.random.RandomState | np.random.Generator)


def is_global(value: object) -> bool:
    """Whether a value is a generator that `capture` includes."""
    return any(value is each for each in (*_globals().values(), *torch.cuda.default_generators))


def capture_one(generator: object) -> Any:
    """Return the state of one generator of torch, Python or NumPy, as plain values."""
    if isinstance(generator, torch.Generator):
        return _torch_bytes(generator.get_state())
    if isinstance(generator, np.random.RandomState):
        return _numpy_plain(generator.get_state(legacy=False))
    if isinstance(generator, np.random.Generator):
        return _plain(dict(generator.bit_generator.state))
    if isinstance(generator, random.Random):
        return _python_bytes(generator.getstate())
    raise StateError(f"{type(generator).__name__} is not a random number generator that can be saved.")


def restore_one(generator: object, state: Any) -> None:
    """Restore one generator. Raises DamagedError if the state belongs to another type of generator."""
    with _damaged(f"the state of a {type(generator).__name__}"):
        _read(generator, state)()


def _read(generator: Any, state: Any) -> Callable[[], object]:
    """Decode a state; return the function that restores the generator."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, _torch_state(state))
    if isinstance(generator, np.random.RandomState):
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
            f"{what} in the checkpoint cannot be read ({error}). It is damaged or belongs to another type of "
            "generator. Resume from an older step."
        ) from error


def _python_bytes(state: tuple[Any, ...]) -> bytes:
    version, words, gauss = state
    if version != _PYTHON_VERSION:
        raise StateError(f"This library does not support random.Random states of version {version}.")
    return _PYTHON.pack(*words, gauss is not None, 0.0 if gauss is None else gauss)


def _python_state(packed: bytes) -> tuple[Any, ...]:
    *words, has_gauss, gauss = _PYTHON.unpack(packed)
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
    key = np.frombuffer(packed[: 4 * _WORDS], dtype=np.uint32)
    position, has_gauss, gauss = _NUMPY_TAIL.unpack(packed[4 * _WORDS :])
    twister = {"key": key, "pos": position}
    return {"bit_generator": "MT19937", "state": twister, "has_gauss": has_gauss, "gauss": gauss}


def _torch_bytes(state: torch.Tensor) -> bytes:
    """Pack the state without the upper halves of its words: torch stores each 32-bit word in 64 bits."""
    raw = state.numpy().tobytes()
    if len(raw) != _TORCH_CPU_BYTES:
        return raw
    words = np.frombuffer(raw, np.uint64, _WORDS, _TORCH_HEAD_BYTES).astype(np.uint32)
    return raw[:_TORCH_HEAD_BYTES] + words.tobytes() + raw[_TORCH_HEAD_BYTES + 8 * _WORDS :]


def _torch_state(packed: bytes) -> torch.Tensor:
    if len(packed) == _TORCH_CPU_BYTES - 4 * _WORDS:
        words = np.frombuffer(packed, np.uint32, _WORDS, _TORCH_HEAD_BYTES).astype(np.uint64)
        packed = packed[:_TORCH_HEAD_BYTES] + words.tobytes() + packed[_TORCH_HEAD_BYTES + 4 * _WORDS :]
    # Not torch.frombuffer: a default device that the user set would move it there.
    return torch.from_numpy(np.frombuffer(packed, dtype=np.uint8).copy())


def _plain(value: Any) -> Any:
    """Return a bit generator's state (dict of ints, strings and arrays) without NumPy types."""
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


# Generators that an object holds


_DEPTH = 10
_MOST_OBJECTS = 4096
_MOST_ITEMS = 32
_PLAIN = (type(None), bool, int, float, str, bytes)
_OPAQUE = (*_PLAIN, type, ModuleType, FunctionType, torch.Tensor, np.ndarray, logging.Logger)


class Generators:
    """The generators reachable from named roots, each once, under its first path."""

    def __init__(self, roots: Mapping[str, object], *, reports: bool = True) -> None:
        """reports: log where the search was cut."""
        self._roots, reach = roots, Reach(opens_modules=True)
        self._found = {p: each for p, each in reach.of(roots) if is_generator(each) and not is_global(each)}
        if reports:
            reach.report(self._found)

    def made_since(self) -> list[str]:
        """Return the paths of generators that did not exist when this object was made."""
        now = Generators(self._roots, reports=False)
        return sorted(now._found.keys() - self._found.keys())

    def capture(self) -> dict[str, Any]:
        return {path: capture_one(generator) for path, generator in self._found.items()}

    def capture_all(self) -> dict[str, Any]:
        """Return the states of these generators and of the global ones."""
        return {"global": capture(), "own": self.capture()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the states whose path has a generator here. Raises DamagedError."""
        for path, generator in self._found.items():
            if path in states:
                restore_one(generator, states[path])

    def restore_all(self, states: Mapping[str, Any]) -> None:
        with _damaged("the random numbers' state"):
            restore(states["global"])
            self.restore(states["own"])

    def path_of(self, generator: object) -> str | None:
        """Return the path of a generator, or None."""
        return next((path for path, each in self._found.items() if each is generator), None)

    def unmatched(self, states: Mapping[str, Any]) -> list[str]:
        """Return the paths that exist only in the states or only here."""
        return sorted(self._found.keys() ^ states.keys())


class Reach:
    """The objects that roots hold: attributes, and items of lists, tuples, dictionaries and partial
    functions. Bounded, so that a data set of a million objects costs nothing.

    opens_modules: search the attributes of modules, too.
    """

    def __init__(self, *, opens_modules: bool = False) -> None:
        self._opaque = _OPAQUE if opens_modules else (*_OPAQUE, torch.nn.Module)
        self._is_cut = False
        # By path, the lengths of containers whose first items alone were searched.
        self._long: dict[str, int] = {}

    def of(self, roots: Mapping[str, object]) -> Iterator[tuple[str, object]]:
        """Yield (path, object) of the roots and of what they hold, each object once. Breadth first, for the
        shortest path."""
        seen: dict[int, object] = {}  # holds the objects: a property may make a new one at an address
        level = list(roots.items())
        for _ in range(_DEPTH):
            below: list[tuple[str, object]] = []
            for path, value in level:
                if id(value) in seen:
                    continue
                if len(seen) >= _MOST_OBJECTS:
                    self._is_cut = True
                    return
                seen[id(value)] = value
                yield path, value
                if not is_generator(value):
                    below.extend(self._held_by(path, value))
            level = below
        self._is_cut = bool(level)

    def report(self, generators: Collection[str]) -> None:
        """Warn of containers whose first items have generators, so that others may have some, too."""
        if self._is_cut:
            log.info(
                "the search for random generators in a loader was cut: generators further down than %d "
                "levels or %d objects are not saved", _DEPTH, _MOST_OBJECTS,
            )  # fmt: skip
        for path, length in self._long.items():
            if any(each.startswith(f"{path}.") for each in generators):
                log.warning(
                    "Not exact: the first %d of the %d items of %s were searched for random generators, and "
                    "those of the others are not saved.", _MOST_ITEMS, length, path,
                )  # fmt: skip

    def _held_by(self, path: str, value: object) -> Iterator[tuple[str, object]]:
        items: Iterable[tuple[object, object]] = ()
        kind: Any = next((each for each in (list, tuple, dict) if isinstance(value, each)), None)
        if kind is not None:  # not by the methods of a subclass, which are the user's
            items = dict.items(value) if isinstance(value, dict) else enumerate(kind.__iter__(value))
            length = kind.__len__(value)
            if length > _MOST_ITEMS:
                self._long[path] = length
                items = itertools.islice(items, _MOST_ITEMS)
        elif isinstance(value, partial):
            items = {"func": value.func, "args": value.args, "keywords": value.keywords}.items()
        elif not isinstance(value, self._opaque):
            attributes = getattr(value, "__dict__", None)
            items = attributes.items() if isinstance(attributes, dict) else ()
        yield from ((f"{path}.{name}", item) for name, item in items if not isinstance(item, _PLAIN))


def reached(roots: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield (path, object) of the roots and of the objects that they hold, modules unopened."""
    return Reach().of(roots)
