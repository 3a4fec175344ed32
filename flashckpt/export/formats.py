"""The tensors of an export (which ones, their names, their verified bytes in pieces), and the writers for
other programs: safetensors, `torch.save`, torch's DCP. Needs torch only for the latter two and to change a
dtype.

A safetensors file has a tensor with several names once; its metadata lists the other names. A dtype that
safetensors lacks is stored as bytes, and the metadata names it. `torch.save` and DCP write a pickle, because
these formats contain one; flashckpt never unpickles it.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from typing import IO, TYPE_CHECKING

from flashckpt.commit.steps import StepRecord
from flashckpt.errors import NoSuchStepError, OptionError
from flashckpt.format.layout import DTYPES, Leaf, header_bytes
from flashckpt.memory import memory_budget
from flashckpt.restore.step_tensors import Parts, Piece, TensorSlice, entry_of, transient_names
from flashckpt.restore.whole_tensors import WholeTensors, pieces
from flashckpt.store.base import Store
from flashckpt.threads import results

if TYPE_CHECKING:
    import torch

# Dtypes that a cast reads and writes. A float8 tensor has a separate scale, so a cast would change its value.
CASTABLE = ("bfloat16", "float16", "float32", "float64")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_THREADS = 2


@dataclass(frozen=True, slots=True)
class SelectedLeaf:
    """One tensor to export. `leaf`: names, dtype and shape in the export. `stored`: those in the step, which
    holds the tensor as `parts`."""

    leaf: Leaf
    stored: Leaf
    parts: Parts

    def of_piece(self, piece: memoryview) -> memoryview:
        """Convert a stored piece to exported bytes."""
        if self.leaf.dtype == self.stored.dtype or not piece:
            return piece
        import torch

        before, after = getattr(torch, self.stored.dtype), getattr(torch, self.leaf.dtype)
        values = torch.frombuffer(piece, dtype=before).to(after)
        return memoryview(values.view(torch.uint8).numpy().data)


def pieces_of(store: Store, leaves: Sequence[SelectedLeaf]) -> Iterator[memoryview]:
    """Yield the bytes of these leaves in order, each row-major. Each piece is verified by chunk checksums
    first. After the last piece, raises DamagedError if a digest does not match."""
    for index, piece in pieces(store, [(each.stored, each.parts) for each in leaves], _THREADS):
        yield leaves[index].of_piece(piece)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of an export. only: parts of the state or leaves, all if empty. prefix: removed from each
    name, for example "model." if the export has one module. excluded: leaves that are not exported; inside:
    what names of others begin with."""

    only: tuple[str, ...] = ()
    prefix: str = ""
    excluded: frozenset[str] = frozenset()
    inside: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: StepRecord, only: Sequence[str]) -> Names:
        """The names for `only`. If `only` is one module or a part of one, names are those of its state_dict.
        Excludes buffers that are not persistent, unless `only` names them, and tensors inside a module's
        extra state, which have no names in a file of tensors."""
        excluded = transient_names(record) - set(only)
        entry = entry_of(record, only[0])[1] if len(only) == 1 else {}
        if entry.get("kind") != "module":
            return cls(tuple(only), excluded=excluded)
        inside = tuple(f"{path}._extra_state{mark}" for path in entry.get("extra", {}) for mark in ".[")
        return cls(tuple(only), f"{only[0]}.", excluded, inside)

    def of_leaf(self, leaf: Leaf) -> Leaf | None:
        """The leaf with its exported names, or None if no name is exported."""
        names = [name for name in (leaf.name, *leaf.aliases) if self._has(name)]
        if not names:
            return None
        names = [name if name in self.only else name.removeprefix(self.prefix) for name in names]
        return replace(leaf, name=names[0], aliases=tuple(names[1:]), box=None, offset=-1)

    def _has(self, name: str) -> bool:
        if name in self.excluded or name.startswith(self.inside):
            return False
        return not self.only or any(name == each or name.startswith(f"{each}.") for each in self.only)


