"""What cut-off writes, dead keepers and dead attempts left behind: naming it, and removing what was named.

Never names what could still be good: a file that a manifest or a part names, or might name because one of
them cannot be read; anything of an attempt that may still have a keeper somewhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from flashckpt.commit.attempts import AttemptInfo, attempt_folders, attempts, newest_claimed
from flashckpt.commit.constants import named_in
from flashckpt.commit.lineage import everything
from flashckpt.commit.steps import read_manifest
from flashckpt.errors import DamagedError
from flashckpt.format.names import (
    ATTEMPTS,
    CONSTANTS,
    MANIFEST,
    MARK,
    PART,
    SHARD,
    AttemptName,
    attempt_folder,
    claim_number,
    claim_path,
    shard_writer,
    step_attempt_folder,
    step_folder,
)
from flashckpt.format.records import Manifest
from flashckpt.persist.at_rest import Rest, Standing, parts_of, rest_of
from flashckpt.store.base import Entry, Store

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Debris:
    """What nobody can use any more: a file, an empty folder, or a whole attempt (`path` is its claim)."""

    path: str
    num_bytes: int = 0
    kind: Literal["file", "folder", "attempt"] = "file"
    attempt: AttemptName | None = None
    step: int | None = None
    why: str = ""


def debris(store: Store, dead: Collection[AttemptName] = (), writers: Collection[str] = ()) -> list[Debris]:
    """`dead` are attempts that are known to be, though nobody has written it down, `writers` the nonces of
    keepers that are certainly dead: of theirs, what an attempt that still lives has is debris, too."""
    known = attempts(store)
    claimed = newest_claimed(store)
    over = _over(known) | set(dead)
    found = list(_of_names(store, ATTEMPTS, 0 if claimed is None else claimed.number))
    for name in attempt_folders(store, ATTEMPTS):
        if name in over:
            found += _temporaries(store, attempt_folder(name), name, None)
    begun = list(everything(store))
    for name in over:
        found += _constants(store, name)
    for each in begun:
        if each.attempt in over:
            found += _of_step(store, each.step, each.attempt)
        elif writers:
            found += _begun_by(store, each.step, each.attempt, writers)
    with_steps = {each.attempt for each in begun}
    for info in known:
        is_idle = info.start is None and info.name != claimed and info.name not in with_steps
        if is_idle and claimed is not None and info.name < claimed:
            path, why = claim_path(info.name.number), "it died before it began"
            found.append(Debris(path=path, kind="attempt", attempt=info.name, why=why))
    return found


def half_written(store: Store, writers: Collection[str]) -> list[Debris]:
    """The shards that these keepers, which are certainly dead, began and that nothing names, in whatever
    attempt.

    A shard's name begins with its keeper's nonce. Only its own writer ever publishes a shard, so that of a
    dead one will never be named: this needs no newest attempt and no commit. What another keeper writes has
    another nonce."""
    begun = everything(store) if writers else ()
    return [found for each in begun for found in _begun_by(store, each.step, each.attempt, writers)]


def remove(store: Store, each: Debris) -> None:
    """Delete what was named. OSError."""
    if each.kind == "folder":
        store.remove(each.path)
        store.remove(each.path.rpartition("/")[0])
        return
    if each.kind == "attempt" and each.attempt is not None:
        # The claim last: as long as it stands, what a crash left of the attempt is found again.
        store.remove_tree(attempt_folder(each.attempt))
    store.remove(each.path)
    # Nobody has a use for a folder that this has left empty.
    if each.step is not None and each.attempt is not None:
        store.remove(step_attempt_folder(each.step, each.attempt))
        store.remove(step_folder(each.step))


def _begun_by(store: Store, step: int, attempt: AttemptName, writers: Collection[str]) -> Iterator[Debris]:
    folder = step_attempt_folder(step, attempt)
    begun = [entry for entry in store.list(folder) if shard_writer(entry.name) in writers]
    named = _named_shards(store, rest_of(store, step, attempt)) if begun else None
    for each in begun:
        if named is not None and each.name not in named and not each.is_folder:
            path = f"{folder}/{each.name}"
            yield Debris(
                path=path, num_bytes=each.num_bytes, attempt=attempt, step=step, why="its write was cut off"
            )


def _over(known: list[AttemptInfo]) -> set[AttemptName]:
    """Attempts of which no keeper writes anything any more. Those before the newest that has started may
    not; of that one, an end that was written down speaks for all only where all ranks had one keeper."""
    started = max((info.name for info in known if info.start is not None), default=None)
    over = set()
    for info in known:
        is_past = started is not None and info.name < started
        is_alone = info.start is None or info.start.world == 1
        if is_past or (info.ended and is_alone):
            over.add(info.name)
    return over


def _of_step(store: Store, step: int, attempt: AttemptName) -> Iterator[Debris]:
    folder = step_attempt_folder(step, attempt)
    yield from _temporaries(store, folder, attempt, step)
    rest = rest_of(store, step, attempt)
    entries = [entry for entry in store.list(folder) if not entry.is_folder]
    if rest.standing is Standing.BURIED:
        gone = [each for each in entries if _is_of_step(each.name)]
        why = "its step was pruned"
    else:
        named = _named_shards(store, rest)
        if named is None:
            return
        gone = [each for each in entries if SHARD.fullmatch(each.name) and each.name not in named]
        why = "its write was cut off"
    for each in gone:
        path = f"{folder}/{each.name}"
        yield Debris(path=path, num_bytes=each.num_bytes, attempt=attempt, step=step, why=why)
    if not entries and rest.standing is Standing.NOTHING:
        yield Debris(path=folder, kind="folder", attempt=attempt, step=step, why="it is empty")


def _constants(store: Store, attempt: AttemptName) -> Iterator[Debris]:
    """The constants shards of an attempt that none of its steps names: a base model's size each."""
    folder = attempt_folder(attempt)
    found = [each for each in store.list(folder) if CONSTANTS.fullmatch(each.name) and not each.is_folder]
    try:
        named = named_in(store, attempt) if found else set()
    except DamagedError:
        return
    for each in found:
        if each.name not in named:
            path = f"{folder}/{each.name}"
            yield Debris(path=path, num_bytes=each.num_bytes, attempt=attempt, why="no step names it")


