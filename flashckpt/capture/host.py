"""The host way: leaves in CPU memory, copied by native threads at the boundary, digests on the way.

Owns the arrays of addresses that native code reads; allocates none once the plan stands. A constant on
the host is only read: its bytes stand in the slot already if its digest is the one they were written by.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flashckpt import _native
from flashckpt.capture.plan import Addresses, Plan
from flashckpt.capture.target import Target


class HostCopies:
    """Copies of one plan's host leaves. `indexes` are in image order; those of `constants` are among them."""

    def __init__(self, plan: Plan, indexes: Iterable[int], constants: Iterable[int], threads: int) -> None:
        self._plan, self._threads = plan, threads
        chosen = list(indexes)
        # Leaves of a device that this library has no streams for are copied, and waited for, by torch.
        self._odd = [i for i in chosen if i in plan.odd or _elsewhere(plan, i)]
        self._constants = np.array(sorted(set(constants) - set(self._odd)), dtype=np.int64)
        apart = {*self._odd, *self._constants.tolist()}
        self._plain = np.array([i for i in chosen if i not in apart], dtype=np.int64)
        count = len(self._plain)
        self._sources: Addresses = plan.addresses[self._plain]
        self._offsets: Addresses = plan.offsets[self._plain]
        self._sizes: Addresses = plan.sizes[self._plain]
        self._destinations: Addresses = np.empty(count, dtype=np.uint64)
        self._digests: Addresses = np.empty(count, dtype=np.uint64)
        self._constant_sizes: Addresses = plan.sizes[self._constants]
        self._constant_digests: Addresses = np.empty(len(self._constants), dtype=np.uint64)
        # One run of the table where all leaves are plain host leaves: digests go there without a detour.
        self._whole = count == len(plan)

    def moved(self) -> None:
        """Read the addresses again: the plan was patched."""
        np.take(self._plan.addresses, self._plain, out=self._sources)

    def capture(self, target: Target) -> list[int]:
        """Copy everything; returns constants that are none (their bytes are copied all the same)."""
        if len(self._plain):
            np.add(self._offsets, np.uint64(target.image_address), out=self._destinations)
            out = target.table_address if self._whole else _native.address_of(self._digests.data)
            _native.copy_digest(
                self._sources.data, self._destinations.data, self._sizes.data, out, self._threads
            )
            if not self._whole:
                target.table[self._plain] = self._digests
        for index in self._odd:
            self._capture_odd(target, index)
        return self._capture_constants(target) if len(self._constants) else []

    def _capture_odd(self, target: Target, index: int) -> None:
        target.image_of(index).copy_(self._plan.tensors[index].detach())
        address = target.image_address + int(self._plan.offsets[index])
        target.table[index] = _native.digest(address, int(self._plan.sizes[index]))

    def _capture_constants(self, target: Target) -> list[int]:
        digests, changed = self._constant_digests, []
        sources = self._plan.addresses[self._constants]
        address = _native.address_of(digests.data)
        _native.digest_many(sources.data, self._constant_sizes.data, address, self._threads)
        target.table[self._constants] = digests
        for index, digest in zip(self._constants.tolist(), digests.tolist(), strict=True):
            kept = target.kept.get(index)
            if kept != digest:
                self._copy_one(target, index)
                target.kept[index] = int(target.table[index])
                if kept is not None:
                    changed.append(index)
        return changed

    def _copy_one(self, target: Target, index: int) -> None:
        one = slice(index, index + 1)
        destination = self._plan.offsets[one] + np.uint64(target.image_address)
        table = target.table_address + 8 * index
        source, size = self._plan.addresses[one], self._plan.sizes[one]
        _native.copy_digest(source.data, destination.data, size.data, table, self._threads)


def _elsewhere(plan: Plan, index: int) -> bool:
    return plan.tensors[index].device.type != "cpu" and plan.sizes[index] > 0
