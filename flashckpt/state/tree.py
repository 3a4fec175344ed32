"""The state as a whole: every named object's leaves and values, the gradients, and the way back.

Owns the order (modules, optimizers, the rest; on the way back the user's own code last), the rule that
nothing live changes before everything fits, what a plan has to watch, and the mask of gradients, one
character a parameter. Never copies a leaf.
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
from flashckpt.format.parts import MAX_VALUES_BYTES
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
    leaf_names,
)
from flashckpt.state.modules import ModuleEntry, check_own_saving, tie_differences
from flashckpt.state.objects import (
    MISSING,
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
    ZeroEntry,
    check_drivers,
    has_own_saving,
    is_zero,
    unwrapped,
    warn_of_attributes,
)
from flashckpt.state.stored import check_stored, is_stored
from flashckpt.state.tensors import DTYPE_NAMES, described, make, strides

log = logging.getLogger(__name__)

__all__ = ["LiveLeaf", "Saved", "Tree", "Walk"]

NAMESPACE = "gradients"
UsedUp = Callable[[Any, Tensor], bool]

# none · used up: dense, or sparse with 1-9 sparse dimensions · still to be used: dense, sparse, coalesced
NONE, ZEROS, LEAF, SPARSE, COALESCED = "-", "d", "L", "S", "C"
_LEAVES = frozenset((LEAF, SPARSE, COALESCED))


class Tree:
    """The named objects of a run."""

    def __init__(self, named: Mapping[str, object], most_values_bytes: int = MAX_VALUES_BYTES) -> None:
        """Raises StateError, with the path in the state, for what cannot be saved exactly, and for plain
        values that take more than `most_values_bytes` as JSON."""
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
        self._structure: dict[str, object] | None = None  # at the first walk; None once a change was said
        walk = self.walk(_all_used_up)
        check_drivers(targets, optimizers, self.parameters())
        for name, optimizer in optimizers.items():
            warn_of_attributes(name, optimizer)
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
            num_bytes = 0  # what has no encoding is found below, with its path
        if num_bytes > self.most_values_bytes:
            raise too_large(self.plain_values(value), num_bytes, self.most_values_bytes)
        for name, each in value["entries"].items():
            check_roundtrip(each, name)

    def plain_values(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """What is no tensor of each named object, as the program has it: of what `values` gives."""
        entries = value["entries"]
        return {
            name: entries[name]["state"] if entry.kind in ("container", "object") else entries[name]
            for name, entry in self._entries.items()
        }

    def _in_order(self) -> list[StateEntry]:
        """Modules own parameters and so come first; then optimizers, which own those that are left."""
        entries = self._entries.values()
        return sorted(
            entries, key=lambda e: 0 if e.kind == "module" else 1 if isinstance(e.target, Optimizer) else 2
        )

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Those of all entries, as of the last walk, with their names."""
        return [pair for entry in self._in_order() for pair in entry.parameters]

    def walk(self, used_up: UsedUp) -> Walk:
        """Every leaf and value of the state, now. `used_up(parameter, gradient)` says of a gradient that
        the optimizer has used it and it is not needed again. Raises StateError."""
        walk, collects = Walk(), gc.isenabled()
        gc.disable()  # a walk makes many small objects and no garbage: collections would be most of its time
        try:
            for entry in self._in_order():
                entry.take(walk)
            alone = frozenset(walk.refs)
            found = {entry.name: entry.values(walk) for entry in self._in_order()}
            walk.asked = walk.refs.keys() - alone
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
            self._tell_changed(self._structure)
        return walk

    def found(self) -> Walk:
        """Every leaf and value with all gradients taken for used up: to compare with, and not to capture. The
        last walk that was of this kind, as long as the state holds what it found; else a new one. While
        nothing of the program runs, as in `attach`, one is enough. Raises StateError."""
        found = self._found
        return found if found is not None and found.stand_whole() else self.walk(_all_used_up)

    def _structure_now(self) -> dict[str, object]:
        """What the program has to build before it can be filled: parameters with their shapes, and the number
        of parameters in each group of the optimizers."""
        return {name: size for entry in self._entries.values() for name, size in entry.structure().items()}

    def _tell_changed(self, before: dict[str, object]) -> None:
        """Said once, at the first snapshot of it: a start of the same script will build something else."""
        now = self._structure_now()
        changed = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
        if not changed:
            return
        self._structure = None
        log.warning(
            "parameters or groups of optimizers are others than at attach (%s%s). They are saved, but a "
            "start of the same script builds those from before, and a resume stops with a MismatchError. Let "
            "the script build them before it attaches, by how far the run has come (flashckpt.steps(path)), "
            "or all of them from the beginning",
            ", ".join(changed[:5]), ", …" if len(changed) > 5 else "",
        )  # fmt: skip

    def values(self, used_up: UsedUp | None = None) -> dict[str, Any]:
        """The values alone, now, for `encode_json` at once; leaves without a container get their newest
        tensor. With `used_up` the mask of gradients is read again too. If the state is structured
        otherwise than at the last walk, it is walked again: `current` is then another Walk. Raises
        StateError."""
        if self.current is None:
            return self.walk(used_up or self._used_up).value
        refresh = Refresh(self.current)
        try:
            entries = {name: entry.values(refresh) for name, entry in self._entries.items()}
            if gone := self.current.asked - refresh.seen:
                # Their leaves would be ones that nothing names.
                raise Restructured(min(gone))
            return {"entries": entries, NAMESPACE: self._gradients.values(refresh, used_up)}
        except Restructured:
            return self.walk(used_up or self._used_up).value

    def differences(self, saved: Saved) -> list[Row]:
        """What does not fit, as rows (name, in the checkpoint, live); the live state stays as it is.
        Raises DamagedError if the snapshot's values are not whole."""
        live, self.current = self.found(), None
        try:
            rows = self._differences(saved, live)
            self._fitting = None if rows else (saved, live)
            return rows
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise DamagedError(
                f"The values of the snapshot do not have the form they were written in ({error!r}). It "
                "cannot be used; nothing was loaded."
            ) from error

    def _differences(self, saved: Saved, live: Walk) -> list[Row]:
        recorded = saved.value["entries"]
        rows: list[Row] = []
        for name in [*recorded, *(name for name in self._entries if name not in recorded)]:
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
        for name, entry in self._entries.items() if not rows else ():
            for place, ref in entry.references(saved.value["entries"][name]):
                for leaf in leaf_names(place, ref):
                    if leaf not in saved.names:
                        raise DamagedError(f"The snapshot names {leaf!r} and lacks it. Nothing was loaded.")
                    if is_stored(ref):
                        check_stored(ref.about, saved.leaves[saved.names[leaf]].num_bytes)
        return rows

    def restore(self, saved: Saved, uploads: Uploads | None = None) -> list[tuple[str, Tensor]]:
        """Make the live state the saved one; (leaf name, live tensor) of everything that was filled. What is
        on a device goes there by `uploads`.

        Raises MismatchError or DamagedError with nothing changed; what a `load_state_dict` of the
        user's own raises, or does not take back, comes as StateError, when all else was filled. A leaf
        that has no place in the live state is a DamagedError then. What `differences` found to fit last is
        neither compared nor walked again, as long as the tensors that were found are those of the state."""
        known = self._fitting is not None and self._fitting[0] is saved and self._fitting[1].stand()
        rows = [] if known else self.differences(saved)
        fitting, self._fitting = self._fitting, None
        if rows or fitting is None:
            raise MismatchError(
                f"The live state does not fit the checkpoint: {len(rows)} differences. Nothing was loaded.",
                differences=tuple(rows),
            )
        if not fitting[1].stand():
            raise StateError(
                "The state has other tensors each time it is asked: what was filled would not be what is "
                "trained. Nothing was loaded. Let no state_dict put new tensors into the state's modules or "
                "optimizers."
            )
        live, filling, values = fitting[1], Filling(saved, uploads), saved.value["entries"]
        for entry in self._in_order():
            entry.restore(values[entry.name], filling, live)
        self._gradients.restore(saved.value[NAMESPACE], filling)
        filling.make_copies()
        filling.at_once = True  # code of the program's own reads what it is given
        filled = list(filling.filled)
        for entry in self._in_order():
            try:
                filled += entry.finish(values[entry.name], filling, saved)
            except Exception as error:
                raise StateError(
                    f"{entry.name} did not take its state back: {type(error).__name__}: {error}. The rest of "
                    "the state was loaded already, so this process must not train on. The checkpoint is "
                    "intact.",
                    location=entry.name,
                ) from error
        self.current = self._found = None
        left = sorted(saved.leaves.keys() - {name for name, _ in filled})
        if left:
            raise DamagedError(
                f"{len(left)} tensors of the snapshot belong to nothing that its values name "
                f"({', '.join(left[:5])}), so they were not loaded. The rest was: this process must not "
                "train on. Resume from another step."
            )
        return filled

    @property
    def entries(self) -> Mapping[str, StateEntry]:
        """The parts of the state, as of the last walk."""
        return self._entries

    @property
    def names(self) -> list[str]:
        """The names of the parts of the state."""
        return list(self._entries)

    @property
    def own_code(self) -> list[str]:
        """The names of what takes its state back by methods of the program's own."""
        return [
            entry.name
            for entry in self._entries.values()
            if isinstance(entry, ObjectEntry) or (isinstance(entry, ModuleEntry) and entry.extras)
        ]


