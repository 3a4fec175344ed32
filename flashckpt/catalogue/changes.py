"""Questions to a catalogue, and the changes of it. Pure: no I/O.

A change takes a catalogue and returns the next version, or the same object if nothing is left to do.
`Home.update` applies it to the newest version and creates the next one from the result. After a conflict, a
lost answer or a long sleep it applies the change again. So a change must be idempotent, and must decide from
the catalogue alone whether it is still allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from flashckpt.errors import NoSuchStepError, SupersededError, UnusableRunError
from flashckpt.format.catalogue import (
    Catalogue,
    Checkpoint,
    Folder,
    Lineage,
)
from flashckpt.format.names import DATA, MAX_ATTEMPT, AttemptName, SnapshotId
from flashckpt.format.owner import Owner
from flashckpt.options import Keep
from flashckpt.printable import escaped

Ids = frozenset[SnapshotId]

LINEAGE_KEPT = 1024
"""The length up to which the lineage of the current attempt keeps attempts without checkpoints."""


@dataclass(frozen=True, slots=True)
class NewWriter:
    """A writer that a change makes; `new_writer` chooses it.

    Its `name` is above all writers that have files here. `foreign` are those that version `seen` does not
    know. The files were listed after `seen` was read, so a change to any other version does nothing. The
    caller prepares the change again for that version.
    """

    name: AttemptName
    seen: int
    foreign: frozenset[AttemptName] = frozenset()


# ---- questions


def lineage_of(catalogue: Catalogue, attempt: AttemptName) -> Lineage:
    return next((lineage for name, lineage in catalogue.lineages if name == attempt), ())


def parent_of(catalogue: Catalogue) -> SnapshotId | None:
    """The snapshot that the current attempt resumed. None for a fresh run."""
    return next(iter(lineage_of(catalogue, catalogue.attempt)), None)


def ancestry(catalogue: Catalogue, parent: SnapshotId) -> Lineage:
    """The lineage of an attempt that resumes `parent`."""
    longest: Lineage = ()
    for attempt, lineage in catalogue.lineages:
        ancestors = [attempt, *(each.attempt for each in lineage)]
        if parent.attempt in ancestors:
            longest = max(longest, lineage[ancestors.index(parent.attempt) :], key=len)
    return (parent, *longest)


def visible(catalogue: Catalogue) -> list[Checkpoint]:
    """The checkpoints in the history of the current attempt, oldest first."""
    is_seen = visibility(catalogue)
    return sorted((each for each in catalogue.checkpoints if is_seen(each.id)), key=lambda each: each.id)


def is_visible(catalogue: Catalogue, id: SnapshotId) -> bool:
    """Whether a snapshot is in the history of the current attempt."""
    return visibility(catalogue)(id)


def visibility(catalogue: Catalogue) -> Callable[[SnapshotId], bool]:
    """`is_visible`, for many snapshots."""
    lineage = lineage_of(catalogue, catalogue.attempt)
    last = {catalogue.attempt: float("inf"), **{each.attempt: each.boundary for each in lineage}}
    return lambda id: id.boundary <= last.get(id.attempt, -1)


def newest(catalogue: Catalogue) -> Checkpoint | None:
    """The newest checkpoint in the history of the current attempt."""
    return next(reversed(visible(catalogue)), None)


def relate(one: Catalogue, other: Catalogue) -> Catalogue:
    """Which of two stores of a run leads: it has the newest checkpoint of the other, or that is in its
    history. (It has it outside of its history if a branch has left it behind.)

    If that holds for both, the one with the greater attempt leads. UnusableRunError if it holds for neither.
    Attempts that neither of them knows decide nothing.
    """
    if one.run_id and other.run_id and one.run_id != other.run_id:
        raise UnusableRunError(
            f"The two stores hold different runs ({one.run_id} and {other.run_id}). Nothing was changed. "
            "Name another folder or another mirror."
        )
    leading = []
    for each, behind in ((one, other), (other, one)):
        last = newest(behind)
        is_ahead = last is None or is_visible(each, last.id) or each.has(last.id)
        leading += [each] if is_ahead else []
    if not leading:
        ours, theirs = (
            f"step {last.step} of attempt {last.id.attempt}" for last in map(newest, (one, other)) if last
        )
        raise UnusableRunError(
            f"The home and the mirror have diverged: {ours} is in the history of the home alone, and "
            f"{theirs} in that of the mirror alone. Nothing was loaded or changed. To resume from the "
            "mirror, start with an empty home. To resume from the home, name another mirror."
        )
    return max(leading, key=lambda each: each.attempt)


def is_newer(catalogue: Catalogue, id: SnapshotId) -> bool:
    """Whether a snapshot is newer than all that the current writer has committed."""
    return catalogue.committed is None or id > catalogue.committed


def is_committable(catalogue: Catalogue, checkpoint: Checkpoint) -> bool:
    """Whether the next version may name this checkpoint.

    Its files must be in a folder of the current writer, it must be newer than all that this writer has
    committed, and a checkpoint must name its bases now. `spared` relies on all three.
    """
    is_own = checkpoint.writer == catalogue.writer and checkpoint.id.attempt <= catalogue.writer
    is_new = is_newer(catalogue, checkpoint.id) and not catalogue.has(checkpoint.id)
    return is_own and is_new and checkpoint.bases <= bases(catalogue) | {checkpoint.folder}


class Committed(Enum):
    """Whether a snapshot is committed, or can be. With the last two no later version can name it."""

    YES = "committed"
    WAITING = "not all parts are there"
    DIVERGED = "replicas of its ranks differ"
    OVERTAKEN = "a newer snapshot was committed before it"
    BASE_GONE = "no checkpoint has its frozen files any more"


def hopeless(catalogue: Catalogue, checkpoint: Checkpoint) -> Committed | None:
    """Why no version from this one on can name a snapshot. None while one can, or if this one does.

    `commit` adds nothing then. A base is gone for ever if no checkpoint names it, and its own snapshot can
    never be committed; the keepers write its frozen files again, with the next snapshot.
    """
    if catalogue.has(checkpoint.id):
        return None
    if not _is_pending(catalogue, checkpoint.folder):
        return Committed.OVERTAKEN
    missing = checkpoint.bases - bases(catalogue)
    return None if all(_is_pending(catalogue, each) for each in missing) else Committed.BASE_GONE


class Spared(Enum):
    """What a folder of a snapshot keeps. The rest is garbage."""

    ALL = "all files"
    FROZEN = "frozen files"
    NOTHING = "no file"


def is_known(catalogue: Catalogue, writer: AttemptName) -> bool:
    """Whether this version may judge the files of a writer. Newer writers, and those whose files were found
    when an older catalogue had been restored, are not known."""
    return writer <= catalogue.writer and writer not in catalogue.foreign


def spared(catalogue: Catalogue, folders: Iterable[Folder]) -> dict[Folder, Spared]:
    """What each of these folders keeps.

    What is garbage in one version is garbage in every later one, because `is_committable` and `rebuild` let a
    version name only files that are spared here. So any process may delete garbage at any time, however old
    its catalogue and its listing are: a collector that sleeps, dies or was superseded does no harm.
    """
    kept, with_frozen = {each.folder for each in catalogue.checkpoints}, bases(catalogue)
    found = {}
    for folder in folders:
        if not is_known(catalogue, folder.writer) or folder in kept or _is_pending(catalogue, folder):
            found[folder] = Spared.ALL
        elif folder in with_frozen or catalogue.foreign:
            # Checkpoints of writers that are not known may have any base.
            found[folder] = Spared.FROZEN
        else:
            found[folder] = Spared.NOTHING
    return found


def writers_with_garbage(before: Catalogue, catalogue: Catalogue) -> frozenset[AttemptName]:
    """The writers whose folders can have garbage that was none in version `before`, of the same writer: its
    own, and those of folders that were named."""
    was, now = ({each.folder for each in one.checkpoints} for one in (before, catalogue))
    gone = (was - now) | (bases(before) - bases(catalogue))
    return frozenset({catalogue.writer, *(each.writer for each in gone)})


def _is_pending(catalogue: Catalogue, folder: Folder) -> bool:
    """Whether the current writer can still commit the snapshot of a folder."""
    return folder.writer == catalogue.writer and is_newer(catalogue, folder.id)


def bases(catalogue: Catalogue) -> frozenset[Folder]:
    """The folders with frozen files of checkpoints."""
    return frozenset(folder for each in catalogue.checkpoints for folder in each.bases)


# ---- new writers


def new_writer(
    catalogue: Catalogue, nonce: str, writers: Collection[AttemptName], above: int = 0
) -> NewWriter:
    """Choose the next writer of a store. `writers` have folders in its data/, which was listed after the
    catalogue was read. `above`: the highest number of an attempt in the other store."""
    name = next_name(max(highest_number(catalogue, writers), above), nonce)
    return bound_to(catalogue, name, writers)


def bound_to(catalogue: Catalogue, name: AttemptName, writers: Collection[AttemptName]) -> NewWriter:
    """A new writer of this name, for changes to this version. `writers`: as of `new_writer`."""
    return NewWriter(name, catalogue.version, frozenset(each for each in writers if each > catalogue.writer))


def next_name(highest: int, nonce: str) -> AttemptName:
    """A name above the highest number of an attempt, in storage or in memory."""
    if highest >= MAX_ATTEMPT:
        raise UnusableRunError(
            f"An attempt of this run, in its storage or in memory, has the number {highest}, the highest "
            f"one. Nothing was changed. If another program has made a folder of that number in {DATA}/, "
            "remove it."
        )
    return AttemptName(highest + 1, nonce)


def highest_number(catalogue: Catalogue, writers: Collection[AttemptName]) -> int:
    """The highest number of an attempt that a store knows, or that has a folder in its data/."""
    return max(each.number for each in (catalogue.writer, catalogue.attempt, *writers))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a catalogue keeps of the start of an attempt: its ranks, the process that began it, the step
    number of its parent, and the URL of the mirror if the parent was read there."""

    world: int = 1
    owner: Owner | None = None
    parent_step: int = 0
    parent_url: str = ""


