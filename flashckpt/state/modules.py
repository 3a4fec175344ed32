"""Modules: parameters, buffers, extra state. Owns how they are found, named and restored.

Saves also non-persistent buffers: an exact resume needs those that change. Other attributes are no state, as
in torch, except those of metrics. Calls a module's `state_dict` only once, at attach, and never later: hooks
there gather, copy and rename. Refuses a module whose own `state_dict` or hook saves data that no leaf holds,
because a restore would lose it. Accepts one that only renames, hides or nests the data of leaves.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flashckpt.format.layout import Leaf
from flashckpt.format.typed import SEQUENCES, Encoded, LeafRef, children
from flashckpt.state.leaves import Filling, Kind, LiveLeaf, Place, Saved, Sink, Walk, leaf_names, step_name
from flashckpt.state.objects import MISSING, Row, StateEntry, misfit
from flashckpt.state.tensors import (
    DTYPE_NAMES,
    FlatPiece,
    Ranks,
    TensorBox,
    described,
    fits,
    flat_pieces,
    has_unreduced_gradients,
    is_sharded,
    is_wrapper,
    refuse,
    span,
)
from flashckpt.state.values import SIMPLE, Settling, join, references, survey

log = logging.getLogger(__name__)

_EXTRA = "_extra_state"
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
# Their state_dict splits or joins parameters that are saved as leaves.
_CONVERTING = {
    "torchtitan.models.common.attention.FusedQKVLinear",
    "torchtitan.overrides.fused_swiglu.FusedSwiGLU",
    "torchtitan.overrides.fused_swiglu.FusedGroupedExperts",
}
_REMEDY = (
    "Make it a buffer, give the module get_extra_state and set_extra_state, or name the object that holds it "
    "in the state beside the module (any object with state_dict and load_state_dict)."
)


class _Around(NamedTuple):
    """The facts that enclosing modules determine for a module.

    sharded: module -> its sharded parameters at the last walk; None in the first walk.
    ids: the ids of the enclosing modules.
    fsdp: the version of FSDP that shards it; 0 for none.
    flat: parameter -> this rank's slice of a parameter of FSDP1.
    replicas: the ranks that hold its parameters too (DDP), except for the parameters in `ignored`.
    """

    sharded: Mapping[nn.Module, Mapping[str, Tensor]] | None
    ids: tuple[int, ...] = ()
    fsdp: Literal[0, 1, 2] = 0
    flat: Mapping[Tensor, FlatPiece] = {}
    replicas: Ranks = ()
    ignored: Set[Tensor] = frozenset()

    def inside(self, module: nn.Module) -> _Around:
        """Return the facts for the children of a module."""
        around = self._replace(ids=(*self.ids, id(module)))
        if _is_torchs_own(module, "FSDPModule"):
            if self.sharded is None:
                module.reshard()  # type: ignore[operator]  # frees gathered parameters; no collective
            around = around._replace(fsdp=2)
        elif _is_gathered(module):
            around = around._replace(fsdp=1, flat={**around.flat, **flat_pieces(module)})
        if isinstance(module, nn.parallel.DistributedDataParallel):
            names = module.parameters_to_ignore
            # torch also accepts names of the module's own parameters with a leading dot.
            ignored = {p for n, p in module.module.named_parameters() if n in names or f".{n}" in names}
            ranks = tuple(sorted(dist.get_process_group_ranks(module.process_group)))
            around = around._replace(replicas=ranks if len(ranks) > 1 else (), ignored=ignored)
        return around

    def sharded_one(self, module: nn.Module, key: str, shown: Tensor, name: str) -> Tensor:
        """Return the sharded parameter of a module, where FSDP may show another one in its place."""
        known = (self.sharded or {}).get(module, {}).get(key)
        if self.fsdp == 1 and not isinstance(shown, nn.Parameter):
            if known is None:
                why = "is unsharded: FSDP waits for a backward pass"
                refuse(name, why, "Attach before the first forward pass, or after a backward one.")
            return known
        if self.fsdp == 1 or known is None:
            return shown
        same = is_sharded(shown) and shown.device_mesh == known.device_mesh  # type: ignore[attr-defined]
        return shown if same else known


class ModuleEntry(StateEntry):
    """One named module. As of the last walk: `extras` are (path, module) of metrics and of modules with
    get_extra_state; `flat` maps the name of a parameter that FSDP1 flattens to its `FlatPiece.whole`."""

    kind = "module"

    def __init__(self, name: str, target: nn.Module) -> None:
        super().__init__(name, target)
        self.modules: dict[str, nn.Module] = {}
        self.extras: list[tuple[str, nn.Module]] = []
        self.flat: dict[str, list[Any]] = {}
        self._flat_record = Encoded(self.flat)
        self.transient: list[str] = []
        self._shapes: dict[str, torch.Size] = {}  # of persistent buffers, at the first walk
        self._resized: set[str] = set()
        # FSDP's sharded parameters. After a forward pass without a backward pass, a module shows others in
        # their places: unsharded ones, or ones on a smaller mesh.
        self._sharded: dict[nn.Module, dict[str, Tensor]] | None = None
        self._fsdp: list[tuple[str, nn.Module]] = []
        self._frozen: list[str] = []
        self._frozen_record = Encoded(self._frozen)

    def take(self, walk: Walk) -> None:
        self.modules, self.extras, self.transient, self.parameters = {}, [], [], []
        before, self._sharded, self._fsdp, self.flat = self._sharded, {}, [], {}
        self._visit(self.target, self.name, walk, _Around(before))
        self._flat_record = Encoded(self.flat)

    def values(self, sink: Sink) -> dict[str, Any]:
        for path, module in self._fsdp:
            if has_unreduced_gradients(module):
                why = "has gradients that FSDP2 has accumulated and not reduced yet"
                refuse(path, why, "It can be saved after the optimizer's step.")
        value: dict[str, Any] = {"kind": self.kind, "frozen": self._frozen_now()}
        if self.flat:
            value["flat"] = self._flat_record
        if self.transient:
            value["transient"] = self.transient
        if self._resized:
            value["resized"] = sorted(self._resized)
        if self.extras:
            value["extra"] = {
                path: survey(_extra_state(module), join(path, _EXTRA), Place("other", module), sink)
                for path, module in self.extras
            }
        return value

    def _frozen_now(self) -> Encoded:
        """Return the names of frozen parameters, encoded again only if they have changed."""
        frozen = [name for name, parameter in self.parameters if not parameter.requires_grad]
        if frozen != self._frozen:
            self._frozen, self._frozen_record = frozen, Encoded(frozen)
        return self._frozen_record

    def _visit(self, module: nn.Module, path: str, walk: Walk, around: _Around) -> None:
        if id(module) in around.ids:
            refuse(path, "is a module inside itself", "Hold the outer module in a list or a weak reference.")
        self.modules.setdefault(path, module)
        around = around.inside(module)
        if _is_torchs_own(module, "FSDPModule"):
            self._fsdp.append((path, module))
        for name, _, parameter in self._take("parameter", module, path, walk, around):
            walk.owners.setdefault(parameter, (self.name, name.removeprefix(self.name + ".")))
            self.parameters.append((name, parameter))
        for name, key, buffer in self._take("buffer", module, path, walk, around):
            if key in module._non_persistent_buffers_set:
                self.transient.append(name)
            elif self._shapes.setdefault(name, buffer.shape) != buffer.shape:
                self._resized.add(name)
        if is_metric(module) or _has_extra_state(module):
            self.extras.append((path, module))
        walk.guard(module._modules)
        for child_name, child in module._modules.items():
            walk.anchor(module._modules, child_name, child)
            if child is not None:
                self._visit(child, join(path, step_name(module, child_name)), walk, around)

    def _take(
        self, kind: Kind, module: nn.Module, path: str, walk: Walk, around: _Around
    ) -> Iterator[tuple[str, str, Tensor]]:
        """Add a module's own parameters or buffers to the walk; yield (name, key, tensor) of each."""
        held: Mapping[str, Tensor | None] = module._parameters if kind == "parameter" else module._buffers
        walk.guard(held)
        for key, shown in held.items():
            if shown is None:
                walk.anchor(held, key, None)
                continue
            place, tensor = Place(kind, module, held, key), shown
            if kind == "parameter":
                tensor = around.sharded_one(module, key, shown, join(path, key))
                if around.fsdp == 1 or (around.fsdp == 2 and is_sharded(tensor)):
                    walk.anchor(held, key, shown)
                    assert self._sharded is not None
                    sharded = self._sharded.setdefault(module, {})
                    sharded[key] = tensor
                    place = place._replace(container=sharded)
                    if (flat := around.flat.get(tensor)) is not None:
                        walk.flat[tensor], self.flat[join(path, key)] = flat, flat.whole
                        place = place._replace(piece=flat.piece)
                elif around.replicas and tensor not in around.ignored:
                    walk.replicas[tensor] = around.replicas
                    place = place._replace(piece=TensorBox(None, around.replicas))
            walk.add(join(path, key), tensor, place)
            yield join(path, key), key, tensor

    def structure(self) -> dict[str, object]:
        return {name: tuple(parameter.shape) for name, parameter in self.parameters}

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        for path, state in value.get("extra", {}).items():
            yield from references(state, join(path, _EXTRA))

    def differences(self, value: dict[str, Any], saved: Saved, live: Walk) -> list[Row]:
        in_extra = self._extra_leaves(value)
        recorded = {n: saved.leaves[leaf] for n, leaf in saved.names.items() if self._is_mine(n, in_extra)}
        mine = {n: leaf for n, leaf in live.named.items() if self._is_mine(n, live.in_values)}
        rows: list[Row] = []
        for name, leaf in recorded.items():
            wrong = misfit(leaf, mine.get(name))
            if wrong and not self._may_make(leaf, name, value):
                rows += [(name, recorded, here) for _, recorded, here in wrong]
        for name in mine.keys() - recorded.keys() - set(self.transient):
            rows.append((name, MISSING, described(mine[name].tensor, mine[name].box)))
        rows += self._flat_rows(value.get("flat", {}), {row[0] for row in rows})
        recorded_extra, live_extra = set(value.get("extra", {})), {path for path, _ in self.extras}
        for path in sorted(recorded_extra ^ live_extra):
            sides = ("extra state", MISSING) if path in recorded_extra else (MISSING, "extra state")
            rows.append((join(path, _EXTRA), *sides))
        return rows

    def _flat_rows(self, saved: Mapping[str, object], named: Collection[str]) -> Iterator[Row]:
        for name in sorted(saved.keys() | self.flat.keys() - named):
            was, is_ = saved.get(name), self.flat.get(name)
            if was != is_ and name not in named:
                yield name, f"flat, of {was}" if was else "not flat", f"flat, of {is_}" if is_ else "not flat"

    def _is_mine(self, name: str, in_extra: Collection[str]) -> bool:
        return name.startswith(self.name + ".") and name not in in_extra

    def _extra_leaves(self, value: dict[str, Any]) -> set[str]:
        """Return exactly the leaves of extra state. Names do not decide: a parameter may be called
        `_extra_state_too`."""
        return {leaf for place, ref in self.references(value) for leaf in leaf_names(place, ref)}

    def _may_make(self, leaf: Leaf, name: str, value: dict[str, Any]) -> bool:
        """Whether a restore may create a buffer with the saved shape: one that the module declares as None, a
        non-persistent one (a cache that grew), or one whose shape changed in training (an observer's
        ranges)."""
        path, _, key = name.rpartition(".")
        module = self.modules.get(path)
        if module is None or key in module._parameters or key in module._modules:
            return False
        buffer = module._buffers.get(key, module)
        if isinstance(buffer, Tensor) and name in value.get("resized", ()):
            return DTYPE_NAMES.get(buffer.dtype) == leaf.dtype
        return name in value.get("transient", ()) or buffer is None

    def restore(self, value: dict[str, Any], filling: Filling, live: Walk) -> None:
        in_extra = self._extra_leaves(value)
        for name in [name for name in filling.saved.names if self._is_mine(name, in_extra)]:
            leaf = live.named.get(name)
            if leaf is not None and fits(filling.leaf(name), leaf.tensor, leaf.box):
                filling.fill(name, leaf.tensor)
            else:
                self._make(name, name in value.get("transient", ()), filling)
        if "frozen" in value:
            self._freeze(set(value["frozen"]))

    def _freeze(self, frozen: set[str]) -> None:
        """Set requires_grad of each parameter as it was saved."""
        changed = [(n, p) for n, p in self.parameters if p.requires_grad == (n in frozen)]
        for name, parameter in changed:
            parameter.requires_grad_(name not in frozen)
        if changed:
            log.info(
                "requires_grad of %d parameters of %s was set as it was saved (%s, …)",
                len(changed), self.name, changed[0][0],
            )  # fmt: skip

    def _make(self, name: str, transient: bool, filling: Filling) -> None:
        path, _, key = name.rpartition(".")
        module = self.modules[path]
        before = module._buffers.get(key)
        neighbour = before if before is not None else next(self.target.parameters(), None)
        home = torch.device("cpu") if neighbour is None else neighbour.device
        if key in module._buffers:
            transient = key in module._non_persistent_buffers_set
        module._buffers.pop(key, None)
        module.register_buffer(key, filling.place(LeafRef(name), name, None, home), persistent=not transient)

    def finish(self, value: dict[str, Any], filling: Filling, saved: Saved) -> Sequence[tuple[str, Tensor]]:
        before = len(filling.filled)
        for path, module in self.extras:
            if path in value.get("extra", {}):
                state = Settling(filling).settle(value["extra"][path], None, join(path, _EXTRA))
                if not is_metric(module):
                    module.set_extra_state(state)
                    continue
                put_metric_state(module, state)
                if "own" in state:
                    module.set_extra_state(state["own"])
        return filling.filled[before:]


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _extra_state(module: nn.Module) -> Any:
    """Return a module's extra state: that of `get_extra_state`, and the states of a metric."""
    if not is_metric(module):
        return module.get_extra_state()
    state = metric_state(module)
    return {**state, "own": module.get_extra_state()} if _has_extra_state(module) else state


