"""Recovering a run, or only looking. Owns the order of its steps, each of which may be killed and done again.

    look → drain memory → finish commits → verify, mark → clear debris → let regions go → say what is next
    → bring the newest step to the remote, where one is named

Memory comes first: it is the one thing that a reboot would take. A region goes last, once what it held is
known to be whole at rest.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import closing
from dataclasses import replace

from flashckpt.commit import attempts, constants
from flashckpt.commit.attempts import open_run
from flashckpt.commit.lineage import VisibleStep
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Run
from flashckpt.keeper.protocol import Status
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.persist.deletions import unused_files
from flashckpt.persist.job import JobState, StepJob
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.stored_steps import refusal, unfinished
from flashckpt.persist.writer import REGION_IS_GONE, Writer
from flashckpt.recovery import keepers
from flashckpt.recovery.memory import MemoryRecovery, failed_of, settle
from flashckpt.recovery.node import (
    Hold,
    dead_keepers,
    died_here,
    hold,
    keeper_of,
    refuse_if_held,
    runtime_of,
)
from flashckpt.recovery.remote import bring_newest, look_at
from flashckpt.recovery.report import Fate, Finding, Kind, RecoveryReport, Watcher
from flashckpt.recovery.storage import Examined, clear, debris_found, examine, mark, parts_found
from flashckpt.recovery.survey import (
    Seen,
    has_own_disk,
    job_of,
    lacks_region,
    resume_of,
    slots_in,
    torn_leaves,
    unseen_ranks,
)
from flashckpt.recovery.uploads import dead_uploads, end_dead_uploads
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

_SHOWN = 8


def recover(
    store: Store,
    *,
    dry_run: bool = False,
    discard: bool = False,
    read: bool = True,
    remote: Store | None = None,
    watcher: Watcher | None = None,
) -> RecoveryReport:
    """Save what survived a crash and say where training goes on from.

    dry_run: only look; nothing at all is changed. discard: let go of what is in memory and can be committed
    nowhere. read: verify every byte of the visible steps. remote: the newest step goes there, last.

    Raises RunHeldError while a job, or another recovery, has the run; NoSuchStepError and RunError where the
    folder is no run; KeeperError for a keeper that does not answer.
    """
    told = watcher or Watcher()
    done = _recovered(store, told, remote, dry_run=dry_run, discard=discard, read=read)
    if remote is None:
        return done
    return replace(done, remote=bring_newest(store, remote, told, dry_run=dry_run))


def _recovered(
    store: Store, told: Watcher, remote: Store | None, *, dry_run: bool, discard: bool, read: bool
) -> RecoveryReport:
    run = open_run(store, create=False)
    told.stage("looking")
    if dry_run:
        with runtime_of(store, run) as runtime:
            refuse_if_held(store, runtime)
            unseen = unseen_ranks(store, runtime)
            found = _look(store, runtime, told, remote, discard=discard, read=read)
            return _report(store, run, runtime, told, remote, unseen, *found, dry_run=True, read=read)
    with hold(store, run) as held, closing(Ledger(store)) as ledger:
        unseen = unseen_ranks(store, held.runtime)
        found = _save(held, told, ledger, remote, discard=discard, read=read)
        done = _report(store, run, held.runtime, told, remote, unseen, *found, dry_run=False, read=read)
        resume = None if done.resume is None else done.resume.step
        ledger.add(None, Event.RECOVER, resume=resume, problem=done.resume_problem or None)
        return done


def _report(
    store: Store, run: Run, runtime: RuntimeFolder | None, watcher: Watcher, remote: Store | None,
    unseen: tuple[int, ...], keeper: int | None, findings: list[Finding], examined: Examined, *,
    dry_run: bool, read: bool,
) -> RecoveryReport:  # fmt: skip
    watcher.stage("resume")
    there = None if remote is None else look_at(remote)
    resume, problem = resume_of(store, runtime, examined.damaged, there)
    if resume is not None:
        is_elsewhere = bool(unseen) and resume.tier == "memory"
        resume = replace(resume, of_all=not (is_elsewhere or has_own_disk(store)))
    return RecoveryReport(
        run=store.url,
        run_id=run.run_id,
        dry_run=dry_run,
        verified=read,
        keeper=keeper,
        findings=tuple(findings),
        whole=len(examined.whole),
        num_bytes=examined.num_bytes,
        resume=resume,
        resume_problem=problem,
        unseen=unseen,
    )


def _save(
    held: Hold, watcher: Watcher, ledger: Ledger, remote: Store | None, *, discard: bool, read: bool
) -> tuple[int | None, list[Finding], Examined]:
    """The keeper that goes on living, what became of all that was found, and the steps at rest."""
    keeper, told = _ask(held, watcher, discard=discard)
    with closing(MemoryRecovery(held, watcher, ledger)) as memory:
        if keeper is None:
            memory.save()
        watcher.stage("committing")
        parts = memory.finish(read=read)
        watcher.stage("verifying")
        examined = examine(held.store, watcher, read=read)
        watcher.stage("marking")
        held.guard()
        mark(held.store, examined, ledger)
        if keeper is None:
            _bury(held, memory.unsaved, ledger)
        watcher.stage("clearing")
        writers = dead_keepers(held.runtime) if keeper is None else set[str]()
        debris = clear(held, writers, ledger) + end_dead_uploads(held, writers)
        if remote is not None:
            debris += end_dead_uploads(held, writers, remote)
        if keeper is None:
            if not any(each.outcome is Fate.FAILED for each in debris):
                memory.forget_dead_keepers()
            watcher.stage("letting go")
            memory.let_go(examined, discard=discard)
        return keeper, [*told, *memory.findings, *parts, *examined.findings, *debris], examined


def _ask(held: Hold, watcher: Watcher, *, discard: bool) -> tuple[int | None, list[Finding]]:
    """Let a keeper that lives save what it has: its process, and what it says. One that leaves meanwhile, or
    that is to, is replaced: then None."""
    watcher.stage("draining")
    if held.election is not None:
        return None, []
    keeper = keeper_of(held.runtime)
    status = keepers.wait_until_saved(held.store.url, held.runtime, watcher, held.guard)
    if discard and status is not None:
        keepers.end_process(held.runtime)
        status = None
    if status is None:
        held.take_election()
        return None, []
    return keeper or 0, _told(held.runtime, status)


def _bury(held: Hold, unsaved: Collection[AttemptName], ledger: Ledger) -> None:
    """Say of the attempts that died on this node that they are dead, so that the next job need not watch
    them; not before everything of theirs is saved."""
    died = died_here(held.store, held.runtime)
    # After the look: a job that has claimed meanwhile is among them, and lives.
    held.guard()
    for name in (name for name in died if name not in unsaved):
        try:
            attempts.mark_ended(held.store, name, "dead")
        except OSError as error:
            # The next job finds out by itself.
            log.warning("the end of attempt %s could not be written down: %s", name, error)
        else:
            ledger.add(str(name), Event.DEATH, by="recover")


def _told(runtime: RuntimeFolder, status: Status) -> list[Finding]:
    """The keeper's slots, and what it said of them."""
    reasons = dict.fromkeys(status.waiting, keepers.STILL)
    reasons |= dict.fromkeys(status.for_others, "its part is saved; those of other nodes are missing")
    reasons |= {each.step: each.message for each in status.failures}
    findings = []
    for each in slots_in(runtime):
        if not each.is_slot:
            findings.append(each.left_alone())
        elif each.step is None:
            findings.append(each.finding(Fate.TORN, each.problem, damage=True))
        else:
            outcome = Fate.WAS_COMMITTED if each.is_persisted else Fate.KEPT
            if each.step in status.for_others:
                outcome = Fate.KEPT
            elif each.step in status.waiting and not each.is_persisted:
                # What it gave up, since another attempt has begun, it does not wait for any more.
                outcome = Fate.FAILED
            findings.append(each.finding(outcome, reasons.get(each.step, "the keeper has it")))
    for torn in status.torn:
        why = f"not the bytes of its boundary: {', '.join(torn.leaves[:_SHOWN]) or 'its metadata'}"
        findings.append(Finding(Kind.SNAPSHOT, Fate.TORN, torn.slot, torn.step, detail=why, damage=True))
    return findings


