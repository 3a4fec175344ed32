"""Objects of the program that have a state and that no name covers: a GradScaler, an EMA model, an optimizer.

Owns what counts as a part of a named object, the warning of `attach`, and the check of optimizers that step
named parameters. Never calls a `state_dict` of the program, and never keeps its objects alive.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset, Sampler

from flashckpt.capture.hooks import StepHook
from flashckpt.capture.plan import local
from flashckpt.checkpointer.attach import attach, loop
from flashckpt.errors import StateError
from flashckpt.state.modules import is_metric
from flashckpt.state.optimizers import unwrapped

if TYPE_CHECKING:
    from flashckpt.state.tree import Tree

log = logging.getLogger(__name__)

# Of a trainer with its own loop, the objects are the trainer's.
OWN_LOOPS = ("", "accelerate")
_LEVELS = 4
_MOST_ITEMS = 1000
_MOST_SHOWN = 5
_MOST_SAMPLED = 32
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, ModuleType)


def variables_of(frame: FrameType | None) -> dict[str, object]:
    """Return the variables, by name, that code of the program sees: of the nearest frame outside of this
    package, with the attributes of its `self`."""
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "flashckpt":
        frame = frame.f_back
    if frame is None:
        return {}
    here = frame.f_locals
    found = dict(here)
    is_copy = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and sys.getrefcount(here) <= 3:  # of the frame, `here` and this call: the program has none
        here.clear()  # else the frame would keep the objects alive after a `del`
    owner = found.get("self")
    attributes = getattr(owner, "__dict__", {})
    found = {**found, **{f"self.{name}": value for name, value in attributes.items()}}
    found = {**found, **{name: value for name, value in frame.f_globals.items() if name not in found}}
    # An owner with a state of its own is left out: its parts are named.
    return {name: each for name, each in found.items() if str(name)[:1] != "_" and each is not owner}


class Parts:
    """The objects and tensors that named objects hold. Of a module, its modules and tensors; of any other
    object, what its attributes hold. torch's schedulers do not save their optimizers."""

    def __init__(self, roots: Iterable[object]) -> None:
        self._objects: dict[int, object] = {}  # they are held, so that no id is reused
        self._memory: set[int] = set()
        for root in roots:
            self.add(root)

    def add(self, root: object) -> None:
        below: deque[tuple[object, int]] = deque([(root, 0)])
        while below:
            each, level = below.popleft()
            if isinstance(each, _PLAIN) or id(each) in self._objects:
                continue
            self._objects[id(each)] = each
            if isinstance(each, Tensor):
                self._memory |= _memory_of(each)
            elif isinstance(each, nn.Module):
                self._objects |= {id(module): module for module in each.modules()}
                for tensor in _tensors_of(each):
                    self._memory |= _memory_of(tensor)
            elif level < _LEVELS:
                below.extend((part, level + 1) for part in _held_by(each))

    def __contains__(self, value: object) -> bool:
        inside = getattr(value, "__dict__", {}).get("scheduler")  # Accelerate's wrapper
        if any(id(each) in self._objects for each in (value, unwrapped(value), inside) if each is not None):
            return True
        tensors = list(_tensors_of(value)) if isinstance(value, nn.Module) else []
        return bool(tensors) and all(_memory_of(each) <= self._memory for each in tensors)


def _held_by(value: object) -> Iterator[object]:
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value if len(value) <= _MOST_ITEMS else ()
    elif isinstance(value, Mapping):
        yield from list(value.values()) if len(value) <= _MOST_ITEMS else ()
    else:
        skipped = ["optimizer"] if type(value).__module__ == LRScheduler.__module__ else []
        skipped += ["state", "param_groups"] if isinstance(value, Optimizer) else []
        attributes = getattr(value, "__dict__", None)
        for name, each in list(attributes.items()) if isinstance(attributes, dict) else ():
            if name not in skipped:
                yield each


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _memory_of(tensor: Tensor) -> set[int]:
    """Return the address of a tensor's memory; that of the object for a tensor without any."""
    try:
        return {local(tensor).untyped_storage().data_ptr() or id(tensor)}
    except Exception:  # of a tensor without memory; some raise errors of their own
        return {id(tensor)}


# ---- which objects have a state that training changes


def _has_methods(value: object) -> bool:
    # By the class: a proxy's __getattr__ may run code of the program.
    kinds = [] if isinstance(value, (type, ModuleType)) else type(value).__mro__
    return all(any(name in vars(kind) for kind in kinds) for name in ("state_dict", "load_state_dict"))


