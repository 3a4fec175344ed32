"""Constants: the leaves that never change, and the region that holds their bytes once for all slots.

A constant is a parameter that requires no gradient, is in no optimizer, has 1 MiB or more, and has the same
digest at the first captured boundary as before the first iteration (after a resume: as in the snapshot). This
is decided once, before the first slots are requested. Each capture digests all constants: one that differs
becomes an ordinary leaf permanently, and the region continues to hold the others. Owns this decision. Never
copies a leaf.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flashckpt.capture.devices import Device, digest_tensors
from flashckpt.capture.plan import ConstantsRegion, is_plain, local
from flashckpt.format.layout import Layout, Leaf, SlotImage
from flashckpt.format.metadata import geometry, plan_bytes
from flashckpt.memory.region import SlotSize
from flashckpt.state.tensors import leaf_of

if TYPE_CHECKING:
    from flashckpt.state.leaves import LiveLeaf

log = logging.getLogger(__name__)

LEAST_BYTES = 1 << 20
# The values of a region, which holds only tensors.
NO_VALUES = b"{}"


def region_size(layout: Layout) -> SlotSize:
    """Return the size of a region for these constants."""
    places = geometry(len(plan_bytes(SlotImage(layout))), len(layout.leaves), len(NO_VALUES))
    return SlotSize(places.num_bytes, layout.num_bytes)


class ConstantsChanged(Exception):
    """Leaves (by index in the plan) differ from their bytes in the region: new snapshots must not refer to it
    for them. The region is not overwritten, since older snapshots refer to it."""

    def __init__(self, indexes: Sequence[int]) -> None:
        super().__init__(f"{len(indexes)} constants have changed")
        self.indexes = tuple(indexes)


class Constants:
    """The constants of a state.

    devices: the devices that captures read.
    known: name -> digest in the snapshot from which the state was restored; were: the names of its constants.
    region: the sealed region; at first the one of that snapshot. None before a new one is sealed, and once no
        leaf of it is constant any more.
    names: name -> whether the leaf is still constant, of all leaves that ever were. Independent of the
        region, so that ranks with the same leaves have the same names.
    """

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
        self._before, self._former_names, self.region = dict(known), frozenset(were), region
        self._planned: ConstantsRegion | None = None
        self._region_before: ConstantsRegion | None = None
        self._is_decided = False
        self._ordinary: set[str] = set()
        self.names: dict[str, bool] = {}

    # ---- the decision

    def digest_candidates(self, leaves: Callable[[], Sequence[LiveLeaf]]) -> None:
        """Digest the leaves that may be constants, before the first iteration, unless the resumed snapshot
        has their digests."""
        if not self._is_decided and not self._before:
            self._before = self._read(self._candidates(leaves()))

    def decide(self, leaves: Sequence[LiveLeaf]) -> None:
        """Decide once, at the first captured boundary, which leaves are constants."""
        if self._is_decided:
            return
        self._is_decided = True
        candidates = self._candidates(leaves)
        now = self._read(candidates)
        before = {name: self._before.get(name, digest) for name, digest in now.items()}
        were = self._former_names & now.keys()
        if were and all(now[name] != before[name] for name in were):
            log.warning(
                "all constants (%d parameters) differ from the restored ones: weights were loaded after "
                "attach. The constants are determined again; load weights before attach",
                len(were),
            )
            before.update((name, now[name]) for name in were)
        constants = [each for each in candidates if now[each.name] == before[each.name]]
        self.names = {each.name: True for each in constants}
        held = self.region.by_name() if self.region is not None else {}
        if all(self._is_held(each, held) and held[each.name][1] == now[each.name] for each in constants):
            self._ordinary.update(held.keys() - {each.name for each in constants})
            return  # the region has every constant
        self._region_before, self.region = self.region, None
        layout = Layout.of(_leaf(each) for each in constants)
        self._planned = ConstantsRegion("", 0, layout, tuple(now[leaf.name] for leaf in layout.leaves))

    @property
    def planned(self) -> Layout | None:
        """The layout of a region to create. None if there is one already, or no constant."""
        return None if self._planned is None else self._planned.layout

    def to_copy(self, leaves: Sequence[LiveLeaf]) -> frozenset[str]:
        """Return the names of the constants for a new region that still fit its layout."""
        planned = self._planned.by_name() if self._planned is not None else {}
        return frozenset(each.name for each in leaves if self._is_held(each, planned))

    def filled(self, region: ConstantsRegion) -> None:
        """Use a sealed region. A leaf whose digest there differs from the decided one becomes an ordinary
        leaf."""
        assert self._planned is not None
        planned, self._planned, self.region = self._planned.by_name(), None, region
        for name, (_, digest) in region.by_name().items():
            if planned[name][1] != digest:
                self.changed(name)

    def keep_region(self) -> bool:
        """Continue with the former region for the constants in it, because there is no memory for a new one.
        Return False if there is no former region."""
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
        """Use no region: all leaves are ordinary."""
        self._planned = self.region = None

    def changed(self, name: str) -> None:
        """Make a leaf ordinary permanently."""
        if name not in self._ordinary:
            log.info("%s has changed: it is copied into the slots from now on", name)
        self._ordinary.add(name)
        if name in self.names:
            self.names[name] = False

    def parts(self, leaves: Sequence[LiveLeaf]) -> tuple[ConstantsRegion | None, frozenset[str]]:
        """Return the region, sealed or planned, for a plan of these leaves, and the names of the leaves that
        it holds for the plan."""
        region = self.region or self._planned
        if region is None:
            return None, frozenset()
        held = region.by_name()
        used = frozenset(each.name for each in leaves if self._is_held(each, held))
        there = {name for each in leaves for name in (each.name, *each.aliases)}
        if used and held.keys() <= there:
            return region, used
        if used:
            # A snapshot must not contain a leaf that was removed from the state.
            log.info(
                "a constant was removed from the state: the others are copied into each slot from now on"
            )
        self.give_up()
        return None, frozenset()

    # ---- candidates

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
        """Whether a capture digests a leaf in place."""
        here = local(tensor)
        is_reached = here.device.type == "cpu" or any(device.owns(here) for device in self._devices)
        return is_plain(here) and is_reached

    def _read(self, lives: Sequence[LiveLeaf]) -> dict[str, int]:
        found = digest_tensors([each.tensor for each in lives], self._threads)
        return {each.name: digest for each, digest in zip(lives, found, strict=True)}


def parameters_of(optimizers: Iterable[Any]) -> set[int]:
    """Return the ids of the parameters of these optimizers."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {id(parameter) for group in groups for parameter in group["params"]}


def _is_frozen(live: LiveLeaf) -> bool:
    # `held`, because a DTensor's local tensor never requires a gradient.
    is_parameter = live.kind == "parameter" and not live.held.requires_grad
    return is_parameter and _num_bytes(live) >= LEAST_BYTES


def _num_bytes(live: LiveLeaf) -> int:
    return local(live.tensor).nbytes


def _leaf(live: LiveLeaf) -> Leaf:
    return leaf_of(live.name, local(live.tensor), tuple(live.aliases), live.box)
