"""Holes, overlaps and contradictions among the boxes of ranks are found and reported with their ranks."""

from __future__ import annotations

import random

import pytest

from flashckpt.format.layout import Box, Leaf
from tests.coverage_of_boxes import check_coverage


def leaf(shape: tuple[int, ...], ranges: list[tuple[int, int]] | None = None, dtype: str = "float32") -> Leaf:
    ranges = ranges if ranges is not None else [(0, size) for size in shape]
    stored = tuple(stop - start for start, stop in ranges)
    box = None if stored == shape else Box(shape=shape, start=tuple(start for start, _ in ranges))
    return Leaf(name="w", dtype=dtype, shape=stored, box=box)


def problems(*held: list[Leaf]) -> list[str]:
    return check_coverage(dict(enumerate(held)))


def test_whole_tensors_are_accepted() -> None:
    rows = [[leaf((5, 4), [(0, 3), (0, 4)])], [leaf((5, 4), [(3, 5), (0, 4)])]]
    assert problems(*rows) == []
    assert problems(*rows, *rows) == [], "replicas"
    assert problems(*rows, [leaf((5, 4), [(5, 5), (0, 4)])]) == [], "an empty shard"
    assert problems([leaf((1, 4))], [leaf((1, 4), [(1, 1), (0, 4)])]) == [], "one rank has all rows"
    assert problems([leaf((0, 4), [(0, 0), (0, 2)])], [leaf((0, 4), [(0, 0), (2, 4)])]) == []


def test_tensors_without_boxes_belong_to_each_rank() -> None:
    assert problems([leaf((3,))], [leaf((4,), dtype="int64")]) == []


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([[(0, 3), (0, 4)]], "w has holes: 12 of its 20 elements are on rank 0"),
        (
            [[(0, 3), (0, 4)], [(2, 5), (0, 4)]],
            "w has boxes that overlap: [0:3, 0:4] on rank 0 and [2:5, 0:4] on rank 1",
        ),
        (
            # As many elements as the whole tensor, one of them twice.
            [[(0, 3), (0, 4)], [(3, 5), (0, 3)], [(2, 4), (3, 4)]],
            "w has boxes that overlap: [0:3, 0:4] on rank 0 and [2:4, 3:4] on rank 2",
        ),
    ],
)
def test_holes_and_overlaps(held: list[list[tuple[int, int]]], expected: str) -> None:
    assert problems(*([leaf((5, 4), box)] for box in held)) == [expected]


def test_contradictions() -> None:
    a, b = leaf((4, 2), [(0, 2), (0, 2)]), leaf((6, 2), [(2, 4), (0, 2)])
    assert problems([a], [b]) == ["w is float32 (4, 2) on rank 0, float32 (6, 2) on rank 1"]
    c = leaf((4, 2), [(2, 4), (0, 2)], "bfloat16")
    assert problems([a], [c], [c]) == ["w is float32 (4, 2) on rank 0, bfloat16 (4, 2) on ranks 1, 2"]
    assert problems([a], [leaf((3,))]) == ["w is float32 (4, 2) on rank 0, float32 (3,) on rank 1"]


def test_only_complete_cuts_of_a_tensor_are_accepted() -> None:
    """Random cuts into boxes; then one box is left out or moved."""
    draw = random.Random(0)
    for _ in range(200):
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 3)))
        boxes = [[(0, size) for size in shape]]
        for _ in range(draw.randint(1, 8)):
            box = boxes.pop(draw.randrange(len(boxes)))
            dimension = draw.randrange(len(shape))
            start, stop = box[dimension]
            at = draw.randint(start, stop)
            for each in ((start, at), (at, stop)):
                boxes.append([*box[:dimension], each, *box[dimension + 1 :]])
        assert problems(*([leaf(shape, box)] for box in boxes)) == []
        full = [box for box in boxes if all(a < b for a, b in box)]
        if len(full) < 2:
            continue
        lost = draw.choice(full)
        rest = [box for box in full if box is not lost]
        assert problems(*([leaf(shape, box)] for box in rest)) != []
        moved = [(a - 1, b - 1) if a else (a, b) for a, b in lost]
        if moved != lost and moved not in rest:
            assert problems(*([leaf(shape, box)] for box in [*rest, moved])) != []


def test_many_ranks() -> None:
    """One row for each rank, on two dimensions of a mesh."""
    world = 4096
    held = [[leaf((world, 64), [(rank, rank + 1), (0, 64)])] for rank in range(world)]
    assert problems(*held) == []
    del held[7]
    missing = "w has holes: 262,080 of its 262,144 elements are on ranks 0, 1, 2, 3 and 4091 more"
    assert problems(*held) == [missing]
