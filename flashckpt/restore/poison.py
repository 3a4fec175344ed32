"""The live state while a start writes into it. A start that fails after it has begun to write leaves a
mixture of the program's values and a checkpoint's: calls of its modules and steps of its optimizers then
raise, until a later start has written over all of it. A program that trained on after a failed start would
train on the mixture.

A module that runs without its hooks is not held back: one whose `forward` is called directly."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flashckpt.errors import StateError
from flashckpt.state.tree import Tree

log = logging.getLogger(__name__)


@dataclass
class _Poison:
    """Of one module or optimizer: its hooks, and the live tensors that a failed start may have written
    into."""

    hooks: list[Any]
    given: list[tuple[str, Tensor]]

    def lift(self) -> None:
        for hook in self.hooks:
            hook.remove()


# By the identity of the object: the hash of some modules changes with their state.
_poisoned: dict[int, _Poison] = {}


class Writing:
    """What a start has done to a live state. begun: it may have written into it."""

    def __init__(self, tree: Tree) -> None:
        self._tree, self.begun = tree, False
        self._given: list[tuple[str, Tensor]] = []
        for target in self._targets():
            if (poison := _poisoned.get(id(target))) is not None:
                self._given += poison.given

    def into(self, targets: Mapping[str, Tensor]) -> None:
        """Note that a step is read into these live tensors."""
        self.begun = self.begun or bool(targets)
        self._given += targets.items()

    def check(self, filled: Iterable[tuple[str, Tensor]]) -> None:
        """Raise StateError if a step was read into live tensors that the restored one has not filled. filled:
        the names of its leaves, and the live tensors."""
        there = dict(filled)
        given = [(name, each) for name, each in self._given if name not in there]
        if not given:
            return
        places = {each.data_ptr() for each in there.values()}
        live = {leaf.tensor.data_ptr() for leaf in self._tree.found().leaves} - places
        if left := sorted({name for name, each in given if each.data_ptr() in live}):
            raise StateError(
                f"A newer step was read into {', '.join(left[:5])} before it proved damaged, and the step "
                "that was then loaded has no value for it. Nothing was trained. Start the program again: it "
                "begins with a value of its own. If this returns, choose a step with `flashckpt branch`.",
                location=left[0],
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
                _poisoned[id(target)].given += self._given
                continue
            hooks = []
            try:
                if isinstance(target, Optimizer):
                    hooks.append(target.register_step_pre_hook(refuse))
                else:
                    hooks += [each.register_forward_pre_hook(refuse) for each in target.modules()]
            except Exception as refused:  # as a ScriptModule does
                log.error("%s takes no hook that keeps it from training (%s): %s",
                          type(target).__name__, refused, message)  # fmt: skip
            _poisoned[id(target)] = _Poison(hooks, list(self._given))
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
        for each in poisoned:
            _poisoned.pop(each).lift()

    def _targets(self) -> list[Any]:
        targets = (getattr(entry, "target", None) for entry in self._tree.entries.values())
        return [each for each in targets if isinstance(each, (nn.Module, Optimizer))]
