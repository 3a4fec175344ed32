"""Deletions beside persisting: when what is kept no longer goes, and which files nobody can use any more
(left by cut-off writes, dead keepers and dead attempts).

Which steps go is commit's to say. Never named is what could still be good: a file that a manifest or a part
names, or might name because one of them cannot be read; anything of an attempt that may still have a keeper
somewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from flashckpt.commit import constants, retention
from flashckpt.commit.attempts import AttemptInfo, attempt_folders, attempts, newest_claimed
from flashckpt.commit.cut_off import cut_off, final_name
from flashckpt.commit.lineage import VisibleStep, everything
from flashckpt.commit.retention import noted
from flashckpt.commit.steps import read_manifest
from flashckpt.format.names import (
    ATTEMPTS,
    CONSTANTS,
    MARK,
    PART,
    SHARD,
    AttemptName,
    attempt_folder,
    claim_number,
    claim_path,
    shard_writer,
    step_attempt_folder,
    step_folder,
)
from flashckpt.format.records import Manifest
from flashckpt.memory.held_regions import Regions
from flashckpt.options import Keep
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.stored_steps import Completeness, StoredStep, heads_of, stored_step
from flashckpt.persist.worker import Worker
from flashckpt.store.base import Entry, Store

log = logging.getLogger(__name__)

_CUT_OFF = "its write was cut off"
_LOOK_S = 1.0
_MOST_SWEEPS = 3
_MOST_NAMED = 20

COPY_AGE_S = 86400.0
"""A copier writes to attempts that have ended, and no record tells of it: so long it may be at work."""


class Deletions:
    """One deletion at a time; of several commits meanwhile the newest decides. `in_hand` gives the steps that
    this process may still commit, `count` is told what was done and how often, `spared` is the step that is
    being copied elsewhere."""

    def __init__(
        self,
        store: Store,
        regions: Regions,
        ledger: Ledger,
        worker: Worker,
        in_hand: Callable[[], set[int]],
        count: Callable[[str, int], None],
        spared: Callable[[], VisibleStep | None] = lambda: None,
    ) -> None:
        self._spared_now, self._has_spared = spared, False
        self._last: tuple[AttemptName, Keep, bool, Collection[int]] | None = None
        self._store, self._regions, self._ledger, self.worker = store, regions, ledger, worker
        self._in_hand, self._count = in_hand, count
        self._wanted: tuple[AttemptName, Keep, bool, Collection[int]] | None = None
        self._looked_at = 0.0
        self._seen_dead: set[str] = set()
        self._dead: set[str] = set()
        self._sweeps: dict[str, int] = {}
        self._has_failed = False

    @property
    def is_pending(self) -> bool:
        return self.worker.busy or self._wanted is not None or bool(self._seen_dead) or self._may_go

    def committed(
        self, attempt: AttemptName, keep: Keep, *, is_here: bool, common: Collection[int] = ()
    ) -> None:
        """A step of this attempt is committed: what `keep` lets go may go. `is_here`: all its ranks are on
        this node. `common`: boundaries of it that every node has committed."""
        self._wanted = self._last = attempt, keep, is_here, common

    def _spared(self) -> VisibleStep | None:
        found = self._spared_now()
        self._has_spared = self._has_spared or found is not None
        return found

    @property
    def _may_go(self) -> bool:
        """Whether something was spared that is copied no longer."""
        return self._has_spared and self._spared_now() is None

    def next(self, now: float) -> None:
        """Begin the next deletion, if none is under way and there is one."""
        if self.worker.busy:
            return
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            dead = {nonce for nonce, lives in self._regions.other_keepers().items() if not lives}
            # Twice: the file of a keeper's lock is there a moment before the lock is.
            self._dead, self._seen_dead = dead & self._seen_dead, dead
        if self._dead:
            self._sweep(self._dead)
            self._dead = set()
            return
        if self._may_go:
            self._has_spared, self._wanted = False, self._wanted or self._last
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            self._prune(*wanted)

    def _prune(self, attempt: AttemptName, keep: Keep, is_here: bool, common: Collection[int]) -> None:
        # With all ranks on one node, and no other keeper there, nobody else commits steps of the attempt; and
        # what they capture later is newer.
        in_hand = self._in_hand() if is_here and not self._regions.other_keepers() else None

        def done(gone: list[VisibleStep] | BaseException) -> None:
            if isinstance(gone, BaseException):
                say = log.debug if self._has_failed else log.warning
                say("steps that are kept no longer could not be deleted, and fill the storage: %s", gone)
                self._has_failed = True
                self._count("prune_failed", 1)
                self._ledger.add(str(attempt), Event.ERROR, what="prune", message=str(gone))
                return
            self._has_failed = False
            if gone:
                self._count("pruned", len(gone))
                self._ledger.add(str(attempt), Event.PRUNE, steps=[each.step for each in gone])

        prune = partial(
            retention.prune,
            self._store,
            attempt,
            keep,
            in_hand=in_hand,
            common=common,
            spared=self._spared,
        )
        self.worker.submit(prune, done)

    def _sweep(self, dead: set[str]) -> None:
        gone, errors = list[str](), list[OSError]()

        def done(failed: BaseException | None) -> None:
            failed = failed or (errors[0] if errors else None)
            if failed is not None and any(nonce not in self._sweeps for nonce in dead):
                log.warning("what dead keepers left could not be removed: %s", failed)
            for nonce in dead:
                self._sweeps[nonce] = self._sweeps.get(nonce, 0) + 1
                if failed is None or self._sweeps[nonce] >= _MOST_SWEEPS:
                    # Storage that fails must not keep a keeper for ever: then it goes with its step.
                    self._regions.forget_keeper(nonce)
                    self._seen_dead.discard(nonce)
                    self._sweeps.pop(nonce)
            if gone:
                log.info("removed what dead keepers left half written: %s", ", ".join(gone[:_MOST_NAMED]))
                self._ledger.add(None, Event.PRUNE, unfinished=gone[:_MOST_NAMED], count=len(gone))

        def sweep() -> None:
            for each in sorted(half_written(self._store, dead), key=lambda each: each.path):
                with noted(errors):
                    remove(self._store, each)
                    gone.append(each.path)

        self.worker.submit(sweep, done)


# ---- what nobody can use


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """What nobody can use any more: a file, an empty folder, or a whole attempt (`path` is its claim)."""

    path: str
    num_bytes: int = 0
    kind: Literal["file", "folder", "attempt"] = "file"
    attempt: AttemptName | None = None
    step: int | None = None
    why: str = ""


def unused_files(
    store: Store, dead: Collection[AttemptName] = (), writers: Collection[str] = ()
) -> list[Unused]:
    """`dead` are attempts that are known to be, though nobody has written it down, `writers` the nonces of
    keepers that are certainly dead: of theirs, what an attempt that still lives has is unused, too."""
    known, claimed, begun = attempts(store), newest_claimed(store), list(everything(store))
    over = _over(known) | set(dead)
    found = _claims(store, 0 if claimed is None else claimed.number)
    folders = [name for name in attempt_folders(store, ATTEMPTS) if name in over]
    has_constants = any(constants.files_of(store, name) for name in folders)
    named = constants.everything_named(store) if has_constants else constants.Named()
    for name in folders:
        found += _temporaries(store, attempt_folder(name), name, None) + _constants(store, name, named)
    for each in begun:
        if each.attempt in over:
            found += _of_step(store, each.step, each.attempt, writers)
        elif writers:
            found += _begun_by(store, each.step, each.attempt, writers)
    with_steps = {each.attempt for each in begun}
    for info in known:
        is_idle = not info.has_started and info.name != claimed and info.name not in with_steps
        is_idle = is_idle and not constants.files_of(store, info.name)
        if is_idle and claimed is not None and info.name < claimed:
            path, why = claim_path(info.name.number), "it died before it began"
            found.append(Unused(path=path, kind="attempt", attempt=info.name, why=why))
    paths = {each.path for each in found}
    old = [(path, entry) for path, entry in cut_off(store) if path not in paths]
    return found + [Unused(path=path, num_bytes=entry.num_bytes, why=_CUT_OFF) for path, entry in old]


def ended_attempts(store: Store) -> set[AttemptName]:
    """Attempts of which no keeper writes anything any more, as far as the run's records say."""
    return _over(attempts(store))


