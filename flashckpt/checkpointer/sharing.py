"""The region that the slots of one trainer share for their constants: asked for, filled, handed over.

Filled beside the loop, out of a slot that is sealed: what is copied is digested on the way, so that nothing
needs to be held still. It is never written again: other constants get another region.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterator

from flashckpt import _native, crashpoints
from flashckpt.capture.shared import Shared
from flashckpt.checkpointer.session import Session
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.events import log
from flashckpt.format.layout import Layout, Leaf
from flashckpt.format.metadata import Metadata, geometry, plan_bytes, write
from flashckpt.memory.control_page import Record, SlotSize
from flashckpt.memory.shared import holds_constants_of
from flashckpt.memory.slot import Sealed, Slot, SlotState

_RETRY_S = 60.0
# Until the next look for a snapshot that has the constants: one may be a long time coming.
_LOOK_S = 0.25
_VALUES = b"{}"

Newest = Callable[[], "tuple[Slot, Sealed] | None"]


class Sharing:
    """`newest` gives the newest sealed snapshot in the slots that the trainer writes, `is_named` whether what
    is in them may name the region of a nonce. `used` is the region that captures name already: that of the
    snapshot which the run was resumed from. `reading` is held while slots are looked into."""

    def __init__(
        self,
        session: Session,
        newest: Newest,
        is_named: Callable[[int], bool],
        used: Shared | None,
        reading: contextlib.AbstractContextManager[object],
    ) -> None:
        self._session, self._newest, self._is_named = session, newest, is_named
        self._reading = reading
        self._wanted: Layout | None = None
        self._ready: Shared | None = None
        self._used = used
        self._outgrown: list[Shared] = []
        self._region: Slot | None = None
        self._owner = 0
        self._asked: tuple[int, int] | None = None
        self._judged: tuple[str, int, Layout] | None = None
        self._retry_s = 0.0

    # ---- called by the training thread

    def want(self, layout: Layout | None, *, used: bool) -> bool:
        """The constants that each slot holds itself at present, None where there are none or none need be.
        used: whether captures to come may name the region that was last taken up. Returns whether this is
        news for the attendant."""
        before, self._wanted = self._wanted, layout
        if not used and self._used is not None:
            self._outgrown.append(self._used)
            self._used = None
        return layout is not None and before is None

    @property
    def ready(self) -> bool:
        return self._ready is not None

    def take_ready(self) -> Shared | None:
        """A region that is sealed, for the capture to name from now on. Call `taken_up` once it does, and no
        snapshot is under way that names the one before."""
        return self._ready

    def taken_up(self) -> None:
        if self._used is not None:
            self._outgrown.append(self._used)
        self._used, self._ready, self._wanted = self._ready, None, None

    # ---- called by the attendant's thread

    @property
    def is_due(self) -> bool:
        """Whether `tend` may have something to do."""
        is_left = self._wanted is None and (self._region is not None or self._asked is not None)
        return bool(self._outgrown) or is_left or self.urgent

    @property
    def urgent(self) -> bool:
        return self._wanted is not None and self._ready is None and time.monotonic() >= self._retry_s

    # ---- called by one thread at a time

    def tend(self) -> None:
        """Give back what is not named any more, and get on with the region that is wanted. A failure is no
        fault of the run's: each slot goes on holding its constants itself."""
        # Until then: what is in a memfd dies with its keeper where this process lets go of it.
        with self._reading:
            gone = [each for each in self._outgrown if not self._is_named(each.nonce)]
        for each in gone:
            self._session.keeper.release([each.name])
            self._outgrown.remove(each)
        layout = self._wanted
        try:
            if layout is None:
                self._unwanted()
            elif self.urgent and self._can_be_filled(layout) and self._granted(layout):
                with self._reading:
                    self._ready = self._filled(layout)
                self._retry_s = time.monotonic() + _LOOK_S
        except (FlashckptError, OSError) as error:
            self._asked, self._retry_s = None, time.monotonic() + _RETRY_S
            log.info("each slot goes on holding its own copy of what never changes: %s", error)

    def close(self) -> None:
        self._let_go()

    def _can_be_filled(self, layout: Layout) -> bool:
        """Whether a region is had or asked for, or the newest snapshot has what is to stand in it: one that
        waits to be filled takes memory, and slots that hold everything may need that."""
        if self._region is not None or self._asked is not None:
            return True
        self._retry_s = time.monotonic() + _LOOK_S
        with self._reading:
            found = self._newest()
            if found is None:
                return False
            try:
                metadata = found[0].metadata(found[1])
            except DamagedError:
                return False
        is_known = not metadata.shared or found[1].record.constants_nonce in self._names()
        held = {_content(leaf) for leaf in (metadata.leaves if is_known else metadata.layout.leaves)}
        if any(_content(leaf) not in held for leaf in layout.leaves):
            return False
        self._retry_s = 0.0
        return True

    def _granted(self, layout: Layout) -> bool:
        """Whether there is a region that is large enough, mapped."""
        plan = plan_bytes(layout)
        metadata_bytes = geometry(len(plan), len(layout.leaves), len(_VALUES)).num_bytes
        if self._region is not None and not _has_room(self._region, metadata_bytes, layout.num_bytes):
            self._give_back()
        if self._region is None:
            # What was asked for before is had first: the keeper makes it, and knows no other who wants it.
            self._asked = self._asked or (metadata_bytes, layout.num_bytes)
            self._ask(*self._asked)
        return self._region is not None and _has_room(self._region, metadata_bytes, layout.num_bytes)

    def _ask(self, metadata_bytes: int, image_bytes: int) -> None:
        grant = self._session.keeper.constants(SlotSize(metadata_bytes, image_bytes))
        self._asked = None
        self._region, self._owner = grant.open(), grant.owner

    def _unwanted(self) -> None:
        """A region that was asked for, and that nothing is to be left to any more."""
        if self._region is None and self._asked is not None:
            self._ask(*self._asked)
        if self._region is not None:
            self._give_back()

    def _filled(self, layout: Layout) -> Shared | None:
        """The region, sealed with the constants of the newest snapshot; None where it has others, or was
        overwritten meanwhile: the next one may do."""
        region, found = self._region, self._newest()
        if region is None or found is None:
            return None
        slot, sealed = found
        judged = slot.name, sealed.generation, layout
        if judged == self._judged:
            return None
        self._judged = judged
        try:
            metadata = slot.metadata(sealed)
        except DamagedError:
            return None
        with contextlib.ExitStack() as stack:
            before = stack.enter_context(self._before(metadata, sealed))
            sources = _sources(slot, metadata, before, layout)
            if sources is not None:
                return self._filled_from(sources, region, layout, sealed)
        self._give_back()  # until there is a snapshot that has them
        return None

    def _names(self) -> dict[int, str]:
        """Regions that snapshots of this trainer may name, by nonce: also what no capture may name any more.
        With a constant of it changed, it still has the others."""
        return {each.nonce: each.name for each in (*self._outgrown, self._used) if each is not None}

    @contextlib.contextmanager
    def _before(self, metadata: Metadata, sealed: Sealed) -> Iterator[Slot | None]:
        """The region that a snapshot names already, for as long as it is read."""
        name = self._names().get(sealed.record.constants_nonce)
        if not metadata.shared or name is None:
            yield None
            return
        with contextlib.closing(self._session.keeper.keep_constants(name).open()) as region:
            yield region if holds_constants_of(region, metadata) else None

    def _filled_from(
        self, sources: list[tuple[int, int]], region: Slot, layout: Layout, sealed: Sealed
    ) -> Shared | None:
        """`sources` are the address and the digest of each leaf."""
        generation = region.begin(self._owner)
        if generation is None:
            self._give_back()  # not ours any more: another one is asked for
            return None
        if not _copied(sources, region, layout):
            region.abandon(self._owner, generation)
            return None
        crashpoints.point("share.filled")
        digests = array("Q", [digest for _, digest in sources])
        why = self._sealed(region, generation, layout, digests, sealed)
        if why:
            region.abandon(self._owner, generation)
            log.warning("%s cannot be used: %s", region.name, why)
            return None
        crashpoints.point("share.sealed")
        shared = Shared(region.name, region.header.nonce, layout, tuple(digests))
        self._let_go()  # captures only compare digests: nothing here touches its bytes again
        return shared

    def _sealed(
        self, region: Slot, generation: int, layout: Layout, digests: array[int], source: Sealed
    ) -> str:
        plan = plan_bytes(layout)
        places = geometry(len(plan), len(digests), len(_VALUES))
        write(region.metadata_view, plan, digests, _VALUES)
        attempt = self._session.attempt
        region.write_record(
            Record(
                attempt_number=attempt.number,
                attempt_nonce=int(attempt.nonce, 16),
                step=source.step,
                generation=generation,
                plan_id=_native.xxh3_64(plan),
                plan_bytes=len(plan),
                table_count=len(digests),
                values_bytes=len(_VALUES),
                metadata_bytes=places.num_bytes,
                image_bytes=layout.num_bytes,
                data_start=layout.data_start,
                captured_ns=time.monotonic_ns(),
            )
        )
        return region.seal(self._owner, generation, places, len(digests))

    def _give_back(self) -> None:
        if self._region is not None:
            self._session.keeper.release([self._region.name])
        self._let_go()

    def _let_go(self) -> None:
        region, self._region = self._region, None
        if region is not None:
            region.close()


