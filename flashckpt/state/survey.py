"""Walking a nested value: its tensors go to a sink, and a copy with references in their place comes back.

Owns which containers may hold tensors (dict, OrderedDict, defaultdict, list, tuple, deque) and how what is in
them is named. Everything without a tensor is left as it is, for the typed encoding to judge.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from flashckpt.format.typed import MAX_DEPTH, Hole
from flashckpt.state.leaves import Place, Sink
from flashckpt.state.tensors import refuse

_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, deque)
_SIMPLE = {type(None), bool, int, float, str, bytes, complex}

HoleTaker = Callable[[object, object], None]


def join(prefix: str, part: object) -> str:
    """The name of a part of what is called `prefix`."""
    text = part if isinstance(part, str) else repr(part)
    return f"{prefix}.{text}" if prefix and text else prefix or text


def holds_tensor(value: object, depth: int = 0) -> bool:
    """Whether there is a tensor anywhere in the value."""
    kind = type(value)
    if kind in _SIMPLE:
        return False
    if isinstance(value, Tensor):
        return True
    if depth > MAX_DEPTH:
        return False  # the encoding refuses it, with its path
    if isinstance(value, dict):
        return any(holds_tensor(item, depth + 1) for item in value.values())
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return any(holds_tensor(item, depth + 1) for item in value)
    return False


def survey(
    value: Any, name: str, place: Place, sink: Sink, hole: HoleTaker | None = None, depth: int = 0
) -> Any:
    """`value` with a reference for each tensor. With `hole`, parts without tensors are handed to it by
    container and key and a Hole stands for them. Raises StateError for tensors where they cannot be."""
    if isinstance(value, Tensor):
        return sink.add(name, value, place)
    if type(value) in _SIMPLE or not holds_tensor(value):
        if hole is None:
            return value
        hole(place.container, place.key)
        return Hole()
    kind = type(value)
    if depth > MAX_DEPTH:
        refuse(name, f"nests tensors deeper than {MAX_DEPTH} levels, or contains itself", "Flatten it.")
    if kind not in _MAPPINGS and kind not in _SEQUENCES:
        refuse(name, f"holds tensors in a {kind.__qualname__}", "Use a dict, list, tuple or deque for them.")
    sink.guard(value)

    def below(key: object, item: object) -> Any:
        container = None if place.container is None else value
        inner = Place(place.kind, place.owner, container, key, place.home)
        return survey(item, join(name, key), inner, sink, hole, depth + 1)

    if kind in _MAPPINGS:
        return rebuild(value, ((key, below(key, item)) for key, item in value.items()))
    return resequence(value, (below(position, item) for position, item in enumerate(value)))


def rebuild(like: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """A mapping of the same type as `like` with other items."""
    if type(like) is defaultdict:
        return defaultdict(like.default_factory, items)
    return Counter(dict(items)) if type(like) is Counter else type(like)(items)


def resequence(like: Any, items: Iterable[Any]) -> Any:
    """A sequence of the same type as `like` with other items."""
    return deque(items, like.maxlen) if type(like) is deque else type(like)(items)
