"""The keepers of this node that are this user's: listed, asked, waited for, ended.

Owns the questions to a keeper, the rows that `flashckpt keepers` shows, and the order in which a keeper is
ended: a snapshot that is committed nowhere is lost only with `discard`. Starts no keeper, and does nothing to
one whose trainers live.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from flashckpt.commit.view import open_run
from flashckpt.errors import FlashckptError, KeeperError, PersistError, RunHeldError
from flashckpt.format.names import AttemptName
from flashckpt.keeper.client import KeeperWait, WaitTimeouts, asked
from flashckpt.keeper.protocol import (
    ELECTION_LOCK,
    ProtocolError,
    Status,
    close_all,
    connect,
    remove_names,
)
from flashckpt.memory.cache_folder import CacheFolder, caches_in, open_cached
from flashckpt.memory.held_regions import sealed_in
from flashckpt.memory.region import is_region_name
from flashckpt.memory.runtime import (
    LifeLock,
    RuntimeFolder,
    base_folders,
    holder_of,
    identity_of,
    is_alive,
    is_trainer_lock,
)
from flashckpt.options import Environment
from flashckpt.store import open_store

# Bytes done, and bytes in all, 0 where that is not known.
Progress = Callable[[int, int], None]

STILL = "nothing is written: parts of other nodes are missing, or storage hangs"

_IDENTITY = re.compile(r"[0-9a-f]{32}")
_TIMEOUT_S = 30.0
# A keeper answers within a tick of its loop; a stopped one must not delay the list of the others.
_LIST_TIMEOUT_S = 5.0
_POLL_S = 0.05
_DEATHS_S = 10.0
# A keeper of a dead attempt watches for a minute whether other nodes live; longer on an object store.
_END_S = 120.0
# After how long without a write, a failure or a commit this is reported, and the wait ends: parts of other
# nodes are missing, or storage hangs.
_REPORT_STILL_S, _STILL_S = 10.0, 120.0


@dataclass(frozen=True, kw_only=True)
class KeeperRow:
    """One runtime folder. `state`: "training" (a trainer lives), "saving" (the trainer has ended, and a
    snapshot is still to be persisted), "lingering" (all is saved, and the keeper waits `lingers_s` for
    another attempt), "silent" (the keeper does not answer), "left" (no keeper; the next start, or `recover`,
    finds the regions) or "cached" (no keeper; `folder` is the run's folder in a cache). `pid` is None without
    a keeper; `run` is None if it is unknown; `trainers` are process ids. `num_bytes`: of all regions.
    `newest_sealed` and `newest_committed`: steps in memory. `cache`: the run's folder in its cache, or None,
    with `cached_bytes`, its newest step and the steps that are not at home yet."""

    folder: str
    state: str
    pid: int | None = None
    run: str | None = None
    run_is_gone: bool = False
    trainers: tuple[int, ...] = ()
    lingers_s: float | None = None
    slots: int = 0
    num_bytes: int = 0
    newest_sealed: int | None = None
    newest_committed: int | None = None
    cache: str | None = None
    cached_bytes: int = 0
    newest_cached: int | None = None
    not_at_home: tuple[int, ...] = ()


def keeper_of(runtime: RuntimeFolder) -> int | None:
    """The process of the run's keeper on this node, 0 in another pid namespace, None for no keeper."""
    return holder_of(runtime, ELECTION_LOCK)


def living_trainers(runtime: RuntimeFolder) -> list[tuple[str, int]]:
    """The life locks of trainers that live here, each with its process."""
    names = filter(is_trainer_lock, runtime.names())
    return [(name, pid) for name in names if (pid := holder_of(runtime, name)) is not None]


def caches(base: str) -> list[KeeperRow]:
    """The runs of this user in a cache, except those with a living keeper."""
    rows = []
    for identity in filter(_IDENTITY.fullmatch, caches_in(base)):
        with (
            suppress(OSError, KeeperError),
            closing(CacheFolder.open(base, identity, create=False)) as folder,
        ):
            rows.append(_cached_row(folder))
    return rows


def _cached_row(folder: CacheFolder) -> KeeperRow:
    paths, steps, home = [f"{folder.path}/{name}" for name in folder.names()], set[int](), set[int]()
    for path in paths:
        with suppress(OSError, FlashckptError), closing(open_cached(path)) as slot:
            sealed = None if slot.header.holds_constants else slot.sealed()
            if sealed is not None:
                steps.add(sealed.step)
                home |= {sealed.step} if sealed.is_persisted else set()
    return KeeperRow(
        folder=folder.path,
        state="cached",
        cache=folder.path,
        cached_bytes=sum(os.stat(path).st_blocks * 512 for path in paths),
        newest_cached=max(steps, default=None),
        not_at_home=tuple(sorted(steps - home)),
    )


def keepers() -> list[KeeperRow]:
    """The keepers and left regions of this user on this node, by runtime folder."""
    rows = []
    for path in _folders():
        with _opened(path) as runtime:
            rows.append(_row(runtime) if runtime is not None else None)
    return [row for row in rows if row is not None]


def find(target: str) -> KeeperRow:
    """The row of a process id, a run or a runtime folder. Raises KeeperError if no keeper matches."""
    rows = keepers()
    if target.isdigit():
        found = [row for row in rows if row.pid == int(target)]
    else:
        store = open_store(target)
        path = os.path.realpath(store.url)
        found = [row for row in rows if path in map(os.path.realpath, (row.run or row.folder, row.folder))]
        with suppress(FlashckptError, OSError):  # without a keeper the run alone tells its folder
            identity = "" if found else identity_of(open_run(store, create=False).run_id, store.place())
            found = found or [row for row in rows if os.path.basename(row.folder) == identity]
    if len(found) != 1:
        what = "keeper" if not found else "one keeper alone"
        raise KeeperError(
            f"No {what} of {target} was found on this node. Nothing was changed. `flashckpt keepers` lists "
            "those that run, with their process and run."
        )
    return found[0]


def end(
    row: KeeperRow,
    *,
    discard: bool = False,
    progress: Progress = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Wait until all snapshots are saved, then end the keeper. `discard`: give up snapshots that cannot be
    saved.

    Raises RunHeldError while a trainer lives, PersistError if a snapshot could not be saved (then the keeper
    stays, with all that it holds), KeeperError for a keeper that does not answer.
    """
    with _opened(row.folder) as runtime:
        if runtime is None:
            return
        _refuse_if_trained(row, runtime)
        if row.pid is None:
            _free(row, runtime, discard=discard)
            return
        if row.run is None:
            raise KeeperError(
                f"The keeper {row.pid} does not answer: it is stopped, or hangs in storage. Nothing was "
                f"changed. Its log: {row.folder}/keeper.log. Let it continue, or kill it: named regions "
                "stay for the next start and for `flashckpt recover`.",
                path=row.folder,
            )
        status = wait_until_saved(row.run, runtime, progress, say, lambda: _refuse_if_trained(row, runtime))
        if status is None:
            return
        waiting = [each for each in status.waiting if each not in status.for_others]
        if waiting and not discard:
            why = {each.step: each.message for each in status.failures}
            step = next((each for each in waiting if each in why), waiting[-1])
            raise PersistError(
                f"The keeper {row.pid} of {row.run} was not ended: step {step} could not be saved "
                f"({why.get(step, STILL)}). It is still in memory, and is tried again. Mend the "
                "storage and run this again; or give up what is in memory with --discard.",
                step=step,
                path=row.run,
            )
        if discard:
            _refuse_if_trained(row, runtime)
            ask(runtime, {"op": "discard"})
        end_process(runtime)


def _free(row: KeeperRow, runtime: RuntimeFolder, *, discard: bool) -> None:
    """Remove regions without a keeper. Only their run could save them; which run that is, and whether it was
    deleted, is not known here."""
    steps = ", ".join(map(str, sorted((each.step for each in sealed_in(runtime)), reverse=True)))
    if not discard:
        raise PersistError(
            f"{row.folder} has no keeper; it holds steps {steps or '(none)'}. Nothing was changed. The next "
            "start of its run resumes from them; `flashckpt recover RUN` saves them and frees the memory. "
            "What that cannot save is freed with --discard: uncommitted snapshots are lost.",
            path=row.folder,
        )
    # No keeper is elected meanwhile; a new trainer waits for its keeper, and then finds no snapshot.
    election = LifeLock.acquire(runtime, ELECTION_LOCK)
    if election is None:
        raise RunHeldError(
            f"A keeper, or `flashckpt recover`, has begun in {row.folder}. Nothing was changed.",
            path=row.folder,
        )
    try:
        for name in filter(is_region_name, runtime.names()):
            _refuse_if_trained(row, runtime)
            runtime.remove(name)
        remove_names(runtime)
    finally:
        election.release(runtime)
        runtime.discard()


def _refuse_if_trained(row: KeeperRow, runtime: RuntimeFolder) -> None:
    for _, pid in living_trainers(runtime):
        raise RunHeldError(
            f"{row.run or row.folder} is trained by process {pid or '(of another container)'}: its keeper "
            "was not ended, and nothing was changed. Stop that job first: its keeper saves what is in "
            "memory, and goes with it.",
            path=row.run,
        )


def _row(runtime: RuntimeFolder) -> KeeperRow | None:
    names = [name for name in runtime.names() if is_region_name(name)]
    pid = keeper_of(runtime)
    trainers = tuple(pid for _, pid in living_trainers(runtime))
    num_bytes = sum(_size(runtime, name) for name in names)
    row = KeeperRow(folder=runtime.path, state="left", slots=len(names), num_bytes=num_bytes)
    if pid is None:
        return row if names and not trainers else None
    try:
        answer = ask(runtime, {"op": "describe"}, _LIST_TIMEOUT_S)
    except KeeperError:
        return replace(row, state="silent", pid=pid, trainers=trainers)
    if answer is None:
        return None  # it has left meanwhile
    found = answer["keeper"]
    alone = "saving" if found.pop("is_saving") else "lingering"
    del found["newest"]
    found |= {"not_at_home": tuple(found["not_at_home"]), "pid": pid, "trainers": trainers}
    if trainers:
        found["lingers_s"] = None
    return replace(row, state="training" if trainers else alone, **found)


def newest_in_memory(runtime: RuntimeFolder) -> tuple[AttemptName, int] | None:
    """The newest attempt with a snapshot in this node's memory, and its newest step there. Without a keeper
    that answers only named regions are found."""
    found = [(each.attempt, each.step) for each in sealed_in(runtime)]
    with suppress(FlashckptError, OSError):
        answer = ask(runtime, {"op": "describe"}, _LIST_TIMEOUT_S) or {"keeper": {}}
        name, step = answer["keeper"].get("newest") or ("", 0)
        attempt = AttemptName.parse(name)
        found += [] if attempt is None else [(attempt, step)]
    return max(found, default=None)


def _size(runtime: RuntimeFolder, name: str) -> int:
    try:
        return os.stat(name, dir_fd=runtime.descriptor, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _folders() -> Iterator[str]:
    """The paths of all runtime folders of this user."""
    for base in base_folders(Environment.read().runtime_folder):
        own = os.path.join(base, f"flashckpt-{os.geteuid()}")
        try:
            names = sorted(os.listdir(own))
        except OSError:
            continue
        yield from (os.path.join(own, name) for name in names if _IDENTITY.fullmatch(name))


@contextmanager
def _opened(path: str) -> Iterator[RuntimeFolder | None]:
    """Open a runtime folder; None if it is gone, or not this user's alone."""
    with ExitStack() as stack:
        runtime = None
        with suppress(OSError, KeeperError):
            runtime = stack.enter_context(closing(RuntimeFolder.at(path)))
        yield runtime


def wait_until_saved(
    run: str,
    runtime: RuntimeFolder,
    progress: Progress,
    say: Callable[[str], None],
    guard: Callable[[], None],
) -> Status | None:
    """Wait until the keeper has saved all it can, and return its status: steps that cannot be saved are
    `waiting` in it. None if the keeper has left meanwhile. KeeperError if it does not answer."""
    _wait_for_deaths(runtime, guard)
    # Gives the keeper the run's current path, and makes it retry at once.
    question: dict[str, Any] = {"op": "status", "run": run, "again": True}
    wait, is_reported = KeeperWait(Status(), WaitTimeouts.same(_STILL_S)), False
    while True:
        guard()
        answer = ask(runtime, question)
        question.pop("again", None)
        if answer is None:
            return None
        if not isinstance(answer.get("status"), dict):
            raise ProtocolError("The keeper's answer holds no status.")
        status = Status.from_dict(answer["status"])
        progress(status.progress_bytes, 0)
        done = {each.step for each in status.failures} | set(status.for_others)
        if status.persisting is None and set(status.waiting) <= done:
            return status
        if wait.has_stalled(status):
            return status
        if wait.still_s >= _REPORT_STILL_S and not is_reported:
            say(f"{STILL}. Waiting up to {_STILL_S:.0f} s; an interrupt loses nothing")
            is_reported = True
        time.sleep(_POLL_S)


def end_process(runtime: RuntimeFolder) -> None:
    """Ask the keeper to end, and wait for its end. KeeperError if it stays: it still has a snapshot to save,
    or hangs."""
    pid = keeper_of(runtime)
    if pid is None:
        return
    if pid:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                # Checked again: the descriptor is of the process that holds the lock.
                if keeper_of(runtime) == pid:
                    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                    poll = select.poll()
                    poll.register(descriptor, select.POLLIN)
                    poll.poll(_END_S * 1000)
            finally:
                os.close(descriptor)
    if is_alive(runtime, ELECTION_LOCK):
        raise KeeperError(
            f"The keeper of this run (process {pid or 'of another container'}) does not end: it still has a "
            "snapshot to save, or hangs in storage. Nothing was discarded yet. See "
            f"{os.path.join(runtime.path, 'keeper.log')}; repair the storage, or kill it and run this again.",
            path=runtime.path,
        )


def _wait_for_deaths(runtime: RuntimeFolder, guard: Callable[[], None]) -> None:
    """Wait until the keeper has noticed the deaths of its trainers: it removes the lock of a dead trainer
    when it begins to save its snapshots. A lock that it does not know stays, so the wait has an end."""
    until = time.monotonic() + _DEATHS_S
    while is_alive(runtime, ELECTION_LOCK) and time.monotonic() < until:
        guard()
        if not any(name.startswith("trainer-") for name in runtime.names()):
            return
        time.sleep(_POLL_S)


def ask(
    runtime: RuntimeFolder, question: dict[str, Any], timeout_s: float = _TIMEOUT_S
) -> dict[str, Any] | None:
    """Send a question to the run's keeper and return its answer, None if no keeper lives. KeeperError if it
    refuses or does not answer within `timeout_s`."""
    until = time.monotonic() + timeout_s
    try:
        while is_alive(runtime, ELECTION_LOCK):
            if time.monotonic() > until:
                raise TimeoutError
            # It may not listen yet, or no longer.
            with suppress(ConnectionError, EOFError):
                if (peer := connect(runtime, timeout_s)) is not None:
                    with peer:
                        answer, descriptors = asked(peer, question)
                        close_all(descriptors)
                        return answer
            time.sleep(_POLL_S)
    except TimeoutError as error:
        raise KeeperError(
            f"The keeper of this run (process {keeper_of(runtime) or '?'}) lives and does not answer: it is "
            "stopped, or hangs in storage. Nothing was changed; its snapshots stay in memory. See "
            f"{os.path.join(runtime.path, 'keeper.log')}; let it continue, or kill it and run this again.",
            path=runtime.path,
        ) from error
    return None
