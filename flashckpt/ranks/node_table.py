"""Whether the ranks of a node have the same table of what they divide in its memory: a few numbers of each
snapshot say so, and in which group of leaves they differ.

Reads what a rank has sealed in its own slots; touches no leaf's bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flashckpt._native import xxh3_64
from flashckpt.capture.division import GROUPS, group_of
from flashckpt.format.checked_json import compact
from flashckpt.memory.slot import Sealed
from flashckpt.ranks.board import Table

_DIGEST_BYTES = 8


class NodeTable:
    """Of one rank. What a plan divides is read once a plan: the metadata of ten thousand leaves takes longer
    than a short step."""

    def __init__(self) -> None:
        self._plan_id: int | None = None
        self._ground, self._indexes = 0, dict[int, NDArray[np.int64]]()

    def table(self, sealed: Sealed) -> Table:
        """Of a rank's own snapshot. Raises DamagedError. Means nothing of a slot that is written again
        meanwhile."""
        record = sealed.record
        if record.plan_id != self._plan_id:
            self._learn(sealed)
        if not self._indexes:
            return Table(step=sealed.step)
        start = record.metadata_bytes - record.values_bytes - _DIGEST_BYTES * record.table_count
        table = sealed.slot.metadata_view[start : start + _DIGEST_BYTES * record.table_count]
        digests: NDArray[np.uint64] = np.frombuffer(table, dtype=np.uint64)
        groups = [0] * GROUPS
        for group, indexes in self._indexes.items():
            groups[group] = xxh3_64(digests[indexes].tobytes()) or 1
        return Table(self._ground, tuple(groups), sealed.step)

    def _learn(self, sealed: Sealed) -> None:
        metadata = sealed.slot.metadata(sealed)
        divided, leaves = metadata.divided(), metadata.leaves
        said = [[repr(leaves[index].content), holder] for index, holder in divided]
        self._ground = xxh3_64(compact(said)) or 1
        by_group: dict[int, list[int]] = {}
        for index, _ in divided:
            by_group.setdefault(group_of(leaves[index].name), []).append(index)
        self._indexes = {group: np.array(each, dtype=np.int64) for group, each in by_group.items()}
        self._plan_id = sealed.record.plan_id
