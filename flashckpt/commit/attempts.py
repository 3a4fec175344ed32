"""What makes a folder a run, and its attempts: claimed, started, alive, ended; whether another job trains it.

Owns run.json, the files under attempts/ and the timing of the alive counter; judges no step. A claim is taken
before anything is read. start.json then records the parent that the attempt resumed from, and the lineage
behind it. An attempt without start.json counts only for its number.

Whether a trainer lives: a free lock on the same boot and runtime folder means that it is dead. Elsewhere, and
where the lock has no name while its process may live, the alive counter is watched for WATCH_S. The clocks of
two machines are never compared.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from flashckpt.errors import (
    DamagedError,
    NoSuchStepError,
    RunError,
    RunHeldError,
    SupersededError,
    UnusableRunError,
)
from flashckpt.format.names import (
    ATTEMPT,
    ATTEMPTS,
    CLAIM,
    COMMITS,
    DATA,
    MAX_ATTEMPT,
    RUN,
    AttemptName,
    CommitName,
    SnapshotId,
    alive_path,
    claim_number,
    claim_path,
    start_path,
)
from flashckpt.format.records import Alive, Claim, Owner, Run, Start
from flashckpt.printable import escaped
from flashckpt.store.base import Entry, Store


def open_run(store: Store, create: bool, run_id: str = "") -> Run:
    """Return the run in a store. `create`: the caller will commit to it; if there is no run, make one, with
    this id if one is given.

    Raises NoSuchStepError if there is no run and none is made, UnusableRunError if a run's other files exist
    without run.json, FormatError for another format, DamagedError, RunError if `create` and the storage
    overwrites.
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
            f"{store.url} is no run: it is a file, or a folder above it is one. Nothing was changed. Name "
            f"the folder that has {RUN} in it.",
            path=store.url,
        ) from error
    if store.list(COMMITS) or store.list(ATTEMPTS) or attempt_folders(store, DATA):
        raise UnusableRunError(
            f"{store.url} holds commits, attempts or snapshots and no {RUN}. Nothing was changed, and it is "
            f"not taken for a fresh run. Put its {RUN} back; a mirror of the run has the same. If it is "
            f"lost, `flashckpt recover {store.url}` makes another. To train anew, choose another folder.",
            path=store.url,
        )
    if not create:
        raise NoSuchStepError(
            f"{store.url} is no run: it has no {RUN}. Nothing was changed. Check the path.", path=store.url
        )
    return make_run(store, run_id)


def make_run(store: Store, run_id: str = "") -> Run:
    """Create run.json, with a new id if none is given. Return the run in the store, which another process may
    have made meanwhile."""
    run = Run(run_id=run_id or secrets.token_hex(8))
    return run if store.create(RUN, run.to_bytes()) else _read(store)


def check_trainable(store: Store) -> None:
    """RunError if the storage is one that a run is not trained on."""
    if not store.capabilities.trainable:
        raise RunError(
            f"{store.url}: runs are not trained on {store.url.partition(':')[0]}://. Nothing was changed. "
            "Train in a folder, or on s3://, gs:// or az://, and give this URL as remote=: the keeper copies "
            f"steps there. `flashckpt copy {store.url} RUN` copies the run that is there.",
            path=store.url,
        )


def check_place(store: Store) -> None:
    """Raise RunError or OSError if a run cannot be written to this storage."""
    if not store.capabilities.conditional_create:
        raise RunError(
            f"{store.url}: this storage overwrites a file that is to be created, so a commit there could "
            "overwrite another's. Nothing was changed. Use another storage for the run.",
            path=store.url,
        )
    store.check()


def _read(store: Store) -> Run:
    try:
        run = Run.from_bytes(store.read(RUN, Run.MAX_BYTES), RUN)
    except DamagedError as error:
        raise DamagedError(
            f"{store.url}: {str(error).partition('. ')[0]}. Nothing was used or changed, and the run's "
            f"steps are as whole as they were. Restore its {RUN}. If it is lost, copy that of another run: "
            "the file holds only an id, by which nodes find the run's snapshots in memory; those are then "
            "not found.",
            path=RUN,
        ) from error
    return run


NEAR = 16
"""Memory holds snapshots of so many attempts at most; older attempts have commits, or nothing."""
# For one number: after a faster claim was listed, the number rises.
_MOST_TRIES = 2
_LIST_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptInfo:
    """An attempt as its files show it. `claim` is None if its file is damaged. `problem`: why `start` cannot
    be read. `ended` is "closed", "dead" or empty."""

    name: AttemptName
    claim: Claim | None
    start: Start | None
    ended: str
    problem: str = ""

    @property
    def closed(self) -> bool:
        return self.ended == "closed"


