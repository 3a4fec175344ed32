"""The trainer's writes to its slots: metadata, digest table, image header, record, and heartbeat.

A `SlotWriter` owns the views of one slot and the knowledge of its current metadata. It decides nothing about
leaves and writes to a slot only after `begin`. `SlotWriters` owns those of a rank: their exchange, their
registration with devices, and the check of their size. `HeartbeatWriter` counts boundaries.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from flashckpt import _native, crashpoints
from flashckpt.capture.devices import Device
from flashckpt.capture.plan import Addresses, Plan
from flashckpt.errors import DamagedError
from flashckpt.format.metadata import HEADER, Geometry, geometry, header
from flashckpt.memory.region import Record, SlotSize
from flashckpt.memory.slot import Heartbeat, Slot, SlotRing, SlotState

# The least space for values in a slot's metadata: their size is unknown before the first capture, and a
# later, larger request would need new slots.
_LEAST_VALUES_BYTES = 1 << 16
# Half a second of steps of a tenth of a millisecond: beyond that the oldest are not judged.
_MOST_LENGTHS = 5000


class SlotWriter:
    """The writer of one slot, or of a region of constants. owner: this process's index in its owner table."""

    @torch.inference_mode(False)  # boundaries outside of inference mode write to the views
    def __init__(self, slot: Slot, owner: int) -> None:
        self.slot = slot
        self.owner = owner
        self.image_address = slot.image_address
        self.generation = -1
        self.plan: Plan | None = None
        self.table: Addresses = np.empty(0, dtype=np.uint64)
        self.table_address = 0
        self._plan_id: int | None = None
        self._metadata = slot.metadata_view
        self._image: Tensor = torch.frombuffer(slot.image_view, dtype=torch.uint8)
        self._places = Geometry(0, 0, 0, 0)
        self._odd_views: dict[int, Tensor] = {}

    def begin(self) -> bool:
        """Change the slot from FREE or SEALED to WRITING. Return False if it is not available."""
        generation = self.slot.begin(self.owner)
        if generation is None:
            return False
        self.generation = generation
        crashpoints.point("capture.begun")
        return True

    def abandon(self) -> None:
        self.slot.abandon(self.owner, self.generation)

    def prepare(self, plan: Plan, values: bytes) -> None:
        """Write the metadata, and fill the digest table with the entry that a seal refuses."""
        sizes = plan.metadata_sizes(len(values))
        places = geometry(*sizes)
        data = self._metadata
        if self._plan_id != plan.plan_id:
            self._plan_id = None
            data[places.plan : places.plan + len(plan.json)] = plan.json
            header_bytes = plan.image.shard.header
            self._image.numpy()[: len(header_bytes)] = np.frombuffer(header_bytes, dtype=np.uint8)
            self.table = np.frombuffer(data[places.table : places.values], dtype=np.uint64)
            self.table_address = self.slot.metadata_address + places.table
            self._odd_views.clear()
            self._plan_id = plan.plan_id
        data[: HEADER.size] = header(*sizes)
        self.table.fill(_native.EMPTY_DIGEST)
        for index in plan.outdated:
            assert plan.region is not None
            self.table[index] = plan.region.digests[index - plan.first_constant]
        data[places.values : places.num_bytes] = values
        self.plan, self._places = plan, places

    def image_of(self, index: int) -> Tensor:
        """Return the place of one leaf in the image, as a row-major tensor of the leaf's dtype and shape."""
        view = self._odd_views.get(index)
        if view is None:
            assert self.plan is not None
            assert index < self.plan.first_left, "another image holds it"
            leaf, tensor = self.plan.leaves[index], self.plan.tensors[index]
            start = int(self.plan.offsets[index])
            place = self._image[start : start + leaf.num_bytes]
            with torch.inference_mode(False):
                view = self._odd_views[index] = place.view(tensor.dtype).view(leaf.shape)
        return view

    def seal(
        self,
        sealer: _native.Sealer,
        waits: Sequence[int],
        landed: Addresses,
        step: int,
        attempt: tuple[int, int],
        boundary: int = 0,
        *,
        held: Addresses,
        confirms: bool = False,
    ) -> None:
        """Submit the slot to the sealing thread, which seals it after all waits, if all digests are present.

        waits: the handles of running copies.
        landed: bytes to compare with their digests after the copies, as rows of address, bytes and entry.
        held: the digests of the constants in their region, which must match.
        confirms: see `Slot.submit`.
        """
        assert self.plan is not None
        crashpoints.point("capture.copied")
        plan, places = self.plan, self._places
        self.slot.write_record(
            Record(
                attempt_number=attempt[0],
                attempt_nonce=attempt[1],
                step=step,
                generation=self.generation,
                plan_id=plan.plan_id,
                table_count=len(plan.leaves),
                values_bytes=places.num_bytes - places.values,
                metadata_bytes=places.num_bytes,
                image_bytes=plan.image.num_bytes,
                data_start=plan.image.shard.data_start,
                captured_ns=time.monotonic_ns(),
                constants_bytes=plan.image.constants.num_bytes,
                constants_nonce=plan.region.nonce if plan.region is not None else 0,
                boundary=boundary,
            )
        )
        crashpoints.point("seal.submitting")
        count, flat = len(plan.leaves), landed.reshape(-1).data
        self.slot.submit(
            sealer, self.owner, self.generation, places, count,
            waits=waits, landed=flat, held=held.data, confirms=confirms,
        )  # fmt: skip
        crashpoints.point("seal.submitted")

    def state(self, generation: int) -> SlotState:
        """Return the state of one snapshot: WRITING before the seal, UNCONFIRMED before the confirmation,
        FREE if it was refused or discarded, else SEALED, even if the slot has been overwritten since."""
        try:
            word = self.slot.state()
        except DamagedError:
            return SlotState.FREE
        if word.generation != generation:
            return SlotState.SEALED
        return SlotState.SEALED if word.state is SlotState.PINNED else word.state

    def empty_entries(self) -> list[int]:
        """Return the leaves without a digest, which were written during their copy."""
        return [int(i) for i in np.flatnonzero(self.table == np.uint64(_native.EMPTY_DIGEST))]

    def forget(self) -> None:
        """Write all metadata again next time: the slot's contents are unknown."""
        self._plan_id = None

    def release(self) -> None:
        """Release all views, so that the slot can be unmapped."""
        self.table = np.empty(0, dtype=np.uint64)
        self._odd_views.clear()
        self._image = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._metadata.release()
        self.plan = None


