"""Finding the step to read. Owns the order of candidates and the words for one that is not there."""

from __future__ import annotations

from flashckpt.commit.attempts import attempts
from flashckpt.commit.lineage import (
    VisibleStep,
    bounds,
    everything,
    in_lineage,
    newest_first,
    visible,
)
from flashckpt.commit.marks import is_marked
from flashckpt.commit.run import open_run
from flashckpt.commit.steps import StepRecord, is_committed, read_manifest, read_step
from flashckpt.errors import DamagedError, NoSuchStepError, UnusableRunError
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Manifest
from flashckpt.store.base import Store

_SHOWN = 20


def steps(store: Store) -> list[int]:
    """The visible committed steps, newest last. Opens the run; reads no part."""
    open_run(store, create=False)
    return [each.step for each in visible(store)]


def candidates(store: Store) -> list[VisibleStep]:
    """What a resume should try, in this order: newest first, those marked as damaged last."""
    newest = list(newest_first(store))
    marked = [each for each in newest if is_marked(store, each)]
    return [each for each in newest if each not in marked] + marked


def resolve(store: Store, step: int | None = None, at: AttemptName | None = None) -> StepRecord:
    """A committed step, read: the best candidate, the visible `step`, or `step` of the attempt `at`.

    NoSuchStepError, with what there is, where it is not there.
    """
    open_run(store, create=False)
    if step is None:
        found = candidates(store)
        if not found:
            raise _no_step(store, "no committed step", None)
        return read_step(store, found[0].step, found[0].attempt)
    if at is not None:
        if not is_committed(store, step, at):
            raise _no_step(store, f"no committed step {step} of attempt {at}", step)
        return read_step(store, step, at)
    for each in newest_first(store):
        if each.step == step:
            return read_step(store, step, each.attempt)
    raise _no_step(store, f"no visible committed step {step}", step)


def check_usable(store: Store) -> None:
    """UnusableRunError where the lineage has manifests and not one committed step that is complete.

    A run that died before its first commit has no manifest: it is a fresh one.
    """
    if next(newest_first(store), None) is not None:
        return
    if any(_has_manifest(store, each) for each in in_lineage(store, bounds(attempts(store)))):
        raise UnusableRunError(
            f"{store.url} has committed steps, and files of every one are missing, cut short or damaged. "
            "Nothing was changed, and it is not taken for a fresh run. Run `flashckpt verify` on it, put the "
            "files back, or use another folder.",
            path=store.url,
        )


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
