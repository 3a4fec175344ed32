"""Saving what is sealed in memory where no keeper is left: adopted, audited and persisted as a keeper does.

Owns the order (newest first, an older one where a newer is torn) and which regions go afterwards. The
caller holds the keeper's lock. Nothing is persisted whose bytes differ; a step of a branch that was left
never becomes visible; a region that holds the only copy of something stays.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace
from typing import Any

from flashckpt.commit import attempts, retention, steps
from flashckpt.commit.lineage import VisibleStep
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.events import Event, log
from flashckpt.format.checked_json import strict_loads
from flashckpt.format.names import AttemptName
from flashckpt.keeper import chores
from flashckpt.keeper.drain import Drain, Order, Outcome, Result, attempt_of
from flashckpt.keeper.ledger import Ledger
from flashckpt.keeper.protocol import LOG_NAME, SOCKET_NAME
from flashckpt.keeper.regions import HeldRegion, Regions
from flashckpt.memory.page import State
from flashckpt.memory.region import is_region_name
from flashckpt.memory.runtime import LifeLock
from flashckpt.memory.slot import Sealed
from flashckpt.recovery import report
from flashckpt.recovery.node import Hold
from flashckpt.recovery.report import Finding, Kind, Watcher, foreign
from flashckpt.recovery.resting import Examined
from flashckpt.recovery.survey import slots_in

_PAUSES_S = (0.1, 0.5, 2.0)
"""Before each further try of a write that failed: a server's hiccup is over by then, a full disk is not."""
_POLL_S = 0.1
_SHOWN = 8

_OUTCOMES = {
    Result.COMMITTED: report.Outcome.COMMITTED,
    Result.TORN: report.Outcome.TORN,
    Result.SUPERSEDED: report.Outcome.KEPT,
    Result.WAITING: report.Outcome.KEPT,
}


