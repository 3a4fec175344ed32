"""The copies of one plan's leaves into a slot, from host memory and from each device.

`PreparedCopies` contains all of them. `HostCopies` copies and digests host memory with native threads, at the
boundary. `DeviceCopies` owns the order of streams on one device: leaves are read after each stream that may
write them, no stream writes them before they were read, and a seal waits for the last copy. The number of
operations that it enqueues grows only with the leaves that must be made row-major. `Arena` is the device
memory for clones. `CopyPolicy` chooses the way of each leaf, and owns the names of torn
leaves. `Planner` keeps the copies prepared for the next boundary.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashckpt import _native, crashpoints
from flashckpt.capture.constants import Constants, ConstantsChanged, parameters_of
from flashckpt.capture.devices import Copies, Copying, Device, StreamMark
from flashckpt.capture.hooks import StepHooks
from flashckpt.capture.plan import Addresses, Plan, Sharing, is_plain
from flashckpt.capture.slot_writer import SlotWriter
from flashckpt.errors import StateError
from flashckpt.state.tensors import is_sharded

if TYPE_CHECKING:
    from flashckpt.state.leaves import LiveLeaf
    from flashckpt.state.tree import Walk

log = logging.getLogger(__name__)


# A run in the arena starts at the same offset modulo this as in the image: kernels read wide words.
_ALIGNED = 512
# The first captures of a plan compare all leaves with their digests again after the copy. Later captures do
# so for a sample, because a thread or a stream may begin to write them at any time.
_CHECKED = 3
_SAMPLED, _SAMPLED_BYTES = 256, 4096
_COMPARED_BYTES = 64 << 20


class PreparedCopies:
    """All copies of one plan's leaves, prepared for its boundaries.

    owners: the device of each leaf, None for host memory.
    ways: the way of each leaf.
    torn: the names of leaves that were found torn before.
    devices: all devices.
    """

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
        self._host_writers: dict[int, tuple[Device, StreamMark]] = {}
        self._find_host_writers(host)
        self.on_devices: list[DeviceCopies] = []
        for device in {id(owner): owner for owner in owners if owner is not None}.values():
            indexes = [i for i, owner in enumerate(owners) if owner is device]
            self.on_devices.append(DeviceCopies(device, plan, indexes, ways, unsafe))

    @property
    def uses_devices(self) -> bool:
        """Whether a device holds leaves, or writes leaves in host memory."""
        return bool(self.on_devices or self._host_writers)

    def moved(self, indexes: Iterable[int]) -> None:
        """Read the addresses of these leaves again after the plan was patched."""
        self.host.moved()
        self._find_host_writers([i for i in indexes if self._owners[i] is None])
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
        home: bool = True,
        confirms: bool = False,
    ) -> None:
        """Write a begun slot, or region of constants, and submit it to the sealer. `gated`: a hook will close
        the gates before the next write. `confirms`: see `Slot.submit`. After an exception, no copy writes to
        the slot any more."""
        try:
            target.prepare(self.plan, values)
            check, turn = self._captures < _CHECKED, self._captures
            self._captures += 1
            handles = self._capture(target, gated=gated, check=check, turn=turn)
            if target.slot.header.holds_constants:
                crashpoints.point("share.filled")
            if persist:
                target.slot.request_persist(target.generation, home=home)
            landed = [each.landed(target, check=check) for each in self.on_devices]
            rows = np.concatenate(landed) if landed else np.empty((0, 3), dtype=np.uint64)
            target.seal(
                sealer, handles, rows, step, attempt, boundary,
                held=self._held, confirms=confirms,
            )  # fmt: skip
        except BaseException:
            target.forget()
            try:
                # Copies that were begun still write to the slot: do not free it before they have ended.
                self.wait()
            finally:
                target.abandon()
            raise

    def wait(self) -> None:
        """Wait on the host until no copy writes to a slot any more. Does not raise for failed copies, which
        have ended too."""
        for each in self.on_devices:
            each.wait()

    def gate(self) -> None:
        """Let the devices' streams, not the host, wait for open copies before an optimizer writes."""
        for each in self.on_devices:
            each.gate()

    def changed_constants(self, table: Addresses) -> list[int]:
        """Return the constants whose digests in a slot's table differ from those of the sealed region."""
        first = self.plan.first_constant
        return [first + int(i) for i in np.flatnonzero(table[first:] != self._held)]

    def _capture(self, target: SlotWriter, *, gated: bool, check: bool, turn: int) -> list[int]:
        """Start all copies; return the handles for which the seal waits. Devices come first, because their
        copies run while the host copies host memory."""
        for device, mark in self._host_writers.values():
            device.join_writers()
            device.mark(mark)
        handles = [each.capture(target, gated=gated) for each in self.on_devices]
        for _, mark in self._host_writers.values():
            mark.wait()
        self.host.capture(target, check=check, turn=turn)
        changed = [i for i in self.changed_constants(target.table) if self._owners[i] is None]
        if changed:
            raise ConstantsChanged(changed)
        return handles

    def _find_host_writers(self, host: Sequence[int]) -> None:
        """Find the devices that write leaves in host memory, which are read after the boundary's kernels."""
        for device in self._devices:
            if id(device) not in self._host_writers and any(
                device.writes_to(self.plan.tensors[i]) for i in host
            ):
                self._host_writers[id(device)] = device, device.new_mark()


