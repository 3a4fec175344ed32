"""What a trainer writes to its slots: metadata, digest table, image header, record; and its sign of life.

A `SlotWriter` owns the views of one slot and what is known to stand in it already; it takes no decision
about leaves, and touches nothing of a slot that it has not begun. `SlotWriters` are those of a rank:
exchanged, made known to the devices, large enough or too small. `HeartbeatWriter` counts the boundaries.
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
from flashckpt.memory.control_page import Record, SlotSize
from flashckpt.memory.slot import Heartbeat, Slot, SlotRing, SlotState

# What is no tensor takes so much at least in a slot's metadata: before the first capture nobody has seen it,
# and slots that are asked for later fit what was asked for then.
_LEAST_VALUES_BYTES = 1 << 16
# Half a second of steps of a tenth of a millisecond: beyond that the oldest are not judged.
_LENGTHS_KEPT = 5000


class SlotWriter:
    """A slot, or a region of constants, with its owner's index."""

    @torch.inference_mode(False)  # the views are written at boundaries that may be out of it
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
        self._places = Geometry(0, 0, 0, 0, 0, 0)
        self._odd_views: dict[int, Tensor] = {}

    def begin(self) -> bool:
        """FREE or SEALED -> WRITING. False if the slot is no longer to be had."""
        generation = self.slot.begin(self.owner)
        if generation is None:
            return False
        self.generation = generation
        crashpoints.point("capture.begun")
        return True

    def abandon(self) -> None:
        self.slot.abandon(self.owner, self.generation)

    def prepare(self, plan: Plan, values: bytes) -> None:
        """Write all of the metadata but the digests; the table is filled with what a seal refuses."""
        sizes = plan.metadata_sizes(len(values))
        places = geometry(*sizes)
        data = self._metadata
        if self._plan_id != plan.plan_id:
            self._plan_id = None
            data[places.plan : places.plan + len(plan.json)] = plan.json
            data[places.constants : places.constants + len(plan.constants_json)] = plan.constants_json
            data[places.replicas : places.replicas + len(plan.replicas_json)] = plan.replicas_json
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
        """The place of one leaf in the image, as a row-major tensor of the leaf's dtype and shape."""
        view = self._odd_views.get(index)
        if view is None:
            assert self.plan is not None
            assert index < self.plan.first_left, "it stands in another image"
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
        moves: Addresses,
        step: int,
        attempt: tuple[int, int],
        boundary: int = 0,
        *,
        held: Addresses,
        confirms: bool = False,
    ) -> None:
        """Hand the slot to the native thread: it seals once every wait is over, what comes late has been
        put in its place (moves: rows of source, destination and bytes) and every digest is there, those of
        constants as they are `held` by their region. `confirms`: see `Slot.submit`."""
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
                plan_bytes=len(plan.json),
                table_count=len(plan.leaves),
                values_bytes=places.num_bytes - places.values,
                metadata_bytes=places.num_bytes,
                image_bytes=plan.image.num_bytes,
                data_start=plan.image.shard.data_start,
                captured_ns=time.monotonic_ns(),
                constants_bytes=plan.constants_bytes,
                constants_nonce=plan.region.nonce if plan.region is not None else 0,
                boundary=boundary,
            )
        )
        crashpoints.point("seal.submitting")
        count, late = len(plan.leaves), moves.reshape(-1).data
        self.slot.submit(
            sealer, self.owner, self.generation, places, count,
            waits=waits, moves=late, held=held.data, confirms=confirms,
        )  # fmt: skip
        crashpoints.point("seal.submitted")

    def state(self, generation: int) -> SlotState:
        """Of one snapshot: WRITING while the seal is to come, UNCONFIRMED until it is confirmed, FREE if it
        was refused or discarded, SEALED otherwise, even where the slot has been written again since."""
        try:
            word = self.slot.state()
        except DamagedError:
            return SlotState.FREE
        if word.generation != generation:
            return SlotState.SEALED
        return SlotState.SEALED if word.state is SlotState.PINNED else word.state

    def empty_entries(self) -> list[int]:
        """Leaves without a digest: those that a check found to be written while they were copied."""
        return [int(i) for i in np.flatnonzero(self.table == np.uint64(_native.EMPTY_DIGEST))]

    def forget(self) -> None:
        """Believe nothing of what stands in the slot."""
        self._plan_id = None

    def release(self) -> None:
        """Let go of every view, so that the slot can be unmapped."""
        self.table = np.empty(0, dtype=np.uint64)
        self._odd_views.clear()
        self._image = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._metadata.release()
        self.plan = None


