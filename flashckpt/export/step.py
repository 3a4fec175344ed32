"""The export of a step. Owns the order: choose, verify, write beside, rename. One file with whole tensors,
put together out of what ranks have of them; or a folder with a file for what the files of each rank hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flashckpt.commit.attempts import open_run
from flashckpt.commit.lineage import read_whole
from flashckpt.commit.steps import StepRecord
from flashckpt.commit.verification import verify_file
from flashckpt.errors import DamagedError, NoSuchStepError, OptionError
from flashckpt.export.destination import check_free, put_in_place, rank_file
from flashckpt.export.formats import (
    Progress,
    SelectedLeaf,
    StoredLeaf,
    WholeLeaf,
    write_safetensors,
    write_torch,
)
from flashckpt.format.layout import Leaf
from flashckpt.format.names import AttemptName
from flashckpt.restore.box_reading import BoxReader
from flashckpt.restore.whole_tensors import WholeTensors
from flashckpt.store.base import Store

SUFFIXES = {"safetensors": "safetensors", "torch": "pt"}


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


def export(
    store: Store,
    out: str,
    *,
    format: str = "safetensors",
    step: int | None = None,
    attempt: AttemptName | None = None,
    only: Sequence[str] = (),
    by_rank: bool = False,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the tensors of a committed step (the one that a resume would take, if none is named) to `out`.

    Of a step of several ranks each tensor is whole, and those that differ from rank to rank (buffers,
    counters) are rank 0's. by_rank: a folder instead, with a file for what each rank's own files hold, boxes
    as they are. only: names of parts of the state, or of leaves.

    Raises OptionError where `out` is there already and not `force`, where it is a folder with anything but an
    earlier export in it, or the run, in it or above it; MismatchError where the boxes of a tensor do not make
    it up; NoSuchStepError, DamagedError. Then nothing is left behind, and what stood there stands.
    """
    if format not in SUFFIXES:
        raise OptionError(f"format={format!r}: one of {', '.join(SUFFIXES)}. Nothing was written.")
    open_run(store, create=False)
    check_free(out, store.url, force=force)
    return read_whole(
        store,
        step,
        attempt,
        read=lambda record: _taken_out(record, out, format, only, progress, by_rank=by_rank, force=force),
    )


def _taken_out(
    record: StepRecord,
    out: str,
    format: str,
    only: Sequence[str],
    progress: Progress,
    *,
    by_rank: bool,
    force: bool,
) -> Exported:
    chosen: Mapping[int, Sequence[SelectedLeaf]]
    if record.world > 1 and not by_rank:
        # Every byte is verified as a tensor is put together: nothing is read twice.
        chosen, told = {0: _put_together(record, only)}, progress
    else:
        ranks = sorted(rank.rank for part in record.parts for rank in part.ranks)
        chosen, told = {rank: _selected(record, rank, only) for rank in ranks}, _nobody
        _check_whole(record, ranks, progress)
    files = _written(out, record, chosen, format, told, force=force)
    return Exported(
        run=record.store.url,
        step=record.step,
        attempt=record.attempt,
        out=os.path.abspath(out),
        format=format,
        files=tuple(files),
        leaves=sum(map(len, chosen.values())),
    )


def _nobody(done: int, total: int) -> None:
    """Progress was told of the verification."""


def _put_together(record: StepRecord, only: Sequence[str]) -> list[WholeLeaf]:
    """The tensors of several ranks; `only` as for `_selected`."""
    tensors = WholeTensors(record)
    pairs = [(_under(leaf, only), leaf) for leaf in tensors.layout().leaves]
    found = [WholeLeaf(tensors, taken, leaf) for taken, leaf in pairs if taken is not None]
    if not found:
        raise _no_leaf(record, only, tensors.leaves)
    return found


def _under(leaf: Leaf, only: Sequence[str]) -> Leaf | None:
    """A leaf under the names that were asked for: a tie may have some of its names elsewhere. None where it
    has none of them."""
    names = [name for name in (leaf.name, *leaf.aliases) if _is_chosen(name, only)]
    if not names:
        return None
    return replace(leaf, name=names[0], aliases=tuple(names[1:]), box=None, offset=-1)


def _no_leaf(record: StepRecord, only: Sequence[str], leaves: Iterable[Leaf]) -> NoSuchStepError:
    there = sorted({leaf.name.partition(".")[0] for leaf in leaves})
    return NoSuchStepError(
        f"step {record.step} has no leaf under {' or '.join(only) or 'any name'}. Nothing was written. "
        f"It has: {', '.join(there)}.",
        step=record.step,
    )


def _selected(record: StepRecord, rank: int, only: Sequence[str]) -> list[StoredLeaf]:
    """The leaves of a rank; with `only`, those under one of these names (`model` takes `model.weight`).

    NoSuchStepError where the step has none of that name.
    """
    sources = []
    readers = {
        contents.shard.file: BoxReader(record.store, path, contents) for path, contents in record.files(rank)
    }
    for file, leaf, digest in record.rank(rank).counted():
        if (taken := _under(leaf, only)) is not None:
            sources.append(StoredLeaf(readers[file], taken, leaf, digest))
    if not sources:
        raise _no_leaf(record, only, (leaf for _, c in record.files(rank) for leaf in c.leaves))
    return sorted(sources, key=lambda each: each.leaf.name)


def _check_whole(record: StepRecord, ranks: Sequence[int], progress: Progress) -> None:
    """Read every byte of these ranks' files. DamagedError, before anything is written."""
    files = [(rank, *file) for rank in ranks for file in record.files(rank)]
    total, done = sum(contents.shard.num_bytes for _, _, contents in files), 0
    for rank, path, contents in files:
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
        progress(done, total)


def _is_chosen(name: str, only: Sequence[str]) -> bool:
    return not only or any(name == each or name.startswith(f"{each}.") for each in only)


def _written(
    out: str,
    record: StepRecord,
    chosen: Mapping[int, Sequence[SelectedLeaf]],
    format: str,
    progress: Progress,
    *,
    force: bool,
) -> list[tuple[str, int]]:
    def write(path: str, rank: int) -> int:
        if format == "torch":
            return write_torch(path, chosen[rank])
        return write_safetensors(path, record, rank, chosen[rank], progress)

    with put_in_place(out, force=force) as temporary:
        if len(chosen) == 1:
            return [(os.path.basename(out), write(temporary, *chosen))]
        os.mkdir(temporary)
        names = {rank: rank_file(rank, SUFFIXES[format]) for rank in chosen}
        return [(name, write(os.path.join(temporary, name), rank)) for rank, name in names.items()]
