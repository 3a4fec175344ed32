"""Optimizers: the options of their groups, their state by parameter, and parameters that nobody else owns.

Owns how the state is named, its compact record, and its way back tensor by tensor: `load_state_dict`
would cast it to the parameter's dtype. An optimizer with a `state_dict` of its own is an object instead
(objects.py). Refuses what drives an optimizer without being named (schedulers, optimizers run inside
backward): its position would be lost without a word. Never steps, never touches gradients.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flashckpt.errors import DamagedError, StateError
from flashckpt.events import log
from flashckpt.format.typed import Encoded, LeafRef, encode_json
from flashckpt.state.leaves import Filling, Owners, Place, Restructured, Saved, Sink, Walk
from flashckpt.state.objects import (
    Row,
    StateEntry,
    fill_unowned,
    saves_as_torch,
    take_unowned,
    unknown_classes,
)
from flashckpt.state.tensors import described, fits
from flashckpt.state.values import (
    CONTAINERS,
    SIMPLE,
    Settling,
    children,
    holds_tensor,
    join,
    rebuild,
    references,
    survey,
)

_ROWS_A_GROUP = 20
_TORCHS_ATTRIBUTES = ("defaults", "state", "param_groups")
_MAY_CHANGE = (int, float, list, dict, set, deque, Tensor)
_NOT_OPTIONS = ("params", "param_names")
_SEARCH_LEVELS = 4


class OptimizerEntry(StateEntry):
    """One named torch optimizer whose saving is torch's own."""

    kind = "optimizer"

    def __init__(self, name: str, target: Optimizer) -> None:
        super().__init__(name, target)
        self._record: dict[str, Any] = {}
        self._holes: list[tuple[Any, Any]] = []
        self._shared_keys: list[Any] = []
        self._full_names: list[list[str]] = []
        self._short_names: list[list[str]] = []

    def take(self, walk: Walk, owners: Owners) -> None:
        groups = self.target.param_groups
        walk.anchor(self.target, "param_groups", groups)
        walk.anchor(self.target, "state", self.target.state)
        walk.guard(groups)
        for number, group in enumerate(groups):
            walk.guard(group)
            walk.anchor(groups, number, group)
            walk.anchor(group, "params", group["params"])
            for index, parameter in enumerate(group["params"]):
                walk.anchor(group["params"], index, parameter)
        self._short_names = owners.short_names(groups)
        self._full_names = [
            [owners.full_name(p, self.name, g, i) for i, p in enumerate(group["params"])]
            for g, group in enumerate(groups)
        ]
        self.parameters = take_unowned(self.name, self.target, walk, owners)
        self._shared_keys = [key for key in self.target.state if not isinstance(key, Tensor)]
        self._holes = []
        self._record = {
            "kind": self.kind,
            "class": type(self.target).__qualname__,
            "device": _home(groups).type,
            "params": Encoded(self._full_names),
            **self._take_state(walk),
        }

    def values(self, sink: Sink) -> dict[str, Any]:
        groups = self.target.param_groups
        if [len(group["params"]) for group in groups] != [len(names) for names in self._full_names]:
            raise Restructured(self.name)
        scalars = [_read(container, key) for container, key in self._holes]
        if any(type(value) not in (int, float) and holds_tensor(value) for value in scalars):
            raise Restructured(self.name)
        return {
            **self._record,
            "groups": [self._options(number, group, sink) for number, group in enumerate(groups)],
            "shared": self._shared(sink),
            "scalars": scalars,
        }

    def _shared(self, sink: Sink) -> dict[Any, Any]:
        """State that belongs to no parameter."""
        home, state = _home(self.target.param_groups), self.target.state
        return {
            key: survey(
                _read(state, key), join(f"{self.name}.shared", key), self._place(state, key, home), sink
            )
            for key in self._shared_keys
        }

    def _place(self, container: object, key: object, home: torch.device) -> Place:
        return Place("optimizer", self.target, container, key, home)

    def _options(self, number: int, group: dict[str, Any], sink: Sink) -> dict[str, Any]:
        home = _home(self.target.param_groups)
        return {
            key: value
            if type(value) in SIMPLE
            else survey(value, f"{self.name}.groups.{number}.{key}", self._place(group, key, home), sink)
            for key, value in group.items()
            if key not in _NOT_OPTIONS
        }

    def structure(self) -> dict[str, object]:
        groups = {f"{self.name}.groups.{g}": len(names) for g, names in enumerate(self._full_names)}
        return {**groups, **{name: tuple(parameter.shape) for name, parameter in self.parameters}}

    def _take_state(self, walk: Walk) -> dict[str, Any]:
        """The state by parameter: which of a few schemas each has, and the places of what is no tensor."""
        state = self.target.state
        walk.guard(state)
        schemas: list[object] = []
        known: dict[object, int] = {}
        indexes: list[int] = []
        numbers: list[int] = []
        for index, (name, parameter, _) in enumerate(self._state_places()):
            if parameter in state:
                walk.anchor(state, parameter, state[parameter])
                key, schema = self._schema(state[parameter], name, parameter, walk)
                if key not in known:
                    known[key] = len(schemas)
                    schemas.append(schema)
                indexes.append(index)
                numbers.append(known[key])
        return {"schemas": Encoded(schemas), "state": Encoded([indexes, numbers])}

    def _state_places(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        for names, group in zip(self._short_names, self.target.param_groups, strict=True):
            for name, parameter in zip(names, group["params"], strict=True):
                yield f"{self.name}.state.{name}", parameter, group

    def _schema(self, state: Any, name: str, parameter: Tensor, walk: Walk) -> tuple[object, object]:
        home = parameter.device
        if type(state) is dict and all(type(value) is Tensor for value in state.values()):
            walk.guard(state)
            refs = {}
            for key, tensor in state.items():
                ref = walk.add(join(name, key), tensor, self._place(state, key, home))
                refs[key] = LeafRef("", ref.about)
            return tuple((key, tuple(ref.about.items())) for key, ref in refs.items()), refs
        place = self._place(self.target.state, parameter, home)
        schema = _nameless(survey(state, name, place, walk, lambda c, k: self._holes.append((c, k))))
        return encode_json(schema), schema

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        for number, options in enumerate(value["groups"]):
            yield from references(options, f"{self.name}.groups.{number}")
        yield from references(value["shared"], f"{self.name}.shared")
        places = list(self._state_places())
        for index, number in zip(*value["state"], strict=True):
            yield from references(value["schemas"][number], places[index][0])

    def differences(self, value: dict[str, Any], saved: Saved, live: Walk) -> list[Row]:
        rows: list[Row] = []
        if value["class"] != type(self.target).__qualname__:
            rows.append((self.name, value["class"], type(self.target).__qualname__))
        recorded, here = value["params"], self._full_names
        if len(recorded) != len(here):
            rows.append((f"{self.name}.groups", f"{len(recorded)} groups", f"{len(here)} groups"))
            return rows
        for number, (names, live_names) in enumerate(zip(recorded, here, strict=True)):
            rows += _name_rows(f"{self.name}.groups.{number}", names, live_names)
        for name, parameter in self.parameters:
            if name in saved.leaves and not fits(saved.leaves[name], parameter):
                rows.append((name, described(saved.leaves[name]), described(parameter)))
        return rows or self._class_rows(value, live)

    def _class_rows(self, value: dict[str, Any], live: Walk) -> list[Row]:
        places = list(self._state_places())
        for index, number in zip(*value["state"], strict=True):
            name, parameter, _ = places[index]
            if rows := unknown_classes(references(value["schemas"][number], name), parameter, live):
                return rows[:1]
        return []

    def restore(self, value: dict[str, Any], filling: Filling, live: Walk) -> None:
        fill_unowned(self.target, filling, live)
        home = _home(self.target.param_groups)
        pairs = zip(value["groups"], self.target.param_groups, strict=True)
        for number, (options, group) in enumerate(pairs):
            for key, option in options.items():
                name = f"{self.name}.groups.{number}.{key}"
                group[key] = Settling(filling, home).settle(option, group.get(key), name)
        self._restore_state(value, filling, home)

    def _restore_state(self, value: dict[str, Any], filling: Filling, home: torch.device) -> None:
        state, places, holes = self.target.state, list(self._state_places()), iter(value["scalars"])
        restored: dict[Any, Any] = {}
        for index, number in zip(*value["state"], strict=True):
            name, parameter, group = places[index]
            moved = value["device"] == "cpu" and not (group.get("capturable") or group.get("fused"))
            settling = Settling(filling, parameter.device, like=parameter, holes=holes, scalars_on_cpu=moved)
            restored[parameter] = settling.settle(value["schemas"][number], state.get(parameter), name)
        if next(holes, self) is not self:
            raise DamagedError(
                f"The snapshot holds more values than {self.name} has places for; it is no use."
            )
        for key, shared in value["shared"].items():
            name = join(f"{self.name}.shared", key)
            restored[key] = Settling(filling, home).settle(shared, state.get(key), name)
        state.clear()
        state.update(restored)


def _home(groups: list[dict[str, Any]]) -> torch.device:
    for group in groups:
        for parameter in group["params"]:
            return parameter.device  # type: ignore[no-any-return]
    return torch.device("cpu")


def _read(container: Any, key: Any) -> object:
    try:
        return container[key]
    except LookupError:
        raise Restructured(str(key)) from None


def _nameless(schema: Any) -> Any:
    """A schema without the names of one parameter's leaves: they follow from where they stand."""
    kind = type(schema)
    if kind is LeafRef:
        return LeafRef("", schema.about)
    if kind in CONTAINERS:
        return rebuild(schema, [(key, _nameless(item)) for key, item in children(schema)])
    return schema


def _name_rows(group: str, recorded: list[str], live: list[str]) -> list[Row]:
    if len(recorded) != len(live):
        return [(group, f"{len(recorded)} parameters", f"{len(live)} parameters")]
    pairs = zip(recorded, live, strict=True)
    rows = [(f"{group}.params[{i}]", a, b) for i, (a, b) in enumerate(pairs) if a != b]
    if len(rows) > _ROWS_A_GROUP:
        more = len(rows) - _ROWS_A_GROUP
        return [*rows[:_ROWS_A_GROUP], (f"{group}.params", f"and {more} more", f"and {more} more")]
    return rows


def has_own_saving(target: Optimizer) -> bool:
    """Whether an optimizer saves or loads in its own way, by overriding or by hooks."""
    if not saves_as_torch(target):
        return True
    hooks = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return any(getattr(target, f"_optimizer_{hook}_hooks", None) for hook in hooks)


def warn_of_attributes(name: str, target: Optimizer) -> None:
    """Say so if an optimizer that saves as torch's do keeps values in attributes of its own."""
    if has_own_saving(target) or type(target).__module__.startswith("torch."):
        return
    own = [
        key
        for key, value in vars(target).items()
        if key not in _TORCHS_ATTRIBUTES and not key.startswith(("_optimizer_", "_opt_called", "_warned"))
        if isinstance(value, _MAY_CHANGE) and not isinstance(value, bool)
        if key not in target.defaults
    ]
    if own:
        log.warning(
            "%s: attributes of a %s are not saved (%s). If they change in training, keep them in its groups "
            "or its state, or give it state_dict and load_state_dict.",
            name, type(target).__name__, ", ".join(own[:5]),
        )  # fmt: skip


# What drives an optimizer


def unwrapped(target: Any) -> Any:
    """The torch optimizer inside a wrapper that is no scheduler (`accelerate`'s), else the object itself."""
    while not isinstance(target, LRScheduler) and hasattr(target, "param_groups"):
        inner = getattr(target, "optimizer", None)
        if not isinstance(inner, Optimizer) or inner is target:
            break
        target = inner
    return target


def check_schedulers(named: Mapping[str, object], optimizers: Mapping[str, Optimizer]) -> None:
    """Raise StateError for a scheduler that is bound to a named optimizer and is itself not named."""
    driven = {name: o for name, o in optimizers.items() if hasattr(o.step, "_wrapped_by_lr_sched")}
    if not driven:
        return
    reached = {id(s) for target in named.values() for s in _schedulers_in(target, _SEARCH_LEVELS)}
    if _unnamed(driven, reached):
        gc.collect()  # one that is only part of a garbage cycle is not used any more
    for name, scheduler in _unnamed(driven, reached):
        kind = type(scheduler).__name__
        raise StateError(
            f"The optimizer {name!r} is driven by a {kind} that is not part of the state: after a resume its "
            "learning rate would start over. Nothing was saved or changed. Name it: add the keyword "
            f"scheduler=<the {kind}> (any name will do), or delete it if it is not used any more.",
            location=name,
        )


def _unnamed(driven: Mapping[str, Optimizer], reached: set[int]) -> list[tuple[str, LRScheduler]]:
    names = {id(optimizer): name for name, optimizer in driven.items()}
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]
    bound = [(names[id(o)], s) for s in alive if id(o := unwrapped(getattr(s, "optimizer", None))) in names]
    return [(name, scheduler) for name, scheduler in bound if id(scheduler) not in reached]


