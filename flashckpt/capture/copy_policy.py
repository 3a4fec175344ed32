"""The ways to copy a leaf, and which each leaf is copied by. Owns which leaves were torn, by name.

Learned things outlive plans, since a leaf that was torn once is not tried again. Copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from torch import Tensor

from flashckpt.capture.constants import Constants
from flashckpt.capture.devices import Device
from flashckpt.capture.plan import Plan
from flashckpt.events import log

SMALL_BYTES = 1 << 20


class Way(str, Enum):
    """How a leaf's bytes get from where it lives into a slot. See docs/capture.md."""

    HOST = "host"
    CLONE = "clone"
    GATE = "gate"
    WAIT = "wait"
    CONSTANT = "constant"


# A leaf found torn by a way is copied by this one from then on. WAIT has none: whatever way it came from, a
# torn leaf of a device is a synchronised one from then on: the host waits for the whole device before the
# copy and until it has ended, and what is torn even so is refused, every time. HOST has none either: nothing
# holds back a thread that writes, so the source is checked in every capture from then on.
SAFER = {
    Way.CONSTANT: Way.WAIT,
    Way.CLONE: Way.WAIT,
    Way.GATE: Way.WAIT,
    Way.WAIT: Way.WAIT,
    Way.HOST: Way.HOST,
}


class CopyPolicy:
    """The choice for every leaf of a plan. optimizers are torch's own, already unwrapped; one of the
    `constants` that is torn is none any more."""

    def __init__(self, optimizers: Sequence[Any], devices: Sequence[Device], constants: Constants) -> None:
        self._optimizers, self._devices, self._constants = optimizers, devices, constants
        self._torn: dict[str, Way] = {}
        self._suspects: set[str] = set()

    def device_of(self, plan: Plan) -> list[Device | None]:
        """The device of each leaf, None for host memory. A leaf without bytes needs no device."""
        found: list[Device | None] = []
        for tensor, size in zip(plan.tensors, plan.sizes.tolist(), strict=True):
            owner = next((device for device in self._devices if device.owns(tensor)), None)
            found.append(owner if size else None)
        return found

    def feeders(self, tensors: Iterable[Tensor]) -> list[Device]:
        """Devices whose streams write some of these tensors, that are in host memory."""
        found: list[Device] = []
        for tensor in tensors if self._devices else ():
            found += [device for device in self._devices if device not in found and device.feeds(tensor)]
        return found

    def choose(
        self,
        plan: Plan,
        devices: Sequence[Device | None],
        fired: frozenset[int],
        room: Mapping[str, int],
    ) -> list[Way]:
        """One way a leaf. fired: identities of optimizers whose hooks were seen; room: bytes that an arena
        may take, by device name. Leaves that no gate protects get the room first."""
        gated = self._gated(plan, fired)
        ways: list[Way | None] = [self._fixed(plan, i, devices[i]) for i in range(len(plan.leaves))]
        left = dict(room)
        for protected in (False, True):
            for i, device in enumerate(devices):
                if ways[i] is None and device is not None and (i in gated) == protected:
                    ways[i] = self._by_room(plan, i, device, left, protected)
        return [way or Way.HOST for way in ways]

    def tear(self, name: str, way: Way) -> bool:
        """The leaf was found torn: the next safer way from now on, for good. False if it is in use."""
        if way is Way.HOST:
            return self._tear_host(name)
        if self.synchronised(name):
            return False
        self._torn[name] = SAFER[way]
        self._constants.changed(name)
        log.warning(
            "%s was written while it was copied (way: %s). That snapshot was discarded; the state is not "
            "touched. From now on it is copied by the way %s, and the loop waits for the whole device before "
            "that copy and until it has ended: name the stream that writes it in Options(streams=…).",
            name, way.value, SAFER[way].value,
        )  # fmt: skip
        return True

    def _tear_host(self, name: str) -> bool:
        if name in self._suspects:
            return False
        self._suspects.add(name)
        log.warning(
            "%s, in host memory, was written while it was copied. That snapshot was discarded; the state is "
            "not touched. From now on it is checked in every snapshot, and those that it tears are not kept: "
            "let whatever writes it end before the boundary.", name,
        )  # fmt: skip
        return True

    def suspect(self, name: str) -> bool:
        """Whether this leaf in host memory was torn before."""
        return name in self._suspects

    def synchronised(self, name: str) -> bool:
        """Whether this leaf was torn on the device: then the host waits for the whole device before it is
        copied, and for the copy."""
        return self._torn.get(name) is Way.WAIT

    def _fixed(self, plan: Plan, index: int, device: Device | None) -> Way | None:
        name = plan.leaves[index].name
        if index >= plan.first_constant:
            return Way.CONSTANT
        if device is None:
            return Way.HOST
        if name in self._torn:
            return self._torn[name]
        return Way.CLONE if plan.sizes[index] < SMALL_BYTES or index in plan.odd else None

    def _by_room(self, plan: Plan, index: int, device: Device, left: dict[str, int], gated: bool) -> Way:
        size = int(plan.sizes[index])
        if not device.in_one_launch:
            return Way.WAIT
        if left.get(device.name, 0) >= size:
            left[device.name] -= size
            return Way.CLONE
        return Way.GATE if gated else Way.WAIT

    def _gated(self, plan: Plan, fired: frozenset[int]) -> set[int]:
        owned = self._owners()
        return {
            i
            for i, live in enumerate(plan.lives)
            if (live.kind == "optimizer" and id(live.owner) in fired)
            or (live.kind == "parameter" and owned.get(id(live.tensor)) in fired)
        }

    def _owners(self) -> dict[int, int]:
        """Optimizer of each parameter, by identities; a parameter is looked up by the state's own object."""
        return {
            id(parameter): id(optimizer)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }


def describe(plan: Plan, ways: Iterable[Way]) -> list[tuple[str, int, int]]:
    """Rows (way, leaves, bytes) for a table, in the order of the design."""
    totals: dict[Way, tuple[int, int]] = {}
    rows = zip(ways, plan.sizes.tolist(), strict=True)
    for way, size in (row for index, row in enumerate(rows) if index not in plan.outdated):
        count, num_bytes = totals.get(way, (0, 0))
        totals[way] = (count + 1, num_bytes + size)
    return [(way.value, *totals[way]) for way in Way if way in totals]