def tie_differences(saved: Saved, live: Walk) -> list[Row]:
    """Return the names, among those on both sides, that are tied on one side and separate on the other."""
    names = saved.names
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


# Modules that save by their own code


def check_own_saving(modules: Mapping[str, nn.Module], leaves: Iterable[LiveLeaf]) -> None:
    """Raise StateError for a module (path -> module) whose `state_dict` holds data that no leaf holds."""
    # Metrics are left out: their own code returns copies of their states.
    own = [(path, module) for path, module in modules.items() if saves_its_own(module)]
    suspects = [(path, module) for path, module in own if not is_metric(module)]
    if not suspects:
        return
    held = LeafMemory(leaves, modules.values())
    for path, module in reversed(suspects):  # inner modules first: their path is the exact one
        if any(_is_gathered(inner) for inner in module.modules()):
            continue
        state = _state_of(module, path)
        if _is_converted(module, state):
            continue
        for key, value in state.items():
            lost = _first_lost(value, str(key), held)
            if lost is not None:
                why = f"is put into the state_dict of a {type(module).__name__} by its own code or a hook"
                refuse(join(path, lost), f"{why}, and is neither parameter, buffer nor extra state", _REMEDY)


def saves_its_own(module: nn.Module) -> bool:
    """Whether a module's own code, or a hook that is not torch's, contributes to its `state_dict`."""
    kind = type(module)
    if kind._save_to_state_dict is not nn.Module._save_to_state_dict:
        return True
    if "state_dict" in vars(module) or not _is_torchs(kind.state_dict):
        return True
    return any(not _is_torchs(hook) for name in _HOOKS for hook in getattr(module, name, {}).values())


