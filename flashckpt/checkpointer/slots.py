"""The slots of one trainer: requested, made ready beside the loop, adopted at a boundary, released.

A request for memory is open, granted or refused. A thread waits for its answer and makes the granted slots
ready; the training thread adopts them at a boundary, since slots must not change during a copy. The keeper
link's thread only begins what is due (`tend`): it neither takes nor unmaps memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from flashckpt import crashpoints
from flashckpt.capture import Capture
from flashckpt.checkpointer.session import Session
from flashckpt.errors import DamagedError, FlashckptError, KeeperError, OutOfSpaceError
from flashckpt.keeper.client import SlotGrant
from flashckpt.keeper.protocol import Refusal, close_all
from flashckpt.memory.region import SlotSize
from flashckpt.memory.slot import Sealed, Slot, SlotRing
from flashckpt.options import Options
from flashckpt.threads import start_thread

log = logging.getLogger(__name__)

_RETRY_S, _SOON_S = 5.0, 0.5
_FEWEST = 2


@dataclass(frozen=True, eq=False)
class SlotRequest:
    """A request for slots that a state of this size needs: see `KeeperClient.slots`. adds: they are added to
    the present slots, not exchanged for them. region: the size of a region of constants to create before
    them."""

    state: SlotSize
    needed: SlotSize
    wanted: SlotSize
    count: int
    adds: bool = False
    region: SlotSize | None = None


class Slots:
    """The slots of one trainer.

    ring: the slots that captures write to. were_had: there were slots once. asked: the open request, and
    error: why it was refused the last time. empty_region: a mapped region for constants with this process's
    index in it, to be filled before the first capture. complete, incomplete: among ranks, by their `order`,
    the newest snapshot that all have, and those that not all have. warn(text, key): warns once for each key.
    wake: called for each answer.
    """

    def __init__(
        self,
        session: Session,
        capture: Capture,
        options: Options,
        warn: Callable[[str, str], None],
        wake: Callable[[], None],
    ) -> None:
        self._session, self._capture, self._warn, self._wake = session, capture, warn, wake
        self._count, self._timeout_s = options.slots or 0, max(options.grace_s, 1.0)
        self._fewest = min(self._count or _FEWEST, _FEWEST)
        self.is_single = self._count == 1  # its snapshot is on disk before it is written again
        self.ring: SlotRing | None = None
        self.complete, self.incomplete = session.complete, frozenset[tuple[int, int]]()
        self.were_had = False
        self.asked: SlotRequest | None = None
        self.error: FlashckptError | None = None
        # Held while a thread reads slots: none is unmapped meanwhile.
        self._reading = threading.Lock()
        self.empty_region: tuple[Slot, int] | None = None
        # The regions of constants that are not released yet: nonce -> name.
        self._regions = {} if capture.region is None else {capture.region.nonce: capture.region.name}
        # Ready to be adopted: mapped, faulted in, registered with the devices.
        self._given: tuple[SlotRequest, list[Slot]] | None = None
        self._owners: dict[str, int] = {}
        # Held while a request or granted slots change hands; never during a wait.
        self._handover = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_waiting = False  # a thread waits for an answer
        self._retry_s = 0.0
        self._unreachable_since_s: float | None = None
        self._outgrown: list[Slot] = []
        self._carried: Sealed | None = None
        self._ended = False

    # ---- called by the training thread

    @property
    def preparing(self) -> bool:
        """Whether slots are requested, or ready, that the capture does not have yet."""
        return self.asked is not None or self.ready

    @property
    def ready(self) -> bool:
        """Whether slots are ready to be adopted."""
        return self._given is not None

    def ask(self, state: SlotSize, region: SlotSize | None = None) -> None:
        """Request slots for a state of this size and, before them, a region of constants. An open request
        stays, unless it was refused for another size, or only adds slots."""
        before = self.asked
        if before is not None and not before.adds and (self.error is None or before.state == state):
            return
        # With room to grow, so that a growing state outgrows its slots rarely.
        wanted = state.with_slack()
        wanted = wanted.grown() if self.ring is not None and not self.is_for_one else wanted
        count = 1 if self.is_for_one else self._count
        is_larger = before is not None and sum(state) > sum(before.state)
        # A state that grows in each step must not repeat a refused request in each.
        at_once = self.error is None or not is_larger
        request = SlotRequest(state, state.with_slack(2), wanted, count, region=region)
        self._put(request, before, at_once=at_once)

    def ask_for_one(self) -> None:
        """Request only one larger slot, beside that of the newest snapshot; the others follow once that is
        released."""
        before = self.asked
        if before is not None:
            state = before.state
            self._put(SlotRequest(state, state.with_slack(2), state.with_slack(), 1), before)

    @property
    def is_for_one(self) -> bool:
        """Whether only one slot is requested."""
        return self.asked is not None and self.asked.count == 1

    def ask_again(self) -> None:
        """Repeat a refused request at once, because the training thread waits."""
        before = self.asked
        if before is not None:
            self._put(before, before)

    def _put(self, request: SlotRequest, before: SlotRequest | None, *, at_once: bool = True) -> None:
        """Replace the request `before`, unless it was answered meanwhile: granted slots are adopted first."""
        with self._handover:
            if self.asked is not before or self.ready:
                return
            self.asked = request
            if at_once:
                self.error, self._retry_s = None, 0.0
        self._wake()

    def fits(self) -> None:
        """Drop the request for larger slots, because the state fits the present ones."""
        with self._handover:
            if self.ring is not None and self.asked is not None and not self.asked.adds:
                self.asked = self.error = None

    def give_up(self, slot: Slot) -> None:
        """Release this slot, to which no capture writes any more: a larger one needs its memory, and the
        newest snapshot is in another."""
        with self._handover:
            self.ring = self.ring.without(slot) if self.ring is not None else None
            self._outgrown.append(slot)
        crashpoints.point("growth.given-up")

    def adopt(self) -> None:
        """At a boundary, let captures write to the ready slots, and release the present ones. Their newest
        snapshot is persisted, since nothing could request that later."""
        with self._handover:  # the slots and their owners belong together
            given, owners, old = self._given, self._owners, self.ring
        if given is None:
            return
        request, slots = given
        if self.empty_region is not None:
            self._capture.fill_region(*self.empty_region)
            self.empty_region = None
        complete = max((slot.complete for slot in old.slots), default=None) if old is not None else None
        if old is not None and request.adds:
            slots, old = [*old.slots, *slots], None
        ring = SlotRing(slots, is_single=self.is_single)
        ring.incomplete = self.incomplete
        if complete is not None:
            ring.set_complete(*complete)  # newer than when these were made
        self._capture.set_slots(ring, owners)  # waits for the copies into the old ones
        newest = self._own(old.newest_sealed()) if old is not None else None
        if newest is not None:
            if not self.complete[0]:  # otherwise the snapshot that all ranks have stays in its slot
                newest[0].request_persist(newest[1].generation)
            self._carried = newest[1]
        with self._handover:
            self.ring, self._given, self.were_had = ring, None, True
            self._outgrown.extend(old.slots if old is not None else ())
        if old is not None:
            crashpoints.point("growth.taken-up")

    # ---- the snapshots in them

    @contextlib.contextmanager
    def held(self) -> Iterator[list[Slot]]:
        """Yield all slots of this trainer; none is unmapped meanwhile. For the keeper link's thread."""
        with self._reading:
            yield self._slots()

    @property
    def writable(self) -> int:
        """The number of slots that captures write to."""
        ring = self.ring
        return 0 if ring is None else len(ring.slots)

    def mark(self, complete: tuple[int, int], incomplete: Collection[tuple[int, int]]) -> None:
        """Among ranks, note the newest snapshot that all have, and those that not all have, which may be
        overwritten, as (number of the attempt, boundary)."""
        self.complete, self.incomplete = complete if complete[1] else self.complete, frozenset(incomplete)
        ring = self.ring
        if ring is not None:
            ring.incomplete = self.incomplete

    def is_among_all(self, sealed: Sealed) -> bool:
        """Whether all ranks have this snapshot, or still may, and no newer one."""
        return (
            bool(self.complete[0]) and sealed.order >= self.complete and sealed.order not in self.incomplete
        )

    def of_boundary(self, boundary: int) -> Sealed | None:
        """Return this attempt's snapshot of a boundary."""
        for slot in self._slots():
            with contextlib.suppress(DamagedError):
                found = self._own((slot, sealed)) if (sealed := slot.sealed()) is not None else None
                if found is not None and found[1].boundary == boundary:
                    return found[1]
        return None

    def newest_own(self) -> Sealed | None:
        """Return the newest sealed snapshot of this attempt, even if its slot is being released."""
        newest = self._own(self.ring.newest_sealed()) if self.ring is not None else None
        return self._carried if newest is None else newest[1]

    def is_persisted(self, sealed: Sealed) -> bool:
        """Whether this snapshot is committed, as far as its slot records: one in the cache may have been
        overwritten in memory before. Another snapshot with its step number does not count."""
        slot = self._slot_of(sealed)
        return slot is None or slot.persisted == sealed.generation

    def is_cached(self, sealed: Sealed) -> bool:
        """Whether this snapshot was requested and is whole in this node's cache."""
        slot = self._slot_of(sealed)
        return slot is not None and slot.asked == slot.cached == sealed.generation

    def _slot_of(self, sealed: Sealed) -> Slot | None:
        for slot in self.ring.slots if self.ring is not None else ():
            with contextlib.suppress(DamagedError):
                found = slot.sealed()
                if found is not None and found.age == sealed.age:
                    return slot
        return None

    def _own(self, newest: tuple[Slot, Sealed] | None) -> tuple[Slot, Sealed] | None:
        """Return None for a snapshot of an earlier attempt."""
        if newest is None or newest[1].record.attempt_number != self._session.attempt.number:
            return None
        return newest

    def newest_sealed(self) -> tuple[Slot, Sealed] | None:
        """Return the newest snapshot in the slots, of any attempt."""
        return self.ring.newest_sealed() if self.ring is not None else None

    def is_at_rest(self) -> bool:
        """Request that the newest snapshot in the slots is persisted. Return whether it is, or is in the
        cache, or whether that has failed."""
        newest = self.newest_sealed()
        if newest is None:
            return True
        slot, generation = newest[0], newest[1].generation
        if slot.persisted != generation:
            slot.request_persist(generation)
        return generation in (slot.persisted, slot.cached, slot.failed, slot.torn[0])

    def request_persist(self) -> None:
        """Request that the newest sealed snapshot is persisted."""
        newest = self.newest_sealed()
        if newest is not None:
            newest[0].request_persist(newest[1].generation)

    def request_persist_of(self, sealed: Sealed) -> None:
        """Request that this snapshot is persisted. One whose slot was released was requested then."""
        slot = self._slot_of(sealed)
        if slot is not None:
            slot.request_persist(sealed.generation)

    # ---- called by the keeper link's thread

    def tend(self) -> None:
        """Begin what is due, each in its own thread: release outgrown slots, request slots."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        with self._handover:  # needed ones stay: a memfd would die with its keeper
            gone = [slot for slot in self._outgrown if not self.is_needed(slot)]
            self._outgrown = [slot for slot in self._outgrown if slot not in gone]
        if gone:
            self._start("flashckpt-let-go", lambda: self._let_go(gone))
        self._release_regions()
        self._ask_for_the_others()
        request = self.asked
        # What is released now may be the room for it: `_let_go` wakes the next round.
        is_due = not gone and time.monotonic() >= self._retry_s
        if request is not None and is_due and not (self._is_waiting or self._ended):
            self._is_waiting = True
            self._start("flashckpt-memory", lambda: self._wait_for(request))

    def _start(self, name: str, run: Callable[[], None]) -> None:
        self._threads.append(start_thread(name, run))

    def _release_regions(self) -> None:
        """Release the regions of constants to which neither captures nor slots refer any more."""
        if self.preparing:
            return
        empty = self.empty_region  # read first: the capture has it before it is reset
        in_use = {self._capture.region_named, empty[0].header.nonce if empty is not None else None}
        for nonce in [each for each in self._regions if each not in in_use]:
            with self._reading:
                is_named = self._is_named(nonce)
            if not is_named and self._release([self._regions[nonce]]):
                del self._regions[nonce]

    def _is_named(self, nonce: int) -> bool:
        """Whether a snapshot in the slots, or one that is being written, may refer to a region."""
        for slot in self._slots():
            try:
                is_begun, sealed = slot.state().state.is_begun, slot.sealed()
            except DamagedError:
                continue
            if is_begun or sealed is not None and sealed.record.constants_nonce == nonce:
                return True
        return False

    def _ask_for_the_others(self) -> None:
        """Request the other slots, if memory allowed only one larger slot beside the outgrown ones, once
        these are released and the newest snapshot is in the larger one."""
        ring = self.ring
        if ring is None or len(ring.slots) >= self._fewest or self._outgrown or self.preparing:
            return
        if self._own(ring.newest_sealed()) is not None:
            size = ring.slots[0].size
            with self._handover:
                if self.ring is ring and not self.preparing:
                    self.asked = SlotRequest(size, size, size, self._count, adds=True)

    # ---- the thread that waits for the answer

    def _wait_for(self, request: SlotRequest) -> None:
        try:
            self._receive(request)
        except Exception as error:  # a bug must not leave the run without slots silently
            log.debug("while memory was requested", exc_info=True)
            self._refused(request, KeeperError(f"Slots could not be had: {error!r}. No snapshot is taken."))
        finally:
            self._is_waiting = False
            self._wake()

    def _receive(self, request: SlotRequest) -> None:
        keeper = self._session.keeper
        try:
            if request.region is not None:
                self._have_region(request.region)
            have = [slot.name for slot in self._slots()]
            node = self._capture.numa_node
            grants = keeper.slots(request.count, request.needed, request.wanted, have, node)
        except (OutOfSpaceError, Refusal) as error:
            self._refused(request, KeeperError(str(error)) if isinstance(error, Refusal) else error)
            return
        except (FlashckptError, OSError) as error:
            self._unreachable(request, error)
            return
        self._unreachable_since_s = None
        names = [grant.name for grant in grants]
        if self._ended:
            close_all([grant.descriptor for grant in grants])
            self._release(names)
            return
        try:
            slots = made_usable(grants, self._capture)
            # Another job may have had them before.
            SlotRing(slots).begin(self.complete, self._session.attempt.number)
        except Exception as error:
            self._release(names)
            text = f"Slots could not be made usable: {error!r}. No snapshot is taken."
            self._refused(request, KeeperError(text))
            return
        with self._handover:
            is_wanted, is_first = self.asked is request and not self._ended, self.ring is None
            if is_wanted:
                self.asked = self.error = None
                # No slots: the present ones are enough, or others are being released and it is asked again.
                self._given = (request, slots) if slots else None
                self._owners = {**self._owners, **{grant.name: grant.owner for grant in grants}}
        if not is_wanted:  # the request was replaced or dropped meanwhile
            self._drop(slots)
        elif slots:
            self._log_granted(request, grants, is_first)

    def _have_region(self, size: SlotSize) -> None:
        """Create a region of constants, ready to be filled, before the first slots."""
        before = self.empty_region
        if before is not None and before[0].size.holds(size):
            return
        grant = self._session.keeper.constants(size, self._capture.numa_node)
        [region] = made_usable([grant], self._capture)
        self._regions[region.header.nonce] = region.name
        if before is not None:
            before[0].close()
        self.empty_region = region, grant.owner

    def _refused(self, request: SlotRequest, error: FlashckptError) -> None:
        with self._handover:
            if self.asked is not request:
                return
            if request.adds and len(self.ring.slots if self.ring else ()) >= _FEWEST:
                self.asked = None  # the present ones are enough
                return
            self.error, self._retry_s = error, time.monotonic() + _RETRY_S
        # A boundary that finds no room for larger ones warns.
        if not (self.were_had and isinstance(error, OutOfSpaceError)):
            self._warn(str(error), type(error).__name__)

    def _unreachable(self, request: SlotRequest, error: Exception) -> None:
        """Note that the keeper does not answer. A dead one is replaced; but a run that has had no slot yet
        must not train for hours without any."""
        now = time.monotonic()
        self._unreachable_since_s = self._unreachable_since_s or now
        self._retry_s = now + _SOON_S
        if self.ring is None and now - self._unreachable_since_s > self._timeout_s:
            if not isinstance(error, FlashckptError):
                error = KeeperError(f"No slot can be had: {error}")
            self._refused(request, error)

    def _log_granted(self, request: SlotRequest, grants: Sequence[SlotGrant], is_first: bool) -> None:
        """Log the size of the first slots; warn if they are fewer, or live shorter, than they should."""
        if is_first:
            region = self._capture.region
            constants = region.layout.num_bytes if region is not None else 0
            constants = request.region.region_bytes if request.region is not None else constants
            log.info(
                "%d slots for a state of %s bytes, and %s that never change, take %s bytes of host memory; "
                "%s more were available. With fewer (Options(slots=2)) boundaries are skipped while a "
                "snapshot is persisted; with one a kill in a capture falls back to the disk.",
                len(grants), f"{sum(request.state):,}", f"{constants:,}",
                f"{sum(grant.num_bytes for grant in grants) + constants:,}",
                f"{self._session.keeper.available_bytes:,}",
            )  # fmt: skip
        texts = []
        if len(grants) < self._count == request.count and not request.adds:
            texts.append(
                f"memory allows {len(grants)} slots where {self._count} are wanted: while one is being "
                "persisted, snapshots may be skipped"
            )
        if not all(grant.outlives_both for grant in grants):
            texts.append(
                "shared memory that outlives every process is too small here: slots survive the death of "
                "trainer or keeper, not of both; then the run resumes from disk"
            )
        for text in texts:
            self._warn(text, text)

    def _slots(self) -> list[Slot]:
        """Return all slots that this trainer has not released."""
        with self._handover:
            slots = [*(self.ring.slots if self.ring is not None else ()), *self._outgrown]
            slots += self._given[1] if self._given is not None else ()
        return list({slot.name: slot for slot in slots}.values())

    # ---- releasing

    def _let_go(self, slots: Sequence[Slot]) -> None:
        self._drop(slots)
        if not self._outgrown:
            crashpoints.point("growth.done")
        self._wake()

    def _drop(self, slots: Sequence[Slot]) -> None:
        """Release slots to which nothing is written any more; if the keeper does not answer, later."""
        if not self._release([slot.name for slot in slots]) and not self._ended:
            with self._handover:
                self._outgrown.extend(slots)
            return
        with self._reading:
            for slot in slots:
                slot.close()

    def _release(self, names: Sequence[str]) -> bool:
        """Give the memory back to the keeper, which frees it once nothing in it is needed."""
        try:
            if names:
                self._session.keeper.release(names)
        except (FlashckptError, OSError) as error:
            log.debug("slots could not be released: %s", error)
            return False
        return True

    def is_needed(self, slot: Slot) -> bool:
        """Whether an outgrown slot holds the newest snapshot, or one that is still to be persisted."""
        try:
            sealed = slot.sealed()
        except DamagedError:
            return False
        if sealed is None:
            return False
        if self.is_among_all(sealed):
            return True
        newest = self._own(self.ring.newest_sealed()) if self.ring is not None else None
        if not self.complete[0] and (newest is None or newest[1].age <= sealed.age):
            return self._own((slot, sealed)) is not None
        is_elsewhere = sealed.generation in (slot.failed, slot.cached)
        return slot.wants_persist(sealed.generation) and not is_elsewhere

    # ---- the end

    def end(self) -> None:
        """Stop waiting for answers; slots that are granted from now on are released at once."""
        self._ended = True
        self._session.keeper.stop_waiting()

    def drop_ready(self, until_s: float) -> None:
        """Release the slots that are ready, since the keeper may linger with them. Waits until this monotonic
        time for running threads."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        with self._handover:
            given, self._given = self._given, None
        self._drop(given[1] if given is not None else ())

    def close(self) -> None:
        """Unmap everything, unless a thread may still read it: then it stays mapped until the process
        ends."""
        if any(thread.is_alive() for thread in self._threads):
            return
        if self.empty_region is not None:
            self.empty_region[0].close()
        for slot in self._slots():
            slot.close()


def made_usable(grants: Sequence[SlotGrant], capture: Capture) -> list[Slot]:
    """Make granted slots ready to be written: fault them in and register them here, beside the loop, since a
    first touch by a capture costs twenty times a copy. If this raises, none stays open."""
    slots: list[Slot] = []
    left = [grant.descriptor for grant in grants]
    try:
        for grant in grants:
            left.pop(0)  # `open` owns the descriptor from here on
            slots.append(grant.open())
        for slot in slots:
            slot.populate()
        capture.register(slots)
    except BaseException:
        for slot in slots:
            slot.close()
        close_all(left)
        raise
    return slots
