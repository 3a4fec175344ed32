"""Finding the step to read. Owns the order of candidates and the words for one that is not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from flashckpt.commit.attempts import attempt_folders, attempts, bounds
from flashckpt.commit.lineage import (
    VisibleStep,
    everything,
    in_lineage,
    newest_first,
    visible,
)
from flashckpt.commit.marks import marked_here
from flashckpt.commit.run import open_run
from flashckpt.commit.steps import StepRecord, is_committed, missing_files, read_manifest, read_step
from flashckpt.errors import DamagedError, FlashckptError, NoSuchStepError, UnusableRunError
from flashckpt.events import log
from flashckpt.format.names import ATTEMPTS, AttemptName, start_path
from flashckpt.format.records import Manifest
from flashckpt.store.base import Store

_SHOWN = 20
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Rung:
    """A visible step in one tier: in the slot of that name in this node's memory, or (None) in the store."""

    step: int
    attempt: AttemptName
    slot: str | None = None


def steps(store: Store) -> list[int]:
    """The visible committed steps, newest last. Opens the run; reads no part.

    UnusableRunError where records of attempts are lost: what would be listed is not what a resume sees.
    """
    open_run(store, create=False)
    check_records(store)
    return [each.step for each in visible(store)]


def candidates(store: Store) -> list[VisibleStep]:
    """What a resume should try, in this order: newest first, and last those that this machine has marked
    as damaged. That it passes over a newer step is said in the log."""
    newest = list(newest_first(store))
    marks = {each: mark for each in newest if (mark := marked_here(store, each)) is not None}
    others = [each for each in newest if each not in marks]
    for each, mark in marks.items():
        if others and others[0] < each:
            log.warning(
                "step %d of attempt %s is passed over, marked by host %s: %s. An older step comes first. If "
                "its files are whole again (`flashckpt verify`), delete the mark-*.json beside them.",
                each.step, each.attempt, mark.host, mark.reason,
            )  # fmt: skip
    return others + list(marks)


def ladder(store: Store, survived: Mapping[str, VisibleStep]) -> list[Rung]:
    """What a resume tries, in this order: newest step first, at each memory before the store; last the
    steps that this machine has marked. `survived` are the snapshots in this node's memory by the names of
    their slots: they follow the same rule of lineage."""
    at_rest = candidates(store)
    marked = {each for each in at_rest if marked_here(store, each) is not None}
    last_step = {bound.attempt: bound.last_step for bound in bounds(store)}
    rungs = [
        Rung(each.step, each.attempt, slot)
        for slot, each in survived.items()
        if each.step <= last_step.get(each.attempt, -1)
    ]
    rungs += [Rung(each.step, each.attempt) for each in at_rest if each not in marked]
    rungs.sort(key=lambda each: (each.step, each.attempt.number, each.slot is not None), reverse=True)
    return rungs + [Rung(each.step, each.attempt) for each in at_rest if each in marked]


def incomplete(store: Store, after: int) -> list[tuple[VisibleStep, str]]:
    """Steps of the lineage past step `after` that were committed once and are not complete any more: their
    manifest is damaged, or files are missing or of another length. Newest first, each with what is wrong."""
    found = []
    for each in in_lineage(store, bounds(store)):
        if each.step <= after:
            break
        try:
            manifest = read_manifest(store, each.step, each.attempt)
        except DamagedError as error:
            found.append((each, str(error)))
            continue
        if isinstance(manifest, Manifest) and (missing := missing_files(store, manifest)):
            names = ", ".join(missing[:_SHOWN])
            found.append((each, f"{names}: missing, or of another length than was written"))
    return found


def resolve(store: Store, step: int | None = None, at: AttemptName | None = None) -> StepRecord:
    """A committed step, read: the best candidate, the visible `step`, or `step` of the attempt `at`.

    NoSuchStepError, with what there is, where it is not there; UnusableRunError where it cannot be known
    which step is the best.
    """
    return read_whole(store, step, at, read=lambda record: record)


def read_whole(
    store: Store,
    step: int | None = None,
    at: AttemptName | None = None,
    *,
    read: Callable[[StepRecord], _Found],
) -> _Found:
    """What `read` gives of the step that `resolve` finds. One that its job deletes meanwhile was not there:
    it is looked for again, and nothing that `read` raised is told of it."""
    open_run(store, create=False)
    while True:
        each = _chosen(store, step, at)
        try:
            return read(read_step(store, each.step, each.attempt))
        except (FlashckptError, FileNotFoundError):
            if not is_gone(store, each):
                raise


