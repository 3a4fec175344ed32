"""What to persist or audit next, and what follows from how it went.

Owns the choice of the next order, the tries of failed ones, and the rescue of what a dead trainer
left. The bytes are the drain's.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from flashckpt.events import Event, log
from flashckpt.format.names import AttemptName
from flashckpt.keeper.drain import Drain, Order, Outcome, Result, attempt_of
from flashckpt.keeper.ledger import Ledger
from flashckpt.keeper.protocol import Status
from flashckpt.keeper.pruner import Pruner
from flashckpt.keeper.regions import HeldRegion, Regions
from flashckpt.keeper.tally import Tally
from flashckpt.keeper.trainers import Trainer
from flashckpt.keeper.worker import Worker
from flashckpt.memory.page import State
from flashckpt.memory.slot import Sealed

_LONGEST_WAIT_S = 300.0
_MOST_DOUBLINGS = 10
_AWAITED_RETRY_S = 1.0
# An audit may take this share of the time, so that idle means idle for the trainer too.
_AUDIT_SHARE = 0.05
_LEAST_AUDIT_PAUSE_S = 1.0
_LOOK_PAUSE_S = 0.2

_Done = Callable[[Outcome | BaseException], None]


class Work:
    def __init__(
        self, regions: Regions, tally: Tally, ledger: Ledger, drain: Drain, worker: Worker, pruner: Pruner
    ) -> None:
        self.pruner = pruner
        self._regions = regions
        self._tally = tally
        self._ledger = ledger
        self._drain = drain
        self.worker = worker
        self._known: dict[int, Trainer] = {}
        self._living: set[int] = set()
        self._audit_at = 0.0
        self._is_hurried = threading.Event()
        self._begun_before = False

    # What is to be done

    def know(self, trainers: Iterable[Trainer]) -> None:
        """Who lives. What a dead trainer said (what to keep, its environment) holds for what it left."""
        living = list(trainers)
        self._living = {trainer.rank for trainer in living}
        for trainer in living:
            if trainer.attempt is not None:
                self._known[trainer.rank] = trainer

    def rescue(self, rank: int, *, past_given_up: bool = False) -> None:
        """Ask for the newest sealed snapshot that a dead or stuck trainer left, whether it had asked or
        not; `past_given_up`, for the newest of those that are not. One that lives after all may ask for a
        newer one in the same slot meanwhile: that stands."""
        asked = {held.slot.name: held.slot.asked for held in self._regions.of_rank(rank)}
        newest = self._newest(rank, past_given_up=past_given_up)
        if newest is None:
            return
        held, sealed = newest
        if held.slot.persisted != sealed.generation and held.given_up != sealed.generation:
            held.urgent = sealed.generation
            held.slot.request_persist_after(asked[held.slot.name], sealed.generation)

    def is_saved(self, rank: int) -> bool:
        """Whether the newest sealed snapshot of a rank is committed."""
        newest = self._newest(rank)
        return newest is not None and newest[0].slot.persisted == newest[1].generation

    def is_settled(self, rank: int) -> bool:
        """Whether it is, or its last try has failed, or there is none."""
        newest = self._newest(rank)
        if newest is None or self.is_saved(rank):
            return True
        held, sealed = newest
        return sealed.generation in (held.slot.failed[0], held.given_up)

    def next(self) -> None:
        """Give the worker its next order, if it is free and there is one."""
        wanted = self._wanted()
        if self.worker.busy:
            if wanted is not None:
                # An audit is for idle time: of a large state it would take a run's grace.
                self._is_hurried.set()
            return
        if wanted is not None:
            self._submit(*wanted)
        elif time.monotonic() >= self._audit_at:
            self._audit_newest()

    def try_again(self) -> None:
        """Somebody has mended something: what has failed so far, and fails in the try under way, says nothing
        any more."""
        self._begun_before = self._tally.persisting is not None
        self._tally.forget_failures({(held.slot.name, held.given_up) for held in self._regions.slots()})
        for held in self._regions.slots():
            held.retry_at = 0.0

    def status(self, attempt: AttemptName | None, awaited: bool = False) -> Status:
        """What concerns an attempt. Slots know of commits of an earlier keeper, too. `awaited`: somebody
        waits, so what failed is tried again soon, however often it has failed."""
        for held in self._regions.slots() if awaited else ():
            held.retry_at = min(held.retry_at, held.failed_at + _AWAITED_RETRY_S)
        committed = [
            sealed.step
            for held in self._regions.slots()
            if (sealed := held.sealed()) is not None
            and held.slot.persisted == sealed.generation
            and attempt in (None, attempt_of(sealed))
        ]
        return self._tally.status(
            str(attempt) if attempt else None,
            waiting=[sealed.step for _, sealed in self._due()],
            committed=committed,
            progress_bytes=self._drain.progress_bytes,
        )

    def is_pending(self, attempt: AttemptName | None = None) -> bool:
        """Whether something of an attempt (of any) is still to be persisted."""
        return any(attempt is None or attempt_of(sealed) == attempt for _, sealed in self._due())

    def tidy(self) -> None:
        """Remove retired slots that hold nothing which is still to be persisted or the newest."""
        for held in self._regions.slots():
            if not held.retired:
                continue
            sealed = held.sealed()
            if sealed is not None and sealed.word.state is State.SEALED and not self.is_needed(held, sealed):
                held.slot.free(sealed.word)
            if held.state() is State.FREE:
                self._regions.remove(held)
        self._regions.drop_constants()

    def is_needed(self, held: HeldRegion, sealed: Sealed) -> bool:
        """Whether a snapshot is the newest of its rank, or still to be persisted."""
        newest = self._newest(held.slot.rank)
        if newest is not None and newest[0] is held:
            return True
        return held.slot.wants_persist(sealed.generation) and held.given_up != sealed.generation

    def _newest(self, rank: int, *, past_given_up: bool = False) -> tuple[HeldRegion, Sealed] | None:
        found = [(held, held.sealed()) for held in self._regions.of_rank(rank)]
        whole = [(held, sealed) for held, sealed in found if sealed is not None]
        if past_given_up:
            whole = [(held, sealed) for held, sealed in whole if held.given_up != sealed.generation]
        return max(whole, key=lambda pair: pair[1].age, default=None)

    def _due(self) -> list[tuple[HeldRegion, Sealed]]:
        due = []
        for held in self._regions.slots():
            sealed = held.sealed()
            if sealed is None or held.given_up == sealed.generation:
                continue
            if held.slot.wants_persist(sealed.generation):
                due.append((held, sealed))
        return due

    def _wanted(self) -> tuple[HeldRegion, int, int] | None:
        """Slot, generation and step to persist now: the newest of a dead trainer first, else oldest first."""
        now, ready = time.monotonic(), []
        for held in self._regions.slots():
            word = held.word()
            if word is None or word.state is not State.SEALED:
                continue
            if not held.slot.wants_persist(word.generation):
                continue
            if held.given_up == word.generation or held.tried == word.generation and now < held.retry_at:
                continue
            sealed = held.sealed()
            step = sealed.step if sealed is not None else -1
            urgent = held.urgent == word.generation
            ready.append(((not urgent, -step if urgent else step), held, word.generation, step))
        if not ready:
            return None
        _, held, generation, step = min(ready, key=lambda row: row[0])
        return held, generation, step

    # Doing it

    def _order(self, held: HeldRegion, generation: int) -> Order:
        trainer = self._known.get(held.slot.rank)
        world = trainer.world if trainer else 1
        return Order(
            slot=held.slot,
            generation=generation,
            owner=self._regions.own_index(held),
            world=world,
            is_alone=world == 1 and not any(self._regions.other_keepers().values()),
            keep=trainer.keep if trainer else None,
            environment=trainer.environment if trainer else {},
            constants=self._regions.shared_by(held),
        )

    def _submit(self, held: HeldRegion, generation: int, step: int) -> None:
        order = self._order(held, generation)
        self._tally.persisting = step

        def done(outcome: Outcome | BaseException) -> None:
            self._tally.persisting = None
            begun_before, self._begun_before = self._begun_before, False
            if isinstance(outcome, BaseException):
                log.error("persisting step %d failed", step, exc_info=outcome)
                self._unpin_own(held, order.owner)
                outcome = Outcome(
                    result=Result.FAILED, slot=held.slot.name, generation=generation, step=step,
                    message=f"{type(outcome).__name__}: {outcome}",
                )  # fmt: skip
            if begun_before and outcome.result is Result.FAILED:
                return
            self._follow(held, outcome)
            if outcome.result is Result.COMMITTED and order.keep is not None:
                # After the commit was told, and beside the next one: nobody waits for deletions.
                self.pruner.committed(AttemptName.parse(outcome.attempt), order.keep, order.world)

        self._hand_over(order, partial(self._drain.persist, order), done)

    def _hand_over(self, order: Order, deed: Callable[[], Outcome], done: _Done) -> None:
        def ended(outcome: Outcome | BaseException) -> None:
            try:
                done(outcome)
            finally:
                self._regions.given_back()

        self._regions.lend([order.slot] + ([order.constants] if order.constants is not None else []))
        self.worker.submit(deed, ended)

    def _audit_newest(self) -> None:
        self._audit_at = time.monotonic() + _LOOK_PAUSE_S
        for rank in {held.slot.rank for held in self._regions.slots()}:
            newest = self._newest(rank)
            if newest is None or newest[1].word.state is not State.SEALED:
                continue
            held, generation = newest[0], newest[1].generation
            if generation in (held.audited, held.slot.persisted):
                continue
            order, began = self._order(held, generation), time.monotonic()

            def done(outcome: Outcome | BaseException, held: HeldRegion = held, began: float = began) -> None:
                pause = (time.monotonic() - began) / _AUDIT_SHARE
                self._audit_at = time.monotonic() + max(pause, _LEAST_AUDIT_PAUSE_S)
                if isinstance(outcome, BaseException):
                    log.error("an audit failed", exc_info=outcome)
                    return
                self._follow(held, outcome)

            self._is_hurried.clear()
            self._hand_over(order, partial(self._drain.audit, order, self._is_hurried.is_set), done)
            return

    # What follows

    def _follow(self, held: HeldRegion, outcome: Outcome) -> None:
        match outcome.result:
            case Result.COMMITTED:
                self._committed(held, outcome)
            case Result.TORN:
                self._torn(held, outcome)
            case Result.FAILED | Result.WAITING:
                self._failed(held, outcome)
            case Result.SUPERSEDED:
                self._superseded(held, outcome)
            case Result.SOUND:
                held.audited = outcome.generation
                self._tally.count("audited")

    def _committed(self, held: HeldRegion, outcome: Outcome) -> None:
        held.tries = 0
        self._tally.commit(outcome)
        fields = {"step": outcome.step, "rank": held.slot.rank, "slot": outcome.slot}
        if outcome.num_bytes:
            self._ledger.add(
                outcome.attempt, Event.PERSIST, **fields, num_bytes=outcome.num_bytes,
                seconds=round(outcome.seconds, 4), direct=outcome.direct,
            )  # fmt: skip
            self._tally.count("direct" if outcome.direct else "buffered")
        self._ledger.add(outcome.attempt, Event.COMMIT, **fields)
        self._release_older(outcome)

    def _release_older(self, outcome: Outcome) -> None:
        """A commit of a newer attempt settles what attempts before it left and it did not start from."""
        newest = AttemptName.parse(outcome.attempt)
        for held in self._regions.slots():
            sealed = held.sealed()
            if sealed is None or newest is None or sealed.word.state is not State.SEALED:
                continue
            if held.slot.name != outcome.slot and sealed.record.attempt_number < newest.number:
                held.slot.free(sealed.word)

    def _torn(self, held: HeldRegion, outcome: Outcome) -> None:
        self._tally.tear(outcome)
        names = [name for _, name in outcome.leaves]
        log.warning("step %d in %s was discarded: %s", outcome.step, outcome.slot, outcome.message)
        self._ledger.add(
            outcome.attempt or None, Event.TORN, step=outcome.step, slot=outcome.slot,
            rank=held.slot.rank, leaves=names[:100], count=len(names), message=outcome.message,
        )  # fmt: skip
        if held.slot.rank not in self._living:
            self.rescue(held.slot.rank)

    def _failed(self, held: HeldRegion, outcome: Outcome) -> None:
        held.tries = held.tries + 1 if held.tried == outcome.generation else 1
        held.tried = outcome.generation
        held.failed_at = time.monotonic()
        held.retry_at = held.failed_at + pause_s(held.tries)
        if outcome.result is Result.WAITING:
            return
        if outcome.lacks_region and held.slot.rank not in self._living:
            # Nobody is left who could hand it over. The snapshot stays, and keeps no keeper for ever.
            held.given_up = outcome.generation
            # An older one may hold its constants itself, and be newer than all that is committed.
            self.rescue(held.slot.rank, past_given_up=True)
        held.slot.set_failed(outcome.generation, outcome.errno or errno.EIO)
        if self._tally.fail(outcome):
            log.error("step %d is not persisted: %s", outcome.step, outcome.message)
            self._ledger.add(
                outcome.attempt or None, Event.ERROR, what="persist", step=outcome.step, slot=outcome.slot,
                errno=outcome.errno, message=outcome.message,
            )  # fmt: skip

    def _superseded(self, held: HeldRegion, outcome: Outcome) -> None:
        held.given_up = outcome.generation
        held.slot.set_failed(outcome.generation, errno.ESTALE)
        self._tally.fail(outcome)
        # Said also where a try before it failed: this is the last word on the snapshot.
        log.warning("step %d is not persisted: %s", outcome.step, outcome.message)
        self._ledger.add(
            outcome.attempt or None, Event.ERROR, what="superseded", step=outcome.step,
            slot=outcome.slot, message=outcome.message,
        )  # fmt: skip

    def _unpin_own(self, held: HeldRegion, owner: int) -> None:
        word = held.word()
        if word is not None and word.state is State.PINNED and word.owner == owner:
            held.slot.unpin(word)


def pause_s(tries: int) -> float:
    """Seconds until a write that failed so many times is tried again."""
    # A server that is away for a long weekend is a thousand tries, and two to that power is no number.
    return min(2.0 ** min(tries - 1, _MOST_DOUBLINGS), _LONGEST_WAIT_S)
