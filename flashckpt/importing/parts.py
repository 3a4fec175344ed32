"""Which parts of a source become which parts of a run's state, under which names, and what is not a tensor.

Owns the mapping that a user gives, the names of leaves, and the refusal of what cannot be read.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from flashckpt.checkpointer.progress import ANY_LOOP, Progress
from flashckpt.errors import OptionError
from flashckpt.format.layout import Leaf
from flashckpt.format.names import MAX_STEP
from flashckpt.format.parts import MAX_VALUES_BYTES
from flashckpt.format.typed import LeafRef, children, encode_json, too_large
from flashckpt.importing.source import Source, SourceTensor, Unreadable, items, lookup, without_unreadable
from flashckpt.restore.imported import MARK
from flashckpt.state import rng
from flashckpt.state.tree import NAMESPACE
from flashckpt.state.values import CONTAINERS, join, rebuild

_SHOWN = 20
_EXTRA = "_extra_state"
_FLAT = "model"
RNG = ("torch", "python", "numpy", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """How a source is to be taken. `state`: names of the state -> keys of the source, in the forms of
    `lookup`; empty takes each of its keys, or where it holds nothing but tensors all of them as `model`.
    `step` and `epoch`: a number or a key. `rng`: of `RNG`, the key of a generator's state."""

    state: Mapping[str, str] = field(default_factory=dict)
    step: str = "0"
    epoch: str = "0"
    rng: Mapping[str, str] = field(default_factory=dict)
    skip_unreadable: bool = False


@dataclass(frozen=True, slots=True)
class Content:
    """The content of the step that is written: leaves with their tensors, and the values of its rank.
    `skipped`: paths of what could not be read; `left_out`: keys of the source that no name takes."""

    step: int
    leaves: Sequence[tuple[Leaf, SourceTensor]]
    values: dict[str, Any]
    parts: Sequence[tuple[str, int, int]]
    skipped: Sequence[str]
    left_out: Sequence[str]


def content_of(source: Source, mapped: Mapped) -> Content:
    """Take the parts that the mapping names. Raises OptionError for a key that the source does not have, and
    for what cannot be read, each by its path, unless that is to be skipped."""
    chosen = _chosen(source, mapped)
    step, epoch = (_count(source, what, getattr(mapped, what)) for what in ("step", "epoch"))
    generators = {name: _generator(source, name, key) for name, key in mapped.rng.items()}
    unreadable = [
        f"{path} {value.why}"
        for name, part in chosen.items()
        for path, value in items(part, name)
        if type(value) is Unreadable
    ]
    if unreadable and not mapped.skip_unreadable:
        more = f"\n  … and {len(unreadable) - _SHOWN} more" if len(unreadable) > _SHOWN else ""
        listed = "\n".join(f"  {line}" for line in unreadable[:_SHOWN])
        raise OptionError(
            f"{source.path}: {len(unreadable)} items cannot be imported:\n{listed}{more}\nNothing was "
            "written. Name the parts to take with --state NAME=KEY, or give --skip-unreadable to import all "
            "but these."
        )
    parts = {name: without_unreadable(part) for name, part in chosen.items()}
    taken = _Taken()
    entries = {name: taken.entry(name, part) for name, part in parts.items() if type(part) is not Unreadable}
    if not taken.leaves:
        raise OptionError(f"{source.path}: nothing that was chosen is a tensor. Nothing was written.")
    values = {
        MARK: {"format": source.kind},
        "state": {"entries": entries, NAMESPACE: {"names": [], "kinds": "", "exceptions": {}}},
        "progress": _progress(step, epoch),
        "rng": generators,
    }
    if (num_bytes := len(encode_json(values))) > MAX_VALUES_BYTES:
        raise too_large(parts, num_bytes, MAX_VALUES_BYTES)
    return Content(
        step=step,
        leaves=taken.leaves,
        values=values,
        parts=[_counted(name, entries[name], taken.leaves) for name in entries],
        skipped=unreadable,
        left_out=_left_out(source, mapped),
    )


def _chosen(source: Source, mapped: Mapped) -> dict[str, Any]:
    if not mapped.state:
        if all(type(each) is SourceTensor for each in source.tree.values()):
            return {_FLAT: source.tree}
        for key in source.tree:
            _check_name(str(key))
        return {str(key): value for key, value in source.tree.items()}
    found: dict[str, Any] = {}
    for name, key in mapped.state.items():
        _check_name(name)
        part, _, inner = name.partition(".")
        if part in mapped.state and inner:
            raise OptionError(
                f"--state {name}: {part} is taken as a whole. Nothing was written. Give one of them."
            )
        value = _looked_up(source, key)
        if inner:
            found.setdefault(part, {})[inner] = value
        else:
            found[part] = value
    return found


def _check_name(name: str) -> None:
    if not name or name.startswith(("!", "_", ".")) or name.split(".")[0] == NAMESPACE:
        raise OptionError(
            f"{name!r} cannot name a part of the state. Nothing was written. Give the parts to take other "
            "names: --state NAME=KEY."
        )


