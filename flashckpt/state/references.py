"""The references to tensors inside a saved value. Owns finding them, changes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from flashckpt.errors import DamagedError
from flashckpt.format.typed import LeafRef
from flashckpt.state.subclasses import part_name
from flashckpt.state.survey import join


def references(value: object, name: str) -> Iterator[tuple[str, LeafRef]]:
    """Every LeafRef in a nested value that is called `name`, with the name of the place where it stands."""
    if type(value) is LeafRef:
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from references(item, join(name, key))
    elif isinstance(value, (list, tuple, deque)):
        for position, item in enumerate(value):
            yield from references(item, join(name, position))


def leaf_names(name: str, ref: LeafRef) -> list[str]:
    """The leaves that a reference stands for: more than one where a subclass wraps several tensors."""
    parts = ref.about.get("parts")
    if parts is None:
        return [name]
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise DamagedError("The snapshot holds a tensor of unknown parts. It cannot be used.")
    return [part_name(name, part) for part in parts]
