"""Which slot is written next. Owns the order in which a rank's slots are used; changes no state."""

from __future__ import annotations

from collections.abc import Sequence

from flashckpt.errors import DamagedError
from flashckpt.memory.page import State
from flashckpt.memory.slot import Sealed, Slot


class SlotRing:
    """The slots of one rank. The newest sealed snapshot is never given away, nor one that is still to be
    persisted and whose try has not failed. `is_single`: there is to be one slot, whose snapshot is given
    away once it is committed."""

    def __init__(self, slots: Sequence[Slot], *, is_single: bool = False) -> None:
        self.slots, self.is_single = tuple(slots), is_single

    def without(self, slot: Slot) -> SlotRing | None:
        """The others; None where there are none."""
        left = [each for each in self.slots if each is not slot]
        return SlotRing(left, is_single=self.is_single) if left else None

    def take(self) -> Slot | None:
        """The slot to write next, for `begin`; None while all are in use: then the boundary is skipped.

        FREE before the oldest sealed before the oldest whose persisting failed. A slot whose record is
        damaged holds nothing and counts as the oldest.
        """
        for slot in self.slots:
            if _state(slot) is State.FREE:
                return slot
        sealed = self._sealed()
        newest = max((each.age for _, each in sealed if each is not None), default=None)
        choices = []
        for slot, each in sealed:
            if each is None:
                choices.append(((0, (0, 0, 0)), slot))
            elif each.word.state is not State.SEALED:
                continue
            elif each.age != newest:
                waits = slot.wants_persist(each.generation)
                if not waits or slot.failed[0] == each.generation:
                    choices.append(((1 if waits else 0, each.age), slot))
            elif self.is_single and slot.persisted == each.generation:
                choices.append(((0, each.age), slot))
        return min(choices, key=lambda choice: choice[0])[1] if choices else None

    def make_room(self) -> None:
        """Nothing can be taken: where that is so until the only snapshot is committed, ask for that."""
        newest = self.newest_sealed() if self.is_single else None
        if newest is not None and newest[0].asked != newest[1].generation:
            newest[0].request_persist(newest[1].generation)

    def newest_sealed(self) -> tuple[Slot, Sealed] | None:
        """The newest snapshot that is whole as far as its record says."""
        whole = [(slot, each) for slot, each in self._sealed() if each is not None]
        return max(whole, key=lambda pair: pair[1].age, default=None)

    def _sealed(self) -> list[tuple[Slot, Sealed | None]]:
        """Slots that are sealed or pinned, with None where a sealed one's record is damaged."""
        found: list[tuple[Slot, Sealed | None]] = []
        for slot in self.slots:
            try:
                sealed = slot.sealed()
            except DamagedError:
                if _state(slot) is State.SEALED:
                    found.append((slot, None))
                continue
            if sealed is not None:
                found.append((slot, sealed))
        return found


def _state(slot: Slot) -> State | None:
    """None for a word that is none: the keeper mends it."""
    try:
        return slot.state().state
    except DamagedError:
        return None
