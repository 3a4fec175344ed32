"""The live state while a start writes into it. A start that fails after it has begun to write leaves a
mixture of the program's values and a checkpoint's: calls of its modules and steps of its optimizers then
raise, until a later start has succeeded. A program that trained on after a failed start would train on the
mixture."""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from flashckpt.errors import StateError
from flashckpt.state.tree import Tree

_hooks: WeakKeyDictionary[Any, RemovableHandle] = WeakKeyDictionary()
"""The hook of each module and optimizer of a mixture."""


class Writing:
    """What one start has done to a live state. begun: it may have written into it."""

    def __init__(self, tree: Tree) -> None:
        self._tree, self.begun = tree, False

    def failed(self, error: BaseException) -> None:
        """Poison the state if the start has begun to write into it."""
        if not self.begun:
            return
        message = (
            "This state is partly the program's and partly a checkpoint's: flashckpt.attach failed after it "
            f"had begun to load one ({type(error).__name__}: {error}). Nothing may be computed with it. The "
            "checkpoint is intact. Start the program again, or attach again."
        )

        def refuse(*_: Any) -> NoReturn:
            raise StateError(message)

        for target in self._targets():
            if target not in _hooks:
                is_module = isinstance(target, nn.Module)
                hook = target.register_forward_pre_hook if is_module else target.register_step_pre_hook
                _hooks[target] = hook(refuse)

    def succeeded(self) -> None:
        """Lift the poison of an earlier start, if this one has restored a whole state. Raises StateError if
        it found nothing to restore."""
        poisoned = [target for target in self._targets() if target in _hooks]
        if poisoned and not self.begun:
            raise StateError(
                "This state is partly a checkpoint's, of a start that failed, and here is no checkpoint to "
                "load over it. Nothing was trained. Start the program again: it then builds the state anew."
            )
        for target in poisoned:
            _hooks.pop(target).remove()

    def _targets(self) -> list[Any]:
        targets = (getattr(entry, "target", None) for entry in self._tree.entries.values())
        return [each for each in targets if isinstance(each, (nn.Module, Optimizer))]
