"""Constants shards of an attempt: the one that stands already, a name for the next, a link to a parent's.

Owns where they are looked for and what must be true of one before it is used again. Writes no leaf's
bytes, deletes nothing, and publishes no part: see steps.py. The order is numbered in docs/commit.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress

from flashckpt.commit import lineage
from flashckpt.commit.steps import constants_of_parts, read_manifest, read_step
from flashckpt.commit.verification import verify_file
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.format.layout import Layout
from flashckpt.format.names import (
    CONSTANTS,
    AttemptName,
    attempt_folder,
    constants_name,
    step_attempt_folder,
)
from flashckpt.format.records import Contents, Manifest
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

# Of one attempt and of the one before it the newest step is asked; no other can be meant.
_MOST_ATTEMPTS = 2


def is_of(contents: Contents, layout: Layout, digests: Sequence[int]) -> bool:
    """Whether a constants shard holds exactly these leaves with these digests."""
    return contents.leaves == layout.leaves and list(contents.digests) == list(digests)


def is_there(store: Store, attempt: AttemptName, contents: Contents) -> bool:
    """Whether the file is there with its length."""
    found = {entry.name: entry.num_bytes for entry in store.list(attempt_folder(attempt))}
    return found.get(contents.shard.file) == contents.shard.num_bytes


def named(store: Store, attempt: AttemptName, rank: int) -> Iterator[tuple[AttemptName, Contents]]:
    """The constants shards of a rank that the newest committed steps name: that of `attempt` itself, and
    that of the one which it went on from. A step that cannot be read names none."""
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
            yield each.attempt, constants
        if len(seen) == _MOST_ATTEMPTS or (len(seen) == 1 and each.attempt != attempt):
            return


def stands(store: Store, attempt: AttemptName, rank: int, layout: Layout, digests: Sequence[int]) -> bool:
    """Whether `attempt` may use or link a shard of these constants, as far as its name and length tell."""
    return any(is_of(contents, layout, digests) for _, contents in named(store, attempt, rank))


def unnamed(above: Store, store: Store, attempt: AttemptName) -> list[str]:
    """The constants shards of an attempt, which `above` shows, that no part of it names, but for the newest
    of each rank, which the next step may name. DamagedError where a part is none: it may name any."""
    numbers: dict[int, list[tuple[int, str]]] = {}
    for entry in above.list(attempt_folder(attempt)):
        if CONSTANTS.fullmatch(entry.name) and not entry.is_folder:
            rank, number = _numbers(entry.name)
            numbers.setdefault(rank, []).append((number, entry.name))
    older = {name for each in numbers.values() for _, name in sorted(each)[:-1]}
    return sorted(older - named_in(store, attempt)) if older else []


def unnamed_of(store: Store, attempt: AttemptName, rank: int) -> list[str]:
    """All of a rank that no part names, the newest too. DamagedError where a part is none."""
    names = [entry.name for entry in store.list(attempt_folder(attempt)) if not entry.is_folder]
    found = {name for name in names if CONSTANTS.fullmatch(name) and _numbers(name)[0] == rank}
    return sorted(found - named_in(store, attempt)) if found else []


def named_in(store: Store, attempt: AttemptName) -> set[str]:
    """The constants shards that parts and manifests of an attempt name. DamagedError for one that is none."""
    named: set[str] = set()
    for each in lineage.everything(store):
        if each.attempt == attempt:
            manifest = read_manifest(store, each.step, attempt)
            if isinstance(manifest, Manifest):
                # A part that is lost may be put back.
                named |= {file.file for file in manifest.constants}
            named |= constants_of_parts(store, step_attempt_folder(each.step, attempt))
    return named


def fresh_name(store: Store, attempt: AttemptName, rank: int) -> str:
    """A file name that no constants shard of the attempt has. Whoever creates it first has it."""
    names = {entry.name for entry in store.list(attempt_folder(attempt)) if CONSTANTS.fullmatch(entry.name)}
    with suppress(DamagedError):
        # One that was lost may be put back, and must not be another step's meanwhile.
        names |= named_in(store, attempt)
    numbers = [0, *(number for of_rank, number in map(_numbers, names) if of_rank == rank)]
    return constants_name(rank, max(numbers) + 1)


def link(
    store: Store, source: AttemptName, contents: Contents, attempt: AttemptName, rank: int,
    *, threads: int, progress_word: int,
) -> str | None:  # fmt: skip
    """Give an attempt's file to a later one without writing it again. Returns its name there, None where the
    file is not whole any more or the store has no way to do that.

    Every byte is read first: what the later attempt builds on must not have rotted under the earlier.
    """
    old = f"{attempt_folder(source)}/{contents.shard.file}"
    status, detail = verify_file(store, old, contents, threads=threads, progress_word=progress_word)
    if status != "ok":
        log.warning("%s is %s (%s): the constants are written again", old, status, detail)
        return None
    name = fresh_name(store, attempt, rank)
    try:
        return name if store.copy(old, f"{attempt_folder(attempt)}/{name}") else None
    except OSError as error:
        log.warning("%s could not be linked: %s; the constants are written again", old, error)
        return None


def _numbers(file: str) -> tuple[int, int]:
    """Rank and number of a constants shard's name."""
    _, rank, number = file.removesuffix(".safetensors").split("-")
    return int(rank), int(number)