def _is_torchs(function: Any) -> bool:
    if type(function).__name__ == "_WrappedHook":
        function = function.hook
    while isinstance(function, functools.partial):
        function = function.func
    home = getattr(function, "__module__", None) or type(function).__module__
    return home == "torch" or home.startswith("torch.")


def _is_gathered(module: nn.Module) -> bool:
    """Whether FSDP1 wraps a module: its state_dict gathers the slices of all ranks into new tensors."""
    return _is_torchs_own(module, "FullyShardedDataParallel")


def _is_torchs_own(module: nn.Module, name: str) -> bool:
    """Whether a module is an instance of torch's class of this name. To import the class takes a second."""
    return any(kind.__name__ == name and _is_torchs(kind) for kind in type(module).__mro__)


def _state_of(module: nn.Module, path: str) -> Mapping[Any, Any]:
    method: Any = module.state_dict
    options = {"keep_vars": True}
    try:
        inspect.signature(method).bind(**options)
    except (TypeError, ValueError):
        options = {}
    try:
        found: Any = method(**options)
    except Exception as error:
        why = f"has a state_dict of its own that fails ({type(error).__name__}: {error})"
        refuse(path, why, "Let it return the state to save.")
    if not isinstance(found, Mapping):
        refuse(path, f"has a state_dict that returns a {type(found).__name__}", "Let it return a dict.")
    return found


