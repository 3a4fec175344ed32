"""GradScaler: its tensors are leaves, read where they are. Its own `state_dict` waits for the device.

Owns the names of the attributes that torch's GradScaler keeps its state in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from flashckpt.format.typed import LeafRef
from flashckpt.state.entry import Row
from flashckpt.state.filling import Filling, Saved, Settling
from flashckpt.state.leaves import Leaves, Place, Refresh, Restructured, Sink
from flashckpt.state.naming import Owners
from flashckpt.state.references import references

_TENSORS = ("_scale", "_growth_tracker")
_VALUES = ("_init_scale", "_init_growth_tracker", "_growth_factor", "_backoff_factor", "_growth_interval")


class ScalerEntry:
    """One named GradScaler."""

    kind = "scaler"

    def __init__(self, name: str, target: GradScaler) -> None:
        self.name, self.target = name, target

    def walk(self, leaves: Leaves, owners: Owners) -> dict[str, Any]:
        return leaves.asking(self._values)

    def values(self, refresh: Refresh) -> dict[str, Any]:
        return self._values(refresh)

    def _values(self, sink: Sink) -> dict[str, Any]:
        value: dict[str, Any] = {"kind": self.kind, "enabled": bool(self.target.is_enabled())}
        if not value["enabled"]:
            return value
        for key in _TENSORS:
            tensor = getattr(self.target, key)
            name = f"{self.name}.{key.strip('_')}"
            if tensor is None:
                self._anchor_absent(sink, key, name)
                value[key] = None
            else:
                place = Place("other", self.target, self.target, key, torch.device(self.target._device))
                value[key] = sink.add(name, tensor, place)
        return value | {key: getattr(self.target, key) for key in _VALUES}

    def _anchor_absent(self, sink: Sink, key: str, name: str) -> None:
        """Both tensors appear with the first scaled loss."""
        if isinstance(sink, Leaves):
            sink.anchor(self.target, key, None)
        elif isinstance(sink, Refresh) and sink.knows(name):
            raise Restructured(name)

    def parameters(self) -> list[tuple[str, Tensor]]:
        return []

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        for key in _TENSORS if value["enabled"] else ():
            yield from references(value[key], f"{self.name}.{key.strip('_')}")

    def differences(self, value: dict[str, Any], saved: Saved, live: Leaves) -> list[Row]:
        sides = {True: "an enabled GradScaler", False: "a GradScaler that is not enabled"}
        recorded, here = value["enabled"], bool(self.target.is_enabled())
        return [(self.name, sides[recorded], sides[here])] if recorded != here else []

    def restore(self, value: dict[str, Any], filling: Filling, live: Leaves) -> None:
        if not value["enabled"]:
            return
        settling = Settling(filling, torch.device(self.target._device))
        for key in _TENSORS:
            name = f"{self.name}.{key.strip('_')}"
            setattr(self.target, key, settling.settle(value[key], getattr(self.target, key), name))
        for key in _VALUES:
            setattr(self.target, key, value[key])

    def finish(self, value: dict[str, Any], filling: Filling) -> None:
        """Nothing here is the user's own code."""


def is_torch_scaler(target: object) -> bool:
    """Whether this is a GradScaler that saves as torch's does: one with methods of its own is asked."""
    kind = type(target)
    return isinstance(target, GradScaler) and (
        kind.state_dict is GradScaler.state_dict  # type: ignore[attr-defined]
        and kind.load_state_dict is GradScaler.load_state_dict  # type: ignore[attr-defined]
    )
