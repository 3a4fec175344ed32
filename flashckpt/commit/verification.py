"""Verification: reads every byte of committed steps again. Owns the report; changes nothing.

A shard is whole if its chunks have their checksums, its leaves their digests, and its header is the one that
its part describes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from flashckpt import _native
from flashckpt.commit.lineage import named, resolve, until_stable
from flashckpt.commit.steps import StepRecord, committed, read_step
from flashckpt.commit.view import HOME, View, ask, open_run
from flashckpt.errors import DamagedError, FlashckptError, NoSuchStepError
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.format.records import Contents
from flashckpt.printable import listed
from flashckpt.store.base import LengthError, Store
from flashckpt.store.read_plan import read_shard
from flashckpt.threads import watched

FileStatus = Literal["ok", "missing", "truncated", "damaged", "unreadable"]

Progress = Callable[[int, int], None]
"""Called with the bytes read so far, and the bytes to read in all."""

_Claimed = tuple[str, int, bytes, tuple[int, ...]]
"""A file, with the length, checksums and digests in a step's record."""

_Read = Callable[[str, Contents], tuple[FileStatus, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One file. `detail`: what is wrong, empty if it is whole. An "unreadable" file may be whole: its storage
    failed."""

    name: CommitName
    file: str
    status: FileStatus
    detail: str = ""
    num_bytes: int = 0

    @property
    def step(self) -> int:
        return self.name.step

    @property
    def attempt(self) -> str:
        return str(self.name.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Every file that was read, newest step first."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.status == "ok" for row in self.rows)

    @property
    def damaged(self) -> tuple[Row, ...]:
        """The files that are not whole: damaged, truncated or missing."""
        return tuple(row for row in self.rows if row.status != "ok")

    @property
    def num_bytes(self) -> int:
        """Bytes of the shards that were read."""
        return sum(row.num_bytes for row in self.rows)


def verify(
    store: Store,
    step: int | None = None,
    *,
    at: AttemptName | SnapshotId | None = None,
    all_steps: bool = False,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Read all visible steps again, or one (a visible step, or that of the attempt or snapshot `at`); with
    `all_steps` also those of other branches.

    Damage is reported, not raised. A step that retention deletes meanwhile is not in the report. Raises
    NoSuchStepError for a step that is not there, RunError for a folder that is no run, FormatError.
    """
    open_run(store, create=False)
    word = array("Q", [0, 0])  # the bytes that were read, and that are to be read
    read = partial(verify_file, store, progress_word=_native.address_of(word))

    def find() -> list[Row]:
        rows, records, known = list[Row](), list[StepRecord](), dict[_Claimed, Row]()
        chosen = named(View.of(store), step, at, of_all=all_steps)  # with incomplete ones
        for each in chosen or ([] if step is None else [resolve(store, step, at).name]):
            try:
                record, found = _records(store, each)
            except NoSuchStepError:
                if step is not None:
                    raise
                continue
            rows += found
            records += [] if record is None else [record]
        word[0], word[1] = 0, _bytes_of(records)
        while records:  # each leaves memory, with its parts, before the next one is read
            rows += _shards(records.pop(0), known, read)
        word[0] = word[1]
        suspects = {row.name for row in rows if row.status != "ok"}
        gone = suspects.difference(View.of(store).checkpoints) if suspects else ()
        return [row for row in rows if row.name not in gone]

    def report() -> None:
        if word[1]:
            progress(word[0], word[1])

    rows = watched("verify", lambda: until_stable(store, find), report)
    return Report(rows=tuple(sorted(rows, key=lambda row: row.name, reverse=True)))


def _records(store: Store, name: CommitName) -> tuple[StepRecord | None, list[Row]]:
    """The record of a step, and a row for its manifest and each part."""
    view = View.of(store)
    manifest = committed(view, name).manifest_path
    try:
        record = read_step(view, name).check()
    except FlashckptError as error:
        return None, [_problem(store, name, error.path or manifest, error)]
    files = [manifest, *(record.part_path(place) for place in range(len(record.parts)))]
    return record, [Row(name=name, file=file, status="ok") for file in files]


def _problem(store: Store, name: CommitName, path: str, error: FlashckptError) -> Row:
    status: FileStatus = "damaged" if store.exists(path) else "missing"
    return Row(name=name, file=path, status=status, detail=str(error))


def _shards(record: StepRecord, known: dict[_Claimed, Row], read: _Read) -> Iterator[Row]:
    """Rows for the shards of a step. A frozen file that several steps name with the same record is read
    once; if it is not whole, each of them has a row for it."""
    # A compressed file with the right bytes may have another length: then no start takes the step.
    misfits = set[str]()
    with suppress(DamagedError, OSError):  # reading the files says more
        misfits |= set(ask(record.store, HOME.missing(record.manifest)))
    for rank in record.parts.ranks:
        try:
            files = record.files(rank)
        except DamagedError as error:
            yield _problem(record.store, record.name, error.path or record.folder, error)
            continue
        for file, contents in files:
            claimed = file, contents.num_bytes, contents.checksums, contents.digests
            is_known = claimed in known
            if not is_known:
                state, detail = read(file, contents)
                known[claimed] = Row(name=record.name, file=file, status=state, detail=detail)
            row = replace(known[claimed], name=record.name)
            if row.status == "ok" and file in misfits:
                row = replace(row, status="damaged", detail="its length is not the one in the manifest")
            if not is_known or row.status != "ok":
                yield replace(row, num_bytes=0 if is_known else contents.num_bytes)


def _bytes_of(records: Iterable[StepRecord]) -> int:
    """Bytes to read. A frozen file that several steps name counts once."""
    sizes: dict[tuple[str, str], int] = {}
    for manifest in (each.manifest for each in records):
        sizes |= {(manifest.folder.path, shard.name): shard.num_bytes for shard in manifest.shards}
        sizes |= {(each.base.path, each.name): each.num_bytes for each in manifest.frozen}
    return sum(sizes.values())


# ---- one file


def verify_file(
    store: Store,
    path: str,
    contents: Contents,
    into: memoryview | None = None,
    *,
    progress_word: int = 0,
) -> tuple[FileStatus, str]:
    """Compare one shard or frozen file with its record. Returns its status, and what is wrong. `into`:
    the memory that it is read into; its bytes are the compared ones."""
    try:
        found = read_shard(store, path, contents, into, progress=progress_word)
    except FileNotFoundError:
        return "missing", "there is no such file"
    except LengthError as error:
        return "truncated", str(error)
    except DamagedError as error:
        return "damaged", str(error)
    except OSError as error:
        # The bytes may be right.
        return "unreadable", str(error)
    wrong = found.wrong_leaves(contents)
    if found.bad_chunks or wrong:
        chunks = f"chunk {listed([*map(str, found.bad_chunks)])} does not have its checksum"
        leaves = f"not the bytes that were captured: {listed(wrong)}"
        return "damaged", "; ".join([chunks] * bool(found.bad_chunks) + [leaves] * bool(wrong))
    if found.header != contents.layout().header:
        return "damaged", "its header is not the one that its part describes"
    return "ok", ""
