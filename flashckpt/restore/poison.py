"""The live state while a start writes into it. A start that fails after it has begun to write leaves a
mixture of the program's values and a checkpoint's: calls of its modules and steps of its optimizers then
raise, until a later start has written over all of it. A program that trained on after a failed start would
train on the mixture.

A module that runs without its hooks is not held back: one whose `forward` is called directly."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flashckpt.errors import StateError
from flashckpt.restore.snapshot import Snapshot
from flashckpt.state.tree import PARTIAL, Tree

log = logging.getLogger(__name__)


# The hooks of modules and optimizers that are held back, by the identity of the object: the hash of some
# modules changes with their state.
_poisoned: dict[int, list[Any]] = {}


class Writing:
    """What a start has done to a live state. begun: it may have written into it."""

    def __init__(self, tree: Tree) -> None:
        self._tree, self.begun = tree, False
        self._was_poisoned = any(id(target) in _poisoned for target in self._targets())
        self._read: list[Snapshot] = []

    def into(self, snapshot: Snapshot, targets: Mapping[str, Tensor]) -> None:
        """Note that a step is read into these live tensors."""
        if targets:
            self.begun = True
            self._read.append(snapshot)

    def check(self, snapshot: Snapshot) -> None:
        """Raise StateError, before a step is restored, if another step was read into the live state before,
        by this start or one that failed, and this one may leave a part of it as it is: an imported step what
        it lacks, any step a buffer that is not persistent."""
        is_mixed = self._was_poisoned or any(each is not snapshot for each in self._read)
        is_partial = PARTIAL in snapshot.section("state")
        lacks = self._was_poisoned and not self._tree.transient.issubset(snapshot.leaves)
        if (is_mixed and is_partial) or lacks:
            raise StateError(
                "A newer step was read into the live state before it or its start failed, and the step that "
                "is left may have no value for all of it. Nothing was trained. Start the program again: "
                "it begins with a state of its own. If this returns, choose a step with `flashckpt branch`."
            )

    def failed(self, error: BaseException) -> None:
        """Poison the state if the start has begun to write into it."""
        if not self.begun:
            return
        message = (
            "flashckpt.attach failed after it had begun to write a checkpoint into this state "
            f"({type(error).__name__}: {error}). The state may be partly the program's and partly the "
            "checkpoint's: nothing may be computed with it. Start the program again, or attach again."
        )

        def refuse(*_: Any) -> NoReturn:
            raise StateError(message)

        for target in self._targets():
            if id(target) in _poisoned:
                continue
            hooks = list[Any]()
            try:
                if isinstance(target, Optimizer):
                    hooks.append(target.register_step_pre_hook(refuse))
                else:
                    hooks += [each.register_forward_pre_hook(refuse) for each in target.modules()]
            except Exception as refused:  # as a ScriptModule does
                log.error("%s takes no hook that keeps it from training (%s): %s",
                          type(target).__name__, refused, message)  # fmt: skip
            _poisoned[id(target)] = hooks
            weakref.finalize(target, _poisoned.pop, id(target), None)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # what is compiled does not look at hooks

    def succeeded(self) -> None:
        """Lift the poison of an earlier start. Raises StateError if this one has restored nothing."""
        poisoned = [id(target) for target in self._targets() if id(target) in _poisoned]
        if poisoned and not self.begun:
            raise StateError(
                "This state may be partly a checkpoint's, of a start that failed, and this call has loaded "
                "none over it. Nothing was trained. Start the program again: it then builds the state anew."
            )
        for hook in (hook for each in poisoned for hook in _poisoned.pop(each)):
            hook.remove()

    def _targets(self) -> list[Any]:
        targets = (getattr(entry, "target", None) for entry in self._tree.entries.values())
        return [each for each in targets if isinstance(each, (nn.Module, Optimizer))]
