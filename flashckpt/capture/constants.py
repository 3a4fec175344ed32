"""Constants: which leaves never change, and the region that holds their bytes once, for all slots.

A constant is a parameter that requires no gradient, is in no optimizer, has a MiB at least, and whose digest
at the first boundary that is captured equals that before the first iteration (after a resume: that in the
snapshot). Decided once, before the first slots are asked for. Each capture digests all of them: one that
differs is an ordinary leaf for good, and the region goes on for the others. Owns that decision; copies
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flashckpt.capture.devices import Device
from flashckpt.capture.digests import digest_tensors
from flashckpt.capture.plan import ConstantsRegion, is_plain, local
from flashckpt.format.layout import Layout, Leaf
from flashckpt.format.metadata import geometry, plan_bytes
from flashckpt.memory.control_page import SlotSize
from flashckpt.state.tensors import leaf_of

if TYPE_CHECKING:
    from flashckpt.state.leaves import LiveLeaf

log = logging.getLogger(__name__)

LEAST_BYTES = 1 << 20
# What a region has in the place of what is not a tensor.
NO_VALUES = b"{}"


def region_size(layout: Layout) -> SlotSize:
    """What a region for these constants has to have room for."""
    places = geometry(len(plan_bytes(layout)), len(layout.leaves), len(NO_VALUES))
    return SlotSize(places.num_bytes, layout.num_bytes)


class ConstantsChanged(Exception):
    """Leaves (by index in the plan) that the region holds are not what they were: nothing may name it for
    them, and what stands in it is not overwritten, since older snapshots do."""

    def __init__(self, indexes: Sequence[int]) -> None:
        super().__init__(f"{len(indexes)} constants have changed")
        self.indexes = tuple(indexes)


class Constants:
    """`known` are the digests, by name, of the snapshot that the state was restored from, `were` names its
    constants, `region` is the one that it names. `devices` are those that a capture reaches. `region` is None
    until it is sealed, and once nothing of it is constant any more. `names` are those of all that were
    found to be constant, and whether they still are: also where there is no region for them, so that ranks
    which hold them alike have the same names."""

    def __init__(
        self,
        optimizers: Sequence[Any],
        devices: Sequence[Device],
        threads: int,
        known: Mapping[str, int],
        were: Collection[str],
        region: ConstantsRegion | None,
    ) -> None:
        self._optimizers, self._devices, self._threads = optimizers, devices, threads
        self._before, self._were, self.region = dict(known), frozenset(were), region
        self._planned: ConstantsRegion | None = None
        self._region_before: ConstantsRegion | None = None
        self._is_decided = False
        self._ordinary: set[str] = set()
        self.names: dict[str, bool] = {}

    # ---- the decision

    def look(self, leaves: Callable[[], Sequence[LiveLeaf]]) -> None:
        """Before the first iteration: read what may be constant, unless a resume knows what it was."""
        if not self._is_decided and not self._before:
            self._before = self._read(self._candidates(leaves()))

    def decide(self, leaves: Sequence[LiveLeaf]) -> None:
        """At the first boundary that is captured. Done once."""
        if self._is_decided:
            return
        self._is_decided = True
        candidates = self._candidates(leaves)
        now = self._read(candidates)
        before = {name: self._before.get(name, digest) for name, digest in now.items()}
        were = self._were & now.keys()
        if were and all(now[name] != before[name] for name in were):
            log.warning(
                "nothing of what never changed (%d parameters) is what was restored: weights were loaded "
                "after attach. What is constant is decided anew; load weights before attach",
                len(were),
            )
            before.update((name, now[name]) for name in were)
        constants = [each for each in candidates if now[each.name] == before[each.name]]
        self.names = {each.name: True for each in constants}
        self._tell_others(leaves)
        held = self.region.by_name() if self.region is not None else {}
        if all(self._is_held(each, held) and held[each.name][1] == now[each.name] for each in constants):
            self._ordinary.update(held.keys() - {each.name for each in constants})
            return  # the region has all of them, or there are none
        self._region_before, self.region = self.region, None
        layout = Layout.of(_leaf(each) for each in constants)
        self._planned = ConstantsRegion("", 0, layout, tuple(now[leaf.name] for leaf in layout.leaves))

    @property
    def planned(self) -> Layout | None:
        """What a region is to be made for. None where there is one, or nothing to be left to it."""
        return None if self._planned is None else self._planned.layout

    def to_copy(self, leaves: Sequence[LiveLeaf]) -> frozenset[str]:
        """Names of what a region is made for, as far as it is as it was decided."""
        planned = self._planned.by_name() if self._planned is not None else {}
        return frozenset(each.name for each in leaves if self._is_held(each, planned))

    def filled(self, region: ConstantsRegion) -> None:
        """The region is sealed. What it holds is what a constant is from now on; one that has changed since
        it was decided is none."""
        assert self._planned is not None
        planned, self._planned, self.region = self._planned.by_name(), None, region
        for name, (_, digest) in region.by_name().items():
            if planned[name][1] != digest:
                self.changed(name)

    def keep_region(self) -> bool:
        """There is no memory for what was decided: the region of before goes on, for what it holds. False
        where there is none."""
        planned, before = self._planned, self._region_before
        if planned is None or before is None:
            return False
        wanted, held = planned.by_name(), before.by_name()
        self._ordinary.update(
            name for name, (_, digest) in held.items() if name not in wanted or wanted[name][1] != digest
        )
        self._planned, self._region_before, self.region = None, None, before
        return True

    def give_up(self) -> None:
        """There will be no region: all are ordinary leaves."""
        self._planned = self.region = None

    def changed(self, name: str) -> None:
        """This one is an ordinary leaf for good."""
        if name not in self._ordinary:
            log.info("%s has changed: it is copied into the slots from now on", name)
        self._ordinary.add(name)
        if name in self.names:
            self.names[name] = False

    def parts(self, leaves: Sequence[LiveLeaf]) -> tuple[ConstantsRegion | None, frozenset[str]]:
        """The region that a plan of these leaves names, or will, and the names of those it leaves to it."""
        region = self.region or self._planned
        if region is None:
            return None, frozenset()
        held = region.by_name()
        used = frozenset(each.name for each in leaves if self._is_held(each, held))
        there = {name for each in leaves for name in (each.name, *each.aliases)}
        if used and held.keys() <= there:
            return region, used
        if used:
            # No snapshot may have a leaf that is no part of the state any more.
            log.info(
                "a parameter is gone that never changed: the others are copied into each slot from now on"
            )
        self.give_up()
        return None, frozenset()

    # ---- what it goes by

    def _is_held(self, live: LiveLeaf, held: Mapping[str, tuple[Leaf, int]]) -> bool:
        found = held.get(live.name)
        if found is None or live.name in self._ordinary or not self._is_read_in_place(live.tensor):
            return False
        leaf, here = found[0], _leaf(live)
        wanted = (leaf.dtype, leaf.shape, leaf.stride, leaf.aliases, leaf.box)
        return (here.dtype, here.shape, here.stride, here.aliases, here.box) == wanted

    def _candidates(self, leaves: Sequence[LiveLeaf]) -> list[LiveLeaf]:
        owned = parameters_of(self._optimizers)
        return [
            each
            for each in leaves
            if _is_frozen(each) and id(each.held) not in owned and self._is_read_in_place(each.tensor)
        ]

    def _is_read_in_place(self, tensor: Tensor) -> bool:
        """Whether a capture digests a leaf where it lies."""
        here = local(tensor)
        is_reached = here.device.type == "cpu" or any(device.owns(here) for device in self._devices)
        return is_plain(here) and is_reached

    def _read(self, lives: Sequence[LiveLeaf]) -> dict[str, int]:
        found = digest_tensors([each.tensor for each in lives], self._threads)
        return {each.name: digest for each, digest in zip(lives, found, strict=True)}

    def _tell_others(self, leaves: Sequence[LiveLeaf]) -> None:
        """What never changes, as it seems, and stands in each slot all the same."""
        owned = parameters_of(self._optimizers)
        frozen = [each for each in leaves if _is_frozen(each)]
        in_optimizer = [each for each in frozen if id(each.held) in owned]
        moved = [each for each in frozen if not self._is_read_in_place(each.tensor)]
        buffers = [each for each in leaves if each.kind == "buffer" and _num_bytes(each) >= LEAST_BYTES]
        for what, found in (
            ("frozen parameters that an optimizer has (give it those that are trained)", in_optimizer),
            ("frozen parameters whose bytes do not lie row by row (make them contiguous)", moved),
            ("buffers of a MiB and more, as quantized bases have them", buffers),
        ):
            if found:
                num_bytes = sum(map(_num_bytes, found))
                log.info("each slot has a copy of %s bytes of %s", f"{num_bytes:,}", what)


def parameters_of(optimizers: Iterable[Any]) -> set[int]:
    """Identities of the parameters that these optimizers have."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {id(parameter) for group in groups for parameter in group["params"]}


def _is_frozen(live: LiveLeaf) -> bool:
    # The part of a DTensor that is here requires no gradient itself.
    is_parameter = live.kind == "parameter" and not live.held.requires_grad
    return is_parameter and _num_bytes(live) >= LEAST_BYTES


def _num_bytes(live: LiveLeaf) -> int:
    return local(live.tensor).nbytes


def _leaf(live: LiveLeaf) -> Leaf:
    return leaf_of(live.name, local(live.tensor), tuple(live.aliases), live.box)
