"""Recovering a run. Owns the order of its steps, each of which may be killed and done again.

    look → drain memory → finish commits → verify, mark → clear debris → let regions go → say what is next

Memory comes first: it is the one thing that a reboot would take. A region goes last, once what it held is
known to be whole at rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from flashckpt.commit import attempts
from flashckpt.commit.run import open_run
from flashckpt.events import Event, log
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Run
from flashckpt.keeper.protocol import Status
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.persist.ledger import Ledger
from flashckpt.recovery import at_rest, lingering
from flashckpt.recovery.debris import clear
from flashckpt.recovery.dry_run import dry_run as look
from flashckpt.recovery.memory import Memory
from flashckpt.recovery.node import Hold, dead_keepers, died_here, hold, refuse_if_held, runtime_of
from flashckpt.recovery.report import Finding, Kind, Outcome, Report, Silent, Watcher, foreign
from flashckpt.recovery.survey import resume_of, slots_in
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
            return look(store, run, runtime, watcher, discard=discard, read=read)
    with hold(store, run) as held:
        return _Recovery(held, run, watcher, discard=discard, read=read).report()


class _Recovery:
    def __init__(self, held: Hold, run: Run, watcher: Watcher, *, discard: bool, read: bool) -> None:
        self._hold, self._run, self._watcher = held, run, watcher
        self._store = held.store
        self._discard, self._read = discard, read
        self._ledger = Ledger(held.store)

    def report(self) -> Report:
        with contextlib.closing(self._ledger):
            keeper, told = self._ask()
            with contextlib.closing(Memory(self._hold, self._watcher, self._ledger)) as memory:
                return self._report(memory, keeper, told)

    def _report(self, memory: Memory, keeper: int | None, told: list[Finding]) -> Report:
        if keeper is None:
            memory.save()
        self._watcher.stage("committing")
        parts = memory.finish(read=self._read)
        self._watcher.stage("verifying")
        examined = at_rest.examine(self._store, self._watcher, read=self._read)
        self._watcher.stage("marking")
        self._hold.guard()
        at_rest.mark(self._store, examined, self._ledger)
        if keeper is None:
            self._bury(memory.unsaved)
        self._watcher.stage("clearing")
        writers = dead_keepers(self._hold.runtime) if keeper is None else set()
        debris = clear(self._hold, writers, self._ledger)
        if keeper is None:
            if not any(each.outcome is Outcome.FAILED for each in debris):
                memory.forget_dead_keepers()
            self._watcher.stage("letting go")
            memory.let_go(examined, discard=self._discard)
        self._watcher.stage("resume")
        resume, problem = resume_of(self._store, self._hold.runtime, examined.damaged)
        self._ledger.add(
            None, Event.RECOVER, resume=None if resume is None else resume.step, problem=problem or None
        )
        return Report(
            run=self._store.url,
            run_id=self._run.run_id,
            dry_run=False,
            verified=self._read,
            keeper=keeper,
            findings=(*told, *memory.findings, *parts, *examined.findings, *debris),
            whole=len(examined.whole),
            num_bytes=examined.num_bytes,
            resume=resume,
            resume_problem=problem,
        )

    def _ask(self) -> tuple[int | None, list[Finding]]:
        """Let a keeper that lives save what it has: its process, and what it says. One that leaves meanwhile,
        or that is to, is replaced: then None."""
        runtime = self._hold.runtime
        self._watcher.stage("draining")
        if self._hold.election is not None:
            return None, []
        keeper = lingering.keeper_of(runtime)
        status = lingering.wait_until_saved(self._store.url, runtime, self._watcher, self._hold.guard)
        if self._discard and status is not None:
            lingering.end(runtime)
            status = None
        if status is None:
            self._hold.take_election()
            return None, []
        return keeper or 0, _told(runtime, status)

    def _bury(self, unsaved: Collection[AttemptName]) -> None:
        """Say of the attempts that died on this node that they are dead, so that the next job need not
        watch them; not before everything of theirs is saved."""
        died = died_here(self._store, self._hold.runtime)
        # After the look: a job that has claimed meanwhile is among them, and lives.
        self._hold.guard()
        for name in died:
            if name not in unsaved:
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
    reasons |= dict.fromkeys(status.for_others, "its part is saved; those of other nodes are missing")
    reasons |= {each.step: each.message for each in status.failures}
    findings = []
    for each in slots_in(runtime):
        if not each.is_slot:
            findings.append(foreign(each.slot, each.problem))
            continue
        outcome = Outcome.WAS_COMMITTED if each.is_persisted else Outcome.KEPT
        if each.problem:
            outcome = Outcome.TORN
        elif each.step in status.for_others:
            outcome = Outcome.KEPT
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