def _looked_up(source: Source, key: str) -> Any:
    try:
        return lookup(source.tree, key)
    except KeyError:
        there = ", ".join(str(each) for each in list(source.tree)[:_SHOWN])
        raise OptionError(f"{source.path} has no {key!r}. Nothing was written. It has: {there}.") from None


def _count(source: Source, what: str, said: str) -> int:
    """A number, or that which stands under a key."""
    found: Any = int(said) if said.isascii() and said.isdigit() else _looked_up(source, said)
    if type(found) is SourceTensor and not found.shape:
        found = found.read().item()
    if type(found) is float and found.is_integer():
        found = int(found)
    if type(found) is not int or not 0 <= found <= MAX_STEP:
        raise OptionError(f"--{what} {said}: that is no number of a {what}. Nothing was written.")
    return found


def _left_out(source: Source, mapped: Mapped) -> list[str]:
    """Keys of the source of which the mapping takes nothing."""
    if not mapped.state or "" in mapped.state.values():
        return []
    keys = [*mapped.state.values(), mapped.step, mapped.epoch, *mapped.rng.values()]
    return [
        str(each)
        for each in source.tree
        if not any(
            key == str(each) or f"{key}.".startswith(f"{each}.") or f"{each}.".startswith(f"{key}.")
            for key in keys
        )
    ]


def _progress(step: int, epoch: int) -> dict[str, Any]:
    """At the beginning of an epoch: where a loader of another library stands in it is not known."""
    progress = Progress(ANY_LOOP)
    progress.step, progress.epoch = step, epoch
    return progress.value()


def _counted(
    name: str, entry: Mapping[str, Any], leaves: Sequence[tuple[Leaf, SourceTensor]]
) -> tuple[str, int, int]:
    """A part, its tensors, and their bytes."""
    mine = [leaf for leaf, _ in leaves if leaf.name == name or leaf.name.startswith(f"{name}.")]
    return name, len(mine), sum(leaf.num_bytes for leaf in mine)


class _Taken:
    """Collects the leaves of parts."""

    def __init__(self) -> None:
        self.leaves: list[tuple[Leaf, SourceTensor]] = []
        self._names: set[str] = set()

    def entry(self, name: str, part: Any) -> dict[str, Any]:
        """A dictionary of tensors is what a module's `state_dict` gives, and is kept as a module's. All else
        is kept as it is until a program says what has this name."""
        if not _is_of_module(part):
            return {"kind": MARK, "state": self._values(part, name)}
        extra = {}
        for key, value in part.items():
            if type(value) is SourceTensor and key.split(".")[-1] != _EXTRA:
                self._leaf(join(name, key), value)
            else:
                path = join(name, key.removesuffix(_EXTRA).rstrip("."))
                extra[path] = self._values(value, join(path, _EXTRA))
        return {"kind": "module", **({"extra": extra} if extra else {})}

    def _values(self, value: Any, name: str) -> Any:
        if type(value) is SourceTensor:
            self._leaf(name, value)
            return LeafRef(name)
        if type(value) in CONTAINERS:
            return rebuild(
                value, [(key, self._values(each, join(name, key))) for key, each in children(value)]
            )
        return value

    def _leaf(self, name: str, tensor: SourceTensor) -> None:
        if name in self._names:
            raise OptionError(
                f"Two tensors of the source would be called {name}. Nothing was written. Import their parts "
                "under other names: --state NAME=KEY."
            )
        self._names.add(name)
        self.leaves.append(
            (Leaf(name=name, dtype=tensor.dtype, shape=tensor.shape, stride=tensor.stride), tensor)
        )


def _is_of_module(part: Any) -> bool:
    if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
        return False
    tensors = {key for key, value in part.items() if type(value) is SourceTensor}
    return bool(tensors) and all(key in tensors or key.split(".")[-1] == _EXTRA for key in part)


# Random numbers


def _generator(source: Source, name: str, key: str) -> Any:
    """The state of a global generator, in the form of `rng.capture`, from what its library's `get_state`
    gives."""
    value = _looked_up(source, key)
    try:
        if name == "python":
            generator = random.Random()
            generator.setstate(value)
            return rng.capture_one(generator)
        if name == "numpy":
            legacy = np.random.RandomState()
            legacy.set_state(value)
            if not 0 <= legacy.get_state(legacy=False)["state"]["pos"] <= 624:  # NumPy does not check it
                raise ValueError("its position is outside of its key")
            return rng.capture_one(legacy)
        if name == "torch":
            return rng.capture_one(torch.Generator().set_state(value.read()))
        devices = value if isinstance(value, (list, tuple)) else [value]
        return [each.read().numpy().tobytes() for each in devices]
    except (TypeError, LookupError, ValueError, AttributeError, RuntimeError) as error:
        raise OptionError(
            f"--rng {name}={key}: that is no state of the {name} generator ({error}). Nothing was written."
        ) from error
