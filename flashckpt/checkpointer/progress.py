"""How far a run has come (boundaries done, epoch, phase, position in the loader), and whether it truly has.

An epoch has one phase for each call of `.batches()`. Progress is saved as it stands at a boundary and
put back before anything is drawn, so a phase that had ended gives no batch, the one that was open goes
on at its batch, and later ones start afresh.

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

from flashckpt.capture.hooks import StepHooks
from flashckpt.errors import BoundaryError, DamagedError
from flashckpt.state.loader.base import Source
from flashckpt.state.loader.sources import Sources, epoch_length
from flashckpt.state.tree import Tree

# Of a leaf: its dtype, its shape and the digest of its bytes, which say nothing of the first two.
Content = tuple[str, tuple[int, ...], int]

_BATCHES_CHECKED = 8  # more than any sensible read-ahead draws before it trains


class Progress:
    """`step` counts iterations since the run began; `epoch` and `phase` (phases that have ended in this
    epoch) count from zero. `manages_epochs`: epochs are told from one another here (`.epochs()`, a whole
    run); otherwise `epoch` stays 0, and samplers are not told one. `iterated`: an iteration was counted in
    this epoch. `is_cut`: a stop kept a phase of this epoch from beginning, so that the epoch is not over."""

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.phase = 0
        self.manages_epochs = self.iterated = self.is_cut = False
        self._calls = 0  # of batches() in this epoch, in this process
        self._open: Source | None = None
        self._resumes_in_phase = False  # and not between two
        self._sources = Sources()

    def value(self) -> dict[str, Any]:
        """What is saved at a boundary: plain Python values. Phases that have ended keep their positions:
        the workers of a persistent loader carry their random numbers into the next epoch."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "phase": self.phase,
            "open": self._open is not None or self._resumes_in_phase,
            "iterated": self.iterated,
            "sources": self._sources.value(),
        }

    def restore(self, value: dict[str, Any]) -> None:
        """Take up saved progress. Raises DamagedError if it is none, and then has changed nothing."""
        counts: list[Any] = [value.get(name) for name in ("step", "epoch", "phase")]
        try:
            if not all(type(count) is int and count >= 0 for count in counts):
                raise ValueError("step, epoch and phase are no counts")
            if type(value.get("open")) is not bool or type(value.get("iterated")) is not bool:
                raise ValueError("it does not say whether a phase was open, or begun")
            self._sources.restore(value.get("sources"))
        except ValueError as error:
            raise DamagedError(
                f"The saved progress is none ({error}). No loader was touched. Resume from an older step."
            ) from error
        self.step, self.epoch, self.phase = counts
        self._resumes_in_phase, self.iterated = value["open"], value["iterated"]

    def count(self, iterations: int) -> None:
        """So many iterations are done."""
        self.step += iterations
        self.iterated = True

    @property
    def is_over(self) -> bool:
        """Whether nothing of this epoch is left to be given: no phase was stopped, or kept from beginning."""
        return self._open is None and not self.is_cut

    @property
    def is_after_batches(self) -> bool:
        """Whether batches of this epoch were taken and no phase gives any: the epoch's own code runs."""
        return self.manages_epochs and self.iterated and self._open is None

    @property
    def batches_taken(self) -> int:
        """Batches taken in the phase that is open, or that a restored position stands in."""
        if self._open is not None:
            return self._open.batches_taken
        return int(self._sources.saved_position(self.phase)["batches_taken"]) if self._stands_in_phase else 0

    def epoch_length(self, loader: Any) -> int:
        """Batches of this epoch, with those taken of it. TypeError where the loader does not know."""
        if self._open is not None:
            return len(self._open)
        saved = self._sources.saved_position(self.phase) if self._stands_in_phase else {}
        return epoch_length(loader, saved)

    def open_phase(self, loader: object) -> Source | None:
        """The source of the next call of `.batches()` in this epoch; None if that phase had ended."""
        if self._open is not None:
            raise BoundaryError(
                "A second .batches() was begun while the first still gives batches. Nothing was captured. "
                "Boundaries of two loops in one another cannot be told apart: put the inner loader into "
                "the outer one, or leave the inner loop to run without .batches()."
            )
        phase, self._calls = self._calls, self._calls + 1
        if phase < self.phase:
            self._sources.skip(loader, phase)
            return None
        source = self._sources.open(
            loader, self.epoch, phase, in_place=self._stands_in_phase, tell_epoch=self.manages_epochs
        )
        self._open, self._resumes_in_phase = source, False
        if not self.manages_epochs:
            self._sources.retire(self.epoch, phase)
        return source

    def close_phase(self) -> None:
        """The open phase has given its last batch, or was left in the middle: it counts as ended then, as it
        would in a plain loop."""
        if self._open is not None:
            self._sources.ended(self._calls - 1)
        self._open = None
        self.phase = self._calls

    def next_epoch(self) -> None:
        """The epoch has ended; its phases begin anew."""
        self.epoch += 1
        self.phase = self._calls = 0
        self._resumes_in_phase = self.iterated = self.is_cut = False
        self._sources.retire(self.epoch)

    def close(self) -> None:
        """End the workers of all sources."""
        self._open = None
        self._sources.close()

    @property
    def _stands_in_phase(self) -> bool:
        """Whether the next phase is one that was open when the run was saved."""
        if not self._resumes_in_phase:
            return False
        saved = self._sources.saved_position(self.phase)
        return type(saved.get("batches_taken")) is int and saved.get("epoch") == self.epoch


class Use:
    """Watches the attached state from the first batch on.

    `digests` reads the whole state: by leaf, equal as long as nothing has changed. It is called at the
    first batch, and at the next few where no hook fired. `used`: the state is at no boundary yet.
    """

    def __init__(
        self,
        tree: Tree,
        steps: StepHooks,
        digests: Callable[[], dict[str, Content]],
        *,
        check: bool,
        used: bool,
    ) -> None:
        self._tree, self._steps, self.digests = tree, steps, digests
        self._left = _BATCHES_CHECKED if check else 0
        self._before: dict[str, Content] | None = None
        # A module ran forward, and the count of steps, of the last batch and of the last boundary.
        self._ran_since_batch, self._ran_since_boundary = False, used
        self._steps_at_batch = self._steps_at_boundary = steps.steps
        self._forward_hooks: list[_ForwardHook] = []

    @property
    def trained_since_boundary(self) -> bool:
        """Whether an optimizer has stepped."""
        return self._steps.steps != self._steps_at_boundary

    @property
    def used_since_boundary(self) -> bool:
        """Whether a hook saw use: mostly the step of an optimizer."""
        return self._ran_since_boundary or self.trained_since_boundary

    def _forward_seen(self) -> None:
        self._ran_since_batch = self._ran_since_boundary = True
        self._unwatch_forward()

    def _unwatch_forward(self) -> None:
        while self._forward_hooks:
            with contextlib.suppress(IndexError, KeyError):  # another thread that runs a module was first
                self._forward_hooks.pop().handle.remove()

    def at_boundary(self) -> None:
        self._ran_since_boundary, self._steps_at_boundary = False, self._steps.steps
        self._unwatch_forward()

    def before_batch(self, *, holds_one: bool) -> None:
        """Called before each batch is drawn; `holds_one` says that the loop was given one before. Raises
        BoundaryError if the attached state was not used at all since then."""
        if self._left == 0:
            return
        self._left -= 1
        used = self._ran_since_batch or self._steps.steps != self._steps_at_batch
        self._ran_since_batch, self._steps_at_batch = False, self._steps.steps
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
