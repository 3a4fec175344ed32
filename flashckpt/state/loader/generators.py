"""Finds the random number generators that a loader's parts own, and keeps their states by path.

Looks only at attributes; calls nothing of the user's. The global generators are rng.py's, not listed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from flashckpt.state import rng

_DEPTH = 4
_MOST_OBJECTS = 256
_MOST_ITEMS = 32
_OPAQUE = (type, ModuleType, FunctionType, torch.Tensor, torch.nn.Module, np.ndarray, str, bytes)


class Generators:
    """The generators reachable from named roots, each once, under the first path that led to it."""

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._found = dict(_search(roots))

    def __len__(self) -> int:
        return len(self._found)

    def capture(self) -> dict[str, Any]:
        return {path: rng.capture_one(generator) for path, generator in self._found.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Put back those of the states that have a generator here; raises DamagedError."""
        for path, generator in self._found.items():
            if path in states:
                rng.restore_one(generator, states[path])

    def strangers(self, states: Mapping[str, Any]) -> list[str]:
        """Paths that are only in the states or only here."""
        return sorted(self._found.keys() ^ states.keys())


def _search(roots: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Breadth first, so that a generator gets its shortest path; bounded, so that a data set that holds
    a million objects costs nothing."""
    seen: set[int] = set()
    level = list(roots.items())
    for _ in range(_DEPTH):
        below: list[tuple[str, object]] = []
        for path, value in level:
            if id(value) in seen or len(seen) > _MOST_OBJECTS:
                continue
            seen.add(id(value))
            if rng.is_generator(value):
                if not rng.is_global(value):
                    yield path, value
                continue
            below.extend(children(path, value))
        level = below


def children(path: str, value: object) -> Iterator[tuple[str, object]]:
    """What a value holds that may be worth a look, with its path."""
    if isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
        yield from ((f"{path}.{index}", item) for index, item in enumerate(value))
    elif not isinstance(value, _OPAQUE):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from ((f"{path}.{name}", item) for name, item in attributes.items() if _worth(item))


def _worth(item: object) -> bool:
    return item is not None and not isinstance(item, bool | int | float | str | bytes)
