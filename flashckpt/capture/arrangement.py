"""A plan together with the way of each leaf and what carries it out. Owns the parts of one capture.

Made anew when leaves come or go or a way changes; patched when only memory moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flashckpt.capture.device_copies import DeviceCopies
from flashckpt.capture.devices import Device, StreamMark
from flashckpt.capture.host import HostCopies
from flashckpt.capture.plan import Addresses, Plan
from flashckpt.capture.target import Target
from flashckpt.capture.ways import Way, Ways

# In so many captures of a plan the sources are digested again after they were cloned.
_CHECKED = 3


class Arrangement:
    """Everything a boundary needs to copy the leaves of one plan."""

    def __init__(
        self, plan: Plan, ways: Ways, fired: frozenset[int], room: Mapping[str, int], threads: int
    ) -> None:
        self.plan = plan
        self._devices: Sequence[Device | None] = ways.device_of(plan)
        self.ways: list[Way] = ways.choose(plan, self._devices, fired, room)
        host = [i for i, each in enumerate(self._devices) if each is None and i not in plan.outdated]
        constants = [i for i in host if self.ways[i] is Way.CONSTANT]
        suspects = [i for i in host if ways.suspect(plan.leaves[i].name)]
        self.host = HostCopies(plan, host, constants, suspects, threads)
        self._choice = ways
        self._feeders: dict[int, tuple[Device, StreamMark]] = {}
        self._find_feeders(host)
        holes = self.host.may_be_staged()
        self.transfers = [self._transfer(device, ways, holes) for device in _distinct(self._devices)]
        self.host.stage(i for t in self.transfers if t.arena is not None for i in t.arena.bridged)
        self.captures = 0
        self.names = [leaf.name for leaf in plan.leaves]
        held = plan.region.digests if plan.region is not None else ()
        self._held: Addresses = np.array(held, dtype=np.uint64)

    def moved(self, indexes: Iterable[int]) -> None:
        """The plan was patched: these leaves lie elsewhere now."""
        self.host.moved()
        self._find_feeders(i for i in indexes if self._devices[i] is None)
        for transfer in self.transfers:
            transfer.moved()

    def capture(self, target: Target, *, gated: bool) -> tuple[list[int], Addresses]:
        """Start every copy. Returns the handles that a seal waits for, and the moves that it makes then
        (`Target.seal`). Whatever is raised, copies may have begun: `wait` for them.

        Devices first: their copies run while the host copies its own.
        """
        check = self.captures < _CHECKED
        self.captures += 1
        for device, mark in self._feeders.values():
            device.gather()
            device.mark(mark)
        handles = [t.capture(target, gated=gated, check=check) for t in self.transfers]
        for _, mark in self._feeders.values():
            mark.wait()
        self.host.capture(target, check=check)
        return handles, np.concatenate([self.host.moves(target), *(t.moves(target) for t in self.transfers)])

    def wait(self) -> None:
        """The host waits until nothing that was begun writes to a slot any more. Raises nothing for copies
        that failed: these have ended too."""
        for transfer in self.transfers:
            transfer.wait()

    def landed(self) -> None:
        """The copies of a snapshot have ended."""
        for transfer in self.transfers:
            transfer.landed()

    def gate(self) -> None:
        for transfer in self.transfers:
            transfer.gate()

    def changed_constants(self, table: Addresses) -> list[int]:
        """Those whose digests in a slot's table are not those that the region was sealed with."""
        first = self.plan.first_constant
        return [first + int(i) for i in np.flatnonzero(table[first:] != self._held)]

    def _find_feeders(self, host: Iterable[int]) -> None:
        """Devices that write leaves in host memory: these are read after the kernels of the boundary."""
        for device in self._choice.feeders(self.plan.tensors[i] for i in host):
            self._feeders.setdefault(id(device), (device, device.new_mark()))

    def _transfer(self, device: Device, ways: Ways, holes: frozenset[int]) -> DeviceCopies:
        indexes = [i for i, owner in enumerate(self._devices) if owner is device]
        synchronised = [i for i in indexes if ways.synchronised(self.plan.leaves[i].name)]
        return DeviceCopies(device, self.plan, indexes, self.ways, synchronised, holes)


def _distinct(devices: Sequence[Device | None]) -> list[Device]:
    return list({id(device): device for device in devices if device is not None}.values())
