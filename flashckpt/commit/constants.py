"""Constants shards: the one that a new step may name, a name for the next, and the removal of those that no
step names.

Owns where they are looked for, what must be true of one before it is used again, and the order in which they
go. Writes no leaf's bytes, and publishes no part: see steps.py. The order is numbered in docs/commit.md.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flashckpt.commit import lineage
from flashckpt.commit.constants_files import buried_constants, buried_files
from flashckpt.commit.no_room import Created, create_or_stand_in, replace_stand_in
from flashckpt.commit.steps import constants_of_parts, read_manifest, read_step
from flashckpt.commit.verification import verify_file
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.format.layout import Layout
from flashckpt.format.names import (
    CONSTANTS,
    AttemptName,
    as_named_by,
    attempt_folder,
    buried_path,
    constants_name,
    constants_path,
    owner_of,
    step_attempt_folder,
)
from flashckpt.format.records import Buried, Contents, Manifest
from flashckpt.store.base import Entry, Store

log = logging.getLogger(__name__)

# Of one attempt and of the one before it the newest step is asked; no other can be meant.
_MOST_ATTEMPTS = 2


# ---- which one a step may name


def is_of(contents: Contents, layout: Layout, digests: Sequence[int]) -> bool:
    """Whether a constants shard holds exactly these leaves with these digests."""
    return contents.leaves == layout.leaves and list(contents.digests) == list(digests)


def is_there(store: Store, attempt: AttemptName, contents: Contents) -> bool:
    """Whether the file that a part of `attempt` names so is there with its length, and is not about to go."""
    look, path = store.at_once(), constants_path(attempt, contents.shard.file)
    folder, _, file = path.rpartition("/")
    found = {(entry.name, entry.num_bytes) for entry in look.list(folder)}
    return (file, contents.shard.num_bytes) in found and not buried_constants(
        look, attempt, [contents.shard.file]
    )


def is_whole(
    store: Store, attempt: AttemptName, contents: Contents, *, threads: int, progress_word: int
) -> bool:
    """Whether a step of `attempt` may be the first of it that names this file. Where its bytes are on this
    machine all are read: what the attempt builds on must not have rotted under the one before. A server has
    compared them when they were sent, and guards them."""
    if not is_there(store, attempt, contents):
        return False
    path = constants_path(attempt, contents.shard.file)
    try:
        descriptor = store.descriptor(path, contents.shard.num_bytes)
    except (OSError, FlashckptError) as error:
        log.warning("%s cannot be opened: %s; the constants are written again", path, error)
        return False
    if descriptor is not None:
        os.close(descriptor)
    elif store.capabilities.part_bytes:
        return True
    # Without a descriptor it may also stand compressed here.
    status, detail = verify_file(store, path, contents, threads=threads, progress_word=progress_word)
    if status != "ok":
        log.warning("%s is %s (%s): the constants are written again", path, status, detail)
    return status == "ok"


def named(store: Store, attempt: AttemptName, rank: int) -> Iterator[tuple[AttemptName, Contents]]:
    """The constants shards of a rank that the newest committed steps name, as a part of `attempt` names them:
    that of `attempt` itself, and that of the one which it went on from; each with the attempt of its step. A
    step that cannot be read names none."""
    seen: set[AttemptName] = set()
    for each in lineage.newest_first(store):
        if each.attempt in seen or each.attempt.number > attempt.number:
            continue
        seen.add(each.attempt)
        try:
            constants = read_step(store, each.step, each.attempt, {rank}).rank(rank).constants
        except (FlashckptError, OSError) as error:
            log.debug("the constants of step %d cannot be looked at: %s", each.step, error)
            constants = None
        if constants is not None:
            name = as_named_by(attempt, *owner_of(each.attempt, constants.shard.file))
            yield each.attempt, replace(constants, shard=replace(constants.shard, file=name))
        if len(seen) == _MOST_ATTEMPTS or (len(seen) == 1 and each.attempt != attempt):
            return


def stands(store: Store, attempt: AttemptName, rank: int, layout: Layout, digests: Sequence[int]) -> bool:
    """Whether `attempt` may name a shard of these constants, as far as its name and length tell."""
    return any(is_of(contents, layout, digests) for _, contents in named(store, attempt, rank))


def fresh_name(store: Store, attempt: AttemptName, rank: int) -> str:
    """A file name that no constants shard of the attempt has. Whoever creates it first has it."""
    look = store.at_once()
    # One that was lost may be put back, and must not be another step's meanwhile. And a step that names one
    # that is to go, or was, is never committed.
    found = everything_named(look, attempt)
    names = [*files_of(look, attempt), *(file for owner, file in found.files if owner == attempt)]
    names += buried_files(look, attempt)
    numbers = [0, *(number for of_rank, number in map(_numbers, names) if of_rank == rank)]
    return constants_name(rank, max(numbers) + 1)


# ---- which ones go


@dataclass
class Named:
    """The constants shards that parts and manifests name, each with the attempt in whose folder it stands.
    Of parts that cannot be read `unread` is the newest attempt: they may name any of it, or before it."""

    files: set[tuple[AttemptName, str]] = field(default_factory=set)
    unread: int = 0

    def has(self, owner: AttemptName, file: str) -> bool:
        """Whether a file is named, or may be."""
        return owner.number <= self.unread or (owner, file) in self.files


def everything_named(store: Store, owner: AttemptName | None = None) -> Named:
    """What the steps of all attempts name; of the constants of `owner`, at least. A step that is deleted
    names what it named, until its parts have gone."""
    found = Named()
    for each in lineage.everything(store):
        # None names what is newer than itself.
        if owner is None or each.attempt.number >= owner.number:
            try:
                found.files |= _named_in(store, each, with_parts=True)
            except DamagedError:
                found.unread = max(found.unread, each.attempt.number)
    return found


def are_named(store: Store, owner: AttemptName) -> bool:
    """Whether any constants shard of an attempt is named, or may be. Manifests are asked first, the newest
    before others: mostly it is the last that was written."""
    begun = [each for each in lineage.everything(store) if each.attempt.number >= owner.number]
    try:
        return any(
            of == owner
            for with_parts in (False, True)
            for each in begun
            for of, _ in _named_in(store, each, with_parts=with_parts)
        )
    except DamagedError:
        return True


def _named_in(store: Store, each: lineage.VisibleStep, *, with_parts: bool) -> set[tuple[AttemptName, str]]:
    manifest = read_manifest(store, each.step, each.attempt)
    # Both: a part that is lost may be put back.
    names = {file.file for file in manifest.constants} if isinstance(manifest, Manifest) else set()
    if with_parts:
        names |= constants_of_parts(store, step_attempt_folder(each.step, each.attempt))
    return {owner_of(each.attempt, name) for name in names}


def files_of(store: Store, attempt: AttemptName) -> list[str]:
    """The constants shards in the folder of an attempt, whole or not."""
    return [each.name for each in store.list(attempt_folder(attempt)) if is_one(each)]


def is_one(entry: Entry) -> bool:
    """Whether what is in the folder of an attempt is a constants shard, whole or not."""
    return CONSTANTS.fullmatch(entry.name) is not None and not entry.is_folder


def unnamed(above: Store, store: Store, attempt: AttemptName) -> list[str]:
    """The constants shards of an attempt, which `above` shows, that no part names, but for the newest of each
    rank, which the next step may name."""
    numbers: dict[int, list[tuple[int, str]]] = {}
    for name in files_of(above, attempt):
        rank, number = _numbers(name)
        numbers.setdefault(rank, []).append((number, name))
    older = {name for each in numbers.values() for _, name in sorted(each)[:-1]}
    return _without_named(store, attempt, older)


def unnamed_of(store: Store, attempt: AttemptName, rank: int) -> list[str]:
    """All of a rank that no part names, the newest too."""
    return _without_named(
        store, attempt, [name for name in files_of(store, attempt) if _numbers(name)[0] == rank]
    )


def _without_named(store: Store, attempt: AttemptName, names: Collection[str]) -> list[str]:
    found = everything_named(store, attempt) if names else Named()
    return sorted(name for name in names if not found.has(attempt, name))


def remove(store: Store, owner: AttemptName, files: Collection[str], *, keeps_names: bool = False) -> bool:
    """Remove constants shards of an attempt that no step names. False where one is named after all, or may
    be: such a one stays. `keeps_names`: no file ever gets the name of one of these again. OSError.

    First it is written down which are to go, then looked once more: whoever commits looks for that record
    once his parts stand, so that he has found it, or they are found here.
    """
    path = buried_path(owner, secrets.token_hex(4))
    record = Buried(attempt=owner, files=tuple(sorted(files))).to_bytes()
    if not (created := create_or_stand_in(store, path, record)):
        raise FileExistsError(path)
    gone = _without_named(store.at_once(), owner, files)
    if not store.exists(path):
        return False  # somebody has removed all of it meanwhile, and what stands there now is another's
    store.remove_files(f"{attempt_folder(owner)}/{file}" for file in gone)
    # Last: what is left of one that was killed keeps nobody from anything but from naming these.
    stands = created is Created.FILE
    if not (keeps_names and (stands or replace_stand_in(store, path, record))):
        store.remove(path)
    return len(gone) == len(files)


def _numbers(file: str) -> tuple[int, int]:
    """Rank and number of a constants shard's name."""
    _, rank, number = file.removesuffix(".safetensors").split("-")
    return int(rank), int(number)
