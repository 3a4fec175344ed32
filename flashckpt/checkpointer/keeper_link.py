"""The trainer's background thread, and every wait of a trainer for its keeper.

All that may take long on the trainer's side happens in this thread: the training thread only reads the
attributes that the thread sets. Owns the order of a round: log, keeper, events, slots, other ranks. Never
touches the model, and never holds the Checkpointer, so that a loop that is left by `break` can release it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from flashckpt.capture import Capture
from flashckpt.checkpointer.run_log import SnapshotLog, TimesLog, Watch, cache_report, remote_report
from flashckpt.checkpointer.session import Session
from flashckpt.checkpointer.signals import Signals
from flashckpt.checkpointer.slots import Slots
from flashckpt.commit.attempts import check_newest
from flashckpt.commit.commit_step import folder_of
from flashckpt.commit.steps import heads_at_rest, lacking
from flashckpt.commit.view import View
from flashckpt.errors import FlashckptError, KeeperError, PersistError, SupersededError
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.keeper import start
from flashckpt.keeper.client import KeeperWait, WaitTimeouts
from flashckpt.keeper.protocol import Status
from flashckpt.memory.slot import Sealed
from flashckpt.options import MOST_SLOTS, Options
from flashckpt.persist.ledger import Event
from flashckpt.ranks.coordination import Coordination
from flashckpt.threads import start_thread

log = logging.getLogger(__name__)

_TICK_S = 0.5
_WAITING_TICK_S = 0.005
# Memory is taken and faulted in at about a GiB a second; the keeper reports nothing meanwhile.
_SLOWEST_BYTES_PER_S = 1 << 28
_MOST_EVENTS = _MOST_WARNINGS = 1000
_LEAST_JOIN_S = 1.0
# The part of the grace that is left for the run's end once the wait for the home has ended.
_END_SHARE, _LONGEST_END_S = 0.2, 5.0
# The keepers of other nodes write unseen.
_OTHERS_S = 600.0
_MOST_RANKS = 20


class KeeperLink:
    """The background thread of one session.

    status: the keeper's newest answer. superseded_by: the attempt that began after this one. slots:
    the memory that the capture writes to. timeout_s: how long a wait lasts while the keeper makes no
    progress.
    """

    def __init__(
        self,
        session: Session,
        capture: Capture,
        options: Options,
        age_limits_s: tuple[float, float],
        loaded: CommitName | None,
        signals: Signals,
        coordination: Coordination,
    ) -> None:
        self._session, self._capture = session, capture
        self._signals, self._coordination = signals, coordination
        self.timeout_s = max(options.grace_s, 1.0)
        self.status = Status()
        self.superseded_by: str | None = None
        self.slots = Slots(session, capture, options, self._warn_once, self.wake)
        self._events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self._round_done = threading.Condition()
        self._rounds = self._waits = 0
        self._woken = threading.Event()
        self._is_expedited = self._is_ended = False
        self._loaded, self._snapshots = loaded, SnapshotLog(capture, age_limits_s)
        self._warned: set[str] = set()
        self._watch = Watch(capture.heartbeat, options, self.event)
        self._times = TimesLog(session.environment.world, self.event)
        self._thread: threading.Thread | None = None
        self._is_finite = True

    # ---- called by the training thread

    def start(self) -> None:
        self._thread = start_thread("flashckpt-keeper_link", self._run)

    def wake(self) -> None:
        """Begin the next round at once."""
        self._woken.set()

    def event(self, event: Event, **fields: object) -> None:
        """Send a line for the ledger in the next round. The oldest are dropped while the keeper is away."""
        self._events.append({"event": event.value, **fields})

    def newest_sealed_step(self) -> int | None:
        """Return the step of the newest sealed snapshot of this attempt."""
        newest = self.slots.newest_own()
        return None if newest is None else newest.step

    def check_not_superseded(self, step: int) -> None:
        """Raise SupersededError if a newer attempt has begun. step: where this process is."""
        if self.superseded_by is not None:
            raise SupersededError(
                f"Attempt {self.superseded_by} has taken over this run while this process was training it. "
                "What was committed before that stands, and the newer attempt resumes from it; what this "
                f"process did since, up to step {step}, may be lost. This process must end; start only one "
                "job on a run.",
                step=step,
            )

    def report(self) -> dict[str, float]:
        newest, sealed = self.status.newest_committed, self.newest_sealed_step()
        return {
            "slots": self.slots.writable,
            "newest_sealed_step": -1 if sealed is None else sealed,
            "newest_committed_step": -1 if newest is None else newest,
            **self._snapshots.report(),
            "keeper_restarts": self._session.keeper.restarts,
            **remote_report(self.status),
            **cache_report(self.status),
        }

    def close(self, *, closed: bool, unsaved: bool = False) -> None:
        """End the thread. closed: the run ended in order, so notify the keeper. unsaved: it ended, but its
        storage fails."""
        self._is_ended = True
        self._coordination.close(closed=closed)
        keeper = self._session.keeper
        keeper.longest_pause_s = start.NO_PAUSE_S
        self.slots.end()
        self._woken.set()
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            left_s = self.deadline_s - time.monotonic()
            thread.join(timeout=min(self.timeout_s, max(left_s, _LEAST_JOIN_S)))
        if thread is not None and thread.is_alive():
            # It hangs in the keeper or in memory being taken. The slots stay mapped, since it may read them.
            log.warning("the keeper link does not end; the run is released without it")
            self._note_closed(closed)
            return
        self._times.add(self._watch.poll(last=True), self._capture.report(), last=True)
        if closed:
            last = partial(self._check_finite, all_leaves=True)
            self._tried(last, "the parameters of a snapshot cannot be checked")
        keeper.longest_pause_s = start.NO_PAUSE_S  # the thread may have changed it
        self.slots.drop_ready(min(time.monotonic() + self.timeout_s, self.deadline_s))
        try:
            if time.monotonic() < self.deadline_s:  # otherwise the keeper treats the end as a death
                self._send_events()
            if (closed or unsaved) and time.monotonic() < self.deadline_s:
                keeper.closing(unsaved=unsaved)
        except (FlashckptError, OSError) as error:
            log.warning("the keeper was not notified that the run was released: %s", error)
        self._note_closed(closed)
        self.slots.close()

    def _note_closed(self, closed: bool) -> None:
        """Write the orderly end into the life lock. The keeper reads it there even if it was not notified;
        otherwise it would take the end for a death, and hold the slots for the next attempt."""
        if closed and time.monotonic() < self.deadline_s:
            with contextlib.suppress(OSError):
                self._session.life.mark_closed()

    # ---- waits of the training thread

    @property
    def deadline_s(self) -> float:
        """The monotonic time at which every wait ends."""
        return self._signals.deadline_s

    def wait_for_slots(self) -> None:
        """Wait for the requested slots. Raises OutOfSpaceError or KeeperError if they cannot be had."""
        slots, asked = self.slots, self.slots.asked  # once: another thread resets it when they are there
        if asked is None:
            return
        slots.ask_again()
        timeout_s = self.timeout_s + MOST_SLOTS * sum(asked.state) / _SLOWEST_BYTES_PER_S
        self._wait(lambda: slots.asked is None or slots.error is not None, self._keeper_wait(timeout_s))
        if slots.asked is not None:
            raise slots.error or KeeperError(
                f"No slot was ready within {timeout_s:.0f} s: no snapshot could be taken. The live state is "
                "as it was. The keeper's log is in the runtime folder."
            )

    def wait_for_free_slot(self) -> None:
        """Wait until the keeper has persisted one of the slots, for at least one round. Raises PersistError
        if the keeper makes no progress."""
        slots, rounds = self.slots, self._rounds

        def is_free() -> bool:
            ring = slots.ring
            return self._rounds > rounds and (slots.ready or ring is None or ring.take() is not None)

        if not self._wait(is_free, self._keeper_wait(self.timeout_s)):
            raise self._not_persisted(self._coordination.full_reason)

    def wait_at_rest(self) -> None:
        """Wait until the newest snapshot in the slots is persisted, or in the cache, or that has failed."""
        self._wait(self.slots.is_at_rest, self._keeper_wait(self.timeout_s))

    def wait_committed(self, *, or_cached: bool = False) -> None:
        """Wait until the newest snapshot of this attempt is committed. or_cached: if that is not in time,
        this node's cache is enough. The keeper retries a failure sooner while it is waited for.

        Raises PersistError if the snapshot was torn or given up, if the keeper fails for the grace period, or
        makes no progress for as long.
        """
        self.commit_of_newest(or_cached=or_cached)()

    def commit_of_newest(self, *, or_cached: bool = False) -> Callable[[], None]:
        """Request that the newest snapshot is persisted. Returns the wait for its commit (`wait_committed`),
        which any thread may call."""
        newest = self._newest_of_all()
        if newest is None:
            return self._wait_loaded
        self.slots.request_persist_of(newest)
        name = CommitName(newest.step, newest.attempt, newest.boundary)

        def is_committed() -> bool:
            committed, last = self.status.committed, self.status.newest_committed
            is_listed = name.step in committed or (last is not None and last >= name.step)
            # Another snapshot may have been committed with the same step number.
            return is_listed and name not in self.status.unsaved and self.slots.is_persisted(newest)

        def wait() -> None:
            if not or_cached:
                self._wait_saved(name, newest.generation, is_committed)
                return
            # The rest of the grace is for the run's end.
            by_s = self.deadline_s - min(_LONGEST_END_S, self.timeout_s * _END_SHARE)
            with contextlib.suppress(PersistError):
                self._wait_saved(name, newest.generation, is_committed, by_s)
                return
            self._wait_saved(name, newest.generation, lambda: is_committed() or self.slots.is_cached(newest))
            if not is_committed():
                self._log_cached(name.step)

        return wait

    def has_diverged(self, step: int | None) -> bool:
        """Whether a step is not committed because ranks hold different bytes of replicas. From the next
        capture on, each rank keeps its own."""
        self._capture.keep_by_rank(self.status.diverged)
        return any(each.step == step and each.has_diverged for each in self.status.failures)

    def not_captured(self, step: int, reason: str) -> PersistError:
        """Return the error for a boundary that was to be captured and could not be."""
        newest = self.newest_sealed_step()
        held = "none is" if newest is None else f"step {newest} is the newest that is"
        return PersistError(
            f"Step {step} could not be captured: {reason}. {held} sealed in memory; the live state is as it "
            "was. Call save() again, or end the run knowing what is lost.",
            step=step,
            path=self._session.store.url,
        )

    def _newest_of_all(self) -> Sealed | None:
        """Return the newest snapshot of this attempt; among ranks, the newest that all ranks have, so that
        all wait for the same one. None without a request, or if it is committed and no longer in memory.
        Raises PersistError if this rank has lost it before it was committed."""
        index, coordination = self._capture.boundary_index, self._coordination
        if not coordination.is_settled(index):
            return self.slots.newest_own()
        newest = coordination.outcome(index, self.deadline_s)
        if newest is None:
            return self.slots.newest_own()
        found = self.slots.of_boundary(newest) if newest else None
        if found is None and newest and not coordination.is_persisted(newest):
            raise self._not_persisted(
                "of the newest boundary that all ranks had, this rank's snapshot is gone: the keeper's "
                "audit has discarded it, as bytes that are not those of that boundary. No later one is whole "
                "on all ranks; call save() on all of them"
            )
        return found

    def _log_cached(self, step: int) -> None:
        """Log that the run ends before its newest step is committed."""
        cache, session = self._session.cache, self._session
        if cache is not None and session.environment.rank in (0, *session.group.node[:1]):
            log.warning(
                "step %d is in the cache of its nodes (%s); their keepers write it to %s",
                step, cache.path, session.store.url,
            )  # fmt: skip

    def _wait_loaded(self) -> None:
        """Wait for the snapshot that the attempt resumed from, if nothing newer was captured: it may be only
        in memory until the keeper has committed it."""
        loaded, store = self._loaded, self._session.store
        if loaded is not None:
            self._wait_saved(loaded, None, lambda: loaded in View.of(store).visible())
            # An attempt that begins from here on finds it.
            check_newest(View.of(store), self._session.attempt)

    def _wait_saved(
        self, name: CommitName, generation: int | None, is_done: Callable[[], bool], by_s: float = math.inf
    ) -> None:
        wait = self._keeper_wait(self.timeout_s, name.step, generation)

        def is_over() -> bool:
            # A keeper reports no more commits once another attempt has begun.
            return is_done() or wait.refusal(self.status) is not None or self.superseded_by is not None

        if not self._wait(is_over, wait, expedited=True, by_s=by_s) or not is_done():
            self.check_not_superseded(name.step)
            with contextlib.suppress(OSError):
                check_newest(View.of(self._session.store.brief()), self._session.attempt)
            failure = wait.failure(self.status)
            reason = wait.refusal(self.status) or (failure.message if failure else self._missing(name))
            raise self._not_persisted(reason, name.step)

    def _missing(self, name: CommitName) -> str:
        """Return the reason why no keeper makes progress with a step."""
        if name.step in self.status.for_others:
            with contextlib.suppress(FlashckptError, OSError):
                session, lost = self._session, self._coordination.lost
                folder = folder_of(View.of(session.store), name.id)
                ranks = lacking(heads_at_rest(session.store, folder), session.environment.world)
                shown = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", …" if ranks[_MOST_RANKS:] else "")
                return f"this node's part of it is written, and none of ranks {shown}" + (
                    f"; {lost} is gone" if lost else ""
                )
        return "the keeper makes no progress"

    def _not_persisted(self, reason: str, step: int | None = None) -> PersistError:
        newest = self.status.newest_committed
        held = "none is committed" if newest is None else f"the newest committed step is {newest}"
        what = "what was captured" if step is None else f"step {step}"
        return PersistError(
            f"{what} could not be persisted: {reason}. It is sealed in this node's memory unless it was "
            f"torn, and the keeper tries again, for the grace once the run has ended; on disk, {held}. Make "
            "room or mend the storage. After the keeper, the next start on this node or `flashckpt recover` "
            "saves it.",
            step=step,
            path=self._session.store.url,
        )

    def _keeper_wait(
        self, timeout_s: float, step: int | None = None, generation: int | None = None
    ) -> KeeperWait:
        timeouts = WaitTimeouts.same(timeout_s, timeout_s if step is None else max(_OTHERS_S, timeout_s))
        return KeeperWait(self.status, timeouts, step=step, generation=generation)

    def _wait(
        self,
        is_done: Callable[[], bool],
        wait: KeeperWait,
        *,
        expedited: bool = False,
        by_s: float = math.inf,
    ) -> bool:
        """Wait for rounds of the thread until `is_done`. Return False if the keeper has stalled, and from the
        monotonic time `by_s` on. expedited: the keeper retries failures sooner."""
        self._waits += 1
        self._is_expedited = expedited
        self._woken.set()
        try:
            with self._round_done:
                while not is_done():
                    self._round_done.wait(min(_TICK_S, max(0.0, self.deadline_s - time.monotonic())))
                    # Ranks that are gone never write their parts.
                    has_stalled = wait.has_stalled(
                        self.status, awaits_others=self._coordination.awaits_others
                    )
                    if has_stalled or time.monotonic() > min(self.deadline_s, by_s):
                        return is_done()
            return True
        finally:
            self._is_expedited = False
            self._waits -= 1

    # ---- the thread

    def _run(self) -> None:
        while not self._is_ended:
            self._tried(self._round, "the keeper cannot be asked")
            self._tried(self._check_finite, "the parameters of a snapshot cannot be checked")
            self._poll_ranks()
            with self._round_done:
                self._rounds += 1
                self._round_done.notify_all()
            until_s = time.monotonic() + (_WAITING_TICK_S if self._waits else _TICK_S)
            while (left_s := until_s - time.monotonic()) > 0:
                if self._woken.wait(min(left_s, self._coordination.poll_s)):
                    break
                self._poll_ranks()
            self._woken.clear()

    def _poll_ranks(self) -> None:
        self._tried(partial(self._coordination.poll, self.slots), "the state of other ranks cannot be read")
        if self._coordination.holds_whole:
            self._capture.hold_whole()

    def _tried(self, operation: Callable[[], None], failed: str) -> None:
        """Do an operation. An error is logged once; the next round tries again."""
        try:
            operation()
        except (FlashckptError, OSError) as error:
            self._warn_once(f"{failed}: {error}")
        except Exception as error:  # a bug must not end the thread
            self._warn_once(f"the keeper link met {error!r} and continues")
            log.debug("in the keeper link", exc_info=True)

    def _round(self) -> None:
        self._times.add(self._watch.poll(), self._capture.report())
        keeper = self._session.keeper
        longest_s = start.AWAITED_PAUSE_S if self._waits else start.LONGEST_PAUSE_S
        keeper.longest_pause_s = start.NO_PAUSE_S if self._is_ended else longest_s
        if keeper.tend():
            log.warning("the keeper had died and was started again; what it was writing is written again")
        self.status = keeper.status(awaited=self._is_expedited)
        newest = AttemptName.parse(self.status.superseded_by or "")
        if newest is not None and newest.number > self._session.attempt.number:
            self.superseded_by = str(newest)
        sealed, committed = self.newest_sealed_step(), self.status.newest_committed
        for event, fields in self._snapshots.poll(sealed, committed):
            self.event(event, **fields)
        self._send_events()
        self._capture.keep_by_rank(self.status.diverged)
        for failure in self.status.failures:
            self._warn_once(
                f"step {failure.step} could not be persisted: {failure.message}; training continues"
            )
        remote, cache = self.status.remote, self.status.cache
        if remote is not None and remote.error:  # a key, since a server's messages differ each time
            text = f"nothing is copied to the remote: {remote.error}; training continues"
            self._warn_once(text, f"remote {remote.newest}")
        if cache is not None and cache.error:
            text = f"snapshots bypass the cache: {cache.error}; they are persisted from memory"
            self._warn_once(text, "cache")
        self.slots.tend()

    def _check_finite(self, *, all_leaves: bool = False) -> None:
        """Warn once if the newest snapshot holds a parameter that is not finite."""
        with self.slots.held():
            newest = self.slots.newest_sealed()
            if newest is None or not self._is_finite:
                return
            name = self._capture.finite.poll(*newest, all_leaves=all_leaves)
        if name is not None:
            self._is_finite = False
            log.warning(
                "%s has elements that are not finite (NaN or infinity) in the snapshot of step %d, and maybe "
                "before it. Snapshots are saved as they are: a resume continues with these, and newer "
                "steps replace older ones. To resume from an older step, end the run, then call `flashckpt "
                "branch %s STEP`", name, newest[1].step, self._session.store.url,
            )  # fmt: skip

    def _send_events(self) -> None:
        while self._events:
            self._session.keeper.event(self._events[0])
            self._events.popleft()

    def _warn_once(self, text: str, key: str = "") -> None:
        if (key or text) not in self._warned:
            # Each failed snapshot has its own message, so the memory of weeks is bounded.
            if len(self._warned) >= _MOST_WARNINGS:
                self._warned.clear()
            self._warned.add(key or text)
            log.warning("%s", text)
