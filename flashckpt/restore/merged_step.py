"""A committed step put together for a rank of another layout: more ranks or fewer, another mesh, one process.

Owns the order: records, merging, comparison with the live state, and only then memory and bytes. The snapshot
it gives is like one that this rank had made itself, in memory of this process's own. Imported where there is
such a step.
"""

from __future__ import annotations

import logging
from array import array
from typing import Any

from flashckpt import _native
from flashckpt.commit.steps import StepRecord
from flashckpt.format.layout import Layout, SlotImage
from flashckpt.memory.control_page import round_up
from flashckpt.restore.box_gathering import Gathering
from flashckpt.restore.filling import check_values
from flashckpt.restore.imported import MARK, bound, is_imported
from flashckpt.restore.merged_state import MergedState
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_image import StepImage, private_memory
from flashckpt.restore.step_ranks import StepRanks
from flashckpt.restore.step_reading import StepReading
from flashckpt.state.leaves import Saved
from flashckpt.state.loader.other_ranks import goes_by_others, merged_progress, merged_rng
from flashckpt.state.tree import Tree

log = logging.getLogger(__name__)


def begin_for_layout(tree: Tree, record: StepRecord, rank: int, world: int, threads: int) -> StepReading:
    """What `rank` of `world` takes of a step, for the live state as it is built: compared with that, and all
    of its bytes left to be read. Changes nothing.

    Raises MismatchError where the step is of another model, or does not go together; OutOfRoomError, and
    DamagedError or OSError where its records cannot be read.
    """
    if is_imported(record):
        record = bound(tree, record)
    ranks = StepRanks(record, rank, world)
    merged = MergedState(tree, tree.found(), ranks, rank, world)
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
    own, old_world = merged.source.values, ranks.record.world
    if rank >= old_world or goes_by_others(own["progress"]):
        ranks.read_apart()
    known = {each: merged.saved(each).values for each in ranks.known}
    progress = {each: values["progress"] for each, values in known.items()}
    if rank >= old_world and MARK not in own:
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
        "rng": merged_rng({each: values["rng"] for each, values in known.items()}, rank, old_world),
    }


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
