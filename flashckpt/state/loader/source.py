"""The base of all sources: the order of events in an epoch, and when a position is saved and resumed; and the
simplest source, which replays the epoch.

Owns the point where generator states are restored: just before the fetch of the first batch after a resume.
Never changes the program's loader, except for `set_epoch`.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from flashckpt.errors import BoundaryError, MismatchError
from flashckpt.format.typed import Encoded, check_roundtrip
from flashckpt.state import rng
from flashckpt.state.loader.order import Share, share_of
from flashckpt.state.loader.position import Position
from flashckpt.state.loader.samplers import set_epoch

log = logging.getLogger(__name__)


class Source:
    """A loader whose position is saved at each boundary and can be resumed. Draws nothing before the first
    `next` of a new epoch, so a position at an epoch's start needs only the generator states of that boundary.
    Subclasses implement the hooks at the end.

    batches_taken: the batches of this epoch, including those of earlier attempts.
    was_over: whether the epoch was over at the position that was resumed.
    generators: the generators that the loader's parts own.
    convert: the function that a wrapper of the loader applies to each batch.
    sets_epoch: call `set_epoch` of samplers and data set at the beginning of each epoch.
    """

    kind = ""  # as a message names it
    parts: type[Any] = object  # the fields of `Position.parts`
    divides = False  # whether it can continue with any order of samples

    _share: Share | None
    _broken: bool

    def __init__(self, loader: Any, generators: rng.Generators) -> None:
        self._loader = loader
        self._name = type(loader).__name__
        self.generators = generators
        self._iterator: Iterator[Any] | None = None
        self.sets_epoch = self._can_be_saved = False
        self.convert: Callable[[Any], Any] | None = None
        self._counts_trained = False
        Source._enter(self, 0)

    def __len__(self) -> int:
        """Return the batches of a whole epoch. Raises TypeError if the loader has no length."""
        if self._length is None:
            raise TypeError(f"{self._name} has no known number of batches")
        return self._length

    def has_lost_workers(self) -> bool:
        """Whether a worker process has ended unexpectedly."""
        # `_workers` are the processes of torch's iterator; other loaders do not expose theirs.
        workers = getattr(self._iterator, "_workers", None)
        return isinstance(workers, list) and any(not worker.is_alive() for worker in workers)

    def begin(
        self,
        epoch: int,
        resume: Mapping[str, Any] | None = None,
        *,
        carry: bool = False,
        in_lockstep: bool = False,
    ) -> None:
        """Begin an epoch at its start, or at the position `resume`.

        For a position of the same epoch, restore the global generators, here and again just before the next
        fetch. A position of an earlier epoch is carried over to the start of `epoch`: restore the loader's
        own generators and workers, and leave the global generators unchanged.

        carry: carry over also a position of this epoch.
        in_lockstep: another source has drawn since the resume, in step with this one: keep the global
            generators as they are.
        """
        if resume is None:
            self._leave()
            return self._enter(epoch)
        position = Position.read(resume, self.kind, self.parts)
        self.close()
        continues = position.epoch == epoch and not carry
        # Other loops may have run since the position was taken.
        keeps_global = in_lockstep or not continues
        states = {
            "global": rng.capture() if keeps_global else position.boundary["global"],
            "own": {**self.generators.capture(), **position.boundary["own"]},
        }
        self._enter(epoch)
        if continues:
            self.batches_taken, self._over = position.batches_taken, position.over
            if position.ahead or not in_lockstep:
                self._due.extend([position.now, *position.ahead])
        if continues and position.is_open:
            self._continue(position)
        else:
            is_own = position.belongs_to(self._share, is_global=self._is_global(position))
            if is_own:
                self._check(position)
            self._load(position, is_own=is_own)
        if continues and position.over:
            self._share, self._length = position.share, position.length
        self.was_over = self._over
        self.generators.restore_all(states)
        return None

    def next(self) -> Any:
        """Return the next batch. Raises StopIteration at the epoch's end, and StateError at the first batch
        if the position cannot be saved exactly."""
        if self._broken:
            raise BoundaryError(
                f"The loader failed while it fetched batch {self.batches_taken} of this epoch, so its "
                "position is unknown. Earlier snapshots are intact. Start the loop again to resume from them."
            )
        is_redraw = self.redraws
        # The loop may have trained since the last redraw.
        global_states = rng.capture() if is_redraw else {}
        before = self._position_now() if self._counts_trained and not self._over else None
        if self._due:
            # Restore again just before the fetch: draws since `begin` do not belong to the run.
            self.generators.restore_all(self._due.popleft())
        if self._over:
            raise StopIteration
        try:
            batch = self._fetch()
            if before is not None:
                self._before_draws.append(before)
            if is_redraw:
                # Set the loader's own generators for the next redraw, or as at the boundary.
                self.generators.restore_all({**self._due[0], "global": global_states})
                if not self.redraws:
                    self._due.clear()
            if not self._can_be_saved:
                # Here rather than at the boundary, so that no batch was trained on yet.
                check_roundtrip(self.position(), "loader")
                self._can_be_saved = True
                warn_of_late(self.generators)
            return batch if self.convert is None else self.convert(batch)
        except StopIteration:
            self._over = True
            self._leave(ended=True)
            if before is not None:
                self._before_draws.append(before)  # the loader may have drawn random numbers as it ended
            if is_redraw:
                self.generators.restore_all({**self._due[-1], "global": global_states})
                self._due.clear()
            raise
        except BaseException:
            self._broken = True
            raise

    def skip(self, batches: int) -> None:
        """Draw and drop the first batches of an epoch that has just begun. Raises MismatchError if the loader
        has fewer."""
        for number in range(batches):
            try:
                self.next()
            except StopIteration:
                raise too_few(self._name, number, batches) from None

    def count_trained(self, batches: int = 0) -> None:
        """Record that `batches` batches of this epoch were trained on; later draws are drawn ahead. To be
        called before the first draw and at each boundary. Without a call, no batch is drawn ahead."""
        self._counts_trained = True
        ahead = max(0, self.batches_taken - batches)
        while len(self._before_draws) > ahead + (ahead > 0 and self._over):
            self._before_draws.popleft()

    def leave_ahead(self) -> None:
        """Forget the batches drawn ahead, because the epoch is over or was left."""
        self._before_draws.clear()
        if self.redraws:
            self.generators.restore(self._due[-1]["own"])
            self._due.clear()

    @property
    def redraws(self) -> bool:
        """Whether the next batch, or the loader's end, was already drawn ahead when the run was saved."""
        return len(self._due) > 1

    def position(self) -> dict[str, Any]:
        """Return the position, for `Position.read`. To be called between two calls of `next`."""
        if not self._before_draws:
            return self._position_now().value()
        first, *others = self._before_draws
        ahead = [*(each.now for each in others), *self._generator_states()]
        return first._replace(ahead=ahead).value()

    def _generator_states(self) -> list[dict[str, Any]]:
        """Return the generator states of each remaining redraw, and last the current ones."""
        states = list(self._due) or [self.generators.capture_all()]
        if self.redraws:
            states[-1] = {**states[-1], "global": rng.capture()}
        return states

    def _position_now(self) -> Position:
        """Return the position in plain values, to be encoded later. Later draws do not change it: the source
        replaces its contents and never modifies them."""
        # `_parts` first: the state_dict of a loader may draw.
        over, parts = self._parts()
        now, *ahead = self._generator_states()
        return Position(
            kind=self.kind,
            epoch=self._epoch,
            batches_taken=self.batches_taken,
            over=over,
            length=self._length,
            made_of=self._made_of,
            share=self._share,
            moved=None,
            at_iter=None if over else self._at_iter,
            at_draw=None if over else self._at_draw,
            parts=parts,
            now=now,
            ahead=ahead,
        )

    def close(self) -> None:
        """Drop the iterator, with its worker processes and their random numbers. The user's loader stays
        unchanged."""
        self._iterator = None

    def _fetch(self) -> Any:
        if self._iterator is None:
            self._iterator = self._open()
        batch = self._unpack(next(self._iterator))
        self.batches_taken += 1
        return batch

    def _enter(self, epoch: int) -> None:
        self._epoch, self.batches_taken = epoch, 0
        self._over = self.was_over = self._broken = False
        # The generator states before the epoch's iterator was made, and before its first index was drawn:
        # encoded once for all boundaries of the epoch.
        self._at_iter: Encoded | None = None
        self._at_draw: Encoded | None = None
        # The positions before the newest draws, drawn ahead of training.
        self._before_draws: deque[Position] = deque()
        # After a resume: the generator states before each batch that was drawn ahead, and of the boundary.
        self._due: deque[dict[str, Any]] = deque()
        self._length, self._made_of = length_of(self._loader), made_of(self._loader)
        if self.sets_epoch:
            set_epoch(self._loader, epoch)
        self._share = share_of(self._loader, self.generators)

    def _continue(self, position: Position) -> None:
        """Continue in the middle of an epoch."""
        taken, is_global = position.batches_taken, self._is_global(position)
        share = position.continued_by(self._share, self._name, divides=self.divides, is_global=is_global)
        self._share = share
        if share is not None and share.batches:
            self._length = share.all_batches
            if share.batches == taken:  # the rest is as an epoch that begins here
                assert share.order is not None
                self._length = taken if position.is_at_end else self._length
                self._over = self._length <= taken
                log.info(
                    "epoch %s continues after %d of its %d samples; the rest is divided among %d "
                    "data-parallel ranks, %d batches each.",
                    position.epoch, share.samples, share.order.length, share.ranks, self._length - taken,
                )  # fmt: skip
                return
        self._check(position)
        self._reopen(position)

    def _is_global(self, position: Position) -> bool:
        """Whether a part of the loader has position_is_global = True."""
        names = ("dataset", "sampler", "batch_sampler")
        parts = (self._loader, *(getattr(self._loader, name, None) for name in names))
        return any(getattr(part, "position_is_global", False) is True for part in parts)

    def _check(self, position: Position) -> None:
        then, now = position.made_of, self._made_of
        changed = [f"{n} is {now[n]} and was {then[n]}" for n in then if n in now and then[n] != now[n]]
        # The length of an epoch that was divided among other ranks in the middle is not comparable.
        given = {0 if share is None else share.batches for share in (position.share, self._share)}
        lengths = {position.length, self._length}
        if len(given) == 1 and len(lengths) == 2 and None not in lengths:
            changed.insert(0, f"it has {self._length} batches an epoch and had {position.length}")
        if changed:
            log.warning(
                "Not exact: the loader has changed since the checkpoint was taken (%s). It continues after "
                "%d batches, but the next batches differ from those of an uninterrupted run.",
                ", ".join(changed), position.batches_taken,
            )  # fmt: skip
        unmatched = self.generators.unmatched(position.now["own"])
        if unmatched:
            log.warning(
                "Not exact: these generators exist only in the checkpoint or only here: %s", unmatched
            )

    def _open(self) -> Iterator[Any]:
        """Return the iterator of a new epoch. Sets `_at_iter`."""
        raise NotImplementedError

    def _reopen(self, position: Position) -> None:
        """Set the iterator so that its next batch is the one after `position`, and `_at_iter`."""

    def _unpack(self, item: Any) -> Any:
        """Return the batch of an item of the iterator."""
        return item

    def _leave(self, *, ended: bool = False) -> None:
        """End the epoch. `ended`: the iterator has just raised StopIteration."""
        self._iterator = None

    def _load(self, position: Position, *, is_own: bool) -> None:
        """Load what a position between two epochs, or of an epoch that was left, has for the next one, unless
        it is that of another rank (`is_own`)."""

    def _parts(self) -> tuple[bool, dict[str, Any]]:
        """Return whether certainly no batch follows, and the `Position.parts` of this kind of source."""
        return self._over, {}


