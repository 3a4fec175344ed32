"""A look at the sealed snapshots in this node's memory, and at where training will go on from.

Maps read-only, enrols nowhere and changes nothing. What it finds is true at that moment only; who acts on it
looks again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from flashckpt.commit import attempts, lineage
from flashckpt.commit.lineage import VisibleStep
from flashckpt.errors import DamagedError, UnusableRunError
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import AttemptName
from flashckpt.memory.held_regions import opened_region
from flashckpt.memory.region import is_region_name, rank_of, region_name
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.memory.slot import Slot
from flashckpt.persist.audit import Torn, check_header, differing
from flashckpt.persist.job import SealedSnapshot, StepJob, alone
from flashckpt.recovery.report import Fate, Finding, Kind, Resume
from flashckpt.store.base import Store
from flashckpt.tiers.nearest import RemoteRun, is_ahead, left_elsewhere, without_idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A sealed snapshot in a slot; or one that cannot be read (no `step` and `attempt`), with the reason; or
    a region that is no slot of this run (`is_slot` False), which nobody touches."""

    slot: str
    is_slot: bool = True
    step: int | None = None
    attempt: AttemptName | None = None
    boundary: int = 0
    age: tuple[int, int, int] = (0, 0, 0)
    num_bytes: int = 0
    is_persisted: bool = False
    problem: str = ""

    def finding(self, outcome: Fate, detail: str = "", *, damage: bool = False) -> Finding:
        about = self.slot, self.step, self.attempt, self.num_bytes
        return Finding(Kind.SNAPSHOT, outcome, *about, detail, damage, self.boundary)

    def left_alone(self) -> Finding:
        """Of a region that is no slot of this run, or of which nobody can tell."""
        return self.finding(Fate.KEPT, self.problem, damage=True)


def slots_in(runtime: RuntimeFolder) -> list[Seen]:
    """The sealed snapshots in named regions, newest first. A memfd is seen by those who hold it only."""
    seen = []
    for name in filter(is_region_name, runtime.names()):
        with opened_region(runtime, name) as slot:
            if isinstance(slot, str):
                seen.append(Seen(slot=name, is_slot=False, problem=slot))
                continue
            if slot is None or slot.header.holds_constants:
                continue
            try:
                sealed = slot.sealed()
            except DamagedError as error:
                seen.append(Seen(slot=name, problem=str(error)))
                continue
            if sealed is not None:
                found = Seen(
                    slot=name,
                    step=sealed.step,
                    attempt=sealed.attempt,
                    boundary=sealed.boundary,
                    age=sealed.age,
                    num_bytes=sealed.record.image_bytes + sealed.record.constants_bytes,
                    is_persisted=sealed.is_persisted,
                )
                seen.append(found)
    return sorted(seen, key=lambda each: each.age, reverse=True)


@contextlib.contextmanager
def job_of(runtime: RuntimeFolder, name: str) -> Iterator[StepJob | None]:
    """What is sealed in a slot, to be looked at and never to be persisted. None where it cannot be read."""
    with opened_region(runtime, name) as slot, contextlib.ExitStack() as regions:
        sealed = None
        with contextlib.suppress(DamagedError):
            sealed = slot.sealed() if isinstance(slot, Slot) else None
        if not isinstance(slot, Slot) or sealed is None:
            yield None
            return
        nonce, region = sealed.record.constants_nonce, None
        if nonce:
            opened = opened_region(runtime, region_name(slot.rank, None, nonce))
            region = regions.enter_context(opened)
        yield alone(sealed, 0, *([region] if isinstance(region, Slot) else []))


OnStorage = Callable[[Metadata], bool]


def torn_leaves(snapshot: SealedSnapshot, on_storage: OnStorage = lambda metadata: False) -> list[str] | None:
    """Names of the leaves of a sealed snapshot whose bytes are not those of its boundary; None where the
    snapshot itself cannot be read, which is as bad. Where storage has its constants already, what memory has
    of them counts for nothing: it is not what a save would write."""
    try:
        sealed = snapshot.slot.sealed()
        if sealed is None:
            return None
        metadata = snapshot.slot.metadata(sealed)
        check_header(snapshot.slot, metadata.layout)
        torn = differing(metadata, snapshot.sources(metadata))
    except (DamagedError, Torn):
        return None
    own = metadata.image.first_constant
    if any(index >= own for index in torn) and on_storage(metadata):
        torn = [index for index in torn if index < own]
    return [metadata.leaves[index].name for index in torn]


