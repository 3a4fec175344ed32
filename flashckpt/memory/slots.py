"""Which slot is written next. Owns the order in which a rank's slots are used; changes no word."""

from __future__ import annotations

from collections.abc import Sequence

from flashckpt.errors import DamagedError
from flashckpt.memory.page import State
from flashckpt.memory.slot import Sealed, Slot


class SlotRing:
    """The slots of one rank. The newest sealed snapshot is never given away, nor one that is still to be
    persisted and whose try has not failed."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)

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
            elif each.word.state is State.SEALED and each.age != newest:
                waits = slot.wants_persist(each.generation)
                if not waits or slot.failed[0] == each.generation:
                    choices.append(((1 if waits else 0, each.age), slot))
        return min(choices, key=lambda choice: choice[0])[1] if choices else None

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
