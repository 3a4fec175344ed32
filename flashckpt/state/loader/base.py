"""The base of all sources: the order of events in an epoch, and when a position is saved and resumed; and the
simplest source, which replays the epoch.

Owns the point where generator states are restored: just before the fetch of the first batch after a resume.
Never changes the program's loader, except for `set_epoch` of its samplers.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from flashckpt.errors import BoundaryError, MismatchError
from flashckpt.format.typed import check_roundtrip, encode_json
from flashckpt.state import rng
from flashckpt.state.loader.position import (
    LiveLoader,
    Position,
    Share,
    is_at_end,
    says_global,
    share_of,
)

log = logging.getLogger(__name__)


class Source:
    """A loader whose position is saved at each boundary and can be resumed. Draws nothing before the first
    `next` of a new epoch, so a position at an epoch's start needs only the generator states of that boundary.
    Subclasses implement the hooks at the end.

    batches_taken: the batches of this epoch, including those of earlier attempts.
    was_over: whether the position that was resumed is after the epoch's last batch.
    generators: the generators that the loader's parts own.
    convert: the function that a wrapper of the loader applies to each batch.
    """

    kind = ""
    parts: frozenset[str] = frozenset()  # the keys of `Position.parts`
    divides = False  # whether it can continue with any order of samples

    def __init__(self, loader: Any, generators: rng.Generators) -> None:
        self._loader = loader
        self.generators = generators
        self._epoch: int | None = None
        self.batches_taken = 0
        self._over = False
        self._broken = False
        self._iterator: Iterator[Any] | None = None
        self._unpacks = False  # by `_unpack`
        self._start: dict[str, Any] | None = None
        # The iterator was created before the first fetch (`make_iterator`), and other code may draw from the
        # same generators in between. `_first_states`: the generator states just before that fetch.
        self._is_made_early = False
        self._first_states: dict[str, Any] | None = None
        self._restore_at_fetch: dict[str, Any] | None = None
        self._length = length_of(loader)
        self._made_of = made_of(loader)
        self._share = share_of(loader, generators)
        self._sets_epoch = True
        self.was_over = self._can_be_saved = False
        self.convert: Callable[[Any], Any] | None = None
        # If batches are drawn ahead of training (`count_trained`): the number of batches trained on, the
        # positions before the newest draws, and the generator states of the batches to draw again.
        self._trained: int | None = None
        self._before_draws: deque[Position] = deque()
        self._redraws: deque[dict[str, Any]] = deque()
        self._ends_after_redraws = False

    def __len__(self) -> int:
        """Return the batches of a whole epoch. Raises TypeError if the loader has no length."""
        if self._length is None:
            raise TypeError(f"{type(self._loader).__name__} has no known number of batches")
        return self._length

    def check(self) -> None:
        """Raise StateError if the state, as far as known before the first draw, cannot be saved exactly."""

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
        leave: frozenset[str] = frozenset(),
        sets_epoch: bool = True,
        in_lockstep: bool = False,
    ) -> None:
        """Begin an epoch at its start, or at the position `resume`.

        For a position of the same epoch, restore the global generators, here and again just before the next
        fetch. A position of an earlier epoch is carried over to the start of `epoch`: restore the loader's
        own generators and workers, and leave the global generators unchanged.

        carry: carry over also a position of this epoch.
        leave: paths of own generators that are not carried over.
        sets_epoch: call `set_epoch` of the samplers.
        in_lockstep: another source has drawn since the resume, in step with this one: keep the global
            generators as they are.
        """
        self._sets_epoch, self.was_over = sets_epoch, False
        if resume is None:
            self._leave()
            return self._enter(epoch)
        position = Position.read(resume, self.kind, self.parts)
        self.close()
        if carry or position.epoch != epoch:
            return self._carry(position, epoch, leave)
        global_states = rng.capture() if in_lockstep else position.boundary["global"]
        self._resume(position, carried=False)
        self.was_over = self._over
        if self._trained is not None:
            self._trained = self.batches_taken
        self._redraws.extend(position.ahead)
        self._ends_after_redraws = position.has_ended
        self.generators.restore(position.now["own"])
        rng.restore(global_states)
        if position.ahead or not in_lockstep:
            self._restore_at_fetch = position.now
        return None

    def next(self) -> Any:
        """Return the next batch. Raises StopIteration at the epoch's end, and StateError at the first batch
        if the position cannot be saved exactly."""
        if self._broken:
            raise BoundaryError(
                f"The loader failed while it fetched batch {self.batches_taken} of this epoch, so its "
                "position is unknown. Earlier snapshots are intact. Start the loop again to resume from them."
            )
        # The loop may have trained since the last redraw.
        global_states = rng.capture() if self._redraws else {}
        if self._restore_at_fetch is not None:
            # Restore again just before the fetch: draws since `begin` do not belong to the run.
            due, self._restore_at_fetch = self._restore_at_fetch, None
            self.generators.restore_all(due)
        if self._over:
            raise StopIteration
        try:
            before = None if self._trained is None else self._position_now()
            batch = self._fetch()
            if before is not None:
                self._before_draws.append(before)
            if self._redraws:
                self._after_redraw(global_states)
            if not self._can_be_saved:
                # Here rather than at the boundary, so that no batch was trained on yet.
                check_roundtrip(self.position(), "loader")
                self._can_be_saved = True
                self._check_generators()
            return batch if self.convert is None else self.convert(batch)
        except StopIteration:
            self._over = True
            self._leave(ended=True)
            if self._redraws:  # the rest was divided among other ranks: this rank has no batch to redraw
                self.generators.restore_all({**self._redraws[-1], "global": global_states})
                self._redraws.clear()
                self.was_over = self._ends_after_redraws
            raise
        except BaseException:
            self._broken = True
            raise

    def skip(self, batches: int) -> None:
        """Skip the first batches of an epoch that has just begun: draw and drop them, unless the subclass
        needs no draws. Raises MismatchError if the loader has fewer."""
        for number in range(batches):
            try:
                self.next()
            except StopIteration:
                raise self._too_few(number, batches) from None

    def _too_few(self, found: int, skipped: int) -> MismatchError:
        return MismatchError(
            f"The loader ended after {found} batches, and the run begins after {skipped} batches. "
            "The state was loaded; no batch was trained on. Pass the data with which the run began.",
            differences=(("batches of the loader", str(skipped), str(found)),),
        )

    def count_trained(self, batches: int = 0) -> None:
        """Record that `batches` batches of this epoch were trained on; later draws are drawn ahead. To be
        called before the first draw and at each boundary. Without a call, no batch is drawn ahead."""
        self._trained = min(batches, self.batches_taken)
        while len(self._before_draws) > self.batches_taken - self._trained:
            self._before_draws.popleft()

    def leave_ahead(self) -> None:
        """Forget the batches drawn ahead, because the epoch is over or was left."""
        if self._trained is not None:
            self.count_trained(self.batches_taken)

    @property
    def redraws(self) -> bool:
        """Whether the next batch was already drawn ahead when the run was saved."""
        return bool(self._redraws)

    def _after_redraw(self, global_states: rng.State) -> None:
        """After a redraw, restore the global generators, and set the loader's own generators for the next
        redraw, or after the last one for the boundary."""
        states = self._redraws.popleft()
        if not self._redraws and self._ends_after_redraws:
            self._end_again()
        self.generators.restore_all({**states, "global": global_states})
        self._restore_at_fetch = states if self._redraws else None

    def _end_again(self) -> None:
        """Exhaust the iterator, as it was when the run was saved."""
        try:
            self._fetch()
        except StopIteration:
            self._over = self.was_over = True
            self._leave(ended=True)
            return
        raise MismatchError(
            f"{type(self._loader).__name__} has more batches than the {self.batches_taken - 1} after which "
            "it ended when the checkpoint was taken. The state was loaded; no batch was trained on. Pass the "
            "data with which the run began."
        )

    def position(self) -> dict[str, Any]:
        """Return the position, for `Position.read`. To be called between two calls of `next`."""
        if not self._before_draws:
            return self._position_now().value()
        first, *others = self._before_draws
        has_ended = self._over or (self._ends_after_redraws and bool(self._redraws))
        ahead = [*(each.now for each in others), *self._generator_states()]
        return first._replace(ahead=ahead, has_ended=has_ended).value()

    def _generator_states(self) -> list[dict[str, Any] | rng.Recorded]:
        """Return the generator states of each remaining redraw, and last the current ones."""
        now = self.generators.record_all() if self._restore_at_fetch is None else self._restore_at_fetch
        if not self._redraws:
            return [now]
        *others, last = self._redraws
        return [now, *others, {**last, "global": rng.capture()}]

    def _position_now(self) -> Position:
        """Return the position, to be encoded later. Later draws do not change it: its contents are immutable,
        or the source replaces them and never modifies them."""
        # `_parts` first: the state_dict of a loader may draw.
        over, parts = self._parts()
        now, *ahead = self._generator_states()
        made_of = self._made_of if self._share is None else {**self._made_of, "share": self._share}
        return Position(
            kind=self.kind,
            epoch=self._epoch,
            batches_taken=self.batches_taken,
            over=over,
            length=self._length,
            made_of=made_of,
            start=None if over else self._start,
            first=None if over else self._first_states,
            parts=parts,
            now=now,
            ahead=ahead,
            has_ended=self._ends_after_redraws and bool(self._redraws),
        )

    def close(self) -> None:
        """End the worker processes; the user's loader stays unchanged."""
        self._iterator = None

    def make_iterator(self) -> None:
        """Create the iterator of a new epoch now, as `iter(loader)` does; this may draw random numbers.
        Otherwise the first fetch creates it."""
        self._make_iterator()
        self._is_made_early = self.batches_taken == 0

    def _make_iterator(self) -> Iterator[Any]:
        if self._iterator is None:
            self._start = self.generators.capture_all()
            self._iterator = self._open()
        return self._iterator

    def _fetch(self) -> Any:
        if self._is_made_early:
            self._is_made_early, self._first_states = False, self.generators.capture_all()
        iterator = self._make_iterator()
        batch = next(iterator)
        if self._unpacks:
            batch = self._unpack(batch)
        self.batches_taken += 1
        return batch

    def _enter(self, epoch: int) -> None:
        self._epoch, self.batches_taken, self._over, self._broken = epoch, 0, False, False
        self._start = self._first_states = self._restore_at_fetch = None
        self._is_made_early = False
        self._before_draws.clear()
        self._redraws.clear()
        self._ends_after_redraws = False
        if self._trained is not None:
            self._trained = 0
        self._length, self._made_of = length_of(self._loader), made_of(self._loader)
        if self._sets_epoch:
            set_epoch(self._loader, epoch)
        self._share = share_of(self._loader, self.generators)

    def _carry(self, position: Position, epoch: int, leave: frozenset[str]) -> None:
        # Other loops may have run since the position was taken: keep the global generators.
        global_states, own = rng.capture(), self.generators.capture()
        try:
            if self._live_loader(position).keeps(position):
                self._resume(position, carried=True)
                self._leave()
            else:
                self._ignore_state(position)
        finally:
            rng.restore(global_states)
        then = position.boundary["own"]
        carried = {path: own[path] if path in leave else state for path, state in then.items()}
        self.generators.restore({**own, **carried})
        self._enter(epoch)

    def _resume(self, position: Position, *, carried: bool) -> None:
        """Set this source to `position`. `carried`: only to continue in a later epoch."""
        if position.epoch is not None:
            self._enter(position.epoch)
        self.batches_taken, self._over = position.batches_taken, position.over
        is_open = position.start is not None and not position.over
        then, here = Share.read(position.made_of.get("share")), self._live_loader(position)
        if is_open and not carried:
            self._share, is_divided_again = here.continue_from(position)
            if is_divided_again:
                return self._divide_again(position)
        elif then is not None and self._share is not None and then.batches and then.divides_as(self._share):
            self._share = then
        if self._share is not None and self._share.batches:
            self._length = self._share.all_batches
        elif position.over and self._length is not None and not here.keeps(position):
            self._length = position.batches_taken  # the epoch ended on another layout of ranks
        self._check(position)
        if not (is_open or carried or here.keeps(position)):
            return self._ignore_state(position)
        self._load(position, carried=carried)
        if is_open and (self._keeps_workers() or not carried):
            self._start, self._first_states = position.start, position.first
            self._reopen(position)
            self._is_made_early = position.batches_taken == 0
        return None

    def _divide_again(self, position: Position) -> None:
        """Continue with this rank's share of the remaining samples: the loader begins with the generator
        states of the boundary."""
        share, taken = self._share, position.batches_taken
        assert share is not None
        assert share.order is not None
        assert position.start is not None
        early, seeded = position.first is not None, position.parts["seeded_before"]
        order = share.order.settled(position.first or position.start, base_seed=not (early or seeded))
        share = self._share = replace(share, order=order)
        self._length = taken if is_at_end(position) else share.all_batches
        log.info(
            "epoch %s continues after %d of its %d samples; the rest is divided among %d data-parallel "
            "ranks, %d batches each.",
            position.epoch, share.samples, order.length, share.ranks, self._length - taken,
        )  # fmt: skip
        self._over = self._length <= taken
        if not self._over:
            self._start = position.now
            self._reopen(position._replace(start=position.now, first=None))

    def _live_loader(self, position: Position) -> LiveLoader:
        name, share = type(self._loader).__name__, self._share
        return LiveLoader(name, share, self.divides, self._is_global(position))

    def _is_global(self, position: Position) -> bool:
        return says_global(self._loader)

    def _ignore_state(self, position: Position) -> None:
        """Ignore the state in a position of another rank: the next epoch begins without it."""

    def _check(self, position: Position) -> None:
        then, now = position.made_of, self._made_of
        changed = [f"{n} is {now[n]} and was {then[n]}" for n in then if n in now and then[n] != now[n]]
        # The length of an epoch that was divided among other ranks in the middle is not comparable.
        as_ever = _batches_before(Share.read(then.get("share"))) == _batches_before(self._share)
        if as_ever and position.length != self._length and None not in (position.length, self._length):
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
        """Return the iterator of a new epoch."""
        raise NotImplementedError

    def _reopen(self, position: Position) -> None:
        """Set the iterator so that its next batch is the one after `position`."""
        raise NotImplementedError

    def _before_first(self, position: Position) -> None:
        """In `_reopen`, between the creation of the iterator and the first redraw: restore `first`."""
        if position.first is not None:
            self.generators.restore_all(position.first)

    def _unpack(self, item: Any) -> Any:
        """Return the batch of an item of the iterator."""
        raise NotImplementedError

    def _check_generators(self) -> None:
        """Warn, after the first batch, of generators that did not exist before it."""

    def _leave(self, *, ended: bool = False) -> None:
        """End the epoch. `ended`: the iterator has just raised StopIteration."""
        self._iterator = None

    def _keeps_workers(self) -> bool:
        """Whether worker processes of an epoch continue in the next one."""
        return False

    def _load(self, position: Position, *, carried: bool) -> None:
        """Load the result of `_parts`. `carried`: to continue in a later epoch."""

    def _parts(self) -> tuple[bool, dict[str, Any]]:
        """Return whether certainly no batch follows, and the `Position.parts` of this kind of source."""
        return self._over, {}


