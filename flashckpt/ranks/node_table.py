"""Whether the ranks of a node have the same table of what they divide in its memory: one number of each
snapshot says so.

Reads what a rank has sealed in its own slots; touches no leaf's bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flashckpt._native import xxh3_64
from flashckpt.format.checked_json import compact
from flashckpt.memory.slot import Sealed

_DIGEST_BYTES = 8


class NodeTable:
    """Of one rank. What a plan divides is read once a plan: the metadata of ten thousand leaves takes longer
    than a short step."""

    def __init__(self) -> None:
        self._plan_id: int | None = None
        self._said, self._indexes = b"", np.empty(0, dtype=np.int64)

    def number(self, sealed: Sealed) -> int:
        """0 where nothing is divided; else the same number on two ranks if names, forms, holders and digests
        of what they divide are the same. Raises DamagedError. Means nothing of a slot that is written again
        meanwhile."""
        record = sealed.record
        if record.plan_id != self._plan_id:
            self._learn(sealed)
        if not len(self._indexes):
            return 0
        start = record.metadata_bytes - record.values_bytes - _DIGEST_BYTES * record.table_count
        table = sealed.slot.metadata_view[start : start + _DIGEST_BYTES * record.table_count]
        digests: NDArray[np.uint64] = np.frombuffer(table, dtype=np.uint64)[self._indexes]
        return xxh3_64(self._said + digests.tobytes()) or 1

    def _learn(self, sealed: Sealed) -> None:
        metadata = sealed.slot.metadata(sealed)
        divided, leaves = metadata.divided(), metadata.leaves
        said = [[repr(leaves[index].content), holder] for index, holder in divided]
        self._said = compact(said)
        self._indexes = np.array([index for index, _ in divided], dtype=np.int64)
        self._plan_id = sealed.record.plan_id
