"""The run's folder beside its steps: where it stands, whether it was deleted, and what the keeper writes
there of attempts: the counters of those that live, the ends of the others.

What is gone may be a disk that is away: nothing is concluded from it but to wait, unless the folder was
deleted for certain. Reads storage, which may hang: a worker calls it, but for `told`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from flashckpt import crashpoints
from flashckpt.commit import attempts, holder
from flashckpt.commit.attempts import open_run
from flashckpt.errors import DamagedError, FlashckptError, FormatError, NoSuchStepError, UnusableRunError
from flashckpt.format.names import AttemptName, attempt_folder
from flashckpt.memory.runtime import identity_of
from flashckpt.store import open_store
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

_EVENT = struct.Struct("iIII")
_DELETE_SELF = 0x400
_READ_BYTES = 4096
_STANDS_S = 5.0  # on storage where it costs a request to ask

End = Literal["closed", "dead"]


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a round found: the newest attempt that claimed the run, the ends that are written down now."""

    is_there: bool
    claimed: AttemptName | None = None
    marked: tuple[AttemptName, ...] = ()
    problem: str = ""


class RunFolder:
    """`identity` is the name of the run on this node, that of the runtime folder."""

    def __init__(self, store: Store, identity: str) -> None:
        self._store, self._identity = store, identity
        self._run_id: str | None = None
        self._told: str | None = None
        self._stood_until = 0.0
        self._counts: dict[AttemptName, int] = {}
        # Counters of attempts that have ended here: as each was first seen, and when.
        self._still: dict[AttemptName, tuple[int, float]] = {}

    @property
    def url(self) -> str:
        return self._store.url

    def told(self, path: str) -> None:
        """Who asks for this run has found it here."""
        self._told = path

    def stands(self) -> bool:
        """Whether the run is in the store; a moved one is followed there. OSError where nobody can tell."""
        return self._stands(self._store)

    def _stands(self, store: Store) -> bool:
        if not self._store.capabilities.rename and time.monotonic() < self._stood_until:
            return True  # each look costs a request, and nothing is done that a run which is gone would miss
        if self._is_ours(store):
            self._stood_until = time.monotonic() + _STANDS_S
            return True
        told = self._told
        if told is None or told == self._store.url or not self._store.capabilities.rename:
            return False
        if not self._is_ours(open_store(told)):
            return False
        log.warning("the run was moved from %s to %s: it is followed there", self._store.url, told)
        self._store.move_to(told)
        return True

    def _is_ours(self, store: Store) -> bool:
        """By its id: a copy that was put in its place counts as the run, as a disk that comes back does."""
        try:
            found = open_run(store, create=False).run_id
        except (NoSuchStepError, UnusableRunError):
            return False
        except (DamagedError, FormatError):
            # Whose it is cannot be read any more, and what is in memory is worth more than a doubt.
            return True
        if self._run_id is None and identity_of(found, store.place()) == self._identity:
            self._run_id = found
        return found == self._run_id

    def round(
        self,
        living: Sequence[AttemptName],
        ended: Sequence[tuple[AttemptName, End]],
        elsewhere: Collection[AttemptName] = (),
    ) -> Look:
        """Move the counters of living attempts on and write down the end of the others: of those `elsewhere`,
        which have ranks on other nodes, once their counters stand still. One that moves is left to the keeper
        that moves it, which counts as written down here. What fails is told soon: the next beat must not wait
        for it."""
        store = self._store.brief()
        marked: list[AttemptName] = []
        claimed, problem = None, ""
        try:
            if not self._stands(store):
                return Look(is_there=False)
            for attempt in living:
                with self._unless_swept(attempt):
                    attempts.beat(store, attempt, self._next_count(attempt))
            for attempt, how in ended:
                moves = self._moves(attempt) if attempt in elsewhere else False
                if moves is None:
                    continue
                crashpoints.point("end.marking")
                with self._unless_swept(attempt):
                    if not moves:
                        attempts.mark_ended(store, attempt, how)
                marked.append(attempt)
            claimed = attempts.newest_claimed(store.at_once())
        except (OSError, FlashckptError) as error:
            problem = str(error)
        return Look(is_there=True, claimed=claimed, marked=tuple(marked), problem=problem)

    @contextlib.contextmanager
    def _unless_swept(self, attempt: AttemptName) -> Iterator[None]:
        """A newer attempt may have committed and cleared this one's folder away: nobody looks there again."""
        try:
            yield
        except FileNotFoundError:
            if self._store.list(attempt_folder(attempt)):
                raise

    def _moves(self, attempt: AttemptName) -> bool | None:
        """Whether another node's keeper moves a counter on; None while that cannot be told yet."""
        # The time between the two reads: a count is old that a keeper has read before it stood still.
        now = time.monotonic()
        found = attempts.alive(self._store.brief(), attempt)
        count = -1 if found is None else found.count
        before, since_s = self._still.setdefault(attempt, (count, time.monotonic()))
        if count != before:
            return True
        return False if now - since_s >= holder.STILL_S + self._store.capabilities.delay_s else None

    def _next_count(self, attempt: AttemptName) -> int:
        """On from where an earlier keeper's counter stood: it must never stand still or come back."""
        if attempt not in self._counts:
            before = attempts.alive(self._store.brief(), attempt)
            self._counts[attempt] = before.count if before is not None else 0
        self._counts[attempt] += 1
        return self._counts[attempt]


class DeletionWatch:
    """Whether what has `path` now was deleted for certain: not moved, and not on a disk that is away. An
    inotify watch, unlike an open descriptor, keeps no disk from being unmounted. On a network file system
    nobody hears of deletions by other machines; then nothing is ever certain. For one thread."""

    def __init__(self, path: str) -> None:
        self._heard = False
        self._descriptor = -1
        libc = ctypes.CDLL(None)
        try:
            self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if libc.inotify_add_watch(self._descriptor, os.fsencode(path), _DELETE_SELF) < 0:
                self.close()
        except AttributeError:  # a C library without it
            self.close()

    @property
    def is_watched(self) -> bool:
        """Whether the kernel tells of it: not where nothing had the path, or no watch could be had."""
        return self._descriptor >= 0

    def has_come(self) -> bool:
        while self._descriptor >= 0:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            while data:
                _, mask, _, length = _EVENT.unpack_from(data)
                data = data[_EVENT.size + length :]
                self._heard = self._heard or bool(mask & _DELETE_SELF)
            if self._heard:
                self.close()
        return self._heard

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
