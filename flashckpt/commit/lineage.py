"""Which steps a run has, and in which order they are tried.

Visible are the steps of the newest started attempt; then its parent's, up to the step it started from; and
so on, the bound being the minimum along the way. A mark of a failed verification puts its step last; it hides
and deletes nothing. To go back is a deed of its own (`branch`), not an option, which a restart would repeat.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from flashckpt.commit.attempts import (
    Bound,
    attempt_folders,
    attempts,
    bounds,
    claim,
    mark_ended,
    open_run,
    start,
    steps_begun,
)
from flashckpt.commit.holder import Probe, check, here
from flashckpt.commit.steps import StepRecord, is_committed, missing_files, read_manifest, read_step
from flashckpt.errors import DamagedError, FlashckptError, NoSuchStepError, UnusableRunError
from flashckpt.format.names import (
    ATTEMPTS,
    MARK,
    AttemptName,
    manifest_path,
    start_path,
    step_attempt_folder,
    step_folder,
)
from flashckpt.format.records import Holder, Manifest, Mark
from flashckpt.store.base import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class VisibleStep:
    """A committed step and the attempt that committed it."""

    step: int
    attempt: AttemptName


def visible(store: Store) -> list[VisibleStep]:
    """The committed, complete steps of the run, newest last, each once."""
    return list(newest_first(store.at_once(), at_once=_FETCHED))[::-1]


def newest_first(store: Store, at: AttemptName | None = None, *, at_once: int = 1) -> Iterator[VisibleStep]:
    """The visible steps from the newest down, looked at only as far as they are drawn, `at_once` of them. A
    step that several attempts of the lineage committed is the newest attempt's."""
    seen = None
    for each in _committed(store, at, at_once=at_once):
        if each.step != seen:
            seen = each.step
            yield each


def _committed(store: Store, at: AttemptName | None = None, *, at_once: int = 1) -> Iterator[VisibleStep]:
    """The same, where a step is listed once for each attempt of the lineage that committed it."""
    begun = in_lineage(store, bounds(store, at))
    while some := [*islice(begun, at_once)]:
        if at_once > 1:
            store.fetch([manifest_path(each.step, each.attempt) for each in some], Manifest.MAX_BYTES)
        yield from (each for each in some if is_committed(store, each.step, each.attempt))


def in_lineage(store: Store, lineage: Sequence[Bound]) -> Iterator[VisibleStep]:
    """What the lineage has begun, committed or not: newest step first, and of one step the newest
    attempt first."""
    for step in reversed(steps_begun(store)):
        there = attempt_folders(store, step_folder(step))
        for bound in lineage:
            if bound.attempt in there and step <= bound.last_step:
                yield VisibleStep(step, bound.attempt)


def everything(store: Store) -> Iterator[VisibleStep]:
    """What any attempt has begun, committed or not, visible or not, newest step first."""
    for step in reversed(steps_begun(store)):
        for name in sorted(attempt_folders(store, step_folder(step)), reverse=True):
            yield VisibleStep(step, name)


_FETCHED = 64
_MAX_MARKS = 64
_MAX_HOST_CHARS = 255
_MAX_REASON_CHARS = 2000


def this_host() -> str:
    """This machine's name, as marks have it."""
    return socket.gethostname()[:_MAX_HOST_CHARS]


def mark(store: Store, step: int, attempt: AttemptName, host: str, reason: str) -> None:
    """Note that the step could not be verified on `host`. Beyond 64 marks of a step nothing is added."""
    folder = step_attempt_folder(step, attempt)
    if sum(MARK.fullmatch(entry.name) is not None for entry in store.list(folder)) >= _MAX_MARKS:
        return
    record = Mark(step=step, attempt=attempt, host=host[:_MAX_HOST_CHARS], reason=reason[:_MAX_REASON_CHARS])
    store.create(f"{folder}/mark-{secrets.token_hex(4)}.json", record.to_bytes())


def marks(store: Store, step: int, attempt: AttemptName) -> list[Mark]:
    """The marks of a step that can be read."""
    folder = step_attempt_folder(step, attempt)
    found: list[Mark] = []
    for entry in store.list(folder):
        if MARK.fullmatch(entry.name) is not None and not entry.is_folder and len(found) < _MAX_MARKS:
            path = f"{folder}/{entry.name}"
            try:
                found.append(Mark.from_bytes(store.read(path, Mark.MAX_BYTES), path))
            except (DamagedError, FileNotFoundError):
                continue
    return found


def is_marked(store: Store, each: VisibleStep) -> bool:
    """Whether a verification of this step failed somewhere."""
    return bool(marks(store, each.step, each.attempt))


def marked_here(store: Store, each: VisibleStep) -> Mark | None:
    """The first mark that this machine put on the step, None where it put none."""
    found = marks(store, each.step, each.attempt)
    return next((mark for mark in found if mark.host == this_host()), None)


_SHOWN = 20
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class StepSource:
    """A visible step in one tier: in the slot of that name in this node's memory, or (None) in the store.
    `is_marked`: this machine has marked it."""

    step: int
    attempt: AttemptName
    slot: str | None = None
    is_marked: bool = False


def steps(store: Store) -> list[int]:
    """The visible committed steps, newest last. Opens the run; reads no part.

    UnusableRunError where records of attempts are lost: what would be listed is not what a resume sees.
    """
    open_run(store, create=False)

    def listed() -> list[int]:
        look = store.at_once()
        check_records(look)
        return [each.step for each in newest_first(look, at_once=_FETCHED)]

    return looked_for(store, listed)[::-1]


