"""Whether the state was used since the last boundary: what tells a training loop from a read-ahead.

Whoever draws a batch before the last one was trained on makes every boundary a lie: the state would be
said to be a step further than it is. Hooks on the attached modules and optimizers see use at no cost;
where none fired, digests decide, because a loop may be compiled or call no module at all. A read-ahead
shows itself on the second batch it draws, so only the first few batches are looked at this closely.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flashckpt.capture.hooks import StepHook
from flashckpt.errors import BoundaryError
from flashckpt.state.tree import Tree

# Of a leaf: its dtype, its shape and the digest of its bytes, which say nothing of the first two.
Content = tuple[str, tuple[int, ...], int]

_BATCHES_CHECKED = 8  # more than any sensible read-ahead draws before it trains


class Use:
    """Watches the attached state from the first batch on.

    `digests` reads the whole state: by leaf, equal as long as nothing has changed. It is called at the
    first batch, and at the next few where no hook fired. `used`: the state is at no boundary yet.
    """

    def __init__(
        self, tree: Tree, digests: Callable[[], dict[str, Content]], *, check: bool, used: bool
    ) -> None:
        self.digests = digests
        self._left = _BATCHES_CHECKED if check else 0
        self._before: dict[str, Content] | None = None
        self._since_batch = False
        self._since_boundary = used
        self._trained = False
        self._tree = tree
        self._forward_hooks: list[_ForwardHook] = []
        self._step_hooks = [o.register_step_post_hook(StepHook(self._stepped)) for o in tree.optimizers]

    def _stepped(self, optimizer: Optimizer | None = None) -> None:
        self._since_batch = self._since_boundary = True
        self._trained = self._trained or optimizer is not None

    def _forward_seen(self) -> None:
        self._stepped()
        self._unwatch_forward()

    def _unwatch_forward(self) -> None:
        while self._forward_hooks:
            with contextlib.suppress(IndexError, KeyError):  # another thread that runs a module was first
                self._forward_hooks.pop().handle.remove()

    def since_boundary(self) -> bool:
        """Whether a hook saw use since the last boundary: mostly the step of an optimizer."""
        return self._since_boundary

    def trained_since_boundary(self) -> bool:
        """Whether an optimizer stepped since then."""
        return self._trained

    def at_boundary(self) -> None:
        self._since_boundary = self._trained = False
        self._unwatch_forward()

    def before_batch(self, *, holds_one: bool) -> None:
        """Called before each batch is drawn; `holds_one` says that the loop was given one before. Raises
        BoundaryError if the attached state was not used at all since then."""
        if self._left == 0:
            return
        self._left -= 1
        used, self._since_batch = self._since_batch, False
        now = None if used else self.digests()
        if holds_one and now is not None and now == self._before:
            raise BoundaryError(
                "A batch was drawn before anything of the attached state was used since the last one: no "
                "module ran forward, no optimizer stepped, and the state is bit for bit what it was. "
                "Something reads ahead around the loop (a prefetcher, a list() around it), and every "
                "boundary would be a lie. Nothing was captured. Put the prefetching inside, into the "
                "loader; if the loop skips batches on purpose, say Options(read_ahead_check=False)."
            )
        self._before = now if now is not None else self._before

    def batch_given(self) -> None:
        if self._left and not self._forward_hooks:
            self._forward_hooks += [_ForwardHook(module, self) for module in self._tree.modules]

    def close(self) -> None:
        for handle in self._step_hooks:
            handle.remove()
        self._step_hooks.clear()
        self._unwatch_forward()


class _ForwardHook:
    """On a module from a batch to its first forward, and only for the first few batches: `torch.save(model)`
    and `deepcopy(model)` take along what is on it. A copy that is made right then has, in this one's place,
    torch's own handle of a hook, which takes itself off with the first call."""

    def __init__(self, module: nn.Module, use: Use) -> None:
        self._use = weakref.ref(use)
        self.handle = module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            return
        use = self._use()
        if use is not None:
            use._forward_seen()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return partial, (self.handle.__exit__, None)