def lacks_region(snapshot: SealedSnapshot, on_storage: OnStorage) -> bool:
    """Whether a sealed snapshot cannot be saved, since it names a region of constants that is not here, and
    storage does not have them."""
    try:
        sealed = snapshot.slot.sealed()
        if sealed is None or not sealed.record.constants_nonce or snapshot.regions:
            return False
        return not on_storage(snapshot.slot.metadata(sealed))
    except DamagedError:
        return False


def resume_of(
    store: Store,
    runtime: RuntimeFolder | None,
    damaged: Collection[VisibleStep],
    remote: RemoteRun | None = None,
) -> tuple[Resume | None, str]:
    """The step and tier of the next resume, or why there is none; neither for a run without steps. By the
    order in which a resume looks: the first that holds. `damaged` are steps at rest that cannot be used;
    what is in memory is audited here, and of the `remote` nothing is read again."""
    try:
        lineage.check_records(store)
        if remote is not None:
            has_regions = runtime is not None and any(map(is_region_name, runtime.names()))
            remote = without_idle(store, remote, lambda: has_regions)
        if remote is not None and is_ahead(store, remote) and remote.steps:
            return _in_remote(remote.steps[0]), ""
        whole = _whole(slots_in(runtime)) if runtime is not None else {}
        survived = {slots[0]: VisibleStep(step, attempt) for (attempt, step, _), slots in whole.items()}
        slots_of = {slots[0]: slots for slots in whole.values()}
        sources = lineage.sources(store, survived)
        last_step = {bound.attempt: bound.last_step for bound in attempts.bounds(store)}
        there = (
            [each for each in remote.steps if each.step <= last_step.get(each.attempt, -1)] if remote else []
        )
        for source in sources:
            if there and there[0] > VisibleStep(source.step, source.attempt):
                return _in_remote(there[0]), ""
            if source.slot is None and VisibleStep(source.step, source.attempt) not in damaged:
                return Resume(step=source.step, attempt=source.attempt, tier="local"), ""
            slots = slots_of.get(source.slot or "", [])
            if slots and runtime is not None and all(_is_sound(runtime, each) for each in slots):
                return Resume(step=source.step, attempt=source.attempt, tier="memory"), ""
        if there:
            return _in_remote(there[0]), ""
        if sources:
            return None, "the run has steps and none of them can be used: training would refuse to start"
        lineage.check_usable(store)
    except UnusableRunError as error:
        return None, str(error)
    return None, left_elsewhere(store)


def _in_remote(each: VisibleStep) -> Resume:
    return Resume(step=each.step, attempt=each.attempt, tier="remote")


_Content = tuple[AttemptName, int, int]


def _whole(seen: Sequence[Seen]) -> dict[_Content, list[str]]:
    """What all ranks of an attempt that have anything here hold, newest first, each with its slots: the ranks
    of a node resume from one boundary together."""
    ranks: dict[AttemptName, set[int]] = {}
    slots: dict[_Content, dict[int, str]] = {}
    for each in seen:
        if each.step is not None and each.attempt is not None:
            rank = rank_of(each.slot)
            ranks.setdefault(each.attempt, set()).add(rank)
            slots.setdefault((each.attempt, each.step, each.boundary), {})[rank] = each.slot
    return {content: list(of.values()) for content, of in slots.items() if of.keys() == ranks[content[0]]}


def unseen_ranks(store: Store, runtime: RuntimeFolder | None) -> tuple[int, ...]:
    """The ranks of the newest attempt, where it did not end in order, of which this node has no memory: what
    theirs have is saved by the same deed on their nodes."""
    started = [each for each in attempts.attempts(store) if each.start is not None]
    newest = started[-1] if started else None
    if newest is None or newest.start is None or newest.closed:
        return ()
    names = runtime.names() if runtime is not None else []
    here = {rank_of(name) for name in filter(is_region_name, names)}
    return tuple(rank for rank in range(newest.start.world) if newest.start.world > 1 and rank not in here)


def has_own_disk(store: Store) -> bool:
    """Whether other nodes have the run in folders of their own: what is committed here they may lack."""
    started = attempts.newest_started(store)
    return started is not None and attempts.ranks_here(store, started) is not None


def _is_sound(runtime: RuntimeFolder, name: str) -> bool:
    with job_of(runtime, name) as job:
        return job is not None and torn_leaves(job.members()[0]) == []