def select(record: StepRecord, only: Sequence[str], dtype: str | None) -> list[SelectedLeaf]:
    """Select whole tensors of a step. Raises NoSuchStepError if no tensor has such a name."""
    tensors = WholeTensors(record)
    rows = [(leaf, tensors.parts(leaf)) for leaf in tensors.leaves]
    return _selected(record, rows, Names.of(record, only), dtype)


def select_rank(record: StepRecord, rank: int, only: Sequence[str], dtype: str | None) -> list[SelectedLeaf]:
    """Select the leaves in the files of one rank, as stored: of a sliced tensor, only the slice."""
    rows = list[tuple[Leaf, Parts]]()
    for each in record.written(rank):
        stored = replace(each.leaf, box=None)
        piece = Piece(TensorSlice.of(stored), rank, *each)
        rows.append((stored, [(piece, piece.region)]))
    return _selected(record, rows, Names(tuple(only)), dtype)


def _selected(
    record: StepRecord, rows: Sequence[tuple[Leaf, Parts]], names: Names, dtype: str | None
) -> list[SelectedLeaf]:
    found = list[SelectedLeaf]()
    for leaf, parts in rows:
        if (exported := names.of_leaf(leaf)) is not None:
            if dtype is not None and leaf.dtype in CASTABLE:
                exported = replace(exported, dtype=dtype)
            found.append(SelectedLeaf(exported, leaf, parts))
    if not found:
        there = sorted({leaf.name.partition(".")[0] for leaf, _ in rows})
        raise NoSuchStepError(
            f"step {record.step} has no leaf under {' or '.join(names.only) or 'any name'}. Nothing was "
            f"written. It has: {', '.join(there)}.",
            step=record.step,
        )
    return found


def dtype_name(dtype: object) -> str:
    """The name of a floating-point dtype given as text ("bf16", "torch.bfloat16") or as torch.dtype. Raises
    OptionError for others."""
    text = str(dtype).removeprefix("torch.")
    name = _SHORT.get(text, text)
    if name not in CASTABLE:
        raise OptionError(
            f"dtype={dtype!r} is not supported. Nothing was written. Give one of {', '.join(CASTABLE)}."
        )
    return name


def only_module(record: StepRecord, only: Sequence[str], format: str) -> str:
    """The name of the exported module: the one in `only`, or the only module of the state."""
    value, entry = entry_of(record, only[0] if only else "")
    modules: list[str] = [name for name, each in value["entries"].items() if each["kind"] == "module"]
    if len(only) == 1 and entry.get("kind") == "module":
        return only[0]
    if not only and len(modules) == 1:
        return modules[0]
    raise OptionError(
        f"format={format!r} exports one module, and step {record.step} has {', '.join(modules) or 'none'}. "
        "Nothing was written. Name one of them with --only."
    )


# Writers


Progress = Callable[[int, int], None]
INDEX = "model.safetensors.index.json"
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Selected:
    """The exported part of a step. `rank`: the rank whose files have these leaves, or whose values are used
    where ranks differ. `folder`: place for temporary files, beside the destination."""

    record: StepRecord
    leaves: Sequence[SelectedLeaf]
    rank: int
    folder: str
    progress: Progress

    @property
    def num_bytes(self) -> int:
        return sum(each.leaf.num_bytes for each in self.leaves)


def write_safetensors(path: str, selected: Selected) -> None:
    """Write one file, with a few pieces in memory at a time. Raises DamagedError if a leaf differs from its
    capture."""
    with open(path, "xb", buffering=0) as file:
        write_image(file.fileno(), selected)


def write_image(file: int, selected: Selected, done: int = 0, total: int | None = None) -> int:
    """Write a safetensors file to a descriptor. Return the offset of its data."""
    ordered = in_file_order(selected.leaves)
    header = _header(selected, ordered)
    _write_all(file, memoryview(header))
    total = selected.num_bytes if total is None else total
    # The next ones are read and verified in a thread meanwhile.
    verified = pieces_of(selected.record.store, ordered)
    with closing(results("export", repeat(lambda: next(verified, None)), 1)) as pieces:
        for piece in pieces:
            if piece is None:
                break
            _write_all(file, piece)
            done += len(piece)
            selected.progress(done, total)
    return len(header)


