"""What every kind of named object gives to the tree; and the kinds that are neither module nor optimizer:
containers, GradScaler, and objects known by `state_dict` and `load_state_dict` alone (schedulers, metrics,
self-saving optimizers).

Owns asking those at every boundary, giving back copies of their own, and comparing what they hold then with
what was saved. They come last, after all else is filled. What their methods do is theirs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flashckpt.errors import StateError
from flashckpt.format.typed import LeafRef, encode_json
from flashckpt.state import rng
from flashckpt.state.filling import Filling, Saved
from flashckpt.state.leaves import Leaves, Owners, Place, Sink, unowned
from flashckpt.state.tensors import can_make, described, fits
from flashckpt.state.values import SEQUENCES, children, join, references, survey

Row = tuple[str, str, str]
MISSING = "missing"

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque)
_TENSORS = ("_scale", "_growth_tracker")
_VALUES = ("_init_scale", "_init_growth_tracker", "_growth_factor", "_backoff_factor", "_growth_interval")
_SHOWN = 3


class StateEntry:
    """One named object of the state. `parameters` are those of the last walk, with their full names: they may
    have gradients."""

    kind = ""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target = name, target
        self.parameters: list[tuple[str, Tensor]] = []

    def walk(self, leaves: Leaves, owners: Owners) -> dict[str, Any]:
        """Hand over all tensors; the values that go with them. Raises StateError."""
        return leaves.asking(self.values)

    def values(self, sink: Sink) -> dict[str, Any]:
        """The values alone, now. Raises Restructured if the tensors are others than at the walk."""
        raise NotImplementedError

    def structure(self) -> dict[str, object]:
        """What the program has to build before it can be filled."""
        return {}

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        """The tensors that a saved value names, beside parameters and buffers, each by its place."""
        raise NotImplementedError

    def differences(self, value: dict[str, Any], saved: Saved, live: Leaves) -> list[Row]:
        """What does not fit, `live` being a walk made just now; changes nothing."""
        raise NotImplementedError

    def restore(self, value: dict[str, Any], filling: Filling, live: Leaves) -> None:
        """Fill what exists and make what does not."""
        raise NotImplementedError

    def finish(self, value: dict[str, Any], filling: Filling) -> None:
        """Call what is the user's own (`load_state_dict`, `set_extra_state`), after all else is filled."""


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

    def walk(self, leaves: Leaves, owners: Owners) -> dict[str, Any]:
        is_one = isinstance(self.target, Tensor) and self.target.is_leaf
        self.parameters = [(self.name, self.target)] if is_one else []
        return super().walk(leaves, owners)

    def values(self, sink: Sink) -> dict[str, Any]:
        place = Place("other", self.target, self._root, self.name)
        return {"kind": self.kind, "content": survey(self.target, self.name, place, sink)}

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        return references(value["content"], self.name)

    def differences(self, value: dict[str, Any], saved: Saved, live: Leaves) -> list[Row]:
        content = value["content"]
        recorded = "tensor" if type(content) is LeafRef else type(content).__name__
        here = "tensor" if isinstance(self.target, Tensor) else type(self.target).__name__
        if recorded != here:
            return [(self.name, recorded, here)]
        rows: list[Row] = []
        if isinstance(self.target, Tensor) and self.name in saved.leaves:
            leaf = saved.leaves[self.name]
            if not fits(leaf, self.target):
                rows.append((self.name, described(leaf), described(self.target)))
        for name, ref in references(content, self.name):
            if not can_make(ref.about, None) and name not in live.refs:
                rows.append((name, str(ref.about["class"]), "a class that is not known here"))
        return rows

    def restore(self, value: dict[str, Any], filling: Filling, live: Leaves) -> None:
        if isinstance(self.target, Tensor):
            for name, leaf in live.named.items():
                if leaf.owner is self.target and leaf.kind == "other" and filling.holds(name):
                    filling.fill(name, leaf.tensor)
        else:
            filling.settle(value["content"], self.target, self.name)


# GradScaler


