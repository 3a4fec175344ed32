"""Notes about the user's objects, which must not be written into: a map by identity that keeps nothing alive.

Objects without weak references are kept as long as the process lives. Never compares or hashes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Notes:
    """One note for each object."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[Callable[[], Any], Any]] = {}

    def get(self, about: object, default: Any = None) -> Any:
        reference, note = self._notes.get(id(about), (None, default))
        return note if reference is not None and reference() is about else default

    def set(self, about: object, note: Any) -> None:
        key = id(about)
        self._notes[key] = reference_to(about, lambda: self._notes.pop(key, None)), note


def reference_to(value: object, on_death: Callable[[], object] | None = None) -> Callable[[], Any]:
    """Called, gives the object, or None once it is gone; a strong reference where no weak one can be made."""
    try:
        return weakref.ref(value, None if on_death is None else lambda _: on_death())
    except TypeError:
        return lambda: value
