"""How the leaves of one plan are copied into a slot: those in host memory, and those of each device.

`PreparedCopies` has all of them; `HostCopies` lets native threads copy at the boundary, and digest them.
`DeviceCopies` owns the order of streams on one device: leaves are read after every stream that may write
them, nothing writes them before they were read, and a seal waits for the last copy. How much it enqueues does
not grow with the number of leaves, but for those that have to be made row-major. `Arena` is where leaves are
cloned. The way of each leaf is chosen elsewhere (`copy_policy`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashckpt import _native, crashpoints
from flashckpt.capture.constants import ConstantsChanged
from flashckpt.capture.copy_policy import SMALL_BYTES, Way
from flashckpt.capture.devices import Copies, Copying, Device, StreamMark, Table
from flashckpt.capture.plan import Addresses, Plan
from flashckpt.capture.slot_writer import SlotWriter

_EMPTY = _native.EMPTY_DIGEST - (1 << 64)  # as int64
# Where a run begins it is aligned to this as it is in the image: kernels read wide words.
_ALIGNED = 512
# In so many captures of a plan the sources are digested again after they were copied; of those in host memory
# a sample in all later ones: a thread may begin to write them at any time.
_CHECKED = 3
_SAMPLED, _SAMPLED_BYTES = 256, 4096


class PreparedCopies:
    """Everything a boundary needs to copy the leaves of one plan, by the `ways` of its leaves. `owners` has
    the device of each, None for host memory; `torn` names those that were found torn before; `devices` are
    all that there are."""

    def __init__(
        self,
        plan: Plan,
        owners: Sequence[Device | None],
        ways: Sequence[Way],
        torn: Collection[str],
        devices: Sequence[Device],
        threads: int,
    ) -> None:
        self.plan, self.ways, self._owners, self._devices = plan, ways, owners, devices
        self.names = [leaf.name for leaf in plan.leaves]
        self._captures = 0
        held = plan.region.digests if plan.region is not None else ()
        self._held: Addresses = np.array(held, dtype=np.uint64)
        unsafe = frozenset(i for i, name in enumerate(self.names) if name in torn)
        host = [i for i, owner in enumerate(owners) if owner is None and i not in plan.outdated]
        self.host = HostCopies(plan, host, ways, unsafe, threads)
        self._feeders: dict[int, tuple[Device, StreamMark]] = {}
        self._find_feeders(host)
        holes = self.host.may_be_staged()
        self.on_devices: list[DeviceCopies] = []
        for device in {id(owner): owner for owner in owners if owner is not None}.values():
            indexes = [i for i, owner in enumerate(owners) if owner is device]
            self.on_devices.append(DeviceCopies(device, plan, indexes, ways, unsafe, holes))
        self.host.stage(i for each in self.on_devices for i in each.arena.bridged)

    @property
    def uses_devices(self) -> bool:
        """Whether a device holds leaves, or writes some that are in host memory."""
        return bool(self.on_devices or self._feeders)

    def moved(self, indexes: Iterable[int]) -> None:
        """The plan was patched: these leaves lie elsewhere now."""
        self.host.moved()
        self._find_feeders([i for i in indexes if self._owners[i] is None])
        for each in self.on_devices:
            each.make_tables()

    def write(
        self,
        target: SlotWriter,
        values: bytes,
        sealer: _native.Sealer,
        step: int,
        attempt: tuple[int, int],
        *,
        boundary: int = 0,
        gated: bool = False,
        persist: bool = False,
        confirms: bool = False,
    ) -> None:
        """Write a slot, or a region of constants, that was begun, and hand it to be sealed. `gated`: a hook
        will close the gates before the next write. `confirms`: see `Slot.submit`. Whatever is raised, nothing
        of it is written any more."""
        try:
            target.prepare(self.plan, values)
            handles = self._capture(target, gated=gated)
            if target.slot.header.holds_constants:
                crashpoints.point("share.filled")
            if persist:
                target.slot.request_persist(target.generation)
            moves = [self.host.moves(target), *(each.moves(target) for each in self.on_devices)]
            target.seal(
                sealer, handles, np.concatenate(moves), step, attempt, boundary,
                held=self._held, confirms=confirms,
            )  # fmt: skip
        except BaseException:
            target.forget()
            try:
                # What was begun still writes to the slot: nobody may have it before that has ended.
                self.wait()
            finally:
                target.abandon()
            raise

    def wait(self) -> None:
        """The host waits until nothing that was begun writes to a slot any more. Raises nothing for copies
        that failed: these have ended too."""
        for each in self.on_devices:
            each.wait()

    def landed(self) -> None:
        """The copies of a snapshot have ended."""
        for each in self.on_devices:
            each.landed()

    def gate(self) -> None:
        """Before an optimizer writes: the devices' streams, not the host, wait for the open copies."""
        for each in self.on_devices:
            each.gate()

    def changed_constants(self, table: Addresses) -> list[int]:
        """Those whose digests in a slot's table are not those that the region was sealed with."""
        first = self.plan.first_constant
        return [first + int(i) for i in np.flatnonzero(table[first:] != self._held)]

    def _capture(self, target: SlotWriter, *, gated: bool) -> list[int]:
        """Start every copy. Returns the handles that a seal waits for. Devices first: their copies run while
        the host copies its own."""
        check, turn = self._captures < _CHECKED, self._captures
        self._captures += 1
        for device, mark in self._feeders.values():
            device.gather()
            device.mark(mark)
        handles = [each.capture(target, gated=gated, check=check) for each in self.on_devices]
        for _, mark in self._feeders.values():
            mark.wait()
        self.host.capture(target, check=check, turn=turn)
        changed = [i for i in self.changed_constants(target.table) if self._owners[i] is None]
        if changed:
            raise ConstantsChanged(changed)
        return handles

    def _find_feeders(self, host: Sequence[int]) -> None:
        """Devices that write leaves in host memory: these are read after the kernels of the boundary."""
        for device in self._devices:
            if id(device) not in self._feeders and any(device.feeds(self.plan.tensors[i]) for i in host):
                self._feeders[id(device)] = device, device.new_mark()


