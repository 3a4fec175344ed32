"""Whether the files that records name are there: shards, and constants shards, which may stand in the folder
of an older attempt, and may be about to go. Changes nothing; see constants.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from flashckpt.errors import DamagedError
from flashckpt.format.names import BURIED, AttemptName, attempt_folder, constants_path, owner_of
from flashckpt.format.records import Buried, FileRecord
from flashckpt.store.base import Store


def missing_in(store: Store, folder: str, files: Sequence[FileRecord]) -> list[str]:
    """The paths of the files that are not in a folder with their lengths."""
    if not files:
        return []
    there = {entry.name: entry.num_bytes for entry in store.list(folder) if not entry.is_folder}
    return [f"{folder}/{each.file}" for each in files if there.get(each.file) != each.num_bytes]


def missing_constants(store: Store, attempt: AttemptName, constants: Sequence[FileRecord]) -> list[str]:
    """The paths of the constants shards, named so by `attempt`, that are not there with their lengths."""
    found: dict[str, list[FileRecord]] = {}
    for each in constants:
        folder, _, file = constants_path(attempt, each.file).rpartition("/")
        found.setdefault(folder, []).append(each._replace(file=file))
    return [path for folder, files in found.items() for path in missing_in(store, folder, files)]


def buried_constants(store: Store, attempt: AttemptName, names: Iterable[str]) -> list[str]:
    """The paths of the constants shards, named so by `attempt`, that are about to go, or may be."""
    going = []
    for owner, files in _by_owner(attempt, names).items():
        for theirs in _records(store, owner):
            # None: it has just been done, or nobody knows.
            going += [f"{attempt_folder(owner)}/{file}" for file in files if theirs is None or file in theirs]
    return going


def buried_files(store: Store, owner: AttemptName) -> list[str]:
    """The constants shards of an attempt of which it is written down that they are to go."""
    return [file for theirs in _records(store, owner) for file in theirs or ()]


def _records(store: Store, owner: AttemptName) -> Iterator[tuple[str, ...] | None]:
    """What each record of them names; None for one that cannot be read, or has just gone."""
    folder = attempt_folder(owner)
    names = [entry.name for entry in store.list(folder) if BURIED.fullmatch(entry.name)]
    for path in (f"{folder}/{name}" for name in names):
        try:
            yield Buried.from_bytes(store.read(path, Buried.MAX_BYTES), path).files
        except (DamagedError, FileNotFoundError):
            yield None


def _by_owner(attempt: AttemptName, constants: Iterable[str]) -> dict[AttemptName, list[str]]:
    found: dict[AttemptName, list[str]] = {}
    for name in constants:
        owner, file = owner_of(attempt, name)
        found.setdefault(owner, []).append(file)
    return found
