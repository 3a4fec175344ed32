"""One incarnation of the job on a run: its claim, its life lock, its keeper. Owns their order.

The life lock is held before the claim is written, so that no claim ever names a lock that nobody had;
the claim is taken before anything is read, so that from here on older attempts prune nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from flashckpt import crashpoints
from flashckpt.checkpointer.environment import describe_environment
from flashckpt.checkpointer.stacks import Stacks
from flashckpt.commit import attempts
from flashckpt.commit.holder import check, here
from flashckpt.commit.run import open_run
from flashckpt.errors import OptionError, RunError, RunHeldError
from flashckpt.events import log
from flashckpt.format.records import AttemptName
from flashckpt.keeper.client import KeeperClient, connect_or_start
from flashckpt.keeper.start import survival_warnings
from flashckpt.memory.runtime import (
    LifeLock,
    RuntimeFolder,
    base_folder,
    identity_of,
    is_alive,
    join,
    trainer_lock_name,
)
from flashckpt.options import Environment, Keep, Options
from flashckpt.store.base import Store, open_store

_held: set[str] = set()
_held_guard = threading.Lock()


@dataclass
class Session:
    """A claimed attempt with a keeper that knows it. `identity` names the run on this node."""

    store: Store
    identity: str
    runtime: RuntimeFolder
    life: LifeLock
    attempt: AttemptName
    keeper: KeeperClient
    environment: Environment
    stacks: Stacks | None = None
    closed: bool = False

    def start(self, parent: AttemptName | None, step: int, loaded: str | None) -> None:
        """Write where this attempt goes on from; from here on older attempts commit nothing. Raises RunError
        where it cannot be written."""
        try:
            attempts.start(self.store, self.attempt, parent, step, self.environment.world, loaded)
        except OSError as error:
            live = f"already that of step {step}" if parent is not None else "as it was"
            raise RunError(
                f"{self.store.url}: that attempt {self.attempt} begins at step {step} could not be written "
                f"({error.strerror or error}), so nothing it captures would count. The run is as it was; "
                f"the live state is {live}. Mend the storage, then start again.",
                path=self.store.url,
                step=step,
            ) from error
        crashpoints.point("start.written")
        self.keeper.started(loaded=loaded, step=step)

    def close(self) -> None:
        """Let the run go; a second call does nothing. The keeper stays as long as it has something to
        persist."""
        if self.closed:
            return
        self.closed = True
        self.keeper.close()
        if self.stacks is not None:
            self.stacks.close(self.runtime)
        self.life.release(self.runtime)
        self.runtime.close()
        with _held_guard:
            _held.discard(self.identity)


def open_session(path: str | os.PathLike[str], keep: Keep, options: Options) -> Session:
    """Open or make the run, check that no other job has it, claim an attempt, find or start the keeper.

    Raises RunHeldError, RunError and its kin, KeeperError, OptionError for a scheme that is not there.
    """
    environment = Environment.read()
    _check_world(environment)
    store = open_store(path)
    run = _opened(store, path)
    identity = identity_of(run, store.place())
    with _held_guard:
        if identity in _held:
            raise RunHeldError(
                f"{store.url} is already attached by this process. Nothing was changed. Close the first "
                "Checkpointer, or let its loop end, before a second one is attached; for several epochs "
                "use loop(…, epochs=n) or Checkpointer.epochs.",
                path=store.url,
            )
        _held.add(identity)
    try:
        return _claimed(store, identity, environment, keep, options)
    except BaseException:
        with _held_guard:
            _held.discard(identity)
        raise


def _check_world(environment: Environment) -> None:
    """A step of several ranks is committed once all of them have theirs: one alone would wait for ever."""
    if environment.world > 1:
        raise OptionError(
            f"WORLD_SIZE={environment.world}: a run of several processes is not there yet, and no step of it "
            "would ever be committed. Nothing was started. Use one process per run; for one that a launcher "
            "started among others and that trains by itself, unset RANK and WORLD_SIZE."
        )


def _opened(store: Store, path: str | os.PathLike[str]) -> str:
    try:
        return open_run(store, create=True).run_id
    except OSError as error:
        raise RunError(
            f"The run's folder {os.fspath(path)} cannot be used: {error.strerror or error}. Nothing was "
            "written and training has not begun. Choose a folder that this user can write.",
            path=path,
        ) from error


@contextlib.contextmanager
def _writing(store: Store) -> Iterator[None]:
    """A run that was there can be on a disk that has filled up or become read-only since."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{store.url} cannot be written: {error.strerror or error}. What is committed is as it was, what "
            "is in memory stays there, and training has not begun. Make room or mend the storage, and start "
            "again.",
            path=store.url,
        ) from error


def _claimed(store: Store, identity: str, environment: Environment, keep: Keep, options: Options) -> Session:
    lock = trainer_lock_name(environment.rank)
    runtime, life = join(base_folder(environment.runtime_folder), identity, lock)
    stacks = Stacks.open(runtime, life.name) if options.watchdog is not None else None
    try:
        holder = here(
            runtime.path, life.name, job_id=environment.job_id, restart_count=environment.restart_count
        )
        # The check runs before each try: who loses a race for the number looks at the winner.
        with _writing(store):
            attempt = attempts.claim(
                store, holder, lambda: check(store, holder, lambda _, name: is_alive(runtime, name))
            )
        crashpoints.point("claim.taken")
        keeper = connect_or_start(store.url, runtime, life)
        keeper.hello(
            rank=environment.rank,
            world=environment.world,
            attempt=str(attempt),
            keep=keep,
            linger_s=options.linger_s,
            environment=describe_environment(),
            stacks_signal=stacks.signal_number if stacks is not None else 0,
            kill_when_stuck=options.watchdog_action == "kill",
        )
    except BaseException:
        if stacks is not None:
            stacks.close(runtime)
        life.release(runtime)
        runtime.close()
        raise
    for warning in survival_warnings():
        log.warning("%s", warning)
    return Session(store, identity, runtime, life, attempt, keeper, environment, stacks)
