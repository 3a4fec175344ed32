"""The copy of what is constant into the region that all slots name.

A capture like any other, of the constants alone: bytes of host memory are copied at the boundary itself (a
thread of our own must not read tensors whose storage the program may free), those of a device before anything
may write them. Decides nothing of what is constant.
"""

from __future__ import annotations

from flashckpt import _native, crashpoints
from flashckpt.capture.plan import ConstantsRegion
from flashckpt.capture.planner import PreparedCopies
from flashckpt.capture.slot_writer import SlotWriter
from flashckpt.errors import KeeperError
from flashckpt.memory.constants import VALUES
from flashckpt.memory.slot import Slot, SlotState

_SEAL_S = 60.0


class RegionCopy:
    """Owns the mapping of the region, until `end`."""

    def __init__(self, region: Slot, owner: int, sealer: _native.Sealer) -> None:
        self._region, self._sealer = region, sealer
        self.target = SlotWriter(region, owner)
        self.copies: PreparedCopies | None = None
        self.tries = 0

    @property
    def nonce(self) -> int:
        return self._region.header.nonce

    def begin(self, copies: PreparedCopies, step: int, attempt: tuple[int, int]) -> None:
        """Raises KeeperError where the region is not to be had any more, or too small; whatever is raised,
        nothing writes to it any more."""
        target, plan = self.target, copies.plan
        if not target.fits(plan, len(VALUES)) or not target.begin():
            raise KeeperError(f"{self._region.name} cannot be written.")
        self.tries += 1
        try:
            target.prepare(plan, VALUES)
            handles, moves = copies.capture(target, gated=False)
            crashpoints.point("share.filled")
            target.seal(self._sealer, handles, moves, step, attempt)
        except BaseException:
            try:
                copies.wait()
            finally:
                target.abandon()
                plan.release()
            raise
        self.copies = copies

    def state(self, *, wait: bool) -> SlotState:
        """WRITING while it is on its way, SEALED, or FREE where it could not be sealed. Copies of a device
        are waited for only to `wait`."""
        assert self.copies is not None
        if wait or not self.copies.transfers:
            self._sealer.drain(_SEAL_S)
        return self.target.state(self.target.generation)

    def sealed(self) -> ConstantsRegion:
        """What the region was sealed with."""
        assert self.copies is not None
        layout = self.copies.plan.image.shard
        return ConstantsRegion(self._region.name, self.nonce, layout, tuple(self.target.table.tolist()))

    def drop(self) -> None:
        """It could not be sealed, and is to be begun again."""
        if self.copies is not None:
            self.copies.plan.release()
        self.copies = None

    def end(self) -> None:
        """Nothing here touches the region's bytes again: captures only compare digests."""
        if self.copies is not None:
            self.copies.wait()
            if self.state(wait=True) is SlotState.WRITING:
                return  # it stays mapped: somebody may still write to it
        self.drop()
        self.target.release()
        self._region.close()
