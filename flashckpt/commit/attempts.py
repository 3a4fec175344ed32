"""What makes a folder a run, and its attempts: claimed, started, alive, ended. Owns run.json and the files
under attempts/; judges no step.

A claim is taken before anything is read; start.json says afterwards where the attempt went on from, and holds
the lineage behind it. An attempt without start.json is as if it had never been, but that its number is taken.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from flashckpt.errors import (
    DamagedError,
    FormatError,
    NoSuchStepError,
    RunError,
    SupersededError,
    UnusableRunError,
)
from flashckpt.format.names import (
    ATTEMPT,
    ATTEMPTS,
    CLAIM,
    MAX_ATTEMPT,
    MAX_STEP,
    RUN,
    STEP,
    STEPS,
    AttemptName,
    alive_path,
    claim_number,
    claim_path,
    manifest_path,
    start_path,
    step_folder,
)
from flashckpt.format.records import Alive, Claim, Holder, Run, Start
from flashckpt.format.replicas import Ranks
from flashckpt.store.base import Store


def open_run(store: Store, create: bool, run_id: str = "") -> Run:
    """The run in a store; with `create`, for who will commit to it, a new one where there is none, with this
    id if one is given.

    NoSuchStepError where there is none and none is to be made, UnusableRunError where steps stand without
    their run.json, FormatError where it is written by a newer version, DamagedError where it is damaged,
    RunError for `create` where the storage overwrites.
    """
    if create:
        check_place(store)
    try:
        return _read(store)
    except FileNotFoundError:
        pass
    except NotADirectoryError as error:
        if create:
            raise
        raise NoSuchStepError(
            f"{store.url} is no run: it is a file, or something above it is. Nothing was changed. Name the "
            f"folder that has {RUN} in it.",
            path=store.url,
        ) from error
    if store.list(STEPS) or store.list(ATTEMPTS):
        raise UnusableRunError(
            f"{store.url} holds steps or attempts and no {RUN}. Nothing was changed, and it is not "
            f"taken for a fresh run. Put its {RUN} back, or choose another folder.",
            path=store.url,
        )
    if not create:
        raise NoSuchStepError(
            f"{store.url} is no run: it has no {RUN}. Nothing was changed. Check the path.", path=store.url
        )
    run = Run(run_id=run_id or secrets.token_hex(8))
    return run if store.create(RUN, run.to_bytes()) else _read(store)


def check_place(store: Store) -> None:
    """Raise RunError or OSError where a run cannot be committed to this storage."""
    if not store.capabilities.conditional_create:
        raise RunError(
            f"{store.url}: this storage overwrites a file that is to be created, so a commit there could "
            "overwrite another's. Nothing was changed. Use another storage for the run.",
            path=store.url,
        )
    store.check()


def _read(store: Store) -> Run:
    try:
        return Run.from_bytes(store.read(RUN, Run.MAX_BYTES), RUN)
    except DamagedError as error:
        raise DamagedError(
            f"{store.url}: {str(error).partition('. ')[0]}. Nothing of the run was used or changed, and its "
            f"steps are as whole as they were. Put the {RUN} back that was there. If it is lost, that of any "
            "other run does: it holds nothing but an id, by which a node finds what the run has in memory; "
            "what is there now is then not found any more.",
            path=RUN,
        ) from error


# Memory holds snapshots of the last few attempts; of one before them there is what is committed, or nothing.
NEAR = 16
# Of one number: a claim that was faster is listed, and the number rises.
_MOST_TRIES = 2
_LIST_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Bound:
    """Of this attempt, steps up to `last_step` (inclusive) are visible."""

    attempt: AttemptName
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptInfo:
    """An attempt as its files show it. `claim` is None where its file is damaged, `start` where `problem`
    says so; `ended` is "closed", "dead" or empty."""

    name: AttemptName
    claim: Claim | None
    start: Start | None
    ended: str
    problem: str = ""

    @property
    def has_started(self) -> bool:
        return self.start is not None or bool(self.problem)

    @property
    def closed(self) -> bool:
        return self.ended == "closed"


def claim(
    store: Store, holder: Holder, check: Callable[[], None] | None = None, above: int = 0
) -> AttemptName:
    """Take the next number, one above `above` at least, exclusively. `check` (the one-job check) runs before
    each try, so that who loses a race looks at the winner; what it raises ends the claiming.

    UnusableRunError where something that is no file has the name of the next claim, or no number is left."""
    tried, tries = 0, 0
    while True:
        # Before the check: a claim that comes after it takes this very number, and is then looked at.
        number = max(highest_number(store), above) + 1
        if number > MAX_ATTEMPT:
            raise UnusableRunError(
                f"{store.url}: number {number - 1} is taken by an attempt here or in this node's memory, and "
                "is the highest of all. Nothing was changed, and what is committed is as it was. If another "
                f"program has written a file of that number to {ATTEMPTS}/, remove it, and start again.",
                path=ATTEMPTS,
            )
        tried, tries = number, tries + 1 if number == tried else 0
        if tries and _is_claimed(store, number):
            # Another job's claim, which an old listing of a file server does not show yet.
            time.sleep(_LIST_AGAIN_S)
        elif tries >= _MOST_TRIES:
            raise UnusableRunError(
                f"{store.url}: {claim_path(number)}, the name of the next claim, is taken by something that "
                "is no file (a folder, a link, a pipe). Nothing was changed, and what is committed is as it "
                "was, but no job can train this run while it stands there. Remove it or give it another "
                "name, and start again.",
                path=claim_path(number),
            )
        if check is not None:
            check()
            # Who took it meanwhile may be dead and swept already, and newer ones have claimed since.
            if highest_number(store) >= number:
                continue
        name = AttemptName(number, secrets.token_hex(4))
        if claim_as(store, name, holder):
            return name


def claim_as(store: Store, name: AttemptName, holder: Holder) -> bool:
    """Take this very name. False where its number is taken, be it by another of the same job."""
    if not store.create(claim_path(name.number), Claim(attempt=name, holder=holder).to_bytes()):
        return False
    store.create(alive_path(name), Alive(count=0).to_bytes())
    return True


def start(
    store: Store,
    name: AttemptName,
    parent: AttemptName | None,
    step: int,
    world: int,
    boundary: int = 0,
    ranks: Ranks | None = None,
    *,
    near: int = NEAR,
) -> Start:
    """Write where the attempt goes on from, on all its ranks; from here on older attempts commit nothing.
    `boundary` is that of the parent, by which every keeper knows the snapshots that are this attempt's now.
    `ranks`: those that commit here, where others have folders of their own. `near`: so many attempts are
    named as its lineage whether or not they have steps here.

    SupersededError if a newer attempt has claimed the run.
    """
    check_newest(store, name)
    before = () if parent is None else tuple(_before(store, parent, step, near))
    record = Start(parent=parent, step=step, boundary=boundary, world=world, before=before, ranks=ranks)
    if not store.create(start_path(name), record.to_bytes()):
        raise SupersededError(
            f"attempt {name} has already started; this process must end. Nothing was changed.",
            path=start_path(name),
        )
    return record


def bounds(store: Store, at: AttemptName | None = None) -> list[Bound]:
    """The lineage of the newest started attempt (or of `at`), newest first."""
    name = at if at is not None else newest_started(store)
    if name is None:
        return []
    lineage, record = [Bound(name, MAX_STEP)], read_start(store, name)
    if record is not None and record.parent is not None:
        lineage.append(Bound(record.parent, record.step))
        lineage += [Bound(*each) for each in record.before]
    return lineage


def _before(store: Store, parent: AttemptName, step: int, near: int) -> Iterator[tuple[AttemptName, int]]:
    """The lineage behind the parent of an attempt that starts at `step`. The minimum: what an ancestor did
    past the step that its child left it at is another branch, however far the later attempts went."""
    lineage: list[Bound] = []
    with suppress(DamagedError):
        lineage = bounds(store, parent)
    # Asked after the reading: whoever is about to claim may sweep it meanwhile.
    if not lineage or not (lineage[1:] or store.exists(start_path(parent))):
        # It is damaged, or has gone for want of a step: who went on from it has its lineage. Where nobody
        # did, what came before it is not visible any more, and stays.
        with suppress(DamagedError):
            lineage = bounds(store)
    of = [each.attempt for each in lineage]
    behind = lineage[of.index(parent) + 1 :] if parent in of else []
    numbers = steps_begun(store)
    for position, each in enumerate(behind):
        if position < near or any(store.exists(manifest_path(n, each.attempt)) for n in numbers):
            yield each.attempt, min(each.last_step, step)


def attempts(store: Store) -> list[AttemptInfo]:
    """All attempts, oldest first. A damaged start.json is told of its attempt: only who asks for the lineage
    that hangs on it fails."""
    found: list[AttemptInfo] = []
    for number, name in sorted(names(store).items()):
        try:
            record: Claim | None = _read_claim(store, number)
        except (DamagedError, FileNotFoundError):
            record = None
        counter = alive(store, name)
        ended = counter.ended if counter is not None else ""
        begun, problem = None, ""
        try:
            begun = read_start(store, name)
        except DamagedError as error:
            problem = str(error)
        found.append(AttemptInfo(name=name, claim=record, start=begun, ended=ended, problem=problem))
    return found


def newest_claimed(store: Store) -> AttemptName | None:
    """The attempt with the highest number, started or not."""
    numbers = _claimed_numbers(store)
    while numbers:
        newest = max(numbers)
        try:
            return _read_claim(store, newest).attempt
        except FileNotFoundError:
            # Swept by the attempt after it, between the list and the look.
            numbers.remove(newest)
        except DamagedError:
            by_folder = _by_folder(store).get(newest)
            if by_folder is None:
                raise
            return by_folder
    return None


def newest_started(store: Store) -> AttemptName | None:
    """The newest attempt that has a start.json: what is visible hangs on it."""
    for _, name in sorted(names(store).items(), reverse=True):
        if store.exists(start_path(name)):
            return name
    return None


def has_started(store: Store, name: AttemptName) -> bool:
    """Whether an attempt has a start.json, which may be damaged."""
    return store.exists(start_path(name))


def check_newest(store: Store, name: AttemptName) -> None:
    """SupersededError if a newer attempt has claimed the run."""
    newest = newest_claimed(store)
    if newest is not None and newest != name and newest.number >= name.number:
        raise SupersededError(
            f"attempt {newest} has claimed {store.url}; attempt {name} must end. What is committed stays; "
            "nothing that this process still does becomes part of the run.",
            path=store.url,
        )


def started_after(store: Store, name: AttemptName) -> AttemptName | None:
    """A newer attempt that has started, or None. From its start on, `name` must commit nothing."""
    for _, other in sorted(names(store, least=name.number).items(), reverse=True):
        if other != name and store.exists(start_path(other)):
            return other
    return None


def superseded_by(store: Store, name: AttemptName, step: int, boundary: int) -> AttemptName | None:
    """A newer attempt that has started and keeps `name` from committing this boundary, or None. Where nodes
    have folders of their own, what an attempt began with stays a step of the one that made it: another node
    may have committed it as such, and of two names none would be a step that all have."""
    newer = started_after(store, name)
    if newer is not None:
        with suppress(DamagedError, FormatError):
            begun = read_start(store, newer)
            if begun is not None and begun.ranks is not None and begun.took_up(name, step, boundary):
                return None
    return newer


def attempt_folders(store: Store, folder: str) -> list[AttemptName]:
    """The attempts that have a folder in `folder`: that of all attempts, or one of a step."""
    found = (AttemptName.parse(entry.name) for entry in store.list(folder, ATTEMPT) if entry.is_folder)
    return [name for name in found if name is not None]


def read_claim(store: Store, name: AttemptName) -> Claim:
    """The claim of an attempt. FileNotFoundError where there is none, DamagedError."""
    record = _read_claim(store, name.number)
    if record.attempt != name:
        raise FileNotFoundError(claim_path(name.number))
    return record


def read_start(store: Store, name: AttemptName) -> Start | None:
    """The start of an attempt, None where it never started. DamagedError."""
    try:
        record = Start.from_bytes(store.read(start_path(name), Start.MAX_BYTES), start_path(name))
    except FileNotFoundError:
        return None
    lineage = [name, *filter(None, [record.parent]), *(attempt for attempt, _ in record.before)]
    if any(older.number >= newer.number for newer, older in pairwise(lineage)):
        raise DamagedError(
            f"{start_path(name)} is damaged: it names an attempt that is not older. Nothing of it was used. "
            "Use `flashckpt branch` to go on from a step that is whole.",
            path=start_path(name),
        )
    return record


def ranks_here(store: Store, attempt: AttemptName) -> Ranks | None:
    """The ranks of an attempt that commit in this folder, where others have folders of their own; None for
    all. Where nothing tells (its start.json is damaged or gone) it is all: then too many parts are waited
    for, and never too few."""
    with suppress(DamagedError):
        found = read_start(store, attempt)
        return None if found is None else found.ranks
    return None


def beat(store: Store, name: AttemptName, count: int) -> None:
    """Move the counter on. Not durable, and tried for a moment only: the next one is soon to come, and it
    says something only while it moves."""
    store.brief().replace(alive_path(name), Alive(count=count).to_bytes(), durable=False)


def move_on(store: Store, name: AttemptName, seen: int | None) -> int | None:
    """Move the counter on where it still stands at `seen`. Returns where it stands, None where it cannot be
    read: a newer attempt may have removed it, and it must not come back."""
    found = alive(store, name)
    if found is None or found.count != seen:
        return None if found is None else found.count
    beat(store, name, seen + 1)
    return seen + 1


def mark_ended(store: Store, name: AttemptName, how: Literal["closed", "dead"]) -> None:
    """Say that no trainer of this attempt lives, so that the next one need not watch it."""
    before = alive(store, name)
    count = before.count if before is not None else 0
    store.replace(alive_path(name), Alive(count=count, ended=how).to_bytes())


def alive(store: Store, name: AttemptName) -> Alive | None:
    """The counter as it stands, None where there is none that can be read."""
    try:
        return Alive.from_bytes(store.read(alive_path(name), Alive.MAX_BYTES), alive_path(name))
    except (DamagedError, FileNotFoundError):
        return None


def _read_claim(store: Store, number: int) -> Claim:
    path = claim_path(number)
    record = Claim.from_bytes(store.read(path, Claim.MAX_BYTES), path)
    if record.attempt.number != number:
        raise DamagedError(
            f"{path} is damaged: it claims number {record.attempt.number}. Nothing of it was used. "
            "Put the file back that was there.",
            path=path,
        )
    return record


def _is_claimed(store: Store, number: int) -> bool:
    with suppress(DamagedError, FileNotFoundError):
        return store.exists(claim_path(number)) and bool(_read_claim(store, number))
    return False


def _claimed_numbers(store: Store) -> set[int]:
    numbers = {claim_number(entry.name) for entry in store.list(ATTEMPTS, CLAIM) if not entry.is_folder}
    return {number for number in numbers if number is not None}


def _by_folder(store: Store) -> dict[int, AttemptName]:
    """Attempts by their folders alone; a number with several folders names none."""
    found: dict[int, AttemptName] = {}
    doubled = set()
    for name in attempt_folders(store, ATTEMPTS):
        if found.setdefault(name.number, name) != name:
            doubled.add(name.number)
    return {number: name for number, name in found.items() if number not in doubled}


def names(store: Store, least: int = 1) -> dict[int, AttemptName]:
    """Every claimed attempt from number `least` on. For a damaged claim, its folder stands."""
    found = {}
    by_folder: dict[int, AttemptName] | None = None
    for number in _claimed_numbers(store):
        if number < least:
            continue
        try:
            found[number] = _read_claim(store, number).attempt
        except FileNotFoundError:
            continue
        except DamagedError:
            by_folder = _by_folder(store) if by_folder is None else by_folder
            if number in by_folder:
                found[number] = by_folder[number]
    return found


def steps_begun(store: Store) -> list[int]:
    """The numbers of all steps that have a folder, the lowest first."""
    return sorted(int(entry.name) for entry in store.list(STEPS, STEP) if entry.is_folder)


def highest_number(store: Store) -> int:
    """Also of attempts of which only steps are left: a number that came again would be older than they."""
    folders = [*attempt_folders(store, ATTEMPTS)]
    for number in steps_begun(store):
        folders += attempt_folders(store, step_folder(number))
    return max([0, *_claimed_numbers(store), *(name.number for name in folders)])
