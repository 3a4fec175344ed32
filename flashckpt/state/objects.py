"""The interface of all named objects of a state, and the kinds that are neither module nor optimizer:
containers, GradScaler, and objects with only `state_dict` and `load_state_dict` (schedulers, metrics,
self-saving optimizers).

Owns the call of their `state_dict` at each boundary, the copies for their `load_state_dict`, and the
comparison of the restored state with the saved one. A restore calls them last, after all else is filled.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flashckpt.errors import StateError
from flashckpt.format.layout import Leaf
from flashckpt.format.typed import SEQUENCES, LeafRef, children, encode_json
from flashckpt.state import rng
from flashckpt.state.leaves import Filling, LiveLeaf, Place, Saved, Sink, Walk, is_stored, unowned
from flashckpt.state.tensors import can_make, described, fits, is_sharded
from flashckpt.state.values import Settling, join, references, survey

log = logging.getLogger(__name__)

Row = tuple[str, str, str]
MISSING = "missing"
# With this key, the value of a state may lack named objects, and the value of an object may lack keys: these
# keep the program's own values. Steps that were imported from other formats have it.
PARTIAL = "partial"

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque)
_SCALER = (
    "scale", "growth_tracker", "init_scale", "init_growth_tracker", "growth_factor", "backoff_factor",
    "growth_interval",
)  # fmt: skip
_SHOWN = 3


class StateEntry:
    """One named object of the state. `parameters`: (full name, parameter) of those that may have gradients,
    as of the last walk."""

    kind = ""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target = name, target
        self.parameters: list[tuple[str, Tensor]] = []

    def take(self, walk: Walk) -> None:
        """Add the tensors that `values` does not add to the walk. Raises StateError."""

    def values(self, sink: Sink) -> dict[str, Any]:
        """Return the current values. Raises Restructured if the tensors differ from those of the walk."""
        raise NotImplementedError

    def structure(self) -> dict[str, object]:
        """Return the structure that the program has to build before a restore: name -> size."""
        return {}

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        """Yield (name of its place, reference) of each tensor in a saved value, without parameters and
        buffers."""
        return references(value["state"], self.name)

    def differences(self, value: dict[str, Any], saved: Saved, live: Walk) -> list[Row]:
        """Return the differences that prevent a restore. `live`: a walk of the current state. Changes
        nothing."""
        raise NotImplementedError

    def restore(self, value: dict[str, Any], filling: Filling, live: Walk) -> None:
        """Fill existing tensors and values, and create missing ones."""
        raise NotImplementedError

    def finish(self, value: dict[str, Any], filling: Filling, saved: Saved) -> Sequence[tuple[str, Tensor]]:
        """Call the user's own methods (`load_state_dict`, `set_extra_state`), after all else is filled.
        Return (leaf name, tensor) of the leaves that they restored."""
        return ()


def warn_of_hooks(modules: Iterable[nn.Module], named: Mapping[str, object]) -> None:
    """Warn about torch's communication hooks of DDP whose state (PowerSGD's error feedback) no named object
    holds."""
    held = {id(value) for _, value in rng.reached(named)}
    for module in (each for root in modules for each in root.modules()):
        if isinstance(module, nn.parallel.DistributedDataParallel):
            for _, state in module._comm_hooks:
                is_torchs = type(state).__module__.startswith("torch.distributed.algorithms.")
                if is_torchs and id(state) not in held:
                    log.warning(
                        "a communication hook of DDP has a %s, which is not saved: a resumed run begins "
                        "with a new one, and its gradients differ from those of an uninterrupted run. Name "
                        "an object that holds it and has state_dict and load_state_dict; "
                        "docs/distributed.md shows one for PowerSGD",
                        type(state).__name__,
                    )


# Containers and generators


def is_container(target: object) -> bool:
    """Whether an object can be restored in place by its contents alone."""
    return type(target) in _CONTAINERS or isinstance(target, Tensor) or rng.is_generator(target)


class ContainerEntry(StateEntry):
    """One named dict, list, tensor or generator: a restore keeps the object and replaces its contents."""

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
    """One named GradScaler. Its tensors are leaves, read in place: its own `state_dict` waits for the
    device."""

    kind = "scaler"

    def values(self, sink: Sink) -> dict[str, Any]:
        content = {}
        for key, name, home in self._attributes():
            held = getattr(self.target, f"_{key}")
            if held is None:  # the first scaled loss creates the tensors
                sink.absent(name, self.target, f"_{key}")
            content[key] = survey(held, name, Place("other", self.target, self.target, f"_{key}", home), sink)
        return {"kind": self.kind, "state": content}

    def _attributes(self) -> list[tuple[str, str, torch.device]]:
        if not self.target.is_enabled():  # it has no state then
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
    """Whether this is a GradScaler with torch's own saving. Others are saved by their own methods."""
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
        """Load the state, then compare the state that the object returns with the saved one."""
        recorded = value["state"]
        self.target.load_state_dict(Settling(filling).settle(recorded, None, self.name))
        held = Walk()
        now = self.values(held)["state"]
        wrong = [f"{leaf.name} was not saved" for leaf in held.leaves if leaf.name not in saved.names]
        if changed := changed_values(recorded, now, self.name):
            # A value that differs between two calls (a clock) proves nothing about the load.
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
                f"its state differs after its own load_state_dict: {'; '.join(wrong[:_SHOWN])}{more}. Let "
                "state_dict and load_state_dict keep every value unchanged (for a torch optimizer without "
                "its own methods, flashckpt keeps dtypes), and leave out values that belong to one process"
            )
        return [(leaf.name, here.tensor) for leaf, here in pairs]


