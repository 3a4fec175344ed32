"""The whole state: the leaves and values of all named objects, the gradients, and their restore.

Owns the order (modules, optimizers, the rest; a restore runs the user's own code last), the rule that no live
object changes before everything fits, the conditions of a plan, and the mask of gradients, one character a
parameter. Never copies a leaf.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flashckpt.errors import DamagedError, MismatchError, StateError
from flashckpt.format.layout import Leaf
from flashckpt.format.records import MAX_VALUES_BYTES
from flashckpt.format.typed import Encoded, LeafRef, check_roundtrip, encode_json, too_large
from flashckpt.state.leaves import (
    Filling,
    LiveLeaf,
    Place,
    Refresh,
    Restructured,
    Saved,
    Sink,
    Uploads,
    Walk,
    check_stored,
    is_plain,
    is_stored,
    leaf_names,
)
from flashckpt.state.modules import ModuleEntry, check_own_saving, tie_differences
from flashckpt.state.objects import (
    MISSING,
    PARTIAL,
    ContainerEntry,
    ObjectEntry,
    Row,
    ScalerEntry,
    StateEntry,
    is_container,
    is_torch_scaler,
    warn_of_hooks,
)
from flashckpt.state.optimizers import (
    OptimizerEntry,
    check_drivers,
    check_not_zero,
    has_own_saving,
    unwrapped,
    warn_of_unsaved,
)
from flashckpt.state.tensors import DTYPE_NAMES, PLAIN, described, fits, make, span, strides

log = logging.getLogger(__name__)

__all__ = ["PARTIAL", "LiveLeaf", "Saved", "Tree", "Walk"]

NAMESPACE = "gradients"
UsedUp = Callable[[Any, Tensor], bool]

# no gradient; used up: dense, or sparse ("1" to "9": its sparse dimensions); still to be used: dense, sparse,
# coalesced
NONE, ZEROS, LEAF, SPARSE, COALESCED = "-", "d", "L", "S", "C"
_LEAVES = frozenset((LEAF, SPARSE, COALESCED))
_FILLED = ("parameter", "buffer", "optimizer")


class Tree:
    """The named objects of a run."""

    def __init__(self, named: Mapping[str, object], most_values_bytes: int = MAX_VALUES_BYTES) -> None:
        """Raises StateError, with the path in the state, for objects that cannot be saved exactly, and for
        plain values of more than `most_values_bytes` as JSON."""
        self.most_values_bytes = most_values_bytes
        targets = {name: unwrapped(target) for name, target in named.items()}
        _check_names(targets)
        self._entries: dict[str, StateEntry] = {
            name: _entry(name, target) for name, target in targets.items()
        }
        self.modules: list[nn.Module] = [t for t in targets.values() if isinstance(t, nn.Module)]
        optimizers = {name: target for name, target in targets.items() if isinstance(target, Optimizer)}
        self.named_optimizers: Mapping[str, Optimizer] = optimizers
        self.optimizers: list[Optimizer] = list(optimizers.values())
        self._gradients = Gradients([])
        self._used_up: UsedUp = _all_used_up
        self.current: Walk | None = None
        self._found: Walk | None = None
        self._fitting: tuple[Saved, Walk] | None = None
        self._structure: dict[str, object] | None = None  # at the first walk; None after a warning
        walk = self.walk(_all_used_up)
        check_drivers(targets, optimizers, self.parameters())
        for name, optimizer in optimizers.items():
            warn_of_unsaved(name, optimizer)
        warn_of_hooks(self.modules, targets)
        entries = [entry for entry in self._entries.values() if isinstance(entry, ModuleEntry)]
        check_own_saving({path: each for e in entries for path, each in e.modules.items()}, walk.leaves)
        self._check_values(walk.value)
        self._structure = self._structure_now()
        self.current = None

    def _check_values(self, value: Mapping[str, Any]) -> None:
        try:
            num_bytes = len(encode_json(value["entries"]))
        except StateError:
            num_bytes = 0  # check_roundtrip below finds the value without an encoding, and its path
        if num_bytes > self.most_values_bytes:
            raise too_large(self.plain_values(value), num_bytes, self.most_values_bytes)
        for name, each in value["entries"].items():
            check_roundtrip(each, name)

    def plain_values(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of each named object, in the program's own form, from the result of `values`."""
        entries = value["entries"]
        return {
            name: entries[name]["state"] if entry.kind in ("container", "object") else entries[name]
            for name, entry in self._entries.items()
        }

    def _in_order(self) -> list[StateEntry]:
        """Modules come first, because they own parameters; then optimizers, which own the remaining ones."""
        entries = self._entries.values()
        return sorted(
            entries, key=lambda e: 0 if e.kind == "module" else 1 if isinstance(e.target, Optimizer) else 2
        )

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Return (name, parameter) of all entries, as of the last walk."""
        return [pair for entry in self._in_order() for pair in entry.parameters]

    def walk(self, used_up: UsedUp) -> Walk:
        """Collect every leaf and value of the current state. `used_up(parameter, gradient)` returns whether
        the optimizer has used a gradient, so that it is not needed again. Raises StateError."""
        walk, collects = Walk(), gc.isenabled()
        gc.disable()  # a walk creates many small objects and no garbage; collections would take most of it
        try:
            for entry in self._in_order():
                entry.take(walk)
            alone = frozenset(walk.refs)
            found = {entry.name: entry.values(walk) for entry in self._in_order()}
            walk.in_values = walk.refs.keys() - alone
            gradients = Gradients(self.parameters())
            mask = gradients.take(walk, used_up)
            walk.check_shared_memory()
        finally:
            if collects:
                gc.enable()
        walk.value = {"entries": {name: found[name] for name in self._entries}, NAMESPACE: mask}
        self.current, self._gradients, self._used_up = walk, gradients, used_up
        self._found = walk if used_up is _all_used_up else None
        if self._structure is not None:
            self._warn_of_changes(self._structure)
        return walk

    def found(self) -> Walk:
        """Return a walk that treats all gradients as used up, for comparisons only. Reuses the last such walk
        while the state still holds its tensors. Raises StateError."""
        found = self._found
        return found if found is not None and found.all_leaves_valid() else self.walk(_all_used_up)

    def tensors_now(self) -> list[Tensor]:
        """Return the tensors of the current state, without gradients that are used up. Raises StateError."""
        walk, self.current = self.walk(_all_used_up), None
        return [leaf.tensor for leaf in walk.leaves]

    def _structure_now(self) -> dict[str, object]:
        """Return the structure that the program has to build before a restore: the parameters with their
        shapes, and the number of parameters in each optimizer group."""
        return {name: size for entry in self._entries.values() for name, size in entry.structure().items()}

    def _warn_of_changes(self, before: dict[str, object]) -> None:
        """Warn once if the structure has changed: a restart of the same script builds the old structure."""
        now = self._structure_now()
        changed = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
        if not changed:
            return
        self._structure = None
        log.warning(
            "parameters or optimizer groups have changed since attach (%s%s). They are saved, but a restart "
            "of the same script builds the old ones, and its resume raises MismatchError. Let the script "
            "build the new ones before it attaches: from the beginning, or depending on the newest step "
            "(flashckpt.steps(path))",
            ", ".join(changed[:5]), ", …" if len(changed) > 5 else "",
        )  # fmt: skip

    def values(self, used_up: UsedUp | None = None) -> dict[str, Any]:
        """Return the current values, to be encoded at once; leaves without a container get their newest
        tensor. `used_up`: read the mask of gradients again, too. If the structure of the state has changed
        since the last walk, walk it again: `current` is then another Walk. Raises StateError."""
        if self.current is None:
            return self.walk(used_up or self._used_up).value
        refresh = Refresh(self.current)
        try:
            entries = {name: entry.values(refresh) for name, entry in self._entries.items()}
            if gone := self.current.in_values - refresh.seen:
                # No value would refer to their leaves.
                raise Restructured(min(gone))
            return {"entries": entries, NAMESPACE: self._gradients.values(refresh, used_up)}
        except Restructured:
            return self.walk(used_up or self._used_up).value

    def differences(self, saved: Saved) -> list[Row]:
        """Return the differences that prevent a restore, as rows (name, in the checkpoint, live). Changes
        nothing. Raises DamagedError if the snapshot's values are malformed."""
        live, self.current = self.found(), None
        try:
            rows = self._differences(saved, live)
            self._fitting = None if rows else (saved, live)
            return rows
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise DamagedError(
                f"The values of the snapshot are malformed ({error!r}). Nothing was loaded. The snapshot "
                "cannot be used."
            ) from error

    def _differences(self, saved: Saved, live: Walk) -> list[Row]:
        recorded = saved.value["entries"]
        rows: list[Row] = []
        absent = [] if PARTIAL in saved.value else [name for name in self._entries if name not in recorded]
        for name in [*recorded, *absent]:
            kinds = [recorded[name]["kind"] if name in recorded else MISSING]
            kinds.append(self._entries[name].kind if name in self._entries else MISSING)
            if kinds[0] != kinds[1]:
                rows.append((name, *kinds))
            else:
                rows += self._entries[name].differences(recorded[name], saved, live)
        rows += tie_differences(saved, live)
        rows += _other_boxes(saved, live) if not rows else []
        if not rows:
            rows += self._gradients.differences(saved.value[NAMESPACE])
        for entry in self._saved_entries(recorded) if not rows else ():
            for place, ref in entry.references(recorded[entry.name]):
                for leaf in leaf_names(place, ref):
                    if leaf not in saved.names:
                        raise DamagedError(
                            f"The snapshot refers to {leaf!r} and does not contain it. Nothing was loaded."
                        )
                    if is_stored(ref):
                        check_stored(ref.about, saved.leaves[saved.names[leaf]].num_bytes)
        return rows

    def _saved_entries(self, recorded: Mapping[str, Any]) -> list[StateEntry]:
        return [entry for entry in self._in_order() if entry.name in recorded]

    def targets(self, saved: Saved) -> dict[str, Tensor]:
        """Return the live tensors that a restore of `saved`, which the last call of `differences` found to
        fit, fills byte for byte, by the names of the leaves: parameters, buffers and optimizer state in host
        memory, contiguous, and of no memory in common. Without buffers that are not persistent: an older step
        may lack one, and leaves it as it is."""
        if self._fitting is None or self._fitting[0] is not saved or not self._fitting[1].is_valid():
            return {}
        found: dict[str, Tensor] = {}
        named = self._fitting[1].named
        transient = self.transient
        for name, leaf in saved.leaves.items():
            live = named.get(name)
            if live is None or live.name != name or live.container is None or live.kind not in _FILLED:
                continue
            if not transient.isdisjoint((name, *live.aliases)):
                continue
            if live.aliases and live.kind == "optimizer":  # it may be restored as two tensors, in any order
                continue
            tensor = live.tensor
            if type(tensor) in PLAIN and is_plain(tensor) and tensor.numel() and fits(leaf, tensor, live.box):
                found[name] = tensor
        return _apart(found)

    def restore(self, saved: Saved, uploads: Uploads | None = None) -> list[tuple[str, Tensor]]:
        """Restore the saved state into the live one; return (leaf name, live tensor) of everything filled.
        `uploads` copies the tensors of devices.

        A snapshot that the last call of `differences` found to fit is not compared again, as long as the
        state still holds the same tensors. Raises MismatchError or DamagedError, with nothing changed, for a
        state that does not fit. Raises StateError, after all else was filled, if a user's own
        `load_state_dict` fails or does not restore its state, and DamagedError, also then, for a leaf that
        belongs to no object."""
        known = self._fitting is not None and self._fitting[0] is saved and self._fitting[1].is_valid()
        rows = [] if known else self.differences(saved)
        fitting, self._fitting = self._fitting, None
        if rows or fitting is None:
            raise MismatchError(
                f"The live state does not fit the checkpoint: {len(rows)} differences. Nothing was loaded.",
                differences=tuple(rows),
            )
        if not fitting[1].is_valid():
            raise StateError(
                "The tensors of the state are replaced at each read, so the restored tensors would not be "
                "those that are trained. Nothing was loaded. Let no state_dict put new tensors into the "
                "state's modules or optimizers."
            )
        live, filling, values = fitting[1], Filling(saved, uploads), saved.value["entries"]
        saved_entries = self._saved_entries(values)
        for entry in saved_entries:
            entry.restore(values[entry.name], filling, live)
        self._gradients.restore(saved.value[NAMESPACE], filling)
        filling.make_copies()
        filling.at_once = True  # the program's own code reads the tensors that it gets
        filled = list(filling.filled)
        for entry in saved_entries:
            try:
                filled += entry.finish(values[entry.name], filling, saved)
            except Exception as error:
                raise StateError(
                    f"{entry.name} did not restore its state: {type(error).__name__}: {error}. The rest of "
                    "the state was already loaded, so this process must not continue to train. The "
                    "checkpoint is intact.",
                    location=entry.name,
                ) from error
        self.current = self._found = None
        left = sorted(saved.leaves.keys() - {name for name, _ in filled})
        if left:
            raise DamagedError(
                f"{len(left)} tensors of the snapshot belong to no object that its values name "
                f"({', '.join(left[:5])}) and were not loaded. The rest was loaded, so this process must not "
                "continue to train. Resume from another step."
            )
        return filled

    @property
    def entries(self) -> Mapping[str, StateEntry]:
        """The named objects of the state, as of the last walk."""
        return self._entries

    @property
    def names(self) -> list[str]:
        """The names of the state's objects."""
        return list(self._entries)

    @property
    def replaced_options(self) -> dict[str, list[tuple[str, object, object]]]:
        """The options of optimizers, by the optimizer's name, that the script has changed since the run's
        first start and a restore replaces: (option, the script's value, the checkpoint's)."""
        entries = [entry for entry in self._entries.values() if isinstance(entry, OptimizerEntry)]
        return {entry.name: entry.replaced for entry in entries if entry.replaced}

    @property
    def transient(self) -> frozenset[str]:
        """The names of the buffers that are not persistent."""
        modules = [entry for entry in self._entries.values() if isinstance(entry, ModuleEntry)]
        return frozenset(name for module in modules for name in module.transient)

    @property
    def own_code(self) -> list[str]:
        """The names of the objects that restore their state by methods of the program, not of torch."""
        return [
            entry.name
            for entry in self._entries.values()
            if (isinstance(entry, ObjectEntry) and not type(entry.target).__module__.startswith("torch."))
            or (isinstance(entry, ModuleEntry) and entry.extras)
        ]


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out tensors that share memory with another."""
    shared, end, holder = set[str](), -1, ""
    for start, stop, name in sorted((*span(each), name) for name, each in tensors.items()):
        if start < end:
            shared |= {holder, name}
        if stop > end:
            end, holder = stop, name
    return {name: each for name, each in tensors.items() if name not in shared}


def _other_boxes(saved: Saved, live: Walk) -> list[Row]:
    """Return the rows of tensors whose slice in the snapshot differs from the live one."""
    both = [
        (name, saved.leaves[saved.names[name]], here)
        for name, here in live.named.items()
        if name in saved.names
    ]
    return [
        (name, described(leaf), described(here.tensor, here.box))
        for name, leaf, here in both
        if leaf.box != here.box
    ]


def _all_used_up(parameter: object, gradient: Tensor) -> bool:
    return True


def _entry(name: str, target: Any) -> StateEntry:
    if isinstance(target, nn.Module):
        return ModuleEntry(name, target)
    check_not_zero(name, target)
    if isinstance(target, Optimizer) and not has_own_saving(target):
        return OptimizerEntry(name, target)
    if is_torch_scaler(target):
        return ScalerEntry(name, target)
    if callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None)):
        return ObjectEntry(name, target)
    if is_container(target):
        return ContainerEntry(name, target)
    raise StateError(
        f"{name} is a {type(target).__name__}, which has no state_dict and load_state_dict, so it cannot be "
        "saved. Nothing was saved or changed. Give it both, put its values into a dict, or leave it out.",
        location=name,
    )


def _check_names(named: Mapping[str, object]) -> None:
    """Raise StateError for invalid names. Only a module may have two: its tensors are stored once."""
    first: dict[int, str] = {}
    for name, target in named.items():
        if not name or name.startswith(("!", "_")) or name.split(".")[0] == NAMESPACE:
            raise StateError(
                f"{name!r} is not allowed as a name in the state. Nothing was changed. Choose another name.",
                location=name,
            )
        for other in named:
            if other != name and other.startswith(name + "."):
                raise StateError(
                    f"{other!r} begins with the name {name!r}, so names in the state would not be unique. "
                    "Nothing was changed. Rename one of them.",
                    location=other,
                )
        other = first.setdefault(id(target), name)
        if other != name and not isinstance(target, nn.Module):
            raise StateError(
                f"{other} and {name} are the same {type(target).__name__}: its state would be loaded twice. "
                "Nothing was changed. Name it once.",
                location=name,
            )


# Gradients between two iterations


class Gradients:
    """The gradients of all parameters of one walk. A gradient that is still to be used is a leaf; of a
    used-up one only the kind is saved. It is restored as zeros, not as None: with
    zero_grad(set_to_none=False) an optimizer still decays an idle parameter, and skips one without a
    gradient."""

    def __init__(self, parameters: list[tuple[str, Tensor]]) -> None:
        first_names: dict[Tensor, str] = {}
        for name, parameter in parameters:
            first_names.setdefault(parameter, name)
        self._parameters, self._names = list(first_names), list(first_names.values())
        self._record = Encoded(self._names)
        self._exceptions: dict[str, Any] = {}
        self.kinds = ""

    def take(self, walk: Walk, used_up: UsedUp) -> dict[str, Any]:
        """Add the gradients that are still to be used to the walk; return the mask of all."""
        self.kinds, self._exceptions = self._kinds_now(used_up), {}
        for name, parameter, kind in zip(self._names, self._parameters, self.kinds, strict=True):
            gradient = parameter.grad
            if kind in _LEAVES:
                self._take(walk, name, parameter, kind)
            elif kind == ZEROS and gradient is not None:
                like_parameter = gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride()
                if not like_parameter:  # zeros_like(parameter) would differ
                    self._exceptions[name] = DTYPE_NAMES[gradient.dtype], strides(gradient)
        return self._value(self.kinds)

    def values(self, refresh: Refresh, used_up: UsedUp | None) -> dict[str, Any]:
        """Return the mask, read again with `used_up`. Raises Restructured if the gradients that are leaves
        have changed."""
        kinds = self.kinds if used_up is None else self._kinds_now(used_up)
        leaves = _leaves_in(kinds)
        if kinds != self.kinds and leaves != _leaves_in(self.kinds):
            raise Restructured(NAMESPACE)
        for index, kind in leaves:
            if self._parameters[index].grad is None:
                raise Restructured(self._names[index])
            self._take(refresh, self._names[index], self._parameters[index], kind)
        return self._value(kinds)

    def _value(self, kinds: str) -> dict[str, Any]:
        return {"names": self._record, "kinds": kinds, "exceptions": self._exceptions}

    def _take(self, sink: Sink, name: str, parameter: Tensor, kind: str) -> None:
        gradient = parameter.grad
        assert gradient is not None
        full = f"{NAMESPACE}.{name}"
        if kind == LEAF:
            ref = sink.add(full, gradient, Place("gradient", parameter, parameter, "grad", parameter.device))
            if ref.about:
                self._exceptions[name] = ref
            return
        # A sparse tensor returns new part tensors at each access: they have no container.
        place = Place("gradient", parameter, home=parameter.device)
        sink.add(f"{full}.indices", gradient._indices(), place)
        sink.add(f"{full}.values", gradient._values(), place)

    def _kinds_now(self, used_up: UsedUp) -> str:
        return "".join([NONE if (g := p.grad) is None else _kind_of(p, g, used_up) for p in self._parameters])

    def differences(self, value: dict[str, Any]) -> list[Row]:
        """Return the parameters that are missing here and whose gradient the snapshot holds."""
        known = set(self._names)
        pairs = zip(value["names"], value["kinds"], strict=True)
        return [(name, "gradient", MISSING) for name, kind in pairs if kind != NONE and name not in known]

    def restore(self, value: dict[str, Any], filling: Filling) -> None:
        """Set the gradient of each parameter: the saved one, zeros of its kind, or None."""
        by_name = dict(zip(self._names, self._parameters, strict=True))
        for name, kind in zip(value["names"], value["kinds"], strict=True):
            if name in by_name:
                parameter = by_name.pop(name)
                parameter.grad = _gradient(name, kind, parameter, value["exceptions"].get(name), filling)
        for parameter in by_name.values():
            parameter.grad = None


def _kind_of(parameter: Tensor, gradient: Tensor, used_up: UsedUp) -> str:
    """Return the character of a gradient in the mask."""
    used = used_up(parameter, gradient)
    if gradient.layout is torch.strided:
        return ZEROS if used else LEAF
    if gradient.layout is not torch.sparse_coo:
        return LEAF  # Walk.add refuses it, with its name
    if used:
        return str(gradient.sparse_dim())
    return COALESCED if gradient.is_coalesced() else SPARSE


def _gradient(name: str, kind: str, parameter: Tensor, exception: Any, filling: Filling) -> Tensor | None:
    if kind == NONE:
        return None
    if kind == ZEROS and exception is None:
        return torch.zeros_like(parameter, requires_grad=False)
    if kind == ZEROS:
        dtype, stride = exception
        leaf = Leaf(name="", dtype=dtype, shape=tuple(parameter.shape), stride=stride)
        return make(leaf, parameter.device).zero_()
    full = f"{NAMESPACE}.{name}"
    if kind == LEAF:
        ref = exception if isinstance(exception, LeafRef) else LeafRef(full)
        return filling.place(ref, full, parameter.grad, parameter.device, parameter)
    coalesced: bool | None = None
    if kind in (SPARSE, COALESCED):
        indices = filling.place(LeafRef(full), f"{full}.indices", None, parameter.device)
        values = filling.place(LeafRef(full), f"{full}.values", None, parameter.device)
        coalesced = kind == COALESCED
    elif kind.isdigit() and 0 < int(kind) <= parameter.dim():
        indices = torch.empty((int(kind), 0), dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_empty((0, *parameter.shape[int(kind) :]))
    else:
        raise DamagedError(f"The snapshot holds a gradient of an unknown kind for {name}. It cannot be used.")
    shape = parameter.shape
    filling.make_copies()  # sparse_coo_tensor reads the indices
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)


def _leaves_in(kinds: str) -> list[tuple[int, str]]:
    return [(index, kind) for index, kind in enumerate(kinds) if kind in _LEAVES]
