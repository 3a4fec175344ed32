"""One job at a time: whether the newest attempt still has a trainer. Owns the check and the timing of the
alive counter, takes no claim.

A free lock on the same boot and runtime folder means dead; elsewhere, and where the lock has no name while
its process may live, the alive counter is watched for WATCH_S. No clock of another machine is ever compared
with one of ours.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Callable

from flashckpt.commit.attempts import alive, newest_claimed, read_claim
from flashckpt.errors import DamagedError, RunHeldError
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Holder
from flashckpt.printable import escaped
from flashckpt.store.base import Store

log = logging.getLogger(__name__)

# Whether the lock of this name in this runtime folder is held by a living process.
Probe = Callable[[str, str], bool]

# The timing of the alive counter. A keeper moves the counter every BEAT_S. The trainer that leads reads it
# every STAND_IN_S and moves it where it stands still: so the counter of a living attempt stands still for
# 2 * STAND_IN_S at most while its keeper is stopped, and for longer only while trainer and keeper both stand
# still (a node that swaps, a paused virtual machine) or storage delays their writes (a store's `delay_s`).
BEAT_S = 1.0
STAND_IN_S = 2.0
# A keeper that has seen the trainers of its node end waits for this long before it takes the counter for one
# that no other node moves: longer than 2 * STAND_IN_S. On the same job's restart on another node this counts.
STILL_S = 6.0
# A job elsewhere waits for this long before it takes over a run: 15 times the longest pause of the counter
# of a trainer that runs, so that pauses of a whole node of up to a minute cost no run.
WATCH_S = 60.0
# The watching job reads the counter this often: a pause of its own is then no pause of the counter's.
_POLL_S = 1.0
_REPORT_S = 15.0


def here(runtime: str = "", lock: str = "", *, job_id: str = "", restart_count: int = 0) -> Holder:
    """This process as a holder. `runtime` is the path of its runtime folder, `lock` its lock's name in it;
    both are empty for a deed that holds no lock."""
    return Holder(
        boot_id=_boot_id(),
        runtime=runtime,
        runtime_id=_folder_id(runtime),
        lock=lock,
        host=socket.gethostname()[:255],
        pid=os.getpid(),
        job_id=job_id[:4096],
        restart_count=restart_count,
    )


def check(
    store: Store,
    me: Holder,
    probe: Probe | None = None,
    *,
    watch_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
    ours: AttemptName | None = None,
) -> None:
    """RunHeldError if a trainer of the newest attempt lives. May take `watch_s` seconds to find out, by
    default WATCH_S and the store's delay; the log says so. `ours`: this job's own attempt, which another node
    may have just claimed.

    `probe` answers for locks in runtime folders of this machine; without it only the counter tells.
    """
    watch_s = WATCH_S + store.capabilities.delay_s if watch_s is None else watch_s
    while (newest := newest_claimed(store)) not in (None, ours):
        assert newest is not None
        ended, theirs = _ended(store, newest), _holder(store, newest)
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
        # Watching took a while: another may have claimed meanwhile, and is to be looked at like the first.
        if newest_claimed(store) == newest:
            return


def _moves(
    store: Store,
    attempt: AttemptName,
    theirs: Holder | None,
    watch_s: float,
    sleep: Callable[[float], None],
) -> bool:
    """Whether the counter moves within `watch_s`; False as soon as the attempt's end is written down."""
    where = f"on {escaped(theirs.host)}" if theirs is not None else "on another node"
    first, reported_s, waited_s = alive(store, attempt), 0.0, 0.0
    while waited_s < watch_s:
        if waited_s >= reported_s:
            reported_s += _REPORT_S
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + watch_s - waited_s))
            log.warning(
                "%s: attempt %s was trained %s, and its end was not written down. Waiting until %s (%.0f of "
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


def _holder(store: Store, attempt: AttemptName) -> Holder | None:
    try:
        return read_claim(store, attempt).holder
    except (FileNotFoundError, DamagedError):
        return None


def _same_runtime(me: Holder, theirs: Holder) -> bool:
    mine = (me.boot_id, me.runtime, me.runtime_id)
    return bool(theirs.lock and me.runtime) and mine == (theirs.boot_id, theirs.runtime, theirs.runtime_id)


def _may_hold_unseen(theirs: Holder, probe: Probe) -> bool:
    """Whether it may live and hold a lock that had no name when it was asked for. Most often its keeper has
    removed that, after its death, and nobody is to wait: so only if its pid is of another process that
    lives."""
    if theirs.pid == os.getpid():
        return False
    if os.path.lexists(os.path.join(theirs.runtime, theirs.lock)):
        # It may be there only since it was asked for: its holder takes it again.
        return probe(theirs.runtime, theirs.lock)
    try:
        descriptor = os.pidfd_open(theirs.pid)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # a kernel before 5.3, or a sandbox, that does not tell
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        return not ended.poll(0)
    finally:
        os.close(descriptor)


def _is_restart(me: Holder, theirs: Holder) -> bool:
    """Whether the scheduler says so: it ended the one before it started the other (`Environment.job_id`)."""
    same_job = bool(me.job_id) and me.job_id == theirs.job_id
    return same_job and me.restart_count > theirs.restart_count


def _held(store: Store, attempt: AttemptName, theirs: Holder | None, who: str) -> RunHeldError:
    job = f" (job {theirs.job_id})" if theirs is not None and theirs.job_id else ""
    return RunHeldError(
        f"{store.url} is held: attempt {attempt} is trained by {who}{job}. Nothing was changed, "
        "and nothing of the run was touched. Stop that job first, or use another folder.",
        path=store.url,
    )


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(64).strip()
    except OSError:
        # Unknown equals nothing, not even itself: the counter is watched.
        return f"unknown-{os.urandom(8).hex()}"


def _folder_id(path: str) -> str:
    if not path:
        return ""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"