def write_sharded(folder: str, selected: Selected, most_bytes: int) -> None:
    """Write files with at most `most_bytes` of tensors each (or one larger tensor), and the index that
    transformers and others read. A single file has no index."""
    os.mkdir(folder)
    shards = _shards(selected.leaves, most_bytes)
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
    """Write a file for `torch.load(weights_only=True)`. Tied names share one stored tensor."""
    # Late import: an export to safetensors works without torch.
    import torch

    # Pass a file object: with a path, a full disk raises RuntimeError without errno.
    with open(path, "xb") as file:
        torch.save(tensors_of(selected), file)


def write_dcp(folder: str, selected: Selected) -> None:
    """Write a folder for `torch.distributed.checkpoint.load`, by torch's own writer in this process."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        tensors = tensors_of(selected)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            save(tensors, checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:
        # Unwrap: callers handle the disk's OSError, which torch wraps twice, the second time in a
        # BaseException.
        first = next(iter(error.failures.values()))[0]
        cause: BaseException | None = first
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        raise (cause or first) from error


def in_file_order(leaves: Sequence[SelectedLeaf]) -> list[SelectedLeaf]:
    """Order leaves as in a safetensors file: each starts at a multiple of its dtype's size."""
    return sorted(leaves, key=lambda each: -DTYPES[each.leaf.dtype][0])


def _shards(leaves: Sequence[SelectedLeaf], most_bytes: int) -> list[list[SelectedLeaf]]:
    shards: list[list[SelectedLeaf]] = []
    shard_bytes = 0
    for each in leaves:
        if not shards or (shard_bytes and shard_bytes + each.leaf.num_bytes > most_bytes):
            shards.append([])
            shard_bytes = 0
        shards[-1].append(each)
        shard_bytes += each.leaf.num_bytes
    return shards


def _header(selected: Selected, ordered: Sequence[SelectedLeaf]) -> bytes:
    record = selected.record
    aliases = {alias: each.leaf.name for each in ordered for alias in each.leaf.aliases}
    other_dtypes = {
        each.leaf.name: {"dtype": each.leaf.dtype, "shape": list(each.leaf.shape)}
        for each in ordered
        if DTYPES[each.leaf.dtype][1] is None
    }
    metadata = {
        "format": "pt",
        "flashckpt.step": str(record.step),
        "flashckpt.attempt": str(record.attempt),
        "flashckpt.rank": str(selected.rank),
        "flashckpt.world": str(record.world),
        "flashckpt.aliases": json.dumps(aliases),
        "flashckpt.dtypes": json.dumps(other_dtypes),
    }
    ends = accumulate(each.leaf.num_bytes for each in ordered)
    placed = (replace(e.leaf, offset=end - e.leaf.num_bytes) for e, end in zip(ordered, ends, strict=True))
    return header_bytes(placed, alignment=_ALIGNMENT, metadata=metadata)


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


# Tensors, for writers that take them


def tensors_of(selected: Selected) -> dict[str, torch.Tensor]:
    """Return the tensors by name, verified, in memory, or, if it is too small, in an unnamed file beside the
    destination. Tied names share one tensor. Raises DamagedError; OSError for a full disk."""
    from flashckpt.restore.snapshot import leaf_view

    # The file has no name, so its blocks are freed however this process ends.
    with _scratch(selected) as file:
        offset = write_image(file.fileno(), selected)
        size = os.fstat(file.fileno()).st_size
        image = memoryview(mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE))
    found: dict[str, torch.Tensor] = {}
    for each in in_file_order(selected.leaves):
        tensor = leaf_view(image, each.leaf, offset)
        found.update(dict.fromkeys((each.leaf.name, *each.leaf.aliases), tensor))
        offset += each.leaf.num_bytes
    return found


def _scratch(selected: Selected) -> IO[bytes]:
    if selected.num_bytes > memory_budget.available_bytes():
        return tempfile.TemporaryFile(dir=selected.folder, buffering=0)
    return open(os.memfd_create("export"), "w+b", buffering=0)
