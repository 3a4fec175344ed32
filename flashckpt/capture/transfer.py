"""What one device does at a boundary: clones, digests, copies to the host, and the gate.

Owns the order of streams on one device: leaves are read after every stream that may write them, nothing
writes them before they were read, and a seal waits for the last copy. Chooses no way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.arena import Allocate, Arena, words_of
from flashckpt.capture.device.base import Device, On
from flashckpt.capture.digests import LeafDigests, signed
from flashckpt.capture.plan import Addresses, Plan
from flashckpt.capture.target import Target
from flashckpt.capture.way import Way

_EMPTY = signed(_native.EMPTY_DIGEST)


class Transfer:
    """The leaves of a plan that live on one device, with the way of each."""

    def __init__(
        self,
        device: Device,
        plan: Plan,
        indexes: Sequence[int],
        ways: Sequence[Way],
        synchronised: Sequence[int],
    ) -> None:
        self.device, self._plan = device, plan
        self._synchronised = frozenset(synchronised)
        cloned = [i for i in indexes if ways[i] is Way.CLONE or not _direct(plan, i)]
        self._direct = [i for i in indexes if i not in set(cloned)]
        self._ways = {i: ways[i] for i in indexes}
        # An odd leaf that was torn: made row-major in the arena, and the loop waits for it all the same.
        self._waits = any(ways[i] is Way.WAIT for i in indexes)
        self._gates = any(ways[i] is Way.GATE for i in indexes)
        with device.preparing():
            self.arena = Arena(plan, cloned, device.allocate) if cloned else None
            self._order = (self.arena.indexes if self.arena else []) + self._direct
            self._tables(device.allocate)
        self._sources()
        self._read, self._copied, self._done = (device.new_mark() for _ in range(3))
        self._gate_open = False

    def moved(self) -> bool:
        """The plan was patched: read its tensors again. False where one cannot be read where it lies now."""
        self._sources()
        if self.arena is not None:
            self.arena.moved()
        return len(self._words) == len(self._direct)

    def capture(self, target: Target, *, gated: bool, check: bool) -> int:
        """Enqueue everything. Returns the handle that a seal waits for.

        gated: a hook will close the gate before the next write; else the loop waits for copies that read
        live leaves. check: digest the sources again after the clone, and let the seal refuse a difference.
        Leaves that were torn before are checked in every capture, and the host waits for their copies: a
        stream that nobody named, or a graph's, is held back by no event, but by a host that enqueues nothing.
        """
        device, arena = self.device, self.arena
        check = check or bool(self._synchronised)
        if self._synchronised:
            device.synchronize()
        device.gather(On.COMPUTE)
        if arena is not None:
            device.launch(On.COMPUTE, arena.clone)
        if self._direct:
            device.launch(On.COMPUTE, self._digest_direct)
        if check and arena is not None:
            device.launch(On.COMPUTE, self._digest_again)
        device.mark(On.COMPUTE, self._read)
        # Other streams that may write must not do so before the leaves were read.
        device.hold_writers(self._read)
        device.hold(On.SIDE, self._read)
        self._copy_direct(target)
        if self._again_words:
            device.launch(On.SIDE, self._digest_direct_again)
        device.mark(On.SIDE, self._copied)
        if self._waits or (self._gates and not gated):
            device.hold_writers(self._copied)
        else:
            self._gate_open = self._gates
        if arena is not None:
            device.launch(On.SIDE, self._digest_checked if check else self._digest_arena)
            self._copy(target, self._runs)
        device.launch(On.SIDE, self._sort_table)
        self._copy_table(target)
        device.mark(On.SIDE, self._done)
        if self._synchronised:
            self._copied.wait()
        return self._done.handle

    def gate(self) -> None:
        """Before an optimizer writes: the device's streams, not the host, wait for the open copies."""
        if self._gate_open:
            self._gate_open = False
            self.device.hold_writers(self._copied)

    def constants(self) -> list[int]:
        return [i for i in self._direct if self._ways[i] is Way.CONSTANT]

    def copied_constants(self) -> bool:
        """Whether there are constants that each capture makes row-major, and copies."""
        direct = set(self._direct)
        return any(way is Way.CONSTANT and i not in direct for i, way in self._ways.items())

    def _tables(self, allocate: Allocate) -> None:
        count = len(self._order)
        self._digests = allocate(8 * count).view(torch.int64)
        self._sorted = allocate(8 * count).view(torch.int64)
        self._again = allocate(8 * count).view(torch.int64)
        places = sorted(range(count), key=lambda place: self._order[place])
        self._permutation = torch.tensor(places, dtype=torch.int64, device=self._digests.device)
        self._table_runs = _table_runs([self._order[place] for place in places])
        largest = max((int(self._plan.sizes[i]) for i in self._order), default=0)
        self._leaf_digests = LeafDigests(allocate, largest)
        if self.arena is not None:
            flags = torch.tensor(self.arena.checkable(), dtype=torch.bool)
            self._checkable = flags.to(self._digests.device)
        self._runs = np.array(self.arena.runs() if self.arena else [], dtype=np.uint64).reshape(-1, 3)

    def _sources(self) -> None:
        words = [words_of(self._plan.tensors[i]) for i in self._direct]
        self._words: list[Tensor] = [each for each in words if each is not None]
        first = len(self._order) - len(self._direct)
        self._again_words = [
            (first + place, words)
            for place, words in enumerate(self._words)
            if self._direct[place] in self._synchronised
        ]

    def _digest_direct(self) -> None:
        first = len(self._order) - len(self._direct)
        for place, words in enumerate(self._words, first):
            self._leaf_digests.into(words, self._digests[place])

    def _digest_direct_again(self) -> None:
        """After the copy: bytes and digest may agree, and have been taken in the middle of a write."""
        for place, words in self._again_words:
            self._leaf_digests.into(words, self._again[place])
            again, digest = self._again[place : place + 1], self._digests[place : place + 1]
            digest.masked_fill_(digest != again, _EMPTY)

    def _digest_again(self) -> None:
        assert self.arena is not None
        self.arena.digest_sources(self._again, self._leaf_digests)

    def _digest_arena(self) -> None:
        assert self.arena is not None
        self.arena.digest(self._digests[: len(self.arena.indexes)])

    def _digest_checked(self) -> None:
        """An unequal leaf gets the entry that no seal accepts, without the host looking at anything."""
        self._digest_arena()
        count = len(self._checkable)
        unequal = (self._digests[:count] != self._again[:count]).logical_and_(self._checkable)
        self._digests[:count].masked_fill_(unequal, _EMPTY)

    def _sort_table(self) -> None:
        torch.index_select(self._digests, 0, self._permutation, out=self._sorted)

    def _copy_direct(self, target: Target) -> None:
        kept = target.kept
        chosen = [i for i in self._direct if self._ways[i] is not Way.CONSTANT or i not in kept]
        if chosen:
            index = np.array(chosen, dtype=np.int64)
            base = np.uint64(target.image_address)
            plan = self._plan
            self.device.copy_to_host(plan.addresses[index], plan.offsets[index] + base, plan.sizes[index])

    def _copy(self, target: Target, runs: Addresses) -> None:
        base = np.uint64(target.image_address)
        columns = [np.ascontiguousarray(runs[:, column]) for column in range(3)]
        self.device.copy_to_host(columns[0], columns[1] + base, columns[2])

    def _copy_table(self, target: Target) -> None:
        runs = self._table_runs
        here, there = np.uint64(self._sorted.data_ptr()), np.uint64(target.table_address)
        self.device.copy_to_host(runs[0] + here, runs[1] + there, runs[2])


def _direct(plan: Plan, index: int) -> bool:
    """Whether the leaf can be read where it lies."""
    return index not in plan.odd and words_of(plan.tensors[index]) is not None


def _table_runs(indexes: Sequence[int]) -> tuple[Addresses, Addresses, Addresses]:
    """Copies of a packed table (sorted by image order) to its entries in the slot's: offsets in bytes."""
    sources: list[int] = []
    places: list[int] = []
    counts: list[int] = []
    for position, index in enumerate(indexes):
        if places and places[-1] + counts[-1] == index:
            counts[-1] += 1
        else:
            sources.append(position)
            places.append(index)
            counts.append(1)
    columns = [8 * np.array(column, dtype=np.uint64) for column in (sources, places, counts)]
    return columns[0], columns[1], columns[2]
