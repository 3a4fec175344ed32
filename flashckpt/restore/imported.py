"""A step that `flashckpt import` wrote, in the form in which this program would have written it.

An import knows names and values but no program: the live state decides which parameter is number 7 of an
optimizer, which tensors are tied, and what is a container or an object. Owns that translation of records,
before a byte of a tensor is read. Values that the live state lacks keep their recorded form, and the
comparison reports them. See docs/import.md."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from flashckpt.commit.steps import StepParts, StepRecord
from flashckpt.errors import DamagedError, MismatchError
from flashckpt.format.checked_json import strict_loads
from flashckpt.format.layout import Leaf
from flashckpt.format.records import RankRecord
from flashckpt.format.typed import LeafRef, decode, encode_json
from flashckpt.restore.filling import MARK
from flashckpt.state import rng
from flashckpt.state.modules import ModuleEntry
from flashckpt.state.objects import ContainerEntry, ObjectEntry, ScalerEntry, StateEntry
from flashckpt.state.optimizers import OptimizerEntry, state_name
from flashckpt.state.tree import PARTIAL, Tree
from flashckpt.state.values import CONTAINERS, join, references

log = logging.getLogger(__name__)

_WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_NOT_OPTIONS = ("params", "param_names")
_DUPLICATE = "duplicate of "


def bound(tree: Tree, record: StepRecord) -> StepRecord:
    """Return the record of an imported step with the names and forms of the live state. Changes nothing.

    Raises MismatchError for state of a parameter that the live optimizer does not have, DamagedError for a
    malformed record.
    """
    rank = record.rank(0)
    try:
        taken = _Binding(tree, rank).bound()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DamagedError(
            f"The values of step {record.step}, which was imported, are malformed ({error!r}). It cannot be "
            "used; nothing was loaded. Import it again, into another folder.",
            step=record.step,
        ) from error
    [part] = record.parts
    return replace(record, parts=StepParts.of([replace(part, ranks=(taken,))]))


class _Binding:
    def __init__(self, tree: Tree, rank: RankRecord) -> None:
        self._tree, self._live, self._rank = tree, tree.found(), rank
        self._values: dict[str, Any] = decode(dict(rank.values))
        self._entries: dict[str, Any] = self._values["state"]["entries"]
        self._leaves = {
            leaf.name: (leaf, digest)
            for leaf, digest in zip(rank.shard.leaves, rank.shard.digests, strict=True)
        }
        self._named: dict[str, tuple[str, tuple[str, ...]]] = {}

    def bound(self) -> RankRecord:
        self._leave_out_plain()
        absent = [name for name in self._tree.entries if name not in self._entries]
        if absent:
            log.warning("the import has no %s: the program's own is kept as it is", ", ".join(absent))
        for name, entry in self._tree.entries.items():
            if name in self._entries:
                self._entries[name] = self._entry(entry, self._entries[name])
        # Random states that the source lacks stay those of the program.
        self._values["rng"] = {**rng.capture(), **self._values["rng"]}
        self._values["state"][PARTIAL] = True
        leaves = tuple(map(self._leaf, self._rank.shard.leaves))
        names = [name for leaf in leaves for name in (leaf.name, *leaf.aliases)]
        if len(set(names)) != len(names):
            raise ValueError("two of its tensors have one name in the live state")
        self._check_parameters(set(names))
        values = strict_loads(encode_json(self._values), what="values")
        return replace(self._rank, shard=replace(self._rank.shard, leaves=leaves), values=values)

    def _check_parameters(self, names: set[str]) -> None:
        """Raise MismatchError for an optimizer whose parameters were not imported: state is restored beside
        its parameter, and this would be left out."""
        modules = [each.name for each in self._tree.entries.values() if isinstance(each, ModuleEntry)]
        # The comparison reports what an imported module lacks.
        known = tuple(f"{name}." for name in modules if name in self._entries)
        for entry in self._tree.entries.values():
            if isinstance(entry, OptimizerEntry) and entry.name in self._entries:
                held = [full for group in entry.places() for full, _, _ in group if full not in names]
                lacking = [full for full in held if not full.startswith(known)]
                if lacking:
                    raise MismatchError(
                        f"The import has {entry.name}, and not {len(lacking)} of its parameters "
                        f"({', '.join(lacking[:5])}). Nothing was loaded or changed. Import an optimizer "
                        "together with its modules, under the names that the program gives them.",
                        differences=tuple((full, "missing", "a parameter") for full in lacking),
                    )

    def _leave_out_plain(self) -> None:
        """Remove numbers and texts that are parts by themselves: a program cannot name these."""
        for name, value in list(self._entries.items()):
            is_plain = value["kind"] == MARK and type(value["state"]) not in CONTAINERS
            if is_plain and name not in self._tree.entries and type(value["state"]) is not LeafRef:
                del self._entries[name]

    def _leaf(self, leaf: Leaf) -> Leaf:
        name, aliases = self._named.get(leaf.name, (leaf.name, ()))
        return replace(leaf, name=name, aliases=aliases)

    def _entry(self, entry: StateEntry, value: dict[str, Any]) -> dict[str, Any]:
        if isinstance(entry, ModuleEntry):
            return self._module(entry, value)
        state = self._state_of(entry.name, value)
        if isinstance(entry, OptimizerEntry) and entry.kind == "optimizer":
            return self._optimizer(entry, state)
        if isinstance(entry, ScalerEntry):
            return {"kind": entry.kind, "state": _scaler_state(state)}
        if isinstance(entry, (ObjectEntry, ContainerEntry)):
            return {"kind": entry.kind, "state": state, PARTIAL: True}
        return value

    def _state_of(self, name: str, value: Mapping[str, Any]) -> Any:
        """Return the state_dict; of a recorded module its tensors by their keys."""
        if value["kind"] != "module":
            return value["state"]
        prefix = f"{name}."
        return {leaf[len(prefix) :]: LeafRef(leaf) for leaf in self._leaves if leaf.startswith(prefix)}

    # ---- modules

    def _module(self, entry: ModuleEntry, value: dict[str, Any]) -> dict[str, Any]:
        if value["kind"] == MARK and value["state"] == {}:
            return {"kind": entry.kind}  # a module without tensors
        for name in [name for name in self._leaves if name.startswith(f"{entry.name}.")]:
            live = self._unwrapped(entry.name, name)
            if live != name:
                self._named[name] = live, ()
        self._tie(entry)
        return value

    def _unwrapped(self, part: str, name: str) -> str:
        """Return the name of a tensor without the wrappers with which its state_dict was saved."""
        if name in self._live.named:
            return name
        inner = [each for each in name[len(part) + 1 :].split(".") if each not in _WRAPPERS]
        found = ".".join([part, *inner])
        return found if found in self._live.named and found not in self._leaves else name

    def _tie(self, entry: ModuleEntry) -> None:
        """Give a tensor all names of the live one: a file has a tied tensor once, or once for each name."""
        saved = {self._named.get(name, (name,))[0]: name for name in self._leaves}
        for live in self._live.leaves:
            names = [each for each in (live.name, *live.aliases) if each.startswith(f"{entry.name}.")]
            there = [saved[name] for name in names if name in saved]
            if len(names) < 2 or not there or len(set(map(self._content, there))) > 1:
                continue  # different bytes for one tensor: the comparison reports it
            first = next(name for name in names if name in saved)
            self._named[saved[first]] = first, tuple(name for name in names if name != first)
            for other in there:
                if other != saved[first]:
                    self._named[other] = f"{_DUPLICATE}{other}", ()

    def _content(self, name: str) -> tuple[object, ...]:
        leaf, digest = self._leaves[name]
        return leaf.dtype, leaf.shape, digest

    # ---- optimizers

    def _optimizer(self, entry: OptimizerEntry, state: Any) -> dict[str, Any]:
        live = [[full for full, _, _ in group] for group in entry.places()]
        if "param_groups" not in state:
            state = _nested(state, live, self._parameter_names(live))
        groups, states = state["param_groups"], dict(state["state"])
        params = self._parameters(groups, live)
        indexes, found = list[int](), list[Any]()
        ids = [each for group in groups for each in group["params"]]
        for index, (number, full) in enumerate(zip(ids, sum(params, []), strict=True)):
            key = number if number in states else str(number)  # DCP makes texts of keys
            if key not in states:
                continue
            saved = states.pop(key)
            self._rename(saved, join(f"{entry.name}.state", key), state_name(entry.name, full))
            indexes.append(index)
            found.append(saved)
        self._check_all_used(entry.name, states)
        for number, group in enumerate(groups):
            before, now = f"{entry.name}.param_groups.{number}", f"{entry.name}.groups.{number}"
            self._rename(group, before, now)
        return {
            "kind": entry.kind,
            "class": type(entry.target).__qualname__,
            "device": "cpu",
            "params": params,
            "groups": [_options(group, entry.name, number) for number, group in enumerate(groups)],
            "schemas": found,
            "state": [indexes, list(range(len(found)))],
            "shared": {},
            "scalars": [],
        }

    def _parameters(self, groups: Iterable[Mapping[str, Any]], live: list[list[str]]) -> list[list[str]]:
        """Return the full names of each group's parameters. torch numbers them in the order of the groups,
        and its `load_state_dict` goes by that order; DCP has their names in the module."""
        names, found = self._parameter_names(live), []
        for place, group in enumerate(groups):
            ids = group["params"]
            here = live[place] if place < len(live) else []
            if len(ids) == len(here) and all(type(each) is int for each in ids):
                found.append(list(here))
            else:
                found.append([names.get(str(each), str(each)) for each in ids])
        return found

    def _parameter_names(self, live: list[list[str]]) -> dict[str, str]:
        """Return names in modules -> full names, of parameters of named modules."""
        modules = [each.name for each in self._tree.entries.values() if isinstance(each, ModuleEntry)]
        names = {
            full[len(module) + 1 :]: full
            for group in live
            for full in group
            for module in modules
            if full.startswith(f"{module}.")
        }
        return {**names, **{full: full for group in live for full in group}}

    def _rename(self, value: object, before: str, now: str) -> None:
        for place, ref in references(value, before):
            self._named[ref.name] = now + place[len(before) :], ()

    def _check_all_used(self, name: str, left: Mapping[Any, Any]) -> None:
        if left:
            keys = ", ".join(map(str, list(left)[:5]))
            raise MismatchError(
                f"The imported optimizer has state of {keys}, and its groups name no such parameter. Nothing "
                f"was loaded or changed. Import the source without {name}, or save it again.",
                differences=tuple((f"{name}.state.{key}", "state", "no parameter") for key in left),
            )


def _options(group: Mapping[str, Any], name: str, number: int) -> dict[str, Any]:
    """Return the options of a group; a tensor among them has the name that the optimizer gives it."""
    place = f"{name}.groups.{number}"
    return {
        key: LeafRef(join(place, key)) if type(option) is LeafRef else option
        for key, option in group.items()
        if key not in _NOT_OPTIONS
    }


def _nested(flat: Mapping[str, Any], live: list[list[str]], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a flat optimizer state_dict (`flatten_optimizer_state_dict` of DCP) in the usual form, with the
    groups of the live optimizer."""
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        parameter, _, field = rest.rpartition(".")
        {"state": states, "param_groups": options}[kind].setdefault(parameter, {})[field] = value
    place = {full: number for number, group in enumerate(live) for full in group}
    groups: list[dict[str, Any]] = [{"params": []} for _ in live]
    for parameter in options:
        group = groups[place.get(names.get(parameter, parameter), 0)]
        group.update({key: each for key, each in options[parameter].items() if key not in _NOT_OPTIONS})
        group["params"].append(parameter)
    return {"state": states, "param_groups": groups}


def _scaler_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state after torch's `GradScaler.load_state_dict`, which creates the tensors with the first
    scaled loss."""
    if not state:
        return {}
    return {
        "scale": None,
        "growth_tracker": None,
        "init_scale": state["scale"],
        "init_growth_tracker": state["_growth_tracker"],
        **{key: state[key] for key in ("growth_factor", "backoff_factor", "growth_interval")},
    }
