"""Whether the slices that ranks hold of small tensors are the whole tensors."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from flashckpt.format.layout import Leaf


def check_coverage(by_rank: Mapping[int, Iterable[Leaf]]) -> list[str]:
    """Name the tensors that ranks hold with different dtypes or shapes, or whose slices overlap or leave
    holes. Replicas, the same slice on several ranks, do not overlap. A tensor of which no rank holds a slice
    is each rank's own."""
    held: dict[str, list[Leaf]] = defaultdict(list)
    for leaf in (leaf for leaves in by_rank.values() for leaf in leaves):
        held[leaf.name].append(leaf)
    return [
        name
        for name, leaves in sorted(held.items())
        if any(leaf.box is not None for leaf in leaves) and not _are_whole(leaves)
    ]


def _are_whole(leaves: list[Leaf]) -> bool:
    kinds = {(leaf.dtype, leaf.shape if leaf.box is None else leaf.box.shape) for leaf in leaves}
    if len(kinds) > 1:
        return False
    [(_, whole)] = kinds
    starts = [(0,) * len(leaf.shape) if leaf.box is None else leaf.box.start for leaf in leaves]
    count = np.zeros(whole, dtype=int)
    for start, shape in {(start, leaf.shape) for start, leaf in zip(starts, leaves, strict=True)}:
        count[tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))] += 1
    return bool((count == 1).all())
