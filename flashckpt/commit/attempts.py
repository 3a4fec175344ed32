"""The attempts of a run: how one begins, shows that it lives, and ends; whether another job trains the run.

An attempt has a name from the moment a job opens the run, and begins once its ranks have loaded: then a
version of the catalogue names it, with its owner. Owns the files in alive/ and the timing of the counter in
them.

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
from functools import partial
from typing import Literal

from flashckpt.catalogue.changes import end, highest_number, next_name
from flashckpt.commit.view import HOME, View, ask
from flashckpt.errors import DamagedError, FormatError, RunHeldError, SupersededError
from flashckpt.format.catalogue import EMPTY
from flashckpt.format.names import ALIVE, AttemptName, alive_path
from flashckpt.format.owner import Alive, Owner
from flashckpt.printable import escaped
from flashckpt.store.base import Store

# ---- how an attempt begins


def next_attempt(highest: int) -> AttemptName:
    """A name for the next attempt, above this number. UnusableRunError if no number is left."""
    return next_name(highest, secrets.token_hex(4))


def reserve(store: Store, name: AttemptName) -> None:
    """Create the counter of an attempt that will begin. It shows the other nodes that they see this
    store."""
    store.create(alive_path(name), Alive(count=0).to_bytes())


def is_reserved(store: Store, name: AttemptName, *, exclusively: bool) -> bool:
    """Whether this store has the counter of an attempt. `exclusively`: find out by an exclusive creation,
    since a listing or a read by a file server may be old, and that of an object store is not; a counter that
    this creates in another store is removed."""
    path = alive_path(name)
    if not exclusively or not store.is_folder:
        return store.exists(path)
    if store.create(path, Alive(count=0).to_bytes()):
        store.remove(path)
        store.remove(ALIVE)
        return False
    return True


def settle(view: View) -> tuple[View, int]:
    """Commit the whole snapshots that the newest attempt left without a commit. Returns the newest view, and
    the highest number of an attempt that it knows or that has files there."""
    catalogue, writers = ask(view.store, HOME.settle(view.catalogue))
    return View(catalogue, view.store), highest_number(catalogue, writers)


# ---- the newest attempt


def check_newest(view: View, name: AttemptName) -> None:
    """SupersededError if a newer attempt has begun."""
    newest = view.attempt
    if newest is not None and newest != name and newest.number >= name.number:
        raise SupersededError(
            f"attempt {newest} has taken over {view.store.url}; attempt {name} must end. Committed steps "
            "stay; later work of this process does not become part of the run.",
            path=view.store.url,
        )


# ---- signs of life


def beat(store: Store, name: AttemptName, count: int, *, saves: bool = False) -> None:
    """Write the alive counter: not durably, and with few retries, since the next write follows soon. `saves`:
    the trainer is dead, and a keeper saves what it has left."""
    found = Alive(count=count, phase="saving" if saves else "training")
    store.brief().replace(alive_path(name), found.to_bytes(), durable=False)


def mark_ended(store: Store, name: AttemptName, how: Literal["closed", "dead"]) -> None:
    """Record that no trainer of this attempt lives, so that the next attempt need not watch it. `how`:
    "closed" is written to the catalogue, too."""
    if how == "closed" and View.of(store).attempt == name:
        with suppress(SupersededError):
            ask(store, HOME.update(partial(end, writer=name)))
    before = alive(store, name)
    count = before.count if before is not None else 0
    store.replace(alive_path(name), Alive(count=count, phase=how).to_bytes())


def alive(store: Store, name: AttemptName) -> Alive | None:
    """The alive counter, None if it cannot be read."""
    try:
        return Alive.from_bytes(store.read(alive_path(name), Alive.MAX_BYTES), alive_path(name))
    except (DamagedError, FileNotFoundError):
        return None


def ending(view: View, name: AttemptName) -> str:
    """How an attempt has ended, "closed" or "dead"; empty if no end is recorded."""
    if view.attempt == name and view.catalogue.ended:
        return "closed"
    found = alive(view.store, name)
    return "" if found is None else found.ended


# ---- one job at a time: whether the newest attempt still has a trainer

log = logging.getLogger(__name__)

Probe = Callable[[str, str], bool]
"""Whether a living process holds the lock of this name in this runtime folder."""

# The timing of the alive counter. A keeper increments it every BEAT_S. A trainer replaces a keeper that is
# silent for 30 s, and waits 20 s at most before it starts another after many that died. So the counter of a
# living attempt pauses for less than WATCH_S, unless its whole node pauses, or no keeper of it can live.
BEAT_S = 1.0
# How long a keeper whose trainers have closed the run watches the counter for other nodes, whose ranks may
# still be at their end: all is committed.
STILL_S = 6.0
# How long a job elsewhere, or a keeper whose trainers have died, watches the counter before it takes the
# attempt for dead.
WATCH_S = 60.0
# The watching job reads the counter this often, so that a pause of its own is not taken for one of the
# counter.
_POLL_S = 1.0
_REPORT_S = 15.0


def local_owner(runtime: str = "", lock: str = "", *, job_id: str = "", restart_count: int = 0) -> Owner:
    """This process as the owner of an attempt. `runtime`: the path of its runtime folder; `lock`: the name of
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
    sleep: Callable[[float], None] = time.sleep,
    run: View | None = None,
) -> View:
    """Return the view that was judged. RunHeldError if a trainer of the newest attempt lives. May watch the
    counter for WATCH_S seconds and the store's delay; the log says so. As long as keepers elsewhere save what
    the attempt has left, this waits for them.

    `probe` checks locks in runtime folders of this machine; without it only the counter is used. `run`: a
    view that was read just now.
    """
    view = _newest_or_none(store) if run is None else run
    while (newest := view.attempt) is not None:
        theirs = view.catalogue.owner
        if theirs is None or ending(view, newest):
            break
        if probe is not None and _same_runtime(me, theirs):
            if probe(theirs.runtime, theirs.lock):
                raise _held(store, newest, theirs, f"process {theirs.pid} on this machine ({theirs.host})")
            if not _may_hold_unseen(theirs, probe):
                break
        found = alive(store, newest)
        if _is_restart(me, theirs) and not (found is not None and found.phase == "saving"):
            break
        if _moves(store, newest, theirs, sleep):
            raise _held(store, newest, theirs, f"a process on {escaped(theirs.host)}")
        # Another attempt may have begun meanwhile, and is checked like the first.
        view = _newest_or_none(store)
        if view.attempt == newest:
            break
    return view


