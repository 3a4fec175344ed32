"""The export of a step. Owns the order: choose, verify, write beside, rename. One rank gives one file,
several ranks a folder with one file each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flashckpt.commit.attempts import open_run
from flashckpt.commit.lineage import resolve
from flashckpt.commit.steps import StepRecord
from flashckpt.commit.verification import verify_file
from flashckpt.errors import DamagedError, NoSuchStepError, OptionError
from flashckpt.export.destination import check_free, put_in_place, rank_file
from flashckpt.export.formats import SelectedLeaf, write_safetensors, write_torch
from flashckpt.format.names import AttemptName
from flashckpt.restore.box_reading import BoxReader
from flashckpt.store.base import Store

Progress = Callable[[int, int], None]
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
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the tensors of a committed step (the one that a resume would take, if none is named) to `out`.

    only: names of parts of the state, or of leaves. Raises OptionError where `out` is there already and not
    `force`, where it is a folder with anything but an earlier export in it, or the run, in it or above it;
    NoSuchStepError, DamagedError. Then nothing is left behind, and what stood there stands.
    """
    if format not in SUFFIXES:
        raise OptionError(f"format={format!r}: one of {', '.join(SUFFIXES)}. Nothing was written.")
    open_run(store, create=False)
    check_free(out, store.url, force=force)
    record = resolve(store, step, attempt)
    ranks = sorted(rank.rank for part in record.parts for rank in part.ranks)
    chosen = {rank: _selected(record, rank, only) for rank in ranks}
    _check_whole(record, ranks, progress)
    files = _written(out, record, chosen, format, force=force)
    return Exported(
        run=store.url,
        step=record.step,
        attempt=record.attempt,
        out=os.path.abspath(out),
        format=format,
        files=tuple(files),
        leaves=sum(map(len, chosen.values())),
    )


def _selected(record: StepRecord, rank: int, only: Sequence[str]) -> list[SelectedLeaf]:
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
            # Under the names that were asked for: a tie may have some of its names elsewhere.
            taken = replace(leaf, name=names[0], aliases=tuple(names[1:]), box=None, offset=-1)
            sources.append(SelectedLeaf(readers[file], taken, leaf, digest))
    if not sources:
        there = sorted({leaf.name.partition(".")[0] for _, c in record.files(rank) for leaf in c.leaves})
        raise NoSuchStepError(
            f"step {record.step} has no leaf under {' or '.join(only) or 'any name'}. Nothing was written. "
            f"It has: {', '.join(there)}.",
            step=record.step,
        )
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
    out: str, record: StepRecord, chosen: Mapping[int, list[SelectedLeaf]], format: str, *, force: bool
) -> list[tuple[str, int]]:
    def write(path: str, rank: int) -> int:
        if format == "torch":
            return write_torch(path, chosen[rank])
        return write_safetensors(path, record, rank, chosen[rank])

    with put_in_place(out, force=force) as temporary:
        if len(chosen) == 1:
            return [(os.path.basename(out), write(temporary, *chosen))]
        os.mkdir(temporary)
        names = {rank: rank_file(rank, SUFFIXES[format]) for rank in chosen}
        return [(name, write(os.path.join(temporary, name), rank)) for rank, name in names.items()]
