"""Steps of a run to another store of it, newest first. Owns which are meant, and the target's run.json."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from flashckpt import _native
from flashckpt.commit.assets import copy_assets
from flashckpt.commit.attempts import bounds, open_run, ranks_here, read_start
from flashckpt.commit.lineage import VisibleStep, check_records, newest_first, resolve
from flashckpt.commit.steps import read_manifest
from flashckpt.errors import DamagedError, NoSuchStepError, RunError
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Manifest
from flashckpt.options import Compress
from flashckpt.store import are_apart
from flashckpt.store.base import Store
from flashckpt.tiers.step_copy import Copied, Outcome, StepCopier

# Bytes that are done with, and bytes in all.
Progress = Callable[[int, int], None]
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step. `problem` says why it could not be copied, empty where it could; `is_visible`: a resume from
    the target sees it."""

    step: int
    attempt: AttemptName
    copied: Copied | None = None
    is_visible: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCopy:
    """What was copied, newest step first."""

    run_id: str
    source: str
    target: str
    steps: tuple[StepResult, ...]

    @property
    def ok(self) -> bool:
        return not any(each.problem for each in self.steps)

    @property
    def sent_bytes(self) -> int:
        return sum(each.copied.sent_bytes for each in self.steps if each.copied is not None)


def copy_run(
    source: Store,
    target: Store,
    step: int | None = None,
    *,
    attempt: AttemptName | None = None,
    all_steps: bool = False,
    threads: int = 2,
    compress: Compress = "none",
    repairs: bool = False,
    progress: Progress = lambda done, total: None,
    may_supersede: Callable[[], None] = lambda: None,
    joins: bool = False,
) -> RunCopy:
    """Copy a committed step: the one that a resume would take, or `step`; with `all_steps` every visible one.
    What is there already is not sent again. `compress`: see `Compression`; `repairs`, `joins`: `StepCopier`;
    what one node's own disk has of a target that has all ranks is repaired as a part of that.

    Of one step all errors are raised; with `all_steps` a damaged one is told of, the others are copied, and
    one that is deleted meanwhile is left out. RunError where the target holds another run, has gone on by
    itself, or is in the source or around it.
    """
    _check_apart(source, target)
    run_id = open_run(source, create=False).run_id
    chosen = _chosen(source, step, attempt, all_steps=all_steps)
    _open_as(run_id, source, target)
    word = array("Q", [0])
    copier = StepCopier(
        source,
        target,
        threads=threads,
        progress=_native.address_of(word),
        compress=compress,
        repairs=repairs,
        may_supersede=may_supersede,
        joins=joins or (repairs and _is_part(source, target)),
    )

    def deed() -> list[StepResult]:
        if not all_steps and step is None:
            return [_newest(source, copier)]
        steps = chosen
        while not (found := _each(copier, steps, tells=all_steps)):
            # A living job has deleted all of them meanwhile: there are newer ones.
            steps = _chosen(source, step, attempt, all_steps=all_steps)
        return found

    rows = _watched(deed, word, _total(source, chosen), progress)
    # After the steps, which damaged assets must not keep from being copied.
    copy_assets(source, target, repairs=repairs)
    lineage = {bound.attempt: bound.last_step for bound in bounds(target)}
    return RunCopy(
        run_id=run_id,
        source=source.url,
        target=target.url,
        steps=tuple(_seen(each, lineage) for each in rows),
    )


def _check_apart(source: Store, target: Store) -> None:
    if not are_apart(source.url, target.url):
        raise RunError(
            f"{target.url}: the run itself is in {source.url}, and one is in the other: it would be no "
            "second copy, or go with the first. Nothing was copied. Name a place apart from it, on other "
            "storage.",
            path=target.url,
        )


def _open_as(run_id: str, source: Store, target: Store) -> None:
    """Make the target this run, where it holds none yet."""
    found = open_run(target, create=True, run_id=run_id)
    if found.run_id != run_id:
        raise RunError(
            f"{target.url} holds another run ({found.run_id}) than {source.url} ({run_id}). Nothing was "
            "changed. Copy to a place of its own.",
            path=target.url,
        )


def _is_part(source: Store, target: Store) -> bool:
    """Whether the source has some ranks, on a node's own disk, of what the target has of all. The job may
    have gone on since the target was told."""
    lineage = [bound.attempt for bound in bounds(source)]
    if not lineage or ranks_here(source, lineage[0]) is None:
        return False
    there = next(filter(None, (read_start(target, each) for each in lineage)), None)
    return there is not None and there.ranks is None


def _chosen(
    source: Store, step: int | None, attempt: AttemptName | None, *, all_steps: bool
) -> list[VisibleStep]:
    if all_steps:
        check_records(source)
        found = list(newest_first(source))
        if found:
            return found
    record = resolve(source, step, attempt)
    return [VisibleStep(record.step, record.attempt)]


def _newest(source: Store, copier: StepCopier) -> StepResult:
    """A living job deletes steps while they are copied: then there is a newer one."""
    while True:
        record = resolve(source)
        try:
            copied = copier.copy(record.step, record.attempt)
        except NoSuchStepError:
            continue
        return StepResult(step=record.step, attempt=record.attempt, copied=copied)


def _each(copier: StepCopier, steps: list[VisibleStep], *, tells: bool) -> list[StepResult]:
    results = (_one(copier, each, tells=tells) for each in steps)
    return [each for each in results if each is not None]


def _one(copier: StepCopier, each: VisibleStep, *, tells: bool) -> StepResult | None:
    try:
        copied = copier.copy(each.step, each.attempt)
    except NoSuchStepError:
        if not tells:
            raise
        return None
    except DamagedError as error:
        if not tells:
            raise
        return StepResult(step=each.step, attempt=each.attempt, problem=str(error))
    return StepResult(step=each.step, attempt=each.attempt, copied=copied)


def _seen(row: StepResult, lineage: dict[AttemptName, int]) -> StepResult:
    is_there = row.copied is not None and row.copied.outcome not in (Outcome.PART, Outcome.BURIED)
    return StepResult(
        step=row.step,
        attempt=row.attempt,
        copied=row.copied,
        is_visible=is_there and row.step <= lineage.get(row.attempt, -1),
        problem=row.problem,
    )


def _total(source: Store, chosen: list[VisibleStep]) -> int:
    """Bytes of all files, of constants once for each step that names them: as often as they are looked at."""
    total = 0
    for each in chosen:
        try:
            manifest = read_manifest(source, each.step, each.attempt)
        except DamagedError:
            continue
        if isinstance(manifest, Manifest):
            total += sum(file.num_bytes for file in (*manifest.shards, *manifest.constants))
    return total


def _watched(
    deed: Callable[[], list[StepResult]], word: array[int], total: int, progress: Progress
) -> list[StepResult]:
    """Do it on a thread of its own, which an interrupt does not wait for, and tell how far it is."""
    found: list[StepResult] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.extend(deed())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="flashckpt-copy", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        progress(min(word[0], total), total)
    if errors:
        raise errors[0]
    return found