def _other_boxes(saved: Saved, live: Walk) -> list[Row]:
    """Tensors of which the snapshot has another part than is here."""
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
    if is_zero(target):
        return ZeroEntry(name, target)
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
    """Only a module may have two names: its tensors are then stored once, with both."""
    first: dict[int, str] = {}
    for name, target in named.items():
        if not name or name.startswith(("!", "_")) or name.split(".")[0] == NAMESPACE:
            raise StateError(f"{name!r} cannot name a part of the state. Choose another name.", location=name)
        for other in named:
            if other != name and other.startswith(name + "."):
                raise StateError(
                    f"{other!r} would stand inside {name!r}: names in the state would not be unique. Nothing "
                    "was changed. Rename one of them.",
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
    """The gradients of all parameters that one walk found: those still to be used are leaves, of the others
    only the kind is kept. A used-up gradient comes back as zeros of its kind: with
    zero_grad(set_to_none=False) an idle parameter still decays, one without a gradient does not."""

    def __init__(self, parameters: list[tuple[str, Tensor]]) -> None:
        first_names: dict[Tensor, str] = {}
        for name, parameter in parameters:
            first_names.setdefault(parameter, name)
        self._parameters, self._names = list(first_names), list(first_names.values())
        self._record = Encoded(self._names)
        self._exceptions: dict[str, Any] = {}
        self.kinds = ""

    def take(self, walk: Walk, used_up: UsedUp) -> dict[str, Any]:
        """Hand over the gradients still to be used; the mask of all."""
        self.kinds, self._exceptions = self._kinds_now(used_up), {}
        for name, parameter, kind in zip(self._names, self._parameters, self.kinds, strict=True):
            gradient = parameter.grad
            if kind in _LEAVES:
                self._take(walk, name, parameter, kind)
            elif kind == ZEROS and gradient is not None:
                like_parameter = gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride()
                if not like_parameter:  # zeros_like would give another
                    self._exceptions[name] = DTYPE_NAMES[gradient.dtype], strides(gradient)
        return self._value(self.kinds)

    def values(self, refresh: Refresh, used_up: UsedUp | None) -> dict[str, Any]:
        """The mask, read again with `used_up`. Raises Restructured if other gradients are leaves now."""
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
        # A sparse tensor hands out its parts anew each time: there is no place to watch.
        place = Place("gradient", parameter, home=parameter.device)
        sink.add(f"{full}.indices", gradient._indices(), place)
        sink.add(f"{full}.values", gradient._values(), place)

    def _kinds_now(self, used_up: UsedUp) -> str:
        return "".join([NONE if (g := p.grad) is None else _kind_of(p, g, used_up) for p in self._parameters])

    def differences(self, value: dict[str, Any]) -> list[Row]:
        """Parameters whose gradient the snapshot holds and that are not here."""
        known = set(self._names)
        pairs = zip(value["names"], value["kinds"], strict=True)
        return [(name, "gradient", MISSING) for name, kind in pairs if kind != NONE and name not in known]

    def restore(self, value: dict[str, Any], filling: Filling) -> None:
        """Give every parameter the gradient it had, or zeros of its kind, or none."""
        by_name = dict(zip(self._names, self._parameters, strict=True))
        for name, kind in zip(value["names"], value["kinds"], strict=True):
            if name in by_name:
                parameter = by_name.pop(name)
                parameter.grad = _gradient(name, kind, parameter, value["exceptions"].get(name), filling)
        for parameter in by_name.values():
            parameter.grad = None


def _kind_of(parameter: Tensor, gradient: Tensor, used_up: UsedUp) -> str:
    """The character that stands for a gradient."""
    used = used_up(parameter, gradient)
    if gradient.layout is torch.strided:
        return ZEROS if used else LEAF
    if gradient.layout is not torch.sparse_coo:
        return LEAF  # refused, with its name, when it is taken
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
    filling.make_copies()  # the indices are read here
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)


def _leaves_in(kinds: str) -> list[tuple[int, str]]:
    return [(index, kind) for index, kind in enumerate(kinds) if kind in _LEAVES]
