"""The check of other tests that the boxes of ranks cover a tensor accepts complete cuts alone."""

from __future__ import annotations

import random

from flashckpt.format.layout import Box, Leaf
from tests.coverage_of_boxes import check_coverage


def leaf(shape: tuple[int, ...], ranges: list[tuple[int, int]]) -> Leaf:
    stored = tuple(stop - start for start, stop in ranges)
    box = None if stored == shape else Box(shape=shape, start=tuple(start for start, _ in ranges))
    return Leaf(name="w", dtype="float32", shape=stored, box=box)


def problems(*held: list[Leaf]) -> list[str]:
    return check_coverage(dict(enumerate(held)))


def test_only_complete_cuts_of_a_tensor_are_accepted() -> None:
    """Random cuts into boxes; then one box is left out or moved."""
    draw = random.Random(0)
    for _ in range(100):
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