class HostCopies:
    """The copies of leaves in host memory. Allocates no memory after the plan is made. Constants, and leaves
    that another rank holds, are only digested. The sources of `unsafe` leaves are checked in each capture."""

    def __init__(
        self,
        plan: Plan,
        indexes: Sequence[int],
        ways: Sequence[Way],
        unsafe: Collection[int],
        threads: int,
    ) -> None:
        self._plan, self._threads, self._unsafe = plan, threads, unsafe
        # torch copies, and waits for, leaves on a device for which the capture has no streams.
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

    def moved(self) -> None:
        """Read the addresses again after the plan was patched."""
        np.take(self._plan.addresses, self._plain, out=self._sources)

    def capture(self, target: SlotWriter, *, check: bool, turn: int) -> None:
        """Copy and digest the leaves.

        check: digest the sources again after the copy, and let the seal refuse a difference. The digest of
        the copied bytes alone does not detect a thread that writes a leaf during the copy. Without check,
        only the sample of this `turn` is digested again, which detects such a thread within some captures.
        """
        if len(self._plain):
            np.add(self._offsets, np.uint64(target.image_address), out=self._destinations)
            out = _native.address_of(self._digests.data)
            _native.copy_digest(
                self._sources.data, self._destinations.data, self._sizes.data, out, self._threads
            )
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
        """Return the leaves that differ from their copies in the blocks of this turn. The blocks of a turn
        are spread evenly over all plain leaves, and the turns of a round read each block once. The blocks of
        a leaf are counted from its end; the first one overlaps the second."""
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
        """Return the digests of these leaves in place."""
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
    """Return the digests of host memory at these addresses."""
    digests: Addresses = np.empty(len(addresses), dtype=np.uint64)
    if len(addresses):
        _native.digest_many(addresses.data, sizes.data, _native.address_of(digests.data), threads)
    return digests


def _elsewhere(plan: Plan, index: int) -> bool:
    return plan.tensors[index].device.type != "cpu" and plan.sizes[index] > 0


