"""Which steps a run has: those of its newest started attempt and of what that went on from.

Owns the rule of visibility and nothing else. Visible are the steps of the newest started attempt; then
its parent's, up to the step it started from; and so on, the bound being the minimum along the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashckpt.commit.attempts import Bound, attempt_folders, bounds
from flashckpt.commit.steps import is_committed
from flashckpt.format.names import STEPS, AttemptName, step_folder, step_number
from flashckpt.store.base import Store


@dataclass(frozen=True, slots=True, order=True)
class VisibleStep:
    """A committed step and the attempt that committed it."""

    step: int
    attempt: AttemptName


def visible(store: Store) -> list[VisibleStep]:
    """The committed, complete steps of the run, newest last, each once."""
    return list(newest_first(store))[::-1]


def newest_first(store: Store, at: AttemptName | None = None) -> Iterator[VisibleStep]:
    """The visible steps from the newest down, looked at only as far as they are drawn. A step that
    several attempts of the lineage committed is the newest attempt's."""
    seen = None
    for each in in_lineage(store, bounds(store, at)):
        if each.step != seen and is_committed(store, each.step, each.attempt):
            seen = each.step
            yield each


def in_lineage(store: Store, lineage: Sequence[Bound]) -> Iterator[VisibleStep]:
    """What the lineage has begun, committed or not: newest step first, and of one step the newest
    attempt first."""
    last_step = {str(bound.attempt): bound.last_step for bound in lineage}
    steps = (step_number(entry.name) for entry in store.list(STEPS) if entry.is_folder)
    for step in sorted((step for step in steps if step is not None), reverse=True):
        names = [entry.name for entry in store.list(step_folder(step)) if entry.is_folder]
        for bound in lineage:
            if str(bound.attempt) in names and step <= last_step[str(bound.attempt)]:
                yield VisibleStep(step, bound.attempt)


def everything(store: Store) -> Iterator[VisibleStep]:
    """What any attempt has begun, committed or not, visible or not, newest step first."""
    steps = (step_number(entry.name) for entry in store.list(STEPS) if entry.is_folder)
    for step in sorted((step for step in steps if step is not None), reverse=True):
        for name in sorted(attempt_folders(store, step_folder(step)), reverse=True):
            yield VisibleStep(step, name)