class SlotWriters:
    """`by_name` are the slots of `ring`, ready to be filled; `room_wanted` is what those of the next capture
    have to have room for, where these are too small."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.by_name: dict[str, SlotWriter] = {}
        self.ring: SlotRing | None = None
        self.room_wanted: SlotSize | None = None
        self._devices = devices
        self._values_bytes = 0

    def exchange(self, ring: SlotRing, owner: int | Mapping[str, int]) -> None:
        """Write to other slots from now on. `owner`: this process's index in them, by name if they differ."""
        self.release()
        self.ring, self.room_wanted = ring, None
        for slot in ring.slots:
            self.by_name[slot.name] = SlotWriter(slot, owner if isinstance(owner, int) else owner[slot.name])
        self.register(ring.slots)

    def register(self, slots: Sequence[Slot]) -> None:
        """Make slots known to the devices, until they are unmapped; once a slot."""
        for slot in slots:
            for device in self._devices:
                device.register(slot.mapping)

    def release(self) -> None:
        for writer in self.by_name.values():
            writer.release()
        self.by_name.clear()

    def drop(self, slot: Slot) -> None:
        """Write to this one no more. Nothing may be under way to it."""
        self.by_name.pop(slot.name).release()
        self.ring = self.ring.without(slot) if self.ring is not None else None

    def begin(self, plan: Plan, values_bytes: int) -> SlotWriter | str:
        """The slot to write next, begun; or why there is none that this plan can be written to."""
        assert self.ring is not None
        self._values_bytes, needed = values_bytes, plan.room(values_bytes)
        slot = self.ring.take()
        fits = slot is not None and slot.size.holds(needed)
        if not fits or self.room_wanted is not None:
            # The state may have become smaller, too: there may be no memory for what it was.
            has_room = all(each.size.holds(needed) for each in self.ring.slots)
            self.room_wanted = None if has_room else needed
        if slot is None:
            self.ring.make_room()
            return "every slot is in use"
        if not fits:
            return "the state has outgrown the slots"
        writer = self.by_name[slot.name]
        return writer if writer.begin() else "the slot was taken by the keeper"

    def room_for(self, plan: Plan) -> SlotSize:
        """What slots for this plan have to have room for."""
        needed, known = plan.room(max(self._values_bytes, _LEAST_VALUES_BYTES)), self.room_wanted
        return needed if known is None else SlotSize(max(needed[0], known[0]), max(needed[1], known[1]))


class HeartbeatWriter:
    """The trainer's sign of life on its slots' control pages, for the keeper's watchdog: a few words a
    boundary. `patience_s` is how long a boundary may be missing before it is a hang, 0 for ever; any thread
    sets it, and the next boundary takes it up. `lengths` are (step, seconds) of the steps since another
    thread last took them out, to judge them. All else is the training thread's."""

    def __init__(self, writers: Mapping[str, SlotWriter]) -> None:
        self._writers = writers
        self.boundaries = 0
        self.patience_s = 0.0
        self.lengths: deque[tuple[int, float]] = deque(maxlen=_LENGTHS_KEPT)
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
        """From now on a boundary is due: the loop has begun, or goes on."""
        if not self._expecting:
            self._expecting, self._begun_ns = True, time.monotonic_ns()
            self._beat()

    def rest(self) -> None:
        """No boundary is due until `expect`: the loop has ended, or waits for storage because it was
        told to."""
        if self._expecting:
            self._expecting = False
            self._beat()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """What is done here may wait for storage as long as it likes: it is no hang of the loop."""
        expecting = self._expecting
        self.rest()
        try:
            yield
        finally:
            if expecting:
                self.expect()

    def _beat(self) -> None:
        patience_ns = int(self.patience_s * 1e9) if self._expecting else 0
        for each in self._writers.values():
            each.slot.beat(Heartbeat(self.boundaries, self._begun_ns, each.owner, patience_ns))
