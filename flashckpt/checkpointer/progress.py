"""The progress of a run (step, epoch, positions in its loaders), and the check that it is true.

A program has one loop over batches in an epoch; a trainer may have several loaders open, each with a name.
Progress is saved at a boundary and restored before anything is drawn: loops that had ended give no batch,
open ones continue at their batch.

A program that draws a batch before it has trained on the last one makes every boundary false: the state would
get the number of a later step. Hooks on the attached modules and optimizers notice use at no cost; if none
fired, digests decide, because a loop may be compiled or call no module. A read-ahead shows on its second
batch, so only the first few batches are checked.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from flashckpt.capture.hooks import StepHooks
from flashckpt.errors import BoundaryError, DamagedError, MismatchError
from flashckpt.state.loader.order import checked_fields
from flashckpt.state.loader.source import Source
from flashckpt.state.loader.sources import Sources, epoch_length
from flashckpt.state.tree import Tree

# A leaf's dtype, shape, and the digest of its bytes, which covers neither.
Content = tuple[str, tuple[int, ...], int]

BATCHES = ""
"""The name of the loader of `.batches()`. Those of a trainer have the names of their taps."""

ANY_LOOP = "any"
"""The integration that an import records: the first loop that attaches resumes the run."""

_BATCHES_CHECKED = 8  # more than any sensible read-ahead draws before it trains


class Counts(NamedTuple):
    """What is saved of a `Progress`."""

    step: int
    epoch: int
    has_ended: bool
    iterated: bool
    integration: str
    taps: dict[str, int]
    to_skip: int
    sources: list[Any]


class Progress:
    """The counts of a run.

    step: iterations since the run began. epoch: counts from zero. has_ended: `.batches()` has given the last
    batch of this epoch. manages_epochs: epochs are counted here (`.epochs()`, a whole run); otherwise `epoch`
    stays 0, and samplers are not given one. iterated: an iteration was counted in this epoch. is_cut: a stop
    kept the batches of this epoch from beginning, so that the epoch is not over.

    taps: for each tap, in the order in which they were made, the batches of this epoch before its present
    pass. to_skip: batches that the first pass of the first tap drops, because a run that began elsewhere has
    trained on them. integration: the trainer's name, "" for a loop of the program. A run belongs to one.
    """

    def __init__(self, integration: str = "") -> None:
        self.integration = integration
        self.to_skip = 0
        self.taps: dict[str, int] = {}
        self.step = 0
        self.epoch = 0
        self.has_ended = self.manages_epochs = self.iterated = self.is_cut = False
        self._was_asked = False  # for batches of this epoch, in this process
        self._sources = Sources()
        self._held: list[dict[str, Any]] | None = None

    def value(self) -> dict[str, Any]:
        """Return what is saved at a boundary, as plain values. Loops that have ended keep their positions,
        because the workers of a persistent loader carry their random numbers into the next epoch."""
        sources = self._sources.value() if self._held is None else self._held
        return Counts(
            self.step, self.epoch, self.has_ended, self.iterated, self.integration, dict(self.taps),
            self.to_skip, sources,
        )._asdict()  # fmt: skip

    def restore(self, value: dict[str, Any]) -> None:
        """Restore saved progress. Raises DamagedError if it is invalid, and changes nothing then."""
        try:
            saved = checked_fields(Counts, value)
            if not all(type(each) is int for each in saved.taps.values()):
                raise ValueError("its taps are no counts")
            if min(saved.step, saved.epoch, saved.to_skip, *saved.taps.values()) < 0:
                raise ValueError("a count is negative")
            self._check_integration(saved.integration)
            self._sources.restore(saved.sources)
        except ValueError as error:
            raise DamagedError(
                f"The saved progress cannot be read ({error}). No loader was touched. Resume from an older "
                "step."
            ) from error
        self.step, self.epoch, self.to_skip = saved.step, saved.epoch, saved.to_skip
        self.iterated, self.has_ended, self.taps = saved.iterated, saved.has_ended, dict(saved.taps)

    def _check_integration(self, saved: str) -> None:
        if saved not in (self.integration, ANY_LOOP):
            then, now = (
                f"flashckpt.{n}" if n else "a loop of the program" for n in (saved, self.integration)
            )
            raise MismatchError(
                f"The checkpoint was made by {then}, and {now} now attaches to its run: their positions and "
                "counters are not alike. Nothing was changed. Resume it as it was begun, or export its "
                "weights into a new run.",
                differences=(("integration", saved or "none", self.integration or "none"),),
            )

    def count(self, iterations: int) -> None:
        """Count iterations that are done."""
        self.step += iterations
        self.iterated = True

    @property
    def open_sources(self) -> dict[str, Source]:
        """The sources of loaders, by name, whose epoch was begun here and has not ended."""
        return self._sources.opened()

    @property
    def is_over(self) -> bool:
        """Whether this epoch has no batches left: no loop was stopped, or kept from beginning."""
        return not self.open_sources and not self.is_cut

    @property
    def is_after_batches(self) -> bool:
        """Whether the epoch's own code runs: batches of this epoch were taken, and no loop is open."""
        return self.manages_epochs and self.iterated and not self.open_sources

    @property
    def batches_taken(self) -> int:
        """The batches taken of this epoch by `.batches()`, or in a restored position."""
        return self.taken_of(BATCHES)

    def taken_of(self, name: str) -> int:
        """Return the batches taken of a loader; if it is not open here, those that were trained on."""
        if name in self.open_sources:
            return self.open_sources[name].batches_taken
        return int(self._sources.waiting(name, self.epoch).get("batches_taken", 0))

    def epoch_length(self, loader: Any) -> int:
        """Return the number of batches of this epoch. Raises TypeError if the loader does not know it."""
        if self.open_sources:
            return len(self.open_sources[BATCHES])
        return epoch_length(loader, self._sources.waiting(BATCHES, self.epoch))

    def open_batches(self, loader: object, *, sets_epoch: bool = False) -> Source | None:
        """Return the source of this epoch's `.batches()`; None if it had ended before the resume. sets_epoch:
        call `set_epoch` of the loader's samplers and data set."""
        self.check_is_only()
        self._was_asked = True
        source = self._sources.open(loader, self.epoch, BATCHES, sets_epoch=sets_epoch)
        if not self.has_ended:
            return source
        # It was opened for its generators, from which later code draws.
        self._sources.end(BATCHES)
        return None

    def gives_from(self, source: Source) -> bool:
        """Whether this is the source of this epoch's `.batches()`."""
        return self.open_sources.get(BATCHES) is source

    def hold_place(self) -> None:
        """Let the position stay as it is while a batch is drawn that is not trained on."""
        self._held = self._sources.value()

    def check_is_only(self) -> None:
        """Raise BoundaryError if batches of this epoch, or of a run without epochs, were asked for before."""
        if self._was_asked:
            raise BoundaryError(
                f"A second .batches() was begun in {'an epoch' if self.manages_epochs else 'the run'}. "
                "Nothing was captured since the last boundary. A resume in it would run the code between the "
                "two again. Write `for epoch in checkpointer.epochs(n):` around one `.batches(loader)`, with "
                "the loader chosen by the epoch's number, or pass one iterable that gives both's batches. "
                "After an interrupt, attach again.",
                step=self.step,
            )

    def open_tap(self, name: str, loader: object, *, in_lockstep: bool) -> Source:
        """Return the source of the tap's next pass over its loader. in_lockstep: as in `Source.begin`."""
        if name in self.open_sources:
            self.taps[name] += self.open_sources[name].batches_taken
            self._sources.end(name)
        return self._sources.open(loader, self.epoch, name, counts_trained=True, in_lockstep=in_lockstep)

    def drawn(self, name: str) -> int:
        """Return the batches that a tap has given in this epoch; if it has not drawn since a resume, those
        that were trained on."""
        skipped = self.to_skip if name == next(iter(self.taps)) else 0
        return self.taps[name] + self.taken_of(name) + skipped

    def count_trained(self, trained: int | Mapping[str, int] | None) -> None:
        """Note how many batches of this epoch were trained on; None for all that were drawn."""
        for name, before in self.taps.items():
            source = self.open_sources.get(name)
            if source is not None:
                count = trained.get(name) if isinstance(trained, Mapping) else trained
                if count is not None and count < before:
                    raise BoundaryError(
                        f"The loader {name!r} was begun anew while {before - count} batches of its pass "
                        "before were drawn and not trained on: a resume could not draw them again. Nothing "
                        "was captured at this boundary. Draw fewer batches ahead."
                    )
                source.count_trained(source.batches_taken if count is None else count - before)

    def close_batches(self) -> None:
        """End this epoch's `.batches()`, also one that was left in the middle, as in a plain loop."""
        self._sources.end(BATCHES)
        self.has_ended, self._held = True, None

    def next_epoch(self) -> None:
        """End the epoch, also of an iterator that was left and is still referenced; its loops begin anew."""
        self._sources.end_epoch()
        self._held = None
        self.epoch += 1
        self.to_skip = 0
        self.iterated = self.is_cut = self.has_ended = self._was_asked = False
        self.taps = dict.fromkeys(self.taps, 0)

    def close(self) -> None:
        """End the workers of all sources."""
        self._sources.close()


class Use:
    """Watches the use of the attached state from the first batch on.

    digests: reads the whole state, by leaf; called at the first batch, and at the next few if no hook fired.
    used: the state is at no boundary yet.
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
        # Whether a module ran forward, and the steps of optimizers: since the last batch, and the last
        # boundary.
        self._ran_since_batch, self._ran_since_boundary = False, used
        self._steps_at_batch = self._steps_at_boundary = steps.steps
        self._forward_hooks: list[_ForwardHook] = []

    @property
    def trained_since_boundary(self) -> bool:
        """Whether an optimizer has stepped."""
        return self._steps.steps != self._steps_at_boundary

    @property
    def may_have_trained(self) -> bool:
        """As `trained_since_boundary`; True if no optimizer has stepped so far: none may be attached."""
        return self.trained_since_boundary or self._steps.steps == 0

    @property
    def used_since_boundary(self) -> bool:
        """Whether a hook noticed use, mostly the step of an optimizer."""
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
        """To be called before each batch is drawn. holds_one: the loop was given one before. Raises
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
    """A hook on a module from a batch to its first forward, for the first few batches only:
    `torch.save(model)` and `deepcopy(model)` include it. A copy has a handle of torch in its place, which
    removes itself when called."""

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