def make(catalogue: Catalogue, *, run_id: str) -> Catalogue:
    """Make an empty run, which has no attempt yet."""
    return catalogue if catalogue.version else _next(replace(catalogue, run_id=run_id))


def found(catalogue: Catalogue, *, run_id: str, checkpoint: Checkpoint) -> Catalogue:
    """Make a run of one checkpoint, which an import has written. UnusableRunError if there is a run."""
    if catalogue.has(checkpoint.id):
        return catalogue
    if catalogue.version:
        raise UnusableRunError(
            "Another process has made a run here meanwhile. The checkpoint that was written is not part of "
            "it. Nothing of the run was changed. Choose another folder."
        )
    new = NewWriter(checkpoint.writer, catalogue.version)
    begun = _take(replace(catalogue, run_id=run_id), new, checkpoint.id.attempt, {checkpoint.id.attempt: ()})
    return _with(begun, checkpoint)


def begin(catalogue: Catalogue, *, new: NewWriter, lineage: Lineage, launch: Launch = Launch()) -> Catalogue:
    """Start an attempt. No older attempt can change the run from this version on. `lineage` begins with the
    snapshot that the attempt resumes, which was chosen for version `new.seen`."""
    if not _is_bound(catalogue, new):
        return catalogue
    is_again = not catalogue.ended and catalogue.committed is None
    is_again = is_again and lineage[:1] == lineage_of(catalogue, catalogue.attempt)[:1]
    failed = catalogue.failed_starts + 1 if is_again else 0
    lineages = {new.name: lineage}
    return _take(catalogue, new, new.name, lineages, ended=False, failed_starts=failed, **vars(launch))


