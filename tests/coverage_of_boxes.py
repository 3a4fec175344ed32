"""Whether the boxes that ranks hold of their tensors are whole tensors: no two say another shape or dtype, no
two overlap, and none leaves a hole.

Pure: it is asked with the leaves of all ranks that are at hand. Its time and memory grow with the number of
boxes, and not with its square. On the same layout nobody has to ask it; a load for another one asks it of the
leaves that it reads.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from flashckpt.format.layout import Leaf

_SHOWN = 4
_Range = tuple[int, int]
_Ranges = tuple[_Range, ...]


def check_coverage(by_rank: Mapping[int, Iterable[Leaf]]) -> list[str]:
    """What is wrong with the leaves of these ranks, a line each with name and ranks; nothing where all are
    whole.

    A leaf of which no rank has a box is each rank's own: nothing is asked of it. Replicas, the same box on
    several ranks, are no overlap."""
    boxed: set[str] = set()
    held: dict[str, list[tuple[int, Leaf]]] = defaultdict(list)
    for rank, leaves in by_rank.items():
        for leaf in leaves:
            held[leaf.name].append((rank, leaf))
            if leaf.box is not None:
                boxed.add(leaf.name)
    return [problem for name in sorted(boxed) for problem in _problems(name, held[name])]


def _problems(name: str, held: Sequence[tuple[int, Leaf]]) -> list[str]:
    kinds: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    boxes: dict[_Ranges, list[int]] = defaultdict(list)
    for rank, leaf in held:
        whole = leaf.shape if leaf.box is None else leaf.box.shape
        start = (0,) * len(whole) if leaf.box is None else leaf.box.start
        kinds[leaf.dtype, whole].append(rank)
        box = tuple((first, first + size) for first, size in zip(start, leaf.shape, strict=True))
        if all(first < stop for first, stop in box):
            boxes[box].append(rank)
    if len(kinds) > 1:
        sides = [f"{dtype} {shape} on {_ranks(ranks)}" for (dtype, shape), ranks in kinds.items()]
        return [f"{name} is {', '.join(sides[:_SHOWN])}"]
    [(_, shape)] = kinds
    if not boxes or _tile(boxes, shape):
        return []
    return _overlaps(name, boxes) or [f"{name} has holes: {_missing(boxes, shape, held)}"]


def _tile(boxes: Iterable[_Ranges], shape: tuple[int, ...]) -> bool:
    """Whether boxes, no two of them the same, are a whole tensor. A box is the sum of the orthants at its
    corners, with the sign of each; orthants are independent of each other: so the boxes are the whole exactly
    if what is left at each corner is what the whole has there."""
    left: Counter[tuple[int, ...]] = Counter()
    whole = tuple((0, size) for size in shape)
    # A dimension that every box has all of says nothing.
    split = [d for d, full in enumerate(whole) if any(box[d] != full for box in boxes)]
    signs = list(product((0, 1), repeat=len(split)))
    for sides in signs:
        sign = -1 if sum(sides) % 2 else 1
        chosen = list(zip(split, sides, strict=True))
        for box in boxes:
            left[tuple(box[d][side] for d, side in chosen)] += sign
        left[tuple(whole[d][side] for d, side in chosen)] -= sign
    return not any(left.values())


def _overlaps(name: str, boxes: Mapping[_Ranges, Sequence[int]]) -> list[str]:
    """The first two of these that have an element in common."""
    ordered = sorted(boxes)
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other[0][0] >= one[0][1]:
                break
            if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(one, other, strict=True)):
                who = f"{_box(one)} on {_ranks(boxes[one])} and {_box(other)} on {_ranks(boxes[other])}"
                return [f"{name} has boxes that overlap: {who}"]
    return []


def _missing(
    boxes: Mapping[_Ranges, Sequence[int]], shape: tuple[int, ...], held: Sequence[tuple[int, Leaf]]
) -> str:
    count, whole = 0, 1
    for box in boxes:
        size = 1
        for first, stop in box:
            size *= stop - first
        count += size
    for size in shape:
        whole *= size
    return f"{count:,} of its {whole:,} elements are on {_ranks([rank for rank, _ in held])}"


def _box(ranges: _Ranges) -> str:
    return "[" + ", ".join(f"{first}:{stop}" for first, stop in ranges) + "]"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