class HostCopies:
    """Leaves in host memory; allocates nothing once the plan stands. A constant is only digested, as is what
    is left to another rank: their bytes stand elsewhere. The sources of `unsafe` leaves are checked in every
    capture."""

    def __init__(
        self,
        plan: Plan,
        indexes: Sequence[int],
        ways: Sequence[Way],
        unsafe: Collection[int],
        threads: int,
    ) -> None:
        self._plan, self._threads, self._unsafe = plan, threads, unsafe
        # Leaves of a device that this library has no streams for are copied, and waited for, by torch.
        self._odd = [i for i in indexes if i in plan.odd or _elsewhere(plan, i)]
        digested = [i for i in indexes if ways[i] in (Way.LEFT, Way.CONSTANT) and i not in {*self._odd}]
        apart = {*self._odd, *digested}
        self._digested = np.array(digested, dtype=np.int64)
        self._plain = np.array([i for i in indexes if i not in apart], dtype=np.int64)
        self._plain_unsafe = np.array([i for i in self._plain if i in unsafe], dtype=np.int64)
        self._sources: Addresses = plan.addresses[self._plain]
        self._offsets: Addresses = plan.offsets[self._plain]
        self._sizes: Addresses = plan.sizes[self._plain]
        self._destinations = np.empty_like(self._sources)
        self._digests = np.empty_like(self._sources)
        self._block_ends = np.cumsum(-(-self._sizes.astype(np.int64) // _SAMPLED_BYTES))
        self.stage(())
        # One run of the table where all leaves are plain host leaves: digests go there without a detour.
        self._whole = len(self._plain) == len(plan.leaves)

    def may_be_staged(self) -> frozenset[int]:
        """Small leaves that can be put in their places later."""
        return frozenset(i for i in self._plain.tolist() if self._plan.sizes[i] < SMALL_BYTES)

    def stage(self, indexes: Iterable[int]) -> None:
        """Copy these of `may_be_staged` beside the image from now on, until the copies of a device, which go
        over their places, have ended; `moves` says where they belong."""
        chosen = set(indexes)
        staged = [place for place, index in enumerate(self._plain.tolist()) if index in chosen]
        self._staged = np.array(staged, dtype=np.int64)
        sizes = self._sizes[self._staged]
        self._staging = np.empty(int(sizes.sum()), dtype=np.uint8)
        starts = np.cumsum(sizes, dtype=np.uint64) - sizes
        self._staged_places = starts + np.uint64(self._staging.ctypes.data)

    def moves(self, target: SlotWriter) -> Addresses:
        """What the sealing thread puts in its place, as triples of source, destination and bytes."""
        places = self._offsets[self._staged] + np.uint64(target.image_address)
        return np.stack([self._staged_places, places, self._sizes[self._staged]], axis=1)

    def moved(self) -> None:
        """Read the addresses again: the plan was patched."""
        np.take(self._plan.addresses, self._plain, out=self._sources)

    def capture(self, target: SlotWriter, *, check: bool, turn: int) -> None:
        """Copy everything but what is only digested.

        check: read the sources again after the copy, and let the seal refuse a difference: digests are of
        the bytes that were copied, and do not see a thread that writes a leaf while it is copied. Else the
        sample of this `turn` is read again, so that such a thread is found within some captures.
        """
        if len(self._plain):
            np.add(self._offsets, np.uint64(target.image_address), out=self._destinations)
            self._destinations[self._staged] = self._staged_places
            out = target.table_address if self._whole else _native.address_of(self._digests.data)
            _native.copy_digest(
                self._sources.data, self._destinations.data, self._sizes.data, out, self._threads
            )
            if not self._whole:
                target.table[self._plain] = self._digests
        for number, index in enumerate(self._odd):
            is_in_turn = turn % len(self._odd) == number
            self._capture_odd(target, index, check=check or is_in_turn or index in self._unsafe)
        target.table[self._digested] = self._digests_of(self._digested)
        checked = self._plain if check else self._plain_unsafe
        torn = self._digests_of(checked) != target.table[checked]
        target.table[checked[torn]] = _native.EMPTY_DIGEST
        if not check:
            target.table[self._torn_in_sample(turn)] = _native.EMPTY_DIGEST

    def _torn_in_sample(self, turn: int) -> NDArray[np.int64]:
        """The leaves whose bytes differ from their copies in the blocks of this turn. The blocks are spread
        evenly over all plain leaves, and the turns of one round together read each of them once. The blocks
        of a leaf are counted from its end; the one at its beginning overlaps the next."""
        num_blocks = int(self._block_ends[-1]) if len(self._plain) else 0
        turns = max(1, -(-num_blocks // _SAMPLED))
        blocks = np.arange(turn % turns, num_blocks, turns)
        leaves = np.searchsorted(self._block_ends, blocks, side="right")
        sizes = self._sizes[leaves]
        last_starts = np.maximum(sizes.astype(np.int64) - _SAMPLED_BYTES, 0)
        starts = np.minimum((self._block_ends[leaves] - 1 - blocks) * _SAMPLED_BYTES, last_starts)
        lengths = np.minimum(sizes, np.uint64(_SAMPLED_BYTES))
        now, copied = (
            _digested(addresses[leaves] + starts.astype(np.uint64), lengths, 1)
            for addresses in (self._sources, self._destinations)
        )
        torn: NDArray[np.int64] = self._plain[leaves[now != copied]]
        return torn

    def _digests_of(self, indexes: NDArray[np.int64]) -> Addresses:
        """Of these leaves where they lie."""
        return _digested(self._plan.addresses[indexes], self._plan.sizes[indexes], self._threads)

    def _capture_odd(self, target: SlotWriter, index: int, *, check: bool) -> None:
        tensor, size = self._plan.tensors[index].detach(), int(self._plan.sizes[index])
        is_left = index >= self._plan.first_left
        place = torch.empty_like(tensor, device="cpu") if is_left else target.image_of(index)
        place.copy_(tensor)
        digest = _native.digest(place.data_ptr(), size)
        if check:
            again = torch.empty_like(place).copy_(tensor)
            if _native.digest(again.data_ptr(), size) != digest:
                digest = _native.EMPTY_DIGEST
        target.table[index] = digest


def _digested(addresses: Addresses, sizes: Addresses, threads: int) -> Addresses:
    """Digests of host memory at these addresses."""
    digests: Addresses = np.empty(len(addresses), dtype=np.uint64)
    if len(addresses):
        _native.digest_many(addresses.data, sizes.data, _native.address_of(digests.data), threads)
    return digests


def _elsewhere(plan: Plan, index: int) -> bool:
    return plan.tensors[index].device.type != "cpu" and plan.sizes[index] > 0


class DeviceCopies:
    """The leaves of a plan that live on one device. Those that are `unsafe` were torn before; `holes` are
    leaves in host memory that may lie between cloned ones (`Arena`)."""

    def __init__(
        self,
        device: Device,
        plan: Plan,
        indexes: Sequence[int],
        ways: Sequence[Way],
        unsafe: Collection[int],
        holes: Collection[int],
    ) -> None:
        self.device, self._plan = device, plan
        synchronised = [i for i in indexes if i in unsafe]
        self._is_synchronised = bool(synchronised)
        cloned = [i for i in indexes if ways[i] is Way.CLONE or i in plan.odd]
        # What is only digested has its bytes in the plan's region, or in another rank's slot.
        digested = (Way.LEFT, Way.CONSTANT)
        self._direct = [i for i in indexes if i not in set(cloned) and ways[i] not in digested]
        self._waits = any(ways[i] is Way.WAIT for i in indexes)
        self._gates = any(ways[i] is Way.GATE for i in indexes)
        self.arena = Arena(plan, cloned, holes)
        # The order of the digests: leaves that are read where they lie, then those made row-major.
        self._plain = [i for i in indexes if i not in plan.odd]
        self._order = self._plain + [i for i in indexes if i in plan.odd]
        self._checked = [i for i in cloned if i not in plan.odd]
        self._checked_always = [i for i in synchronised if i not in plan.odd and i not in set(self._checked)]
        self._make_buffers()
        self.make_tables()
        self._read = device.new_mark()
        self._copying: Copying | None = None
        self._gate: Copying | None = None

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
        if not self.arena.is_held:
            self.make_tables()
        if self._is_synchronised:
            device.synchronize()
        device.gather()
        if self.arena.odd:
            device.launch(self.arena.make_row_major)
        device.launch(partial(self._table.run, self._digests))
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
            # A device that fails meanwhile makes no copy any more, and the loop's next call raises. Digests
            # find whatever an optimizer writes while its leaves are copied.
            with contextlib.suppress(RuntimeError):
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
        may_go = arena.is_large and arena.is_held and not device.capturing()
        with contextlib.suppress(RuntimeError):  # of a device that fails meanwhile: no arena is taken again
            if may_go and device.room_bytes() < arena.num_bytes // 2:
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
    def make_tables(self) -> None:
        """Read the plan's tensors, and again each time it was patched."""
        if not self.arena.is_held:
            self.arena.take(self.device)
        leaves = [self._plan.tensors[i].detach() for i in self._plain] + self.arena.odd
        destinations = np.zeros(len(self._order), dtype=np.uint64)
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
        self.device.launch(partial(table.run, again))

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
        self._copying = self.device.copy_to_host(np.concatenate(parts), num_first, self._read)
        return self._copying

    def _direct_copies(self, target: SlotWriter) -> Copies:
        """Of leaves that are read where they lie."""
        plan, index = self._plan, np.array(self._direct, dtype=np.int64)
        places = plan.offsets[index] + np.uint64(target.image_address)
        return np.stack([plan.addresses[index], places, plan.sizes[index]], axis=1)

    def _others(self, target: SlotWriter) -> list[Copies]:
        """Of what stands still: the arena, and the digests."""
        row = [self._digests.data_ptr(), self._host_table.ctypes.data, self._host_table.nbytes]
        digests = np.array([row], dtype=np.uint64)
        return [self.arena.copies(target.image_address), digests]


class Arena:
    """Places on a device for the leaves `indexes` of a plan, in image order, so that many leave for the host
    in one copy; those that are not row-major are made so. `holes` are leaves in host memory that may lie
    between them without ending a run: those that do are `bridged`, copied along, and filled on the host
    before the seal. `odd` are the places of those that are made row-major. The buffer is taken with `take`,
    which must come before any use."""

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
        self.odd: list[Tensor] = []

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
        for index in self._odd:
            tensor, start = self._plan.tensors[index], self._offsets[index]
            place = self._buffer[start : start + int(self._plan.sizes[index])]
            self.odd.append(place.view(tensor.dtype).view(tensor.shape))

    def let_go(self) -> None:
        """The loop may have the memory. Nothing may be on its way from here."""
        self._buffer = None
        self.odd = []

    # ---- what is in it

    def make_row_major(self) -> None:
        """Copy those leaves: one operation each, since torch has none for several of different strides."""
        for target, index in zip(self.odd, self._odd, strict=True):
            target.copy_(self._plan.tensors[index].detach())

    def addresses(self, indexes: Sequence[int]) -> Addresses:
        """Where leaves lie on the device; 0 for those that do not."""
        base = self._base()
        found = [base + self._offsets[i] if i in self._offsets else 0 for i in indexes]
        return np.array(found, dtype=np.uint64)

    def copies(self, image_address: int) -> Copies:
        """To an image: one for each run."""
        base = np.array([self._base(), image_address, 0], dtype=np.uint64)
        return np.array(self._runs, dtype=np.uint64).reshape(-1, 3) + base

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
                here, start, _ = self._runs.pop()
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


def _runs(order: Sequence[int]) -> Addresses:
    """Moves of a packed table to its entries (`order`) in the slot's: triples of offsets and bytes,
    joined."""
    entries = np.array(order, dtype=np.int64)
    starts = np.flatnonzero(np.diff(entries, prepend=-2) != 1)
    counts = np.diff(starts, append=len(entries))
    return (8 * np.stack([starts, entries[starts], counts], axis=1)).astype(np.uint64)
