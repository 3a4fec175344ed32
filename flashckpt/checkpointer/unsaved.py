"""Find attributes of a trainer that change while it trains and that no checkpoint has.

Owns the comparison of the plain values and tensors in the attributes of trainer, callbacks and metrics at the
ends of two early iterations, and its one warning. Reads instance attributes only: it calls no property and no
method of the user's objects. Keeps digests, not values. Never synchronizes a device, never raises.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from flashckpt.state import rng

log = logging.getLogger(__name__)

# The first iteration makes what is made once (optimizer state, caches, buffers of metrics). Two iterations
# lie between the two that are compared: a value that moves in every second one, as with accumulation, moves.
FIRST, SECOND = 2, 4
# Bounds of the cost of one attribute. Of a longer container the length and both ends are compared; of a
# larger tensor, and of one on a device, identity and version. An entry of a dict is one level deeper than it.
_MOST_ENTRIES, _END_ENTRIES, _DEPTH = 1000, 50, 8
_MOST_VALUES, _MOST_BYTES, _MOST_TENSORS = 5000, 1 << 20, 10_000
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_PLAIN = frozenset({type(None), bool, int, float, str})
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, deque)
_MODULE_INTERNALS = frozenset(vars(torch.nn.Module()))

Mark = tuple[Any, ...]


class Unsaved:
    """Compares the attributes of objects at the ends of the second and the fourth iteration.

    roots: the objects by the name that a message uses. known: for each root, the attributes that are saved or
    need not be. own: the attributes that the user names, as "attribute" or "root.attribute". saved: the
    objects of the state: their modules' parameters and their generators need no name.
    """

    def __init__(
        self,
        roots: Mapping[str, object],
        known: Mapping[str, Collection[str]],
        own: Collection[str] = (),
        saved: Iterable[object] = (),
    ) -> None:
        self._roots, self._own, self._saved = dict(roots), frozenset(own), list(saved)
        self._known = {name: frozenset(names) for name, names in known.items()}
        self._calls = 0
        self._marks: dict[tuple[str, str], Mark] = {}
        self.found: tuple[str, ...] = ()

    def observe(self) -> None:
        """To be called at the end of each iteration; compares once. `found` then has the changed attributes,
        as "root.attribute"."""
        if self._calls >= SECOND:
            return
        self._calls += 1
        if self._calls not in (FIRST, SECOND):
            return
        try:
            marks = self._observed()
            if self._calls == SECOND:
                self._compare(marks)
            self._marks = marks
        except Exception:
            # A mistake here must not end a training run.
            log.debug("the attributes of %s could not be compared", list(self._roots), exc_info=True)
            self._calls = SECOND
        if self._calls == SECOND:
            self._roots, self._saved, self._marks = {}, [], {}

    def _observed(self) -> dict[tuple[str, str], Mark]:
        reader, marks = _Reader(self._saved), {}
        for root, holder in self._roots.items():
            known = self._known.get(root, frozenset()) | self._own
            for name, value in _attributes(holder):
                if name in known or f"{root}.{name}" in known:
                    continue
                try:
                    mark = reader.mark(value)
                except Exception:  # of one attribute: the others are compared
                    log.debug("%s.%s cannot be compared", root, name, exc_info=True)
                    continue
                if mark is not None:
                    marks[root, name] = mark
        return marks

    def _compare(self, now: Mapping[tuple[str, str], Mark]) -> None:
        # An attribute that was set since then has changed; one that was deleted is as it was at the start.
        changed = [key for key, mark in now.items() if not _is_same(self._marks.get(key), mark)]
        if not changed:
            return
        self.found = tuple(f"{root}.{name}" for root, name in changed)
        shown = ", ".join(f"{type(self._roots[root]).__name__}.{name} ({root})" for root, name in changed)
        names = dict.fromkeys(name for _, name in changed)
        log.warning(
            "Attributes change while training and are not saved: %s. A resumed run begins with their first "
            "values, so it can differ from a run that was never stopped. Save them with own=(%s).",
            shown,
            ", ".join(f'"{name}"' for name in names) + "," * (len(names) == 1),
        )


def _attributes(holder: object) -> Iterator[tuple[str, object]]:
    """The instance attributes, read past `__getattr__`, `__getattribute__` and properties."""
    try:
        found = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return
    internals = _MODULE_INTERNALS if _is(holder, torch.nn.Module) else frozenset()
    if type(found) is dict:
        yield from ((name, value) for name, value in list(found.items()) if name not in internals)


def _is(value: object, *kinds: type) -> bool:
    """isinstance without `__class__`, which a proxy may compute."""
    return issubclass(type(value), kinds)


def _is_same(before: Mark | None, now: Mark) -> bool:
    """Whether the values are equal; tensors that are known by identity must be the same living ones."""
    if before is None or len(before) != len(now):
        return False
    return all(
        one() is not None and one() is other() if isinstance(one, weakref.ref) else one == other
        for one, other in zip(before, now, strict=True)
    )


class _Reader:
    """Makes marks of values, which are equal for equal values."""

    def __init__(self, saved: Iterable[object]) -> None:
        self._saved = {id(each) for each in saved}
        for each in saved:
            if _is(each, torch.nn.Module):
                self._saved.update(map(id, _tensors_of(each)))

    def mark(self, value: Any) -> Mark | None:
        """None for a value that is not compared."""
        if id(value) in self._saved:
            return None
        if _is(value, torch.nn.Module):
            own = (each for each in _tensors_of(value) if id(each) not in self._saved)
            return tuple(each for tensor in own for each in _identity(tensor)) or None
        if _is(value, *_GENERATORS):
            return None if rng.is_global(value) else (repr(rng.capture_one(value)),)
        reading = _Reading()
        return reading.mark() if reading.read(value, 0) else None


class _Reading:
    """One attribute: the bytes that stand for its value, and the identities of tensors that are not read."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._identities: list[Any] = []
        self._values = self._bytes = 0

    def mark(self) -> Mark:
        return hashlib.blake2b(b" ".join(self._parts), digest_size=16).digest(), *self._identities

    def read(self, value: Any, depth: int) -> bool:
        """Add a value. False for one that is not plain."""
        self._values += 1
        if self._values > _MOST_VALUES or self._bytes > _MOST_BYTES:
            return True  # the first so many are compared
        if type(value) in _PLAIN:
            self._add(repr(value).encode("utf-8", "surrogatepass"))
        elif _is(value, torch.Tensor):
            self._read_tensor(value)
        elif _is(value, set, frozenset):
            kind = set if _is(value, set) else frozenset
            found = [_bytes_of(each) for each in itertools.islice(kind.__iter__(value), _MOST_ENTRIES)]
            self._add(f"set {kind.__len__(value)}".encode())
            self._add(b"\0".join(sorted(each for each in found if each is not None)))
            return None not in found
        elif _is(value, *_CONTAINERS):
            kind = next(each for each in _CONTAINERS if _is(value, each))
            return depth < _DEPTH and self._read_entries(kind, value, depth)
        else:
            data = _bytes_of(value)
            if data is None:
                return False
            self._add(data)
        return True

    def _read_entries(self, kind: Any, value: Any, depth: int) -> bool:
        count = kind.__len__(value)
        self._add(f"{kind.__name__} {count}".encode())
        entries: Iterable[Any] = dict.items(value) if kind is dict else kind.__iter__(value)
        if count > _MOST_ENTRIES:
            last = (
                reversed(dict.items(value))
                if kind is dict
                else (kind.__getitem__(value, index) for index in range(count - 1, -1, -1))
            )
            entries = [*itertools.islice(entries, _END_ENTRIES), *itertools.islice(last, _END_ENTRIES)]
        return all(self.read(each, depth + 1) for each in entries)

    def _read_tensor(self, value: torch.Tensor) -> None:
        read = type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu"
        if read and value.layout is torch.strided and value.nbytes <= _MOST_BYTES:
            self._add(f"{value.dtype}{tuple(value.shape)}".encode())
            self._add(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            self._identities += _identity(value)

    def _add(self, found: bytes) -> None:
        self._bytes += len(found)
        self._parts += (str(len(found)).encode(), found)


def _bytes_of(value: Any) -> bytes | None:
    """Those of a plain value, None for any other. Of a subclass (an enumeration of strings) those of its
    value: its own methods are the user's code."""
    for kind in (bool, int, float, complex, str):
        if _is(value, kind):
            return f"{kind.__name__} {kind.__repr__(value)}".encode("utf-8", "surrogatepass")
    if _is(value, bytes):
        return b"bytes " + bytes.__getitem__(value, slice(None))
    if _is(value, np.generic) or (type(value) is np.ndarray and value.nbytes <= _MOST_BYTES):
        return None if value.dtype.hasobject else f"{value.dtype}{value.shape} ".encode() + value.tobytes()
    return None


def _identity(tensor: torch.Tensor) -> list[Any]:
    """An assignment gives another tensor, and a change in place another version. A weak reference: the memory
    of a dropped tensor is free, and its address may come again."""
    version = None if tensor.is_inference() else tensor._version
    return [weakref.ref(tensor), version]


def _tensors_of(module: Any) -> Iterator[torch.Tensor]:
    """Parameters and buffers, read past `parameters()`, which a wrapper may replace."""
    return itertools.islice(_all_tensors_of(module, set()), _MOST_TENSORS)


def _all_tensors_of(module: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if module is None or id(module) in seen:
        return
    seen.add(id(module))
    held = object.__getattribute__(module, "__dict__")
    for tensor in (*held["_parameters"].values(), *held["_buffers"].values()):
        if tensor is not None:
            yield tensor
    for each in held["_modules"].values():
        yield from _all_tensors_of(each, seen)
