"""Whether the files that records name are there: shards, and constants shards, which may stand in the folder
of an older attempt, and may be about to go. Changes nothing; see constants.py."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from flashckpt.commit.attempts import attempt_folders, steps_begun
from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.names import (
    BURIED,
    AttemptName,
    attempt_folder,
    constants_path,
    manifest_path,
    owner_of,
    step_folder,
)
from flashckpt.format.records import Buried, FileRecord, Manifest, manifest_of
from flashckpt.store.base import LOST_BYTES, Entry, Store

# Nobody who removes files is stopped for longer, and goes on.
_REMOVER_S = 86400.0


class Going(NamedTuple):
    """A constants shard that is about to go, or may be, why no step is to name it, and the record of that."""

    path: str
    why: str
    record: str


def missing_in(store: Store, folder: str, files: Sequence[FileRecord]) -> list[str]:
    """The paths of the files that are not in a folder with their lengths."""
    if not files:
        return []
    there = {(entry.name, entry.num_bytes) for entry in store.list(folder) if not entry.is_folder}
    return [f"{folder}/{each.file}" for each in files if (each.file, each.num_bytes) not in there]


def missing_constants(store: Store, attempt: AttemptName, constants: Sequence[FileRecord]) -> list[str]:
    """The paths of the constants shards, named so by `attempt`, that are not there with their lengths."""
    found: dict[str, list[FileRecord]] = {}
    for each in constants:
        folder, _, file = constants_path(attempt, each.file).rpartition("/")
        found.setdefault(folder, []).append(each._replace(file=file))
    return [path for folder, files in found.items() for path in missing_in(store, folder, files)]


def buried_constants(store: Store, attempt: AttemptName, names: Iterable[str]) -> list[Going]:
    """The constants shards, named so by `attempt`, that are about to go, or may be."""
    going = []
    for owner, files in _by_owner(attempt, names).items():
        records = dict(_records(store, owner))
        known = {file: path for path, theirs in records.items() for file in theirs or ()}
        unread = [path for path, theirs in records.items() if theirs is None]
        # What a committed step names is in no such record, or its writer has found it named since.
        safe = _named_by_manifests(store, owner) if unread and not known.keys() >= set(files) else set()
        for file in files:
            if file in known:
                why, record = "no step named it, and somebody is removing it", known[file]
            elif unread and file not in safe:
                why = f"no committed step names it, and it may be about to go: {_advice(unread[0])}"
                record = unread[0]
            else:
                continue
            going.append(Going(f"{attempt_folder(owner)}/{file}", why, record))
    return going


def buried_files(store: Store, owner: AttemptName) -> list[str]:
    """The constants shards of an attempt of which it is written down that they are to go."""
    return [file for _, theirs in _records(store, owner) for file in theirs or ()]


def check_records_of_buried(store: Store, owner: AttemptName) -> None:
    """DamagedError where nobody can tell which constants shards of an attempt are about to go: no step could
    be committed that names one which no other names."""
    for path, theirs in _records(store, owner):
        if theirs is None and store.exists(path):
            raise DamagedError(f"Constants cannot be written: {_advice(path)}", path=path)


def is_of_remover(entry: Entry) -> bool:
    """Whether it is the record of somebody who may still be about to remove constants: he may be stopped, and
    a copier may put the same file there again."""
    # By its name: what stands for a record has the bytes of run.json, and is as old as that.
    is_young = not entry.since_s or time.time() - entry.since_s < _REMOVER_S
    return is_young and BURIED.fullmatch(entry.name) is not None


def _records(store: Store, owner: AttemptName) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """What each record of them names, by its path; None for one that cannot be read, or has just gone."""
    folder = attempt_folder(owner)
    for entry in store.list(folder):
        if BURIED.fullmatch(entry.name) is None:
            continue
        path = f"{folder}/{entry.name}"
        try:
            yield path, Buried.from_bytes(store.read(path, Buried.MAX_BYTES), path).files
        except (DamagedError, FormatError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in LOST_BYTES | {errno.ENOENT}:
                raise
            if is_of_remover(entry):
                yield path, None


def _advice(path: str) -> str:
    return (
        f"{path}, which says what is, cannot be read. Steps whose constants a committed step names are saved "
        "as ever. Delete that file if nothing else deletes in this run now; else it counts for a day."
    )


def _named_by_manifests(store: Store, owner: AttemptName) -> set[str]:
    """The constants shards of an attempt that manifests name."""
    found = set[str]()
    for step in steps_begun(store):
        for attempt in attempt_folders(store, step_folder(step)):
            path = manifest_path(step, attempt)
            with suppress(DamagedError, FormatError, FileNotFoundError):
                manifest = manifest_of(store.read(path, Manifest.MAX_BYTES), path)
                if isinstance(manifest, Manifest):
                    named = (owner_of(attempt, file.file) for file in manifest.constants)
                    found |= {file for of, file in named if of == owner}
    return found


def _by_owner(attempt: AttemptName, constants: Iterable[str]) -> dict[AttemptName, list[str]]:
    found: dict[AttemptName, list[str]] = {}
    for name in constants:
        owner, file = owner_of(attempt, name)
        found.setdefault(owner, []).append(file)
    return found
