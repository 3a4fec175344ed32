"""Recovering a run. Owns the order of its steps, each of which may be killed and done again.

    look → drain memory → finish commits → verify, mark → clear debris → let regions go → say what is next

Memory comes first: it is the one thing that a reboot would take. A region goes last, once what it held is
known to be whole at rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from flashckpt.commit import attempts
from flashckpt.commit.run import open_run
from flashckpt.events import Event, log
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Run
from flashckpt.keeper.ledger import Ledger
from flashckpt.keeper.protocol import Status
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.recovery import clearing, lingering, outlook, resting
from flashckpt.recovery.draining import Draining
from flashckpt.recovery.foresight import foreseen
from flashckpt.recovery.node import Hold, died_here, hold, refuse_if_held, runtime_of
from flashckpt.recovery.report import Finding, Kind, Outcome, Report, Silent, Watcher, foreign
from flashckpt.recovery.survey import slots_in
from flashckpt.store.base import Store


def recover(
    store: Store,
    *,
    dry_run: bool = False,
    discard: bool = False,
    read: bool = True,
    watcher: Watcher | None = None,
) -> Report:
    """Save what survived a crash and say where training goes on from.

    dry_run: only look; nothing at all is changed. discard: let go of what is in memory and can be committed
    nowhere. read: verify every byte of the visible steps.

    Raises RunHeldError while a job, or another recovery, has the run; NoSuchStepError and RunError where the
    folder is no run; KeeperError for a keeper that does not answer.
    """
    run = open_run(store, create=False)
    watcher = watcher or Silent()
    watcher.stage("looking")
    if dry_run:
        with runtime_of(store, run) as runtime:
            refuse_if_held(store, runtime)
            return foreseen(store, run, runtime, watcher, discard=discard, read=read)
    with hold(store, run) as held:
        return _Recovery(held, run, watcher, discard=discard, read=read).report()


@dataclass
class _Memory:
    """What became of the slots. `draining` is None while a keeper has them."""

    keeper: int | None = None
    draining: Draining | None = None
    findings: list[Finding] = field(default_factory=list)
    failed: set[AttemptName] = field(default_factory=set)


class _Recovery:
    def __init__(self, held: Hold, run: Run, watcher: Watcher, *, discard: bool, read: bool) -> None:
        self._hold, self._run, self._watcher = held, run, watcher
        self._store = held.store
        self._discard, self._read = discard, read
        self._ledger = Ledger(held.store)

    def report(self) -> Report:
        with contextlib.closing(self._ledger), self._memory() as memory:
            self._watcher.stage("committing")
            parts = self._finish()
            self._watcher.stage("verifying")
            examined = resting.examine(self._store, self._watcher, read=self._read)
            self._watcher.stage("marking")
            self._hold.guard()
            resting.mark(self._store, examined, self._ledger)
            self._bury(memory.failed)
            self._watcher.stage("clearing")
            debris = clearing.clear(self._hold, self._ledger)
            self._watcher.stage("letting go")
            if memory.draining is not None:
                memory.draining.let_go(examined, discard=self._discard)
                memory.findings = memory.draining.findings
            self._watcher.stage("resume")
            resume, problem = outlook.resume_of(self._store, self._hold.runtime, examined.damaged)
            self._ledger.add(
                None, Event.RECOVER, resume=None if resume is None else resume.step, problem=problem or None
            )
            return Report(
                run=self._store.url,
                run_id=self._run.run_id,
                dry_run=False,
                verified=self._read,
                keeper=memory.keeper,
                findings=(*memory.findings, *parts, *examined.findings, *debris),
                whole=len(examined.whole),
                num_bytes=examined.num_bytes,
                resume=resume,
                resume_problem=problem,
            )

    @contextlib.contextmanager
    def _memory(self) -> Iterator[_Memory]:
        """Everything in memory saved, by the keeper that has it or in its place."""
        memory = _Memory()
        if self._hold.election is None:
            self._watcher.stage("draining")
            self._ask(memory)
        if self._hold.election is None:
            yield memory
            return
        self._watcher.stage("draining")
        memory.draining = Draining(self._hold, self._watcher, self._ledger)
        try:
            memory.draining.save()
            memory.findings, memory.failed = memory.draining.findings, memory.draining.failed
            yield memory
        finally:
            memory.draining.close()

    def _ask(self, memory: _Memory) -> None:
        """Let a keeper that lives save what it has. One that leaves meanwhile, or that is to, is replaced."""
        runtime = self._hold.runtime
        memory.keeper = lingering.keeper_of(runtime)
        status = lingering.wait_until_saved(self._store.url, runtime, self._watcher, self._hold.guard)
        if self._discard and status is not None:
            lingering.end(runtime)
            status = None
        if status is None:
            memory.keeper = None
            self._hold.take_election()
            return
        memory.findings = _told(runtime, status)
        failed = (each for each in memory.findings if each.outcome is Outcome.FAILED)
        memory.failed = {each.attempt for each in failed if each.attempt is not None}

    def _finish(self) -> list[Finding]:
        findings = []
        # Oldest first: a kill in between leaves a run that goes on from an older step, as before.
        for rest in reversed(resting.unfinished(self._store)):
            self._hold.guard()
            findings.append(resting.finish(self._store, rest, self._ledger, read=self._read))
        return findings[::-1]

    def _bury(self, failed: set[AttemptName]) -> None:
        """Say of the attempts that died on this node that they are dead, so that the next job need not
        watch them; not before everything of theirs is saved."""
        if self._hold.election is None:
            return
        died = died_here(self._store, self._hold.runtime)
        # After the look: a job that has claimed meanwhile is among them, and lives.
        self._hold.guard()
        for name in died:
            if name not in failed:
                try:
                    attempts.mark_ended(self._store, name, "dead")
                except OSError as error:
                    # The next job finds out by itself.
                    log.warning("the end of attempt %s could not be written down: %s", name, error)
                    continue
                self._ledger.add(str(name), Event.DEATH, by="recover")


def _told(runtime: RuntimeFolder, status: Status) -> list[Finding]:
    """The keeper's slots, and what it said of them."""
    reasons = dict.fromkeys(status.waiting, lingering.STILL)
    reasons |= {each.step: each.message for each in status.failures}
    findings = []
    for each in slots_in(runtime):
        if not each.is_slot:
            findings.append(foreign(each.slot, each.problem))
            continue
        outcome = Outcome.WAS_COMMITTED if each.is_persisted else Outcome.KEPT
        if each.problem:
            outcome = Outcome.TORN
        elif each.step in status.waiting and not each.is_persisted:
            # What it has given up, because another attempt has begun since, it does not wait for any more.
            outcome = Outcome.FAILED
        findings.append(
            Finding(
                kind=Kind.SNAPSHOT,
                outcome=outcome,
                place=each.slot,
                step=each.step if each.attempt is not None else None,
                attempt=each.attempt,
                num_bytes=each.num_bytes,
                detail=each.problem or reasons.get(each.step, "the keeper has it"),
                damage=bool(each.problem),
            )
        )
    for torn in status.torn:
        why = f"not the bytes of its boundary: {', '.join(torn.leaves[:8]) or 'its metadata'}"
        findings.append(
            Finding(
                kind=Kind.SNAPSHOT,
                outcome=Outcome.TORN,
                place=torn.slot,
                step=torn.step,
                detail=why,
                damage=True,
            )
        )
    return findings