def half_written(store: Store, writers: Collection[str]) -> list[Unused]:
    """The shards that these keepers, which are certainly dead, began and that nothing names, in whatever
    attempt.

    A shard's name begins with its keeper's nonce. Only its own writer ever publishes a shard, so that of a
    dead one will never be named: this needs no newest attempt and no commit. What another keeper writes has
    another nonce."""
    begun = everything(store) if writers else ()
    return [found for each in begun for found in _begun_by(store, each.step, each.attempt, writers)]


def is_unused_still(store: Store, each: Unused) -> bool:
    """To be asked just before a removal: a copier may have published the step of a shard meanwhile."""
    file = each.path.rpartition("/")[2]
    if each.attempt is None or each.kind != "file":
        return True
    if CONSTANTS.fullmatch(file):
        return not constants.everything_named(store, each.attempt).has(each.attempt, file)
    if each.step is None or not SHARD.fullmatch(file):
        return True
    stored = stored_step(store, each.step, each.attempt)
    if stored.completeness is Completeness.BURIED:
        return True
    named = _named_shards(store, stored)
    return named is not None and file not in named


def remove(store: Store, each: Unused) -> None:
    """Delete what was named. OSError."""
    file = each.path.rpartition("/")[2]
    if each.attempt is not None and CONSTANTS.fullmatch(file):
        constants.remove(store, each.attempt, [file])
        return
    if each.kind == "folder":
        store.remove(each.path)
        store.remove(each.path.rpartition("/")[0])
        return
    if each.kind == "attempt" and each.attempt is not None:
        retention.remove_attempt(store, each.attempt, look=store.at_once())
        return
    store.remove(each.path)
    # Nobody has a use for a folder that this has left empty.
    if each.step is not None and each.attempt is not None:
        store.remove(step_attempt_folder(each.step, each.attempt))
        store.remove(step_folder(each.step))