class ScalerEntry(StateEntry):
    """One named GradScaler: its tensors are leaves, read where they are. Its own `state_dict` waits for the
    device."""

    kind = "scaler"

    def values(self, sink: Sink) -> dict[str, Any]:
        value: dict[str, Any] = {"kind": self.kind, "enabled": bool(self.target.is_enabled())}
        if not value["enabled"]:
            return value
        for name, key in self._tensors():
            tensor = getattr(self.target, key)
            if tensor is None:  # both appear with the first scaled loss
                sink.absent(name, self.target, key)
                value[key] = None
            else:
                place = Place("other", self.target, self.target, key, torch.device(self.target._device))
                value[key] = sink.add(name, tensor, place)
        return value | {key: getattr(self.target, key) for key in _VALUES}

    def _tensors(self) -> list[tuple[str, str]]:
        return [(f"{self.name}.{key.strip('_')}", key) for key in _TENSORS]

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        for name, key in self._tensors() if value["enabled"] else ():
            yield from references(value[key], name)

    def differences(self, value: dict[str, Any], saved: Saved, live: Leaves) -> list[Row]:
        sides = {True: "an enabled GradScaler", False: "a GradScaler that is not enabled"}
        recorded, here = value["enabled"], bool(self.target.is_enabled())
        return [(self.name, sides[recorded], sides[here])] if recorded != here else []

    def restore(self, value: dict[str, Any], filling: Filling, live: Leaves) -> None:
        if not value["enabled"]:
            return
        home = torch.device(self.target._device)
        for name, key in self._tensors():
            setattr(self.target, key, filling.settle(value[key], getattr(self.target, key), name, home))
        for key in _VALUES:
            setattr(self.target, key, value[key])


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

    def walk(self, leaves: Leaves, owners: Owners) -> dict[str, Any]:
        if isinstance(self.target, Optimizer):
            self.parameters = take_unowned(self.name, self.target, leaves, owners)
        return super().walk(leaves, owners)

    def values(self, sink: Sink) -> dict[str, Any]:
        state = self.target.state_dict()
        value = {"kind": self.kind, "state": survey(state, self.name, Place("other", self.target), sink)}
        if isinstance(self.target, LRScheduler):
            value["class"] = type(self.target).__qualname__
        return value

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        return references(value["state"], self.name)

    def differences(self, value: dict[str, Any], saved: Saved, live: Leaves) -> list[Row]:
        here = type(self.target).__qualname__ if isinstance(self.target, LRScheduler) else None
        recorded = value.get("class")
        return [(self.name, str(recorded), here or "no scheduler")] if recorded not in (None, here) else []

    def restore(self, value: dict[str, Any], filling: Filling, live: Leaves) -> None:
        fill_unowned(self.target, filling, live)

    def finish(self, value: dict[str, Any], filling: Filling) -> None:
        self.target.load_state_dict(filling.settle(value["state"], None, self.name))
        if isinstance(self.target, Optimizer) and saves_as_torch(self.target):
            _undo_casts(self.target, filling.settle(value["state"], None, self.name))

    def holds(self, value: dict[str, Any]) -> Leaves:
        """The tensors that the object holds after `finish`. Raises StateError if its values are others
        than were saved."""
        live = Leaves()
        now = self.values(live)["state"]
        changed = changed_values(value["state"], now, self.name)
        if changed:
            # What differs from one call to the next (a clock) says nothing about what was loaded.
            changing = changed_values(now, self.values(Leaves())["state"], self.name)
            wrong = [f"{path} is {found}" for path, found in changed.items() if path not in changing]
            if wrong:
                _refuse_arrival(self.name, wrong)
        return live


def take_unowned(name: str, optimizer: Optimizer, leaves: Leaves, owners: Owners) -> list[tuple[str, Tensor]]:
    """Parameters that no attached module holds are state of their optimizer."""
    taken: list[tuple[str, Tensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        leaves.guard(group["params"])
        for index, parameter in enumerate(group["params"]):
            if owners.of(parameter) is None:
                full_name = owners.full_name(parameter, name, number, index)
                leaves.add(full_name, parameter, Place("parameter", optimizer, group["params"], index))
                owners.own(parameter, name, f"params.{unowned(number, index)}")
                taken.append((full_name, parameter))
    return taken


def fill_unowned(optimizer: Optimizer, filling: Filling, live: Leaves) -> None:
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
    if type(value) is LeafRef:
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


def tensors_held(name: str, live: Leaves, saved: Saved) -> list[tuple[str, Tensor]]:
    """(stored leaf, tensor) of all that an object holds. Raises StateError where shape or dtype is
    another than was saved."""
    pairs: list[tuple[str, Tensor]] = []
    for leaf in live.leaves:
        if leaf.name not in saved.names:
            _refuse_arrival(name, [f"{leaf.name} was not saved"])
        recorded = saved.leaves[saved.names[leaf.name]]
        if not fits(recorded, leaf.tensor):
            _refuse_arrival(name, [f"{leaf.name} was {described(recorded)} and is {described(leaf.tensor)}"])
        pairs.append((recorded.name, leaf.tensor))
    return pairs


def _refuse_arrival(name: str, what: list[str]) -> NoReturn:
    more = f" and {len(what) - _SHOWN} more" if len(what) > _SHOWN else ""
    raise StateError(
        f"{name} is not what was saved after its own load_state_dict: {'; '.join(what[:_SHOWN])}{more}. The "
        "rest of the state was loaded already, so this process must not train on; the checkpoint is intact. "
        "Let state_dict and load_state_dict keep every value as it is (a torch optimizer without its own "
        "keeps dtypes), and leave out what belongs to one process.",
        location=name,
    )