def _schedulers_in(target: object, levels: int) -> Iterator[LRScheduler]:
    """Schedulers that an object is or holds: SequentialLR and ChainedScheduler hold others."""
    if isinstance(target, LRScheduler):
        yield target
    if levels == 0 or isinstance(target, (Tensor, nn.Module, Optimizer, str, bytes, type)):
        return
    for item in _parts(target):
        yield from _schedulers_in(item, levels - 1)


def _parts(target: object) -> Iterable[object]:
    if isinstance(target, Mapping):
        return list(target.values())
    if isinstance(target, (list, tuple, set, frozenset)):
        return target if len(target) <= 1000 else ()
    return list(getattr(target, "__dict__", {}).values())


def check_backward_optimizers(
    parameters: Iterable[tuple[str, Tensor]], optimizers: Iterable[Optimizer]
) -> None:
    """Raise StateError for optimizers that run inside backward and are not named."""
    named = {id(optimizer) for optimizer in optimizers}
    for name, parameter in parameters:
        for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
            if id(optimizer) not in named:
                raise StateError(
                    f"{name} is stepped inside backward by a {type(optimizer).__name__} that is not part of "
                    "the state: its momenta would be lost. Nothing was saved or changed. Name every such "
                    "optimizer: state={'backward.0': …}, or step the optimizers in the loop.",
                    location=name,
                )
