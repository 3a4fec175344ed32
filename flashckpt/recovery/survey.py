"""A look at everything a run has: slots in this node's memory, steps at rest. Changes nothing.

What it finds is true at that moment only; who acts on it looks again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from flashckpt.commit.lineage import everything
from flashckpt.commit.steps import missing_files, read_manifest
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import PART, AttemptName, step_attempt_folder
from flashckpt.format.records import Manifest, Part
from flashckpt.keeper.audit import differing
from flashckpt.keeper.drain import attempt_of
from flashckpt.memory.region import constants_region_name, is_region_name, open_named
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.memory.slot import Sealed, Slot
from flashckpt.store.base import Store

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
            if slot is None or slot.fixed.holds_constants:
                continue
            try:
                sealed = slot.sealed()
            except DamagedError as error:
                seen.append(Seen(slot=name, rank=slot.rank, problem=str(error)))
                continue
            if sealed is not None:
                seen.append(_seen(name, slot, sealed))
    return sorted(seen, key=lambda each: each.age, reverse=True)


OnStorage = Callable[[Metadata], bool]


def torn_leaves(
    runtime: RuntimeFolder, name: str, on_storage: OnStorage = lambda metadata: False
) -> list[str] | None:
    """Names of the leaves of a sealed snapshot whose bytes are not those of its boundary; None where the
    snapshot itself cannot be read, which is as bad. Where storage has its constants already, what memory has
    of them counts for nothing: it is not what a save would write."""
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
            with _constants_of(runtime, slot, sealed) as constants:
                torn = differing(slot, metadata, constants)
            own = len(metadata.layout.leaves)
            if any(index >= own for index in torn) and on_storage(metadata):
                torn = [index for index in torn if index < own]
            return [metadata.leaves[index].name for index in torn]
        except DamagedError:
            return None


def lacks_constants(runtime: RuntimeFolder, name: str, on_storage: OnStorage) -> bool:
    """Whether a sealed snapshot cannot be saved, since it names a region of constants that is not here, and
    storage does not have them."""
    with _opened(runtime, name) as slot:
        if not isinstance(slot, Slot):
            return False
        try:
            sealed = slot.sealed()
            if sealed is None or not sealed.record.constants_nonce:
                return False
            with _constants_of(runtime, slot, sealed) as constants:
                return constants is None and not on_storage(slot.metadata(sealed))
        except DamagedError:
            return False


@contextlib.contextmanager
def _constants_of(runtime: RuntimeFolder, slot: Slot, sealed: Sealed) -> Iterator[Slot | None]:
    """The region that a snapshot names for its constants, where it names one that is here."""
    nonce = sealed.record.constants_nonce
    if not nonce:
        yield None
        return
    with _opened(runtime, constants_region_name(slot.rank, nonce)) as region:
        yield region if isinstance(region, Slot) else None


def _seen(name: str, slot: Slot, sealed: Sealed) -> Seen:
    return Seen(
        slot=name,
        rank=slot.rank,
        step=sealed.step,
        attempt=attempt_of(sealed),
        age=sealed.age,
        num_bytes=sealed.record.image_bytes + sealed.record.constants_bytes,
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
    return [rest_of(store, each.step, each.attempt) for each in everything(store)]


def rest_of(store: Store, step: int, attempt: AttemptName) -> Rest:
    """What one attempt has of one step."""
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
    parts, problem = parts_of(store, step_attempt_folder(step, attempt))
    ranks = sorted(rank.rank for part in parts for rank in part.ranks)
    covered = bool(parts) and ranks == list(range(parts[0].world)) and not problem
    state = State.COMPLETE if covered else State.PARTIAL if parts or problem else State.NOTHING
    return Rest(step=step, attempt=attempt, state=state, parts=tuple(parts), problem=problem)


def parts_of(store: Store, folder: str) -> tuple[list[Part], str]:
    """The parts in a step's folder that can be read, and what is wrong with one that cannot, or nothing."""
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