def _batches_before(share: Share | None) -> int:
    return 0 if share is None else share.batches


def digest_of(value: object) -> str:
    """Return a digest of a value."""
    return hashlib.blake2b(encode_json(value), digest_size=8).hexdigest()


class IdentityMap:
    """A map from the user's objects, by identity, to values. Holds weak references where the object supports
    them. Never changes, compares or hashes the objects."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Callable[[], Any], Any]] = {}

    def get(self, about: object, default: Any = None) -> Any:
        reference, value = self._values.get(id(about), (None, default))
        return value if reference is not None and reference() is about else default

    def set(self, about: object, value: Any) -> None:
        key = id(about)
        self._values[key] = reference_to(about, lambda: self._values.pop(key, None)), value


def reference_to(value: object, on_death: Callable[[], object] | None = None) -> Callable[[], Any]:
    """Return a function that returns the object, or None after its death: a weak reference, or a strong one
    if the object does not support weak references."""
    try:
        return weakref.ref(value, None if on_death is None else lambda _: on_death())
    except TypeError:
        return lambda: value


# Iterables without state


_LOG_EVERY_S = 5.0
# A replay of these is free and exact, so it is not logged. Exact types only, since a subclass may differ.
_FREE_TO_REPLAY = (range, list, tuple, deque, itertools.count, itertools.repeat)
# Iterators that are their own `iter()` and were already drawn from: they cannot start again.
_used_iterators = IdentityMap()


class ReplayedSource(Source):
    """An iterable without state of its own. A resume draws the epoch's batches again and drops them, and logs
    its progress. Exact if the iterable returns the same batches again.

    The kind of its positions is "replayed". `clock` returns seconds."""

    kind = "replayed"
    parts = frozenset({"keeps_workers"})

    def __init__(self, loader: Any, clock: Callable[[], float] = time.monotonic) -> None:
        # A DataLoader holds its persistent workers, so a copy gets its own.
        own = copy.copy(loader) if isinstance(loader, DataLoader) else loader
        if own is not loader:
            vars(own)["_iterator"] = None
        super().__init__(own, rng.Generators({"loader": loader}))
        self._clock = clock
        self._has_workers = False

    def _is_global(self, position: Position) -> bool:
        is_same = type(self._loader) in _FREE_TO_REPLAY and position.length == self._length
        return is_same or super()._is_global(position)

    def _iterate(self) -> tuple[Iterator[Any], bool]:
        """Return an iterator, and whether batches were drawn from it before."""
        iterator = iterator_of(self._loader, self.generators, had_workers=self._has_workers)
        self._has_workers = keeps_workers(self._loader)
        if iterator is not self._loader:
            return iterator, False
        used = bool(_used_iterators.get(iterator))
        _used_iterators.set(iterator, True)
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
        assert position.start is not None
        total, is_free = position.batches_taken, type(self._loader) in _FREE_TO_REPLAY
        self.generators.restore_all(position.start)
        iterator, used = self._iterate()
        if used:
            raise BoundaryError(
                f"The loop continues after batch {total} of an iterator ({type(iterator).__name__}) from "
                "which this process has already drawn: to drop that many more would lose batches. The model "
                "and the rest of the state were restored; no batch was drawn. Make a new iterator, or pass "
                "an iterable that starts again at each iter()."
            )
        self._iterator = iterator
        self._before_first(position)
        if not is_free:
            log.warning(
                "%s has no state, so %d batches of epoch %d are drawn again and dropped. Not exact if it "
                "draws random numbers batch by batch. Give it state_dict and load_state_dict to resume "
                "without replay.",
                type(self._loader).__name__, total, position.epoch,
            )  # fmt: skip
        draw_again(iterator, total, self._clock, log_every_s=math.inf if is_free else _LOG_EVERY_S)

    def _load(self, position: Position, *, carried: bool) -> None:
        self._has_workers = position.parts["keeps_workers"] is True

    def _parts(self) -> tuple[bool, dict[str, Any]]:
        return self._over, {"keeps_workers": self._has_workers}


def draw_again(
    iterator: Iterator[Any],
    batches: int,
    clock: Callable[[], float] = time.monotonic,
    *,
    log_every_s: float = _LOG_EVERY_S,
) -> None:
    """Draw and drop the first batches of an epoch. Raises MismatchError if there are fewer."""
    due_s = clock() + log_every_s
    for done in range(batches):
        if clock() >= due_s:
            due_s += log_every_s
            log.info("%d of %d batches drawn again.", done, batches)
        try:
            next(iterator)
        except StopIteration:
            raise MismatchError(
                f"{type(iterator).__name__} ended after {done} batches, and the checkpoint was taken "
                f"after {batches}. The model and the rest of the state were restored; the loop was not "
                "started. Pass the data with which the run began.",
                differences=(("batches of the loader", str(batches), str(done)),),
            ) from None


def keeps_workers(loader: Any) -> bool:
    """Whether a loader's workers persist across epochs."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


