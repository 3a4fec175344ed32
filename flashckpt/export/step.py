"""The export of a step. Owns the order: choose, verify, write beside, rename. One rank gives one file,
several ranks a folder with one file each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashckpt.commit.attempts import open_run
from flashckpt.commit.lineage import resolve
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import OptionError
from flashckpt.export.destination import check_free, put_in_place, rank_file
from flashckpt.export.formats import write_safetensors, write_torch
from flashckpt.export.selection import Progress, SelectedLeaf, check_whole, ranks_of, selected
from flashckpt.format.names import AttemptName
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
    ranks = ranks_of(record)
    chosen = {rank: selected(record, rank, only) for rank in ranks}
    total = sum(contents.shard.num_bytes for rank in ranks for _, contents in record.files(rank))
    done = 0
    for rank in ranks:
        done += check_whole(record, rank, progress, done, total)
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


def _written(
    out: str, record: StepRecord, chosen: Mapping[int, list[SelectedLeaf]], format: str, *, force: bool
) -> list[tuple[str, int]]:
    with put_in_place(out, force=force) as temporary:
        if len(chosen) == 1:
            [(rank, sources)] = chosen.items()
            return [(os.path.basename(out), _write(format, temporary, record, rank, sources))]
        os.mkdir(temporary)
        files = []
        for rank, sources in chosen.items():
            name = rank_file(rank, SUFFIXES[format])
            files.append((name, _write(format, os.path.join(temporary, name), record, rank, sources)))
        return files


def _write(format: str, path: str, record: StepRecord, rank: int, sources: list[SelectedLeaf]) -> int:
    if format == "safetensors":
        return write_safetensors(path, record, rank, sources)
    return write_torch(path, sources)