class Draining:
    """The slots of a run without a keeper. `hold` must have its keeper's lock."""

    def __init__(self, hold: Hold, watcher: Watcher, ledger: Ledger) -> None:
        assert hold.election is not None
        self._hold, self._store, self._runtime = hold, hold.store, hold.runtime
        self._watcher, self._ledger = watcher, ledger
        nonce = secrets.token_hex(4)
        life = LifeLock.acquire(self._runtime, f"keeper-{nonce}.lock")
        assert life is not None, "a nonce came twice"
        self._life = life
        self._regions = Regions(self._runtime, life)
        self._drain = Drain(self._store, nonce)
        self._findings: dict[str, Finding] = {}
        self._saved: dict[str, VisibleStep] = {}

    @property
    def findings(self) -> list[Finding]:
        return list(self._findings.values())

    @property
    def failed(self) -> set[AttemptName]:
        """Attempts of which something could not be saved."""
        failed = (each for each in self._findings.values() if each.outcome is report.Outcome.FAILED)
        return {each.attempt for each in failed if each.attempt is not None}

    def save(self) -> None:
        """Persist and commit what counts; afterwards `findings` has one row for each snapshot."""
        self._regions.adopt_named()
        self._regions.reclaim()
        for rank in sorted({held.slot.rank for held in self._regions.slots()}):
            self._save_rank(rank)
        for each in slots_in(self._runtime):
            if not each.is_slot:
                self._findings[each.slot] = foreign(each.slot, each.problem)

    def let_go(self, examined: Examined, *, discard: bool) -> None:
        """Remove the regions whose snapshots rest elsewhere, or count no more. `examined` are the steps at
        rest: what memory has of one that is not whole stays. With `discard` also what is saved nowhere."""
        protected = self._protected(examined)
        kept = protected | self._needed()
        for held in self._regions.slots():
            self._hold.guard()
            name = held.slot.name
            if name in protected or (name in kept and not discard):
                continue
            if name in kept:
                self._watcher.say(_lost(self._findings[name]))
                self._note(name, report.Outcome.DISCARDED)
                self._tell(self._findings[name])
            elif name in self._findings and self._findings[name].outcome is report.Outcome.KEPT:
                self._note(name, report.Outcome.DROPPED)
            self._regions.remove(held)
        self._hold.guard()
        self._regions.drop_constants()
        self._forget_dead_keepers()

    def _forget_dead_keepers(self) -> None:
        """Their locks say whose half-written shards may go. None is being elected: we hold the lock."""
        dead = [nonce for nonce, lives in self._regions.other_keepers().items() if not lives]
        self._hold.guard()
        try:
            gone = retention.sweep_unfinished(self._store, dead)
        except (OSError, FlashckptError) as error:
            log.warning("what dead keepers left could not be removed (%s); the next keeper tries it", error)
            return
        if gone:
            self._ledger.add(None, Event.PRUNE, unfinished=gone[:_SHOWN], count=len(gone), by="recover")
        for nonce in dead:
            self._regions.forget_keeper(nonce)

    def close(self) -> None:
        """Let the slots that stay be found by the next keeper, and leave no name behind but theirs."""
        for held in self._regions.everything():
            held.slot.close()
        with contextlib.suppress(OSError, FlashckptError):
            if self._hold.election is not None and self._hold.election.stands(self._runtime):
                self._regions.remove_dead_locks()
                self._forget_dead_keepers()
                if self._runtime.check_socket(SOCKET_NAME):
                    self._runtime.remove(SOCKET_NAME)
                # The log explains the regions, and goes when none is left.
                if not any(map(is_region_name, self._runtime.names())):
                    self._runtime.remove(LOG_NAME)
        self._life.release(self._runtime)

    # Saving

    def _save_rank(self, rank: int) -> None:
        """The newest that can be saved; and the others that their trainer had asked for."""
        is_saved, has_failed = False, False
        for held, sealed in self._newest_first(rank):
            finding = _finding(held, sealed)
            self._findings[held.slot.name] = finding
            if held.slot.persisted == sealed.generation:
                self._saved[held.slot.name] = self._place(held, sealed)
                self._note(held.slot.name, report.Outcome.WAS_COMMITTED)
                is_saved = True
            elif has_failed:
                self._note(held.slot.name, report.Outcome.KEPT, report.NEWER_FAILED)
            elif not is_saved or held.slot.wants_persist(sealed.generation):
                self._hold.guard()
                outcome = self._persist(held, sealed)
                is_saved |= outcome.result is Result.COMMITTED
                # One without its region says nothing of storage: an older one may have what it needs.
                has_failed |= outcome.result in (Result.FAILED, Result.WAITING) and not outcome.lacks_region

    def _newest_first(self, rank: int) -> list[tuple[HeldRegion, Sealed]]:
        found = []
        for held in self._regions.of_rank(rank):
            try:
                sealed = held.slot.sealed()
            except DamagedError as error:
                self._discard_damaged(held, str(error))
                continue
            if sealed is not None:
                found.append((held, sealed))
        return sorted(found, key=lambda pair: pair[1].age, reverse=True)

    def _discard_damaged(self, held: HeldRegion, why: str) -> None:
        """A record that does not match its checksum names no snapshot that anybody could use."""
        self._findings[held.slot.name] = Finding(
            kind=Kind.SNAPSHOT, outcome=report.Outcome.TORN, place=held.slot.name, detail=why, damage=True
        )
        word = held.word()
        if word is not None and word.state is State.SEALED:
            held.slot.free(word)

    def _persist(self, held: HeldRegion, sealed: Sealed) -> Outcome:
        world = self._world(sealed)
        order = Order(
            slot=held.slot,
            generation=sealed.generation,
            owner=self._regions.own_index(held),
            world=world,
            is_alone=world == 1 and not any(self._regions.other_keepers().values()),
            environment=_environment(held, sealed),
            constants=self._regions.shared_by(held),
        )
        outcome = self._written(order, sealed)
        for pause_s in _PAUSES_S:
            if outcome.result is not Result.FAILED or outcome.lacks_region:
                break
            time.sleep(pause_s)
            self._hold.guard()
            outcome = self._written(order, sealed)
        self._follow(held, outcome)
        if outcome.result is Result.COMMITTED:
            self._saved[held.slot.name] = self._place(held, sealed)
        return outcome

    def _world(self, sealed: Sealed) -> int:
        """As many ranks as its attempt has, which nobody is left to say."""
        start = attempts.read_start(self._store, attempt_of(sealed))
        return 1 if start is None else start.world

    def _written(self, order: Order, sealed: Sealed) -> Outcome:
        """Persist in a thread, so that progress is told meanwhile."""
        before = self._drain.progress_bytes
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(self._drain.persist, order)
            while True:
                try:
                    return future.result(timeout=_POLL_S)
                except NotYet:
                    if future.done():
                        raise
                    self._watcher.progress(self._drain.progress_bytes - before, sealed.record.image_bytes)

    def _follow(self, held: HeldRegion, outcome: Outcome) -> None:
        name, fields = held.slot.name, {"step": outcome.step, "slot": outcome.slot, "by": "recover"}
        detail = outcome.message
        if outcome.result is Result.WAITING:
            detail = "its part is saved; it is committed once those of the other ranks are there"
        if outcome.leaves:
            names = ", ".join(leaf for _, leaf in outcome.leaves[:_SHOWN])
            detail = f"not the bytes of its boundary: {names}"
        self._note(name, _OUTCOMES.get(outcome.result, report.Outcome.FAILED), detail)
        match outcome.result:
            case Result.COMMITTED:
                if outcome.num_bytes:
                    persisted = {"num_bytes": outcome.num_bytes, "seconds": round(outcome.seconds, 4)}
                    self._ledger.add(
                        outcome.attempt, Event.PERSIST, **fields, **persisted, direct=outcome.direct
                    )
                self._ledger.add(outcome.attempt, Event.COMMIT, **fields)
            case Result.TORN:
                self._findings[name] = replace(self._findings[name], damage=True)
                leaves = [leaf for _, leaf in outcome.leaves[:100]]
                self._ledger.add(
                    outcome.attempt or None, Event.TORN, **fields, leaves=leaves, message=outcome.message
                )
            case _:
                self._ledger.add(
                    outcome.attempt or None, Event.ERROR, **fields, what="recover", message=outcome.message
                )

    # Letting go

    def _protected(self, examined: Examined) -> set[str]:
        """Slots that hold the good copy of a step that is damaged at rest, where no newer one is whole."""
        protected = set()
        newest = max((each.step for each in examined.whole), default=-1)
        for name, saved in self._saved.items():
            if saved in examined.damaged and saved.step > newest:
                protected.add(name)
                self._note(
                    name, report.Outcome.KEPT, "its copy at rest is not whole: training resumes from memory"
                )
        return protected

    def _needed(self) -> set[str]:
        """Slots that hold something which is committed nowhere and still counts."""
        kept, survivors, failed = set(), [], self.failed
        for held in self._regions.slots():
            sealed, saved = held.sealed(), self._saved.get(held.slot.name)
            if sealed is None or (
                saved is not None and steps.is_committed(self._store, saved.step, saved.attempt)
            ):
                continue
            attempt = attempt_of(sealed)
            if attempt in failed:
                kept.add(held.slot.name)
            survivors.append(chores.Survivor(slot=held.slot.name, attempt=attempt, step=sealed.step))
        try:
            return kept | (chores.needed(self._store, survivors) if survivors else set())
        except (OSError, FlashckptError):
            return kept | {each.slot for each in survivors}

    def _place(self, held: HeldRegion, sealed: Sealed) -> VisibleStep:
        """Where a committed snapshot rests: one that a newer attempt was loaded from may be either's."""
        own = VisibleStep(sealed.step, attempt_of(sealed))
        attempt, _ = self._drain.attempt_for(held.slot, sealed)
        is_there = steps.is_committed(self._store, sealed.step, attempt)
        return VisibleStep(sealed.step, attempt) if is_there else own

    def _note(self, name: str, outcome: report.Outcome, detail: str | None = None) -> None:
        found = self._findings[name]
        self._findings[name] = replace(
            found, outcome=outcome, detail=found.detail if detail is None else detail
        )

    def _tell(self, lost: Finding) -> None:
        attempt = None if lost.attempt is None else str(lost.attempt)
        self._ledger.add(attempt, Event.CLOSE, what="discard", step=lost.step, slot=lost.place, by="recover")


def _finding(held: HeldRegion, sealed: Sealed) -> Finding:
    return Finding(
        kind=Kind.SNAPSHOT,
        outcome=report.Outcome.KEPT,
        place=held.slot.name,
        step=sealed.step,
        attempt=attempt_of(sealed),
        num_bytes=sealed.record.image_bytes + sealed.record.constants_bytes,
    )


def _environment(held: HeldRegion, sealed: Sealed) -> Mapping[str, Any]:
    """With what it was computed, as its trainer wrote it among its values."""
    try:
        values = strict_loads(held.slot.metadata(sealed).values, what="a slot's values")
    except DamagedError:
        return {}
    found = values.get("environment")
    return found if isinstance(found, dict) else {}


def _lost(found: Finding) -> str:
    return (
        f"discarding step {found.step} of attempt {found.attempt}, which is committed nowhere ({found.place})"
    )
