"""A look at everything a run has: slots in this node's memory, steps at rest, debris. Changes nothing.

What it finds is true at that moment only; who acts on it looks again.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from flashckpt.commit.attempts import attempt_folders, attempts, newest_claimed
from flashckpt.commit.lineage import everything
from flashckpt.commit.steps import missing_files, read_manifest
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.format.names import (
    ATTEMPTS,
    MANIFEST,
    MARK,
    PART,
    SHARD,
    AttemptName,
    attempt_folder,
    claim_number,
    claim_path,
    step_attempt_folder,
)
from flashckpt.format.records import Manifest, Part
from flashckpt.keeper.audit import differing
from flashckpt.keeper.drain import attempt_of
from flashckpt.memory.region import is_region_name, open_named
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.memory.slot import Sealed, Slot
from flashckpt.store.base import Entry, Store

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp")


# Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A sealed snapshot in a slot; or one that cannot be read (`attempt` None), with the reason; or a region
    that is no slot of this run (`is_slot` False), which nobody touches."""

    slot: str
    is_slot: bool = True
    rank: int = 0
    step: int = -1
    attempt: AttemptName | None = None
    age: tuple[int, int, int] = (0, 0, 0)
    num_bytes: int = 0
    is_persisted: bool = False
    is_wanted: bool = False
    problem: str = ""


def slots_in(runtime: RuntimeFolder) -> list[Seen]:
    """The sealed snapshots in named regions, newest first. A memfd is seen by those who hold it only."""
    seen = []
    for name in filter(is_region_name, runtime.names()):
        with _opened(runtime, name) as slot:
            if isinstance(slot, str):
                seen.append(Seen(slot=name, is_slot=False, problem=slot))
                continue
            if slot is None:
                continue
            try:
                sealed = slot.sealed()
            except DamagedError as error:
                seen.append(Seen(slot=name, rank=slot.rank, problem=str(error)))
                continue
            if sealed is not None:
                seen.append(_seen(name, slot, sealed))
    return sorted(seen, key=lambda each: each.age, reverse=True)


def torn_leaves(runtime: RuntimeFolder, name: str) -> list[str] | None:
    """Names of the leaves of a sealed snapshot whose bytes are not those of its boundary; None where the
    snapshot itself cannot be read, which is as bad."""
    with _opened(runtime, name) as slot:
        if not isinstance(slot, Slot):
            return None
        try:
            sealed = slot.sealed()
            if sealed is None:
                return None
            metadata = slot.metadata(sealed)
            begin = os.pread(slot.descriptor, metadata.layout.data_start, slot.image_offset)
            if begin != metadata.layout.header:
                return None
            return [metadata.layout.leaves[index].name for index in differing(slot, metadata)]
        except DamagedError:
            return None


def _seen(name: str, slot: Slot, sealed: Sealed) -> Seen:
    return Seen(
        slot=name,
        rank=slot.rank,
        step=sealed.step,
        attempt=attempt_of(sealed),
        age=sealed.age,
        num_bytes=sealed.record.image_bytes,
        is_persisted=slot.persisted == sealed.generation,
        is_wanted=slot.wants_persist(sealed.generation),
    )


@contextlib.contextmanager
def _opened(runtime: RuntimeFolder, name: str) -> Iterator[Slot | str | None]:
    """A slot, closed again afterwards, or why there is none; None for a region whose making was cut off."""
    descriptor, slot = -1, None
    try:
        descriptor = open_named(runtime, name).descriptor
        if not os.pread(descriptor, 8, 0).strip(b"\0"):
            os.close(descriptor)
            descriptor = -1
        else:
            slot = Slot.open(descriptor, map_image=False, identity=runtime.identity)
    except (FlashckptError, OSError) as error:
        if descriptor >= 0:
            os.close(descriptor)
        yield str(error)
        return
    try:
        yield slot
    finally:
        if slot is not None:
            slot.close()


# Steps at rest


