"""The cache of this node: sealed slots are copied into it, adopted from it after a restart, and removed.

Owns the worker that touches the disk, and the choice of what is removed. A cache that cannot be used is
passed by: then snapshots are persisted from memory. Never reports a snapshot as persisted.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from flashckpt import _native
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.memory.cache_folder import CacheFolder, CachePlace, LockedError, num_bytes_of
from flashckpt.memory.held_regions import HeldRegion, Regions
from flashckpt.memory.region import rank_of
from flashckpt.memory.slot import Sealed, Slot, newest_complete
from flashckpt.persist.job import Retry, SealedSnapshot
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.store.base import Store
from flashckpt.threads import Worker

log = logging.getLogger(__name__)

_STALL_TIMEOUT_S = 30.0  # a disk without progress for so long hangs: snapshots are persisted from memory
_ADOPTION_TIMEOUT_S = 20.0  # a start waits so long for the cache, which is adopted later all the same
_SCAN_INTERVAL_S = 1.0
_LOCK_PAUSE_S = 0.2
_MAX_SLOTS = 256  # each has two descriptors open
_UNREQUESTED_KEPT = 3  # snapshots of a rank that the home does not get: not requested there, or failed
_MAX_TEXT = 400


@dataclass
class _Adopted:
    """`unread`: the ranks of files that could not be opened, and stay."""

    folder: CacheFolder
    slots: list[Slot] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unread: set[int] = field(default_factory=set)


@dataclass
class _Copied:
    """`removed`: files that made space for the copies, and are gone whether or not the copies succeeded."""

    removed: list[str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    error: Exception | None = None


class SlotCache:
    """`identity` is the run's name on this node; `count` receives the name of each event and a number. For
    one thread, but for its worker."""

    def __init__(
        self,
        store: Store,
        identity: str,
        regions: Regions,
        ledger: Ledger,
        wake: int,
        count: Callable[[str, int], None],
    ) -> None:
        self._store, self._identity, self._regions, self._ledger = store, identity, regions, ledger
        self._count = count
        self.worker = Worker("cache", wake)
        self.on_adopted: Callable[[], None] = lambda: None
        self._place: CachePlace | None = None
        self._folder: CacheFolder | None = None
        self._retry = Retry()
        self._error, self._is_full = "", False
        self._progress = array("Q", [0])
        self._progressed = 0.0, 0  # when the worker last made progress, and the word then
        self._adopting_since: float | None = None
        self._scanned_at = 0.0
        self._has_stalled = False
        self._to_remove: list[str] = []
        self._to_mark: dict[str, int] = {}
        self._unread: set[int] = set()  # ranks with a slot that could not be opened

    # ---- state

    def set_place(self, place: CachePlace | None) -> None:
        """Copy snapshots to this place from now on; None: to none. Snapshots in the previous cache go home
        first."""
        if place == self._place:
            return
        self._place = place
        self._retry = Retry()
        if place is not None and not self._is_open_at(place) and not self._requested():
            self._adopting_since = time.monotonic()

    @property
    def is_adopting(self) -> bool:
        """Whether a start is to wait until the contents of the cache are known."""
        since = self._adopting_since
        return since is not None and time.monotonic() - since < _ADOPTION_TIMEOUT_S

    @property
    def is_usable(self) -> bool:
        """Whether snapshots are copied there before they are persisted."""
        if self._place is None or self._has_stalled:
            return False
        if self._adopting_since is not None:
            return self.is_adopting
        return self._is_open_at(self._place) and self._retry.is_due(time.monotonic())

    @property
    def is_free(self) -> bool:
        """Whether a copy can begin now."""
        return self.is_usable and self._folder is not None and not self.worker.busy

    @property
    def is_busy(self) -> bool:
        """Whether a keeper waits for work there before it leaves."""
        is_untidy = self._folder is not None and bool(self._to_remove or self._to_mark)
        return (self.worker.busy or is_untidy) and not self._has_stalled

    @property
    def path(self) -> str:
        """The run's folder in the cache, or the cache while that is not open; empty without a cache."""
        if self._folder is not None:
            return self._folder.path
        return "" if self._place is None else self._place.path

    @property
    def error(self) -> str:
        """Why the last snapshot passed the cache by."""
        return self._error

    @property
    def num_bytes(self) -> int:
        sealed = [held.sealed() for held in self._regions.all_cached()]
        return sum(num_bytes_of(each) for each in sealed if each is not None)

    def _is_open_at(self, place: CachePlace) -> bool:
        return self._folder is not None and self._folder.base == place.path

    # ---- work

    def next(self, now: float) -> None:
        """Collect the worker's result, and begin the next task other than a copy."""
        self.worker.collect()
        if self.worker.busy:
            self._check_progress(now)
            return
        self._has_stalled = False
        if self._folder is None:
            if self._place is not None and self._retry.is_due(now):
                self._open(self._place)
        elif self._place is not None and not self._is_open_at(self._place) and not self._requested():
            self._close_folder()
            self._adopting_since = now
        elif self._to_remove or self._to_mark or now - self._scanned_at >= _SCAN_INTERVAL_S:
            self._update_files(self._folder, now)

    def _check_progress(self, now: float) -> None:
        if self._progressed[1] != self._progress[0] or not self._progressed[0]:
            self._progressed = now, self._progress[0]
        elif now - self._progressed[0] > _STALL_TIMEOUT_S and not self._has_stalled:
            self._has_stalled = True
            self._adopting_since = None
            self._failed(f"it has done nothing for {_STALL_TIMEOUT_S:.0f} s")

    def _submit(self, run: Callable[[], object], done: Callable[[object], None]) -> None:
        self._progressed = 0.0, self._progress[0]
        self.worker.submit(run, done)

    def _open(self, place: CachePlace) -> None:
        def done(found: object) -> None:
            if isinstance(found, LockedError) and self.is_adopting:
                # The previous keeper may be about to end: a start waits for its cached snapshots.
                self._retry.wait(time.monotonic(), _LOCK_PAUSE_S)
                return
            self._adopting_since = None
            if isinstance(found, _Adopted):
                self._adopt(found)
            else:
                self._failed(str(found))

        self._submit(lambda: self._read_folder(place), done)

    def _read_folder(self, place: CachePlace) -> _Adopted:
        """Runs in the worker."""
        home = self._store.url
        if os.path.isabs(home) and os.stat(home).st_dev == os.stat(place.path).st_dev:
            raise OSError(errno.EXDEV, f"{place.path} is on the same disk as {home}: it would be no faster")
        found = _Adopted(CacheFolder.open(place.path, self._identity))
        try:
            for name in found.folder.names():
                try:
                    found.slots.append(found.folder.slot(name))
                except DamagedError as error:
                    found.problems.append(str(error))
                    found.folder.remove(name)
                except (OSError, FlashckptError) as error:  # its file stays: it may be of another version
                    found.problems.append(f"{name}: {error}")
                    found.unread.add(rank_of(name))
                _native.fetch_add(self._progress_word, 1)
        except BaseException:
            for slot in found.slots:
                slot.close()
            found.folder.close()
            raise
        return found

    def _adopt(self, found: _Adopted) -> None:
        self._folder, self._unread = found.folder, found.unread
        self._retry.succeeded()
        for problem in found.problems:
            log.warning("the cache: %s", problem)
            self._ledger.add(None, Event.ERROR, what="cache", message=problem[:_MAX_TEXT])
        names = []
        for slot in sorted(found.slots, key=lambda slot: not slot.header.holds_constants):
            if self._put(slot) is None:
                self._to_remove.append(slot.name)
            elif not slot.header.holds_constants:
                names.append(slot.name)
        if names:
            self._ledger.add(None, Event.ADOPT, slots=names, kind="cache")
            self.on_adopted()
        self.tidy()

    def _put(self, slot: Slot) -> HeldRegion | None:
        assert self._folder is not None
        if (before := self._regions.cached_named(slot.name)) is not None:
            self._regions.drop_cached(before)  # constants whose file was removed
        return self._regions.put_cached(slot, f"{self._folder.path}/{slot.name}")

    def copy(self, member: SealedSnapshot, done: Callable[[HeldRegion | None], None]) -> None:
        """Copy a pinned snapshot and the constants that it names into the cache. Calls `done` with the cached
        slot, or None if the cache was passed by."""
        folder, pin = self._folder, member.pin
        assert folder is not None
        assert pin is not None
        sealed = member.slot.sealed_or_none()
        has = {held.slot.name for held in self._regions.cached_constants() if held.path}
        constants = [each for each in member.regions if each.name not in has]
        shared = [each for region in constants if (each := region.sealed_or_none()) is not None]
        if sealed is None or len(shared) < len(constants):
            self._failed("the record of a slot in memory, or of its constants, is damaged")
            done(None)
            return
        needed = sum(map(num_bytes_of, [sealed, *shared]))
        limit = None if self._place is None else self._place.limit_bytes
        budget = None if limit is None else limit - self.num_bytes
        evictable = self._evictable(sealed)
        is_full = len(self._regions.cached()) >= _MAX_SLOTS
        began = time.monotonic()

        def run() -> _Copied:
            found = _Copied()
            try:
                _make_space(folder, needed, budget, evictable, found.removed)
                if is_full and not found.removed:
                    raise OSError(errno.ENOSPC, f"it holds {_MAX_SLOTS} snapshots already")
                for each in shared:
                    found.slots.append(folder.copy(each, lambda: True, self._progress_word))
                holds = member.slot.holds
                found.slots.append(folder.copy(sealed, lambda: holds(pin), self._progress_word))
            except (OSError, FlashckptError) as error:
                found.error = error
            return found

        def copied(found: object) -> None:
            held = None
            if isinstance(found, _Copied):
                held = self._take_copies(found, sealed, time.monotonic() - began)
            else:
                self._failed(str(found))
            done(held)

        self._submit(run, copied)

    def _take_copies(self, found: _Copied, sealed: Sealed, seconds: float) -> HeldRegion | None:
        for each in found.removed:
            self._forget(each, is_spent=True)
        held = None
        for slot in found.slots:
            if (put := self._put(slot)) is not None and not slot.header.holds_constants:
                held = put
        if found.error is not None:
            is_full = isinstance(found.error, OSError) and found.error.errno == errno.ENOSPC
            self._failed(str(found.error), sealed.step, is_full=is_full)
            return None
        self._error = ""
        self._retry.succeeded()
        self._count("cached", 1)
        self.tidy()
        about = {"step": sealed.step, "rank": sealed.slot.rank, "num_bytes": num_bytes_of(sealed)}
        self._ledger.add(str(sealed.attempt), Event.CACHE, **about, seconds=round(seconds, 4))
        return held

    def _failed(self, why: str, step: int | None = None, *, is_full: bool = False) -> None:
        """Pass the cache by until it is tried again."""
        self._is_full = is_full
        self._retry.failed(time.monotonic())
        self._count("cache_failed", 1)
        if not self._error:
            log.warning("the cache is passed by: %s. Snapshots are persisted from memory", why)
            about = {} if step is None else {"step": step}
            self._ledger.add(None, Event.ERROR, what="cache", message=why[:_MAX_TEXT], **about)
        self._error = why[:_MAX_TEXT]

    def bad_copy(self, held: HeldRegion, step: int, why: str, *, is_damaged: bool) -> None:
        """Pass a disk by that returned wrong bytes (`is_damaged`: the file goes, too) or an error."""
        if is_damaged:
            self._to_remove.append(held.slot.name)
            self._error, why = "", f"{held.path} is damaged: {why}"
        self._failed(why, step)

    # ---- removal

    def committed(self, names: Iterable[str]) -> None:
        """The snapshots of these cached slots are committed."""
        for held in map(self._regions.cached_named, names):
            if held is not None and held.path:
                self._to_mark[held.slot.name] = held.slot.persisted
        self.tidy()

    def remove(self, name: str) -> None:
        """Remove a slot whose snapshot will never be committed."""
        self._remove([name])
        self.tidy()

    def tidy(self) -> None:
        """Remove, of each rank, slots older than its newest committed one, and those that newer snapshots
        replace; and constants that no slot names. A slot that could not be opened may name any constants of
        its rank."""
        persisted = self._persisted()
        newest = {each.slot.rank: each.age for each in persisted}  # sorted by age: the last one wins
        # A committed slot whose file was removed is of no use.
        lost = {held.slot.name for held in self._regions.cached() if not held.path}
        spent = [
            each.slot.name
            for each in persisted
            if each.age < newest[each.slot.rank] or each.slot.name in lost
        ]
        self._remove([*spent, *(each.slot.name for each in self._replaced(_UNREQUESTED_KEPT))])
        named = {each.record.constants_nonce for each in self._regions.snapshots()}
        constants = self._regions.cached_constants()
        unnamed = [each for each in constants if each.slot.header.nonce not in named]
        self._remove([held.slot.name for held in unnamed if held.slot.rank not in self._unread])

    def _replaced(self, kept: int) -> list[Sealed]:
        """Slots that the home does not get (not requested there, or failed), but for the newest `kept` of
        each rank, oldest first. Among several ranks the newest alone may exist in the memory of some only, so
        slots from the newest complete snapshot on stay; slots older than a commit go in any case."""
        found, number = list[Sealed](), dict[int, int]()
        for each in reversed(self._unsaved()):
            rank = each.slot.rank
            number[rank] = number.get(rank, 0) + 1
            memory = self._regions.sealed(rank)
            complete = newest_complete(memory)
            in_memory = any(other.capture == each.capture for other in memory)
            orders = [other.order for other in self._persisted() if other.slot.rank == rank]
            committed = max([*orders, self._regions.newest_committed(rank)])
            has_failed = each.slot.failed == each.generation and not in_memory
            is_late = number[rank] > kept and (complete is None or each.order < complete)
            is_idle = has_failed or not each.slot.wants_home(each.generation)
            if is_idle and (is_late or each.order < committed):
                found.append(each)
        return found[::-1]

    def _evictable(self, newer: Sealed) -> list[tuple[str, int]]:
        """The names and bytes of slots that may go to make space for a snapshot, in that order."""
        replaced = [each for each in self._replaced(1) if each.age < newer.age]
        return [(each.slot.name, num_bytes_of(each)) for each in [*self._persisted(), *replaced]]

    def _persisted(self) -> list[Sealed]:
        return [each for each in self._sealed() if each.is_persisted]

    @property
    def has_unsaved(self) -> bool:
        """Whether a snapshot in it is not committed."""
        return bool(self._unsaved())

    def _requested(self) -> list[Sealed]:
        return [each for each in self._unsaved() if each.slot.wants_home(each.generation)]

    def _unsaved(self) -> list[Sealed]:
        return [each for each in self._sealed() if not each.is_persisted]

    def _sealed(self) -> list[Sealed]:
        """Cached snapshots, oldest first."""
        found = [held.sealed() for held in self._regions.cached()]
        return sorted((each for each in found if each is not None), key=lambda each: each.age)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._forget(name, is_spent=True)
            self._to_remove.append(name)

    def _forget(self, name: str, *, is_spent: bool = False) -> None:
        self._to_mark.pop(name, None)
        if self._is_full:
            self._is_full = False
            self._retry.succeeded()  # there is space now
        if (held := self._regions.cached_named(name)) is not None:
            self._regions.drop_cached(held, is_spent=is_spent)

    def _update_files(self, folder: CacheFolder, now: float) -> None:
        """Remove and mark files, and check that all others still exist."""
        self._scanned_at = now
        gone, self._to_remove = self._to_remove, []
        marks, self._to_mark = self._to_mark, {}

        def run() -> set[str] | None:
            if not folder.stands():
                return None
            for name in gone:
                folder.remove(name)
            there = set(folder.names())
            for name, generation in marks.items():
                if name in there:
                    folder.mark_persisted(name, generation)
            return there

        def done(found: object) -> None:
            if found is None:
                self._lost_files(f"{folder.path} was removed", set())
                self._close_folder()
            elif not isinstance(found, set):
                self._to_remove = [*gone, *self._to_remove]
                self._to_mark = marks | self._to_mark
                self._failed(str(found))
            elif any(held.path and held.slot.name not in found for held in self._regions.all_cached()):
                self._lost_files(f"files of {folder.path} were removed", found)

        self._submit(run, done)

    def _lost_files(self, why: str, there: set[str]) -> None:
        """Handle files that were removed: snapshots are persisted from them while they are open."""
        for held in [each for each in self._regions.all_cached() if each.slot.name not in there]:
            self._regions.lost_file(held)
        self.tidy()
        self._failed(why)

    # ---- the end

    def leave(self, *, removes: bool) -> None:
        """Close the cache for good; `removes`: remove the run's folder, which else serves the next start."""
        if self._folder is not None and removes and not self.worker.busy:
            names = [held.slot.name for held in self._regions.all_cached()]
            try:
                self._folder.discard([*names, *self._to_remove])
            except OSError as error:
                log.warning("%s could not be removed: %s", self._folder.path, error)
        for held in self._regions.all_cached():
            self._forget(held.slot.name)
        if self._folder is not None and not self.worker.busy:
            self._folder.close()
            self._folder = None
        self.worker.close()

    def _close_folder(self) -> None:
        """Let go of the folder. Snapshots that are not requested at home stay in it for the next start."""
        folder, self._folder = self._folder, None
        self._to_remove, self._to_mark = [], {}
        requested = {each.slot.name for each in self._requested()}
        for held in self._regions.all_cached():
            if held.slot.header.holds_constants:
                held.path = ""  # a folder that is opened next does not have them
            elif held.slot.name not in requested:
                self._forget(held.slot.name)
        if folder is not None:
            folder.close()

    @property
    def _progress_word(self) -> int:
        return _native.address_of(self._progress)


def _make_space(
    folder: CacheFolder,
    needed: int,
    budget: int | None,
    evictable: Sequence[tuple[str, int]],
    removed: list[str],
) -> None:
    """Remove files in this order until `needed` bytes fit on the disk, and into the `budget` that is left of
    cache_limit. Runs in the worker. OSError if all of them are too few: then none is removed."""
    if not folder.stands():
        raise OSError(errno.ENOENT, f"{folder.path} was removed")
    free = folder.free_bytes(has_margin=budget is None)
    if budget is not None:
        free = min(free, budget)
    if free + sum(num_bytes for _, num_bytes in evictable) < needed:
        raise OSError(
            errno.ENOSPC,
            f"a snapshot of {needed:,} bytes does not fit: {max(free, 0):,} bytes are left of the disk, or "
            "of cache_limit",
        )
    for name, num_bytes in evictable:
        if free >= needed:
            break
        folder.remove(name)
        removed.append(name)
        free += num_bytes
