"""A committed step of a run as the items of a state_dict: names, tensors, values.

Owns the names: those that `state_dict()` of each part has, below the part's name; of an optimizer those of
torch's `get_optimizer_state_dict`, by the names of parameters. The one part of a run that
`flashckpt.dcp.save` made has its items without a name before them. Tensors are whole, whatever ranks made
them; of what differs from rank to rank, rank 0's are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashckpt.commit.lineage import resolve
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Leaf
from flashckpt.format.typed import Hole, LeafRef, children
from flashckpt.restore.saved_rank import SavedRank, SavedState
from flashckpt.restore.snapshot import leaf_view
from flashckpt.restore.state_names import full_names, short_names
from flashckpt.restore.step_leaves import BoxRegion
from flashckpt.restore.whole_tensors import WholeTensors
from flashckpt.state.leaves import leaf_names
from flashckpt.state.stored import is_stored, value_of
from flashckpt.state.values import join, rebuild, references
from flashckpt.store.base import Store

PART = "state_dict"
"""The name of the one part of a run that `flashckpt.dcp.save` makes."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that is no tensor. `name`: its place, with which the names of its leaves begin."""

    value: Any
    name: str


@dataclass(frozen=True, slots=True)
class _Module:
    """Of a module, over all ranks: its extra state by name, and the leaves that its state_dict leaves out."""

    extra: dict[str, Any] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)


class StepItems:
    """`tensors` and `values` by the names of items; `paths` of each in the nested state_dict."""

    def __init__(self, store: Store, step: int | None) -> None:
        """step: None takes the newest. Raises NoSuchStepError, RunError, DamagedError, MismatchError."""
        record = resolve(store, step)
        self.identity = f"step {record.step} of {record.attempt}"
        self._url, self._step = store.url, record.step
        self._whole = WholeTensors(record)
        self._leaves = {name: leaf for leaf in self._whole.leaves for name in (leaf.name, *leaf.aliases)}
        self.tensors: dict[str, Leaf] = {}
        self.values: dict[str, _Value] = {}
        self.paths: dict[str, Path] = {}
        modules: dict[str, _Module] = {}
        try:
            for number in sorted(each.rank for part in record.parts for each in part.ranks):
                each = record.rank(number)
                self._add_rank(SavedRank(number, each.values, full_names(each)), modules)
            for name, module in modules.items():
                self._add_module(name, module)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration) as error:
            raise DamagedError(
                f"The values of step {record.step} of {store.url} do not have the form they were written in "
                f"({error!r}). Nothing was loaded. Load another step.",
                step=record.step,
                path=store.url,
            ) from error

    def _add_rank(self, rank: SavedRank, modules: dict[str, _Module]) -> None:
        """What this rank has and none before it had. Of modules only what their leaves do not say."""
        for name, entry in rank.entries.items():
            if entry["kind"] == "module":
                module = modules.setdefault(name, _Module())
                module.left_out.update(entry.get("transient", ()))
                for place, value in entry.get("extra", {}).items():
                    module.extra.setdefault(join(place, "_extra_state"), value)
            elif entry["kind"] == "optimizer":
                self._add_optimizer(name, entry, rank)
            else:
                path: Path = () if name == PART and len(rank.entries) == 1 else (name,)
                self._add(path, name, entry["state"])

    def _add_module(self, name: str, module: _Module) -> None:
        for place, value in module.extra.items():
            self._add((name, place[len(name) + 1 :]), place, value)
            module.left_out.update(
                leaf for at, ref in references(value, place) for leaf in leaf_names(at, ref)
            )
        for leaf in self._leaves:
            if leaf.startswith(f"{name}.") and leaf not in module.left_out:
                self._add_tensor((name, leaf[len(name) + 1 :]), leaf)

    def _add_optimizer(self, name: str, entry: Mapping[str, Any], rank: SavedRank) -> None:
        short = short_names(name, entry["params"], rank.entries)
        for (optimizer, full), state in rank.states.items():
            if optimizer == name:
                self._add((name, "state", short[full]), state.prefix, _filled(state), rank.renamed)
        for number, (options, names) in enumerate(zip(entry["groups"], entry["params"], strict=True)):
            path: Path = (name, "param_groups", number)
            for key, option in options.items():
                self._add((*path, key), f"{name}.groups.{number}.{key}", option)
            self._add((*path, "params"), "", [short[full] for full in names])

    def _add(self, path: Path, name: str, value: Any, renamed: Mapping[str, str] | None = None) -> None:
        """A value as torch's flattening has it: dicts by key, lists where one of their items is a tensor or
        has items itself."""
        if type(value) is LeafRef and not is_stored(value):
            leaf_name = name if name in self._leaves else (renamed or {}).get(name, name)
            if leaf_name in self._leaves:  # torch has no item for a tensor subclass of several leaves
                self._add_tensor(path, leaf_name)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._add((*path, str(key)), join(name, key), item, renamed)
        elif _is_open(value):
            for index, item in enumerate(value):
                self._add((*path, index), join(name, index), item, renamed)
        else:
            self.values.setdefault(self._named(path), _Value(value, name))

    def _add_tensor(self, path: Path, leaf_name: str) -> None:
        self.tensors.setdefault(self._named(path), self._leaves[leaf_name])

    def _named(self, path: Path) -> str:
        fqn = ".".join(map(str, path))
        self.paths.setdefault(fqn, path)
        return fqn

    def read(self, wanted: Sequence[tuple[str, BoxRegion]]) -> Iterator[Tensor]:
        """Boxes of tensors, in their order, all verified before the first is given. Raises DamagedError."""
        try:
            boxes = self._whole.boxes(
                [(self.tensors[fqn], region) for fqn, region in wanted], torch.get_num_threads()
            )
        except FileNotFoundError as error:
            raise DamagedError(
                f"{self._url}: a file of step {self._step} is not there. Nothing was loaded. The run's job "
                "may have deleted the step while it was read: load again.",
                step=self._step,
                path=self._url,
            ) from error
        for data, leaf in boxes:
            yield leaf_view(data, leaf, 0)

    def value(self, fqn: str) -> Any:
        """A value that is no tensor; tensors inside of it are on the CPU."""
        held = self.values[fqn]
        return self._made(held.value, held.name)

    def _made(self, value: Any, name: str) -> Any:
        if type(value) is LeafRef:
            leaf = self._leaves[name]
            [(data, _)] = self._whole.boxes([(leaf, BoxRegion.of(leaf))], 1)
            tensor = leaf_view(data, leaf, 0)
            return value_of(value.about, tensor) if is_stored(value) else tensor
        items = list(children(value))
        made = [(key, self._made(item, join(name, key))) for key, item in items]
        return (
            value if all(a is b for (_, a), (_, b) in zip(items, made, strict=True)) else rebuild(value, made)
        )


def _is_open(value: Any) -> bool:
    """Whether torch's flattening goes into a list."""
    return type(value) is list and any(
        (type(item) is LeafRef and not is_stored(item)) or isinstance(item, Mapping) or _is_open(item)
        for item in value
    )


def _filled(state: SavedState) -> Any:
    """The state of one parameter, with its own values in the schema's holes."""
    own = iter(state.scalars)

    def filled(value: Any) -> Any:
        if type(value) is Hole:
            return next(own)
        items = list(children(value))
        return rebuild(value, [(key, filled(item)) for key, item in items]) if items else value

    return filled(state.schema)
