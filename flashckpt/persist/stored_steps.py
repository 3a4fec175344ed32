"""What attempts have of steps at rest: committed, cut off, or all its parts and no manifest. Changes nothing.

What it finds is true at that moment only; who acts on it looks again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from flashckpt.commit import attempts
from flashckpt.commit.lineage import everything
from flashckpt.commit.step_parts import part_paths
from flashckpt.commit.steps import have_one_boundary, missing_files, read_manifest
from flashckpt.commit.verification import verify_file
from flashckpt.errors import DamagedError
from flashckpt.format.names import AttemptName, constants_path, step_attempt_folder
from flashckpt.format.records import Manifest, Part, PartHead
from flashckpt.store.base import Store

_SHOWN = 4


class Completeness(Enum):
    """What an attempt has of a step."""

    COMMITTED = "committed"
    MISSING = "files are missing"
    UNREADABLE = "its manifest is damaged"
    BURIED = "a tombstone"
    COMPLETE = "all parts and no manifest"
    PARTIAL = "not all parts"
    NOTHING = "no part"


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A step of an attempt at rest. `heads` are those of the parts, of a step without a manifest, that can be
    read; `problem` says what cannot."""

    step: int
    attempt: AttemptName
    completeness: Completeness
    problem: str = ""
    heads: tuple[PartHead, ...] = ()

    @property
    def folder(self) -> str:
        return step_attempt_folder(self.step, self.attempt)

    @property
    def is_waiting(self) -> bool:
        """Whether only parts of other nodes are missing."""
        return self.completeness is Completeness.PARTIAL and not self.problem


def unfinished(store: Store) -> list[StoredStep]:
    """Steps without a manifest of which parts are there, newest first."""
    found = (stored_step(store, each.step, each.attempt) for each in everything(store))
    return [each for each in found if each.completeness in (Completeness.COMPLETE, Completeness.PARTIAL)]


def stored_step(store: Store, step: int, attempt: AttemptName) -> StoredStep:
    """What one attempt has of one step."""
    try:
        manifest = read_manifest(store, step, attempt)
    except DamagedError as error:
        return StoredStep(step, attempt, Completeness.UNREADABLE, str(error))
    if isinstance(manifest, Manifest):
        missing = missing_files(store, manifest)
        why = f"missing or cut short: {', '.join(missing[:_SHOWN])}" if missing else ""
        found = Completeness.MISSING if missing else Completeness.COMMITTED
        return StoredStep(step, attempt, found, why)
    if manifest is not None:
        return StoredStep(step, attempt, Completeness.BURIED)
    heads, problem = heads_of(store, step_attempt_folder(step, attempt))
    ranks = sorted(rank.rank for head in heads for rank in head.ranks)
    found = Completeness.PARTIAL if heads or problem else Completeness.NOTHING
    here = attempts.ranks_here(store, attempt) if heads else None
    if heads and ranks == [rank for run in here or (range(heads[0].world),) for rank in run] and not problem:
        found = Completeness.COMPLETE
    return StoredStep(step, attempt, found, problem, tuple(heads))


def heads_of(store: Store, folder: str) -> tuple[list[PartHead], str]:
    """The heads of the parts in a step's folder that can be read, every byte of which is looked at, and what
    is wrong with one that cannot, or nothing."""
    heads, problem = [], ""
    for path in part_paths(store, folder):
        try:
            heads.append(_part(store, path).head())
        except DamagedError as error:
            problem = str(error)
        except FileNotFoundError:
            continue
    return heads, problem


def _part(store: Store, path: str) -> Part:
    return Part.from_bytes(store.read(path, Part.MAX_BYTES), path)


def refusal(store: Store, stored: StoredStep, *, read: bool) -> tuple[str, bool]:
    """Why an unfinished step is not to be committed, empty where it is; and whether that is damage. With
    `read` every byte is looked at first, so that no damaged step becomes the newest."""
    if stored.completeness is not Completeness.COMPLETE:
        return stored.problem or "not all of its ranks' parts are there", bool(stored.problem)
    if not have_one_boundary(stored.heads):
        return "its parts are of different boundaries, and no step together", False
    newer = attempts.superseded_by(store, stored.attempt, stored.step, stored.heads[0].boundary)
    if newer is not None:
        return f"attempt {newer} has begun since: what older ones left does not become part of the run", False
    if attempts.read_start(store, stored.attempt) is None:
        return "its attempt has no start.json", False
    wrong = [f"{file}: {why}" for file, why in _wrong_files(store, stored)] if read else []
    return "; ".join(wrong[:_SHOWN]), bool(wrong)


def _wrong_files(store: Store, stored: StoredStep) -> Iterator[tuple[str, str]]:
    paths = (f"{stored.folder}/{head.file}" for head in stored.heads)
    for rank in (rank for path in paths for rank in _part(store, path).ranks):
        named = [(f"{stored.folder}/{rank.shard.file}", rank.contents)]
        if rank.constants is not None:
            named.append((constants_path(stored.attempt, rank.constants.shard.file), rank.constants))
        for file, contents in named:
            status, detail = verify_file(store, file, contents)
            if status != "ok":
                yield file, f"{status}, {detail}"
