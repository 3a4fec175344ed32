"""A keeper that outlived its trainers: it has the slots, and saves them itself. It is asked, and waited for.

Owns the questions. Never takes anything from a keeper that works; one that is to go is asked to.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from flashckpt.errors import KeeperError
from flashckpt.keeper.protocol import (
    ELECTION_LOCK,
    SOCKET_NAME,
    ProtocolError,
    Status,
    close_all,
    peer_uid,
    receive,
    send,
)
from flashckpt.memory.runtime import RuntimeFolder, holder_of, is_alive
from flashckpt.recovery.report import Watcher

STILL = "nothing is written: parts of other nodes are missing, or storage hangs"

_PATIENCE_S = 30.0
_LOOK_S = 0.05
_BURIAL_S = 10.0
_GOING_S = 30.0
# How long nothing is written, nothing fails and nothing is committed before it is said, and before it is
# waited for no longer: what is missing is another node's, or storage hangs.
_SAID_STILL_S, _STILL_S = 10.0, 120.0


def keeper_of(runtime: RuntimeFolder) -> int | None:
    """The process of the run's keeper on this node, None where none lives."""
    return holder_of(runtime, ELECTION_LOCK)


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
        status = _asked(runtime, question)
        question.pop("again", None)
        if status is None:
            return None
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


def end(runtime: RuntimeFolder) -> None:
    """Ask the keeper to go, and wait until it has. KeeperError for one that stays: it still has something
    to save, or hangs."""
    pid = keeper_of(runtime)
    if pid is None:
        return
    if pid:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                # Again: the process that the lock names is the one that this descriptor is of.
                if keeper_of(runtime) == pid:
                    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                    select.select([descriptor], [], [], _GOING_S)
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


def _asked(runtime: RuntimeFolder, question: dict[str, object]) -> Status | None:
    answer = ask(runtime, question)
    if answer is None:
        return None
    if not isinstance(answer.get("status"), dict):
        raise ProtocolError("The keeper's answer holds no status.")
    return Status.from_dict(answer["status"])


def ask(
    runtime: RuntimeFolder, question: dict[str, object], patience_s: float = _PATIENCE_S
) -> dict[str, Any] | None:
    """What the run's keeper answers, None where none lives. KeeperError for one that does not answer within
    `patience_s`, or refuses."""
    try:
        return _ask(runtime, question, patience_s)
    except TimeoutError as error:
        raise KeeperError(
            f"The keeper of this run (process {keeper_of(runtime) or '?'}) lives and does not answer: it is "
            "stopped, or hangs in storage. Nothing was changed; what it has in memory stays there. See "
            f"{os.path.join(runtime.path, 'keeper.log')}; let it go on, or kill it and run this again.",
            path=runtime.path,
        ) from error


def _ask(runtime: RuntimeFolder, question: dict[str, object], patience_s: float) -> dict[str, Any] | None:
    until = time.monotonic() + patience_s
    while is_alive(runtime, ELECTION_LOCK):
        if time.monotonic() > until:
            raise TimeoutError
        # Elected, and not listening yet, or not any more.
        with contextlib.suppress(ConnectionError, FileNotFoundError, BlockingIOError, EOFError):
            if runtime.check_socket(SOCKET_NAME):
                return _exchange(runtime, question, patience_s)
        time.sleep(_LOOK_S)
    return None


def _exchange(runtime: RuntimeFolder, question: dict[str, object], patience_s: float) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(patience_s)
        peer.connect(runtime.reachable(SOCKET_NAME))
        if peer_uid(peer)[1] != os.geteuid():
            raise KeeperError("Another user's process answers in the keeper's place. Nothing was changed.")
        send(peer, question)
        answer, descriptors = receive(peer)
        close_all(descriptors)
        if answer.get("ok") is not True:
            raise ProtocolError(f"The keeper refused to answer: {answer.get('error', 'without a reason')}")
        return answer
