"""Optimizers: the options of their groups, their state by parameter, and parameters without another owner.

Owns the names of the state, its compact record, and its restore, tensor by tensor: `load_state_dict` would
cast it to the parameter's dtype. An optimizer with its own `state_dict` is an object instead (objects.py).
Refuses schedulers that drive an optimizer, and optimizers that run inside backward, if they are not named:
their state would be lost silently. Never calls `step`, never changes gradients.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flashckpt.errors import DamagedError, StateError
from flashckpt.format.typed import Encoded, LeafRef, children, encode_json
from flashckpt.state.leaves import Filling, Place, Restructured, Saved, Sink, Walk, unowned
from flashckpt.state.objects import (
    Row,
    StateEntry,
    fill_unowned,
    misfit,
    take_unowned,
    unknown_classes,
)
from flashckpt.state.tensors import described, is_sharded, refuse
from flashckpt.state.values import (
    CONTAINERS,
    SIMPLE,
    Settling,
    holds_tensor,
    join,
    rebuild,
    references,
    survey,
)

log = logging.getLogger(__name__)

_TORCHS_ATTRIBUTES = ("defaults", "state", "param_groups")
_MAY_CHANGE = (int, float, list, dict, set, deque, Tensor)
_NOT_OPTIONS = ("params", "param_names")
_SEARCH_LEVELS = 4


def state_name(optimizer: str, parameter: str) -> str:
    """Return the prefix of the names of a parameter's state. parameter: its full name."""
    return f"{optimizer}.state.{parameter.removeprefix(f'{optimizer}.params.')}"