def misfit(leaf: Leaf, live: LiveLeaf | None) -> list[Row]:
    """Return the row of a saved leaf that cannot fill its live one, or that has none."""
    if live is None:
        return [(leaf.name, described(leaf), MISSING)]
    if fits(leaf, live.tensor, live.box):
        return []
    return [(leaf.name, described(leaf), described(live.tensor, live.box))]


def unknown_classes(refs: Iterable[tuple[str, LeafRef]], like: Tensor | None, live: Walk) -> list[Row]:
    """Return the rows of tensors that the live state lacks and whose class a restore cannot create."""
    return [
        (name, str(ref.about["class"]), "an unknown class")
        for name, ref in refs
        if not can_make(ref.about, like) and name not in live.refs
    ]


def take_unowned(name: str, optimizer: Optimizer, walk: Walk) -> list[tuple[str, Tensor]]:
    """Add the parameters that no attached module owns to the walk, as state of their optimizer; return
    (name, parameter) of each."""
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
    """Fill the parameters that `take_unowned` added."""
    for name, leaf in live.named.items():
        if leaf.owner is optimizer and leaf.kind == "parameter":
            filling.fill(name, leaf.tensor)


def changed_values(recorded: Any, found: Any, name: str) -> dict[str, str]:
    """Return the differences of two nested values: path -> the value found there. Ignores the order of keys
    and the contents of tensors."""
    before, now = dict(_parts(recorded, name)), dict(_parts(found, name))
    return {path: now.get(path, "nothing") for path in {**before, **now} if before.get(path) != now.get(path)}


def _parts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if type(value) is LeafRef and not is_stored(value):
        yield name, "a tensor"
    elif isinstance(value, Tensor):
        held: Any = value.detach()
        held = (held.to_local() if is_sharded(held) else held).cpu().contiguous().reshape(-1)
        yield name, f"{value.dtype} {tuple(value.shape)} {held.view(torch.uint8).numpy().tobytes().hex()}"
    elif isinstance(value, (Mapping, *SEQUENCES)):
        length = "" if isinstance(value, Mapping) else f" of {len(value)}"
        yield name, f"{type(value).__name__}{length}"
        for key, item in children(value):
            yield from _parts(item, join(name, key))
    elif isinstance(value, (set, frozenset)):
        yield name, f"{type(value).__name__} {sorted(encode_json(item) for item in value)}"
    else:
        yield name, encode_json(value).decode("ascii")


# State that is applied after load_state_dict


class Deferred(ABC):
    """State that a program can apply only some time after `load_state_dict`: the counters of a trainer, which
    the trainer's own set-up would overwrite.

    `load_state_dict` keeps the state in `pending`, and `state_dict` returns `pending`, until `apply` puts the
    state in place. `pending` is None on a fresh run and after `apply`.
    """

    pending: dict[str, Any] | None = None

    @abstractmethod
    def read(self) -> dict[str, Any]:
        """Return the current state: nested plain values, tensors and generator states, no other objects."""

    @abstractmethod
    def put(self, state: dict[str, Any]) -> None:
        """Apply a state that `read` returned."""

    def state_dict(self) -> dict[str, Any]:
        return self.read() if self.pending is None else self.pending

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pending = state

    def apply(self) -> None:
        """Apply the loaded state, if it is still pending. Raises StateError, with the names, if the state
        then differs from the saved one."""
        if self.pending is None:
            return
        state, self.pending = self.pending, None
        saved = dict(_parts(state, ""))
        self.put(state)
        now = dict(_parts(self.read(), ""))
        wrong = sorted(path for path in saved.keys() | now.keys() if saved.get(path) != now.get(path))
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise StateError(
                f"{type(self).__name__}: {', '.join(wrong[:_SHOWN])}{more} differ from the checkpoint "
                "after they were restored. Training from here would not continue the run. Nothing was "
                "captured, and the checkpoint is intact. Report this with the versions of the packages."
            )