def branch(catalogue: Catalogue, *, new: NewWriter, parent: SnapshotId) -> Catalogue:
    """Make a checkpoint of any history the newest one: start an attempt from it, and end it."""
    if not _is_bound(catalogue, new):
        return catalogue
    if not catalogue.has(parent):
        raise NoSuchStepError(f"There is no checkpoint {parent}. Nothing was changed.")
    step = next(each.step for each in catalogue.checkpoints if each.id == parent)
    return _take(catalogue, new, new.name, {new.name: ancestry(catalogue, parent)}, parent_step=step)


def follow(behind: Catalogue, *, new: NewWriter, lead: Catalogue) -> Catalogue:
    """Take run, attempt and lineages from the other store of the run, which must lead.

    So begins a session that copies checkpoints to a mirror; and so an empty home continues the run of a
    mirror. SupersededError if this store follows a newer attempt, whatever home that attempt has.
    """
    if not _is_bound(behind, new):
        return behind
    if behind.attempt > lead.attempt or relate(lead, behind) != lead:
        raise SupersededError(
            f"The mirror follows attempt {behind.attempt}, and attempt {lead.attempt} is behind it. Nothing "
            "was copied. Another job trains this run from the mirror: end this one."
        )
    return _take(
        replace(behind, run_id=lead.run_id, world=lead.world, parent_step=lead.parent_step),
        new,
        lead.attempt,
        dict(lead.lineages),
        failed_starts=lead.failed_starts,
        ended=lead.ended,
    )