def claim(store: Store, owner: Owner, check: Callable[[], None] | None = None, above: int = 0) -> AttemptName:
    """Take the next number, exclusively; it is higher than `above`. `check` (the one-job check) runs before
    each try, so the loser of a race checks the winner; its errors are raised.

    UnusableRunError if a folder or link has the name of the next claim, or no number is left."""
    tried, tries = 0, 0
    while True:
        # Before the check: a claim made after this listing takes the same number and is checked then.
        number = max(highest_number(store), above) + 1
        if number > MAX_ATTEMPT:
            raise UnusableRunError(
                f"{store.url}: an attempt here or in this node's memory has the number {number - 1}, the "
                "highest one. Nothing was changed, and commits are as they were. If another program has "
                f"written a file of that number to {ATTEMPTS}/, remove it, and start again.",
                path=ATTEMPTS,
            )
        tried, tries = number, tries + 1 if number == tried else 0
        if tries and _is_claimed(store, number):
            # Another job's claim, which an old listing of a file server does not show yet.
            time.sleep(_LIST_AGAIN_S)
        elif tries >= _MOST_TRIES:
            raise UnusableRunError(
                f"{store.url}: {claim_path(number)}, the name of the next claim, is a folder, a link or a "
                "pipe. Nothing was changed, and commits are as they were, but no job can train this run. "
                "Remove or rename it, and start again.",
                path=claim_path(number),
            )
        if check is not None:
            check()
            # An attempt that took it meanwhile may be dead and swept already, and newer ones have claimed.
            if highest_number(store) >= number:
                continue
        name = AttemptName(number, secrets.token_hex(4))
        if claim_as(store, name, owner):
            return name


def claim_as(store: Store, name: AttemptName, owner: Owner) -> bool:
    """Claim this name. False if its number is taken, also by another rank of the same job."""
    if not store.create(claim_path(name.number), Claim(attempt=name, owner=owner).to_bytes()):
        return False
    store.create(alive_path(name), Alive(count=0).to_bytes())
    return True


def has_claim(store: Store, name: AttemptName, owner: Owner) -> bool:
    """Whether this store has the claim of an attempt, found by an exclusive create; a claim that this creates
    in another store is removed."""
    path = claim_path(name.number)
    if store.create(path, Claim(attempt=name, owner=owner).to_bytes()):
        store.remove(path)
        store.remove(ATTEMPTS)
        return False
    with suppress(DamagedError, FileNotFoundError):
        return read_claim(store, name).attempt == name
    return False


def attempts(store: Store) -> list[AttemptInfo]:
    """All attempts, oldest first. A damaged start.json is the `problem` of its attempt: only a lineage that
    needs it fails."""
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
            # A newer attempt has swept it since the listing.
            numbers.remove(newest)
        except DamagedError:
            by_folder = _by_folder(store).get(newest)
            if by_folder is None:
                raise
            return by_folder
    return None


def newest_started(store: Store) -> AttemptName | None:
    """The newest attempt that has a start.json. It decides which steps are visible."""
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
            f"attempt {newest} has claimed {store.url}; attempt {name} must end. Committed steps stay; later "
            "work of this process does not become part of the run.",
            path=store.url,
        )


def started_after(store: Store, name: AttemptName) -> AttemptName | None:
    """A newer attempt that has started, or None. If there is one, `name` must commit nothing."""
    for _, other in sorted(names(store, least=name.number).items(), reverse=True):
        if other != name and store.exists(start_path(other)):
            return other
    return None


def attempt_folders(store: Store, folder: str) -> list[AttemptName]:
    """The attempts that have a folder in `folder` (attempts/ or data/)."""
    found = (AttemptName.parse(entry.name) for entry in store.list(folder, ATTEMPT) if entry.is_folder)
    return [name for name in found if name is not None]


def read_claim(store: Store, name: AttemptName) -> Claim:
    """The claim of an attempt. Raises FileNotFoundError, DamagedError."""
    record = _read_claim(store, name.number)
    if record.attempt != name:
        raise FileNotFoundError(claim_path(name.number))
    return record