class State(Enum):
    """What an attempt has of a step."""

    COMMITTED = "committed"
    MISSING = "files are missing"
    UNREADABLE = "its manifest is damaged"
    BURIED = "a tombstone"
    COMPLETE = "all parts and no manifest"
    PARTIAL = "not all parts"
    NOTHING = "no part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """A step of an attempt at rest. `parts` are those that can be read; `problem` says what cannot."""

    step: int
    attempt: AttemptName
    state: State
    parts: tuple[Part, ...] = ()
    problem: str = ""

    @property
    def folder(self) -> str:
        return step_attempt_folder(self.step, self.attempt)


def steps_at_rest(store: Store) -> list[Rest]:
    """Every step of every attempt, newest step first."""
    return [_rest(store, each.step, each.attempt) for each in everything(store)]


def _rest(store: Store, step: int, attempt: AttemptName) -> Rest:
    try:
        found = read_manifest(store, step, attempt)
    except DamagedError as error:
        return Rest(step=step, attempt=attempt, state=State.UNREADABLE, problem=str(error))
    if isinstance(found, Manifest):
        missing = missing_files(store, found)
        state = State.MISSING if missing else State.COMMITTED
        why = f"missing or cut short: {', '.join(missing)}" if missing else ""
        return Rest(step=step, attempt=attempt, state=state, problem=why)
    if found is not None:
        return Rest(step=step, attempt=attempt, state=State.BURIED)
    parts, problem = _parts(store, step_attempt_folder(step, attempt))
    ranks = sorted(rank.rank for part in parts for rank in part.ranks)
    covered = bool(parts) and ranks == list(range(parts[0].world)) and not problem
    state = State.COMPLETE if covered else State.PARTIAL if parts or problem else State.NOTHING
    return Rest(step=step, attempt=attempt, state=state, parts=tuple(parts), problem=problem)


def _parts(store: Store, folder: str) -> tuple[list[Part], str]:
    parts, problem = [], ""
    for entry in store.list(folder):
        if not entry.is_folder and PART.fullmatch(entry.name):
            path = f"{folder}/{entry.name}"
            try:
                parts.append(Part.from_bytes(store.read(path, Part.MAX_BYTES), path))
            except DamagedError as error:
                problem = str(error)
            except FileNotFoundError:
                continue
    return parts, problem


# Debris


@dataclass(frozen=True, slots=True, kw_only=True)
class Debris:
    """What nobody can use any more: a file, an empty folder, or a whole attempt (`path` is its claim)."""

    path: str
    num_bytes: int = 0
    kind: Literal["file", "folder", "attempt"] = "file"
    attempt: AttemptName | None = None
    step: int | None = None
    why: str = ""


def debris(store: Store, dead: Collection[AttemptName] = ()) -> list[Debris]:
    """What cut-off writes and dead attempts left. `dead` are attempts that are known to be, though nobody
    has written it down. Of one that may still have a keeper elsewhere nothing is named, and never a file
    that a manifest or a part names or might."""
    known = attempts(store)
    claimed = newest_claimed(store)
    started = max((info.name for info in known if info.start is not None), default=None)
    over = {info.name for info in known if info.ended or (started is not None and info.name < started)}
    over |= set(dead)
    found = list(_of_names(store, ATTEMPTS, 0 if claimed is None else claimed.number))
    for name in attempt_folders(store, ATTEMPTS):
        if name in over:
            found += _temporaries(store, attempt_folder(name), name, None)
    begun = list(everything(store))
    for each in begun:
        if each.attempt in over:
            found += _of_step(store, each.step, each.attempt)
    with_steps = {each.attempt for each in begun}
    for info in known:
        is_idle = info.start is None and info.name != claimed and info.name not in with_steps
        if is_idle and claimed is not None and info.name < claimed:
            path, why = claim_path(info.name.number), "it died before it began"
            found.append(Debris(path=path, kind="attempt", attempt=info.name, why=why))
    return found


def _of_step(store: Store, step: int, attempt: AttemptName) -> Iterator[Debris]:
    folder = step_attempt_folder(step, attempt)
    yield from _temporaries(store, folder, attempt, step)
    rest = _rest(store, step, attempt)
    entries = [entry for entry in store.list(folder) if not entry.is_folder]
    if rest.state is State.BURIED:
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
    if not entries and rest.state is State.NOTHING:
        yield Debris(path=folder, kind="folder", attempt=attempt, step=step, why="it is empty")


def _is_of_step(name: str) -> bool:
    patterns = (SHARD, PART, MARK)
    return name != MANIFEST and any(pattern.fullmatch(name) for pattern in patterns)


def _named_shards(store: Store, rest: Rest) -> set[str] | None:
    """The shards that a manifest or a part names. None where one of them cannot be read: it may name any."""
    if rest.problem and rest.state in (State.UNREADABLE, State.PARTIAL):
        return None
    parts = rest.parts
    named: set[str] = set()
    if rest.state in (State.COMMITTED, State.MISSING):
        manifest = read_manifest(store, rest.step, rest.attempt)
        if not isinstance(manifest, Manifest):
            return None
        named = {each.file for each in manifest.shards}
        found, problem = _parts(store, rest.folder)
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
