"""The arena: where leaves are cloned on their device.

Owns the geometry of one buffer, and the buffer while it is held. Leaves lie as they do in the image, so
that many leave for the host in one copy; small leaves in host memory that lie between them leave a hole,
which is copied along and filled on the host before the seal. Leaves that are not row-major are made so
here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from flashckpt.capture.device.base import Copies, Device
from flashckpt.capture.plan import Addresses, Plan
from flashckpt.capture.ways import SMALL_BYTES

# Where a run begins it is aligned to this as it is in the image: kernels read wide words.
_ALIGNED = 512


class Arena:
    """Places for the leaves `indexes` of a plan, in image order. `holes` are leaves that may lie between
    them without ending a run: those that do are `bridged`. The buffer is taken with `take`, which must come
    before any use."""

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