def rebuild(
    catalogue: Catalogue,
    *,
    new: NewWriter,
    run_id: str,
    found: tuple[Checkpoint, ...],
    lineages: Mapping[AttemptName, Lineage],
) -> Catalogue:
    """Name all checkpoints that were found, and no others, and end.

    The last one becomes the newest of the history, but for those that a branch has left behind in
    `catalogue`. `flashckpt recover` does it if no version can be read, or if writers that are not known have
    newer checkpoints. They need not be committable, but `spared` must spare them in `catalogue`. Writers that
    were not known stay so.
    """
    if not _is_bound(catalogue, new, is_rebuilt=True):
        return catalogue
    base = replace(
        catalogue, run_id=run_id, checkpoints=found, lineages=(*catalogue.lineages, *lineages.items())
    )
    left = {each.id for each in catalogue.checkpoints} - {each.id for each in visible(catalogue)}
    parent = next((each.id for each in reversed(found) if each.id not in left), found[-1].id)
    return _take(base, new, new.name, {**lineages, new.name: ancestry(base, parent)})


def _is_bound(catalogue: Catalogue, new: NewWriter, is_rebuilt: bool = False) -> bool:
    """Whether this is the version for which a writer was chosen. A run has a catalogue beside its files."""
    if catalogue.version != new.seen:
        return False
    if new.foreign and not (catalogue.version or is_rebuilt):
        raise files_without_catalogue()
    return True


def files_without_catalogue() -> UnusableRunError:
    return UnusableRunError(
        "There are files of checkpoints here and no catalogue. Nothing was changed, and they are not "
        "taken for a fresh run. Restore the folder catalogue/; if it is lost, `flashckpt recover` makes "
        "another from the checkpoints that are whole. To train anew, choose another folder."
    )


def _take(
    catalogue: Catalogue,
    new: NewWriter,
    attempt: AttemptName,
    lineages: Mapping[AttemptName, Lineage],
    **start: Any,
) -> Catalogue:
    """Make a new writer, which alone may commit from now on. `start`: that of its attempt, if a trainer began
    it."""
    none: dict[str, Any] = {"ended": True, "failed_starts": 0, "owner": None, "parent_url": ""}
    return _next(
        replace(
            catalogue,
            writer=new.name,
            attempt=attempt,
            lineages=tuple({**dict(catalogue.lineages), **lineages}.items()),
            committed=None,
            foreign=catalogue.foreign | new.foreign,
            **none | start,
        )
    )


# ---- other changes


def commit(
    catalogue: Catalogue,
    *,
    writer: AttemptName,
    checkpoint: Checkpoint,
    keep: Keep,
    whole: Ids,
    in_use: Ids = frozenset(),
) -> Catalogue:
    """Add a checkpoint, and drop those that retention does not keep. SupersededError if another may commit.

    Adds nothing if the snapshot is older than one that this writer has committed, or if no checkpoint names a
    base of it. So the caller reports success only if the result `has` the snapshot; else it asks `hopeless`.
    Drops a checkpoint only if the catalogue that it changes has `keep.last` newer ones that are whole and not
    damaged. `whole`, `in_use`: as of `expired`.
    """
    if catalogue.has(checkpoint.id):
        return catalogue
    require_writer(catalogue, writer)
    if not is_committable(catalogue, checkpoint):
        return catalogue
    added = _with(catalogue, checkpoint)
    return _next(_without(added, expired(added, keep, whole, in_use)))


