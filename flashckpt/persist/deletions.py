"""Deletions beside persisting: when retention and the collector run. What may go is decided by the catalogue
(flashckpt/catalogue/): any process may delete it at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from flashckpt.commit.commit_step import KEEP_ALL, collect, retain
from flashckpt.commit.view import View
from flashckpt.format.catalogue import EMPTY
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.options import Keep
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.store.base import Store
from flashckpt.threads import Worker

log = logging.getLogger(__name__)

_COMMITS_BETWEEN = 32
"""After so many commits old versions go, and what older attempts have left; they are listed then."""


class Deletions:
    """Runs one deletion at a time, for the newest of several commits. count: receives the name of each event
    and a number. pinned: returns the step that is being copied to the mirror."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        worker: Worker,
        count: Callable[[str, int], None],
        pinned: Callable[[], CommitName | None] = lambda: None,
    ) -> None:
        self._store, self._ledger, self.worker = store, ledger, worker
        self._count, self._pinned_now = count, pinned
        self._was_pinned = False
        # Of the newest commit: its attempt, what is kept, and the view.
        self._last: tuple[AttemptName | None, Keep, View] = (None, KEEP_ALL, View(EMPTY, store))
        # Whether the next deletion applies retention, lists all folders, and removes old versions.
        self._retains, self._lists, self._trims = False, True, False
        self._is_due, self._commits = False, 0
        self._collected = EMPTY
        self._has_failed = False

    @property
    def is_pending(self) -> bool:
        return self.worker.busy or self._is_due or self._was_unpinned

    def committed(
        self, name: CommitName, keep: Keep, view: View, dropped: tuple[CommitName, ...] | None
    ) -> None:
        """After a commit, delete what it has dropped. `dropped`: None if it was not committed here, and so
        retention is still to be applied."""
        self._last = name.attempt, keep, view
        self._note_dropped(name.attempt, dropped or ())
        self._commits += 1
        if self._commits >= _COMMITS_BETWEEN:
            self._lists = self._trims = True
        if self._lists or dropped != ():
            self._is_due, self._retains = True, self._retains or dropped is None

    def make_room(self) -> None:
        """Delete garbage, also before the first commit: a write has found the disk full."""
        self._is_due = self._lists = self._trims = True

    def left_garbage(self) -> None:
        """Let the next deletion search for the files of a snapshot that will never be committed."""
        self._lists = True

    @property
    def _was_unpinned(self) -> bool:
        """Whether the mirror has released a step, which retention has spared."""
        return self._was_pinned and self._pinned_now() is None

    def next(self) -> None:
        """Begin the next deletion."""
        if self.worker.busy:
            return
        is_pinned = self._pinned_now() is not None  # once: the mirror's thread may release it meanwhile
        if self._was_pinned and not is_pinned and self._last[0] is not None:
            self._is_due = self._retains = True
        self._was_pinned = is_pinned
        if self._is_due:
            self._delete()

    def _delete(self) -> None:
        (attempt, keep, view), retains, trims = self._last, self._retains, self._trims
        before = EMPTY if self._lists else self._collected
        self._is_due = self._retains = self._lists = self._trims = False
        self._commits = 0 if trims else self._commits
        dropped = list[CommitName]()

        def delete() -> None:
            # RunError if another run, or an older copy, is in its place: all of it is garbage to this view.
            newest, pinned = View.of(self._store, view.catalogue), self._pinned_now()
            if retains and newest.attempt == attempt:
                in_use = frozenset() if pinned is None else frozenset([pinned.id])
                newest, gone = retain(newest, keep, in_use)
                dropped.extend(gone)
            collect(self._store, newest.catalogue, before, trims=trims)
            self._collected = newest.catalogue

        def done(failed: BaseException | None) -> None:
            self._note_dropped(attempt, tuple(dropped))
            if failed is not None:
                self._failed(attempt, failed)
            self._has_failed = failed is not None

        self.worker.submit(delete, done)

    def _note_dropped(self, attempt: AttemptName | None, dropped: tuple[CommitName, ...]) -> None:
        if dropped:
            self._count("pruned", len(dropped))
            self._ledger.add(str(attempt), Event.PRUNE, steps=[each.step for each in dropped])

    def _failed(self, attempt: AttemptName | None, error: BaseException) -> None:
        level = logging.DEBUG if self._has_failed else logging.WARNING
        log.log(level, "expired steps could not be deleted, and fill the storage: %s", error)
        self._lists = True
        self._count("prune_failed", 1)
        name = None if attempt is None else str(attempt)
        self._ledger.add(name, Event.ERROR, what="prune", message=str(error))