class DeviceCopies:
    """The copies of a plan's leaves on one device. unsafe: leaves that were torn before."""

    def __init__(
        self,
        device: Device,
        plan: Plan,
        indexes: Sequence[int],
        ways: Sequence[Way],
        unsafe: Collection[int],
    ) -> None:
        self.device, self._plan = device, plan
        # Leaves from `first_left` on are not in this slot.
        self._unsafe = [i for i in indexes if i in unsafe and i < plan.first_left]
        cloned = [i for i in indexes if ways[i] is Way.CLONE or i in plan.odd]
        # Others are only digested: the region of constants or another rank's slot holds their bytes.
        self._direct = [i for i in indexes if i not in plan.odd and ways[i] in (Way.GATE, Way.WAIT)]
        self._waits = any(ways[i] is Way.WAIT for i in indexes)
        self._gates = any(ways[i] is Way.GATE for i in indexes)
        self.arena = Arena(device, plan, cloned)
        # The order of the digests: leaves that are read in place, then those made row-major.
        self._plain = [i for i in indexes if i not in plan.odd]
        self._order = self._plain + [i for i in indexes if i in plan.odd]
        # The copied leaves, and the first one to compare in the next capture.
        self._copied, self._next = [*self._direct, *cloned], 0
        self._ends = np.cumsum(plan.sizes[self._copied])
        self._make_buffers()
        self.make_tables()
        self._read = device.new_mark()
        self._copying: Copying | None = None
        self._gate: Copying | None = None

    def capture(self, target: SlotWriter, *, gated: bool) -> int:
        """Enqueue all copies and digests; return the handle for which the seal waits.

        gated: a hook will close the gate before the next write; otherwise the loop waits for copies that read
        live leaves. For leaves that were torn before, the host waits: events do not hold back an unknown
        stream or a graph's, but a host that enqueues nothing does.
        """
        device = self.device
        self._copying = self._gate = None
        if self._unsafe:
            device.synchronize()
        device.join_writers()
        if self.arena.odd:
            device.launch(self.arena.make_row_major)
        device.launch(partial(self._table.run, self._digests))
        device.mark(self._read)
        # No other stream may write the leaves before they were read.
        device.hold_writers(self._read)
        direct = self._direct_copies(target)
        digests = self._digest_copies + np.array([0, target.table_address, 0], dtype=np.uint64)
        copies = np.concatenate([direct, self.arena.copies(target.image_address), digests])
        copying = self._copying = device.copy_to_host(copies, len(direct), self._read)
        if self._unsafe:
            copying.wait()
        elif self._waits or (self._gates and not gated):
            copying.hold_writers()
        elif self._gates:
            self._gate = copying
        return copying.handle

    def landed(self, target: SlotWriter, *, check: bool) -> Addresses:
        """Return the leaves whose bytes in the image the seal compares with their digests, as rows of
        address, bytes and entry in the table. check: all; otherwise those of this turn, and those torn
        before."""
        index = np.array(self._copied if check else self._in_turn(), dtype=np.int64)
        places = self._plan.offsets[index] + np.uint64(target.image_address)
        return np.stack([places, self._plan.sizes[index], index.astype(np.uint64)], axis=1)

    def _in_turn(self) -> list[int]:
        before = self._ends[self._next - 1] if self._next else 0
        first, end = self._next, int(np.searchsorted(self._ends, before + _COMPARED_BYTES)) + 1
        self._next = end if end < len(self._copied) else 0
        return sorted({*self._copied[first:end], *self._unsafe})

    def gate(self) -> None:
        """Let the device's streams, not the host, wait for the open copies before an optimizer writes."""
        gate, self._gate = self._gate, None
        if gate is not None and not self.device.capturing():
            # If the device fails meanwhile, it makes no more copies, and the loop's next call raises. Digests
            # detect an optimizer's writes during a copy.
            with contextlib.suppress(RuntimeError):
                gate.hold_writers()

    def wait(self) -> None:
        """Wait on the host until no copy writes any more, whether it failed or not."""
        if self._copying is not None:
            with contextlib.suppress(RuntimeError):
                self._copying.wait()

    # ---- with the plan

    # Outside of inference mode, because later boundaries write these tensors in either mode.
    @torch.inference_mode(False)
    def _make_buffers(self) -> None:
        self._digests = self.device.allocate(8 * len(self._order)).view(torch.int64)
        self._digest_copies = _runs(self._order)
        self._digest_copies[:, 0] += np.uint64(self._digests.data_ptr())

    @torch.inference_mode(False)
    def make_tables(self) -> None:
        """Make the tables of the plan's tensors; to be called again after each patch."""
        leaves = [self._plan.tensors[i].detach() for i in self._plain] + self.arena.odd
        destinations = np.zeros(len(self._order), dtype=np.uint64)
        destinations[: len(self._plain)] = self.arena.addresses(self._plain)
        self._table = self.device.make_table(leaves, destinations)

    # ---- at a boundary

    def _direct_copies(self, target: SlotWriter) -> Copies:
        """Return the copies of leaves that are read in place."""
        plan, index = self._plan, np.array(self._direct, dtype=np.int64)
        places = plan.offsets[index] + np.uint64(target.image_address)
        return np.stack([plan.addresses[index], places, plan.sizes[index]], axis=1)