def looked_for(store: Store, look: Callable[[], list[_Found]]) -> list[_Found]:
    """What `look` finds among the steps: nothing only where none came meanwhile. All that were listed may be
    deleted before they are read, because newer ones have come."""
    before = list(everything(store))
    while not (found := look()):
        now = list(everything(store))
        if now == before:
            break
        before = now
    return found


def is_gone(store: Store, each: VisibleStep) -> bool:
    """Whether a step has no manifest any more: a living job deletes steps while they are read."""
    try:
        return not isinstance(read_manifest(store, each.step, each.attempt), Manifest)
    except DamagedError:
        return False


def _chosen(store: Store, step: int | None, at: AttemptName | None) -> VisibleStep:
    if step is None:
        check_records(store)
        found = looked_for(store, lambda: candidates(store))
        if not found:
            raise _no_step(store, "no committed step", None)
        return found[0]
    if at is not None:
        if not is_committed(store, step, at):
            raise _no_step(store, f"no committed step {step} of attempt {at}", step)
        return VisibleStep(step, at)
    for each in newest_first(store):
        if each.step == step:
            return each
    raise _no_step(store, f"no visible committed step {step}", step)


def check_records(store: Store) -> None:
    """UnusableRunError where an attempt that is newer than all that have claim and start.json has left
    steps, or a start.json: then one of its records is lost, and an older lineage would win.

    Of attempts before the newest started one nothing is asked: it has gone on from what it found, and
    their records may have been swept.
    """
    # Looked at before the claims are: an attempt that starts meanwhile is then known, not suspected.
    begun = list(everything(store))
    folders = attempt_folders(store, ATTEMPTS)
    with_start = [name for name in folders if store.exists(start_path(name))]
    started = {info.name for info in attempts(store) if info.start is not None}
    newest = max((name.number for name in started), default=0)
    lost = {name for name in with_start if name.number >= newest} - started
    suspects = [each for each in begun if each.attempt.number >= newest and each.attempt not in started]
    steps = [each for each in suspects if _has_manifest(store, each)]
    lost |= {each.attempt for each in steps}
    if lost:
        raise UnusableRunError(
            f"{store.url} has lost records: attempt {max(lost)} has been trained, and its claim "
            f"{ATTEMPTS}/{max(lost).number:06d}.json or its {start_path(max(lost))} is missing. Nothing was "
            "changed, and neither an older step nor a fresh start is taken instead. Put the files back, or "
            f"name a step to go on from with `flashckpt branch {store.url} STEP@ATTEMPT`{_named(steps)}.",
            path=store.url,
        )


def check_usable(store: Store) -> None:
    """UnusableRunError where there are manifests and not one visible committed step that is complete.

    A run that died before its first commit has no manifest: it is a fresh one.
    """
    if next(newest_first(store), None) is not None:
        return
    if any(_has_manifest(store, each) for each in in_lineage(store, bounds(store))):
        raise UnusableRunError(
            f"{store.url} has committed steps, and files of every one are missing, cut short or damaged. "
            "Nothing was changed, and it is not taken for a fresh run. Run `flashckpt verify` on it, put the "
            "files back, or use another folder.",
            path=store.url,
        )

    steps = [each for each in everything(store) if _has_manifest(store, each)]
    if steps:
        raise UnusableRunError(
            f"{store.url} has committed steps, and its newest attempt went on from none of them. Nothing was "
            "changed, and it is not taken for a fresh run. Name the step to go on from with "
            f"`flashckpt branch {store.url} STEP@ATTEMPT`{_named(steps)}, or use another folder.",
            path=store.url,
        )


def _named(steps: list[VisibleStep]) -> str:
    names = ", ".join(f"{each.step}@{each.attempt}" for each in steps[:_SHOWN])
    return f" ({names})" if names else ""


def _has_manifest(store: Store, each: VisibleStep) -> bool:
    try:
        return isinstance(read_manifest(store, each.step, each.attempt), Manifest)
    except DamagedError:
        return True


def _no_step(store: Store, what: str, step: int | None) -> NoSuchStepError:
    newest = [each.step for each in newest_first(store)]
    hidden = [
        f"{each.step}@{each.attempt}"
        for each in everything(store)
        if each.step not in newest and is_committed(store, each.step, each.attempt)
    ]
    there = ", ".join(map(str, newest[:_SHOWN])) or "none"
    more = f" (and {len(newest) - _SHOWN} older)" if len(newest) > _SHOWN else ""
    names = ", ".join(hidden[:_SHOWN])
    beside = f" Not visible: {names}; `flashckpt branch` gets them back." if hidden else ""
    return NoSuchStepError(
        f"{store.url} has {what}. Nothing was changed. Visible steps: {there}{more}.{beside}",
        step=step,
        path=store.url,
    )
