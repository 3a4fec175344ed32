"""The schedule of copies to the remote: the next step, retries, and how long a leaving keeper waits for the
last.

Owns the order of copies and their worker; replication/mirror.py makes the copies. Of several nodes only the
keeper of rank 0's node copies, and deletes in the shared folder, since it knows which step is being copied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from flashckpt.errors import FlashckptError
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.keeper.protocol import RemoteStatus
from flashckpt.options import Remote, duration_s
from flashckpt.persist.job import Retry, Trainer
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.store.base import Store
from flashckpt.threads import Worker

if TYPE_CHECKING:
    from flashckpt.replication.mirror import Mirror
    from flashckpt.replication.run_copy import Copied

log = logging.getLogger(__name__)

_MAX_LAST_PAUSE_S = 5.0  # between tries once no trainer lives: the keeper waits for them
_POLL_S = 1.0
_MAX_TEXT = 400


class MirrorUpload:
    """count: receives the name of each event and a number. For one thread, but for `copying`."""

    def __init__(self, store: Store, wake: int, ledger: Ledger, count: Callable[[str, int], None]) -> None:
        self._store, self._wake, self._ledger, self._count = store, wake, ledger, count
        self._remote: Remote | None = None
        self._is_living = False
        self._attempt: AttemptName | None = None
        self._mirror: Mirror | None = None
        self._worker: Worker | None = None
        self._linger_s = self._grace_s = 0.0
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget the state of the remote."""
        self._error, self._retry = "", Retry()
        self._due_s = 0.0
        self._stays_since: float | None = None
        self._progressed = 0.0, 0  # when bytes were sent last, and how many by then
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        """Find out what a new attempt resumes from, and whether the remote has that."""
        self._is_unknown, self._poll_s = True, 0.0
        # Of the steps committed here since: the newest, the newest due one, and whether one waits to be
        # copied.
        self._newest: CommitName | None = None
        self._last_due: CommitName | None = None
        self._waits = False
        self._handled: CommitName | None = None  # the newest one when the last due copy began
        self._is_hopeless = False  # the newest step can never be copied

    @property
    def _there(self) -> CommitName | None:
        """The newest step in the remote."""
        return None if self._mirror is None else self._mirror.newest

    @property
    def copying(self) -> CommitName | None:
        """The step that is being copied, which must not be deleted. For any thread."""
        mirror = self._mirror
        return None if mirror is None else mirror.copying

    # ---- the trainer and its commits

    def set_newest(self, newest: Trainer | None) -> None:
        """Set the trainer of the newest attempt, None without one. Settings of the last one stay valid."""
        self._is_living = newest is not None
        if newest is None:
            return
        self._stays_since = None
        self._linger_s, self._grace_s = newest.linger_s, newest.grace_s
        remote = newest.remote if 0 in newest.ranks else None
        if remote != self._remote:
            self._remote = remote
            self._begin_anew()
            self._mirror = self._worker = None  # a worker that hangs in its store is abandoned
            if self._remote is not None:
                # Imported here: most keepers copy nothing, and start faster.
                from flashckpt.replication.mirror import Mirror

                self._mirror, self._worker = Mirror(self._store, self._remote), Worker("mirror", self._wake)
        elif newest.attempt != self._attempt:
            self._begin_attempt()
        self._attempt = newest.attempt

    def committed(self, each: CommitName) -> None:
        """Note a committed step."""
        newest, mirror = self._newest, self._mirror
        if mirror is None or (newest is not None and each.id <= newest.id):
            return
        self._newest, self._is_hopeless = each, False
        last = self._last_due or self._there
        if self._is_due(None if last is None else last.step, each.step):
            self._last_due = each
            if each != mirror.copying:
                self._wait()

    def _wait(self) -> None:
        """Copy the newest step next. One that waits already counts as skipped, unless only a time is the
        interval."""
        if self._waits and not isinstance(self._every, str):
            self._count("mirror_skipped", 1)
        self._waits = True

    @property
    def _every(self) -> str | int | None:
        return None if self._remote is None else self._remote.every

    def _is_due(self, last: int | None, step: int) -> bool:
        """Whether a step is due after the last due one, by its number. Without a trainer each is."""
        if isinstance(self._every, int) and self._is_living:
            return step // self._every > (last or 0) // self._every
        return True

    # ---- copies

    def next(self, now: float) -> None:
        """Collect the result of a copy, and begin the next one."""
        mirror, worker = self._mirror, self._worker
        if mirror is None or worker is None:
            return
        worker.collect()
        if worker.busy:
            return
        if not self._is_living:
            self._retry.expedite(_MAX_LAST_PAUSE_S)
            self._waits = self._waits or not self._is_last_handled
        polls = self._is_unknown and now >= self._poll_s
        waits = self._waits and (now >= self._due_s or not self._is_living)
        if not self._retry.is_due(now) or not (polls or waits):
            return
        newest, waited, self._waits, self._is_unknown = self._newest, self._waits, False, False

        def done(found: Copied | BaseException | None) -> None:
            if isinstance(found, BaseException):
                self._failed(found, newest, waited=waited, polled=polls)
                return
            self._handled = newest if waited else self._handled
            self._done(mirror)
            if self._remote is not None and found is not None:
                self._note_copied(found, self._remote, time.monotonic() - now)

        worker.submit(partial(mirror.bring, self._is_due), done)

    @property
    def _is_last_handled(self) -> bool:
        return self._newest in (None, self._there, self._handled)

    def _done(self, mirror: Mirror) -> None:
        if self._newest == mirror.newest:
            self._waits = False  # it was found in the store before its commit was reported
        self._retry.succeeded()
        self._error, self._is_hopeless = "", False
        if mirror.follows != self._attempt and self._is_living:
            # The attempt has not reported yet what it resumes from, which the remote must have, too.
            self._is_unknown, self._poll_s = True, time.monotonic() + _POLL_S

    def _note_copied(self, copied: Copied, remote: Remote, seconds: float) -> None:
        if isinstance(remote.every, str):
            self._due_s = time.monotonic() - seconds + duration_s(remote.every, "remote_every")
        about = {"remote": remote.url, "step": copied.name.step}
        if copied.is_new:
            self._count("mirrored", 1)
            self._count("mirrored_bytes", copied.sent_bytes)
        sizes = {"num_bytes": copied.num_bytes, "sent_bytes": copied.sent_bytes}
        how = {"outcome": copied.outcome.value, "seconds": round(seconds, 4)}
        self._ledger.add(str(copied.name.attempt), Event.MIRROR, **about, **sizes, **how)
        if copied.dropped:
            steps = [each.step for each in copied.dropped]
            self._ledger.add(str(copied.name.attempt), Event.PRUNE, remote=remote.url, steps=steps)

    def _failed(self, error: BaseException, newest: CommitName | None, *, waited: bool, polled: bool) -> None:
        self._retry.failed(time.monotonic())
        self._is_unknown = self._is_unknown or polled
        if waited:
            self._wait()
        self._count("mirror_failed", 1)
        is_ours = isinstance(error, FlashckptError)
        message = (str(error) if is_ours else f"{type(error).__name__}: {error}")[:_MAX_TEXT]
        # A server that is away gives many messages; a permanent error has one.
        is_news = not self._error or (is_ours and message != self._error)
        self._error, self._is_hopeless = message, is_ours and newest == self._newest
        if is_news:
            log.warning("nothing is copied to the remote: %s", message)
            self._note_error(message, newest)

    def _note_error(self, message: str, step: CommitName | None) -> None:
        attempt = None if self._attempt is None else str(self._attempt)
        about = {} if step is None else {"step": step.step}
        url = None if self._remote is None else self._remote.url
        self._ledger.add(attempt, Event.ERROR, what="mirror", remote=url, message=message, **about)

    # ---- the end

    @property
    def _is_behind(self) -> bool:
        if self._mirror is None or self._worker is None:
            return False
        is_at_it = self._worker.busy or self._is_unknown or self._waits
        return is_at_it or not self._is_last_handled

    def holds(self, now: float) -> bool:
        """Whether a leaving keeper waits for the last step: at most for `linger` or the grace, at most for
        the grace without progress, and not after a permanent error."""
        mirror, worker = self._mirror, self._worker
        if mirror is None or worker is None or not self._is_behind:
            return False
        if self._is_hopeless and not worker.busy:
            return False
        progress = mirror.progress_bytes
        if self._stays_since is None:
            self._stays_since, self._progressed = now, (now, progress)
        if progress != self._progressed[1]:
            self._progressed = now, progress
        until = self._stays_since + max(self._linger_s, self._grace_s)
        return now < min(until, self._progressed[0] + self._grace_s)

    def leave(self) -> None:
        """Report a last step that did not arrive."""
        if self._remote is None or not self._is_behind:
            return
        last = "The last commit" if self._newest is None else f"Step {self._newest.step}, the last,"
        there = "Nothing is known to be" if self._there is None else f"Step {self._there.step} is the newest"
        why = self._error or "it took too long"
        message = f"{last} did not reach {self._remote.url}: {why}. {there} there"
        log.warning("%s", message)
        self._note_error(message, self._newest)

    def status(self) -> RemoteStatus | None:
        """None if this keeper copies nothing."""
        if self._mirror is None or self._remote is None:
            return None
        copying = self._mirror.copying
        return RemoteStatus(
            url=self._remote.url,
            newest=-1 if self._there is None else self._there.step,
            copying=-1 if copying is None else copying.step,
            waits=self._is_behind,
            error=self._error,
            progress_bytes=self._mirror.progress_bytes,
        )
