"""What every kind of named object gives to the tree; and the kinds that are neither module nor optimizer:
containers, GradScaler, and objects known by `state_dict` and `load_state_dict` alone (schedulers, metrics,
self-saving optimizers).

Owns asking those at every boundary, giving back copies of their own, and comparing what they hold then with
what was saved. They come last, after all else is filled. What their methods do is theirs.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flashckpt.format.layout import Leaf
from flashckpt.format.typed import SEQUENCES, LeafRef, children, encode_json
from flashckpt.state import rng
from flashckpt.state.leaves import Filling, LiveLeaf, Place, Saved, Sink, Walk, unowned
from flashckpt.state.stored import is_stored
from flashckpt.state.tensors import can_make, described, fits
from flashckpt.state.values import Settling, join, references, survey

log = logging.getLogger(__name__)

Row = tuple[str, str, str]
MISSING = "missing"
# With this key a value of the state may lack named objects, and one of an object may lack keys: they stay as
# the program made them. Imported steps have it: another version wrote them.
PARTIAL = "partial"

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque)
_SCALER = (
    "scale", "growth_tracker", "init_scale", "init_growth_tracker", "growth_factor", "backoff_factor",
    "growth_interval",
)  # fmt: skip
_SHOWN = 3


class StateEntry:
    """One named object of the state. `parameters` are those of the last walk, with their full names: they may
    have gradients."""

    kind = ""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target = name, target
        self.parameters: list[tuple[str, Tensor]] = []

    def take(self, walk: Walk) -> None:
        """Hand over the tensors that `values` does not. Raises StateError."""

    def values(self, sink: Sink) -> dict[str, Any]:
        """The values alone, now. Raises Restructured if the tensors are others than at the walk."""
        raise NotImplementedError

    def structure(self) -> dict[str, object]:
        """What the program has to build before it can be filled."""
        return {}

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        """The tensors that a saved value names, beside parameters and buffers, each by its place."""
        return references(value["state"], self.name)

    def differences(self, value: dict[str, Any], saved: Saved, live: Walk) -> list[Row]:
        """What does not fit, `live` being a walk made just now; changes nothing."""
        raise NotImplementedError

    def restore(self, value: dict[str, Any], filling: Filling, live: Walk) -> None:
        """Fill what exists and make what does not."""
        raise NotImplementedError

    def finish(self, value: dict[str, Any], filling: Filling, saved: Saved) -> Sequence[tuple[str, Tensor]]:
        """Call what is the user's own (`load_state_dict`, `set_extra_state`), after all else is filled.
        (leaf name, tensor) of what came into the state by that."""
        return ()


# What is not named


def warn_of_hooks(modules: Iterable[nn.Module], named: Mapping[str, object]) -> None:
    """Warn of communication hooks of DDP whose state (PowerSGD's error feedback) no named object holds."""
    held = {id(value) for _, value in rng.reached(named)}
    for module in (each for root in modules for each in root.modules()):
        if isinstance(module, nn.parallel.DistributedDataParallel):
            for _, state in module._comm_hooks:
                if _changes(state) and id(state) not in held:
                    log.warning(
                        "a communication hook of DDP has a %s, which is not saved: a resumed run begins "
                        "with a new one, and its gradients differ from those of a run that was never "
                        "stopped. Name an object that holds it and has state_dict and load_state_dict; "
                        "docs/distributed.md has one for PowerSGD",
                        type(state).__name__,
                    )


def _changes(state: object) -> bool:
    """Whether an object holds numbers: its attributes, also where they stand in `__slots__`."""
    names = {*getattr(state, "__dict__", ()), *getattr(type(state), "__slots__", ())}
    values = [getattr(state, name, None) for name in names]
    return any(
        isinstance(each, (Tensor, dict, list)) or type(each) is int or rng.is_generator(each)
        for each in values
    )


# Containers and generators


def is_container(target: object) -> bool:
    """Whether an object can be put back in place by its contents alone."""
    return type(target) in _CONTAINERS or isinstance(target, Tensor) or rng.is_generator(target)


class ContainerEntry(StateEntry):
    """One named dict, list, tensor or generator: kept where it is, its contents put back."""

    kind = "container"

    def __init__(self, name: str, target: Any) -> None:
        super().__init__(name, target)
        self._root = {name: target}

    def take(self, walk: Walk) -> None:
        is_one = isinstance(self.target, Tensor) and self.target.is_leaf
        self.parameters = [(self.name, self.target)] if is_one else []

    def values(self, sink: Sink) -> dict[str, Any]:
        place = Place("other", self.target, self._root, self.name)
        return {"kind": self.kind, "state": survey(self.target, self.name, place, sink)}

    def differences(self, value: dict[str, Any], saved: Saved, live: Walk) -> list[Row]:
        content = value["state"]
        recorded = "tensor" if type(content) is LeafRef else type(content).__name__
        here = "tensor" if isinstance(self.target, Tensor) else type(self.target).__name__
        if recorded != here:
            return [(self.name, recorded, here)]
        rows: list[Row] = []
        if isinstance(self.target, Tensor) and self.name in saved.leaves:
            rows += misfit(saved.leaves[self.name], live.named.get(self.name))
        return rows + unknown_classes(self.references(value), None, live)

    def restore(self, value: dict[str, Any], filling: Filling, live: Walk) -> None:
        if isinstance(self.target, Tensor):
            for name, leaf in live.named.items():
                if leaf.owner is self.target and leaf.kind == "other" and name in filling.saved.names:
                    filling.fill(name, leaf.tensor)
        else:
            Settling(filling).settle(value["state"], self.target, self.name)


# GradScaler


class ScalerEntry(StateEntry):
    """One named GradScaler: its tensors are leaves, read where they are. Its own `state_dict` waits for the
    device."""

    kind = "scaler"

    def values(self, sink: Sink) -> dict[str, Any]:
        content = {}
        for key, name, home in self._attributes():
            held = getattr(self.target, f"_{key}")
            if held is None:  # its tensors appear with the first scaled loss
                sink.absent(name, self.target, f"_{key}")
            content[key] = survey(held, name, Place("other", self.target, self.target, f"_{key}", home), sink)
        return {"kind": self.kind, "state": content}

    def _attributes(self) -> list[tuple[str, str, torch.device]]:
        """None of one that is not enabled."""
        if not self.target.is_enabled():
            return []
        return [(key, f"{self.name}.{key}", torch.device(self.target._device)) for key in _SCALER]

    def differences(self, value: dict[str, Any], saved: Saved, live: Walk) -> list[Row]:
        sides = {True: "an enabled GradScaler", False: "a GradScaler that is not enabled"}
        recorded, here = bool(value["state"]), bool(self.target.is_enabled())
        return [(self.name, sides[recorded], sides[here])] if recorded != here else []

    def restore(self, value: dict[str, Any], filling: Filling, live: Walk) -> None:
        for key, name, home in self._attributes():
            held = getattr(self.target, f"_{key}")
            setattr(self.target, f"_{key}", Settling(filling, home).settle(value["state"][key], held, name))


def is_torch_scaler(target: object) -> bool:
    """Whether this is a GradScaler that saves as torch's does: one with methods of its own is asked."""
    kind = type(target)
    return isinstance(target, GradScaler) and (
        kind.state_dict is GradScaler.state_dict  # type: ignore[attr-defined]
        and kind.load_state_dict is GradScaler.load_state_dict  # type: ignore[attr-defined]
    )


# Objects with methods of their own


class ObjectEntry(StateEntry):
    """One named object with `state_dict` and `load_state_dict`."""

    kind = "object"

    def take(self, walk: Walk) -> None:
        if isinstance(self.target, Optimizer):
            self.parameters = take_unowned(self.name, self.target, walk)

    def values(self, sink: Sink) -> dict[str, Any]:
        state = self.target.state_dict()
        value = {"kind": self.kind, "state": survey(state, self.name, Place("other", self.target), sink)}
        if isinstance(self.target, LRScheduler):
            value["class"] = type(self.target).__qualname__
        return value

    def differences(self, value: dict[str, Any], saved: Saved, live: Walk) -> list[Row]:
        here = type(self.target).__qualname__ if isinstance(self.target, LRScheduler) else None
        recorded = value.get("class")
        return [(self.name, str(recorded), here or "no scheduler")] if recorded not in (None, here) else []

    def restore(self, value: dict[str, Any], filling: Filling, live: Walk) -> None:
        fill_unowned(self.target, filling, live)

    def finish(self, value: dict[str, Any], filling: Filling, saved: Saved) -> Sequence[tuple[str, Tensor]]:
        """What it holds then counts, and not the copies that it was given."""
        recorded = value["state"]
        self.target.load_state_dict(Settling(filling).settle(recorded, None, self.name))
        if isinstance(self.target, Optimizer) and saves_as_torch(self.target):
            _undo_casts(self.target, Settling(filling).settle(recorded, None, self.name))
        held = Walk()
        now = self.values(held)["state"]
        wrong = [f"{leaf.name} was not saved" for leaf in held.leaves if leaf.name not in saved.names]
        if changed := changed_values(recorded, now, self.name):
            # What differs from one call to the next (a clock) says nothing about what was loaded.
            changing = changed_values(now, self.values(Walk())["state"], self.name)
            if PARTIAL in value:
                changing |= dict.fromkeys(changed.keys() - dict(_parts(recorded, self.name)).keys(), "")
            wrong += [f"{path} is {found}" for path, found in changed.items() if path not in changing]
        known = [leaf for leaf in held.leaves if leaf.name in saved.names]
        pairs = [(saved.leaves[saved.names[leaf.name]], leaf) for leaf in known]
        misfits = [row for leaf, here in pairs for row in misfit(leaf, here)]
        wrong += [f"{name} was {recorded} and is {here}" for name, recorded, here in misfits]
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise ValueError(
                f"it holds something else after its own load_state_dict: {'; '.join(wrong[:_SHOWN])}{more}. "
                "Let state_dict and load_state_dict keep every value as it is (a torch optimizer without its "
                "own keeps dtypes), and leave out what belongs to one process"
            )
        return [(leaf.name, here.tensor) for leaf, here in pairs]


def misfit(leaf: Leaf, live: LiveLeaf | None) -> list[Row]:
    """The row of a live leaf that a saved one cannot fill, and of one that is not there."""
    if live is None:
        return [(leaf.name, described(leaf), MISSING)]
    if fits(leaf, live.tensor, live.box):
        return []
    return [(leaf.name, described(leaf), described(live.tensor, live.box))]


def unknown_classes(refs: Iterable[tuple[str, LeafRef]], like: Tensor | None, live: Walk) -> list[Row]:
    """Tensors of a class that cannot be made here, where the live state has none yet."""
    return [
        (name, str(ref.about["class"]), "a class that is not known here")
        for name, ref in refs
        if not can_make(ref.about, like) and name not in live.refs
    ]


def take_unowned(name: str, optimizer: Optimizer, walk: Walk) -> list[tuple[str, Tensor]]:
    """Parameters that no attached module holds are state of their optimizer."""
    taken: list[tuple[str, Tensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        walk.guard(group["params"])
        for index, parameter in enumerate(group["params"]):
            if parameter not in walk.owners:
                walk.owners[parameter] = name, f"params.{unowned(number, index)}"
                taken.append((".".join(walk.owners[parameter]), parameter))
                walk.add(taken[-1][0], parameter, Place("parameter", optimizer, group["params"], index))
    return taken


def fill_unowned(optimizer: Optimizer, filling: Filling, live: Walk) -> None:
    """Fill those again."""
    for name, leaf in live.named.items():
        if leaf.owner is optimizer and leaf.kind == "parameter":
            filling.fill(name, leaf.tensor)


def saves_as_torch(target: Optimizer) -> bool:
    """Whether both of an optimizer's methods are torch's own: at most it has hooks."""
    kind = type(target)
    return kind.state_dict is Optimizer.state_dict and kind.load_state_dict is Optimizer.load_state_dict


def _undo_casts(target: Optimizer, given: Any) -> None:
    """torch casts state to its parameter's dtype as it loads. Where `state_dict` hands out the very
    tensor that the optimizer holds, no hook makes another of it, and it can be put back as saved."""
    handed: Any = target.state_dict()
    parameters = [p for group in target.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        shown, recorded = _state_at(handed, index), _state_at(given, index)
        live: Any = target.state.get(parameter)
        for key in recorded.keys() & shown.keys() if isinstance(live, dict) else ():
            saved, held = recorded[key], shown[key]
            if not isinstance(saved, Tensor) or not isinstance(held, Tensor) or live.get(key) is not held:
                continue
            if held.dtype != saved.dtype and held.shape == saved.shape:
                live[key] = saved.to(held.device)


def _state_at(packed: Any, index: int) -> dict[Any, Any]:
    """The state of one parameter in what torch's own state_dict gives, empty in any other form."""
    states = packed.get("state") if isinstance(packed, dict) else None
    state = states.get(index) if isinstance(states, dict) else None
    return state if isinstance(state, dict) else {}


def changed_values(recorded: Any, found: Any, name: str) -> dict[str, str]:
    """Where two nested values differ: path -> what was found there. Order of keys does not count, nor
    what a tensor is beyond being one."""
    before, now = dict(_parts(recorded, name)), dict(_parts(found, name))
    return {path: now.get(path, "nothing") for path in {**before, **now} if before.get(path) != now.get(path)}


def _parts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if type(value) is LeafRef and not is_stored(value):
        yield name, "a tensor"
    elif isinstance(value, (Mapping, *SEQUENCES)):
        length = "" if isinstance(value, Mapping) else f" of {len(value)}"
        yield name, f"{type(value).__name__}{length}"
        for key, item in children(value):
            yield from _parts(item, join(name, key))
    elif isinstance(value, (set, frozenset)):
        yield name, f"{type(value).__name__} {sorted(encode_json(item) for item in value)}"
    else:
        yield name, encode_json(value).decode("ascii")
