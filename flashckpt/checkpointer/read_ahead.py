"""Whether the state was used since the last boundary: what tells a training loop from a read-ahead.

Whoever draws a batch before the last one was trained on makes every boundary a lie: the state would be
said to be a step further than it is. Hooks on the attached modules and optimizers see use at no cost;
where none fired, digests decide, because a loop may be compiled or call no module at all. A read-ahead
shows itself on the second batch it draws, so only the first few batches are looked at this closely.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from flashckpt.errors import BoundaryError
from flashckpt.state.tree import Tree

_BATCHES_CHECKED = 8  # more than any sensible read-ahead draws before it trains


class Use:
    """Watches the attached state from the first batch on.

    `digests` reads the whole state: by leaf, equal as long as no byte has changed. It is called at the
    first batch, and at the next few where no hook fired. `used`: the state is at no boundary yet.
    """

    def __init__(self, tree: Tree, digests: Callable[[], dict[str, int]], *, check: bool, used: bool) -> None:
        self.digests = digests
        self._left = _BATCHES_CHECKED if check else 0
        self._before: dict[str, int] | None = None
        self._since_batch = False
        self._since_boundary = used
        mine = weakref.ref(self)

        def seen(*_: object) -> None:
            if torch.compiler.is_compiling():
                return
            use = mine()
            if use is not None:
                use._since_batch = use._since_boundary = True

        self._handles: list[Any] = [module.register_forward_pre_hook(seen) for module in tree.modules]
        self._handles += [optimizer.register_step_post_hook(seen) for optimizer in tree.optimizers]

    def since_boundary(self) -> bool:
        """Whether a hook saw use since the last boundary; use that calls none is not seen."""
        return self._since_boundary

    def at_boundary(self) -> None:
        self._since_boundary = False

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

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
