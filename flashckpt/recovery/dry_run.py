"""What a recovery would find. Looks with the same eyes, by the same rules, and changes nothing at all.

Predicts no writes: nobody knows what storage will take. What would be deleted, or discarded, is named.
"""

from __future__ import annotations

from flashckpt.commit import constants
from flashckpt.commit.lineage import VisibleStep
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import AttemptName
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.persist.deletions import unused_files
from flashckpt.persist.job import JobState, StepJob
from flashckpt.persist.stored_steps import refusal, unfinished
from flashckpt.persist.writer import REGION_IS_GONE, Writer
from flashckpt.recovery.memory import failed_of, settle
from flashckpt.recovery.node import dead_keepers, died_here, keeper_of
from flashckpt.recovery.report import Fate, Finding, Watcher
from flashckpt.recovery.storage import Examined, debris_found, examine, parts_found
from flashckpt.recovery.survey import Seen, job_of, lacks_region, slots_in, torn_leaves
from flashckpt.store.base import Store

_SHOWN = 8


def look(
    store: Store, runtime: RuntimeFolder | None, watcher: Watcher, *, discard: bool, read: bool
) -> tuple[int | None, list[Finding], Examined]:
    """The keeper that lives, all that a recovery would find, and the steps at rest."""
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
    return keeper, found + examined.findings + debris_found(unused_files(store, dead, writers)), examined


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
