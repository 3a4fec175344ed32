"""From where in a file to where in memory the bytes of a box go: copies of strided runs, cut so that each
lies in one block of the file. Pure arithmetic; reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from flashckpt.format.layout import DTYPES, Leaf
from flashckpt.restore.step_leaves import BoxRegion, Index


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """`run` bytes at `source` of a file go to `target` of a buffer, and so at each of the steps: (how often,
    bytes from one to the next in the file, in the buffer), outermost first. `item`: bytes of an element."""

    source: int
    target: int
    run: int
    steps: tuple[tuple[int, int, int], ...]
    item: int

    @property
    def stop(self) -> int:
        """The byte of the file behind its last."""
        return self.source + self.run + sum((count - 1) * stride for count, stride, _ in self.steps)

    def is_dense(self, gap_bytes: int) -> bool:
        """Whether nowhere between its runs lie so many bytes, or more."""
        span = self.run
        for count, stride, _ in reversed(self.steps):
            if stride - span >= gap_bytes:
                return False
            span += (count - 1) * stride
        return True

    def row(self, index: int) -> BoxCopy:
        """One of the outermost steps."""
        (_, source, target), *inner = self.steps
        return replace(
            self,
            source=self.source + index * source,
            target=self.target + index * target,
            steps=tuple(inner),
        )

    def rows(self, first: int, count: int) -> BoxCopy:
        """Some of the outermost steps."""
        (_, source, target), *inner = self.steps
        return replace(self.row(first), steps=((count, source, target), *inner))

    def execute(self, data: memoryview, begin: int, into: memoryview) -> None:
        """`data` holds the bytes of the file from `begin` on."""
        unit = self.item if self.item in (1, 2, 4, 8) else 8
        kind = np.dtype(f"u{unit}")
        shape = [count for count, _, _ in self.steps] + [self.run // unit]
        from_strides = [stride for _, stride, _ in self.steps] + [unit]
        to_strides = [stride for _, _, stride in self.steps] + [unit]
        taken = np.ndarray(shape, kind, data, self.source - begin, from_strides)
        np.copyto(np.ndarray(shape, kind, into, self.target, to_strides), taken)


def copy_of(
    stored: Leaf, begin: int, held: BoxRegion, wanted: BoxRegion, target: int, common: BoxRegion
) -> BoxCopy:
    """The copy of `common` from a leaf whose bytes begin at `begin` of a file, and which has the box `held`,
    to where the box `wanted` begins at `target` of a buffer. Both are row-major."""
    item = DTYPES[stored.dtype][0]
    from_strides, to_strides = _strides(held.shape, item), _strides(wanted.shape, item)
    source = begin + _offset(common.start, held.start, from_strides)
    goal = target + _offset(common.start, wanted.start, to_strides)
    run, dimension = item, len(common.shape)
    # Inner dimensions that both have whole make one run, with as much of the next as is wanted.
    while dimension:
        dimension -= 1
        run *= common.shape[dimension]
        if not common.shape[dimension] == held.shape[dimension] == wanted.shape[dimension]:
            break
    steps = tuple(
        (common.shape[d], from_strides[d], to_strides[d]) for d in range(dimension) if common.shape[d] > 1
    )
    return BoxCopy(source, goal, run, steps, item)


def cut(copy: BoxCopy, block_bytes: int, gap_bytes: int) -> Iterator[tuple[int, BoxCopy]]:
    """The same bytes in copies each of which lies in one block of the file and has no gap of `gap_bytes`
    between its runs; and the number of that block."""
    first = copy.source // block_bytes
    if copy.stop <= (first + 1) * block_bytes and copy.is_dense(gap_bytes):
        yield first, copy
    elif not copy.steps:
        yield from _cut_run(copy, block_bytes)
    else:
        yield from _cut_rows(copy, block_bytes, gap_bytes)


def _cut_run(copy: BoxCopy, block_bytes: int) -> Iterator[tuple[int, BoxCopy]]:
    done = 0
    while done < copy.run:
        source = copy.source + done
        block = source // block_bytes
        run = min(copy.run - done, (block + 1) * block_bytes - source)
        yield block, replace(copy, source=source, target=copy.target + done, run=run)
        done += run


def _cut_rows(copy: BoxCopy, block_bytes: int, gap_bytes: int) -> Iterator[tuple[int, BoxCopy]]:
    (count, stride, _), row, index = copy.steps[0], copy.row(0), 0
    span = row.stop - row.source
    together = stride - span < gap_bytes and row.is_dense(gap_bytes)
    while index < count:
        source = copy.source + index * stride
        block = source // block_bytes
        room = (block + 1) * block_bytes - source - span
        rows = min(count - index, room // stride + 1) if together and room >= 0 else 0
        if rows > 0:
            yield block, copy.rows(index, rows)
        else:
            yield from cut(copy.row(index), block_bytes, gap_bytes)
        index += max(rows, 1)


def _strides(shape: Index, item: int) -> list[int]:
    return [item * math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _offset(index: Index, origin: Index, strides: list[int]) -> int:
    return sum((i - o) * stride for i, o, stride in zip(index, origin, strides, strict=True))
