"""A committed step for a rank of another layout: more ranks or fewer, another mesh, one process.

Owns the order: records, merging, comparison with the live state, and only then memory and bytes. The snapshot
it gives is like one that this rank had made itself, in memory of this process's own.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flashckpt import _native
from flashckpt.capture.plan import local
from flashckpt.commit.steps import StepRecord
from flashckpt.format.layout import Layout, Leaf, SlotImage
from flashckpt.memory.control_page import round_up
from flashckpt.restore.box_gathering import Gathering
from flashckpt.restore.filling import check_values
from flashckpt.restore.merged_state import MergedState
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_image import StepImage, private_memory
from flashckpt.restore.step_ranks import StepRanks
from flashckpt.restore.step_reading import StepReading
from flashckpt.state.leaves import LiveLeaf, Saved, Walk
from flashckpt.state.loader.other_ranks import merged_progress, merged_rng
from flashckpt.state.modules import ModuleEntry
from flashckpt.state.tree import Tree

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LiveLayout:
    """The live state as it is built on this rank, one of `world`."""

    tree: Tree
    rank: int
    world: int

    def is_of(self, world: int, leaves: Iterable[Leaf]) -> bool:
        """Whether what a rank of `world` ranks has, these leaves, is what this one needs."""
        if self.world != world or world == 1:
            return self.world == world
        leaves = list(leaves)
        saved = {name: leaf for leaf in leaves for name in (leaf.name, *leaf.aliases)}
        lives = (leaf for leaf in _walked(self.tree).leaves if leaf.kind in ("parameter", "buffer"))
        if any(_is_elsewhere(leaf, saved.get(leaf.name)) for leaf in lives):
            return False
        # A stage of a pipeline that has given modules to another one.
        return all(any(map(self._has_place, (leaf.name, *leaf.aliases))) for leaf in leaves)

    def _has_place(self, name: str) -> bool:
        """Whether the module that a leaf of this name belongs to is here; True of what is no module's own."""
        modules = [each for each in self.tree.entries.values() if isinstance(each, ModuleEntry)]
        owner = next((each for each in modules if name.startswith(f"{each.name}.")), None)
        return owner is None or name.rpartition(".")[0] in owner.modules

    def has(self, record: StepRecord) -> bool:
        """The same of what this rank has of a step."""
        if record.world != self.world:
            return False
        mine = record.rank(self.rank)
        return self.is_of(record.world, [leaf for _, leaf, _ in (*mine.counted(), *mine.elsewhere())])

    def begin(self, record: StepRecord, threads: int) -> StepReading:
        """See `begin_for_layout`."""
        return begin_for_layout(self.tree, record, self.rank, self.world, threads)


def _is_elsewhere(live: LiveLeaf, saved: Leaf | None) -> bool:
    if saved is None:
        return True
    here = tuple(local(live.tensor).shape)
    is_divided = saved.box is not None or live.box is not None
    # All of a parameter is here and was there, and is laid out in one dimension on one side alone (FSDP1).
    is_flat = (
        live.kind == "parameter" and len(here) != len(saved.shape) and 1 in (len(here), len(saved.shape))
    )
    return (is_divided or is_flat) and (saved.box, saved.shape) != (live.box, here)


def begin_for_layout(tree: Tree, record: StepRecord, rank: int, world: int, threads: int) -> StepReading:
    """What `rank` of `world` takes of a step, for the live state as it is built: compared with that, and all
    of its bytes left to be read. Changes nothing.

    Raises MismatchError where the step is of another model, or does not go together; OutOfRoomError, and
    DamagedError or OSError where its records cannot be read.
    """
    ranks = StepRanks(record, rank, world)
    merged = MergedState(tree, _walked(tree), ranks, rank, world)
    merged.merge()
    layout = Layout.of(taken.leaf for taken in merged.leaves)
    values = _values(merged, ranks, rank, world)
    saved = Saved({leaf.name: leaf for leaf in layout.leaves}, merged.value, _no_tensor)
    check_values(tree, saved, record.step)
    parts = {taken.leaf.name: taken.parts for taken in merged.leaves}
    memory = private_memory(record.step, [round_up(layout.num_bytes)])
    image = StepImage(record, ranks.source, [memoryview(each) for each in memory], memory)
    [into] = image.images
    into[: layout.data_start] = layout.header
    left = Gathering.of(layout, [parts[leaf.name] for leaf in layout.leaves])

    def made() -> Snapshot:
        log.info(
            "step %d of %d ranks was put together for rank %d of %d: %d leaves, %d bytes",
            record.step, record.world, rank, world, len(layout.leaves), layout.num_bytes,
        )  # fmt: skip
        return Snapshot(
            step=record.step,
            attempt=record.attempt,
            boundary=record.boundary,
            tier="local",
            layout=SlotImage(layout),
            digests=_digests(layout, into, threads),
            values=values,
            image=into,
            at_rest=image,
            untaken=merged.untaken(),
            elsewhere=merged.untaken(("module",)),
        )

    return StepReading(image, left, made)


def _values(merged: MergedState, ranks: StepRanks, rank: int, world: int) -> dict[str, Any]:
    known = {each: merged.saved(each).values for each in ranks.known}
    own = merged.source.values
    old_world = ranks.record.world
    progress = {each: values["progress"] for each, values in known.items()}
    if rank >= old_world:
        log.warning(
            "rank %d was not there when step %d was made, by %d ranks: its random numbers and what else is "
            "each rank's own are derived from those of rank %d. They are the same at each such start, and "
            "other than those of an uninterrupted run",
            rank, ranks.record.step, old_world, ranks.source,
        )  # fmt: skip
    return {
        **own,
        "state": merged.value,
        "progress": merged_progress(progress, rank, world, old_world),
        "rng": merged_rng({each: values["rng"] for each, values in known.items()}, rank),
    }


def _walked(tree: Tree) -> Walk:
    return tree.walk(lambda parameter, gradient: True)


def _no_tensor(name: str) -> Any:
    raise AssertionError(f"{name} is read before it is known to fit")


def _digests(layout: Layout, image: memoryview, threads: int) -> array[int]:
    digests = array("Q", bytes(8 * len(layout.leaves)))
    address = _native.address_of(image) + layout.data_start
    _native.digest_many(
        array("Q", [address + leaf.offset for leaf in layout.leaves]),
        array("Q", [leaf.num_bytes for leaf in layout.leaves]),
        _native.address_of(digests) if layout.leaves else 0,
        max(1, threads),
    )
    return digests
