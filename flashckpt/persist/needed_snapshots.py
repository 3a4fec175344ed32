"""Which snapshots in memory still count though they are committed nowhere. Owns this rule; lets nothing
go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashckpt.commit import attempts, lineage
from flashckpt.format.names import AttemptName
from flashckpt.store.base import Store


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A sealed snapshot as a survey sees it."""

    slot: str
    rank: int
    attempt: AttemptName
    step: int
    boundary: int
    is_committed: bool = False


def needed(store: Store, survivors: Sequence[Survivor]) -> set[str]:
    """Names of the slots that hold something that is committed nowhere and still counts: the newest step of
    an attempt that all its ranks here hold, as long as no step of its run from there on, and no attempt that
    did not start from it, is committed; and what the newest attempt has started from."""
    started = attempts.newest_started(store)
    visible = next(iter(lineage.newest_first(store)), None)
    start = attempts.read_start(store, started) if started is not None else None
    kept = set()
    for attempt in {each.attempt for each in survivors}:
        mine = [each for each in survivors if each.attempt == attempt]
        # What the newest attempt has started from is its, whatever else is left of the one that made it.
        loaded = [e for e in mine if start is not None and start.took_up(attempt, e.step, e.boundary)]
        for each in [*_newest(mine), *(e for e in loaded if not e.is_committed)]:
            if started is None or attempt == started or each in loaded:
                is_kept = visible is None or visible.step < each.step
            else:
                newest = None if visible is None else (visible.step, visible.attempt)
                is_kept = newest is None or (newest[1] != started and newest != (each.step, attempt))
            if is_kept:
                kept.add(each.slot)
    return kept


def _newest(survivors: Sequence[Survivor]) -> list[Survivor]:
    """Of one attempt, what is to be judged. A step that a rank has not sealed can never be whole."""
    left = [each for each in survivors if not each.is_committed]
    holders: dict[int, set[int]] = {}
    for each in survivors:
        holders.setdefault(each.step, set()).add(each.rank)
    ranks = {each.rank for each in survivors}
    complete = [step for step, those in holders.items() if those == ranks]
    if len(ranks) > 1 and not complete:
        return left
    newest = max(complete if len(ranks) > 1 else [each.step for each in left], default=None)
    return [each for each in left if each.step == newest]
