"""The slots of one trainer: asked for, made ready beside the loop, exchanged at a boundary, given back.

A request for memory stands in one of three ways: asked, given, refused. A thread waits for its one answer and
makes ready what was given; the training thread takes it at a boundary, since slots must never change under a
copy. The attendant's thread only begins what is due (`tend`): it takes no memory and unmaps none.
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
from flashckpt.errors import DamagedError, FlashckptError, KeeperError, OutOfRoomError
from flashckpt.keeper.client import SlotGrant
from flashckpt.keeper.protocol import Refusal, close_all
from flashckpt.memory.control_page import SlotSize
from flashckpt.memory.slot import Sealed, Slot, SlotRing
from flashckpt.options import Options

log = logging.getLogger(__name__)

_RETRY_S, _SOON_S = 5.0, 0.5
_FEWEST = 2


@dataclass(frozen=True, eq=False)
class Request:
    """What was asked of the keeper, for a state that needs so much: see `KeeperClient.slots`. `adds`: to the
    slots there are, which are not exchanged for these. `region`: a region of constants, with room for that,
    comes first."""

    state: SlotSize
    needed: SlotSize
    wanted: SlotSize
    count: int
    adds: bool = False
    region: SlotSize | None = None


class Slots:
    """`ring` is what the capture writes to, `were_had` whether it ever had slots, `asked` what was asked for
    and is not given yet, `error` why it could not be had the last time. `say(text, key)` warns once a key;
    `news` is called when an answer has come. `empty_region` is one for constants, mapped, with this process's
    index in it, that is to be filled before the first capture."""

    def __init__(
        self,
        session: Session,
        capture: Capture,
        options: Options,
        say: Callable[[str, str], None],
        news: Callable[[], None],
    ) -> None:
        self._session, self._capture, self._say, self._news = session, capture, say, news
        self._count, self._patience_s = options.slots or 0, max(options.grace_s, 1.0)
        self._fewest = min(self._count or _FEWEST, _FEWEST)
        self.is_single = self._count == 1  # what stands in it is on disk before it is written again
        self.ring: SlotRing | None = None
        # Among ranks, by their `order`: the newest that all have, and those that not all have.
        self.complete, self.void = session.complete, frozenset[tuple[int, int]]()
        self.were_had = False
        self.asked: Request | None = None
        self.error: FlashckptError | None = None
        # Held while a thread of its own reads what stands in slots: none is unmapped meanwhile.
        self._reading = threading.Lock()
        self.empty_region: tuple[Slot, int] | None = None
        # Of constants, not released yet: names by nonce.
        self._regions = {} if capture.region is None else {capture.region.nonce: capture.region.name}
        # Ready to be written (mapped, faulted in, known to the devices), and not adopted yet.
        self._given: tuple[Request, list[Slot]] | None = None
        self._owners: dict[str, int] = {}
        # Held for the moment in which a request, or what was given, changes hands; never while one waits.
        self._handover = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_waiting = False  # a thread, for an answer
        self._retry_s = 0.0
        self._unreachable_since_s: float | None = None
        self._outgrown: list[Slot] = []
        self._carried: Sealed | None = None
        self._ended = False

    # ---- called by the training thread

    @property
    def preparing(self) -> bool:
        """Whether slots were asked for that the capture does not have yet."""
        return self.asked is not None or self.ready

    @property
    def ready(self) -> bool:
        """Whether slots wait to be adopted."""
        return self._given is not None

    def ask(self, state: SlotSize, region: SlotSize | None = None) -> None:
        """Ask for slots for a state that needs this and, before them, for a region of constants. What stands
        is not asked again, unless it was refused for another size, or only adds slots."""
        before = self.asked
        if before is not None and not before.adds and (self.error is None or before.state == state):
            return
        # A state that goes on growing outgrows slots seldom; where memory is short it gets what it needs.
        wanted = state.with_slack()
        wanted = wanted.grown() if self.ring is not None else wanted
        is_larger = before is not None and sum(state) > sum(before.state)
        # What a state that grows in every step had no memory for is not tried again in each of them.
        at_once = self.error is None or not is_larger
        request = Request(state, state.with_slack(2), wanted, self._count, region=region)
        self._put(request, before, at_once=at_once)

    def ask_for_one(self) -> None:
        """One larger slot will do, beside that of the newest snapshot: the others come once that has gone."""
        before = self.asked
        if before is not None:
            state = before.state
            self._put(Request(state, state.with_slack(2), state.with_slack(), 1), before)

    @property
    def is_for_one(self) -> bool:
        """Whether just one slot was asked for."""
        return self.asked is not None and self.asked.count == 1

    def ask_again(self) -> None:
        """Somebody waits: what there was no memory for a moment ago is asked for at once."""
        before = self.asked
        if before is not None:
            self._put(before, before)

    def _put(self, request: Request, before: Request | None, *, at_once: bool = True) -> None:
        """In the place of `before`, unless that was answered since: what was given is adopted first."""
        with self._handover:
            if self.asked is not before or self.ready:
                return
            self.asked = request
            if at_once:
                self.error, self._retry_s = None, 0.0
        self._news()

    def fits(self) -> None:
        """The state fits the slots there are: larger ones that were asked for are not needed any more."""
        with self._handover:
            if self.ring is not None and self.asked is not None and not self.asked.adds:
                self.asked = self.error = None

    @property
    def completing(self) -> bool:
        """Whether there are fewer slots than snapshots need, and others are on their way."""
        return self.ring is not None and len(self.ring.slots) < self._fewest and self.error is None

    def give_up(self, slot: Slot) -> None:
        """Let this slot go, which no capture writes any more: its memory is needed for a larger one, and the
        newest snapshot stays in another."""
        with self._handover:
            self.ring = self.ring.without(slot) if self.ring is not None else None
            self._outgrown.append(slot)
        crashpoints.point("growth.given-up")

    def adopt(self) -> None:
        """At a boundary: captures write to the slots that are ready, and those before are let go. What is
        newest in them is persisted: nobody could ask for it later."""
        given, old = self._given, self.ring
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
        ring.void = self.void
        if complete is not None:
            ring.set_complete(*complete)  # it has moved on since these were made
        self._capture.set_slots(ring, self._owners)  # waits for the copies into the old ones
        newest = self._own(old.newest_sealed()) if old is not None else None
        if newest is not None:
            if not self.complete[0]:  # else what all ranks have stays where it is
                newest[0].request_persist(newest[1].generation)
            self._carried = newest[1]
        with self._handover:
            self.ring, self._given, self.were_had = ring, None, True
            self._outgrown.extend(old.slots if old is not None else ())
        if old is not None:
            crashpoints.point("growth.taken-up")

    # ---- what stands in them

    @contextlib.contextmanager
    def held(self) -> Iterator[list[Slot]]:
        """All that this trainer has, none of which is unmapped meanwhile. For the attendant's thread."""
        with self._reading:
            yield self._slots()

    @property
    def writable(self) -> int:
        """How many captures are written to."""
        ring = self.ring
        return 0 if ring is None else len(ring.slots)

    def mark(self, complete: tuple[int, int], void: Collection[tuple[int, int]]) -> None:
        """Among ranks, as (number of the attempt, boundary): the newest snapshot that all have, and those
        that not all have, which may be overwritten."""
        self.complete, self.void = complete if complete[1] else self.complete, frozenset(void)
        ring = self.ring
        if ring is not None:
            ring.void = self.void

    def is_among_all(self, sealed: Sealed) -> bool:
        """Whether all ranks have this snapshot, or may have it yet, and no newer one."""
        return bool(self.complete[0]) and sealed.order >= self.complete and sealed.order not in self.void

    def of_boundary(self, boundary: int) -> Sealed | None:
        """This attempt's snapshot of a boundary."""
        for slot in self._slots():
            with contextlib.suppress(DamagedError):
                found = self._own((slot, sealed)) if (sealed := slot.sealed()) is not None else None
                if found is not None and found[1].boundary == boundary:
                    return found[1]
        return None

    def newest_own(self) -> Sealed | None:
        """The newest sealed snapshot of this attempt, also where its slot is let go."""
        newest = self._own(self.ring.newest_sealed()) if self.ring is not None else None
        return self._carried if newest is None else newest[1]

    def is_asked_for(self, sealed: Sealed) -> bool:
        """Whether a snapshot of this attempt is to be persisted, or is; also where its slot is let go."""
        slot = self._slot_of(sealed)
        return slot is None or slot.asked == sealed.generation

    def free(self, sealed: Sealed) -> bool:
        """Let go of a snapshot that nobody is to go on from any more. False where it is on disk, or on its
        way there: a keeper that takes a trainer for dead or stuck asks nobody."""
        slot = self._slot_of(sealed)
        return slot is None or (slot.free(sealed.word) and slot.persisted != sealed.generation)

    def is_persisted(self, sealed: Sealed) -> bool:
        """Whether this very snapshot is committed, and not another one of its step."""
        slot = self._slot_of(sealed)
        return slot is None or slot.persisted == sealed.generation

    def _slot_of(self, sealed: Sealed) -> Slot | None:
        for slot in self.ring.slots if self.ring is not None else ():
            with contextlib.suppress(DamagedError):
                found = slot.sealed()
                if found is not None and found.age == sealed.age:
                    return slot
        return None

    def _own(self, newest: tuple[Slot, Sealed] | None) -> tuple[Slot, Sealed] | None:
        """None for what an earlier attempt left."""
        if newest is None or newest[1].record.attempt_number != self._session.attempt.number:
            return None
        return newest

    def newest_sealed(self) -> tuple[Slot, Sealed] | None:
        """What stands in the slots, of whatever attempt."""
        return self.ring.newest_sealed() if self.ring is not None else None

    def request_persist(self) -> None:
        """Ask for the newest sealed snapshot to be persisted."""
        newest = self.newest_sealed()
        if newest is not None:
            newest[0].request_persist(newest[1].generation)

    def request_persist_of(self, sealed: Sealed) -> None:
        """The same of one, unless its slot was let go: then it was asked for."""
        slot = self._slot_of(sealed)
        if slot is not None:
            slot.request_persist(sealed.generation)

    # ---- called by the attendant's thread

    def tend(self) -> None:
        """Begin what is due: let go of what was outgrown, ask for what is wanted, each in a thread of its
        own."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        with self._handover:  # until nothing in them is needed: what is in a memfd would die with its keeper
            gone = [slot for slot in self._outgrown if not self.is_needed(slot)]
            self._outgrown = [slot for slot in self._outgrown if slot not in gone]
        if gone:
            self._start("flashckpt-let-go", lambda: self._let_go(gone))
        self._release_regions()
        self._ask_for_the_others()
        request = self.asked
        is_due = request is not None and time.monotonic() >= self._retry_s
        if request is not None and is_due and not (self._is_waiting or self._ended):
            self._is_waiting = True
            self._start("flashckpt-memory", lambda: self._wait_for(request))

    def _start(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _release_regions(self) -> None:
        """Regions of constants that no capture names any more, once no slot does."""
        if self.preparing:
            return
        empty = self.empty_region  # first: it is the capture's before it is none any more
        in_use = {self._capture.region_named, empty[0].header.nonce if empty is not None else None}
        for nonce in [each for each in self._regions if each not in in_use]:
            with self._reading:
                is_named = self._is_named(nonce)
            if not is_named and self._release([self._regions[nonce]]):
                del self._regions[nonce]

    def _is_named(self, nonce: int) -> bool:
        """Whether what stands in slots that are not let go yet, or is written to them, may name a region."""
        for slot in self._slots():
            try:
                is_begun, sealed = slot.state().state.is_begun, slot.sealed()
            except DamagedError:
                continue
            if is_begun or sealed is not None and sealed.record.constants_nonce == nonce:
                return True
        return False

    def _ask_for_the_others(self) -> None:
        """Where memory allowed only one larger slot beside those that were outgrown: once these have gone,
        and the newest snapshot is in it."""
        ring = self.ring
        if ring is None or len(ring.slots) >= self._fewest or self._outgrown or self.preparing:
            return
        if self._own(ring.newest_sealed()) is not None:
            size = ring.slots[0].size
            with self._handover:
                if self.ring is ring and not self.preparing:
                    self.asked = Request(size, size, size, self._count, adds=True)

    # ---- the thread that waits for the answer

    def _wait_for(self, request: Request) -> None:
        try:
            self._receive(request)
        except Exception as error:  # a fault of ours must not leave the run without slots, and silent
            log.debug("while memory was asked for", exc_info=True)
            self._refused(request, KeeperError(f"Slots could not be had: {error!r}. No snapshot is taken."))
        finally:
            self._is_waiting = False
            self._news()

    def _receive(self, request: Request) -> None:
        keeper = self._session.keeper
        try:
            if request.region is not None:
                self._have_region(request.region)
            have = [slot.name for slot in self._slots()]
            node = self._capture.numa_node
            grants = keeper.slots(request.count, request.needed, request.wanted, have, node)
        except (OutOfRoomError, Refusal) as error:
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
            # Whatever job had them before.
            SlotRing(slots).begin(self.complete, self._session.attempt.number)
        except Exception as error:
            self._release(names)
            words = f"Slots could not be made usable: {error!r}. No snapshot is taken."
            self._refused(request, KeeperError(words))
            return
        with self._handover:
            is_wanted, is_first = self.asked is request and not self._ended, self.ring is None
            if is_wanted:
                self.asked = self.error = None
                # None are missing: the slots that there are do, or those that are on their way out, and then
                # it is asked again.
                self._given = (request, slots) if slots else None
                self._owners = {**self._owners, **{grant.name: grant.owner for grant in grants}}
        if not is_wanted:  # something else was asked meanwhile, or nothing is needed any more
            self._drop(slots)
        elif slots:
            self._say_what_came(request, grants, is_first)

    def _have_region(self, size: SlotSize) -> None:
        """A region of constants, ready to be filled: one is had before the first slots."""
        before = self.empty_region
        if before is not None and before[0].size.holds(size):
            return
        grant = self._session.keeper.constants(size, self._capture.numa_node)
        [region] = made_usable([grant], self._capture)
        self._regions[region.header.nonce] = region.name
        if before is not None:
            before[0].close()
        self.empty_region = region, grant.owner

    def _refused(self, request: Request, error: FlashckptError) -> None:
        with self._handover:
            if self.asked is not request:
                return
            if request.adds and len(self.ring.slots if self.ring else ()) >= _FEWEST:
                self.asked = None  # those there are do
                return
            self.error, self._retry_s = error, time.monotonic() + _RETRY_S
        # Where there are slots, a boundary that waits for larger ones says that there is no room for them.
        if self.ring is None or not isinstance(error, OutOfRoomError):
            self._say(str(error), type(error).__name__)

    def _unreachable(self, request: Request, error: Exception) -> None:
        """The keeper does not answer. One that dies is replaced; but a run that has had no slot yet must not
        train on for hours while nobody comes."""
        now = time.monotonic()
        self._unreachable_since_s = self._unreachable_since_s or now
        self._retry_s = now + _SOON_S
        if self.ring is None and now - self._unreachable_since_s > self._patience_s:
            if not isinstance(error, FlashckptError):
                error = KeeperError(f"No slot can be had: {error}")
            self._refused(request, error)

    def _say_what_came(self, request: Request, grants: Sequence[SlotGrant], is_first: bool) -> None:
        """The bytes of the first slots, and what a user should know of slots that are fewer, or live shorter,
        than they should."""
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
                "trainer or keeper, not of both; then the run goes on from disk"
            )
        for text in texts:
            self._say(text, text)

    def _slots(self) -> list[Slot]:
        """All that this trainer has not released."""
        with self._handover:
            slots = [*(self.ring.slots if self.ring is not None else ()), *self._outgrown]
            slots += self._given[1] if self._given is not None else ()
        return list({slot.name: slot for slot in slots}.values())

    # ---- letting go

    def _let_go(self, slots: Sequence[Slot]) -> None:
        self._drop(slots)
        if not self._outgrown:
            crashpoints.point("growth.done")
        self._news()

    def _drop(self, slots: Sequence[Slot]) -> None:
        """Nobody here writes these, or will. What the keeper cannot be told of is told it later."""
        if not self._release([slot.name for slot in slots]) and not self._ended:
            with self._handover:
                self._outgrown.extend(slots)
            return
        with self._reading:
            for slot in slots:
                slot.close()

    def _release(self, names: Sequence[str]) -> bool:
        """Their memory is the machine's again, once nothing in them is needed."""
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
        return slot.wants_persist(sealed.generation) and slot.failed[0] != sealed.generation

    # ---- the end

    def end(self) -> None:
        """Nobody waits for an answer any more; slots that are granted from now on go back at once."""
        self._ended = True
        self._session.keeper.stop_waiting()

    def drop_ready(self, until_s: float) -> None:
        """Nobody will write these, and the keeper may linger with them. Waits until then for what is under
        way."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        with self._handover:
            given, self._given = self._given, None
        self._drop(given[1] if given is not None else ())

    def close(self) -> None:
        """Unmap everything, unless a thread still looks into it: then it stays mapped until the process
        ends."""
        if any(thread.is_alive() for thread in self._threads):
            return
        if self.empty_region is not None:
            self.empty_region[0].close()
        for slot in self._slots():
            slot.close()


def made_usable(grants: Sequence[SlotGrant], capture: Capture) -> list[Slot]:
    """The granted slots, ready to be written. Whatever is raised, nothing of them stays open.

    Faulted in and registered here, beside the loop: a first touch by a capture would cost it twenty times
    a copy.
    """
    slots: list[Slot] = []
    left = [grant.descriptor for grant in grants]
    try:
        for grant in grants:
            left.pop(0)  # from here on that of `open`, whatever becomes of it
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
