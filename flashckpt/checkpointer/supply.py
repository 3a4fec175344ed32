"""The slots of one trainer: asked for, made ready beside the loop, exchanged at a boundary, given back.

Two threads meet here. The training thread takes what is ready at a boundary, since slots must never change
under a copy; the attendant's thread does everything that asks the keeper or takes memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from flashckpt.capture import Capture
from flashckpt.capture.room import grown_room, least_room
from flashckpt.capture.shared import Shared
from flashckpt.checkpointer.provision import made_usable, what_they_mean
from flashckpt.checkpointer.session import Session
from flashckpt.checkpointer.sharing import Sharing
from flashckpt.errors import DamagedError, FlashckptError, KeeperError, OutOfRoomError
from flashckpt.events import log
from flashckpt.format.metadata import Metadata
from flashckpt.keeper.grants import SlotGrant
from flashckpt.keeper.protocol import Refusal, close_all
from flashckpt.memory.page import State
from flashckpt.memory.slot import Sealed, Slot
from flashckpt.memory.slots import SlotRing
from flashckpt.options import Options

_RETRY_S = 5.0
# No room for smaller slots beside those there are: not tried again with each page that they differ by.
_SMALLER_RETRY_S = 300.0
_SLOTS = 3
_LEAST_SLOTS = 2

Ready = tuple[SlotRing, dict[str, int]]


class SlotSupply:
    """`ring` is what the capture writes to, `were_had` whether it ever had slots, `wanted` the (metadata,
    image) bytes of slots that were asked for and are not ready, `error` why slots could not be had the last
    time. `say(text, key)` warns once a key.
    `least` is the number of slots to go on with: one, where the newest snapshot has another to itself.
    `shared` is the region of constants that captures name from the beginning, `sharing` what gets others."""

    def __init__(
        self,
        session: Session,
        capture: Capture,
        options: Options,
        say: Callable[[str, str], None],
        shared: Shared | None = None,
    ) -> None:
        self._session, self._capture, self._say = session, capture, say
        self.count = options.slots or _SLOTS
        self.ring: SlotRing | None = None
        self.were_had = False
        self.wanted: tuple[int, int] | None = None
        self.error: FlashckptError | None = None
        self.sharing = Sharing(session, self.newest_sealed, self._name, shared)
        self._most: int | None = None
        self._too_small: tuple[int, int, int] | None = None
        self._smaller_s = 0.0
        # Whether slots that were outgrown are asked for with room to grow: as long as there is memory for it.
        self._is_ample = False
        self.least = _LEAST_SLOTS
        # The (metadata, image) bytes of the slots there are, while more of them are wanted beside them.
        self._more: tuple[int, int] | None = None
        self._more_wanted: tuple[int, int] | None = None
        self._patience_s = max(options.grace_s, 1.0)
        self._unreachable_since_s: float | None = None
        # Counts what was asked for and given up: a refusal of what was asked before says nothing any more.
        self._turn = 0
        # Held for the moment in which ready slots change hands, never while anything is asked.
        self._handover = threading.Lock()
        self._ready: Ready | None = None
        self._is_ready_smaller = False
        self._replaced: SlotRing | None = None
        self._outgrown: list[Slot] = []
        self._carried: Sealed | None = None
        self._retry_s = 0.0
        self._ended = False

    # ---- called by the training thread

    @property
    def any(self) -> bool:
        """Whether there are slots, or will be at the next boundary."""
        return self.ring is not None or self._ready is not None

    @property
    def preparing(self) -> bool:
        """Whether slots were asked for that the capture does not have yet."""
        return self.wanted is not None or self._ready is not None

    def may_be_replaced(self, wanted: tuple[int, int]) -> bool:
        """Whether slots of these sizes are to be asked for though others have been and are not ready: smaller
        ones than there are, or ones for which there is no memory."""
        is_refused = self.error is not None and self.wanted not in (None, wanted)
        is_other = self._most is not None or self._more is not None
        return self.wanted is not None and (is_other or is_refused)

    def ask_now(self) -> None:
        """Somebody waits: what there was no memory for a moment ago is asked for at once."""
        self._turn += 1
        self.error, self._retry_s = None, 0.0

    @property
    def ready(self) -> bool:
        """Whether slots wait to be taken."""
        return self._ready is not None

    def ask(self, metadata_bytes: int, image_bytes: int) -> None:
        """Ask for slots of at least these capacities, in bytes: the next `tend` gets them."""
        sizes = metadata_bytes, image_bytes
        if self.wanted != sizes:
            self._is_ample = self.ring is not None
        # What a state that grows in every step had no memory for is not tried again in each of them.
        is_larger = self.wanted is not None and sum(sizes) > sum(self.wanted)
        if self.error is None or not is_larger:
            self._retry_s = 0.0
        self.wanted, self._most, self._more = sizes, None, None
        self._turn += 1

    def ask_smaller(self, metadata_bytes: int, image_bytes: int, most_image_bytes: int) -> bool:
        """Ask for slots in the place of larger ones, whose memory is the machine's then; once a size: returns
        whether that was now."""
        sizes = metadata_bytes, image_bytes, most_image_bytes
        if self._too_small == sizes or time.monotonic() < self._smaller_s:
            return False
        self._too_small = sizes
        self.wanted, self._most, self._more = sizes[:2], most_image_bytes, None
        self._retry_s = 0.0
        return True

    @property
    def shrinking(self) -> bool:
        """Whether smaller slots than there are were asked for and are not taken yet."""
        return self._most is not None or self._is_ready_smaller

    def keep_larger(self) -> None:
        """Smaller slots that were asked for, or are ready, are not wanted any more: the state needs those
        there are."""
        with self._handover:
            if self._most is not None:
                self.wanted = self._most = None
            if self._ready is not None and self._is_ready_smaller:
                self._outgrown.extend(self._ready[0].slots)
                self._ready = None
            self._is_ready_smaller, self._too_small = False, None

    def fits(self) -> None:
        """The state fits the slots there are: larger ones that were asked for are not needed any more."""
        if self.ring is None or self._most is not None or self._more is not None:
            return
        self.wanted, self.least = None, _LEAST_SLOTS
        if len(self.ring.slots) < _LEAST_SLOTS and self._more_wanted is None:
            slot = self.ring.slots[0]
            self._more_wanted = slot.metadata_capacity, slot.image_capacity

    @property
    def completing(self) -> bool:
        """Whether there are fewer slots than snapshots need, and others are on their way."""
        is_short = self.ring is not None and len(self.ring.slots) < _LEAST_SLOTS
        return is_short and self.error is None

    def give_up(self, slot: Slot) -> None:
        """Let this slot go, which no capture writes any more: its memory is needed for larger ones, and the
        newest snapshot stays in another. Those that were asked for are asked for again at once."""
        left = [each for each in self.ring.slots if each is not slot] if self.ring is not None else []
        self.ring = SlotRing(left) if left else None
        self._outgrown.append(slot)
        self.go_on_with_one()

    def go_on_with_one(self) -> None:
        """One slot will do, beside that of the newest snapshot: the others come once that has gone."""
        self._turn += 1
        self.least, self.error, self._retry_s = 1, None, 0.0

    def take_ready(self) -> Ready | None:
        """Slots that are ready, with this process's owner index in each, for the capture to write to from
        now on. The training thread calls this at a boundary, and `taken_up` once it writes to the old ones no
        more."""
        with self._handover:
            ready, self._ready = self._ready, None
            self._is_ready_smaller = False
            if ready is not None:
                self._replaced, self.ring, self.were_had = self.ring, ready[0], True
        return ready

    def taken_up(self) -> None:
        """The slots before are let go. What is newest in them is persisted: nobody could ask for it later."""
        old, self._replaced = self._replaced, None
        newest = self._own(old.newest_sealed()) if old is not None else None
        kept = {slot.name for slot in self.ring.slots} if self.ring is not None else set()
        if old is not None and newest is not None and newest[0].name not in kept:
            newest[0].request_persist(newest[1].generation)
            self._carried = newest[1]
        if old is not None:
            self._outgrown.extend(old.slots)

    # ---- what stands in them

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

    def newest_metadata(self) -> Metadata | None:
        """The metadata of the newest sealed snapshot; None where there is none that can be read."""
        newest = self.newest_sealed()
        try:
            return newest[0].metadata(newest[1]) if newest is not None else None
        except DamagedError:
            return None

    def newest_sealed(self) -> tuple[Slot, Sealed] | None:
        """What stands in the slots, of whatever attempt."""
        return self.ring.newest_sealed() if self.ring is not None else None

    def _name(self, nonce: int) -> bool:
        """Whether what stands in the slots, or is written to them, may name a region."""
        for slot in self.ring.slots if self.ring is not None else ():
            try:
                sealed, is_writing = slot.sealed(), slot.state().state is State.WRITING
            except DamagedError:
                continue
            if is_writing or sealed is not None and sealed.record.constants_nonce == nonce:
                return True
        return False

    def request_persist(self) -> None:
        """Ask for the newest sealed snapshot to be persisted."""
        newest = self.newest_sealed()
        if newest is not None:
            slot, sealed = newest
            slot.request_persist(sealed.generation)

    # ---- called by the attendant's thread

    @property
    def urgent(self) -> bool:
        """Whether slots are wanted and the keeper may be asked again."""
        is_wanted = self.wanted is not None and time.monotonic() >= self._retry_s
        return is_wanted or self.sharing.urgent

    def tend(self) -> None:
        """Give back what was outgrown, and get the slots that are wanted: taken, faulted in and known to the
        devices before they are used."""
        self._let_go_of_outgrown()
        self.sharing.tend()
        self._want_more()
        turn, wanted, most = self._turn, self.wanted, self._most
        if wanted is None or time.monotonic() < self._retry_s:
            return
        try:
            grants = self._asked(wanted, most)
        except (OutOfRoomError, Refusal) as error:
            if turn == self._turn:
                self._refused(error, wanted, most)
            return
        except (FlashckptError, OSError) as error:
            self._unreachable(error)
            raise
        self._unreachable_since_s = None
        if grants is not None:
            self._granted(grants, wanted, most)

    def _asked(self, wanted: tuple[int, int], most: int | None) -> list[SlotGrant] | None:
        """None while they are being made ready: to be asked again in the next round."""
        if self._more is not None and self.ring is not None:
            least = len(self.ring.slots) + 1
        elif most is not None and self.ring is not None:
            # Smaller ones are never fewer: what they spare is not worth a snapshot that is skipped.
            least = len(self.ring.slots)
        else:
            least = self.least
        return self._session.keeper.ask_slots(
            self.count,
            *(grown_room(*wanted) if self._is_ample and most is None else wanted),
            minimum=min(least, self.count),
            most_image_bytes=most,
            least_bytes=least_room(*wanted),
        )

    def _refused(self, error: OutOfRoomError | Refusal, wanted: tuple[int, int], most: int | None) -> None:
        if most is not None:
            self._smaller_s = time.monotonic() + _SMALLER_RETRY_S
            if self.wanted == wanted:
                self.wanted = self._most = None  # those there are do, and hold what they held
        elif self._is_ample:
            self._is_ample = False  # without room to grow, then: asked again in the next round
        elif self._more is not None and self.ring is not None and len(self.ring.slots) >= _LEAST_SLOTS:
            self.wanted = self._more = None  # those there are do
        else:
            self._failed(KeeperError(str(error)) if isinstance(error, Refusal) else error)

    def _unreachable(self, error: Exception) -> None:
        """The keeper does not answer. One that dies is replaced; but a run that has had no slot yet must not
        train on for hours while nobody comes."""
        now = time.monotonic()
        self._unreachable_since_s = self._unreachable_since_s or now
        if self.ring is None and now - self._unreachable_since_s > self._patience_s:
            if not isinstance(error, FlashckptError):
                error = KeeperError(f"No slot can be had: {error}")
            self._failed(error)

    def _granted(self, grants: Sequence[SlotGrant], wanted: tuple[int, int], most: int | None) -> None:
        names = [grant.name for grant in grants]
        if self._ended:
            close_all([grant.descriptor for grant in grants])
            self.give_back(names)
            return
        try:
            slots = made_usable(grants, self._capture)
        except Exception as error:
            self.give_back(names)
            self._failed(KeeperError(f"Slots could not be made usable: {error!r}. No snapshot is taken."))
            return
        for text in what_they_mean(grants, self.count if self.least > 1 else 1):
            self._say(text, text)
        owners = {slot.name: grant.owner for slot, grant in zip(slots, grants, strict=True)}
        unused: Ready | None = SlotRing(slots), owners
        with self._handover:
            # Smaller ones that are not wanted any more must not take the place of those there are.
            if most is None or self._most == most:
                unused, self._ready = self._ready, unused
                self._is_ready_smaller = most is not None
                is_growth = self.ring is not None or self.least < _LEAST_SLOTS
                is_short = is_growth and len(slots) < self.count and (self._more or most) is None
                self._more_wanted = wanted if is_short else None
                self.wanted = self._most = self._more = self.error = None
                self.least = _LEAST_SLOTS
        self._drop(unused)

    def _want_more(self) -> None:
        """Where memory allowed few of the larger slots, beside those that were outgrown, ask for the others
        once these have gone: the newest snapshot is in a larger one by then."""
        ring, sizes = self.ring, self._more_wanted
        if sizes is None or ring is None or self.wanted is not None or self._ready is not None:
            return
        if self._outgrown or self._own(ring.newest_sealed()) is None:
            return
        self.wanted = self._more = sizes
        self._most, self._more_wanted, self._retry_s = None, None, 0.0

    def give_back(self, names: Sequence[str]) -> None:
        """Release granted slots that this trainer does not write: their memory is the machine's again."""
        with self._handover:
            rings = [self.ring, self._ready[0] if self._ready is not None else None]
        kept = {slot.name for ring in rings if ring is not None for slot in ring.slots}
        unused = [name for name in names if name not in kept]
        try:
            if unused:
                self._session.keeper.release(unused)
        except (FlashckptError, OSError) as error:
            log.debug("slots could not be released: %s", error)

    def _failed(self, error: FlashckptError) -> None:
        self.error = error
        self._retry_s = time.monotonic() + _RETRY_S
        # Where there are slots, a boundary that waits for larger ones says that there is no room for them.
        if self.ring is None or not isinstance(error, OutOfRoomError):
            self._say(str(error), type(error).__name__)

    def _drop(self, ready: Ready | None) -> None:
        """Slots that were made ready and will not be used."""
        slots = ready[0].slots if ready is not None else ()
        self.give_back([slot.name for slot in slots])
        for slot in slots:
            slot.close()

    def _let_go_of_outgrown(self) -> None:
        """Each slot once nothing in it is needed: until then it is held here, too. What is in a memfd would
        die with its keeper."""
        # These first: the training thread exchanges the ring before it adds what was in it. By a ring of
        # before the keeper would never be told that they went.
        outgrown = list(self._outgrown)
        kept = {slot.name for slot in self.ring.slots} if self.ring is not None else set()
        gone = [slot for slot in outgrown if slot.name in kept or not self._is_needed(slot)]
        if released := [slot.name for slot in gone if slot.name not in kept]:
            self._session.keeper.release(released)
        for slot in gone:
            self._outgrown.remove(slot)
            slot.close()

    def _is_needed(self, slot: Slot) -> bool:
        """Whether an outgrown slot holds the newest snapshot, or one that is still to be persisted."""
        try:
            sealed = slot.sealed()
        except DamagedError:
            return False
        if sealed is None:
            return False
        newest = self._own(self.ring.newest_sealed()) if self.ring is not None else None
        if newest is None or newest[1].age <= sealed.age:
            return self._own((slot, sealed)) is not None
        return slot.wants_persist(sealed.generation) and slot.failed[0] != sealed.generation

    # ---- the end

    def end(self) -> None:
        """Slots that are granted from now on go back at once."""
        self._ended = True

    def drop_ready(self) -> None:
        """Nobody will write these, and the keeper may linger with them."""
        with self._handover:
            untaken, self._ready = self._ready, None
        self._drop(untaken)

    def close(self) -> None:
        """Unmap everything, once no thread looks into it any more."""
        self.sharing.close()
        for ring in (self.ring, self._replaced):
            for slot in ring.slots if ring is not None else ():
                slot.close()
        for slot in self._outgrown:
            slot.close()