def _is_data(value: object) -> bool:
    """Whether this is a loader, data set or sampler: the loop records its position. An iterable that the
    program fills, as a replay buffer, is not."""
    kind = type(value)
    is_iterable = hasattr(kind, "__iter__") or hasattr(kind, "__next__")
    is_filled = any(hasattr(kind, name) for name in ("add", "append", "extend", "push"))
    return isinstance(value, (Dataset, Sampler)) or (is_iterable and not is_filled)


def _trains(value: Any) -> bool:
    """Whether training changes an object, as far as can be seen before the first step."""
    if isinstance(value, nn.Module):
        return is_metric(value) or (value.training and any(p.requires_grad for p in value.parameters()))
    if callable(getattr(type(value), "is_enabled", None)):  # a GradScaler
        return bool(value.is_enabled())
    return bool(getattr(value, "__dict__", True)) and not _is_data(value)


class _Found(NamedTuple):
    name: str
    value: object


def _unnamed(variables: Mapping[str, object], parts: Parts) -> Iterator[_Found]:
    """Yield the variables that hold a state and are no part of named objects, each object once."""
    for name, value in variables.items():
        if _has_methods(value) and value not in parts:
            parts.add(value)
            yield _Found(name, value)


def _sample(module: nn.Module) -> str:
    """Return some elements of a module's tensors as text; "" if they cannot be read now. Waits for their
    device."""
    try:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            return ""
        tensors = [local(each.detach()) for each in _tensors_of(module)]
        chosen = [each for each in tensors[:: len(tensors) // _MOST_SAMPLED + 1] if each.numel()]
        return repr([each[(end,) * each.dim()].tolist() for each in chosen for end in (0, -1)])
    except Exception:  # of a tensor without memory; some raise errors of their own
        return ""


class Unnamed:
    """Reports what a run trains and does not save.

    variables: the program's, by name.
    integration: the trainer whose loop it is, "" for a loop of the program. A trainer builds its optimizers
        by itself, so they are reported and never refused.
    reports: whether this rank logs.
    """

    def __init__(
        self, tree: Tree, variables: Mapping[str, object], *, integration: str = "", reports: bool = True
    ) -> None:
        self._tree, self._reports = tree, reports
        self._refuses, self._takes_keywords = integration in OWN_LOOPS, not integration
        self._watched: list[tuple[str, weakref.ref[nn.Module], str]] = []
        self._boundaries, self._is_first = 0, True
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._new: list[weakref.ref[Optimizer]] = []
        try:
            self._scan(variables)
        except Exception:  # a variable that has nothing to do with the run must not end it
            log.debug("the variables of the program could not be checked", exc_info=True)
        self._handle = register_optimizer_step_post_hook(StepHook(self._after_step))

    def close(self) -> None:
        self._handle.remove()

    def boundary(self, step: int) -> None:
        """Check what was trained since the last boundary. step: the number of completed steps.

        Raises StateError at the first boundary after any optimizer's step, if an optimizer that is not part
        of the state steps its parameters. An optimizer that begins later is reported, and costs no run."""
        self._boundaries += 1
        if self._watched and not self._boundaries & (self._boundaries - 1):  # 1, 2, 4, 8, …
            self._check_watched()
        if not self._new:
            return
        (refs, self._new), (is_first, self._is_first) = (self._new, []), (self._is_first, False)
        strays = self._strays(refs)
        for kind, name, is_scheduled in strays if is_first and self._refuses else ():
            if not is_scheduled:
                self._new, self._is_first = refs, True
                raise StateError(
                    f"{name} is stepped by {_a(kind)} that is not part of the state: after a resume it would "
                    f"begin without its momenta and counts. Step {step} was not captured; earlier steps of "
                    f"the run stand, without it. Name it: add the keyword optimizer=<the {kind}> (with any "
                    "name) to attach or loop, in a new folder if this run has steps without it. If each "
                    "iteration builds its own optimizer, delete it before the iteration ends.",
                    location=name, step=step,
                )  # fmt: skip
        if strays and self._reports:
            kind, name, _ = strays[0]
            log.warning(
                "%s is stepped by %s that is not part of the state: it is not saved, and after a resume it "
                "begins without its momenta and counts. Build every optimizer before attach or loop, and "
                "name it: optimizer=<the %s> (with any name)", name, _a(kind), kind,
            )  # fmt: skip

    # ---- objects in variables

    def _scan(self, variables: Mapping[str, object]) -> None:
        trained: list[_Found] = []
        for name, value in _unnamed(variables, self._parts()) if variables else ():
            if _trains(value):
                trained.append(_Found(name, value))
            elif isinstance(value, nn.Module) and (sample := _sample(value)):
                # Frozen or in eval mode: an average of weights, or a module that nothing changes.
                self._watched.append((name, weakref.ref(value), sample))
        self._warn(trained, "not saved, because no name covers it")

    def _check_watched(self) -> None:
        alive = [(_Found(name, ref()), before) for name, ref, before in self._watched]
        changed = [
            each
            for each, before in alive
            if isinstance(each.value, nn.Module) and _sample(each.value) not in ("", before)
        ]
        if changed:
            self._watched = []
            self._warn(changed, "changed in training and not saved, because no name covers it")

    def _warn(self, found: Sequence[_Found], what: str) -> None:
        if not found or not self._reports:
            return
        shown, more = found[:_MOST_SHOWN], ", …" if len(found) > _MOST_SHOWN else ""
        pairs = [(each.name.rpartition(".")[2], each.name) for each in shown]
        taken = {*inspect.signature(attach).parameters, *inspect.signature(loop).parameters}
        pairs = [(f"my_{key}" if key in taken else key, name) for key, name in pairs]
        keywords = ", ".join(f"{key}={name}" for key, name in pairs) + more
        state = ", ".join(f'"{key}": {name}' for key, name in pairs) + more
        is_module = any(isinstance(each.value, nn.Module) for each in found)
        log.warning(
            "%s: %s%s. After a resume each begins as the script builds it. Name what training changes: "
            "attach(…, %s)%s",
            what, ", ".join(f"{each.name} ({type(each.value).__name__})" for each in shown), more,
            keywords if self._takes_keywords else f"state={{{state}}}",
            "; call requires_grad_(False) on a module that it does not change" if is_module else "",
        )  # fmt: skip

    # ---- optimizers that step

    def _parts(self) -> Parts:
        return Parts(entry.target for entry in self._tree.entries.values())

    def _after_step(self, optimizer: Optimizer) -> None:
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            self._new.append(weakref.ref(optimizer))

    def _strays(self, refs: Sequence[weakref.ref[Optimizer]]) -> list[tuple[str, str, bool]]:
        """Return (class, a parameter that it steps, whether a named scheduler drives it) of each optimizer
        that is alive and whose state would be lost."""
        names = {id(parameter): name for name, parameter in self._tree.parameters()}
        known = {id(each) for each in self._tree.optimizers}
        refs = [ref for ref in refs if id(ref()) not in known]
        parts = self._parts() if refs else Parts(())
        refs = [ref for ref in refs if ref() not in parts and _loses(ref(), names, frozenset())]
        if not refs:
            return []
        gc.collect()  # one that only a garbage cycle holds is unused
        with contextlib.suppress(StateError):
            saved = frozenset().union(*map(_memory_of, self._tree.tensors_now()))
            refs = [ref for ref in refs if _loses(ref(), names, saved)]
        targets = [entry.target for entry in self._tree.entries.values()]
        driven = [unwrapped(each.optimizer) for each in targets if isinstance(each, LRScheduler)]
        return [
            (type(each).__name__, _loses(each, names, frozenset()), any(each is one for one in driven))
            for each in (ref() for ref in refs)
            if each is not None
        ]


def _loses(optimizer: Any, names: Mapping[int, str], saved: frozenset[int]) -> str:
    """Return the name of a parameter of the state that this optimizer steps, if a resume would lose its state
    or the rate that a scheduler has set; else "". saved: the addresses of the tensors that are saved."""
    if optimizer is None:
        return ""
    mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
    states = [optimizer.state[p] for p in mine if optimizer.state.get(p)]
    tensors = [each for state in states for each in state.values() if isinstance(each, Tensor)]
    is_saved = bool(tensors) and all(_memory_of(each) <= saved for each in tensors)
    is_lost = bool(states) or hasattr(optimizer.step, "_wrapped_by_lr_sched")
    return names[id(mine[0])] if mine and is_lost and not is_saved else ""


def _a(kind: str) -> str:
    return f"{'an' if kind[:1] in 'AEIOU' else 'a'} {kind}"
