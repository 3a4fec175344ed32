"""What optimizers' step hooks tell: which boundaries qualify, which gradients are used up, when a gate
closes. Owns the hooks. Hooks decide only speed: a step that calls none delays a snapshot and is seen by
digests; it never makes one wrong.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from flashckpt.capture.devices import Device

# So many boundaries without any hook, or twice the longest gap seen, and every boundary qualifies.
_PATIENCE = 8


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
    """The gradients that one optimizer used up in its last step: these very objects at these versions."""

    fired: bool = False
    gradients: list[weakref.ref[Tensor]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


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
        self._gap += 1
        if self._stepped:
            self._longest_gap = max(self._longest_gap, self._gap)
            self._gap, self._stepped = 0, False
            return Boundary(qualifies=True, gated=True)
        return Boundary(qualifies=self._gap >= max(_PATIENCE, 2 * self._longest_gap), gated=False)

    def used_up(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Whether an optimizer's step saw this very gradient at this version: nothing was added since."""
        known = self._index().get(id(gradient))
        return known is not None and known[0]() is gradient and known[1] == gradient._version

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
                for ref, version in zip(record.gradients, record.versions, strict=True)
                if (gradient := ref()) is not None
            }
        return self._used_up

    def _install(self, optimizer: Optimizer) -> None:
        self._records[id(optimizer)] = _Record()
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
        self._stepped = record.fired = True
        gradients = [
            g for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None
        ]
        record.gradients = list(map(weakref.ref, gradients))
        record.versions = [g._version for g in gradients]
        self._used_up = None