def check_none_lives(store: Store, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """RunHeldError if a job trains a run whose catalogue cannot be read: the newest counter moves. May watch
    it for WATCH_S seconds and the store's delay."""
    names = [AttemptName.parse(each.name) for each in store.list(ALIVE) if not each.is_folder]
    newest = max((each for each in names if each is not None), default=None)
    found = None if newest is None else alive(store, newest)
    if newest is None or found is None or found.ended:
        return
    if _moves(store, newest, None, sleep):
        raise RunHeldError(
            f"{store.url} is held: attempt {newest} lives. Nothing was changed. Stop that job first.",
            path=store.url,
        )


def _moves(store: Store, attempt: AttemptName, theirs: Owner | None, sleep: Callable[[float], None]) -> bool:
    """Whether a trainer moves the counter, which is watched; False as soon as the attempt's end is recorded.
    Where a keeper moves it, which saves what the attempt has left, the watch begins again."""
    watch_s = WATCH_S + store.delay_s
    where = "" if theirs is None else f" on {escaped(theirs.host)}"
    last, reported_s, waited_s, is_saving = alive(store, attempt), 0.0, 0.0, False
    while waited_s < watch_s:
        if waited_s >= reported_s:
            reported_s += _REPORT_S
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + watch_s - waited_s))
            log.warning(
                "%s: attempt %s was trained%s, and its end was not recorded. Waiting until %s (%.0f of "
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
        if now == last:
            continue
        if now is None or now.phase != "saving":
            return True
        if not is_saving:
            log.warning(
                "%s: the keepers of attempt %s still save what it has left%s. This process waits for them, "
                "and resumes from that",
                store.url, attempt, where,
            )  # fmt: skip
        last, reported_s, waited_s, is_saving = now, _REPORT_S, 0.0, True
    return False


def _newest_or_none(store: Store) -> View:
    """The newest view. An empty one if it cannot be read: then no process can start to train the run."""
    try:
        return View.of(store)
    except (DamagedError, FormatError):
        return View(EMPTY, store)


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


def _held(store: Store, attempt: AttemptName, theirs: Owner, holder: str) -> RunHeldError:
    job = f" (job {theirs.job_id})" if theirs.job_id else ""
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
