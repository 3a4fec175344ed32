"""The ways to copy a leaf, and which each leaf is copied by. Owns which leaves were torn, by name.

Learned things outlive plans, since a leaf that was torn once is not tried again. Copies nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flashckpt.capture.constants import Constants, parameters_of
from flashckpt.capture.devices import Device
from flashckpt.capture.plan import Plan
from flashckpt.state.tensors import is_sharded

if TYPE_CHECKING:
    from flashckpt.state.leaves import LiveLeaf

log = logging.getLogger(__name__)

SMALL_BYTES = 1 << 20


class Way(str, Enum):
    """How a leaf's bytes get from where it lives into a slot. See docs/capture.md."""

    HOST = "host"
    CLONE = "clone"
    GATE = "gate"
    WAIT = "wait"
    LEFT = "left"
    """Digested and not copied: another rank of the node has its bytes."""
    CONSTANT = "constant"


class CopyPolicy:
    """The choice for every leaf of a plan. optimizers are torch's own, already unwrapped; one of the
    `constants` that is torn is none any more.

    `torn` names the leaves that were found torn, for good. On a device such a leaf goes by the way `wait`,
    and the host waits for the whole device before its copy and until that has ended. In host memory nothing
    holds back a thread that writes, so its source is checked in every capture. What is torn even so is
    refused, every time."""

    def __init__(self, optimizers: Sequence[Any], constants: Constants) -> None:
        self._optimizers, self._constants = optimizers, constants
        self.torn: set[str] = set()

    def choose(
        self,
        plan: Plan,
        owners: Sequence[Device | None],
        fired: frozenset[int],
        room: Mapping[str, int],
    ) -> list[Way]:
        """One way a leaf. owners: the device of each, None for host memory; fired: identities of optimizers
        whose hooks were seen; room: bytes that an arena may take, by device name. Leaves that no gate
        protects get the room first."""
        gated = self._gated(plan, fired)
        ways = [self._fixed(plan, i, owner) for i, owner in enumerate(owners)]
        left = dict(room)
        for protected in (False, True):
            for i, owner in enumerate(owners):
                if ways[i] is None and owner is not None and (i in gated) == protected:
                    ways[i] = _by_room(int(plan.sizes[i]), owner, left, protected)
        return [way or Way.HOST for way in ways]

    def tear(self, name: str, way: Way) -> bool:
        """The leaf was found torn: a safer way from now on. False where there is none."""
        if name in self.torn:
            return False
        self.torn.add(name)
        if way is Way.HOST:
            log.warning(
                "%s, in host memory, was written while it was copied. That snapshot was discarded; the state "
                "is not touched. From now on it is checked in every snapshot, and those that it tears are "
                "not kept: let whatever writes it end before the boundary.", name,
            )  # fmt: skip
            return True
        self._constants.changed(name)
        log.warning(
            "%s was written while it was copied (way: %s). That snapshot was discarded; the state is not "
            "touched. From now on it is copied by the way %s, and the loop waits for the whole device before "
            "that copy and until it has ended: name the stream that writes it in Options(streams=…).",
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
        """Leaves that only an optimizer writes whose hooks fire."""
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
    """What an optimizer has where it has this leaf: the tensor, or the DTensor of which it is the part that
    is here. Of any other tensor made of tensors a forward pass may write parts, scales say."""
    is_local = live.container is live.wrapper is not None and is_sharded(live.wrapper)
    return live.held if is_local else live.tensor


def _by_room(num_bytes: int, device: Device, left: dict[str, int], gated: bool) -> Way:
    if not device.in_one_launch:
        return Way.WAIT
    if left.get(device.name, 0) >= num_bytes:
        left[device.name] -= num_bytes
        return Way.CLONE
    return Way.GATE if gated else Way.WAIT


def describe(plan: Plan, ways: Iterable[Way]) -> list[tuple[str, int, int]]:
    """Rows (way, leaves, bytes) for a table, in the order of the design."""
    sizes: dict[Way, list[int]] = {way: [] for way in Way}
    for index, (way, size) in enumerate(zip(ways, plan.sizes.tolist(), strict=True)):
        if index not in plan.outdated:
            sizes[way].append(size)
    return [(way.value, len(found), sum(found)) for way, found in sizes.items() if found]