def _is_of_step(name: str) -> bool:
    patterns = (SHARD, PART, MARK)
    return name != MANIFEST and any(pattern.fullmatch(name) for pattern in patterns)


def _named_shards(store: Store, rest: Rest) -> set[str] | None:
    """The shards that a manifest or a part names. None where one of them cannot be read: it may name any."""
    if rest.problem and rest.standing in (Standing.UNREADABLE, Standing.PARTIAL):
        return None
    parts = rest.parts
    named: set[str] = set()
    if rest.standing in (Standing.COMMITTED, Standing.MISSING):
        manifest = read_manifest(store, rest.step, rest.attempt)
        if not isinstance(manifest, Manifest):
            return None
        named = {each.file for each in manifest.shards}
        found, problem = parts_of(store, rest.folder)
        if problem:
            return None
        parts = tuple(found)
    return named | {rank.shard.file for part in parts for rank in part.ranks}


def _of_names(store: Store, folder: str, newest: int) -> Iterator[Debris]:
    """Half-written claims: of a number that is taken, nobody can use one any more."""
    for entry in store.list(folder):
        match = _temporary(entry)
        number = claim_number(match) if match else None
        if number is not None and number <= newest:
            why = "its write was cut off"
            yield Debris(path=f"{folder}/{entry.name}", num_bytes=entry.num_bytes, why=why)


def _temporaries(store: Store, folder: str, attempt: AttemptName, step: int | None) -> Iterator[Debris]:
    for entry in store.list(folder):
        if _temporary(entry):
            path = f"{folder}/{entry.name}"
            why = "its write was cut off"
            yield Debris(path=path, num_bytes=entry.num_bytes, attempt=attempt, step=step, why=why)


def _temporary(entry: Entry) -> str | None:
    """The name that a temporary file was to have, None for any other file."""
    match = None if entry.is_folder else _TEMPORARY.fullmatch(entry.name)
    return match["name"] if match else None