def read_start(store: Store, name: AttemptName) -> Start | None:
    """The start record of an attempt, None if it has not started. DamagedError."""
    path = start_path(name)
    try:
        start = Start.from_bytes(store.read(path, Start.MAX_BYTES), path)
    except FileNotFoundError:
        return None
    if start.parent is not None and start.parent.attempt.number >= name.number:
        raise DamagedError(
            f"{path} is damaged: it names an attempt that is not older. Nothing of it was used. "
            "Use `flashckpt branch` to resume from a step that is whole.",
            path=path,
        )
    return start


def beat(store: Store, name: AttemptName, count: int) -> None:
    """Write the alive counter: not durably, and with few retries, since the next write follows soon."""
    store.brief().replace(alive_path(name), Alive(count=count).to_bytes(), durable=False)


def move_on(store: Store, name: AttemptName, last: int | None) -> int | None:
    """Increment the counter if it is still `last`. Returns its value; None if it cannot be read: a newer
    attempt may have removed it, and it is not written again."""
    found = alive(store, name)
    if found is None or found.count != last:
        return None if found is None else found.count
    beat(store, name, last + 1)
    return last + 1


def mark_ended(store: Store, name: AttemptName, how: Literal["closed", "dead"]) -> None:
    """Record that no trainer of this attempt lives, so that the next attempt need not watch it."""
    before = alive(store, name)
    count = before.count if before is not None else 0
    store.replace(alive_path(name), Alive(count=count, ended=how).to_bytes())


def alive(store: Store, name: AttemptName) -> Alive | None:
    """The alive counter, None if it cannot be read."""
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
    """Attempts by their folders alone, except for numbers with several folders."""
    found: dict[int, AttemptName] = {}
    doubled = set()
    for name in attempt_folders(store, ATTEMPTS):
        if found.setdefault(name.number, name) != name:
            doubled.add(name.number)
    return {number: name for number, name in found.items() if number not in doubled}


def names(store: Store, least: int = 1) -> dict[int, AttemptName]:
    """Every claimed attempt from number `least` on. A damaged claim is named by its folder."""
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


def highest_number(store: Store) -> int:
    """The highest number of any claim, attempt folder, commit or data folder. A number that was used again
    would order its attempt before files of the first one."""
    found = [0, *_claimed_numbers(store)]
    found += [name.number for folder in (ATTEMPTS, DATA) for name in attempt_folders(store, folder)]
    found += [name.number for name in map(attempt_in, store.list(COMMITS)) if name is not None]
    return max(found)


def attempt_in(entry: Entry) -> AttemptName | None:
    """The attempt of a record, quarantine or tombstone in commits/, None for another file."""
    commit, tombstone = CommitName.parse(entry.name), SnapshotId.of_tombstone(entry.name)
    if commit is not None:
        return commit[0].attempt
    return None if tombstone is None else tombstone.attempt


# ---- one job at a time: whether the newest attempt still has a trainer

log = logging.getLogger(__name__)

Probe = Callable[[str, str], bool]
"""Whether a living process holds the lock of this name in this runtime folder."""

# The timing of the alive counter. A keeper increments it every BEAT_S. The leading trainer reads it every
# STAND_IN_S and increments it if it has not changed. So the counter of a living attempt pauses for at most
# 2 * STAND_IN_S while its keeper is stopped, and for longer only while trainer and keeper both pause (a node
# that swaps, a paused virtual machine) or storage delays their writes (a store's `delay_s`).
BEAT_S = 1.0
STAND_IN_S = 2.0
# How long a keeper whose trainers have ended watches the counter for other nodes: longer than 2 * STAND_IN_S.
STILL_S = 6.0
# How long a job elsewhere watches the counter before it takes over a run: 15 times the longest pause while a
# trainer runs, so that a node may pause for up to a minute.
WATCH_S = 60.0
# The watching job reads the counter this often, so that a pause of its own is not taken for one of the
# counter.
_POLL_S = 1.0
_REPORT_S = 15.0


def local_owner(runtime: str = "", lock: str = "", *, job_id: str = "", restart_count: int = 0) -> Owner:
    """This process as the owner of a claim. `runtime`: the path of its runtime folder; `lock`: the name of
    its lock there. Both are empty for an operation without a lock."""
    return Owner(
        boot_id=_boot_id(),
        runtime=runtime,
        runtime_id=_folder_id(runtime),
        lock=lock,
        host=socket.gethostname()[:255],
        pid=os.getpid(),
        job_id=job_id[:4096],
        restart_count=restart_count,
    )


