"""The keepers of this node that are this user's: found by their runtime folders, asked, waited for, ended.

Owns the questions, what is said of each keeper, and the order in which one is ended: nothing that is
committed nowhere is lost unless that is asked for. Starts none, and disturbs nobody who trains.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from flashckpt.errors import KeeperError, PersistError, RunHeldError
from flashckpt.keeper.protocol import (
    ELECTION_LOCK,
    ProtocolError,
    Status,
    close_all,
    reach,
    receive,
    remove_names,
    send,
)
from flashckpt.memory.region import is_region_name
from flashckpt.memory.runtime import LifeLock, RuntimeFolder, base_folders, is_alive
from flashckpt.options import Environment
from flashckpt.recovery.node import keeper_of, living_trainers
from flashckpt.recovery.report import Watcher
from flashckpt.recovery.survey import slots_in
from flashckpt.store import open_store

STILL = "nothing is written: parts of other nodes are missing, or storage hangs"

_IDENTITY = re.compile(r"[0-9a-f]{32}")
_PATIENCE_S = 30.0
# A keeper answers within a tick of its loop; one that is stopped must not hold up the list of the others.
_LIST_PATIENCE_S = 5.0
_LOOK_S = 0.05
_BURIAL_S = 10.0
_GOING_S = 30.0
# How long nothing is written, nothing fails and nothing is committed before it is said, and before it is
# waited for no longer: what is missing is another node's, or storage hangs.
_SAID_STILL_S, _STILL_S = 10.0, 120.0


@dataclass(frozen=True, kw_only=True)
class KeeperRow:
    """One runtime folder. `state` is "training" (a trainer lives), "saving" (it has died or closed, and
    something is still to be persisted), "lingering" (all is saved, and the keeper waits `lingers_s` for
    another attempt), "silent" (a keeper that does not answer) or "left" (no keeper lives: regions which
    the next start, or `recover`, finds). `pid` is None where there is no keeper, `run` where nobody says;
    `trainers` are processes. `num_bytes` are those of all regions; the steps are the newest in memory, and
    the newest of those that is committed."""

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


def keepers() -> list[KeeperRow]:
    """What runs on this node for this user, by runtime folder."""
    rows = []
    for path in _folders():
        with _opened(path) as runtime:
            rows.append(_row(runtime) if runtime is not None else None)
    return [row for row in rows if row is not None]


def find(target: str) -> KeeperRow:
    """The keeper of a process id, of a run or of a runtime folder; or a runtime folder that none looks after.
    Raises KeeperError where there is none."""
    rows = keepers()
    if target.isdigit():
        found = [row for row in rows if row.pid == int(target)]
    else:
        path = os.path.realpath(open_store(target).url)
        found = [row for row in rows if path in map(os.path.realpath, (row.run or row.folder, row.folder))]
    if len(found) != 1:
        what = "keeper" if not found else "one keeper alone"
        raise KeeperError(
            f"No {what} of {target} was found on this node. Nothing was changed. `flashckpt keepers` lists "
            "those that run, with their process and run."
        )
    return found[0]


def end(row: KeeperRow, watcher: Watcher, *, discard: bool = False) -> None:
    """See everything saved, then the keeper gone. `discard` gives up what cannot be saved.

    Raises RunHeldError while a trainer lives, PersistError where something could not be saved (then the
    keeper stays, with all that it holds), KeeperError for a keeper that does not answer.
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
                f"changed. Its log: {row.folder}/keeper.log; let it go on, or kill it: what is in named "
                "regions stays for the next start and for `flashckpt recover`.",
                path=row.folder,
            )
        status = wait_until_saved(row.run, runtime, watcher, lambda: _refuse_if_trained(row, runtime))
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
    """Let regions go that no keeper looks after. Only their run could save them, and which that is, or
    whether it was deleted, is not known here."""
    steps = ", ".join(str(each.step) for each in slots_in(runtime) if each.attempt is not None)
    if not discard:
        raise PersistError(
            f"No keeper looks after {row.folder}; it holds steps {steps or '(none)'}. Nothing was changed. "
            "The next start of its run goes on from them; `flashckpt recover RUN` saves them and frees the "
            "memory. If the run was deleted, free it with --discard: what is committed nowhere is lost.",
            path=row.folder,
        )
    # Nobody is elected meanwhile; who trains waits for its keeper, and then finds that there is nothing.
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
        answer = ask(runtime, {"op": "describe"}, _LIST_PATIENCE_S)
    except KeeperError:
        return replace(row, state="silent", pid=pid, trainers=trainers)
    if answer is None:
        return None  # it has left meanwhile
    said = answer["keeper"]
    slots = [each for each in said["regions"] if not each["constants"]]
    sealed = [each["step"] for each in slots if each["step"] is not None]
    committed = [each["step"] for each in slots if each["committed"]]
    alone = "saving" if said["is_saving"] else "lingering"
    return replace(
        row,
        state="training" if trainers else alone,
        pid=pid,
        run=said["run"],
        run_is_gone=said["run_is_gone"],
        trainers=trainers,
        lingers_s=said["lingers_s"] if not trainers else None,
        slots=len(slots),
        num_bytes=sum(each["num_bytes"] for each in said["regions"]),
        newest_sealed=max(sealed, default=None),
        newest_committed=max(committed, default=None),
    )


