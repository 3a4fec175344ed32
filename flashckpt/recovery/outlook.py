"""Where training will go on from: the ladder's own order, the first rung that holds. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection

from flashckpt.commit import reading
from flashckpt.commit.lineage import VisibleStep
from flashckpt.errors import UnusableRunError
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.recovery.report import Resume
from flashckpt.recovery.survey import Seen, slots_in, torn_leaves
from flashckpt.store.base import Store


def resume_of(
    store: Store, runtime: RuntimeFolder | None, damaged: Collection[VisibleStep]
) -> tuple[Resume | None, str]:
    """The step and tier of the next resume, or why there is none; neither for a run without steps.

    `damaged` are steps at rest that cannot be used. What is in memory is audited here.
    """
    try:
        reading.check_records(store)
        seen = slots_in(runtime) if runtime is not None else []
        found, is_run = first_sound(store, seen, damaged, lambda name: _is_sound(runtime, name))
        if found is not None:
            return found, ""
        if is_run:
            return None, "the run has steps and none of them can be used: training would refuse to start"
        reading.check_usable(store)
    except UnusableRunError as error:
        return None, str(error)
    return None, ""


def first_sound(
    store: Store,
    seen: Collection[Seen],
    damaged: Collection[VisibleStep],
    is_sound: Callable[[str], bool],
) -> tuple[Resume | None, bool]:
    """The first rung that holds, and whether there is any rung."""
    survived = {each.slot: VisibleStep(each.step, each.attempt) for each in seen if each.attempt is not None}
    rungs = reading.ladder(store, survived)
    for rung in rungs:
        if rung.slot is not None and is_sound(rung.slot):
            return Resume(step=rung.step, attempt=rung.attempt, tier="memory"), True
        if rung.slot is None and VisibleStep(rung.step, rung.attempt) not in damaged:
            return Resume(step=rung.step, attempt=rung.attempt, tier="local"), True
    return None, bool(rungs)


def _is_sound(runtime: RuntimeFolder | None, name: str) -> bool:
    return runtime is not None and torn_leaves(runtime, name) == []
