"""Reading every byte of committed steps again. Owns the report; repairs, marks and deletes nothing.

A shard is whole when its chunks have their checksums, its leaves their digests, and its header is the
one that its part describes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, replace
from typing import Any, Literal

from flashckpt import _native
from flashckpt.commit.attempts import bounds, open_run
from flashckpt.commit.lineage import VisibleStep, everything, has_manifest, in_lineage, looked_for, resolve
from flashckpt.commit.steps import StepRecord, read_step
from flashckpt.errors import DamagedError, FlashckptError, NoSuchStepError
from flashckpt.format.names import AttemptName, manifest_path, owner_of, step_attempt_folder
from flashckpt.format.records import Contents
from flashckpt.store.base import LengthError, Store

FileStatus = Literal["ok", "missing", "truncated", "damaged", "unreadable"]
# Bytes read so far, and bytes to read in all.
Progress = Callable[[int, int], None]

# A file, and what a step says of it: length, checksums and digests.
_Claimed = tuple[str, int, bytes, tuple[int, ...]]

_POLL_S = 0.1
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One file. `detail` says what is wrong with it, empty where nothing is. One that is "unreadable" may be
    whole: its storage failed."""

    step: int
    attempt: str
    file: str
    status: FileStatus
    detail: str = ""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Every file that was read, in the order of steps, newest first."""

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
    attempt: AttemptName | None = None,
    all_steps: bool = False,
    threads: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Read all committed visible steps again, or one, or with `all_steps` those of every branch too.

    Damage is in the report, not raised, and a step that retention deletes meanwhile is not in it. Raises
    NoSuchStepError for a step that is not there, RunError for a folder that is no run, FormatError.
    """
    open_run(store, create=False)
    rows = looked_for(store, lambda: _rows(store, step, attempt, all_steps, threads, progress))
    while step is not None and not rows:
        # Another one of that number, or the words for none.
        rows = _rows(store, step, attempt, all_steps, threads, progress)
    order = sorted(range(len(rows)), key=lambda i: (-rows[i].step, rows[i].attempt, i))
    return Report(rows=tuple(rows[i] for i in order))


def _rows(
    store: Store,
    step: int | None,
    attempt: AttemptName | None,
    all_steps: bool,
    threads: int,
    progress: Progress | None,
) -> list[Row]:
    known: dict[_Claimed, Row] = {}
    rows: list[Row] = []
    records = []
    for each in _chosen(store, step, attempt, all_steps):
        try:
            record, found = _records(store, each)
        except NoSuchStepError:
            if step is not None:
                raise
            continue
        rows += found
        records.append(record)
    reading = _Reading(store, _bytes_of(records), threads, progress)
    for record in records:
        if record is not None:
            rows += _shards(record, known, reading)
    gone = {(row.step, row.attempt) for row in rows if row.status != "ok" and not _is_there(store, row)}
    return [row for row in rows if (row.step, row.attempt) not in gone]


def verify_file(
    store: Store,
    path: str,
    contents: Contents,
    into: memoryview | None = None,
    *,
    threads: int = 2,
    progress_word: int = 0,
) -> tuple[FileStatus, str]:
    """One shard or constants shard against its record: its status, and what is wrong in words. `into`: the
    memory that it is read into, and whose bytes are then those that were compared."""
    layout = contents.layout()
    try:
        found = store.read_ranges(path, contents, into, threads=threads, progress=progress_word)
        size, file_bytes = layout.data_start, contents.shard.num_bytes
        header = bytes(into[:size]) if into is not None else store.read_bytes(path, 0, size, file_bytes)
    except FileNotFoundError:
        return "missing", "there is no such file"
    except LengthError as error:
        return "truncated", str(error)
    except DamagedError as error:
        return "damaged", str(error)
    except OSError as error:
        # It says nothing of the bytes.
        return "unreadable", str(error)
    if header != layout.header:
        return "damaged", "its header is not the one that its part describes"
    wrong = found.wrong_leaves(contents)
    return ("damaged", _words(found.bad_chunks, wrong)) if found.bad_chunks or wrong else ("ok", "")


