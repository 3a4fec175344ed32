"""This node's side of a run: its runtime folder, who lives in it, and the locks that a deed takes.

Owns who is kept out. A deed holds `recover.lock`, and the keeper's own lock where no keeper lives, so
that none can be elected meanwhile. Whoever trains is never disturbed: he is named, and the deed refused.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass

from flashckpt.commit import attempts
from flashckpt.commit.holder import Probe, check, here
from flashckpt.errors import DamagedError, RunHeldError
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Holder, Run
from flashckpt.keeper.protocol import ELECTION_LOCK
from flashckpt.memory.held_regions import keeper_locks
from flashckpt.memory.runtime import LifeLock, RuntimeFolder, base_folder, holder_of, identity_of, is_alive
from flashckpt.options import Environment
from flashckpt.store.base import Store

RECOVERY_LOCK = "recover.lock"
_TRIES = 20


@contextlib.contextmanager
def runtime_of(store: Store, run: Run) -> Iterator[RuntimeFolder | None]:
    """The run's runtime folder on this node, None where there is none. RunHeldError where another user has
    one, who alone can look at what is in it."""
    base, identity = base_folder(Environment.read().runtime_folder), _identity(store, run)
    own = os.path.join(base, f"flashckpt-{os.geteuid()}", identity)
    for theirs in set(glob.glob(os.path.join(glob.escape(base), "flashckpt-*", identity))) - {own}:
        user = os.path.basename(os.path.dirname(theirs)).removeprefix("flashckpt-")
        raise RunHeldError(
            f"{store.url} is in the memory of another user, user {user}, on this machine: {theirs}. Nothing "
            "was changed. Run this as that user, who alone can look at what is there and save it.",
            path=store.url,
        )
    with contextlib.ExitStack() as stack:
        runtime = None
        with contextlib.suppress(FileNotFoundError):
            opened = RuntimeFolder.open(base, identity, create=False)
            runtime = stack.enter_context(contextlib.closing(opened))
        yield runtime


@contextlib.contextmanager
def lock_probe(store: Store, run: Run) -> Iterator[tuple[Holder, Probe | None]]:
    """This process as a holder, and how it sees whether a trainer of the run lives on this node. Without
    a runtime folder here there is no such trainer, and the counter in the run's folder is watched."""
    with runtime_of(store, run) as runtime:
        yield _probe(runtime)


def _probe(runtime: RuntimeFolder | None) -> tuple[Holder, Probe | None]:
    if runtime is None:
        return here(), None
    return here(runtime.path), lambda _, lock: is_alive(runtime, lock)


def refuse_if_held(store: Store, runtime: RuntimeFolder | None) -> None:
    """RunHeldError, with process and attempt, while anybody trains the run. May take some seconds where
    its last trainer was on another node: its counter is watched."""
    for lock, pid in living_trainers(runtime) if runtime is not None else ():
        raise RunHeldError(
            f"{store.url} is held: attempt {_claimed_with(store, lock) or '(not claimed yet)'} is trained by "
            f"process {pid or '(of another container)'} on this machine. Nothing was changed, and nothing of "
            "the run was touched. Its own keeper saves what is in memory. Stop that job first.",
            path=store.url,
        )
    check(store, *_probe(runtime))


def living_trainers(runtime: RuntimeFolder) -> list[tuple[str, int]]:
    """Life locks of trainers that are held, with the processes that hold them."""
    names = (name for name in runtime.names() if name.startswith("trainer-") and name.endswith(".lock"))
    return [(name, pid) for name in names if (pid := holder_of(runtime, name)) is not None]


def keeper_of(runtime: RuntimeFolder) -> int | None:
    """The process of the run's keeper on this node, None where none lives."""
    return holder_of(runtime, ELECTION_LOCK)


def dead_keepers(runtime: RuntimeFolder) -> set[str]:
    """Nonces of the keepers that have a lock here and are dead: what they left half written may go."""
    return {nonce for nonce, lives in keeper_locks(runtime).items() if not lives}


