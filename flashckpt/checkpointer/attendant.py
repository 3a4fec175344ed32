"""The trainer's background thread: slots made ready, the keeper looked after, questions answered.

Everything of a checkpoint that may take long on the trainer's side happens here, so that the training
thread only reads what this thread has left in plain attributes. Never touches the model, and never holds
the Checkpointer: a loop that is left by `break` must be able to let go of it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from flashckpt.capture import Capture
from flashckpt.checkpointer.run_log import RankTimes, SnapshotLog, Watch, remote_report
from flashckpt.checkpointer.session import Session
from flashckpt.checkpointer.signals import Signals
from flashckpt.checkpointer.slots import Slots
from flashckpt.commit import lineage
from flashckpt.commit.attempts import check_newest, newest_claimed
from flashckpt.commit.steps import is_committed, missing_ranks, steps_of_boundary
from flashckpt.errors import FlashckptError, KeeperError, PersistError, SupersededError
from flashckpt.format.names import AttemptName, step_attempt_folder
from flashckpt.keeper import start
from flashckpt.keeper.protocol import Failure, Status
from flashckpt.memory.slot import Sealed
from flashckpt.options import MOST_SLOTS, Options
from flashckpt.persist.ledger import Event
from flashckpt.ranks.pacing import Pacing

log = logging.getLogger(__name__)

_TICK_S = 0.5
_WAITING_TICK_S = 0.005
# How often it is looked whether all ranks have what this one has: the outcome of a snapshot waits for that.
_RANKS_TICK_S = 0.05
_CLAIM_LOOK_S = 2.0
_CLAIM_LOOK_BESIDE_S = 10.0
_START_LOOK_S = 0.25
_SLOWEST_BYTES_PER_S = 1 << 28
_EVENTS_KEPT = _MOST_SAID = 1000
_LEAST_JOIN_S = 1.0
# An answer of the round that was under way when the wait began may be older than what was asked for.
_FRESH_ROUNDS = 2
# Keepers that one commit may cost before what they write counts for nothing.
_MOST_KEEPERS = 4
# For other nodes, whose keepers nobody here sees at work: for their parts, and for disks of their own.
_OTHERS_S = 600.0
_MOST_RANKS = 20


class Attendant:
    """Looks after one session. `status` is the keeper's newest answer, `superseded_by` the attempt that
    claimed the run after ours, `slots` where the capture writes."""

    def __init__(
        self,
        session: Session,
        capture: Capture,
        options: Options,
        age_limits_s: tuple[float, float],
        loaded_step: int | None,
        signals: Signals,
        pacing: Pacing,
    ) -> None:
        self._session, self._capture, self._signals, self._pacing = session, capture, signals, pacing
        # How long the ends of a run wait for a keeper, or a copy, that makes no progress.
        self.patience_s = max(options.grace_s, 1.0)
        self.status = Status()
        self.superseded_by: str | None = None
        self.slots = Slots(session, capture, options, self._say_once, self.wake)
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS_KEPT)
        self._answered = threading.Condition()
        self._rounds = 0
        self._woken = threading.Event()
        self._waiting = 0
        self._hurried = False
        self._ended = False
        self._looked_s = self._start_looked_s = 0.0
        self._began_from_storage = False
        self._tended = False
        # Boundaries that every node has committed, where nodes have folders of their own.
        self._common: tuple[int, ...] = ()
        self._loaded_step, self._snapshots = loaded_step, SnapshotLog(capture, age_limits_s)
        self._said: set[str] = set()
        self._watch = Watch(capture.heartbeat, options, self.event)
        self._times = RankTimes(session.environment.world, self.event)
        self._thread = threading.Thread(target=self._run, name="flashckpt-attendant", daemon=True)

    # ---- called by the training thread

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is something to be done: the next round begins at once."""
        self._woken.set()

    def event(self, event: Event, **fields: object) -> None:
        """A line for the ledger, sent at the next round. The oldest are dropped if the keeper is away."""
        self._events.append({"event": event.value, **fields})

    def newest_sealed_step(self) -> int | None:
        """The step of the newest sealed snapshot of this attempt."""
        newest = self.slots.newest_own()
        return None if newest is None else newest.step

    def await_slots(self, come: Callable[[], bool]) -> None:
        """Wait until the slots that were asked for have `come`. Raises OutOfRoomError or KeeperError where
        they cannot be had."""
        slots = self.slots
        if come():
            return
        slots.ask_again()
        asked = slots.asked.state if slots.asked is not None else ()
        # Memory is taken and faulted in at a GiB a second or so, which is no news from the keeper.
        patience_s = self.patience_s + MOST_SLOTS * sum(asked) / _SLOWEST_BYTES_PER_S
        self._wait_until(lambda: come() or slots.error is not None, patience_s)
        if not come():
            raise slots.error or KeeperError(
                f"No slot was ready within {patience_s:.0f} s: no snapshot could be taken. The live "
                "state is as it was. The keeper's log stands in the runtime folder."
            )

    def persist_newest(self, stopped: Callable[[], bool]) -> None:
        """See the newest snapshot that the slots hold committed, or its persisting failed, before others go.
        Returns at once where there is none, and once `stopped`."""
        newest = self.slots.newest_sealed()
        if newest is None:
            return
        slot, generation = newest[0], newest[1].generation
        if slot.persisted != generation:
            slot.request_persist(generation)
        done = (generation,)
        self._wait_until(
            lambda: slot.persisted in done or slot.failed[0] in done or slot.torn[0] in done or stopped(),
            self.patience_s,
        )

    def wait_for_room(self) -> None:
        """Wait until a slot can be written again (the keeper is still busy with all of them), one round
        of this thread at least. Raises PersistError where the keeper makes no progress."""
        ring, rounds = self.slots.ring, self._rounds
        if not self._wait_until(
            lambda: self._rounds > rounds and (self.slots.ready or ring is None or ring.take() is not None),
            self.patience_s,
        ):
            why = "every slot is still to be persisted, and the keeper makes no progress"
            if not self._pacing.is_alone:
                why = "every slot holds what other ranks may have, too, and not all of them answer"
            raise self._failed(why)

    def not_captured(self, step: int, reason: str) -> PersistError:
        """The error for a boundary that was to be captured and could not be."""
        newest = self.newest_sealed_step()
        held = "none is" if newest is None else f"step {newest} is the newest that is"
        return PersistError(
            f"Step {step} could not be captured: {reason}. {held} sealed in memory; the live state is as it "
            "was. Call save() again, or end the run knowing what is lost.",
            step=step,
            path=self._session.store.url,
        )

    def wait_committed(self) -> None:
        """Wait until the newest snapshot of this attempt is committed. A keeper that fails tries again, and
        is waited for; sooner than it would by itself, since somebody waits.

        Raises PersistError where the snapshot was torn or given up, where the keeper goes on failing for the
        grace period, or makes no progress for as long.
        """
        self.commit_of_newest()()

    def commit_of_newest(self) -> Callable[[], None]:
        """Ask for the newest snapshot to be persisted. Returns the wait for its commit, as `wait_committed`
        has it, which any thread may do."""
        newest, boundary = self._newest_of_all()
        if newest is not None:
            self.slots.request_persist_of(newest)

        def wait() -> None:
            if newest is None:
                self._wait_loaded()
                self._wait_for_nodes(boundary)
                return
            # Another snapshot may have been committed under its number: the one that was loaded, for one.
            self._wait_for(
                newest.step,
                newest.generation,
                lambda: self._is_committed(newest.step) and self.slots.is_persisted(newest),
            )
            self._wait_for_nodes(boundary, newest.step)

        return wait

    def _wait_for_nodes(self, boundary: int, step: int | None = None) -> None:
        """Where nodes have folders of their own a step counts once every one has committed it. `boundary` 0
        is what the attempt went on from. Raises PersistError where that is not so."""
        loaded = self._session.loaded
        if self._session.ranks is None or (not boundary and loaded is None):
            return
        if step is None:
            step = self.status.newest_committed if boundary or loaded is None else loaded.step

        def is_everywhere() -> bool:
            return max(self._common, default=-1) >= boundary

        def is_decided() -> bool:
            # Where rank 0 is gone nobody says it any more.
            return is_everywhere() or not self._pacing.awaits_others

        def has_failed() -> bool:
            # What keeps a node from storing what all went on from is told on that node alone.
            return not boundary or self._pacing.failed >= boundary

        self._wait_until(lambda: is_decided() or has_failed(), max(self.patience_s, _OTHERS_S))
        self._wait_until(is_decided, self.patience_s)
        if not is_everywhere():
            raise PersistError(
                f"step {step} is committed on this node's disk, and not known to be on those of all "
                "others. A resume takes the newest step that every node has. See what the other nodes say.",
                step=step,
                path=self._session.store.url,
            )

    def has_diverged(self, step: int | None) -> bool:
        """Whether a step is not committed because ranks hold unlike what they declare to hold alike. The next
        capture keeps that by rank."""
        self._capture.keep_by_rank(self.status.diverged)
        return any(each.step == step and each.has_diverged for each in self.status.failures)

    def _newest_of_all(self) -> tuple[Sealed | None, int]:
        """The newest snapshot of this attempt and its boundary: among ranks, where the present boundary was
        not captured on all of them at once, the newest that all have. All ranks that wait here wait for the
        same one. None for one that is committed and not in memory any more; 0 where there is none. Raises
        PersistError where this rank has lost that one before it was committed."""
        ordinal, pacing = self._capture.ordinal, self._pacing
        outcome = pacing.outcome(ordinal, self.deadline_s) if pacing.is_settled(ordinal) else None
        if outcome is None or not outcome.is_known:
            own = self.slots.newest_own()
            return own, 0 if own is None else own.boundary
        found = self.slots.of_boundary(outcome.newest) if outcome.newest else None
        if found is None and outcome.newest and not pacing.is_persisted(outcome.newest):
            # All had it and it is nowhere: to return would say that it is safe.
            raise self._failed(
                "of the newest boundary that all ranks had, this rank's snapshot is gone: the keeper's "
                "audit has discarded it, as bytes that are not those of that boundary. No later one is whole "
                "on all ranks; call save() on all of them"
            )
        return found, outcome.newest

    def _is_committed(self, step: int) -> bool:
        newest = self.status.newest_committed
        return step in self.status.committed or (newest is not None and newest >= step)

    def may_name(self, step: int, *, wait: bool) -> bool:
        """Whether this attempt may still give a snapshot of its own the number `step`: not where the one that
        it was loaded from, in memory, counts as its own and is, or may be, on its way to storage. To `wait`
        for that one may tell that another attempt has committed it."""
        if step != self._loaded_step:
            return True
        if not wait:
            return False
        try:
            self._wait_loaded()
        except PersistError:
            return False
        return not self._session.store.list(step_attempt_folder(step, self._session.attempt))

    def _wait_loaded(self) -> None:
        """Nothing newer is captured than what was resumed from: it may be in memory alone until the
        keeper has committed it as this attempt's."""
        step, store = self._loaded_step, self._session.store
        if step is not None:

            def is_visible() -> bool:
                return self._is_committed(step) or any(
                    each.step == step for each in lineage.newest_first(store)
                )

            self._wait_for(step, None, is_visible)
            # One that claims from here on finds it.
            check_newest(store.at_once(), self._session.attempt)

    def _wait_for(self, step: int, generation: int | None, done: Callable[[], bool]) -> None:
        awaited, began = CommitWait(step, generation, self.patience_s, self.status), self._rounds

        def refusal() -> str | None:
            return awaited.refusal(self.status, self._rounds - began)

        def is_over() -> bool:
            # The keeper reports nothing more as committed once another attempt has claimed the run.
            return done() or refusal() is not None or self.superseded_by is not None

        answered = self._wait_until(is_over, self.patience_s, hurried=True, step=step)
        if not answered or not done():
            self.check_not_superseded(step)
            failure = awaited.failure(self.status)
            reason = refusal() or (failure.message if failure is not None else self._what_is_missing(step))
            raise self._failed(reason, step)

    def _what_is_missing(self, step: int) -> str:
        """Of a step with which nothing goes on."""
        if step in self.status.for_others:
            session = self._session
            with contextlib.suppress(FlashckptError, OSError):
                at = session.store, step, session.attempt, session.environment.world
                counted = steps_of_boundary(*at)
                if len({*counted.values()}) > 1:
                    from flashckpt.persist.job import unlike_steps  # the keeper's: a start has no need of it

                    return unlike_steps(counted)
                ranks = missing_ranks(*at)
                shown = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", …" if ranks[_MOST_RANKS:] else "")
                lost = f"; {self._pacing.lost} is gone" if self._pacing.lost else ""
                return f"this node's part of it is written, and none of ranks {shown}{lost}"
        return "the keeper makes no progress"

    def check_not_superseded(self, step: int) -> None:
        """SupersededError where a newer attempt has claimed the run. `step`: where this process is."""
        if self.superseded_by is not None:
            raise SupersededError(
                f"Attempt {self.superseded_by} has claimed this run while this process was training it. What "
                "was committed before that stands, and the newer attempt resumes from it; what this process "
                f"did since, up to step {step}, may be lost. This process must end; start only one job on a "
                "run.",
                step=step,
            )

    def report(self) -> dict[str, float]:
        newest = self.status.newest_committed
        sealed = self.newest_sealed_step()
        return {
            "slots": 0 if self.slots.ring is None else len(self.slots.ring.slots),
            "newest_sealed_step": -1 if sealed is None else sealed,
            "newest_committed_step": -1 if newest is None else newest,
            **self._snapshots.report(),
            "keeper_restarts": self._session.keeper.restarts,
            **remote_report(self.status),
        }

    def close(self, *, closed: bool) -> None:
        """End the thread. In order (`closed`), the keeper is told that nothing more comes."""
        self._ended = True
        self._pacing.close(closed=closed)
        self._session.keeper.longest_pause_s = start.NO_PAUSE_S
        self.slots.end()
        self._woken.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            left_s = self.deadline_s - time.monotonic()
            self._thread.join(timeout=min(self.patience_s, max(left_s, _LEAST_JOIN_S)))
        if self._thread.is_alive():
            # It hangs in the keeper or in memory being taken, and will look into the slots once more: they
            # stay mapped until the process ends.
            log.warning("the attendant does not come to an end; the run is let go without it")
            self._leave_word(closed)
            return
        self._times.look(self._watch.look(last=True), self._capture.report(), last=True)
        # Where the last keepers have died, nobody would start another after this one.
        self._session.keeper.longest_pause_s = start.NO_PAUSE_S
        self.slots.drop_ready(min(time.monotonic() + self.patience_s, self.deadline_s))
        try:
            if time.monotonic() < self.deadline_s:  # else to the keeper it is a death like any other
                self._send_events()
            if closed and time.monotonic() < self.deadline_s:
                self._session.keeper.closing()
        except (FlashckptError, OSError) as error:
            log.warning("the keeper could not be told that the run was let go: %s", error)
        self._leave_word(closed)
        self.slots.close()

    def _leave_word(self, closed: bool) -> None:
        """Where the keeper finds it when this process's lock is free, whether it was told or not: it would
        take the end for a death, and hold on to its slots for the next attempt."""
        if closed and time.monotonic() < self.deadline_s:
            with contextlib.suppress(OSError):
                self._session.life.say_closed()

    # ---- the thread

    def _run(self) -> None:
        while not self._ended:
            self._tended = self._tried(self._round, "the keeper cannot be asked")
            self._tried(self._look_at_attempts, "the run's attempts cannot be looked at")
            self._tried(self._look_at_start, "the run's steps cannot be looked at")
            self._look_at_ranks()
            with self._answered:
                self._rounds += 1
                self._answered.notify_all()
            self._rest(_WAITING_TICK_S if self._waiting else _TICK_S)
            self._woken.clear()

    def _rest(self, seconds: float) -> None:
        """Until the next round, or until it is woken."""
        until_s = time.monotonic() + seconds
        tick_s = _TICK_S if self._pacing.is_alone else _RANKS_TICK_S
        while (left_s := until_s - time.monotonic()) > 0 and not self._woken.wait(min(left_s, tick_s)):
            self._look_at_ranks()

    def _look_at_start(self) -> None:
        """Whether what this attempt went on from is on this node's own disk, or in the remote: what one node
        has in memory is on its way there, another may have it there already. Once is said by one rank of the
        node."""
        session, loaded = self._session, self._session.loaded
        is_due = session.ranks is not None and session.environment.rank == session.group.node[0]
        if not is_due or self._began_from_storage or loaded is None:
            return
        if time.monotonic() - self._start_looked_s >= _START_LOOK_S:
            self._start_looked_s = time.monotonic()
            remote = () if session.remote_run is None else session.remote_run.steps
            if loaded in remote or is_committed(session.store, loaded.step, loaded.attempt):
                self._began_from_storage = True
                self._pacing.began_from_storage()

    def _look_at_ranks(self) -> None:
        self._tried(partial(self._pacing.look, self.slots), "the other ranks cannot be heard")
        self._capture.hold_whole(self._pacing.held_whole)

    def _tried(self, deed: Callable[[], None], failed: str) -> bool:
        """Whether it was done. What keeps it from being done is said, and tried again in the next round."""
        try:
            deed()
        except (FlashckptError, OSError) as error:
            self._say_once(f"{failed}: {error}")
        except Exception as error:  # a fault of ours must not leave the run without an attendant
            self._say_once(f"the attendant met {error!r} and goes on")
            log.debug("in the attendant", exc_info=True)
        else:
            return True
        return False

    def _round(self) -> None:
        self._times.look(self._watch.look(), self._capture.report())
        keeper = self._session.keeper
        longest_s = start.AWAITED_PAUSE_S if self._waiting else start.LONGEST_PAUSE_S
        keeper.longest_pause_s = start.NO_PAUSE_S if self._ended else longest_s
        if keeper.tend():
            log.warning("the keeper had died and was started again; what it was writing is written again")
        common = self._pacing.committed if self._session.ranks is not None else ()
        self.status = keeper.status(awaited=self._hurried, common=common)
        self._common = common  # the keeper knows it before this process ends because of it
        sealed, committed = self.newest_sealed_step(), self.status.newest_committed
        for event, fields in self._snapshots.look(sealed, committed):
            self.event(event, **fields)
        self._send_events()
        self._capture.keep_by_rank(self.status.diverged)
        for failure in self.status.failures:
            self._say_once(f"step {failure.step} could not be persisted: {failure.message}; training goes on")
        remote = self.status.remote
        if remote is not None and remote.error:
            key = f"remote {remote.newest}"  # a server that is away says it in many words
            self._say_once(f"nothing is copied to the remote: {remote.error}; training goes on", key)
        self.slots.tend()

    def _look_at_attempts(self) -> None:
        """Whether a newer attempt has claimed the run. Where each look costs a request, a keeper that answers
        has looked already, and all ranks of its node need not."""
        is_told = self._tended and not self._session.store.capabilities.appends
        told = AttemptName.parse(self.status.superseded_by or "") if is_told else None
        if told is not None and told.number > self._session.attempt.number:
            self.superseded_by = str(told)
        pause_s = _CLAIM_LOOK_BESIDE_S if is_told else _CLAIM_LOOK_S
        if self._ended or time.monotonic() - self._looked_s < pause_s:
            return
        self._looked_s = time.monotonic()
        newest = newest_claimed(self._session.store.at_once())
        if newest is not None and newest.number > self._session.attempt.number:
            self.superseded_by = str(newest)

    def _send_events(self) -> None:
        while self._events:
            self._session.keeper.event(self._events[0])
            self._events.popleft()

    def _say_once(self, text: str, key: str = "") -> None:
        if (key or text) not in self._said:
            # Each snapshot that fails has words of its own: weeks of them must not be remembered.
            if len(self._said) >= _MOST_SAID:
                self._said.clear()
            self._said.add(key or text)
            log.warning("%s", text)

    # ---- waiting

    @property
    def deadline_s(self) -> float:
        """The monotonic time past which nothing here waits any more."""
        return self._signals.deadline_s

    def _failed(self, reason: str, step: int | None = None) -> PersistError:
        newest = self.status.newest_committed
        held = "none is committed" if newest is None else f"the newest committed step is {newest}"
        what = "what was captured" if step is None else f"step {step}"
        return PersistError(
            f"{what} could not be persisted: {reason}. It is sealed in this node's memory unless it was "
            f"torn, and the keeper tries again; on disk, {held}. Make room or mend the storage.",
            step=step,
            path=self._session.store.url,
        )

    def _wait_until(
        self, done: Callable[[], bool], patience_s: float, *, hurried: bool = False, step: int | None = None
    ) -> bool:
        """Wait for the thread's rounds until `done`. False after `patience_s` in which no keeper wrote or
        committed anything; for parts of `step` on other nodes it waits longer."""
        self._waiting += 1
        self._hurried = hurried
        self._woken.set()
        try:
            moved_s, advance = time.monotonic(), Advance(self.status, step)
            with self._answered:
                while not done():
                    self._answered.wait(min(_TICK_S, max(0.0, self.deadline_s - time.monotonic())))
                    # Parts of ranks that are gone never come: they are not given minutes.
                    if advance.has_come(self.status, awaits_others=self._pacing.awaits_others):
                        moved_s = time.monotonic()
                    if time.monotonic() > min(moved_s + patience_s, self.deadline_s):
                        return False
            return True
        finally:
            self._hurried = False
            self._waiting -= 1