def _has_room(region: Slot, metadata_bytes: int, image_bytes: int) -> bool:
    is_free = region.state().state is SlotState.FREE
    return is_free and region.size.metadata_bytes >= metadata_bytes and region.size.image_bytes >= image_bytes


def _sources(
    slot: Slot, metadata: Metadata, before: Slot | None, layout: Layout
) -> list[tuple[int, int]] | None:
    """Address and digest of each leaf of a layout, in a snapshot and in the region that it names; None where
    these do not hold them all."""
    own = len(metadata.layout.leaves) if metadata.shared else len(metadata.leaves)
    found = {}
    rows = zip(metadata.leaves, metadata.image.starts(), metadata.digests, strict=True)
    for index, (leaf, start, digest) in enumerate(rows):
        holder = slot if index < own else before
        if holder is not None:
            found[_content(leaf)] = holder.image_address + start, digest
    wanted = [_content(leaf) for leaf in layout.leaves]
    return [found[leaf] for leaf in wanted] if all(leaf in found for leaf in wanted) else None


def _content(leaf: Leaf) -> tuple[str, str, tuple[int, ...]]:
    """What makes the bytes of a leaf in an image: not its further names, nor how the live tensor lies."""
    return leaf.name, leaf.dtype, leaf.shape


def _copied(sources: list[tuple[int, int]], region: Slot, layout: Layout) -> bool:
    """Copy leaves to their places in a region. False where the bytes are not those of the digests: the slot
    was written meanwhile, or is damaged."""
    region.populate()
    digests = array("Q", bytes(8 * len(sources)))
    starts = [layout.data_start + leaf.offset for leaf in layout.leaves]
    _native.copy_digest(
        array("Q", [address for address, _ in sources]),
        array("Q", [region.image_address + start for start in starts]),
        array("Q", [leaf.num_bytes for leaf in layout.leaves]),
        _native.address_of(digests),
        1,
    )
    region.image_view[: layout.data_start] = layout.header
    return digests.tolist() == [digest for _, digest in sources]
