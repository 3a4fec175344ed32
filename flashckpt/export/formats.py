"""Writers of tensor files and folders for other programs: safetensors, `torch.save`, torch's DCP.

In a safetensors file a tensor that has several names is stored once: the other names are in its metadata. A
dtype that safetensors does not have is stored as bytes, and named there. `torch.save` and DCP write a pickle,
because these formats contain one; flashckpt never reads one back.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from flashckpt.commit.steps import StepRecord
from flashckpt.export.selection import SelectedLeaf
from flashckpt.format.layout import DTYPES

Progress = Callable[[int, int], None]
INDEX = "model.safetensors.index.json"
_ALIGNMENT = 8
# Pieces (chunks of 4 MiB, or 8 to 64 MiB of an assembled tensor) that are read before they are written.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Selected:
    """What is exported of a step. `rank` is the rank whose files these leaves are from, or whose values count
    where ranks differ. `folder`: where temporary files may be written, beside the destination."""

    record: StepRecord
    leaves: Sequence[SelectedLeaf]
    rank: int
    folder: str
    progress: Progress

    @property
    def num_bytes(self) -> int:
        return sum(each.leaf.num_bytes for each in self.leaves)


def write_safetensors(path: str, selected: Selected) -> None:
    """Write one file, a few pieces in memory at a time. DamagedError where a leaf is not what was
    captured."""
    with open(path, "xb", buffering=0) as file:
        write_image(file.fileno(), selected)


def write_image(file: int, selected: Selected, done: int = 0, total: int | None = None) -> int:
    """Write a safetensors file to a descriptor. Returns where its data begins."""
    ordered = in_file_order(selected.leaves)
    header = _header(selected, ordered)
    _write_all(file, memoryview(header))
    total = selected.num_bytes if total is None else total
    with closing(read_ahead(piece for each in ordered for piece in each.pieces())) as pieces:
        for piece in pieces:
            _write_all(file, piece)
            done += len(piece)
            selected.progress(done, total)
    return len(header)


def write_sharded(folder: str, selected: Selected, most_bytes: int) -> None:
    """Write files of at most so many bytes of tensors (or of one tensor), and the index that transformers and
    others read. One file has no index."""
    os.mkdir(folder)
    shards = _shards(sorted(selected.leaves, key=lambda each: each.place), most_bytes)
    index, done, total = dict[str, str](), 0, selected.num_bytes
    for number, leaves in enumerate(shards, start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = Selected(selected.record, leaves, selected.rank, folder, selected.progress)
        with open(os.path.join(folder, name), "xb", buffering=0) as file:
            write_image(file.fileno(), shard, done, total)
        done += shard.num_bytes
        index.update((each.leaf.name, name) for each in leaves)
    if len(shards) > 1:
        table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        with open(os.path.join(folder, INDEX), "x", encoding="utf-8") as text:
            text.write(json.dumps(table, indent=2) + "\n")


def write_torch(path: str, selected: Selected) -> None:
    """Write a file for `torch.load(weights_only=True)`. Tied names give one tensor, stored once."""
    # Late: safetensors needs no torch, nor does a machine that only copies weights.
    import torch

    from flashckpt.export.mapped import mapped_tensors

    # By a file object: with a path, a full disk is a RuntimeError without errno.
    with mapped_tensors(selected) as tensors, open(path, "xb") as file:
        torch.save(tensors, file)


def write_dcp(folder: str, selected: Selected) -> None:
    """Write a folder for `torch.distributed.checkpoint.load`, by torch's own writer in this process alone."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    from flashckpt.export.mapped import mapped_tensors

    try:
        with mapped_tensors(selected) as tensors, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            save(tensors, checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:
        # A BaseException around torch's own error around that of the disk, which is what a caller handles.
        first = next(iter(error.failures.values()))[0]
        cause: BaseException | None = first
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        raise (cause or first) from error


def in_file_order(leaves: Sequence[SelectedLeaf]) -> list[SelectedLeaf]:
    """Leaves as a safetensors file has them: each at a multiple of its dtype's size."""
    return sorted(leaves, key=lambda each: (-DTYPES[each.leaf.dtype][0], each.place))


def _shards(leaves: Sequence[SelectedLeaf], most_bytes: int) -> list[list[SelectedLeaf]]:
    shards: list[list[SelectedLeaf]] = []
    held = 0
    for each in leaves:
        if not shards or (held and held + each.leaf.num_bytes > most_bytes):
            shards.append([])
            held = 0
        shards[-1].append(each)
        held += each.leaf.num_bytes
    return shards


def _header(selected: Selected, ordered: Sequence[SelectedLeaf]) -> bytes:
    record = selected.record
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
            "flashckpt.rank": str(selected.rank),
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


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def read_ahead(pieces: Iterator[memoryview]) -> Generator[memoryview]:
    """The same pieces. A thread reads and verifies the next ones while the caller writes."""
    with ThreadPoolExecutor(1, "flashckpt-export") as pool:
        under_way = deque(pool.submit(next, pieces, None) for _ in range(_AHEAD))
        try:
            while (piece := under_way.popleft().result()) is not None:
                under_way.append(pool.submit(next, pieces, None))
                yield piece
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
