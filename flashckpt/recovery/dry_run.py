"""What a recovery would find. Looks with the same eyes, by the same rules, and changes nothing at all.

Predicts no writes: nobody knows what storage will take. What would be deleted, or discarded, is named.
"""

from __future__ import annotations

from dataclasses import replace

from flashckpt.commit import constants
from flashckpt.commit.lineage import VisibleStep
from flashckpt.format.metadata import Metadata
from flashckpt.format.records import Run
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.persist.at_rest import refusal, unfinished
from flashckpt.persist.constants import REGION_IS_GONE
from flashckpt.persist.debris import debris
from flashckpt.persist.job import State, StepJob
from flashckpt.persist.writer import Writer
from flashckpt.recovery import at_rest, lingering
from flashckpt.recovery.at_rest import Examined, parts_found
from flashckpt.recovery.debris import found_debris
from flashckpt.recovery.memory import failed_of, settle
from flashckpt.recovery.node import dead_keepers, died_here
from flashckpt.recovery.report import Finding, Kind, Outcome, Report, Watcher, foreign
from flashckpt.recovery.survey import Seen, job_of, lacks_region, resume_of, slots_in, torn_leaves
from flashckpt.store.base import Store

_SHOWN = 8


def dry_run(
    store: Store, run: Run, runtime: RuntimeFolder | None, watcher: Watcher, *, discard: bool, read: bool
) -> Report:
    """The report of a dry run. Its `resume` is where training would go on from as things stand."""
    keeper = lingering.keeper_of(runtime) if runtime is not None else None
    watcher.stage("verifying")
    examined = at_rest.examine(store, watcher, read=read)
    snapshots = _snapshots(store, runtime, examined, discard=discard) if runtime is not None else {}
    parts = []
    for rest in unfinished(store):
        why, is_damage = refusal(store, rest, read=read)
        word = Outcome.KEPT if why else Outcome.SOUND
        parts.append(parts_found(rest, word, why, damage=is_damage))
    is_mine = runtime is not None and keeper is None
    dead = died_here(store, runtime) if runtime is not None and is_mine else []
    writers = dead_keepers(runtime) if runtime is not None and is_mine else set()
    watcher.stage("resume")
    resume, problem = resume_of(store, runtime, examined.damaged)
    return Report(
        run=store.url,
        run_id=run.run_id,
        dry_run=True,
        verified=read,
        keeper=keeper,
        findings=(
            *snapshots.values(), *parts, *examined.findings, *found_debris(debris(store, dead, writers))
        ),
        whole=len(examined.whole),
        num_bytes=examined.num_bytes,
        resume=resume,
        resume_problem=problem,
    )  # fmt: skip


def _snapshots(
    store: Store, runtime: RuntimeFolder, examined: Examined, *, discard: bool
) -> dict[str, Finding]:
    """What is in memory, newest first, audited; of what cannot be saved, what would become of it."""
    writer = Writer(store, "0" * 8)
    found: dict[str, Finding] = {}
    saved: dict[str, VisibleStep] = {}
    for each in slots_in(runtime):
        with job_of(runtime, each.slot) as job:
            found[each.slot] = _judged(store, writer, each, job)
            if job is not None and found[each.slot].outcome is Outcome.WAS_COMMITTED:
                saved[each.slot] = writer.place_of(job)
    return settle(store, found, saved, failed_of(found), examined, discard=discard)[0]


def _judged(store: Store, writer: Writer, seen: Seen, job: StepJob | None) -> Finding:
    if not seen.is_slot:
        return foreign(seen.slot, seen.problem)
    told = Finding(
        kind=Kind.SNAPSHOT,
        outcome=Outcome.SOUND,
        place=seen.slot,
        step=seen.step if seen.attempt is not None else None,
        attempt=seen.attempt,
        num_bytes=seen.num_bytes,
    )
    if job is None:
        return replace(told, outcome=Outcome.TORN, detail=seen.problem, damage=True)
    if seen.is_persisted:
        return replace(told, outcome=Outcome.WAS_COMMITTED)
    [snapshot] = job.members()
    attempt, _ = writer.attempt_for(job)

    def on_storage(metadata: Metadata) -> bool:
        layout, digests = metadata.constants, metadata.constants_digests
        return layout is not None and constants.stands(store, attempt, snapshot.rank, layout, digests)

    lacks = lacks_region(snapshot, on_storage)
    torn = [] if lacks else torn_leaves(snapshot, on_storage)
    if torn != []:
        names = ", ".join((torn or ["its record or metadata"])[:_SHOWN])
        return replace(
            told, outcome=Outcome.TORN, detail=f"not the bytes of its boundary: {names}", damage=True
        )
    known = writer.look(job)
    match known.state:
        case State.GATHERING:
            return replace(told, outcome=Outcome.FAILED, detail=REGION_IS_GONE) if lacks else told
        case State.COMMITTED:
            return replace(told, outcome=Outcome.WAS_COMMITTED)
    return replace(
        told, outcome=Outcome.KEPT if known.state is State.VOID else Outcome.FAILED, detail=known.message
    )
