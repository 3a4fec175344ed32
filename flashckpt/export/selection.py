"""Which leaves of which step are taken out, and proof that they are whole. Reads records and shards only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flashckpt.commit.steps import StepRecord
from flashckpt.commit.verification import verify_file
from flashckpt.errors import DamagedError, NoSuchStepError
from flashckpt.format.layout import Leaf
from flashckpt.restore.box_reading import BoxReader

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SelectedLeaf:
    """One leaf to take out, under the names that were asked for. `stored` is how its shard has it."""

    reader: BoxReader
    leaf: Leaf
    stored: Leaf
    digest: int

    def pieces(self) -> Iterator[memoryview]:
        """The leaf's bytes, verified by the checksums of their chunks. DamagedError where they are missing or
        not what was written."""
        return self.reader.pieces(self.stored)

    def read(self) -> bytearray:
        """The leaf in memory, its digest verified too."""
        return self.reader.leaf(self.stored)


def ranks_of(record: StepRecord) -> list[int]:
    return sorted(rank.rank for part in record.parts for rank in part.ranks)


def selected(record: StepRecord, rank: int, only: Sequence[str]) -> list[SelectedLeaf]:
    """The leaves of a rank; with `only`, those under one of these names (`model` takes `model.weight`).

    NoSuchStepError where the step has none of that name.
    """
    sources = []
    readers = {
        contents.shard.file: BoxReader(record.store, path, contents) for path, contents in record.files(rank)
    }
    for file, leaf, digest in record.rank(rank).counted():
        names = [name for name in (leaf.name, *leaf.aliases) if _is_chosen(name, only)]
        if names:
            sources.append(SelectedLeaf(readers[file], _named(leaf, names), leaf, digest))
    if not sources:
        there = sorted({leaf.name.partition(".")[0] for _, c in record.files(rank) for leaf in c.leaves})
        raise NoSuchStepError(
            f"step {record.step} has no leaf under {' or '.join(only) or 'any name'}. Nothing was written. "
            f"It has: {', '.join(there)}.",
            step=record.step,
        )
    return sorted(sources, key=lambda each: each.leaf.name)


def check_whole(record: StepRecord, rank: int, progress: Progress, before: int, total: int) -> int:
    """Read every byte of a rank's files. Returns how many; DamagedError before anything is written."""
    done = 0
    for path, contents in record.files(rank):
        status, detail = verify_file(record.store, path, contents)
        if status != "ok":
            raise DamagedError(
                f"{path} is {status}: {detail}. Nothing was written. Name another step: `flashckpt verify` "
                "says which are whole.",
                step=record.step,
                rank=rank,
                path=path,
            )
        done += contents.shard.num_bytes
        progress(before + done, total)
    return done


def _is_chosen(name: str, only: Sequence[str]) -> bool:
    return not only or any(name == each or name.startswith(f"{each}.") for each in only)


def _named(leaf: Leaf, names: list[str]) -> Leaf:
    """The leaf under the names that were asked for: a tie may have some of its names elsewhere."""
    first, *others = names
    return Leaf(name=first, dtype=leaf.dtype, shape=leaf.shape, stride=leaf.stride, aliases=tuple(others))