def died_here(store: Store, runtime: RuntimeFolder) -> list[AttemptName]:
    """Attempts of this boot and runtime folder whose trainers are dead and whose end nobody has written
    down. To be asked where no trainer lives."""
    me, found = here(runtime.path), []
    for info in attempts.attempts(store):
        theirs = info.claim.holder if info.claim is not None else None
        if info.ended or theirs is None or not theirs.lock:
            continue
        if (theirs.boot_id, theirs.runtime_id) == (me.boot_id, me.runtime_id):
            found.append(info.name)
    return found


@dataclass
class Hold:
    """A run that nobody trains and nobody else recovers, for as long as `guard` says so. `election` is the
    keeper's lock, None while a keeper lives; `claimed` the newest claim when the hold began."""

    store: Store
    runtime: RuntimeFolder
    election: LifeLock | None
    claimed: AttemptName | None

    def take_election(self) -> None:
        """Be in the keeper's place, now that it has left. RunHeldError where another was faster."""
        self.election = LifeLock.acquire(self.runtime, ELECTION_LOCK)
        self.guard()
        if self.election is None:
            raise RunHeldError(
                f"Another keeper of {self.store.url} has begun on this machine. Nothing was changed. "
                "Run this again.",
                path=self.store.url,
            )

    def guard(self) -> None:
        """To be asked before everything that deletes, and between long works. RunHeldError once a job has
        begun: what was saved by then stays saved, and the rest is its keeper's."""
        deposed = self.election is not None and not self.election.stands(self.runtime)
        if deposed or living_trainers(self.runtime) or attempts.newest_claimed(self.store) != self.claimed:
            raise RunHeldError(
                f"A job has begun on {self.store.url} meanwhile: this ends here. What was committed or "
                "marked so far stays; the rest is left as it is, and that job's keeper saves what is in "
                "memory.",
                path=self.store.url,
            )


@contextlib.contextmanager
def hold(store: Store, run: Run) -> Iterator[Hold]:
    """Keep everybody else out. RunHeldError where somebody is in. Leaves no file behind."""
    claimed = attempts.newest_claimed(store)
    with runtime_of(store, run) as found:
        refuse_if_held(store, found)
    runtime, lock = _entered(store, run)
    held = Hold(store, runtime, None, claimed)
    try:
        held.election = LifeLock.acquire(runtime, ELECTION_LOCK)
        # Who came between the look and the locks.
        held.guard()
        yield held
    finally:
        if held.election is not None:
            held.election.release(runtime)
        lock.release(runtime)
        runtime.discard()
        runtime.close()


def _entered(store: Store, run: Run) -> tuple[RuntimeFolder, LifeLock]:
    base, identity = base_folder(Environment.read().runtime_folder), _identity(store, run)
    for _ in range(_TRIES):
        runtime = RuntimeFolder.open(base, identity)
        try:
            lock = LifeLock.acquire(runtime, RECOVERY_LOCK)
        except FileNotFoundError:
            # A keeper that left has removed the folder under us.
            runtime.close()
            continue
        if lock is not None and runtime.exists():
            return runtime, lock
        pid = holder_of(runtime, RECOVERY_LOCK)
        if lock is not None:
            lock.release(runtime)
        runtime.close()
        if pid is not None:
            raise RunHeldError(
                f"{store.url} is being recovered or pruned by process {pid or '(of another container)'} on "
                "this machine. Nothing was changed. Wait until it is done.",
                path=store.url,
            )
    raise RunHeldError(
        f"{store.url}: its runtime folder in {base} comes and goes. Nothing was changed. Try again.",
        path=store.url,
    )


def _identity(store: Store, run: Run) -> str:
    return identity_of(run.run_id, store.place())


def _claimed_with(store: Store, lock: str) -> AttemptName | None:
    """The attempt that names this lock in its claim."""
    with contextlib.suppress(DamagedError):
        for each in reversed(attempts.attempts(store)):
            if each.claim is not None and each.claim.holder.lock == lock:
                return each.name
    return None