def _size(runtime: RuntimeFolder, name: str) -> int:
    try:
        return os.stat(name, dir_fd=runtime.descriptor, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _folders() -> Iterator[str]:
    """Wherever a keeper of this user may have its runtime folder."""
    for base in base_folders(Environment.read().runtime_folder):
        own = os.path.join(base, f"flashckpt-{os.geteuid()}")
        try:
            names = sorted(os.listdir(own))
        except OSError:
            continue
        yield from (os.path.join(own, name) for name in names if _IDENTITY.fullmatch(name))


@contextmanager
def _opened(path: str) -> Iterator[RuntimeFolder | None]:
    """None for one that has gone, or that is not this user's alone."""
    with ExitStack() as stack:
        runtime = None
        with suppress(OSError, KeeperError):
            runtime = stack.enter_context(closing(RuntimeFolder.at(path)))
        yield runtime


def wait_until_saved(
    run: str, runtime: RuntimeFolder, watcher: Watcher, guard: Callable[[], None]
) -> Status | None:
    """What the keeper says once everything is saved, or nothing more can be: then steps are `waiting` in its
    status. None where it has left meanwhile. KeeperError for one that does not answer."""
    _wait_for_burial(runtime, guard)
    # It may know the run by a path where it is not any more, and pause before it tries again what has failed.
    question: dict[str, object] = {"op": "status", "run": run, "again": True}
    moved_s, before, is_said = time.monotonic(), None, False
    while True:
        guard()
        answer = ask(runtime, question)
        question.pop("again", None)
        if answer is None:
            return None
        if not isinstance(answer.get("status"), dict):
            raise ProtocolError("The keeper's answer holds no status.")
        status = Status.from_dict(answer["status"])
        watcher.progress(status.progress_bytes, 0)
        done = {each.step for each in status.failures} | set(status.for_others)
        if status.persisting is None and set(status.waiting) <= done:
            return status
        now = status.progress_bytes, status.waiting, status.committed, done
        if now != before:
            moved_s, before = time.monotonic(), now
        still_s = time.monotonic() - moved_s
        if still_s >= _STILL_S:
            return status
        if still_s >= _SAID_STILL_S and not is_said:
            watcher.say(f"{STILL}. Waiting up to {_STILL_S:.0f} s; an interrupt loses nothing")
            is_said = True
        time.sleep(_LOOK_S)


def end_process(runtime: RuntimeFolder) -> None:
    """Ask the keeper to go, and wait until it has. KeeperError for one that stays: it still has something
    to save, or hangs."""
    pid = keeper_of(runtime)
    if pid is None:
        return
    if pid:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                # Again: the process that the lock names is the one that this descriptor is of.
                if keeper_of(runtime) == pid:
                    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                    poll = select.poll()
                    poll.register(descriptor, select.POLLIN)
                    poll.poll(_GOING_S * 1000)
            finally:
                os.close(descriptor)
    if is_alive(runtime, ELECTION_LOCK):
        raise KeeperError(
            f"The keeper of this run (process {pid or 'of another container'}) does not go: it still has "
            "something to save, or hangs in storage. Nothing was discarded yet. See "
            f"{os.path.join(runtime.path, 'keeper.log')}; mend the storage, or kill it and run this again.",
            path=runtime.path,
        )


def _wait_for_burial(runtime: RuntimeFolder, guard: Callable[[], None]) -> None:
    """A keeper removes the lock of a dead trainer when it begins to save what that one left. One that it
    was never told of stays: it is not waited for without end."""
    until = time.monotonic() + _BURIAL_S
    while is_alive(runtime, ELECTION_LOCK) and time.monotonic() < until:
        guard()
        if not any(name.startswith("trainer-") for name in runtime.names()):
            return
        time.sleep(_LOOK_S)


def ask(
    runtime: RuntimeFolder, question: dict[str, object], patience_s: float = _PATIENCE_S
) -> dict[str, Any] | None:
    """What the run's keeper answers, None where none lives. KeeperError for one that does not answer within
    `patience_s`, or refuses."""
    until = time.monotonic() + patience_s
    try:
        while is_alive(runtime, ELECTION_LOCK):
            if time.monotonic() > until:
                raise TimeoutError
            # Elected, and not listening yet, or not any more.
            with suppress(ConnectionError, EOFError):
                if (peer := reach(runtime, patience_s)) is not None:
                    return _exchange(peer, question)
            time.sleep(_LOOK_S)
    except TimeoutError as error:
        raise KeeperError(
            f"The keeper of this run (process {keeper_of(runtime) or '?'}) lives and does not answer: it is "
            "stopped, or hangs in storage. Nothing was changed; what it has in memory stays there. See "
            f"{os.path.join(runtime.path, 'keeper.log')}; let it go on, or kill it and run this again.",
            path=runtime.path,
        ) from error
    return None


def _exchange(peer: socket.socket, question: dict[str, object]) -> dict[str, Any]:
    with peer:
        send(peer, question)
        answer, descriptors = receive(peer)
        close_all(descriptors)
        if answer.get("ok") is not True:
            raise ProtocolError(f"The keeper refused to answer: {answer.get('error', 'without a reason')}")
        return answer