class Arena:
    """Device memory for the clones of a plan's leaves `indexes`, in image order, so that a single copy to the
    host takes a run of many leaves. Leaves that are not row-major are made so. Raises torch.OutOfMemoryError.

    odd: the row-major places of leaves that are not row-major.
    """

    # Outside of inference mode, because later boundaries write these tensors in either mode.
    @torch.inference_mode(False)
    def __init__(self, device: Device, plan: Plan, indexes: Sequence[int]) -> None:
        self._plan = plan
        self.indexes = list(indexes)
        self._offsets: dict[int, int] = {}
        self._runs: list[tuple[int, int, int]] = []
        self._buffer = device.allocate(self._place())
        self._odd = [i for i in indexes if i in plan.odd]
        self.odd: list[Tensor] = []
        for index in self._odd:
            tensor, start = plan.tensors[index], self._offsets[index]
            place = self._buffer[start : start + int(plan.sizes[index])]
            self.odd.append(place.view(tensor.dtype).view(tensor.shape))

    def make_row_major(self) -> None:
        """Copy the odd leaves, with one operation each: torch has none for several with other strides."""
        for target, index in zip(self.odd, self._odd, strict=True):
            target.copy_(self._plan.tensors[index].detach())

    def addresses(self, indexes: Sequence[int]) -> Addresses:
        """Return the addresses of leaves in the arena; 0 for leaves that are not in it."""
        base = self._buffer.data_ptr()
        found = [base + self._offsets[i] if i in self._offsets else 0 for i in indexes]
        return np.array(found, dtype=np.uint64)

    def copies(self, image_address: int) -> Copies:
        """Return the copies to an image, one for each run."""
        base = np.array([self._buffer.data_ptr(), image_address, 0], dtype=np.uint64)
        return np.array(self._runs, dtype=np.uint64).reshape(-1, 3) + base

    def _place(self) -> int:
        """Compute the runs (offset in the arena, offset in the image, bytes); return the bytes needed."""
        end = 0
        offsets, sizes = self._plan.offsets.tolist(), self._plan.sizes.tolist()
        for index in self.indexes:
            there, size = offsets[index], sizes[index]
            here, start, num_bytes = self._runs.pop() if self._runs else (0, there, 0)
            if start + num_bytes != there:
                self._runs.append((here, start, num_bytes))
                here, start, num_bytes = -(-end // _ALIGNED) * _ALIGNED + there % _ALIGNED, there, 0
            self._offsets[index] = here + num_bytes
            self._runs.append((here, start, num_bytes + size))
            end = here + num_bytes + size
        return end


def _runs(order: Sequence[int]) -> Addresses:
    """Return the copies of a packed table to the entries `order` of the slot's table: joined rows of source
    offset, destination offset and bytes."""
    entries = np.array(order, dtype=np.int64)
    starts = np.flatnonzero(np.diff(entries, prepend=-2) != 1)
    counts = np.diff(starts, append=len(entries))
    return (8 * np.stack([starts, entries[starts], counts], axis=1)).astype(np.uint64)


SMALL_BYTES = 1 << 20


class Way(str, Enum):
    """How a leaf's bytes get into a slot. See docs/capture.md."""

    HOST = "host"
    CLONE = "clone"
    GATE = "gate"
    WAIT = "wait"
    LEFT = "left"
    """Digested and not copied: another rank of the node holds its bytes."""
    CONSTANT = "constant"


class CopyPolicy:
    """The choice of a way for each leaf of a plan. constants: a constant that is torn becomes an ordinary
    leaf.

    `torn`: the names of leaves that were ever found torn. On a device, such a leaf gets the way `wait`, and
    the host waits for the whole device before and after its copy. In host memory, a writing thread cannot be
    held back, so the source is checked in each capture. A snapshot in which the leaf is torn again is
    refused."""

    def __init__(self, optimizers: Sequence[Any], constants: Constants) -> None:
        self._optimizers, self._constants = optimizers, constants
        self.torn: set[str] = set()

    def choose(
        self,
        plan: Plan,
        owners: Sequence[Device | None],
        fired: frozenset[int],
        device_memory: int,
    ) -> list[Way]:
        """Return one way for each leaf. owners: the device of each, None for host memory. fired: ids of the
        optimizers whose hooks have fired. device_memory: bytes on each device for clones of large leaves;
        those that no gate protects come first."""
        gated = self._gated(plan, fired)
        ways = [self._fixed(plan, i, owner) for i, owner in enumerate(owners)]
        left = {owner.name: device_memory for owner in owners if owner is not None}
        for protected in (False, True):
            for i, owner in enumerate(owners):
                if ways[i] is None and owner is not None and (i in gated) == protected:
                    ways[i] = _by_room(int(plan.sizes[i]), owner, left, protected)
        return [way or Way.HOST for way in ways]

    def tear(self, name: str, way: Way) -> bool:
        """Use a safer way for a leaf that was found torn. Return False if no safer way exists."""
        if name in self.torn:
            return False
        self.torn.add(name)
        if way is Way.HOST:
            log.warning(
                "%s, in host memory, was written while it was copied. That snapshot was discarded; the live "
                "state is intact. From now on each snapshot checks it and is discarded if it was written "
                "again: let the thread that writes it finish before the boundary.", name,
            )  # fmt: skip
            return True
        self._constants.changed(name)
        log.warning(
            "%s was written while it was copied (way: %s). That snapshot was discarded; the live state is "
            "intact. From now on it is copied by the way %s, and the loop waits for the whole device before "
            "and after that copy. To avoid this wait, name the stream that writes it in Options(streams=…).",
            name, way.value, Way.WAIT.value,
        )  # fmt: skip
        return True

    def _fixed(self, plan: Plan, index: int, owner: Device | None) -> Way | None:
        if index >= plan.first_constant:
            return Way.CONSTANT
        if index >= plan.first_left:
            return Way.LEFT
        if owner is None:
            return Way.HOST
        if plan.leaves[index].name in self.torn:
            return Way.WAIT
        return Way.CLONE if plan.sizes[index] < SMALL_BYTES or index in plan.odd else None

    def _gated(self, plan: Plan, fired: frozenset[int]) -> set[int]:
        """Return the indexes of leaves that only optimizers whose hooks fire write."""
        fires, silent = (
            parameters_of(each for each in self._optimizers if (id(each) in fired) is is_fired)
            for is_fired in (True, False)
        )
        parameters = fires - silent
        return {
            i
            for i, live in enumerate(plan.lives)
            if (live.kind == "optimizer" and id(live.owner) in fired)
            or (live.kind == "parameter" and id(_parameter(live)) in parameters)
        }


def _parameter(live: LiveLeaf) -> Tensor:
    """Return the tensor that an optimizer would hold for this leaf: the leaf itself, or the DTensor with this
    local tensor. Not another wrapping tensor: a forward pass may write its parts, such as scales."""
    is_local = live.container is live.wrapper is not None and is_sharded(live.wrapper)
    return live.held if is_local else live.tensor


def _by_room(num_bytes: int, device: Device, left: dict[str, int], gated: bool) -> Way:
    if left[device.name] >= num_bytes:
        left[device.name] -= num_bytes
        return Way.CLONE
    return Way.GATE if gated else Way.WAIT


def describe(plan: Plan, ways: Iterable[Way]) -> list[tuple[str, int, int]]:
    """Return rows (way, leaves, bytes) for a table, in the order of `Way`."""
    sizes: dict[Way, list[int]] = {way: [] for way in Way}
    for index, (way, size) in enumerate(zip(ways, plan.sizes.tolist(), strict=True)):
        if index not in plan.outdated:
            sizes[way].append(size)
    return [(way.value, len(found), sum(found)) for way, found in sizes.items() if found]


# Walks at one boundary before an error: one is enough for a state whose tensors stay the same.
_MOST_WALKS = 3


class Walkable(Protocol):
    """The interface of the state for a capture (flashckpt.state.tree.Tree). `used_up(parameter, gradient)`
    returns whether a gradient is used up and so is not a leaf."""

    @property
    def current(self) -> Walk | None:
        """The last walk while it is valid. A read of the values may replace it, and does if the gradients
        that are leaves have changed."""

    def walk(self, used_up: Callable[[Any, Tensor], bool]) -> Walk: ...


class Planner:
    """The owner of the current plan and its copies. `current` is None before the first capture, and when ways
    must be chosen again. device_memory: see `CopyPolicy.choose`."""

    def __init__(
        self,
        tree: Walkable,
        policy: CopyPolicy,
        hooks: StepHooks,
        constants: Constants,
        devices: Sequence[Device],
        device_memory: int,
        threads: int,
        sharing: Sharing | None = None,
    ) -> None:
        self.current: PreparedCopies | None = None
        self._tree, self._policy, self._hooks, self._constants = tree, policy, hooks, constants
        self._devices, self._device_memory = devices, device_memory
        self._threads, self._sharing = threads, sharing
        self._walk: Walk | None = None
        self._planned_for = self._conditions()

    def prepare(self, values: Callable[[], bytes]) -> tuple[PreparedCopies, bytes]:
        """Return the copies of the current state, and its encoded values. Reads the values first, because
        their owners may then create new tensors, or the tree may walk again. Repeats this after a walk, which
        itself may create new tensors. Raises StateError if the tensors change each time."""
        if self._tree.current is None:
            self.walk()
        for _ in range(_MOST_WALKS):
            data = values()
            copies, walk = self.current, self._tree.current
            if copies is not None and self._walk is walk and self._planned_for == self._conditions():
                moved = copies.plan.update()
                if moved:
                    copies.moved(moved)
                if moved is not None:
                    return copies, data
            self.drop()
            self._walk = self.walk()
            # Read before the plan: facts about replicas that arrive meanwhile are for the next plan.
            self._planned_for = self._conditions()
            plan = self.plan(self._walk)
            self.current = self._prepared(plan)
        raise StateError(
            "The tensors of the state are replaced at each read. Nothing was captured, because values and "
            "tensors would not belong together. Let each state_dict return the same tensors when it is "
            "called twice."
        )

    def walk(self) -> Walk:
        return self._tree.walk(self._hooks.used_up)

    def plan(self, walk: Walk) -> Plan:
        """Return a plan of one walk, in which the region holds the constants."""
        region, used = self._constants.parts(walk.leaves)
        return Plan(walk, region, used, None, self._sharing, self._group, self._constants.names)

    def _group(self, tensor: Tensor) -> int:
        """Return the group of a leaf: those of a device that are cloned, its others, those of the host. So
        one copy takes many clones."""
        for number, device in enumerate(self._devices):
            if device.owns(tensor):
                return 2 * number + (tensor.nbytes >= SMALL_BYTES and is_plain(tensor))
        return 2 * len(self._devices)

    def copies_of_constants(self) -> PreparedCopies:
        """Return the copies of the constants into a new region."""
        walk = self.walk()
        return self._prepared(Plan(walk, only=self._constants.to_copy(walk.leaves)))

    def clone_no_more(self) -> None:
        """Drop the copies after an allocation has failed, and clone no large leaf from now on."""
        if self._device_memory:
            log.warning(
                "the device has no memory for the clones that Options(device_memory=…) allows: this snapshot "
                "is skipped, and from now on the loop waits for the copies of large tensors"
            )
        self._device_memory = 0
        self.drop()

    def drop(self) -> None:
        """Drop the copies, so that the next capture makes new ones. A snapshot in flight holds its own
        copies, and with them the tensors, until they have ended."""
        self.gate()
        if self.current is not None:
            self.current.plan.release()
            self.current = None

    def gate(self) -> None:
        """Hold back the streams before an optimizer writes, until open copies have read the leaves."""
        if self.current is not None:
            self.current.gate()

    def _prepared(self, plan: Plan) -> PreparedCopies:
        # An empty leaf needs no device.
        owners = [
            next((device for device in self._devices if size and device.owns(tensor)), None)
            for tensor, size in zip(plan.tensors, plan.sizes.tolist(), strict=True)
        ]
        ways = self._policy.choose(plan, owners, self._hooks.fired, self._device_memory)
        return PreparedCopies(plan, owners, ways, self._policy.torn, self._devices, self._threads)

    def _conditions(self) -> tuple[object, ...]:
        """Return the facts, besides the plan, on which the ways depend: the optimizers whose hooks fired, and
        the leaves that are no longer shared."""
        return self._hooks.fired, self._sharing.conditions if self._sharing is not None else None
