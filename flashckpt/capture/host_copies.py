"""The host way: leaves in CPU memory, copied by native threads at the boundary, digests on the way.

Owns the arrays of addresses that native code reads; allocates none once the plan stands. A constant on
the host is only read: its bytes stand in the plan's region if its digest is the one they were written by.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from flashckpt import _native
from flashckpt.capture.constants import ConstantsChanged
from flashckpt.capture.copy_policy import SMALL_BYTES
from flashckpt.capture.plan import Addresses, Plan
from flashckpt.capture.slot_writer import SlotWriter


class HostCopies:
    """Copies of one plan's host leaves. `indexes` are in image order; those of `constants` are among them,
    and so are `suspects`, whose sources are checked in every capture."""

    def __init__(
        self,
        plan: Plan,
        indexes: Iterable[int],
        constants: Iterable[int],
        suspects: Iterable[int],
        threads: int,
    ) -> None:
        self._plan, self._threads = plan, threads
        chosen = list(indexes)
        # Leaves of a device that this library has no streams for are copied, and waited for, by torch.
        self._odd = [i for i in chosen if i in plan.odd or _elsewhere(plan, i)]
        self._constants = np.array(sorted(constants), dtype=np.int64)
        apart = {*self._odd, *self._constants.tolist()}
        self._plain = np.array([i for i in chosen if i not in apart], dtype=np.int64)
        self._suspects = frozenset(suspects)
        self._plain_suspects = np.array([i for i in self._plain if i in self._suspects], dtype=np.int64)
        count = len(self._plain)
        self._sources: Addresses = plan.addresses[self._plain]
        self._offsets: Addresses = plan.offsets[self._plain]
        self._sizes: Addresses = plan.sizes[self._plain]
        self._destinations: Addresses = np.empty(count, dtype=np.uint64)
        self._digests: Addresses = np.empty(count, dtype=np.uint64)
        self._constant_sizes: Addresses = plan.sizes[self._constants]
        self._constant_digests: Addresses = np.empty(len(self._constants), dtype=np.uint64)
        # Leaves whose bytes wait beside the image until the copies of a device have ended, which go over
        # their places: positions in the plain ones, and where each waits.
        self._staged = np.empty(0, dtype=np.int64)
        self._staging = np.empty(0, dtype=np.uint8)
        self._staged_places: Addresses = np.empty(0, dtype=np.uint64)
        # One run of the table where all leaves are plain host leaves: digests go there without a detour.
        self._whole = count == len(plan.leaves)

    def may_be_staged(self) -> frozenset[int]:
        """Small leaves that can be put in their places later."""
        return frozenset(i for i in self._plain.tolist() if self._plan.sizes[i] < SMALL_BYTES)

    def stage(self, indexes: Iterable[int]) -> None:
        """Copy these of `may_be_staged` beside the image from now on; `moves` says where they belong."""
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

    def capture(self, target: SlotWriter, *, check: bool) -> None:
        """Copy everything but constants, which are digested. Raises ConstantsChanged where their region holds
        others.

        check: read the sources again after the copy, and let the seal refuse a difference: digests are of
        the bytes that were copied, and do not see a thread that writes a leaf while it is copied.
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
        for index in self._odd:
            self._capture_odd(target, index, check=check or index in self._suspects)
        if len(self._constants):
            self._capture_constants(target)
        checked = self._plain if check else self._plain_suspects
        if len(checked):
            self._check(target, checked)

    def _check(self, target: SlotWriter, indexes: NDArray[np.int64]) -> None:
        sources, sizes = self._plan.addresses[indexes], self._plan.sizes[indexes]
        digests: Addresses = np.empty(len(indexes), dtype=np.uint64)
        _native.digest_many(sources.data, sizes.data, _native.address_of(digests.data), self._threads)
        target.table[indexes[digests != target.table[indexes]]] = _native.EMPTY_DIGEST

    def _capture_odd(self, target: SlotWriter, index: int, *, check: bool) -> None:
        tensor, size = self._plan.tensors[index].detach(), int(self._plan.sizes[index])
        place = target.image_of(index)
        place.copy_(tensor)
        digest = _native.digest(target.image_address + int(self._plan.offsets[index]), size)
        if check:
            again = torch.empty_like(place).copy_(tensor)
            if _native.digest(again.data_ptr(), size) != digest:
                digest = _native.EMPTY_DIGEST
        target.table[index] = digest

    def _capture_constants(self, target: SlotWriter) -> None:
        digests = self._constant_digests
        sources = self._plan.addresses[self._constants]
        address = _native.address_of(digests.data)
        _native.digest_many(sources.data, self._constant_sizes.data, address, self._threads)
        target.table[self._constants] = digests
        region = self._plan.region
        assert region is not None
        pairs = zip(self._constants.tolist(), digests.tolist(), strict=True)
        first = self._plan.first_constant
        changed = [index for index, digest in pairs if region.digests[index - first] != digest]
        if changed:
            raise ConstantsChanged(changed)


def _elsewhere(plan: Plan, index: int) -> bool:
    return plan.tensors[index].device.type != "cpu" and plan.sizes[index] > 0
