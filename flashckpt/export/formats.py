"""The files that other programs read: a stock safetensors file, and one for `torch.load(weights_only=True)`.

Names are those of the state. In a safetensors file a tensor that stands under several names is stored once:
the others are in its metadata. A dtype that safetensors does not have is stored as bytes, and named there.
The other file is the one place where this library writes a pickle, which torch's own format is. Nothing here
ever reads one back.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from flashckpt import _native
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import DamagedError
from flashckpt.format.layout import DTYPES, Leaf
from flashckpt.restore.box_reading import BoxReader
from flashckpt.restore.whole_tensors import WholeTensors

Progress = Callable[[int, int], None]
_ALIGNMENT = 8
_THREADS = 2


class SelectedLeaf(Protocol):
    """One leaf to take out: `leaf` has the names that were asked for."""

    @property
    def leaf(self) -> Leaf: ...

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes, row-major, in pieces of which every one is verified by itself."""

    def whole(self) -> memoryview:
        """The same in one piece, writable."""

    @property
    def digest(self) -> int:
        """Of its bytes, once all pieces were given."""


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """A leaf of one rank's shard, which has it as `stored`."""

    reader: BoxReader
    leaf: Leaf
    stored: Leaf
    digest: int

    def pieces(self) -> Iterator[memoryview]:
        return self.reader.pieces(self.stored)

    def whole(self) -> memoryview:
        return memoryview(self.reader.leaf(self.stored))


@dataclass(slots=True)
class WholeLeaf:
    """A tensor that is put together out of what several ranks have of it, which has it as `stored`."""

    tensors: WholeTensors
    leaf: Leaf
    stored: Leaf
    digest: int = 0

    def pieces(self) -> Iterator[memoryview]:
        yield self.whole()

    def whole(self) -> memoryview:
        data = self.tensors.leaf(self.stored, _THREADS)[: self.leaf.num_bytes]
        self.digest = _native.digest(_native.address_of(data), len(data)) if data else 0
        return data


def write_safetensors(
    path: str, record: StepRecord, rank: int, sources: Sequence[SelectedLeaf], progress: Progress
) -> int:
    """Write the file, a leaf or less of it in memory at a time, and digest it again as it stands. Returns its
    bytes. DamagedError where a leaf did not arrive as it was captured."""
    ordered = sorted(sources, key=lambda each: (-DTYPES[each.leaf.dtype][0], each.leaf.name))
    header, total = _header(record, rank, ordered), sum(each.leaf.num_bytes for each in ordered)
    with open(path, "xb") as file:
        file.write(header)
        for each in ordered:
            for piece in each.pieces():
                file.write(piece)
            progress(file.tell() - len(header), total)
    _check(path, len(header), ordered, record.step)
    return len(header) + total


def _header(record: StepRecord, rank: int, ordered: Sequence[SelectedLeaf]) -> bytes:
    aliases = {alias: each.leaf.name for each in ordered for alias in each.leaf.aliases}
    odd = {
        each.leaf.name: {"dtype": each.leaf.dtype, "shape": list(each.leaf.shape)}
        for each in ordered
        if DTYPES[each.leaf.dtype][1] is None
    }
    # Text to text is all that safetensors allows here.
    table: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "flashckpt.step": str(record.step),
            "flashckpt.attempt": str(record.attempt),
            "flashckpt.rank": str(rank),
            "flashckpt.world": str(record.world),
            "flashckpt.aliases": json.dumps(aliases),
            "flashckpt.dtypes": json.dumps(odd),
        }
    }
    offset = 0
    for each in ordered:
        leaf = each.leaf
        stored = DTYPES[leaf.dtype][1]
        shape = list(leaf.shape) if stored else [leaf.num_bytes]
        end = offset + leaf.num_bytes
        table[leaf.name] = {"dtype": stored or "U8", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8
    return length.to_bytes(8, "little") + text.ljust(length, b" ")


def _check(path: str, data_start: int, ordered: Sequence[SelectedLeaf], step: int) -> None:
    """Against the digests of the boundary: what is in the file now is what was captured then."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ) as image:
            address, offset = _native.address_of(image), data_start
            for each in ordered:
                if _native.digest(address + offset, each.leaf.num_bytes) != each.digest:
                    raise DamagedError(
                        f"{each.leaf.name} did not arrive in {path} as it was captured. The file was removed."
                        " Verify the step, and try again.",
                        step=step,
                        path=path,
                    )
                offset += each.leaf.num_bytes
    finally:
        os.close(descriptor)


def write_torch(path: str, sources: Sequence[SelectedLeaf]) -> int:
    """Write the file. Tied names give one tensor, stored once. Returns its bytes. DamagedError where a leaf
    is not what was captured."""
    # Late: the other format needs no torch, nor does a machine that only copies weights.
    import torch

    from flashckpt.restore.snapshot import leaf_view

    tensors: dict[str, torch.Tensor] = {}
    for each in sources:
        leaf = each.leaf
        tensor = leaf_view(each.whole(), leaf, 0)
        tensors.update(dict.fromkeys((leaf.name, *leaf.aliases), tensor))
    torch.save(tensors, path)
    return os.path.getsize(path)