def _is_converted(module: nn.Module, state: Mapping[Any, Any]) -> bool:
    """Whether a module of a known class has only its own parameters in its state_dict, split differently. For
    other classes the number of elements proves nothing: an average of weights has the same."""
    kind = type(module)
    if f"{kind.__module__}.{kind.__qualname__}" not in _CONVERTING:
        return False
    own = {name for name, _ in module.named_parameters()}
    replaced = [each for name, each in module.named_parameters() if name not in state]
    return _elements(replaced) == _elements(value for name, value in state.items() if name not in own)


def _elements(tensors: Iterable[Tensor]) -> Counter[torch.dtype]:
    count: Counter[torch.dtype] = Counter()
    for each in tensors:
        count[each.dtype] += each.numel()
    return count


def _first_lost(value: object, name: str, held: LeafMemory) -> str | None:
    """Return the name of the first part of a state_dict's value that no leaf holds."""
    if isinstance(value, Tensor):
        return None if held.holds(value) else name
    if name.split(".")[-1] == _EXTRA:
        return None
    if not isinstance(value, Mapping) and not (isinstance(value, (list, tuple)) and value):
        return name
    for key, item in children(value):
        lost = _first_lost(item, join(name, key), held)
        if lost is not None:
            return lost
    return None


class LeafMemory:
    """The memory ranges of all leaves of a state, and the ids of their tensors."""

    def __init__(self, leaves: Iterable[LiveLeaf], modules: Iterable[nn.Module]) -> None:
        self._ids = {id(t) for module in modules for t in (*module.parameters(), *module.buffers())}
        self._spans: dict[tuple[object, int], list[tuple[int, int]]] = {}
        self._empty: set[tuple[object, object]] = set()
        for leaf in leaves:
            self._ids.add(id(leaf.tensor))
            if leaf.tensor.numel() == 0:
                self._empty.add((leaf.tensor.shape, leaf.tensor.dtype))
            self._spans.setdefault(_storage(leaf.tensor), []).append(span(leaf.tensor))

    def holds(self, tensor: Tensor) -> bool:
        """Whether one leaf's memory contains all elements of a tensor."""
        if id(tensor) in self._ids:
            return True
        if is_wrapper(tensor):
            names = ["_local_tensor"] if is_sharded(tensor) else tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
            parts = [getattr(tensor, name) for name in names]
            return all(isinstance(part, Tensor) and self.holds(part) for part in parts)
        if tensor.numel() == 0:
            return (tensor.shape, tensor.dtype) in self._empty
        start, end = span(tensor)
        return start < end and any(a <= start and end <= b for a, b in self._spans.get(_storage(tensor), ()))


