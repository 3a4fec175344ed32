"""What a recovery would find and do. Looks with the same eyes, and changes nothing at all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from flashckpt.commit import attempts, constants, steps
from flashckpt.commit.lineage import VisibleStep
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Run
from flashckpt.keeper import chores
from flashckpt.keeper.constants import REGION_IS_GONE
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.recovery import lingering, outlook, resting
from flashckpt.recovery.clearing import findings_of
from flashckpt.recovery.debris import debris
from flashckpt.recovery.node import died_here
from flashckpt.recovery.report import NEWER_FAILED, Finding, Kind, Outcome, Report, Watcher, foreign
from flashckpt.recovery.resting import Examined
from flashckpt.recovery.survey import Seen, lacks_constants, slots_in, torn_leaves
from flashckpt.store.base import Store


def foreseen(
    store: Store,
    run: Run,
    runtime: RuntimeFolder | None,
    watcher: Watcher,
    *,
    discard: bool,
    read: bool,
) -> Report:
    """The report of a dry run. Its `resume` is where training would go on from as things stand."""
    seen = slots_in(runtime) if runtime is not None else []
    keeper = lingering.keeper_of(runtime) if runtime is not None else None
    watcher.stage("verifying")
    examined = resting.examine(store, watcher, read=read)
    snapshots: list[Finding] = []
    if runtime is not None:
        snapshots = _Foresight(store, runtime, examined, discard=discard).snapshots(seen)
    settled = {(each.step, each.attempt) for each in snapshots if each.outcome is Outcome.COMMITTED}
    # What a snapshot in memory commits, its own part does not commit again.
    unfinished = [each for each in resting.unfinished(store) if (each.step, each.attempt) not in settled]
    parts = [resting.finish(store, each, None, read=read) for each in unfinished]
    dead = died_here(store, runtime) if runtime is not None and keeper is None else []
    watcher.stage("resume")
    resume, problem = outlook.resume_of(store, runtime, examined.damaged)
    return Report(
        run=store.url,
        run_id=run.run_id,
        dry_run=True,
        verified=read,
        keeper=keeper,
        findings=(*snapshots, *parts, *examined.findings, *findings_of(debris(store, dead))),
        whole=len(examined.whole),
        num_bytes=examined.num_bytes,
        resume=resume,
        resume_problem=problem,
    )


class _Foresight:
    def __init__(self, store: Store, runtime: RuntimeFolder, examined: Examined, *, discard: bool) -> None:
        self._store, self._runtime, self._examined, self._discard = store, runtime, examined, discard
        newest = attempts.newest_started(store)
        self._newest = newest
        self._start = None if newest is None else attempts.read_start(store, newest)

    def snapshots(self, seen: list[Seen]) -> list[Finding]:
        """One row for each snapshot; `seen` are newest first."""
        saved: set[int] = set()
        failed: set[int] = set()
        findings = []
        for each in seen:
            found = self._foresee(each, is_saved=each.rank in saved, has_failed=each.rank in failed)
            if found.outcome in (Outcome.COMMITTED, Outcome.WAS_COMMITTED):
                saved.add(each.rank)
            elif found.outcome is Outcome.FAILED and found.detail != REGION_IS_GONE:
                failed.add(each.rank)
            findings.append(found)
        commits = [
            (each.step, self._owner(each))
            for each, found in zip(seen, findings, strict=True)
            if found.outcome is Outcome.COMMITTED
        ]
        kept = self._kept(seen, findings)
        protected = {each.slot for each in seen if each.is_persisted}
        return [self._settled(found, protected, kept, commits) for found in findings]

    def _foresee(self, each: Seen, *, is_saved: bool, has_failed: bool) -> Finding:
        if not each.is_slot:
            return foreign(each.slot, each.problem)
        found = _finding(each)
        if each.attempt is None:
            return replace(found, outcome=Outcome.TORN, detail=each.problem, damage=True)
        owner = self._owner(each)
        if each.is_persisted:
            return self._persisted(each, found, owner)
        if has_failed:
            return replace(found, detail=NEWER_FAILED)
        if is_saved and not each.is_wanted:
            return found
        on_storage = partial(self._on_storage, owner, each.rank)
        lacks = lacks_constants(self._runtime, each.slot, on_storage)
        torn = [] if lacks else torn_leaves(self._runtime, each.slot, on_storage)
        if torn != []:
            names = ", ".join((torn or ["its record or metadata"])[:8])
            return replace(
                found, outcome=Outcome.TORN, detail=f"not the bytes of its boundary: {names}", damage=True
            )
        if steps.is_committed(self._store, each.step, owner):
            return replace(found, outcome=Outcome.COMMITTED)
        newer = attempts.started_after(self._store, owner)
        if newer is not None:
            return replace(
                found, detail=f"attempt {newer} has started; attempt {owner} commits nothing more."
            )
        if lacks:
            return replace(found, outcome=Outcome.FAILED, detail=REGION_IS_GONE)
        return replace(found, outcome=Outcome.COMMITTED)

    def _on_storage(self, owner: AttemptName, rank: int, metadata: Metadata) -> bool:
        layout, digests = metadata.constants, metadata.constants_digests
        return layout is not None and constants.stands(self._store, owner, rank, layout, digests)

    def _persisted(self, each: Seen, found: Finding, owner: AttemptName) -> Finding:
        newest = max((whole.step for whole in self._examined.whole), default=-1)
        places = {VisibleStep(each.step, owner), VisibleStep(each.step, each.attempt or owner)}
        if places & self._examined.damaged and each.step > newest:
            why = "its copy at rest is not whole: training resumes from memory"
            return replace(found, outcome=Outcome.KEPT, detail=why)
        return replace(found, outcome=Outcome.WAS_COMMITTED)

    def _owner(self, each: Seen) -> AttemptName:
        """Whose step it is: a slot that the newest start names as loaded is that attempt's."""
        assert each.attempt is not None
        start = self._start
        if self._newest is None or start is None or self._newest.number <= each.attempt.number:
            return each.attempt
        is_loaded = start.loaded == each.slot and start.step == each.step
        return self._newest if is_loaded else each.attempt

    def _kept(self, seen: list[Seen], findings: list[Finding]) -> set[str]:
        """Of what is neither saved nor torn: what still counts, as things stand."""
        left = [
            chores.Survivor(slot=each.slot, attempt=each.attempt, step=each.step)
            for each, found in zip(seen, findings, strict=True)
            if found.outcome is Outcome.KEPT and each.attempt is not None and not each.is_persisted
        ]
        # What is left of an attempt of which something cannot be saved stays, all of it.
        stays = {each.slot for each in left if each.attempt in self._failed(findings)}
        return stays | (chores.needed(self._store, left) if left else set())

    @staticmethod
    def _failed(findings: list[Finding]) -> set[AttemptName | None]:
        return {each.attempt for each in findings if each.outcome is Outcome.FAILED}

    def _settled(
        self, found: Finding, protected: set[str], kept: set[str], commits: list[tuple[int, AttemptName]]
    ) -> Finding:
        if found.outcome is Outcome.FAILED and self._discard:
            return replace(found, outcome=Outcome.DISCARDED)
        if found.outcome is not Outcome.KEPT or found.attempt is None or found.place in protected:
            return found
        assert found.step is not None
        # A commit of the newest attempt settles what is older, and what other attempts left.
        is_settled = any(
            owner == self._newest and (found.attempt != owner or step > found.step) for step, owner in commits
        )
        if is_settled or found.place not in kept:
            return replace(found, outcome=Outcome.DROPPED)
        return replace(found, outcome=Outcome.DISCARDED) if self._discard else found


def _finding(each: Seen) -> Finding:
    return Finding(
        kind=Kind.SNAPSHOT,
        outcome=Outcome.KEPT,
        place=each.slot,
        step=each.step if each.attempt is not None else None,
        attempt=each.attempt,
        num_bytes=each.num_bytes,
    )
