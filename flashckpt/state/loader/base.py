"""What all kinds of sources share: the order of events in an epoch, and when its position is saved and
taken up; and the simplest kind, which draws again what was drawn.

Owns the place where random numbers are put back: just before the batch at which the run was cut is fetched.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from flashckpt.errors import BoundaryError, MismatchError
from flashckpt.format.typed import check_roundtrip, encode_json
from flashckpt.state import rng
from flashckpt.state.loader.position import Position, Share, is_at_end
from flashckpt.state.loader.share import LiveLoader, says_global, share_of

log = logging.getLogger(__name__)


Numbers = dict[str, Any] | rng.Recorded


class Record(NamedTuple):
    """A position (`Position` says what its parts are) before it is encoded. Later draws do not change it: all
    that it holds is immutable, or is replaced by its source and never written into."""

    kind: str
    epoch: int | None
    batches_taken: int
    over: bool
    length: int | None
    made_of: dict[str, Any]
    share: Share | None
    start: dict[str, Any] | None
    first: dict[str, Any] | None
    parts: dict[str, Any]
    now: Numbers
    ahead: list[Numbers]
    has_ended: bool

    def value(self) -> dict[str, Any]:
        """Plain values, for `Position.read`."""
        value = self._asdict()
        share = value.pop("share")
        if share is not None:
            value["made_of"] = {**self.made_of, "share": share.value()}
        return {**value, "now": _packed(self.now), "ahead": [_packed(each) for each in self.ahead]}


def _packed(marks: Numbers) -> dict[str, Any]:
    return marks.value() if isinstance(marks, rng.Recorded) else marks


class Source:
    """A loader whose position can be saved at every boundary and taken up again. Nothing is drawn before the
    first `next` of a fresh epoch, so a position at an epoch's start needs no more than the random numbers of
    that boundary. Subclasses fill in the hooks at the end.

    batches_taken: of this epoch, those of earlier attempts included. was_over: whether it was taken up where
    it had given its last batch. generators: those that the loader's parts own. convert: what a wrapper of the
    loader does to each batch.
    """

    kind = ""
    parts: frozenset[str] = frozenset()  # the names of what `_parts` gives
    divides = False  # can go on with any order of samples

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
        # The iterator was made before the first batch is asked for (`make_iterator`); others may draw from
        # the same generators in between. `_opening`: those of the moment before that batch.
        self._is_made_early = False
        self._opening: dict[str, Any] | None = None
        self._due: dict[str, Any] | None = None
        self._length = length_of(loader)
        self._made_of = made_of(loader)
        self._share = share_of(loader, generators)
        self._tell_epoch = True
        self.was_over = self._can_be_saved = False
        self.convert: Callable[[Any], Any] | None = None
        # Where batches are drawn before the one in hand is trained on (`count_trained`): how many were
        # trained on, the positions before the newest draws, and the random numbers of those that are to be
        # drawn again.
        self._trained: int | None = None
        self._before_draws: deque[Record] = deque()
        self._redraws: deque[dict[str, Any]] = deque()
        self._ends_after_redraws = False

    def __len__(self) -> int:
        """Batches of a whole epoch; TypeError where the loader does not know."""
        if self._length is None:
            raise TypeError(f"{type(self._loader).__name__} does not know its number of batches")
        return self._length

    def check(self) -> None:
        """Raise StateError where the state is known before the first draw and cannot be saved exactly."""

    def has_lost_workers(self) -> bool:
        """Whether a worker process has ended before its time."""
        # `_workers` are torch's processes; other loaders have none that could be known.
        workers = getattr(self._iterator, "_workers", None)
        return isinstance(workers, list) and any(not worker.is_alive() for worker in workers)

    def begin(
        self,
        epoch: int,
        resume: Mapping[str, Any] | None = None,
        *,
        carry: bool = False,
        leave: frozenset[str] = frozenset(),
        tell_epoch: bool = True,
        beside: bool = False,
    ) -> None:
        """Enter an epoch at its start, or where `resume` (a position) was taken.

        A position of the same epoch puts the global random numbers back, here and again just before the
        next batch is fetched. One of an earlier epoch is carried into `epoch`, which starts afresh: the
        loader's own generators and workers are put back, the global random numbers are left alone.

        carry: the same for a position of this epoch, which an earlier phase has left. leave: paths of own
        generators that are not carried. tell_epoch: samplers with `set_epoch` are told `epoch`. beside:
        another source has drawn since the resume, in lockstep with this one: the global numbers are as it
        left them.
        """
        self._tell_epoch, self.was_over = tell_epoch, False
        if resume is None:
            self._leave()
            return self._enter(epoch)
        position = Position.read(resume, self.kind, self.parts)
        self.close()
        if carry or position.epoch != epoch:
            return self._carry(position, epoch, leave)
        around = rng.capture() if beside else position.boundary["global"]
        self._take_up(position, carried=False)
        self.was_over = self._over
        if self._trained is not None:
            self._trained = self.batches_taken
        self._redraws.extend(position.ahead)
        self._ends_after_redraws = position.has_ended
        self.generators.restore(position.now["own"])
        rng.restore(around)
        if position.ahead or not beside:
            self._due = position.now
        return None

    def next(self) -> Any:
        """The next batch. Raises StopIteration at the epoch's end, and StateError with the first batch where
        the position cannot be saved exactly."""
        if self._broken:
            raise BoundaryError(
                f"The loader failed while it fetched batch {self.batches_taken} of this epoch, so where it "
                "stands is not known. Snapshots taken before are whole. Start the loop again to go on from "
                "them."
            )
        # The loop may have trained since the batch before this one was drawn again.
        around = rng.capture() if self._redraws else {}
        if self._due is not None:
            # Again, as the last thing before the fetch: what was drawn since `begin` is no part of the run.
            due, self._due = self._due, None
            self.generators.restore_all(due)
        if self._over:
            raise StopIteration
        try:
            before = None if self._trained is None else self._record_now()
            batch = self._fetch()
            if before is not None:
                self._before_draws.append(before)
            if self._redraws:
                self._redrawn(around)
            if not self._can_be_saved:
                # Now, and not at the boundary: nobody has trained on anything yet.
                check_roundtrip(self.position(), "loader")
                self._can_be_saved = True
            return batch if self.convert is None else self.convert(batch)
        except StopIteration:
            self._over = True
            self._leave(ended=True)
            if self._redraws:  # other ranks have divided the rest: this one has no batch to draw again
                self.generators.restore_all({**self._redraws[-1], "global": around})
                self._redraws.clear()
                self.was_over = self._ends_after_redraws
            raise
        except BaseException:
            self._broken = True
            raise

    def skip(self, batches: int) -> None:
        """Pass over the first batches of an epoch that has just begun: draw and drop them, unless this kind
        of source can do without. Raises MismatchError where the loader has fewer."""
        for number in range(batches):
            try:
                self.next()
            except StopIteration:
                raise self._too_few(number, batches) from None

    def _too_few(self, found: int, skipped: int) -> MismatchError:
        return MismatchError(
            f"The loader ended after {found} batches, and the run begins after {skipped} of them. "
            "The state was loaded; no batch was trained on. Pass the data that the run was begun with.",
            differences=(("batches of the loader", str(skipped), str(found)),),
        )

    def count_trained(self, batches: int = 0) -> None:
        """So many batches of this epoch were trained on: those drawn after them are drawn ahead. Called
        before the first draw, and at each boundary; a source for which it is never called draws none
        ahead."""
        self._trained = min(batches, self.batches_taken)
        while len(self._before_draws) > self.batches_taken - self._trained:
            self._before_draws.popleft()

    def leave_ahead(self) -> None:
        """The epoch is over, or was left: batches that were drawn ahead are not drawn again."""
        if self._trained is not None:
            self.count_trained(self.batches_taken)

    @property
    def redraws(self) -> bool:
        """Whether the next batch is one that was drawn ahead before the run was saved."""
        return bool(self._redraws)

    def _redrawn(self, around: rng.State) -> None:
        """A batch was drawn again under its own random numbers: set the global ones of before, and the
        loader's own of the next such draw, or after the last of them those of the boundary."""
        states = self._redraws.popleft()
        if not self._redraws and self._ends_after_redraws:
            self._end_again()
        self.generators.restore_all({**states, "global": around})
        self._due = states if self._redraws else None

    def _end_again(self) -> None:
        """Bring the iterator to its end, which the run had reached before it was saved."""
        try:
            self._fetch()
        except StopIteration:
            self._over = self.was_over = True
            self._leave(ended=True)
            return
        raise MismatchError(
            f"{type(self._loader).__name__} gives more than the {self.batches_taken - 1} batches after "
            "which it ended when the checkpoint was taken. The state was loaded; no batch was trained on. "
            "Pass the data that the run was begun with."
        )

    def position(self) -> dict[str, Any]:
        """Where the loader stands, for `Position` to read. For boundaries: between two calls of `next`."""
        return self.record().value()

    def record(self) -> Record:
        """The same, encoded only when its value is asked for."""
        if not self._before_draws:
            return self._record_now()
        first, *others = self._before_draws
        has_ended = self._over or (self._ends_after_redraws and bool(self._redraws))
        return first._replace(ahead=[*(each.now for each in others), *self._numbers()], has_ended=has_ended)

    def _numbers(self) -> list[Numbers]:
        """Those of each batch that is still to be drawn again, and last those of now."""
        now = self.generators.record_all() if self._due is None else self._due
        if not self._redraws:
            return [now]
        *others, last = self._redraws
        return [now, *others, {**last, "global": rng.capture()}]

    def _record_now(self) -> Record:
        # First: a loader that is asked for its state may draw.
        over, parts = self._parts()
        now, *ahead = self._numbers()
        return Record(
            kind=self.kind,
            epoch=self._epoch,
            batches_taken=self.batches_taken,
            over=over,
            length=self._length,
            made_of=self._made_of,
            share=self._share,
            start=None if over else self._start,
            first=None if over else self._opening,
            parts=parts,
            now=now,
            ahead=ahead,
            has_ended=self._ends_after_redraws and bool(self._redraws),
        )

    def close(self) -> None:
        """End the worker processes; the user's loader stays as it is."""
        self._iterator = None

    def make_iterator(self) -> None:
        """Make the iterator of an epoch that begins now, as `iter(loader)` does: it may draw random numbers.
        Else the first batch's fetch makes it."""
        self._make_iterator()
        self._is_made_early = self.batches_taken == 0

    def _make_iterator(self) -> Iterator[Any]:
        if self._iterator is None:
            self._start = self.generators.capture_all()
            self._iterator = self._open()
        return self._iterator

    def _fetch(self) -> Any:
        if self._is_made_early:
            self._is_made_early, self._opening = False, self.generators.capture_all()
        iterator = self._make_iterator()
        batch = next(iterator)
        if self._unpacks:
            batch = self._unpack(batch)
        self.batches_taken += 1
        return batch

    def _enter(self, epoch: int) -> None:
        self._epoch, self.batches_taken, self._over, self._broken = epoch, 0, False, False
        self._start = self._opening = self._due = None
        self._is_made_early = False
        self._before_draws.clear()
        self._redraws.clear()
        self._ends_after_redraws = False
        if self._trained is not None:
            self._trained = 0
        self._length, self._made_of = length_of(self._loader), made_of(self._loader)
        if self._tell_epoch:
            set_epoch(self._loader, epoch)
        self._share = share_of(self._loader, self.generators)

    def _carry(self, position: Position, epoch: int, leave: frozenset[str]) -> None:
        # Other loops may have run since the position was taken: the global numbers are theirs.
        around, own = rng.capture(), self.generators.capture()
        try:
            if self._here(position).keeps(position):
                self._take_up(position, carried=True)
                self._leave()
            else:
                self._leave_out(position)
        finally:
            rng.restore(around)
        then = position.boundary["own"]
        carried = {path: own[path] if path in leave else state for path, state in then.items()}
        self.generators.restore({**own, **carried})
        self._enter(epoch)

    def _take_up(self, position: Position, *, carried: bool) -> None:
        """Stand where `position` was taken. `carried`: only to go on into a later epoch."""
        if position.epoch is not None:
            self._enter(position.epoch)
        self.batches_taken, self._over = position.batches_taken, position.over
        is_open = position.start is not None and not position.over
        then, here = Share.read(position.made_of.get("share")), self._here(position)
        if is_open and not carried:
            self._share, anew = here.goes_on(position)
            if anew:
                return self._divide_anew(position)
        elif then is not None and self._share is not None and then.batches and then.divides_as(self._share):
            self._share = then
        if self._share is not None and self._share.batches:
            self._length = self._share.all_batches
        elif position.over and self._length is not None and not here.keeps(position):
            self._length = position.batches_taken  # other ranks have ended the epoch
        self._check(position)
        if not (is_open or carried or here.keeps(position)):
            return self._leave_out(position)
        self._load(position, carried=carried)
        if is_open and (self._keeps_workers() or not carried):
            self._start, self._opening = position.start, position.first
            self._reopen(position)
            self._is_made_early = position.batches_taken == 0
        return None

    def _divide_anew(self, position: Position) -> None:
        """Go on with this rank's share of what others have left of the epoch: a loader that begins now, with
        the random numbers of now."""
        share, taken = self._share, position.batches_taken
        assert share is not None
        assert share.order is not None
        assert position.start is not None
        early, seeded = position.first is not None, position.parts["seeded_before"]
        order = share.order.settled(position.first or position.start, base_seed=not (early or seeded))
        share = self._share = replace(share, order=order)
        self._length = taken if is_at_end(position) else share.all_batches
        log.info(
            "epoch %s goes on: %d of its %d samples were given before, and what is left is divided among %d "
            "data-parallel ranks, %d batches each.",
            position.epoch, share.samples, order.length, share.ranks, self._length - taken,
        )  # fmt: skip
        self._over = self._length <= taken
        if not self._over:
            self._start = position.now
            self._reopen(replace(position, start=position.now, first=None))

    def _here(self, position: Position) -> LiveLoader:
        name, share = type(self._loader).__name__, self._share
        return LiveLoader(name, share, self.divides, self._is_global(position))

    def _is_global(self, position: Position) -> bool:
        return says_global(self._loader)

    def _leave_out(self, position: Position) -> None:
        """What a position keeps is another rank's: the epoch to come begins without it."""

    def _check(self, position: Position) -> None:
        then, now = position.made_of, self._made_of
        changed = [f"{n} is {now[n]} and was {then[n]}" for n in then if n in now and then[n] != now[n]]
        # Of an epoch that ranks have divided anew, the length is its own.
        as_ever = _batches_before(Share.read(then.get("share"))) == _batches_before(self._share)
        if as_ever and position.length != self._length and None not in (position.length, self._length):
            changed.insert(0, f"it has {self._length} batches an epoch and had {position.length}")
        if changed:
            log.warning(
                "Not exact: the loader is not what it was when the checkpoint was taken (%s). It goes on "
                "after %d batches, but those to come are not those of a run that was never stopped.",
                ", ".join(changed), position.batches_taken,
            )  # fmt: skip
        strangers = self.generators.strangers(position.now["own"])
        if strangers:
            log.warning("Not exact: these generators are only in the checkpoint or only here: %s", strangers)

    def _open(self) -> Iterator[Any]:
        """The iterator of a fresh epoch."""
        raise NotImplementedError

    def _reopen(self, position: Position) -> None:
        """Set the iterator so that its next batch is the one after `position`."""
        raise NotImplementedError

    def _before_first(self, position: Position) -> None:
        """In `_reopen`: the iterator is made, and its first batch is to be drawn again."""
        if position.first is not None:
            self.generators.restore_all(position.first)

    def _unpack(self, item: Any) -> Any:
        """The batch in what the iterator gave."""
        raise NotImplementedError

    def _leave(self, *, ended: bool = False) -> None:
        """The epoch is left. `ended`: the iterator has just raised StopIteration."""
        self._iterator = None

    def _keeps_workers(self) -> bool:
        """Whether something of an epoch lives on in the next one."""
        return False

    def _load(self, position: Position, *, carried: bool) -> None:
        """Take what `_parts` gave. `carried`: to go on into a later epoch."""

    def _parts(self) -> tuple[bool, dict[str, Any]]:
        """Whether it is certain that no batch follows, and what this kind of source needs in a position."""
        return self._over, {}


