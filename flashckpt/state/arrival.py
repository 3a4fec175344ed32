"""What an object holds after its own `load_state_dict`, against what was saved.

Owns the comparison of values and of the tensors' shapes and dtypes; the tensors' bytes are digested
where all others are. Changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor

from flashckpt.errors import StateError
from flashckpt.format.typed import LeafRef, encode_json
from flashckpt.state.filling import Saved, canonical_names
from flashckpt.state.leaves import Leaves
from flashckpt.state.survey import join
from flashckpt.state.tensors import described, fits

_SHOWN = 3


def changed_values(recorded: Any, found: Any, name: str) -> dict[str, str]:
    """Where two nested values differ: path -> what was found there. Order of keys does not count, nor
    what a tensor is beyond being one."""
    before, now = dict(_parts(recorded, name)), dict(_parts(found, name))
    return {path: now.get(path, "nothing") for path in {**before, **now} if before.get(path) != now.get(path)}


def _parts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if type(value) is LeafRef:
        yield name, "a tensor"
    elif isinstance(value, Mapping):
        yield name, type(value).__name__
        for key, item in value.items():
            yield from _parts(item, join(name, key))
    elif isinstance(value, (list, tuple, deque)):
        yield name, f"{type(value).__name__} of {len(value)}"
        for position, item in enumerate(value):
            yield from _parts(item, join(name, position))
    elif isinstance(value, (set, frozenset)):
        yield name, f"{type(value).__name__} {sorted(encode_json(item) for item in value)}"
    else:
        yield name, encode_json(value).decode("ascii")


def tensors_held(name: str, live: Leaves, saved: Saved) -> list[tuple[str, Tensor]]:
    """(stored leaf, tensor) of all that an object holds. Raises StateError where shape or dtype is
    another than was saved."""
    names = canonical_names(saved)
    pairs: list[tuple[str, Tensor]] = []
    for leaf in live.leaves:
        if leaf.name not in names:
            refuse_arrival(name, [f"{leaf.name} was not saved"])
        recorded = saved.leaves[names[leaf.name]]
        if not fits(recorded, leaf.tensor):
            refuse_arrival(name, [f"{leaf.name} was {described(recorded)} and is {described(leaf.tensor)}"])
        pairs.append((recorded.name, leaf.tensor))
    return pairs


def refuse_arrival(name: str, what: list[str]) -> NoReturn:
    """Raise the StateError for an object that is not what was saved."""
    more = f" and {len(what) - _SHOWN} more" if len(what) > _SHOWN else ""
    raise StateError(
        f"{name} is not what was saved after its own load_state_dict: {'; '.join(what[:_SHOWN])}{more}. The "
        "rest of the state was loaded already, so this process must not train on; the checkpoint is intact. "
        "Let state_dict and load_state_dict keep every value as it is (a torch optimizer without its own "
        "keeps dtypes), and leave out what belongs to one process.",
        location=name,
    )
