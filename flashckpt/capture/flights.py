"""Snapshots that were begun and are not sealed yet, and what became of them.

Owns the list of flights and what is learned when one ends: torn leaves, changed constants, lost snapshots.
Never waits but where `wait` is called, at the end of runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashckpt import _native
from flashckpt.capture.arrangement import Arrangement
from flashckpt.capture.constants import Constants
from flashckpt.capture.target import Target
from flashckpt.capture.ways import Way, Ways
from flashckpt.events import log
from flashckpt.memory.slot import SlotState

_WAIT_SLICE_S = 60.0


@dataclass(slots=True, eq=False)
class Flight:
    """One snapshot on its way. The arrangement holds its tensors, and is let go when it has landed.
    `ordered`: it answers an order for the next boundary."""

    step: int
    target: Target
    generation: int
    persist: bool
    arrangement: Arrangement | None
    ordered: bool = False


@dataclass(slots=True)
class _Landed:
    """What is kept of a sealed snapshot, to name the leaves that the keeper finds torn: no tensor of it."""

    flight: Flight
    target: Target
    names: list[str]
    ways: list[Way]


class Flights:
    """on_lost is called for a snapshot that will never be; on_changed when ways must be chosen again."""

    def __init__(
        self,
        ways: Ways,
        constants: Constants,
        sealer: _native.Sealer,
        on_lost: Callable[[Flight], None],
        on_changed: Callable[[], None],
    ) -> None:
        self._ways, self._constants, self._sealer = ways, constants, sealer
        self._on_lost, self._on_changed = on_lost, on_changed
        self._flying: list[Flight] = []
        self._landed: dict[str, _Landed] = {}
        self._failures: dict[int, tuple[str, bool]] = {}
        self.sealed = 0
        self.lost = 0
        self.newest_step: int | None = None

    def add(self, flight: Flight) -> None:
        self._flying.append(flight)

    def running(self) -> bool:
        """Whether copies of a device are still on their way."""
        return any(flight.arrangement.transfers for flight in self._flying if flight.arrangement)

    def poll(self) -> None:
        """Look, without waiting, at what was sealed or refused, and at what the keeper found torn."""
        for flight in list(self._flying):
            state = flight.target.state(flight.generation)
            if state is SlotState.WRITING:
                continue
            self._flying.remove(flight)
            arrangement, flight.arrangement = flight.arrangement, None
            assert arrangement is not None
            arrangement.landed()
            if state is SlotState.SEALED:
                self._land(flight, arrangement)
            else:
                self._refused(flight, arrangement)
        for landed in list(self._landed.values()):
            self._listen(landed)

    def wait(self) -> None:
        """Until nothing is on its way: the only place where the host waits for copies. What the keeper has
        found torn meanwhile is known afterwards."""
        self.poll()
        while self._flying:
            drained = self._sealer.drain(_WAIT_SLICE_S)
            if not drained:
                log.warning("The copies of step %d have been running for a minute.", self._flying[0].step)
            self.poll()
            for flight in list(self._flying) if drained else ():
                # The sealer has nothing left, and this one is not decided: nobody will ever decide it.
                flight.target.slot.abandon(flight.target.owner, flight.generation)
                self.poll()

    def forget(self) -> None:
        """The slots are others from here on."""
        self._flying.clear()
        self._landed.clear()

    def drop(self, target: Target) -> None:
        """Nothing is under way to this slot, and nothing is to be heard of it any more."""
        self._landed.pop(target.slot.name, None)

    def _land(self, flight: Flight, arrangement: Arrangement) -> None:
        target = flight.target
        self.sealed += 1
        self.newest_step = flight.step
        if target.generation != flight.generation:
            return  # written again already: there is nothing left to look at
        landed = _Landed(flight, target, arrangement.names, arrangement.ways)
        if self._changed(flight, arrangement):
            # The region holds other bytes of them: the digests would have it discarded, later.
            word = target.slot.state()
            if word.generation == flight.generation:
                target.slot.free(word)
            target.forget()
            self.sealed -= 1
            self._lose(flight)
            return
        self._landed[target.slot.name] = landed

    def _refused(self, flight: Flight, arrangement: Arrangement) -> None:
        """Not sealed, or sealed and discarded by the keeper's audit before this was asked."""
        target = flight.target
        reason, copied = self.failure_of(target)
        generation, found = target.slot.torn
        torn = list(found) if generation == flight.generation else []
        if reason:
            # Without its copies the table is empty: no leaf is to blame.
            torn = target.empty_entries() if copied else []
        if reason and not torn:
            log.error("The snapshot of step %d was not sealed: %s.", flight.step, reason)
        target.forget()
        names = arrangement.names
        changed = self._changed(flight, arrangement)
        leaves = [leaf for leaf in torn if leaf < len(names) and leaf not in changed]
        self._tear(_Landed(flight, target, names, arrangement.ways), leaves)
        self._lose(flight)

    def failure_of(self, target: Target) -> tuple[str, bool]:
        """Why a slot was not sealed, and whether its copies had ended all the same."""
        self._failures.update({word: (why, copied) for word, why, copied in self._sealer.failures()})
        return self._failures.pop(target.slot.word_address, ("", True))

    def _changed(self, flight: Flight, arrangement: Arrangement) -> set[int]:
        """Constants that were written since the capture before, which is no fault of how they are copied."""
        target = flight.target
        if target.generation != flight.generation:
            return set()
        changed = {*arrangement.changed_constants(target.table)} - {*target.empty_entries()}
        for index in changed:
            self._constants.changed(arrangement.names[index])
        if changed:
            self._on_changed()
        return changed

    def _listen(self, landed: _Landed) -> None:
        """Leaves that the keeper's audit found to differ from their digests."""
        target, flight = landed.target, landed.flight
        if target.generation != flight.generation:
            return
        generation, leaves = target.slot.torn
        if generation != flight.generation:
            return
        del self._landed[target.slot.name]
        target.forget()
        self._tear(landed, [leaf for leaf in leaves if leaf < len(landed.names)])
        self._lose(flight)

    def _tear(self, landed: _Landed, leaves: list[int]) -> None:
        # A list, so that every one of them is told.
        if any([self._ways.tear(landed.names[leaf], landed.ways[leaf]) for leaf in leaves]):
            self._on_changed()

    def _lose(self, flight: Flight) -> None:
        self.lost += 1
        self._on_lost(flight)