class SlotWriters:
    """The slot writers of a rank. by_name: slot name -> writer, of the slots in `ring`. room_wanted: the size
    that slots of the next capture need, if these are too small."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.by_name: dict[str, SlotWriter] = {}
        self.ring: SlotRing | None = None
        self.memory_wanted: SlotSize | None = None
        self._devices = devices
        self._values_bytes = 0

    def exchange(self, ring: SlotRing, owner: int | Mapping[str, int]) -> None:
        """Write to other slots from now on. owner: this process's index in their owner tables, by slot name
        if they differ."""
        self.release()
        self.ring, self.memory_wanted = ring, None
        for slot in ring.slots:
            self.by_name[slot.name] = SlotWriter(slot, owner if isinstance(owner, int) else owner[slot.name])
        self.register(ring.slots)

    def register(self, slots: Sequence[Slot]) -> None:
        """Register slots with the devices, once for each slot, until they are unmapped."""
        for slot in slots:
            for device in self._devices:
                device.register(slot.mapping)

    def release(self) -> None:
        for writer in self.by_name.values():
            writer.release()
        self.by_name.clear()

    def drop(self, slot: Slot) -> None:
        """Stop writing to this slot. No copy to it may be running."""
        self.by_name.pop(slot.name).release()
        self.ring = self.ring.without(slot) if self.ring is not None else None

    def begin(self, plan: Plan, values_bytes: int) -> SlotWriter | str:
        """Begin the next slot; return its writer, or the reason why no slot can hold this plan now."""
        assert self.ring is not None
        self._values_bytes, needed = values_bytes, plan.slot_size(values_bytes)
        slot = self.ring.take()
        fits = slot is not None and slot.size.holds(needed)
        if not fits or self.memory_wanted is not None:
            # The state may also have become smaller: then the memory wanted before is not needed.
            has_room = all(each.size.holds(needed) for each in self.ring.slots)
            self.memory_wanted = None if has_room else needed
        if slot is None:
            self.ring.request_single()
            return "every slot is in use"
        if not fits:
            return "the state has outgrown the slots"
        writer = self.by_name[slot.name]
        return writer if writer.begin() else "the slot was taken by the keeper"

    def size_for(self, plan: Plan) -> SlotSize:
        """Return the size that slots for this plan need."""
        needed, known = plan.slot_size(max(self._values_bytes, _LEAST_VALUES_BYTES)), self.memory_wanted
        return needed if known is None else SlotSize(max(needed[0], known[0]), max(needed[1], known[1]))


class HeartbeatWriter:
    """The trainer's heartbeat on its slots' control pages, for the keeper's watchdog: a few words for each
    boundary.

    timeout_s: the time without a boundary that counts as a hang; 0 for no limit. Any thread may set it; the
        next boundary publishes it.
    lengths: (step, seconds) of each step since another thread last removed them.

    Only the training thread uses the rest.
    """

    def __init__(self, writers: Mapping[str, SlotWriter]) -> None:
        self._writers = writers
        self.boundaries = 0
        self.timeout_s = 0.0
        self.lengths: deque[tuple[int, float]] = deque(maxlen=_MOST_LENGTHS)
        self._expecting = False
        self._begun_ns = 0

    def boundary(self, step: int) -> None:
        now = time.monotonic_ns()
        if self._expecting and self._begun_ns:
            self.lengths.append((step, (now - self._begun_ns) / 1e9))
        self.boundaries += 1
        self._begun_ns = now
        self._beat()

    def expect(self) -> None:
        """Expect boundaries from now on, because the loop has begun or continues."""
        if not self._expecting:
            self._expecting, self._begun_ns = True, time.monotonic_ns()
            self._beat()

    def rest(self) -> None:
        """Expect no boundary until `expect`, because the loop has ended or waits for storage on request."""
        if self._expecting:
            self._expecting = False
            self._beat()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """A context that may wait for storage for any time without being a hang."""
        expecting = self._expecting
        self.rest()
        try:
            yield
        finally:
            if expecting:
                self.expect()

    def _beat(self) -> None:
        timeout_ns = int(self.timeout_s * 1e9) if self._expecting else 0
        for each in self._writers.values():
            each.slot.beat(Heartbeat(self.boundaries, self._begun_ns, each.owner, timeout_ns))