def _files(
    folder: str, entries: Iterable[Entry], why: str, attempt: AttemptName | None, step: int | None
) -> list[Unused]:
    return [
        Unused(path=f"{folder}/{each.name}", num_bytes=each.num_bytes, attempt=attempt, step=step, why=why)
        for each in entries
        if not each.is_folder
    ]


def _begun_by(store: Store, step: int, attempt: AttemptName, writers: Collection[str]) -> list[Unused]:
    folder = step_attempt_folder(step, attempt)
    begun = [entry for entry in store.list(folder) if shard_writer(entry.name) in writers]
    named = _named_shards(store, stored_step(store, step, attempt)) if begun else None
    gone = [each for each in begun if named is not None and each.name not in named]
    return _files(folder, gone, _CUT_OFF, attempt, step)


def _over(known: list[AttemptInfo]) -> set[AttemptName]:
    """Attempts of which no keeper writes anything any more. Those before the newest that has started may
    not; of that one, an end that was written down speaks for all only where all ranks had one keeper."""
    started = max((info.name for info in known if info.has_started), default=None)
    over = set()
    for info in known:
        is_past = started is not None and info.name < started
        is_alone = not info.has_started or (info.start is not None and info.start.world == 1)
        if is_past or (info.ended and is_alone):
            over.add(info.name)
    return over


def _of_step(store: Store, step: int, attempt: AttemptName, writers: Collection[str]) -> list[Unused]:
    folder = step_attempt_folder(step, attempt)
    stored = stored_step(store, step, attempt)
    entries = [entry for entry in store.list(folder) if not entry.is_folder]
    found = _temporaries(store, folder, attempt, step)
    if stored.completeness is Completeness.BURIED:
        gone = [each for each in entries if any(of.fullmatch(each.name) for of in (SHARD, PART, MARK))]
        return found + _files(folder, gone, "its step was pruned", attempt, step)
    named = _named_shards(store, stored)
    if named is None:
        return found
    shards = [each for each in entries if SHARD.fullmatch(each.name) and each.name not in named]
    gone = [each for each in shards if shard_writer(each.name) in writers or not _may_be_copied(store, each)]
    found += _files(folder, gone, _CUT_OFF, attempt, step)
    if not entries and stored.completeness is Completeness.NOTHING:
        found.append(Unused(path=folder, kind="folder", attempt=attempt, step=step, why="it is empty"))
    return found


def _constants(store: Store, attempt: AttemptName, named: constants.Named) -> list[Unused]:
    """The constants shards of an attempt that no step names: a base model's size each."""
    folder = attempt_folder(attempt)
    found = [each for each in store.list(folder) if CONSTANTS.fullmatch(each.name)]
    gone = [each for each in found if not named.has(attempt, each.name) and not _may_be_copied(store, each)]
    return _files(folder, gone, "no step names it", attempt, None)


def _may_be_copied(store: Store, each: Entry) -> bool:
    """Whether a copier may have just put it there. Where there are renames, a shard has its name only just
    before its part; an object has its own from its upload to that of the step's last."""
    is_young = not each.modified_s or time.time() - each.modified_s < COPY_AGE_S
    return is_young and not store.capabilities.rename


def _named_shards(store: Store, stored: StoredStep) -> set[str] | None:
    """The shards that a manifest or a part names. None where one of them cannot be read: it may name any."""
    if stored.problem and stored.completeness in (Completeness.UNREADABLE, Completeness.PARTIAL):
        return None
    heads, named = list(stored.heads), set[str]()
    if stored.completeness in (Completeness.COMMITTED, Completeness.MISSING):
        manifest = read_manifest(store, stored.step, stored.attempt)
        heads, problem = heads_of(store, stored.folder)
        if problem or not isinstance(manifest, Manifest):
            return None
        named = {each.file for each in manifest.shards}
    return named | {rank.shard.file for head in heads for rank in head.ranks}


def _claims(store: Store, newest: int) -> list[Unused]:
    """Half-written claims: of a number that is taken, nobody can use one any more."""
    found = [(entry, claim_number(final_name(entry))) for entry in store.list(ATTEMPTS)]
    gone = [entry for entry, number in found if number is not None and number <= newest]
    return _files(ATTEMPTS, gone, _CUT_OFF, None, None)


def _temporaries(store: Store, folder: str, attempt: AttemptName, step: int | None) -> list[Unused]:
    gone = [entry for entry in store.list(folder) if final_name(entry)]
    return _files(folder, gone, _CUT_OFF, attempt, step)
