"""The slots of one trainer: asked for, made ready beside the loop, exchanged at a boundary, given back.

Two threads meet here. The training thread takes what is ready at a boundary, since slots must never change
under a copy; the attendant's thread does everything that asks the keeper or takes memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from flashckpt.capture import Capture
from flashckpt.capture.room import least_room
from flashckpt.capture.shared import Shared
from flashckpt.checkpointer.provision import made_usable, what_they_mean
from flashckpt.checkpointer.session import Session
from flashckpt.checkpointer.sharing import Sharing
from flashckpt.errors import DamagedError, FlashckptError, KeeperError, OutOfRoomError
from flashckpt.events import log
from flashckpt.format.metadata import Metadata
from flashckpt.keeper.protocol import close_all
from flashckpt.memory.page import State
from flashckpt.memory.slot import Sealed, Slot
from flashckpt.memory.slots import SlotRing
from flashckpt.options import Options

_RETRY_S = 5.0
# No room for smaller slots beside those there are: not tried again with each page that they differ by.
_SMALLER_RETRY_S = 300.0
_SLOTS = 3

Ready = tuple[SlotRing, dict[str, int]]


class SlotSupply:
    """`ring` is what the capture writes to, `wanted` the (metadata, image) bytes of slots that were asked for
    and are not ready, `error` why slots could not be had the last time. `say(text, key)` warns once a key.
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
        self.wanted: tuple[int, int] | None = None
        self.error: FlashckptError | None = None
        self.sharing = Sharing(session, self._newest_sealed, self._name, shared)
        self._most: int | None = None
        self._too_small: tuple[int, int, int] | None = None
        self._smaller_s = 0.0
        # Held for the moment in which ready slots change hands, never while anything is asked.
        self._handover = threading.Lock()
        self._ready: Ready | None = None
        self._is_ready_smaller = False
        self._replaced: SlotRing | None = None
        self._outgrown: list[SlotRing] = []
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
        return self.wanted is not None and (self._most is not None or is_refused)

    @property
    def ready(self) -> bool:
        """Whether slots wait to be taken."""
        return self._ready is not None

    def ask(self, metadata_bytes: int, image_bytes: int) -> None:
        """Ask for slots of at least these capacities, in bytes: the next `tend` gets them."""
        self.wanted, self._most, self._retry_s = (metadata_bytes, image_bytes), None, 0.0

    def ask_smaller(self, metadata_bytes: int, image_bytes: int, most_image_bytes: int) -> bool:
        """Ask for slots in the place of larger ones, whose memory is the machine's then; once a size: returns
        whether that was now."""
        sizes = metadata_bytes, image_bytes, most_image_bytes
        if self._too_small == sizes or time.monotonic() < self._smaller_s:
            return False
        self._too_small = sizes
        self.wanted, self._most, self._retry_s = sizes[:2], most_image_bytes, 0.0
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
                self._outgrown.append(self._ready[0])
                self._ready = None
            self._is_ready_smaller, self._too_small = False, None

    def fits(self) -> None:
        """The state fits the slots there are: larger ones that were asked for are not needed any more."""
        if self.ring is not None and self._most is None:
            self.wanted = None

    def take_ready(self) -> Ready | None:
        """Slots that are ready, with this process's owner index in each, for the capture to write to from
        now on. The training thread calls this at a boundary, and `taken_up` once it writes to the old ones no
        more."""
        with self._handover:
            ready, self._ready = self._ready, None
            self._is_ready_smaller = False
            if ready is not None:
                self._replaced, self.ring = self.ring, ready[0]
        return ready

    def taken_up(self) -> None:
        """The slots before are let go. What is newest in them is persisted: nobody could ask for it later."""
        old, self._replaced = self._replaced, None
        newest = self._own(old.newest_sealed()) if old is not None else None
        if old is not None and newest is not None:
            newest[0].request_persist(newest[1].generation)
            self._carried = newest[1]
        if old is not None:
            self._outgrown.append(old)

    # ---- what stands in them

    def newest_own(self) -> Sealed | None:
        """The newest sealed snapshot of this attempt, also where its slot is let go."""
        newest = self._own(self.ring.newest_sealed()) if self.ring is not None else None
        return self._carried if newest is None else newest[1]

    def _own(self, newest: tuple[Slot, Sealed] | None) -> tuple[Slot, Sealed] | None:
        """None for what an earlier attempt left."""
        if newest is None or newest[1].record.attempt_number != self._session.attempt.number:
            return None
        return newest

    def newest_content(self) -> tuple[Metadata, memoryview] | None:
        """Metadata and image of the newest sealed snapshot; None where there is none that can be read."""
        newest = self._newest_sealed()
        try:
            return (newest[0].metadata(newest[1]), newest[0].image_view) if newest is not None else None
        except DamagedError:
            return None

    def _newest_sealed(self) -> tuple[Slot, Sealed] | None:
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
        newest = self._newest_sealed()
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
        wanted, most = self.wanted, self._most
        if wanted is None or time.monotonic() < self._retry_s:
            return
        try:
            # Smaller ones are never fewer: what they spare is not worth a snapshot that is skipped.
            least = 2 if most is None or self.ring is None else len(self.ring.slots)
            grants = self._session.keeper.ask_slots(
                self.count,
                *wanted,
                minimum=min(least, self.count),
                most_image_bytes=most,
                least_bytes=least_room(*wanted),
            )
        except OutOfRoomError as error:
            if most is None:
                self._failed(error)
                return
            self._smaller_s = time.monotonic() + _SMALLER_RETRY_S
            if self.wanted == wanted:
                self.wanted = self._most = None  # those there are do, and hold what they held
            return
        if grants is None:
            return  # they are being made ready: asked again in the next round
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
        for text in what_they_mean(grants, self.count):
            self._say(text, text)
        owners = {slot.name: grant.owner for slot, grant in zip(slots, grants, strict=True)}
        unused: Ready | None = SlotRing(slots), owners
        with self._handover:
            # Smaller ones that are not wanted any more must not take the place of those there are.
            if most is None or self._most == most:
                unused, self._ready = self._ready, unused
                self._is_ready_smaller = most is not None
                self.wanted = self._most = self.error = None
        self._drop(unused)

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
        self._say(str(error), type(error).__name__)

    def _drop(self, ready: Ready | None) -> None:
        """Slots that were made ready and will not be used."""
        slots = ready[0].slots if ready is not None else ()
        self.give_back([slot.name for slot in slots])
        for slot in slots:
            slot.close()

    def _let_go_of_outgrown(self) -> None:
        while self._outgrown:
            old = self._outgrown[0]
            kept = {slot.name for slot in self.ring.slots} if self.ring is not None else set()
            self._session.keeper.release([slot.name for slot in old.slots if slot.name not in kept])
            for slot in old.slots:
                slot.close()
            self._outgrown.pop(0)

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
        for ring in (self.ring, self._replaced, *self._outgrown):
            for slot in ring.slots if ring is not None else ():
                slot.close()
