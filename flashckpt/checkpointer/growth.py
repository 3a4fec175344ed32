"""A state that outgrows its slots: when a boundary waits for larger ones, and what makes room for them.

Owns the order in which memory changes hands where there is little of it. Called from the training thread
only; asks the keeper nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable

from flashckpt import crashpoints
from flashckpt.capture import Capture
from flashckpt.capture.engine import BoundaryResult, Verdict
from flashckpt.checkpointer.attendant import Attendant
from flashckpt.errors import DamagedError, OutOfRoomError
from flashckpt.events import log
from flashckpt.memory.slot import Slot

# So many boundaries in a row are skipped for want of room before one waits: larger slots are usually there by
# then, and a state that grows in every step would outgrow those, too, if none ever waited.
_SKIPPED = 2


class Growth:
    """`stopped` is whether the loop is asked to end, by a signal or a notice."""

    def __init__(self, capture: Capture, attendant: Attendant, stopped: Callable[[], bool]) -> None:
        self._capture, self._attendant, self._stopped = capture, attendant, stopped
        self._skipped = 0
        self._is_refused = False

    def saw(self, outcome: BoundaryResult) -> None:
        """What became of a boundary in the end."""
        if outcome.captured:
            if self._skipped:
                log.info("step %d fits its slots again, after %d skipped", outcome.step, self._skipped)
            self._skipped, self._is_refused = 0, False
        elif self._is_for_want_of_room(outcome):
            self._skipped += 1
            if self._skipped == 1:
                log.info("step %d is not captured: the state needs larger slots, which come", outcome.step)

    def waits_after(self, outcome: BoundaryResult) -> bool:
        """Whether this boundary, which was due, is to wait for slots and to be tried again."""
        is_due = self._skipped >= _SKIPPED and not self._is_refused and not self._stopped()
        return is_due and self._is_for_want_of_room(outcome)

    def slots_come(self, step: int) -> bool:
        """Wait for the slots that were asked for. False once a stop is asked, or where there is no memory for
        them: then no boundary waits until one was captured again."""
        attendant, slots = self._attendant, self._attendant.slots
        slots.ask_again()
        while not attendant.slots_come(self._stopped):
            if self._stopped():
                return False
            if not isinstance(slots.error, OutOfRoomError) or not self.give_way(self._stopped):
                self._refuse(step)
                return False
        return True

    def give_way(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Where larger slots do not fit beside those there are: persist the newest snapshot, then let another
        slot go, so that one can be made. False where only the newest is left, or once `stopped`."""
        slots = self._attendant.slots
        if slots.ring is None:
            return False
        self._capture.wait()  # the newest may be on its way
        newest = slots.newest_sealed()
        others = [slot for slot in slots.ring.slots if newest is None or slot is not newest[0]]
        if others or slots.is_single:
            self._attendant.persist_newest(stopped)
            crashpoints.point("growth.persisted")
        if slots.is_single and newest is not None and newest[0].persisted == newest[1].generation:
            others = [newest[0]]  # it is on disk, and nobody asked for more
        if stopped() or (not others and slots.is_for_one):
            return False
        if others:
            self._capture.let_go(oldest := min(others, key=_age))
            slots.give_up(oldest)
        slots.ask_for_one()
        return True

    def _refuse(self, step: int) -> None:
        self._is_refused = True
        newest = self._attendant.newest_sealed_step()
        held = "no step" if newest is None else f"step {newest}"
        log.warning(
            "step %d is not captured, and training goes on without waiting: %s The newest snapshot in memory "
            "is of %s. Slots are asked for again every few seconds.",
            step,
            self._attendant.slots.error or "the slots that the state has outgrown cannot be replaced yet.",
            held,
        )

    def _is_for_want_of_room(self, outcome: BoundaryResult) -> bool:
        slots = self._attendant.slots
        if outcome.verdict is not Verdict.SKIPPED or (slots.ring is None and not slots.is_for_one):
            return False
        return self._capture.room_wanted() is not None or slots.completing


def _age(slot: Slot) -> tuple[int, int, int]:
    """Empty ones first, then the oldest snapshot."""
    try:
        sealed = slot.sealed()
    except DamagedError:
        sealed = None
    return (-1, 0, 0) if sealed is None else sealed.age