class OptimizerEntry(StateEntry):
    """One named torch optimizer with torch's own saving.

    replaced: of the last comparison, (option, the script's value, the checkpoint's) of each option that the
    script has changed since the run's first start. A restore puts the checkpoint's in place."""

    kind = "optimizer"

    def __init__(self, name: str, target: Optimizer) -> None:
        super().__init__(name, target)
        self._record: dict[str, Any] = {}
        self._holes: list[tuple[Any, Any]] = []
        self._shared_keys: list[Any] = []
        self._full_names: list[list[str]] = []
        self._given = Encoded([_plain_options(group) for group in target.param_groups])
        self.replaced: list[tuple[str, object, object]] = []

    def take(self, walk: Walk) -> None:
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
        owners = [[walk.owners.get(parameter) for parameter in group["params"]] for group in groups]
        self._full_names = [
            [".".join(owner or (self.name, "params", unowned(g, i))) for i, owner in enumerate(group)]
            for g, group in enumerate(owners)
        ]
        self.parameters = take_unowned(self.name, self.target, walk)
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
            "groups": [
                {
                    key: self._held(group, key, f"{self.name}.groups.{number}.{key}", sink)
                    for key in group
                    if key not in _NOT_OPTIONS
                }
                for number, group in enumerate(groups)
            ],
            "given": self._given,
            # State that belongs to no parameter.
            "shared": {
                key: self._held(self.target.state, key, join(f"{self.name}.shared", key), sink)
                for key in self._shared_keys
            },
            "scalars": scalars,
        }

    def _held(self, container: Any, key: Any, name: str, sink: Sink) -> Any:
        value = _read(container, key)
        if type(value) in SIMPLE:
            return value
        home = _home(self.target.param_groups)
        return survey(value, name, Place("optimizer", self.target, container, key, home), sink)

    def structure(self) -> dict[str, object]:
        groups = {f"{self.name}.groups.{g}": len(names) for g, names in enumerate(self._full_names)}
        return {**groups, **{name: tuple(parameter.shape) for name, parameter in self.parameters}}

    def _take_state(self, walk: Walk) -> dict[str, Any]:
        """Add the state by parameter to the walk; return its record: the schemas, and the schema of each
        parameter. `_holes` gets the places of the values that are not tensors."""
        state = self.target.state
        walk.guard(state)
        schemas: dict[object, object] = {}
        states: list[tuple[int, object]] = []
        for index, (name, parameter, _) in enumerate(self._state_places()):
            if parameter in state:
                walk.anchor(state, parameter, state[parameter])
                key, schema = self._schema(state[parameter], name, parameter, walk)
                schemas.setdefault(key, schema)
                states.append((index, key))
        numbers = {key: number for number, key in enumerate(schemas)}
        columns = [[index for index, _ in states], [numbers[key] for _, key in states]]
        return {"schemas": Encoded(list(schemas.values())), "state": Encoded(columns)}

    def places(self) -> list[list[tuple[str, str, Tensor]]]:
        """Return the parameters of each group, as of the last walk, as (full name, prefix of the leaf names
        of its state, parameter)."""
        return [
            [
                (full, state_name(self.name, full), parameter)
                for full, parameter in zip(names, group["params"], strict=True)
            ]
            for names, group in zip(self._full_names, self.target.param_groups, strict=True)
        ]

    def _state_places(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        for places, group in zip(self.places(), self.target.param_groups, strict=True):
            for _, name, parameter in places:
                yield name, parameter, group

    def _schema(self, state: Any, name: str, parameter: Tensor, walk: Walk) -> tuple[object, object]:
        home = parameter.device
        if type(state) is dict and all(type(value) is Tensor for value in state.values()):
            walk.guard(state)
            refs = {}
            for key, tensor in state.items():
                place = Place("optimizer", self.target, state, key, home, parameter)
                ref = walk.add(join(name, key), tensor, place)
                refs[key] = LeafRef("", ref.about)
            return tuple((key, tuple(ref.about.items())) for key, ref in refs.items()), refs
        place = Place("optimizer", self.target, self.target.state, parameter, home, parameter)
        schema = _nameless(survey(state, name, place, walk, lambda c, k: self._holes.append((c, k))))
        return encode_json(schema), schema

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        for number, options in enumerate(value["groups"]):
            yield from references(options, f"{self.name}.groups.{number}")
        yield from references(value["shared"], f"{self.name}.shared")
        for schema, name, _, _ in self._saved_states(value):
            yield from references(schema, name)

    def _saved_states(self, value: dict[str, Any]) -> Iterator[tuple[Any, str, Tensor, dict[str, Any]]]:
        """Yield (schema, name, parameter, group) of each parameter with a saved state."""
        places = list(self._state_places())
        for index, number in zip(*value["state"], strict=True):
            yield value["schemas"][number], *places[index]

    def differences(self, value: dict[str, Any], saved: Saved, live: Walk) -> list[Row]:
        rows: list[Row] = []
        self.replaced = list(dict.fromkeys(self._replaced(value)))
        if value["class"] != type(self.target).__qualname__:
            rows.append((self.name, value["class"], type(self.target).__qualname__))
        recorded, here = value["params"], self._full_names
        if len(recorded) != len(here):
            rows.append((f"{self.name}.groups", f"{len(recorded)} groups", f"{len(here)} groups"))
            return rows
        for number, (names, live_names) in enumerate(zip(recorded, here, strict=True)):
            group = f"{self.name}.groups.{number}"
            if len(names) != len(live_names):
                rows.append((group, f"{len(names)} parameters", f"{len(live_names)} parameters"))
                continue
            pairs = enumerate(zip(names, live_names, strict=True))
            rows += [(f"{group}.params[{index}]", a, b) for index, (a, b) in pairs if a != b]
        for name, _ in self.parameters:
            if name in saved.leaves:
                rows += misfit(saved.leaves[name], live.named.get(name))
        for schema, name, parameter, _ in self._saved_states(value) if not rows else ():
            refs = list(references(schema, name))
            if unknown := unknown_classes(refs, parameter, live):
                return unknown[:1]
            if is_sharded(parameter):
                rows += _misplaced(refs, parameter, saved, live)
        return rows

    def _replaced(self, value: dict[str, Any]) -> Iterator[tuple[str, object, object]]:
        """Compare with what the script gave at the run's first start: schedulers and loops change the
        checkpoint's own options in the course of training."""
        for then, saved, group in zip(
            value.get("given", ()), value["groups"], self.target.param_groups, strict=False
        ):
            here = _plain_options(group)
            for key in here.keys() & then.keys() & saved.keys():
                has_base = key == "lr" and "initial_lr" in here  # a scheduler computes the rate from that
                if not has_base and here[key] != then[key] and here[key] != saved[key]:
                    yield "lr" if key == "initial_lr" else key, here[key], saved[key]

    def restore(self, value: dict[str, Any], filling: Filling, live: Walk) -> None:
        fill_unowned(self.target, filling, live)
        self._given = Encoded(value["given"]) if "given" in value else self._given
        home = _home(self.target.param_groups)
        pairs = zip(value["groups"], self.target.param_groups, strict=True)
        for number, (options, group) in enumerate(pairs):
            for key, option in options.items():
                name = f"{self.name}.groups.{number}.{key}"
                group[key] = Settling(filling, home).settle(option, group.get(key), name)
        self._restore_state(value, filling, home)

    def _restore_state(self, value: dict[str, Any], filling: Filling, home: torch.device) -> None:
        state, holes, restored = self.target.state, iter(value["scalars"]), dict[Any, Any]()
        for schema, name, parameter, group in self._saved_states(value):
            moved = value["device"] == "cpu" and not (group.get("capturable") or group.get("fused"))
            settling = Settling(filling, parameter.device, like=parameter, holes=holes, scalars_on_cpu=moved)
            restored[parameter] = settling.settle(schema, state.get(parameter), name)
        if next(holes, self) is not self:
            raise DamagedError(
                f"The snapshot holds more values than the state of {self.name} needs. It cannot be used."
            )
        for key, shared in value["shared"].items():
            name = join(f"{self.name}.shared", key)
            restored[key] = Settling(filling, home).settle(shared, state.get(key), name)
        state.clear()
        state.update(restored)


def check_not_zero(name: str, target: object) -> None:
    """Raise StateError for torch's ZeroRedundancyOptimizer: each of its ranks holds a part of the state."""
    zero = ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    if any((kind.__module__, kind.__name__) == zero for kind in type(target).__mro__):
        why = "is a ZeroRedundancyOptimizer, whose ranks hold parts of the state that only torch can gather"
        refuse(name, why, "Shard with FSDP2 (fully_shard), which divides the optimizer's state too.")


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options that are plain values, or tuples of them."""
    return {
        key: value
        for key, value in group.items()
        if type(key) is str and key not in _NOT_OPTIONS
        if type(value) in SIMPLE or (type(value) is tuple and all(type(each) in SIMPLE for each in value))
    }


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
    """Return a schema without the names of one parameter's leaves: their places determine them."""
    kind = type(schema)
    if kind is LeafRef:
        return LeafRef("", schema.about)
    if kind in CONTAINERS:
        return rebuild(schema, [(key, _nameless(item)) for key, item in children(schema)])
    return schema


def _misplaced(
    refs: Iterable[tuple[str, LeafRef]], parameter: Tensor, saved: Saved, live: Walk
) -> Iterator[Row]:
    """Yield the rows of DTensors of a parameter's state that a restore would create with another slice."""
    for name, ref in refs:
        leaf = saved.leaves.get(saved.names.get(name, ""))
        if name in live.refs or leaf is None or "parts" not in ref.about:
            continue
        here = live.meshes.to_make(ref.about, leaf, parameter, name)
        if (here.shape, here.box) != (leaf.shape, leaf.box):
            yield name, described(leaf), described(here)


def has_own_saving(target: Optimizer) -> bool:
    """Whether an optimizer overrides how it saves or loads."""
    kind = type(target)
    return not (kind.state_dict is Optimizer.state_dict and kind.load_state_dict is Optimizer.load_state_dict)


def warn_of_unsaved(name: str, target: Optimizer) -> None:
    """Warn if an optimizer with torch's own saving has hooks on it, or keeps values in attributes of its
    own."""
    if has_own_saving(target):
        return
    hooks = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    if any(getattr(target, f"_optimizer_{hook}_hooks", None) for hook in hooks):
        log.warning(
            "%s: hooks on state_dict and load_state_dict of a %s are not called. If they keep values, name "
            "an object that has them.", name, type(target).__name__,
        )  # fmt: skip
    if type(target).__module__.startswith("torch."):
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


# Schedulers, and optimizers inside backward


def unwrapped(target: Any) -> Any:
    """Return the torch optimizer inside a wrapper such as accelerate's; any other object itself."""
    while not isinstance(target, LRScheduler) and hasattr(target, "param_groups"):
        inner = getattr(target, "optimizer", None)
        if not isinstance(inner, Optimizer) or inner is target:
            break
        target = inner
    return target


def check_drivers(
    named: Mapping[str, object], optimizers: Mapping[str, Optimizer], parameters: Iterable[tuple[str, Tensor]]
) -> None:
    """Raise StateError for a scheduler of a named optimizer, or an optimizer that steps a parameter inside
    backward, that is not named itself."""
    driven = {name: o for name, o in optimizers.items() if hasattr(o.step, "_wrapped_by_lr_sched")}
    searched = named.values() if driven else ()
    reached = {id(s) for target in searched for s in _schedulers_in(target, _SEARCH_LEVELS)}
    if driven and _unnamed(driven, reached):
        gc.collect()  # a scheduler that only a garbage cycle holds is unused
    for name, scheduler in _unnamed(driven, reached) if driven else ():
        kind = type(scheduler).__name__
        raise StateError(
            f"The optimizer {name!r} is driven by a {kind} that is not part of the state: after a resume its "
            "learning rate would start over. Nothing was saved or changed. Name it: add the keyword "
            f"scheduler=<the {kind}> (with any name), or delete it if it is not used any more.",
            location=name,
        )
    for name, parameter in parameters:
        for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
            if optimizer not in optimizers.values():
                raise StateError(
                    f"{name} is stepped inside backward by a {type(optimizer).__name__} that is not part of "
                    "the state: its momenta would be lost. Nothing was saved or changed. Name every such "
                    "optimizer: state={'backward.0': …}, or step the optimizers in the loop.",
                    location=name,
                )


def _unnamed(driven: Mapping[str, Optimizer], reached: set[int]) -> list[tuple[str, LRScheduler]]:
    names = {id(optimizer): name for name, optimizer in driven.items()}
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), LRScheduler)]
    bound = [(names[id(o)], s) for s in alive if id(o := unwrapped(getattr(s, "optimizer", None))) in names]
    return [(name, scheduler) for name, scheduler in bound if id(scheduler) not in reached]


def _schedulers_in(target: object, levels: int) -> Iterator[LRScheduler]:
    """Yield the schedulers that an object is or holds: SequentialLR and ChainedScheduler hold others."""
    if isinstance(target, LRScheduler):
        yield target
    if levels == 0 or isinstance(target, (Tensor, nn.Module, Optimizer, str, bytes, type)):
        return
    parts: Iterable[object] = list(getattr(target, "__dict__", {}).values())
    if isinstance(target, Mapping):
        parts = list(target.values())
    elif isinstance(target, (list, tuple, set, frozenset)):
        parts = target if len(target) <= 1000 else ()
    for item in parts:
        yield from _schedulers_in(item, levels - 1)
