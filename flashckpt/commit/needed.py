"""Which snapshots in the memory of a node are still needed, since no checkpoint has taken their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashckpt.commit.view import View
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.store.base import Store


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A sealed snapshot in a slot of this node. `complete` is the newest boundary, with the number of its
    attempt, that its slot says all ranks of the job have sealed."""

    slot: str
    rank: int
    attempt: AttemptName
    step: int
    boundary: int
    is_committed: bool = False
    complete: tuple[int, int] = (0, 0)

    @property
    def id(self) -> SnapshotId:
        return SnapshotId(self.attempt, self.boundary)


def needed_slots(store: Store, survivors: Sequence[Survivor]) -> set[str]:
    """Names of the slots with a snapshot that is committed nowhere and still needed: the newest one of an
    attempt that all its ranks here hold, until a later step, or a step of an attempt that did not resume from
    it, is committed; and the snapshot that the newest attempt has resumed."""
    view = View.of(store)
    started, parent = view.attempt, view.parent
    visible = next(iter(view.newest_first()), None)
    kept = set()
    for attempt in {each.attempt for each in survivors}:
        mine = [each for each in survivors if each.attempt == attempt]
        # The newest attempt needs it, whatever else is left of the attempt that captured it.
        loaded = [each for each in mine if each.id == parent]
        for each in [*_newest_whole(mine), *(e for e in loaded if not e.is_committed)]:
            if started is None or attempt == started or each in loaded:
                is_kept = visible is None or visible.id < each.id
            else:
                is_kept = visible is None or (visible.attempt != started and visible.id != each.id)
            if is_kept:
                kept.add(each.slot)
    return kept


def _newest_whole(survivors: Sequence[Survivor]) -> list[Survivor]:
    """The snapshots of one attempt that may be needed. A boundary that a rank has not sealed can never be
    whole."""
    left = [each for each in survivors if not each.is_committed]
    ranks = {each.rank for each in survivors}
    if len(ranks) < 2:
        newest = max((each.boundary for each in left), default=None)
        return [each for each in left if each.boundary == newest]
    owners: dict[int, set[int]] = {}
    for each in survivors:
        owners.setdefault(each.boundary, set()).add(each.rank)
    whole = sorted(boundary for boundary, held in owners.items() if held == ranks)
    number, boundary = max(each.complete for each in survivors)
    if number != survivors[0].attempt.number or (whole and boundary > whole[-1]):
        boundary = whole[-1] if whole else 0
    # Other nodes may have nothing newer than the complete one.
    stays = {each for each in whole if each >= boundary}
    return [each for each in left if not whole or each.boundary in stays]
