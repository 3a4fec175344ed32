"""The export of a step. Owns the order: choose, read and verify while writing beside the destination, rename.

One file or folder with whole tensors, assembled from the ranks' pieces; or a folder with a file for each
rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flashckpt.commit.attempts import open_run
from flashckpt.commit.lineage import read_whole
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import OptionError
from flashckpt.export.destination import check_free, list_files, put_in_place, rank_file, write_list
from flashckpt.export.formats import (
    Progress,
    Selected,
    write_dcp,
    write_safetensors,
    write_sharded,
    write_torch,
)
from flashckpt.export.selection import dtype_name, only_module, select, select_rank
from flashckpt.format.names import AttemptName
from flashckpt.store.base import Store

_FILES = {"safetensors": (write_safetensors, "safetensors"), "torch": (write_torch, "pt")}
FORMATS = (*_FILES, "dcp", "hf")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)

Writer = Callable[[str, Selected], None]
"""Writes a file or a folder at a path that does not exist yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: files (relative to `out` where that is a folder) with their bytes."""

    run: str
    step: int
    attempt: AttemptName
    out: str
    format: str
    leaves: int
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for, but for the writer. one_module: export one module, the only one where `only` is
    empty. is_folder: the writer makes a folder."""

    out: str
    format: str
    step: int | None = None
    attempt: AttemptName | None = None
    only: tuple[str, ...] = ()
    dtype: str | None = None
    one_module: bool = False
    is_folder: bool = False
    force: bool = False
    progress: Progress = lambda done, total: None


def export(
    store: Store,
    out: str,
    *,
    format: str = "safetensors",
    step: int | None = None,
    attempt: AttemptName | None = None,
    only: Sequence[str] = (),
    dtype: object | None = None,
    max_shard_size: int | str | None = None,
    by_rank: bool = False,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the tensors of a committed step (the one that a resume would take, if none is named) to `out`.

    format: "safetensors", "torch" (a file for torch.load) or "dcp" (a folder for torch's DCP); for "hf" see
    flashckpt.transformers.export. only: names of parts of the state, or of leaves; where that is one module,
    names are as its state_dict has them. Buffers that are not persistent are left out. dtype: of
    floating-point tensors in the export. max_shard_size: bytes, or text ("5GB", "2GiB"): a folder of
    safetensors files of at most so much, with an index.

    Of a step of several ranks each tensor is whole, and those that differ from rank to rank (buffers,
    counters) are rank 0's. by_rank: a folder instead, with a file for each rank's own files, pieces and names
    as stored.

    Raises OptionError for what cannot be combined, where `out` exists already and not `force`, where it is a
    folder with anything but an earlier export in it, or the run, in it or above it; MismatchError where the
    pieces of a tensor do not make it up; NoSuchStepError, DamagedError. Then nothing is left behind, and what
    stood there stands.
    """
    request = Request(
        out=out,
        format=format,
        step=step,
        attempt=attempt,
        only=tuple(only),
        dtype=None if dtype is None else dtype_name(dtype),
        force=force,
        progress=progress,
    )
    most_bytes = None if max_shard_size is None else size_of(max_shard_size)
    if format == "dcp" and not by_rank and most_bytes is None:
        return export_with(store, write_dcp, replace(request, is_folder=True))
    if format not in _FILES:
        names = ", ".join((*_FILES, "dcp"))
        why = "with --by-rank or --max-shard-size one of safetensors, torch" if format == "dcp" else names
        raise OptionError(f"format={format!r}: one of {why}. Nothing was written.")
    if most_bytes is not None:
        if format != "safetensors" or by_rank:
            raise OptionError(
                "max_shard_size= is for whole tensors in safetensors files and for format='hf'. Nothing "
                "was written."
            )
        limit = most_bytes
        request = replace(request, is_folder=True)
        return export_with(store, lambda path, selected: write_sharded(path, selected, limit), request)
    return export_with(store, _FILES[format][0], request, by_rank=by_rank)


def export_with(store: Store, write: Writer, request: Request, *, by_rank: bool = False) -> Exported:
    """Export by a writer. Raises as `export` does, and what the writer raises: then nothing is left
    behind."""
    open_run(store, create=False)
    check_free(request.out, store.url, force=request.force, is_folder=request.is_folder or by_rank)
    return read_whole(
        store,
        request.step,
        request.attempt,
        read=lambda record: _exported(record, write, request, by_rank=by_rank),
    )


def size_of(text: int | str) -> int:
    """A size in bytes, given as a number or as text: "5GB" is 5e9, "5GiB" 5 * 2**30."""
    match = _SIZE.fullmatch(str(text).strip())
    size = 0
    if match is not None:
        base = 1024 if match[3] else 1000
        size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if size < 1:
        raise OptionError(f"max_shard_size={text!r}: a size like 5GB or 500MiB. Nothing was written.")
    return size


def _exported(record: StepRecord, write: Writer, request: Request, *, by_rank: bool) -> Exported:
    chosen = _chosen(record, request, by_rank=by_rank)
    with put_in_place(request.out, force=request.force) as temporary:
        if len(chosen) == 1:
            write(temporary, chosen[0])
        else:
            os.mkdir(temporary)
            suffix = _FILES[request.format][1]
            for each in chosen:
                write(os.path.join(temporary, rank_file(each.rank, suffix)), each)
        files = [(name or os.path.basename(request.out), size) for name, size in list_files(temporary)]
        if os.path.isdir(temporary):
            about = {"run": record.store.url, "step": record.step, "attempt": str(record.attempt)}
            write_list(temporary, {**about, "format": request.format})
    return Exported(
        run=record.store.url,
        step=record.step,
        attempt=record.attempt,
        out=os.path.abspath(request.out),
        format=request.format,
        files=tuple(files),
        leaves=sum(len(each.leaves) for each in chosen),
    )


def _chosen(record: StepRecord, request: Request, *, by_rank: bool) -> list[Selected]:
    folder = os.path.dirname(os.path.abspath(request.out))
    if by_rank:
        ranks = sorted(rank.rank for part in record.parts for rank in part.ranks)
        return [
            Selected(
                record,
                select_rank(record, rank, request.only, request.dtype),
                rank,
                folder,
                request.progress,
            )
            for rank in ranks
        ]
    only = request.only
    if request.one_module:
        only = (only_module(record, only, request.format),)
    return [Selected(record, select(record, only, request.dtype), 0, folder, request.progress)]
