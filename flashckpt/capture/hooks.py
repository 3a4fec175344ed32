"""What optimizers' step hooks report: which boundaries qualify, which gradients are used up, when a gate
closes. Owns the hooks, and the answer to whether a loop reads an optimizer's gradients again in its next
iteration. Hooks decide only speed: a step that calls none delays a snapshot and is seen by digests; it never
makes one wrong.
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

# So many boundaries without any hook, or twice the longest gap seen, and every boundary qualifies.
_PATIENCE = 8
# So many times a loop replaces the gradients that were used up before their bytes are left out. A loop that
# calls zero_grad in every n-th iteration never replaces them in two iterations in a row.
_REPLACEMENTS = 2
# While that is open, up to so many bytes of gradients are saved; of more, the boundary waits for the answer,
# because slots that hold them stay that large until the run ends.
_MOST_UNDECIDED_BYTES = 64 << 20


class Habit(str, Enum):
    """What a loop does with the gradients that one optimizer has used up: `kept`, the next iteration finds
    the same tensors; `dropped`, it finds new ones or none (`zero_grad(set_to_none=True)`)."""

    UNDECIDED = "undecided"
    KEPT = "kept"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Boundary:
    """What the hooks say of a boundary: may it be captured, and would a gate be closed before a write."""

    qualifies: bool
    gated: bool


def unwrapped(optimizer: object) -> object:
    """The torch optimizer inside wrappers that hold one as `.optimizer` (accelerate's does)."""
    seen: set[int] = set()
    while not isinstance(optimizer, Optimizer) and id(optimizer) not in seen:
        seen.add(id(optimizer))
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            break
        optimizer = inner
    return optimizer


@dataclass(slots=True)
class _Record:
    """The gradients that one optimizer used up in its last step: these very objects at these versions.
    `held`: those that were there at the last boundary and are to be compared with the next ones. Weak
    references: an identity that is compared is that of a live tensor, never a number that was used again."""

    optimizer: weakref.ref[Optimizer]
    fired: bool = False
    stepped: bool = False  # since the last boundary
    gradients: list[weakref.ref[Tensor]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    held: list[weakref.ref[Tensor]] = field(default_factory=list)
    habit: Habit = Habit.UNDECIDED
    replaced: int = 0


class StepHook:
    """A hook that holds its owner weakly. Optimizers leave their hooks out of what is copied and pickled. A
    copy of one that does not has a callable of the standard library in this one's place: it does nothing."""

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
    """Hooks on the attached optimizers, as torch has them (`unwrapped`).

    before_step is called, in front of all other pre-hooks, before an optimizer writes. The hooks hold this
    object weakly, so that an optimizer that lives on keeps no checkpointer alive. While a graph is being
    captured on one of the devices they only count `steps`, those of all optimizers.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        before_step: Callable[[], None] = lambda: None,
        devices: Sequence[Device] = (),
    ) -> None:
        self._devices, self._before_step = devices, before_step
        self._records: dict[int, _Record] = {}
        self._used_up: dict[int, tuple[weakref.ref[Tensor], int]] | None = None
        self._handles: list[Any] = []
        self._stepped = False
        self.steps = self._gap = self._longest_gap = 0
        for optimizer in {id(each): each for each in optimizers}.values():
            self._install(optimizer)

    @property
    def fired(self) -> frozenset[int]:
        """Identities of the optimizers whose hooks were seen."""
        return frozenset(key for key, record in self._records.items() if record.fired)

    def boundary(self) -> Boundary:
        """Ask once at each boundary. A device with no optimizer at all has nothing to wait for."""
        if not self._records:
            return Boundary(qualifies=True, gated=False)
        for record in self._records.values():
            self._hold(record)
        self._gap += 1
        if self._stepped:
            self._longest_gap = max(self._longest_gap, self._gap)
            self._gap, self._stepped = 0, False
            return Boundary(qualifies=not self.is_undecided, gated=True)
        return Boundary(qualifies=self._gap >= max(_PATIENCE, 2 * self._longest_gap), gated=False)

    @property
    def is_undecided(self) -> bool:
        """Whether many bytes of gradients are used up now, and no iteration has shown yet whether the next
        one reads them."""
        records = [record for record in self._records.values() if record.habit is Habit.UNDECIDED]
        there = (g for record in records for ref in record.gradients if (g := ref()) is not None)
        return _num_bytes(there) > _MOST_UNDECIDED_BYTES

    @property
    def habits(self) -> dict[int, str]:
        """What is known of each optimizer's gradients, by its identity."""
        return {key: record.habit.value for key, record in self._records.items()}

    def resume(self, habits: Mapping[int, Habit]) -> None:
        """Take over what an earlier attempt of the run knew: the loop may be anywhere in its cycle."""
        for key, habit in habits.items():
            self._records[key].habit = habit

    def used_up(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Whether this gradient is not needed any more: an optimizer's step saw this very object at this
        version, so that nothing was added since, and the loop drops what was used up."""
        known = self._index().get(id(gradient))
        return known is not None and known[0]() is gradient and known[1] == _version(gradient)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _index(self) -> dict[int, tuple[weakref.ref[Tensor], int]]:
        # Built only for a boundary that is captured: a step pays for two lists and no dictionary.
        if self._used_up is None:
            self._used_up = {
                id(gradient): (ref, version)
                for record in self._records.values()
                if record.habit is Habit.DROPPED
                for ref, version in zip(record.gradients, record.versions, strict=True)
                if (gradient := ref()) is not None
            }
        return self._used_up

    def _install(self, optimizer: Optimizer) -> None:
        self._records[id(optimizer)] = _Record(weakref.ref(optimizer))
        handle = optimizer.register_step_pre_hook(StepHook(self._before))
        # A user's own pre-hook may write parameters: the gate must be closed before it.
        optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        self._handles += [handle, optimizer.register_step_post_hook(StepHook(self._after))]

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

    def _hold(self, record: _Record) -> None:
        """At a boundary: what the next iteration's gradients are to be compared with."""
        stepped, record.stepped = record.stepped, False
        if record.habit is Habit.KEPT:
            return
        if stepped:
            record.held = record.gradients
            if record.habit is Habit.UNDECIDED:
                # Gradients that are gone already say nothing about those that stay until the next iteration.
                record.held = [ref for ref in record.gradients if ref() is not None]
        elif self._stepped and record.held and (optimizer := record.optimizer()) is not None:
            # Only another optimizer stepped: what is still here was there to be read.
            self._compare(record, _gradients_of(optimizer))

    def _compare(self, record: _Record, gradients: Sequence[Tensor]) -> None:
        """Compare the gradients that are there now with those that were held at the last boundary."""
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
    # FSDP2 adds to the local part: the DTensor around it keeps its version.
    return gradient._version if type(gradient) is Tensor else local(gradient)._version


def _num_bytes(gradients: Iterable[Tensor]) -> int:
    parts = (local(gradient) for gradient in gradients)
    # A sparse one has no memory of its own until its parts are asked for, and they are few.
    return sum(each.numel() * each.element_size() for each in parts if each.layout is torch.strided)


def _report_kept(optimizer: Optimizer | None, gradients: Sequence[Tensor], *, were_left_out: bool) -> None:
    remedy = "call zero_grad(set_to_none=True) at its head or at the end of the iteration before"
    if any(local(gradient)._is_view() for gradient in gradients):
        remedy += ", and build DDP with gradient_as_bucket_view=False, which keeps the same tensors"
    log.warning(
        "%d bytes of gradients of %s are saved with every snapshot, since the iteration after the one that "
        "used them finds the same tensors and may read them. If it does not, %s: then they are left out.%s",
        _num_bytes(gradients), type(optimizer).__name__, remedy,
        " The snapshots of this run before this step do not hold them: a resume from one of those is exact "
        "only if they were not read." if were_left_out else "",
    )  # fmt: skip
