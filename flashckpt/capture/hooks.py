"""Step hooks of optimizers: they determine which boundaries qualify, which gradients are used up, and when a
gate closes.

Owns the hooks, and the decision whether a loop reads an optimizer's gradients again in its next iteration.
Hooks never affect correctness: a step that calls no hook delays a snapshot, and digests detect its writes.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from flashckpt.capture.devices import Device
from flashckpt.capture.plan import local

log = logging.getLogger(__name__)

# After this many boundaries without a step, or twice the longest gap, each boundary qualifies.
_LEAST_GAP = 8
# The loop must replace used-up gradients this many times before they are left out of snapshots. A loop that
# calls zero_grad in every n-th iteration never replaces them in two iterations in a row.
_REPLACEMENTS = 2
# While this is undecided, up to this many bytes of gradients are saved. With more, no boundary qualifies,
# because slots that hold them would stay that large until the run ends.
_MOST_UNDECIDED_BYTES = 64 << 20


class Habit(str, Enum):
    """The loop's treatment of the gradients that an optimizer has used. `kept`: the next iteration finds the
    same tensors. `dropped`: it finds new ones or None (`zero_grad(set_to_none=True)`)."""

    UNDECIDED = "undecided"
    KEPT = "kept"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Boundary:
    """The result of the hooks for a boundary. qualifies: it may be captured. gated: a hook will close the
    gate before the next write."""

    qualifies: bool
    gated: bool


@dataclass(slots=True)
class _OptimizerSteps:
    """The gradients that an optimizer used in its last step, as objects with their versions. held: the
    gradients at the last boundary, to be compared with the next ones. The references are weak, so that only
    identities of live tensors are compared: the id of a dead tensor may be reused."""

    optimizer: weakref.ref[Optimizer]
    fired: bool = False
    stepped: bool = False  # since the last boundary
    gradients: list[weakref.ref[Tensor]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    held: list[weakref.ref[Tensor]] = field(default_factory=list)
    habit: Habit = Habit.UNDECIDED
    replaced: int = 0


class StepHook:
    """A hook that holds its owner weakly. Optimizers do not copy or pickle their hooks. An optimizer that
    does gets a callable of the standard library without effect instead."""

    def __init__(self, method: Callable[[Optimizer], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        method = self._method()
        if method is not None:
            method(optimizer)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class StepHooks:
    """Hooks on the attached optimizers.

    before_step: called before an optimizer writes, and before all other pre-hooks.
    steps: the number of steps of all optimizers.

    The hooks hold this object weakly, so that an optimizer does not keep a checkpointer alive. While a graph
    is being captured on a device, they only count steps.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        before_step: Callable[[], None] = lambda: None,
        devices: Sequence[Device] = (),
    ) -> None:
        self._devices, self._before_step = devices, before_step
        self._records: dict[int, _OptimizerSteps] = {}
        self._used_up: dict[int, tuple[weakref.ref[Tensor], int]] | None = None
        self._handles: list[Any] = []
        self._stepped = False
        self.steps = self._gap = self._longest_gap = 0
        for optimizer in {id(each): each for each in optimizers}.values():
            self._records[id(optimizer)] = _OptimizerSteps(weakref.ref(optimizer))
            handle = optimizer.register_step_pre_hook(StepHook(self._before))
            # A user's own pre-hook may write parameters, so the gate must close before it.
            optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
            self._handles += [handle, optimizer.register_step_post_hook(StepHook(self._after))]

    @property
    def fired(self) -> frozenset[int]:
        """The ids of the optimizers whose hooks have fired."""
        return frozenset(key for key, record in self._records.items() if record.fired)

    def boundary(self) -> Boundary:
        """Return the result for a boundary; to be called once at each. Without optimizers, all qualify."""
        if not self._records:
            return Boundary(qualifies=True, gated=False)
        for record in self._records.values():
            self._hold(record)
        self._gap += 1
        if self._stepped:
            self._longest_gap = max(self._longest_gap, self._gap)
            self._gap, self._stepped = 0, False
            return Boundary(qualifies=not self.is_undecided, gated=True)
        return Boundary(qualifies=self._gap >= max(_LEAST_GAP, 2 * self._longest_gap), gated=False)

    @property
    def is_undecided(self) -> bool:
        """Whether many bytes of gradients are used up, and it is unknown whether the next iteration reads
        them."""
        records = [record for record in self._records.values() if record.habit is Habit.UNDECIDED]
        there = (g for record in records for ref in record.gradients if (g := ref()) is not None)
        return _num_bytes(there) > _MOST_UNDECIDED_BYTES

    @property
    def habits(self) -> dict[int, str]:
        """The id of each optimizer -> the habit of its gradients."""
        return {key: record.habit.value for key, record in self._records.items()}

    def resume(self, habits: Mapping[int, Habit]) -> None:
        """Use the habits of an earlier attempt of the run: the loop may be anywhere in its cycle."""
        for key, habit in habits.items():
            self._records[key].habit = habit

    def used_up(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Whether a gradient is no longer needed: an optimizer's step used this object at this version, so
        that nothing was added since, and the loop drops used gradients."""
        known = self._index().get(id(gradient))
        return known is not None and known[0]() is gradient and known[1] == _version(gradient)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _index(self) -> dict[int, tuple[weakref.ref[Tensor], int]]:
        # Built only for a captured boundary, so that a step builds no dictionary.
        if self._used_up is None:
            self._used_up = {
                id(gradient): (ref, version)
                for record in self._records.values()
                if record.habit is Habit.DROPPED
                for ref, version in zip(record.gradients, record.versions, strict=True)
                if (gradient := ref()) is not None
            }
        return self._used_up

    def _capturing(self) -> bool:
        return any(device.capturing() for device in self._devices)

    def _before(self, optimizer: Optimizer) -> None:
        if not self._capturing():
            self._before_step()

    def _after(self, optimizer: Optimizer) -> None:
        self.steps += 1
        record = self._records.get(id(optimizer))
        if record is None or self._capturing():
            return
        self._stepped = record.stepped = record.fired = True
        gradients = _gradients_of(optimizer)
        self._compare(record, gradients)
        record.gradients = list(map(weakref.ref, gradients))
        record.versions = list(map(_version, gradients))
        self._used_up = None

    def _hold(self, record: _OptimizerSteps) -> None:
        """Select, at a boundary, the gradients with which the next iteration's are compared."""
        stepped, record.stepped = record.stepped, False
        if record.habit is Habit.KEPT:
            return
        if stepped:
            record.held = record.gradients
            if record.habit is Habit.UNDECIDED:
                # Gradients that were already freed do not show what happens to the remaining ones.
                record.held = [ref for ref in record.gradients if ref() is not None]
        elif self._stepped and record.held and (optimizer := record.optimizer()) is not None:
            # Only another optimizer stepped: the iteration could read these gradients.
            self._compare(record, _gradients_of(optimizer))

    def _compare(self, record: _OptimizerSteps, gradients: Sequence[Tensor]) -> None:
        """Compare the current gradients with those held at the last boundary, and decide the habit."""
        held, record.held = record.held, []
        if not held or not gradients:
            return
        alive = {id(gradient) for ref in held if (gradient := ref()) is not None}
        if not any(id(gradient) in alive for gradient in gradients):
            record.replaced += 1
            if record.replaced == _REPLACEMENTS and record.habit is Habit.UNDECIDED:
                record.habit, self._used_up = Habit.DROPPED, None
            return
        were_left_out = record.habit is Habit.DROPPED
        record.habit, self._used_up = Habit.KEPT, None
        _report_kept(record.optimizer(), gradients, were_left_out=were_left_out)


def _gradients_of(optimizer: Optimizer) -> list[Tensor]:
    return [g for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None]


def _version(gradient: Tensor) -> int:
    # FSDP2 adds to the local tensor, which does not change the version of its DTensor.
    return gradient._version if type(gradient) is Tensor else local(gradient)._version


def _num_bytes(gradients: Iterable[Tensor]) -> int:
    parts = (local(gradient) for gradient in gradients)
    # A sparse gradient has no memory of its own before its parts are read, and is small.
    return sum(each.numel() * each.element_size() for each in parts if each.layout is torch.strided)


def _report_kept(optimizer: Optimizer | None, gradients: Sequence[Tensor], *, were_left_out: bool) -> None:
    remedy = "call zero_grad(set_to_none=True) at its head or at the end of the iteration before"
    if any(local(gradient)._is_view() for gradient in gradients):
        remedy += ", and build DDP with gradient_as_bucket_view=False, which keeps the same tensors"
    log.warning(
        "%d bytes of gradients of %s are saved with each snapshot, because the next iteration finds the same "
        "tensors and may read them. If it does not read them, %s: then they are left out.%s",
        _num_bytes(gradients), type(optimizer).__name__, remedy,
        " Earlier snapshots of this run do not contain them: a resume from one of these is exact only if the "
        "gradients were not read." if were_left_out else "",
    )  # fmt: skip