def _storage(tensor: Tensor) -> tuple[object, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


# Metrics of torchmetrics (as of 1.9), whose states are plain attributes, neither parameters nor buffers.
# Attributes that configure a metric are not saved: the program sets them. Never imports torchmetrics.


# Of all metrics; of MetricCollection; of Running and MinMaxMetric.
_ATTRIBUTES = (
    "_update_count", "_computed", "_forward_cache", "_is_synced", "_cache",
    "_groups_checked", "_groups", "_state_is_copy",
    "_num_vals_seen", "min_val", "max_val",
)  # fmt: skip


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a metric or a collection of metrics."""
    package = sys.modules.get("torchmetrics")
    kinds = tuple(getattr(package, n) for n in ("Metric", "MetricCollection") if hasattr(package, n))
    return isinstance(module, kinds)


def metric_state(module: Any) -> dict[str, Any]:
    """Return the state of a metric without its inner metrics. The tensors are the metric's own; those with
    autograd history are detached."""
    states = {name: _detached(getattr(module, name)) for name in getattr(module, "_defaults", ())}
    held = vars(module)
    names = [name for name in _ATTRIBUTES if name in held and name not in states]
    # A cached result may have any type. The metric computes a missing one again.
    attributes = {name: _detached(held[name]) if _is_plain(held[name]) else None for name in names}
    return {"states": states, "attributes": attributes}


def put_metric_state(module: Any, state: dict[str, Any]) -> None:
    """Set the state that `metric_state` returned. Raises ValueError for the state of another metric."""
    here = set(getattr(module, "_defaults", ()))
    if state["states"].keys() != here:
        raise ValueError(
            f"a {type(module).__name__} has the states {sorted(here)}, and the checkpoint has "
            f"{sorted(state['states'])}"
        )
    for name, value in {**state["attributes"], **state["states"]}.items():
        setattr(module, name, value)


def _is_plain(value: Any) -> bool:
    if type(value) in SIMPLE or isinstance(value, Tensor):
        return True
    return type(value) in (dict, *SEQUENCES) and all(_is_plain(item) for _, item in children(value))


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if type(value) is dict:
        return {key: _detached(item) for key, item in value.items()}
    return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value