# ---- only looking: with the same eyes, by the same rules


def _look(
    store: Store,
    runtime: RuntimeFolder | None,
    watcher: Watcher,
    remote: Store | None,
    *,
    discard: bool,
    read: bool,
) -> tuple[int | None, list[Finding], Examined]:
    """The same of what `_save` would do. Predicts no writes: nobody knows what storage will take."""
    keeper = keeper_of(runtime) if runtime is not None else None
    watcher.stage("verifying")
    examined = examine(store, watcher, read=read)
    found = _snapshots(store, runtime, examined, discard=discard) if runtime is not None else []
    for stored in unfinished(store):
        why, is_damage = refusal(store, stored, read=read)
        found.append(parts_found(stored, Fate.KEPT if why else Fate.SOUND, why, damage=is_damage))
    dead, writers = list[AttemptName](), set[str]()
    if runtime is not None and keeper is None:
        dead, writers = died_here(store, runtime), dead_keepers(runtime)
    debris = debris_found(unused_files(store, dead, writers)) + dead_uploads(store, dead, writers)
    if remote is not None:
        debris += dead_uploads(store, dead, writers, remote)
    return keeper, found + examined.findings + debris, examined


def _snapshots(store: Store, runtime: RuntimeFolder, examined: Examined, *, discard: bool) -> list[Finding]:
    """What is in memory, newest first, audited; of what cannot be saved, what would become of it."""
    writer = Writer(store, "0" * 8)
    found: dict[str, Finding] = {}
    saved: dict[str, VisibleStep] = {}
    for each in slots_in(runtime):
        with job_of(runtime, each.slot) as job:
            found[each.slot] = _judged(store, writer, each, job)
            if job is not None and found[each.slot].outcome is Fate.WAS_COMMITTED:
                saved[each.slot] = writer.place_of(job)
    return list(settle(store, found, saved, failed_of(found), examined, discard=discard)[0].values())


def _judged(store: Store, writer: Writer, seen: Seen, job: StepJob | None) -> Finding:
    if not seen.is_slot:
        return seen.left_alone()
    if job is None:
        return seen.finding(Fate.TORN, seen.problem, damage=True)
    if seen.is_persisted:
        return seen.finding(Fate.WAS_COMMITTED)
    [snapshot] = job.members()
    attempt, _ = writer.attempt_for(job)

    def on_storage(metadata: Metadata) -> bool:
        layout, digests = metadata.constants, metadata.constants_digests
        return layout is not None and constants.stands(store, attempt, snapshot.rank, layout, digests)

    lacks = lacks_region(snapshot, on_storage)
    torn = [] if lacks else torn_leaves(snapshot, on_storage)
    if torn != []:
        names = ", ".join((torn or ["its record or metadata"])[:_SHOWN])
        return seen.finding(Fate.TORN, f"not the bytes of its boundary: {names}", damage=True)
    known = writer.look(job)
    match known.state:
        case JobState.GATHERING:
            return seen.finding(Fate.FAILED, REGION_IS_GONE) if lacks else seen.finding(Fate.SOUND)
        case JobState.COMMITTED:
            return seen.finding(Fate.WAS_COMMITTED)
    return seen.finding(Fate.KEPT if known.state is JobState.VOID else Fate.FAILED, known.message)
