"""What loading a state has set on an object, so that it can be made one that never loaded any.

Looks at attributes only, of the object and of what it holds; calls nothing of the user's.
"""

from __future__ import annotations

from typing import Any

from flashckpt.state.loader.generators import children

_DEPTH = 4
_MOST_OBJECTS = 256
_ABSENT = object()


class Attributes:
    """The attributes as they are now. `changed` are those that are others later, as they were."""

    def __init__(self, root: object) -> None:
        self._before = [(held, dict(held)) for held in _dictionaries(root)]

    def changed(self) -> Changed:
        found: Changed = {}
        for held, before in self._before:
            for name in held.keys() | before.keys():
                if held.get(name, _ABSENT) is not before.get(name, _ABSENT):
                    found[id(held), name] = held, before.get(name, _ABSENT)
        return found


Changed = dict[tuple[int, str], tuple[dict[str, Any], Any]]


def put_back(changed: Changed) -> None:
    for (_, name), (held, value) in changed.items():
        if value is _ABSENT:
            held.pop(name, None)
        else:
            held[name] = value


def _dictionaries(root: object) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    level = [("", root)]
    for _ in range(_DEPTH):
        below: list[tuple[str, object]] = []
        for path, value in level:
            held = getattr(value, "__dict__", None)
            if isinstance(held, dict) and id(held) not in found and len(found) < _MOST_OBJECTS:
                found[id(held)] = held
                below.extend(children(path, value))
        level = below
    return list(found.values())