class CommitWait:
    """One wait for the snapshot of `step`, for at most `patience_s` seconds of failing.

    A failure of storage may pass (a server's hiccup, a disk that somebody makes room on): the keeper tries
    again, so its first failure ends no wait. What ends one is a snapshot that was torn, one that the keeper
    has given up, and tries that go on failing. A try under way is waited for: it may be the one that works.
    `generation` None takes any snapshot of the step; `before` is the keeper's answer before the wait.
    """

    def __init__(
        self,
        step: int,
        generation: int | None,
        patience_s: float,
        before: Status,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step, self._generation = step, generation
        self._patience_s, self._clock = patience_s, clock
        self._torn_before = before.torn
        self._failing_since_s: float | None = None

    def refusal(self, status: Status, rounds: int) -> str | None:
        """Why to wait no longer, in words; None while it is worth it. `rounds`: answers since the wait
        began."""
        for torn in status.torn:
            if torn.step == self._step and torn not in self._torn_before:
                return f"its bytes are not those of its boundary ({', '.join(torn.leaves) or 'metadata'})"
        failure = self.failure(status)
        if failure is None:
            return None
        if self._failing_since_s is None:
            self._failing_since_s = self._clock()
        if status.persisting == self._step:
            return None
        given_up = rounds >= _FRESH_ROUNDS and self._step not in status.waiting
        if given_up or self._clock() - self._failing_since_s > self._patience_s:
            return failure.message
        return None

    def failure(self, status: Status) -> Failure | None:
        """The keeper's last try in vain."""
        mine = (
            each
            for each in reversed(status.failures)
            if each.step == self._step and self._generation in (None, each.generation)
        )
        return next(mine, None)


class Advance:
    """Whether keepers get on with what is waited for: they write, or commit.

    One that is killed at each try (no memory left for it) writes as well before it is, and so does the next
    one: after a few of them without a commit only a commit counts, or the wait would never end. Keepers of
    other nodes write unseen: where only their parts of `step` are missing, they are given some minutes.
    """

    def __init__(
        self, status: Status, step: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._step, self._clock = step, clock
        self._others_since_s: float | None = None
        self._newest = status.newest_committed
        self._keepers = {status.keeper}
        self._seen = self._seen_of(status)

    def has_come(self, status: Status, *, awaits_others: bool = True) -> bool:
        """Whether there was any since the last call. `awaits_others`: the other ranks live."""
        newest = status.newest_committed
        if newest is not None and (self._newest is None or newest > self._newest):
            self._newest = newest
            self._keepers.clear()
        self._keepers.add(status.keeper)
        before, self._seen = self._seen, self._seen_of(status)
        return before != self._seen or (awaits_others and self._are_others_at_it(status))

    def _are_others_at_it(self, status: Status) -> bool:
        if self._step not in status.for_others:
            return False
        if self._others_since_s is None:
            self._others_since_s = self._clock()
        return self._clock() - self._others_since_s < _OTHERS_S

    def _seen_of(self, status: Status) -> object:
        if len(self._keepers) > _MOST_KEEPERS:
            return self._newest
        return status.keeper, status.committed, status.progress_bytes
