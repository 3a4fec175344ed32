"""Modules: parameters, buffers, extra state. Owns how they are found, named and put back.

Buffers that `state_dict` leaves out (persistent=False) are saved too: a resume to the bit needs those
that change. Attributes that are neither are not state, as in torch. Never calls `state_dict` of a module:
hooks there gather, copy and rename.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flashckpt.format.typed import LeafRef
from flashckpt.state.entry import MISSING, Row
from flashckpt.state.filling import Filling, Saved, Settling, canonical_names
from flashckpt.state.leaves import Leaves, Place, Refresh, Sink
from flashckpt.state.naming import Owners, step_name
from flashckpt.state.references import references
from flashckpt.state.survey import join, survey
from flashckpt.state.tensors import described, fits, refuse

_EXTRA = "_extra_state"


class ModuleEntry:
    """One named module."""

    kind = "module"

    def __init__(self, name: str, target: nn.Module) -> None:
        self.name, self.target = name, target
        self._modules: dict[str, nn.Module] = {}
        self._extras: list[tuple[str, nn.Module]] = []
        self._transient: list[str] = []
        self._parameters: list[tuple[str, Tensor]] = []

    def walk(self, leaves: Leaves, owners: Owners) -> dict[str, Any]:
        self._modules, self._extras, self._transient, self._parameters = {}, [], [], []
        self._visit(self.target, self.name, leaves, owners, ())
        return self._values(leaves)

    def values(self, refresh: Refresh) -> dict[str, Any]:
        return self._values(refresh)

    def _values(self, sink: Sink) -> dict[str, Any]:
        value: dict[str, Any] = {"kind": self.kind}
        if self._transient:
            value["transient"] = self._transient
        if self._extras:
            value["extra"] = {
                path: survey(module.get_extra_state(), join(path, _EXTRA), Place("other", module), sink)
                for path, module in self._extras
            }
        return value

    def parameters(self) -> list[tuple[str, Tensor]]:
        return self._parameters

    def _visit(
        self, module: nn.Module, path: str, leaves: Leaves, owners: Owners, above: tuple[int, ...]
    ) -> None:
        if id(module) in above:
            refuse(path, "is a module inside itself", "Hold the outer module in a list or a weak reference.")
        _check_own_saving(module, path)
        self._modules.setdefault(path, module)
        self._take_parameters(module, path, leaves, owners)
        self._take_buffers(module, path, leaves)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self._extras.append((path, module))
        leaves.guard(module._modules)
        for child_name, child in module._modules.items():
            leaves.anchor(module._modules, child_name, child)
            if child is not None:
                below = join(path, step_name(module, child_name))
                self._visit(child, below, leaves, owners, (*above, id(module)))

    def _take_parameters(self, module: nn.Module, path: str, leaves: Leaves, owners: Owners) -> None:
        leaves.guard(module._parameters)
        for key, parameter in module._parameters.items():
            if parameter is None:
                leaves.anchor(module._parameters, key, None)
                continue
            name = join(path, key)
            leaves.add(name, parameter, Place("parameter", module, module._parameters, key))
            owners.own(parameter, self.name, name.removeprefix(self.name + "."))
            self._parameters.append((name, parameter))

    def _take_buffers(self, module: nn.Module, path: str, leaves: Leaves) -> None:
        leaves.guard(module._buffers)
        for key, buffer in module._buffers.items():
            if buffer is None:
                leaves.anchor(module._buffers, key, None)
                continue
            name = join(path, key)
            leaves.add(name, buffer, Place("buffer", module, module._buffers, key))
            if key in module._non_persistent_buffers_set:
                self._transient.append(name)

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        for path, state in value.get("extra", {}).items():
            yield from references(state, join(path, _EXTRA))

    def differences(self, value: dict[str, Any], saved: Saved, live: Leaves) -> list[Row]:
        names = canonical_names(saved)
        recorded = {name: saved.leaves[names[name]] for name in names if self._is_mine(name)}
        here = {name: leaf.tensor for name, leaf in live.named.items() if self._is_mine(name)}
        rows: list[Row] = []
        for name, leaf in recorded.items():
            if (name not in here or not fits(leaf, here[name])) and not self._may_make(name, value):
                rows.append((name, described(leaf), described(here[name]) if name in here else MISSING))
        for name in here.keys() - recorded.keys() - set(self._transient):
            rows.append((name, MISSING, described(here[name])))
        recorded_extra, live_extra = set(value.get("extra", {})), {path for path, _ in self._extras}
        for path in sorted(recorded_extra ^ live_extra):
            sides = ("extra state", MISSING) if path in recorded_extra else (MISSING, "extra state")
            rows.append((join(path, _EXTRA), *sides))
        return rows

    def _is_mine(self, name: str) -> bool:
        return name.startswith(self.name + ".") and f".{_EXTRA}" not in name

    def _may_make(self, name: str, value: dict[str, Any]) -> bool:
        """Whether a buffer may come from the snapshot as it is: one that the module declares and has not
        filled yet, or one that is no part of its state_dict (a cache that grew)."""
        path, _, key = name.rpartition(".")
        module = self._modules.get(path)
        if module is None or key in module._parameters or key in module._modules:
            return False
        return name in value.get("transient", ()) or module._buffers.get(key, module) is None

    def restore(self, value: dict[str, Any], filling: Filling, live: Leaves) -> None:
        for name in filter(self._is_mine, filling.names_under(self.name)):
            leaf = live.named.get(name)
            if leaf is not None and fits(filling.leaf(name), leaf.tensor):
                filling.fill(name, leaf.tensor)
            else:
                self._make(name, name in value.get("transient", ()), filling)

    def _make(self, name: str, transient: bool, filling: Filling) -> None:
        path, _, key = name.rpartition(".")
        module = self._modules[path]
        before = module._buffers.get(key)
        beside = before if before is not None else next(self.target.parameters(), None)
        home = torch.device("cpu") if beside is None else beside.device
        if key in module._buffers:
            transient = key in module._non_persistent_buffers_set
        module._buffers.pop(key, None)
        module.register_buffer(key, filling.place(LeafRef(name), name, None, home), persistent=not transient)

    def finish(self, value: dict[str, Any], filling: Filling) -> None:
        for path, module in self._extras:
            if path in value.get("extra", {}):
                settling = Settling(filling, torch.device("cpu"))
                module.set_extra_state(settling.settle(value["extra"][path], None, join(path, _EXTRA)))


def _check_own_saving(module: nn.Module, path: str) -> None:
    """Refuse a module whose own saving holds more than parameters, buffers and extra state."""
    if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
        return
    found: dict[str, Any] = {}
    module._save_to_state_dict(found, "", True)
    further = found.keys() - module._parameters.keys() - module._buffers.keys() - {_EXTRA}
    if further:
        refuse(
            join(path, min(further)),
            f"is put into the state_dict of a {type(module).__name__} by its own code",
            "Make it a buffer, or give the module get_extra_state and set_extra_state.",
        )


def tie_differences(saved: Saved, live: Leaves) -> list[Row]:
    """Names that are one tensor on one side and several on the other, among those both sides have."""
    names = canonical_names(saved)
    shared = [n for n, leaf in live.named.items() if n in names and leaf.kind in ("parameter", "buffer")]
    rows: list[Row] = []
    by_leaf: dict[str, str] = {}
    by_tensor: dict[str, str] = {}
    for name in shared:
        recorded, here = names[name], live.named[name].name
        first, other = by_leaf.setdefault(recorded, name), by_tensor.setdefault(here, name)
        if live.named[first].name != here:
            rows.append((name, f"one tensor with {first}", "a tensor of its own"))
        if names[other] != recorded:
            rows.append((name, "a tensor of its own", f"one tensor with {other}"))
    return rows