# Iterables without state


_LOG_EVERY_S = 5.0
# A replay of these is free and exact, so it is not logged. Exact types only, since a subclass may differ.
_FREE_TO_REPLAY = (range, list, tuple, deque, itertools.count, itertools.repeat)
# References to iterators that are their own `iter()` and were already drawn from: they cannot start again.
_used_iterators: deque[Callable[[], Any]] = deque(maxlen=64)


class ReplayedSource(Source):
    """An iterable without state of its own. A resume draws the epoch's batches again and drops them, and logs
    its progress. Exact if the iterable returns the same batches again. `clock` returns seconds."""

    kind = "replayed iterable"

    def __init__(self, loader: Any, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(with_new_workers(loader), rng.Generators({"loader": loader}))
        self._clock = clock

    def _is_global(self, position: Position) -> bool:
        is_same = type(self._loader) in _FREE_TO_REPLAY and position.length == self._length
        return is_same or super()._is_global(position)

    def _iterate(self) -> tuple[Iterator[Any], bool]:
        """Return an iterator, and whether batches were drawn from it before."""
        self._at_iter = Encoded(self.generators.capture_all())
        iterator = iter(self._loader)
        if iterator is not self._loader:
            return iterator, False
        used = any(reference() is iterator for reference in _used_iterators)
        if not used:
            try:
                _used_iterators.append(weakref.ref(iterator))
            except TypeError:
                _used_iterators.append(lambda: iterator)
        return iterator, used

    def _open(self) -> Iterator[Any]:
        iterator, used = self._iterate()
        if used:
            log.warning(
                "%s can be iterated over only once, and batches were drawn from it before: this epoch has "
                "only the remaining batches, so a run of more epochs or steps ends early. Pass an iterable "
                "that starts again at each iter(), such as a DataLoader or a list.",
                type(iterator).__name__,
            )
        return iterator

    def _reopen(self, position: Position) -> None:
        total = position.batches_taken
        self.generators.restore_all(position.at_iter)
        iterator, used = self._iterate()
        if used:
            raise BoundaryError(
                f"The loop continues after batch {total} of an iterator ({type(iterator).__name__}) from "
                "which this process has already drawn: to drop that many more would lose batches. The model "
                "and the rest of the state were restored; no batch was drawn. Make a new iterator, or pass "
                "an iterable that starts again at each iter()."
            )
        self._iterator = iterator
        if type(self._loader) not in _FREE_TO_REPLAY:
            log.warning(
                "%s has no state, so %d batches of epoch %d are drawn again and dropped. Not exact if it "
                "draws random numbers batch by batch. Give it state_dict and load_state_dict to resume "
                "without replay.",
                type(self._loader).__name__, total, position.epoch,
            )  # fmt: skip
        draw_again(iterator, total, self._clock)


def draw_again(iterator: Iterator[Any], batches: int, clock: Callable[[], float] = time.monotonic) -> None:
    """Draw and drop the first batches of an epoch. Raises MismatchError if there are fewer."""
    due_s = clock() + _LOG_EVERY_S
    for done in range(batches):
        if clock() >= due_s:
            due_s += _LOG_EVERY_S
            log.info("%d of %d batches drawn again.", done, batches)
        try:
            next(iterator)
        except StopIteration:
            raise too_few(type(iterator).__name__, done, batches) from None


def too_few(name: str, found: int, expected: int) -> MismatchError:
    return MismatchError(
        f"{name} ended after {found} batches, and the run continues after {expected}. The model and the rest "
        "of the state were restored; no batch was trained on. Pass the data with which the run began.",
        differences=(("batches of the loader", str(expected), str(found)),),
    )


def with_new_workers(loader: Any) -> Any:
    """Return a copy of a DataLoader that starts new workers for each iterator, so that an epoch begins as it
    does after a resume; any other loader as it is."""
    if not isinstance(loader, DataLoader):
        return loader
    own = copy.copy(loader)
    # Set by vars(), because DataLoader.__setattr__ refuses some of these names.
    vars(own).update(_iterator=None, persistent_workers=False)
    return own


def warn_of_late(generators: rng.Generators) -> None:
    # Those of samplers are made again: a resume begins the epoch's order anew.
    late = [path for path in generators.made_since() if path.startswith(("dataset", "collate"))]
    if late:
        log.warning(
            "Not exact: the random generators %s of the loader were made with its first batch, so a resume "
            "in mid-epoch cannot restore them. Make them before the loop begins.", ", ".join(late),
        )  # fmt: skip


# Facts of loaders


def made_of(loader: Any) -> dict[str, Any]:
    """Return the settings that determine, with the random numbers, the batches of a DataLoader; {} for other
    loaders."""
    if not isinstance(loader, DataLoader):
        return {}
    size = getattr(loader.batch_sampler, "batch_size", None)
    return {
        "batch_size": size if isinstance(size, int) else None,
        "drop_last": bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last)),
        "sampler": type(loader.sampler).__name__,
        "batch_sampler": type(loader.batch_sampler).__name__,
        "dataset_length": length_of(loader.dataset),
    }


def length_of(sized: Any) -> int | None:
    """Return the length, or None if it is unknown."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