def iterator_of(loader: Any, generators: rng.Generators, *, had_workers: bool) -> Iterator[Any]:
    """Return `iter(loader)`. had_workers: the run seeded its persistent workers in an earlier epoch. If this
    process has none yet, start them first and undo the draw of their seed."""
    if had_workers and keeps_workers(loader) and loader._iterator is None:
        before = generators.capture_all()
        iter(loader)
        generators.restore_all(before)
    return iter(loader)


# Samplers


# The epoch set last, by sampler, because loaders that are created for each epoch may share a sampler.
_epochs_set = IdentityMap()
_SET_BY_PROGRAM = object()


def samplers_of(loader: Any) -> dict[str, object]:
    """Return path -> sampler of a loader's distinct samplers; empty for other objects than DataLoaders."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = {
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
    }
    first = {id(sampler): path for path, sampler in reversed(found.items())}
    return {path: found[path] for path in first.values() if found[path] is not None}


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the samplers that shuffle by epoch (DistributedSampler and similar ones).

    Leaves a sampler alone whose `epoch` is neither the initial 0 nor the one set here: the program sets it.
    """
    for sampler in samplers_of(loader).values():
        method = getattr(sampler, "set_epoch", None)
        last = _epochs_set.get(sampler, 0)
        if not callable(method) or last is _SET_BY_PROGRAM:
            continue
        if getattr(sampler, "epoch", None) not in (None, last):
            log.info("The program calls %s.set_epoch itself; flashckpt does not.", type(sampler).__name__)
            _epochs_set.set(sampler, _SET_BY_PROGRAM)
            continue
        method(epoch)
        _epochs_set.set(sampler, getattr(sampler, "epoch", None))


def made_of(loader: Any) -> dict[str, Any]:
    """Return the settings that determine, with the random numbers, the batches of a DataLoader; {} for other
    loaders."""
    if not isinstance(loader, DataLoader):
        return {}
    size: Any = loader.batch_size
    if size is None:
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
