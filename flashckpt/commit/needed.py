"""Which snapshots in the memory of a node are still needed, since no checkpoint has taken their place."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flashckpt.commit.view import View
from flashckpt.memory.slot import Sealed
from flashckpt.store.base import Store


def needed_slots(store: Store, held: Sequence[Sealed], committed: Collection[str]) -> set[str]:
    """Names of the slots with a snapshot that is committed nowhere and still needed: the newest one of an
    attempt that all its ranks here hold, until a later step, or a step of an attempt that did not resume from
    it, is committed; and the snapshot that the newest attempt has resumed. `committed`: the slots whose
    snapshots are committed."""
    view = View.of(store)
    started, parent = view.attempt, view.parent
    visible = next(iter(view.newest_first()), None)
    kept = set()
    for attempt in {each.attempt for each in held}:
        mine = [each for each in held if each.attempt == attempt]
        left = [each for each in mine if each.slot.name not in committed]
        # The newest attempt needs its parent, whatever else is left of the attempt that captured it.
        for each in [*_newest_whole(mine, left), *(each for each in left if each.id == parent)]:
            if started is None or attempt == started or each.id == parent:
                is_kept = visible is None or visible.id < each.id
            else:
                is_kept = visible is None or (visible.attempt != started and visible.id != each.id)
            if is_kept:
                kept.add(each.slot.name)
    return kept


def _newest_whole(held: Sequence[Sealed], left: Sequence[Sealed]) -> list[Sealed]:
    """The snapshots of one attempt that may be needed, of those in `left`. A boundary that a rank has not
    sealed can never be whole."""
    ranks = {each.slot.rank for each in held}
    if len(ranks) < 2:
        newest = max((each.boundary for each in left), default=None)
        return [each for each in left if each.boundary == newest]
    owners: dict[int, set[int]] = {}
    for each in held:
        owners.setdefault(each.boundary, set()).add(each.slot.rank)
    whole = sorted(boundary for boundary, of in owners.items() if of == ranks)
    number, boundary = max(each.slot.complete for each in held)
    if number != held[0].attempt.number or (whole and boundary > whole[-1]):
        boundary = whole[-1] if whole else 0
    # Other nodes may have nothing newer than the complete one.
    stays = {each for each in whole if each >= boundary}
    return [each for each in left if not whole or each.boundary in stays]
