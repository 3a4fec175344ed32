"""What one device does at a boundary: clones, digests, copies to the host, and the gate.

`DeviceCopies` owns the order of streams on one device: leaves are read after every stream that may write
them, nothing writes them before they were read, and a seal waits for the last copy. How much is enqueued does
not grow with the number of leaves, but for those that have to be made row-major. `Arena` is where leaves are
cloned. Neither chooses a way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.copy_policy import SMALL_BYTES, Way
from flashckpt.capture.devices import Copies, Copying, Device, Table
from flashckpt.capture.plan import Addresses, Plan
from flashckpt.capture.slot_writer import SlotWriter

_EMPTY = _native.EMPTY_DIGEST - (1 << 64)  # as int64
# Where a run begins it is aligned to this as it is in the image: kernels read wide words.
_ALIGNED = 512


class Arena:
    """Places on a device for the leaves `indexes` of a plan, in image order, so that many leave for the host
    in one copy; those that are not row-major are made so here. `holes` are leaves in host memory that may lie
    between them without ending a run: those that do are `bridged`, copied along, and filled on the host
    before the seal. The buffer is taken with `take`, which must come before any use."""

    def __init__(self, plan: Plan, indexes: Sequence[int], holes: Collection[int]) -> None:
        self._plan = plan
        self.indexes = list(indexes)
        self.bridged: list[int] = []
        # What was given room for: small leaves and odd ones are cloned whether there is any or not.
        large = [i for i in indexes if plan.sizes[i] >= SMALL_BYTES and i not in plan.odd]
        self._spare_bytes = int(plan.sizes[large].sum())
        self._offsets: dict[int, int] = {}
        self._runs: list[tuple[int, int, int]] = []
        self.num_bytes = self._place(holes)
        self._odd = [i for i in indexes if i in plan.odd]
        self._buffer: Tensor | None = None
        self._odd_targets: list[Tensor] = []

    # ---- memory

    @property
    def is_large(self) -> bool:
        """Whether it takes room that other ways would not."""
        return self._spare_bytes > 0

    @property
    def is_held(self) -> bool:
        return self._buffer is not None

    def take(self, device: Device) -> None:
        """Raises torch.OutOfMemoryError where the device has no room that the loop can spare."""
        if self.is_large and device.room_bytes() < self._spare_bytes:
            # Not left to the allocator: it would give all that it keeps for the loop back to the device
            # first.
            raise torch.OutOfMemoryError(f"{device.name} has no room for an arena of {self.num_bytes} bytes")
        self._buffer = device.allocate(self.num_bytes)
        self._odd_targets = [self._odd_target(index) for index in self._odd]

    def let_go(self) -> None:
        """The loop may have the memory. Nothing may be on its way from here."""
        self._buffer = None
        self._odd_targets = []

    # ---- what is in it

    @property
    def odd(self) -> list[Tensor]:
        """The places of leaves that are made row-major here, in image order."""
        return self._odd_targets

    def make_row_major(self) -> None:
        """Copy those leaves: one operation each, since torch has none for several of different strides."""
        for target, index in zip(self._odd_targets, self._odd, strict=True):
            target.copy_(self._plan.tensors[index].detach())

    def addresses(self, indexes: Sequence[int]) -> Addresses:
        """Where leaves lie on the device; 0 for those that do not."""
        base = self._base()
        found = [base + self._offsets[i] if i in self._offsets else 0 for i in indexes]
        return np.array(found, dtype=np.uint64)

    def copies(self, image_address: int) -> Copies:
        """To an image: one for each run."""
        runs = np.array(self._runs, dtype=np.uint64).reshape(-1, 3)
        return Copies(runs[:, 0] + np.uint64(self._base()), runs[:, 1] + np.uint64(image_address), runs[:, 2])

    def _base(self) -> int:
        assert self._buffer is not None, "the arena was let go"
        return self._buffer.data_ptr()

    def _place(self, holes: Collection[int]) -> int:
        """Runs are (offset here, offset in the image, bytes)."""
        end = 0
        offsets, sizes = self._plan.offsets.tolist(), self._plan.sizes.tolist()
        before = -1
        for index in self.indexes:
            there, size = offsets[index], sizes[index]
            gap = range(before + 1, index)
            if before >= 0 and self._is_bridged(gap, there - offsets[before] - sizes[before], holes):
                self.bridged += gap
                here, start, length = self._runs.pop()
                self._runs.append((here, start, there + size - start))
                self._offsets[index] = here + there - start
            else:
                here = -(-end // _ALIGNED) * _ALIGNED + there % _ALIGNED
                self._runs.append((here, there, size))
                self._offsets[index] = here
            end = self._offsets[index] + size
            before = index
        return end

    def _is_bridged(self, gap: range, num_bytes: int, holes: Collection[int]) -> bool:
        """Whether just these leaves, few bytes and all of them holes, lie between two others in the image."""
        if num_bytes < 0 or num_bytes > SMALL_BYTES or not all(index in holes for index in gap):
            return False
        return sum(int(self._plan.sizes[index]) for index in gap) == num_bytes

    def _odd_target(self, index: int) -> Tensor:
        assert self._buffer is not None
        tensor, start = self._plan.tensors[index], self._offsets[index]
        place = self._buffer[start : start + int(self._plan.sizes[index])]
        return place.view(tensor.dtype).view(tensor.shape)


class DeviceCopies:
    """The leaves of a plan that live on one device, with the way of each. `holes` are leaves in host memory
    that may lie between cloned ones (`Arena`)."""

    def __init__(
        self,
        device: Device,
        plan: Plan,
        indexes: Sequence[int],
        ways: Sequence[Way],
        synchronised: Sequence[int],
        holes: Collection[int],
    ) -> None:
        self.device, self._plan = device, plan
        self._is_synchronised = bool(synchronised)
        cloned = [i for i in indexes if ways[i] is Way.CLONE or i in plan.odd]
        # Constants are digested where they are: their bytes stand in the plan's region.
        self._direct = [i for i in indexes if i not in set(cloned) and ways[i] is not Way.CONSTANT]
        self._waits = any(ways[i] is Way.WAIT for i in indexes)
        self._gates = any(ways[i] is Way.GATE for i in indexes)
        self.arena = Arena(plan, cloned, holes) if cloned else None
        # The order of the digests: leaves that are read where they lie, then those made row-major.
        self._plain = [i for i in indexes if i not in plan.odd]
        self._order = self._plain + [i for i in indexes if i in plan.odd]
        self._checked = [i for i in cloned if i not in plan.odd]
        self._checked_always = [i for i in synchronised if i not in plan.odd and i not in set(self._checked)]
        self._make_buffers()
        self._make_tables()
        self._read = device.new_mark()
        self._copying: Copying | None = None
        self._gate: Copying | None = None

    def moved(self) -> None:
        """The plan was patched: read its tensors again."""
        self._make_tables()

    def capture(self, target: SlotWriter, *, gated: bool, check: bool) -> int:
        """Enqueue everything. Returns the handle that a seal waits for; the digests come to the table with
        `moves`.

        gated: a hook will close the gate before the next write; else the loop waits for copies that read
        live leaves. check: digest the sources again after the clone, and let the seal refuse a difference.
        Leaves that were torn before are checked in every capture, and the host waits for their copies: a
        stream that nobody named, or a graph's, is held back by no event, but by a host that enqueues
        nothing.
        """
        device = self.device
        self._copying = self._gate = None
        self._host_table.fill(_native.EMPTY_DIGEST)
        if self.arena is not None and not self.arena.is_held:
            self._make_tables()
        if self._is_synchronised:
            device.synchronize()
        device.gather()
        if self.arena is not None and self.arena.odd:
            device.launch(self.arena.make_row_major)
        device.digest(self._table, self._digests)
        if self._clone_check is not None and (check or self._is_synchronised):
            self._digest_again(self._clone_check, self._clone_places)
        device.mark(self._read)
        # Other streams that may write must not do so before the leaves were read.
        device.hold_writers(self._read)
        if self._is_synchronised:
            return self._copy_synchronised(target)
        direct = self._direct_copies(target)
        copying = self._begin([direct, *self._others(target)], len(direct))
        if self._waits or (self._gates and not gated):
            copying.hold_writers()
        elif self._gates:
            self._gate = copying
        return copying.handle

    def gate(self) -> None:
        """Before an optimizer writes: the device's streams, not the host, wait for the open copies."""
        gate, self._gate = self._gate, None
        if gate is not None and not self.device.capturing():
            gate.hold_writers()

    def wait(self) -> None:
        """The host waits until nothing that was begun is written any more, whether it failed or not."""
        if self._copying is not None:
            with contextlib.suppress(RuntimeError):
                self._copying.wait()

    def landed(self) -> None:
        """The copies have ended: the arena goes where headroom is short, and is taken again for the next
        ones. One that is held is no memory that torch could use when it runs out."""
        arena, device = self.arena, self.device
        if arena is None or not arena.is_large or not arena.is_held or device.capturing():
            return
        if device.room_bytes() < arena.num_bytes // 2:
            arena.let_go()

    def moves(self, target: SlotWriter) -> Addresses:
        """What the sealing thread puts in its place, as triples of source, destination and bytes: the
        digests."""
        base = [self._host_table.ctypes.data, target.table_address, 0]
        return self._digest_moves + np.array(base, dtype=np.uint64)

    # ---- with the plan

    # What is made here is written at boundaries that may be in inference mode, and at others.
    @torch.inference_mode(False)
    def _make_buffers(self) -> None:
        device, count = self.device, len(self._order)
        self._digests = device.allocate(8 * count).view(torch.int64)
        self._again = device.allocate(8 * count).view(torch.int64)
        self._host_digests = device.host_memory(8 * count)  # keeps alive what the next one shows
        self._host_table: Addresses = self._host_digests.numpy().view(np.uint64)
        self._digest_moves = _runs(self._order)
        self._clone_places = self._places(self._checked)
        self._direct_places = self._places(self._checked_always)

    @torch.inference_mode(False)
    def _make_tables(self) -> None:
        if self.arena is not None and not self.arena.is_held:
            self.arena.take(self.device)
        leaves = [self._plan.tensors[i].detach() for i in self._plain]
        destinations = np.zeros(len(self._order), dtype=np.uint64)
        if self.arena is not None:
            leaves += self.arena.odd
            destinations[: len(self._plain)] = self.arena.addresses(self._plain)
        self._table = self.device.make_table(leaves, destinations)
        self._clone_check = self._check_table(self._checked)
        self._direct_check = self._check_table(self._checked_always)

    def _check_table(self, indexes: Sequence[int]) -> Table | None:
        leaves = [self._plan.tensors[i].detach() for i in indexes]
        return self.device.make_table(leaves, np.zeros(len(leaves), dtype=np.uint64)) if leaves else None

    def _places(self, indexes: Sequence[int]) -> Tensor:
        places = {index: place for place, index in enumerate(self._order)}
        host = self.device.host_memory(8 * len(indexes)).view(torch.int64)
        host.copy_(torch.tensor([places[i] for i in indexes], dtype=torch.int64, device="cpu"))
        # The host must not wait for the loop's kernels, behind which this goes.
        return host.to(self._digests.device, non_blocking=True)

    # ---- at a boundary

    def _digest_again(self, table: Table, places: Tensor) -> None:
        """An unequal leaf gets the entry that no seal accepts, without the host looking at anything."""
        again = self._again[: len(table)]
        self.device.digest(table, again)

        def compare() -> None:
            found = self._digests[places]
            self._digests.index_copy_(0, places, found.masked_fill_(found != again, _EMPTY))

        self.device.launch(compare)

    def _copy_synchronised(self, target: SlotWriter) -> int:
        """The loop waits for the copies of live leaves, and these are digested after them too: bytes and
        digest may agree, and have been taken in the middle of a write."""
        direct = self._direct_copies(target)
        self._begin([direct], len(direct)).wait()
        if self._direct_check is not None:
            self._digest_direct_again(self._direct_check)
            self.device.mark(self._read)
            self._read.wait()  # or whoever writes next is taken for one who wrote during the copy
        return self._begin(self._others(target), 0).handle

    def _digest_direct_again(self, table: Table) -> None:
        self._digest_again(table, self._direct_places)

    def _begin(self, parts: Sequence[Copies], num_first: int) -> Copying:
        self._copying = self.device.copy_to_host(Copies.joined(parts), num_first, self._read)
        return self._copying

    def _direct_copies(self, target: SlotWriter) -> Copies:
        """Of leaves that are read where they lie."""
        plan, index = self._plan, np.array(self._direct, dtype=np.int64)
        places = plan.offsets[index] + np.uint64(target.image_address)
        return Copies(plan.addresses[index], places, plan.sizes[index])

    def _others(self, target: SlotWriter) -> list[Copies]:
        """Of what stands still: the arena, and the digests."""
        columns = (self._digests.data_ptr(), self._host_table.ctypes.data, self._host_table.nbytes)
        digests = Copies(*(np.array([column], dtype=np.uint64) for column in columns))
        return [self.arena.copies(target.image_address), digests] if self.arena is not None else [digests]


def _runs(order: Sequence[int]) -> Addresses:
    """Moves of a packed table to its entries (`order`) in the slot's: triples of offsets and bytes,
    joined."""
    entries = np.array(order, dtype=np.int64)
    starts = np.flatnonzero(np.diff(entries, prepend=-2) != 1)
    counts = np.diff(starts, append=len(entries))
    return (8 * np.stack([starts, entries[starts], counts], axis=1)).astype(np.uint64)