class _Reading:
    """How far the reading is, told to whoever asked while the native engine works."""

    def __init__(self, store: Store, total: int, threads: int, progress: Progress | None) -> None:
        self._store, self._total, self._threads, self._progress = store, total, threads, progress
        self._before = 0
        self._word = array("Q", [0])

    def is_there(self, path: str) -> bool:
        return self._store.exists(path)

    def file(self, path: str, contents: Contents) -> tuple[FileStatus, str]:
        if self._progress is None:
            return verify_file(self._store, path, contents, threads=self._threads)
        self._word[0] = 0
        word = _native.address_of(self._word)
        with ThreadPoolExecutor(1) as pool:
            how: dict[str, Any] = {"threads": self._threads, "progress_word": word}
            future = pool.submit(verify_file, self._store, path, contents, **how)
            while True:
                try:
                    result = future.result(timeout=_POLL_S)
                    break
                except NotYet:
                    if future.done():
                        raise
                    self._progress(self._before + self._word[0], self._total)
        self._before += contents.shard.num_bytes
        self._progress(self._before, self._total)
        return result


def _chosen(
    store: Store, step: int | None, attempt: AttemptName | None, all_steps: bool
) -> list[VisibleStep]:
    """The steps to read: those with a manifest. Incomplete ones too, since this is where they are told."""
    if step is not None and attempt is not None:
        return [VisibleStep(step, attempt)]
    if step is not None:
        found = [each for each in _with_manifests(store, all_steps) if each.step == step]
        return found or [VisibleStep(step, resolve(store, step).attempt)]
    return _with_manifests(store, all_steps)


def _with_manifests(store: Store, all_steps: bool) -> list[VisibleStep]:
    begun = everything(store) if all_steps else in_lineage(store, bounds(store))
    return [each for each in begun if has_manifest(store, each)]


def _records(store: Store, each: VisibleStep) -> tuple[StepRecord | None, list[Row]]:
    """The records of a step, and a row for its manifest and each part."""
    name, folder = str(each.attempt), step_attempt_folder(each.step, each.attempt)
    try:
        record = read_step(store, each.step, each.attempt)
    except NoSuchStepError:
        raise
    except FlashckptError as error:
        path = error.path or manifest_path(each.step, each.attempt)
        status: FileStatus = "damaged" if store.exists(path) else "missing"
        return None, [Row(step=each.step, attempt=name, file=path, status=status, detail=str(error))]
    files = [manifest_path(each.step, each.attempt)]
    files += [f"{folder}/{head.file}" for head in record.parts.heads]
    return record, [Row(step=each.step, attempt=name, file=file, status="ok") for file in files]


def _shards(record: StepRecord, known: dict[_Claimed, Row], reading: _Reading) -> Iterator[Row]:
    """Rows for the shards of a step. A constants shard that several steps name is read once; if it is not
    whole, each of them has a row that says so. Where they do not say the same of it, it is read for each."""
    for rank in (rank.rank for head in record.parts.heads for rank in head.ranks):
        try:
            files = record.files(rank)
        except DamagedError as error:
            path = error.path or manifest_path(record.step, record.attempt)
            yield Row(
                step=record.step,
                attempt=str(record.attempt),
                file=path,
                status="damaged" if reading.is_there(path) else "missing",
                detail=str(error),
            )
            continue
        for file, contents in files:
            claimed = file, contents.shard.num_bytes, contents.shard.checksums, contents.digests
            if claimed not in known:
                status, detail = reading.file(file, contents)
                known[claimed] = Row(
                    step=record.step,
                    attempt=str(record.attempt),
                    file=file,
                    status=status,
                    detail=detail,
                    num_bytes=contents.shard.num_bytes,
                )
                yield known[claimed]
            elif known[claimed].status != "ok":
                yield replace(known[claimed], step=record.step, num_bytes=0)


def _is_there(store: Store, row: Row) -> bool:
    attempt = AttemptName.parse(row.attempt)
    assert attempt is not None
    return has_manifest(store, VisibleStep(row.step, attempt))


def _bytes_of(records: Iterable[StepRecord | None]) -> int:
    """Bytes to read, a constants shard that several steps name counted once."""
    sizes: dict[tuple[object, str], int] = {}
    for record in records:
        if record is not None:
            sizes |= {
                ((record.step, record.attempt), each.file): each.num_bytes for each in record.manifest.shards
            }
            sizes |= {owner_of(record.attempt, e.file): e.num_bytes for e in record.manifest.constants}
    return sum(sizes.values())


def _words(bad_chunks: list[int], leaves: list[str]) -> str:
    words = []
    if bad_chunks:
        chunks = ", ".join(map(str, bad_chunks[:_SHOWN])) + (" …" if len(bad_chunks) > _SHOWN else "")
        words.append(f"chunk {chunks} does not have its checksum")
    if leaves:
        names = ", ".join(leaves[:_SHOWN]) + (" …" if len(leaves) > _SHOWN else "")
        words.append(f"not the bytes that were captured: {names}")
    return "; ".join(words)