def retain(catalogue: Catalogue, *, keep: Keep, whole: Ids, in_use: Ids = frozenset()) -> Catalogue:
    """Drop the checkpoints that retention does not keep. Any process may do it."""
    dropped = expired(catalogue, keep, whole, in_use)
    return _next(_without(catalogue, dropped)) if dropped else catalogue


def expired(catalogue: Catalogue, keep: Keep, whole: Ids, in_use: Ids = frozenset()) -> set[SnapshotId]:
    """The checkpoints of the history that retention drops: all but the newest `keep.last` that are whole and
    not damaged, every multiple of `keep.every_steps`, and those `in_use`. `whole`: those that were found
    whole after the version in hand was read. No others are counted."""
    seen = visible(catalogue)
    counted = [each.id for each in seen if each.id in whole - catalogue.damaged_ids][-keep.last :]
    if len(counted) < keep.last:
        return set()
    every = keep.every_steps
    old = (each for each in seen if each.id < counted[0] and not (every and each.step % every == 0))
    return {each.id for each in old} - in_use


def adopt(catalogue: Catalogue, found: tuple[Checkpoint, ...]) -> Catalogue:
    """Commit whole snapshots that the current writer did not commit itself. Any process may do it: a start
    before it chooses, a leader that replaces another, `flashckpt recover`."""
    adopted = catalogue
    for checkpoint in sorted(found, key=lambda each: each.id):
        if is_committable(adopted, checkpoint):
            adopted = _with(adopted, checkpoint)
    return catalogue if adopted is catalogue else _next(adopted)


def quarantine(catalogue: Catalogue, *, checkpoint: Checkpoint, why: str = "") -> Catalogue:
    """Record that a checkpoint failed two verifications; without `why`, that it is whole again: every byte of
    it was compared. Any process may do it."""
    if checkpoint not in catalogue.checkpoints or (checkpoint.id in catalogue.damaged_ids) is bool(why):
        return catalogue  # it was removed meanwhile, and perhaps written again
    damaged = [each for each in catalogue.damaged if each[0] != checkpoint.id]
    damaged += [(checkpoint.id, escaped(why)[:1000])] if why else []
    return _next(replace(catalogue, damaged=tuple(damaged)))


def end(catalogue: Catalogue, *, writer: AttemptName) -> Catalogue:
    """Record that the job has ended in order. SupersededError if another may commit."""
    require_writer(catalogue, writer)
    return catalogue if catalogue.ended else _next(replace(catalogue, ended=True))


def require_writer(catalogue: Catalogue, writer: AttemptName) -> None:
    """SupersededError if another writer may commit now."""
    if catalogue.writer != writer:
        raise SupersededError(
            f"{catalogue.writer} commits here now, and {writer} can no more: another job, or another copier, "
            "has taken over. What was committed before stays. End this process."
        )


def _with(catalogue: Catalogue, checkpoint: Checkpoint) -> Catalogue:
    return replace(catalogue, committed=checkpoint.id, checkpoints=(*catalogue.checkpoints, checkpoint))


def _next(catalogue: Catalogue) -> Catalogue:
    return replace(_without(catalogue, set()), version=catalogue.version + 1)


def _without(catalogue: Catalogue, dropped: Collection[SnapshotId]) -> Catalogue:
    """Drop checkpoints, and all that only they need."""
    checkpoints = tuple(each for each in catalogue.checkpoints if each.id not in dropped)
    ids = {each.id for each in checkpoints}
    needed = {each.attempt for each in ids}
    lineages = []
    for attempt, lineage in catalogue.lineages:
        # `relate` finds the checkpoints of an old backup in the lineage of the current attempt.
        whole = LINEAGE_KEPT if attempt == catalogue.attempt else 1
        kept = tuple(each for at, each in enumerate(lineage) if at < whole or each.attempt in needed)
        lineages += [(attempt, kept)] if attempt in {*needed, catalogue.attempt} else []
    damaged = tuple(each for each in catalogue.damaged if each[0] in ids)
    return replace(catalogue, checkpoints=checkpoints, lineages=tuple(lineages), damaged=damaged)