def _batches_before(share: Share | None) -> int:
    return 0 if share is None else share.batches


def mark_of(value: object) -> str:
    """A short mark, the same for the same value."""
    return hashlib.blake2b(encode_json(value), digest_size=8).hexdigest()


class Notes:
    """Notes about the user's objects, which must not be written into: one for each, by identity, that keeps
    nothing alive but what has no weak references. Never compares or hashes them."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[Callable[[], Any], Any]] = {}

    def get(self, about: object, default: Any = None) -> Any:
        reference, note = self._notes.get(id(about), (None, default))
        return note if reference is not None and reference() is about else default

    def set(self, about: object, note: Any) -> None:
        key = id(about)
        self._notes[key] = reference_to(about, lambda: self._notes.pop(key, None)), note


def reference_to(value: object, on_death: Callable[[], object] | None = None) -> Callable[[], Any]:
    """Called, gives the object, or None once it is gone; a strong reference where no weak one can be made."""
    try:
        return weakref.ref(value, None if on_death is None else lambda _: on_death())
    except TypeError:
        return lambda: value


# What keeps no state


_SECONDS_BETWEEN_LINES = 5.0
# Drawing again costs nothing and gives the same: no news. Exact types, since a subclass may do anything.
_AT_HAND = (range, list, tuple, deque, itertools.count, itertools.repeat)
# Iterators that are their own `iter()`, and were drawn from here: they cannot begin again.
_drawn_from = Notes()


class ReplayedSource(Source):
    """An iterable without a state of its own: taken up by drawing again, from the epoch's start, what was
    drawn, which it says once, with its progress. Exact where the iterable gives the same batches again.

    `kind` of its positions is "replayed". `clock` gives seconds."""

    kind = "replayed"

    def __init__(self, loader: Any, clock: Callable[[], float] = time.monotonic) -> None:
        # A DataLoader keeps its persistent workers: a copy has its own.
        own = copy.copy(loader) if isinstance(loader, DataLoader) else loader
        if own is not loader:
            vars(own)["_iterator"] = None
        super().__init__(own, rng.Generators({"loader": loader}))
        self._clock = clock

    def _is_global(self, position: Position) -> bool:
        is_same = type(self._loader) in _AT_HAND and position.length == self._length
        return is_same or super()._is_global(position)

    def _iterate(self) -> tuple[Iterator[Any], bool]:
        """An iterator, and whether batches were drawn from it before."""
        iterator: Iterator[Any] = iter(self._loader)
        if iterator is not self._loader:
            return iterator, False
        used = bool(_drawn_from.get(iterator))
        _drawn_from.set(iterator, True)
        return iterator, used

    def _open(self) -> Iterator[Any]:
        iterator, used = self._iterate()
        if used:
            log.warning(
                "%s can be gone through once, and batches were drawn from it before: this epoch has only "
                "what is left of it, so a run of more epochs or steps ends early. Pass an iterable that "
                "begins anew at each iter(), such as a DataLoader or a list.",
                type(iterator).__name__,
            )
        return iterator

    def _reopen(self, position: Position) -> None:
        assert position.start is not None
        total, at_hand = position.batches_taken, type(self._loader) in _AT_HAND
        self.generators.restore_all(position.start)
        iterator, used = self._iterate()
        if used:
            raise BoundaryError(
                f"The loop goes on after batch {total} of an iterator ({type(iterator).__name__}) from which "
                "this process has already drawn: dropping that many more would lose batches. The model and "
                "the rest of the state were put back; no batch was drawn. Make a new iterator, or pass an "
                "iterable that begins anew at each iter()."
            )
        self._iterator = iterator
        self._before_first(position)
        if not at_hand:
            log.warning(
                "%s keeps no state, so %d batches of epoch %d are drawn again and dropped. Not exact if it "
                "draws random numbers batch by batch. Give it state_dict and load_state_dict to go on at "
                "once.",
                type(self._loader).__name__, total, position.epoch,
            )  # fmt: skip
        due = self._clock() + _SECONDS_BETWEEN_LINES
        for done in range(total):
            if not at_hand and self._clock() >= due:
                due += _SECONDS_BETWEEN_LINES
                log.info("%d of %d batches drawn again.", done, total)
            try:
                next(iterator)
            except StopIteration:
                raise MismatchError(
                    f"{type(iterator).__name__} ended after {done} batches, and the checkpoint was taken "
                    f"after {total}: it does not give what it gave. The model and the rest of the state were "
                    "put back; the loop was not begun. Pass the data that the run was begun with.",
                    differences=(("batches of the loader", str(total), str(done)),),
                ) from None


# Samplers


# By sampler, not by loader: loaders that are made anew for each epoch may share one.
_told = Notes()
_BY_PROGRAM = object()


def samplers_of(loader: Any) -> dict[str, object]:
    """The distinct samplers under their paths; empty for what is not built like a DataLoader."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = {
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
    }
    first = {id(sampler): path for path, sampler in reversed(found.items())}
    return {path: found[path] for path in first.values() if found[path] is not None}


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers that shuffle by epoch (DistributedSampler and the like) which one it is.

    One whose `epoch` is neither the 0 it was made with nor what it was told here is told by the program
    itself, and left alone.
    """
    for sampler in samplers_of(loader).values():
        tell = getattr(sampler, "set_epoch", None)
        told = _told.get(sampler, 0)
        if not callable(tell) or told is _BY_PROGRAM:
            continue
        if getattr(sampler, "epoch", None) not in (None, told):
            log.info("%s.set_epoch is called by the program, and left to it.", type(sampler).__name__)
            _told.set(sampler, _BY_PROGRAM)
            continue
        tell(epoch)
        _told.set(sampler, getattr(sampler, "epoch", None))


def made_of(loader: Any) -> dict[str, Any]:
    """What decides, beside random numbers, which items a DataLoader's batches hold; empty for others."""
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
    """None for what does not know its length."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