def check_not_held(
    store: Store,
    me: Owner,
    probe: Probe | None = None,
    *,
    watch_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """RunHeldError if a trainer of the newest attempt lives. May watch the counter for `watch_s` seconds, by
    default WATCH_S and the store's delay; the log says so.

    `probe` checks locks in runtime folders of this machine; without it only the counter is used.
    """
    watch_s = WATCH_S + store.capabilities.delay_s if watch_s is None else watch_s
    while (newest := newest_claimed(store)) is not None:
        ended, theirs = _ended(store, newest), _owner(store, newest)
        if ended:
            return
        if theirs is not None and probe is not None and _same_runtime(me, theirs):
            if probe(theirs.runtime, theirs.lock):
                raise _held(store, newest, theirs, f"process {theirs.pid} on this machine ({theirs.host})")
            if not _may_hold_unseen(theirs, probe):
                return
        if theirs is not None and _is_restart(me, theirs):
            return
        if _moves(store, newest, theirs, watch_s, sleep):
            raise _held(store, newest, theirs, f"a process on {theirs.host}" if theirs else "another process")
        # Another attempt may have claimed meanwhile, and is checked like the first.
        if newest_claimed(store) == newest:
            return


def _moves(
    store: Store,
    attempt: AttemptName,
    theirs: Owner | None,
    watch_s: float,
    sleep: Callable[[float], None],
) -> bool:
    """Whether the counter changes within `watch_s`; False as soon as the attempt's end is recorded."""
    where = f"on {escaped(theirs.host)}" if theirs is not None else "on another node"
    first, reported_s, waited_s = alive(store, attempt), 0.0, 0.0
    while waited_s < watch_s:
        if waited_s >= reported_s:
            reported_s += _REPORT_S
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + watch_s - waited_s))
            log.warning(
                "%s: attempt %s was trained %s, and its end was not recorded. Waiting until %s (%.0f of "
                "%.0f s are over) for a sign of life: with one this process leaves the run to that job, "
                "without one it takes the run over",
                store.url, attempt, where, until, waited_s, watch_s,
            )  # fmt: skip
        sleep(_POLL_S)
        waited_s += _POLL_S
        # Opened anew each time: an open file shows a cached counter on a file server.
        now = alive(store, attempt)
        if now is not None and now.ended:
            return False
        if now != first:
            return True
    return False


def _ended(store: Store, attempt: AttemptName) -> str:
    found = alive(store, attempt)
    return "" if found is None else found.ended


def _owner(store: Store, attempt: AttemptName) -> Owner | None:
    try:
        return read_claim(store, attempt).owner
    except (FileNotFoundError, DamagedError):
        return None


def _same_runtime(me: Owner, theirs: Owner) -> bool:
    mine = (me.boot_id, me.runtime, me.runtime_id)
    return bool(theirs.lock and me.runtime) and mine == (theirs.boot_id, theirs.runtime, theirs.runtime_id)


def _may_hold_unseen(theirs: Owner, probe: Probe) -> bool:
    """Whether the owner may live and hold a lock whose name was removed. Mostly its keeper has removed the
    name after its death, so this is true only if its pid belongs to another living process."""
    if theirs.pid == os.getpid():
        return False
    if os.path.lexists(os.path.join(theirs.runtime, theirs.lock)):
        # Its owner may have taken it again since the first check.
        return probe(theirs.runtime, theirs.lock)
    try:
        descriptor = os.pidfd_open(theirs.pid)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # a kernel before 5.3, or a sandbox
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        return not ended.poll(0)
    finally:
        os.close(descriptor)


def _is_restart(me: Owner, theirs: Owner) -> bool:
    """Whether the scheduler restarted the job: it ended one before it started the other (see
    `Environment.job_id`)."""
    same_job = bool(me.job_id) and me.job_id == theirs.job_id
    return same_job and me.restart_count > theirs.restart_count


def _held(store: Store, attempt: AttemptName, theirs: Owner | None, holder: str) -> RunHeldError:
    job = f" (job {theirs.job_id})" if theirs is not None and theirs.job_id else ""
    return RunHeldError(
        f"{store.url} is held: attempt {attempt} is trained by {holder}{job}. Nothing was changed. Stop that "
        "job first, or use another folder.",
        path=store.url,
    )


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(64).strip()
    except OSError:
        # An unknown id equals no other, so the counter is watched.
        return f"unknown-{os.urandom(8).hex()}"


def _folder_id(path: str) -> str:
    if not path:
        return ""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"
