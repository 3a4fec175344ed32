"""Objects known only by `state_dict` and `load_state_dict`: schedulers, metrics, self-saving optimizers.

Owns asking them at every boundary, giving back copies of their own, and asking once more whether they hold
what they were given. They come last, after all else is filled. What their methods do is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flashckpt.format.typed import LeafRef
from flashckpt.state.arrival import changed_values, refuse_arrival
from flashckpt.state.entry import Row
from flashckpt.state.filling import Filling, Saved, Settling
from flashckpt.state.leaves import Leaves, Place, Refresh, Sink
from flashckpt.state.naming import Owners, unowned
from flashckpt.state.references import references
from flashckpt.state.survey import survey


class ObjectEntry:
    """One named object with `state_dict` and `load_state_dict`."""

    kind = "object"

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target = name, target
        self._unowned: list[tuple[str, Tensor]] = []

    def walk(self, leaves: Leaves, owners: Owners) -> dict[str, Any]:
        self._unowned = []
        if isinstance(self.target, Optimizer):
            self._take_unowned(leaves, owners)
        return leaves.asking(self._values)

    def values(self, refresh: Refresh) -> dict[str, Any]:
        return self._values(refresh)

    def _values(self, sink: Sink) -> dict[str, Any]:
        state = self.target.state_dict()
        value = {"kind": self.kind, "state": survey(state, self.name, Place("other", self.target), sink)}
        if isinstance(self.target, LRScheduler):
            value["class"] = type(self.target).__qualname__
        return value

    def _take_unowned(self, leaves: Leaves, owners: Owners) -> None:
        for number, group in enumerate(self.target.param_groups):
            leaves.guard(group["params"])
            for index, parameter in enumerate(group["params"]):
                if owners.of(parameter) is None:
                    name = owners.full_name(parameter, self.name, number, index)
                    leaves.add(name, parameter, Place("parameter", self.target, group["params"], index))
                    owners.own(parameter, self.name, f"params.{unowned(number, index)}")
                    self._unowned.append((name, parameter))

    def parameters(self) -> list[tuple[str, Tensor]]:
        return self._unowned

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        return references(value["state"], self.name)

    def differences(self, value: dict[str, Any], saved: Saved, live: Leaves) -> list[Row]:
        here = type(self.target).__qualname__ if isinstance(self.target, LRScheduler) else None
        recorded = value.get("class")
        return [(self.name, str(recorded), here or "no scheduler")] if recorded not in (None, here) else []

    def restore(self, value: dict[str, Any], filling: Filling, live: Leaves) -> None:
        for name, leaf in live.named.items():
            if leaf.owner is self.target and leaf.kind == "parameter":
                filling.fill(name, leaf.tensor)

    def finish(self, value: dict[str, Any], filling: Filling) -> None:
        state = Settling(filling, torch.device("cpu")).settle(value["state"], None, self.name)
        self.target.load_state_dict(state)
        if isinstance(self.target, Optimizer) and saves_as_torch(self.target):
            given = Settling(filling, torch.device("cpu")).settle(value["state"], None, self.name)
            _undo_casts(self.target, given)

    def holds(self, value: dict[str, Any]) -> Leaves:
        """The tensors that the object holds after `finish`. Raises StateError if its values are others
        than were saved."""
        live = Leaves()
        now = self._values(live)["state"]
        changed = changed_values(value["state"], now, self.name)
        if changed:
            # What differs from one call to the next (a clock) says nothing about what was loaded.
            changing = changed_values(now, self._values(Leaves())["state"], self.name)
            wrong = [f"{path} is {found}" for path, found in changed.items() if path not in changing]
            if wrong:
                refuse_arrival(self.name, wrong)
        return live


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