def candidates(store: Store, *, says: bool = True) -> list[VisibleStep]:
    """What a resume should try, in this order: newest first, of one step the newest attempt's first, and last
    those that this machine has marked as damaged. That it passes over a newer step is said in the log, where
    it `says` so.

    Lists a step of every attempt that committed it: ranks that list beside the commit of the newest attempt
    find the older one in common, and a damaged one is replaced by the other.
    """
    newest = list(_committed(store))
    marks = {each: mark for each in newest if (mark := marked_here(store, each)) is not None}
    others = [each for each in newest if each not in marks]
    for each, mark in marks.items():
        if says and others and others[0] < each:
            log.warning(
                "step %d of attempt %s is passed over, marked by host %s: %s. An older step comes first. If "
                "its files are whole again (`flashckpt verify`), delete the mark-*.json beside them.",
                each.step, each.attempt, mark.host, mark.reason,
            )  # fmt: skip
    return others + list(marks)


def sources(store: Store, survived: Mapping[str, VisibleStep], *, says: bool = True) -> list[StepSource]:
    """What a resume tries, in this order: newest step first, at each memory before the store; last the
    steps that this machine has marked. `survived` are the snapshots in this node's memory by the names of
    their slots: they follow the same rule of lineage. `says` as in `candidates`."""
    at_rest = candidates(store, says=says)
    marked = {each for each in at_rest if marked_here(store, each) is not None}
    last_step = {bound.attempt: bound.last_step for bound in bounds(store)}
    found = [
        StepSource(each.step, each.attempt, slot)
        for slot, each in survived.items()
        if each.step <= last_step.get(each.attempt, -1)
    ]
    found += [StepSource(each.step, each.attempt) for each in at_rest if each not in marked]
    found.sort(key=lambda each: (each.step, each.attempt.number, each.slot is not None), reverse=True)
    return found + [StepSource(e.step, e.attempt, is_marked=True) for e in at_rest if e in marked]


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
            # A living job deletes steps while they are read.
            if has_manifest(store, each):
                raise


def looked_for(store: Store, look: Callable[[], list[_Found]]) -> list[_Found]:
    """What `look` finds among the steps: nothing only where none came meanwhile. All that were listed may be
    deleted before they are read, because newer ones have come."""
    before: list[VisibleStep] = []
    while not (found := look()):
        now = list(everything(store.at_once()))
        if now in ([], before):
            break
        before = now
    return found


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
    steps, or a start.json, or where the newest start.json is damaged: then an older lineage would win.

    Of attempts before the newest started one nothing is asked: it has gone on from what it found, and
    their records may have been swept. That one of theirs is damaged is said in the log.
    """
    # Looked at before the claims are: an attempt that starts meanwhile is then known, not suspected.
    begun = list(everything(store))
    folders = attempt_folders(store, ATTEMPTS)
    with_start = [name for name in folders if store.exists(start_path(name))]
    known = [info for info in attempts(store) if info.has_started]
    newest = max((info.name.number for info in known), default=0)
    for info in known:
        if info.problem and info.name.number < newest:
            log.warning("%s No step that a resume sees depends on it.", info.problem.partition(". ")[0] + ".")
    started = {info.name for info in known if not info.problem or info.name.number < newest}
    lost = {name for name in with_start if name.number >= newest} - started
    suspects = [each for each in begun if each.attempt.number >= newest and each.attempt not in started]
    steps = [each for each in suspects if has_manifest(store, each)]
    lost |= {each.attempt for each in steps}
    if lost:
        raise UnusableRunError(
            f"{store.url} has lost records: attempt {max(lost)} has been trained, and its claim "
            f"{ATTEMPTS}/{max(lost).number:06d}.json or its {start_path(max(lost))} is missing or damaged. "
            "Nothing was changed, and neither an older step nor a fresh start is taken instead. Put the "
            "files back, or name a step to go on from with "
            f"`flashckpt branch {store.url} STEP@ATTEMPT`{_named(steps)}.",
            path=store.url,
        )


def check_usable(store: Store) -> None:
    """UnusableRunError where there are manifests and not one visible committed step that is complete.

    A run that died before its first commit has no manifest: it is a fresh one.
    """
    if next(newest_first(store), None) is not None:
        return
    if any(has_manifest(store, each) for each in in_lineage(store, bounds(store))):
        raise UnusableRunError(
            f"{store.url} has committed steps, and files of every one are missing, cut short or damaged. "
            "Nothing was changed, and it is not taken for a fresh run. Run `flashckpt verify` on it, put the "
            "files back, or use another folder.",
            path=store.url,
        )

    steps = [each for each in everything(store) if has_manifest(store, each)]
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


def has_manifest(store: Store, each: VisibleStep) -> bool:
    """Whether a manifest stands there, whole or not."""
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


def branch(
    store: Store,
    step: int,
    attempt: AttemptName | None = None,
    *,
    probe: Probe | None = None,
    me: Holder | None = None,
    watch_s: float | None = None,
) -> AttemptName:
    """Claim and start an attempt at a visible step, or at `step` of `attempt`. The next resume, and all
    after it, go on from there. Returns the new attempt.

    RunHeldError where a job holds the run, NoSuchStepError where the step is not committed, DamagedError
    where its records are damaged; nothing is changed then.
    """
    open_run(store, create=False)
    holder = me if me is not None else here()
    # Before the claim, so that a wrong step takes no number; after it again, so that it is still true.
    resolve(store, step, attempt)
    name = claim(store, holder, check=lambda: check(store, holder, probe, watch_s=watch_s))
    try:
        found = resolve(store, step, attempt)
        ranks = found.manifest.ranks
        start(store, name, found.attempt, found.step, found.world, found.boundary, ranks)
    finally:
        mark_ended(store, name, "closed")
    return name
