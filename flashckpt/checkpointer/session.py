"""One incarnation of the job on a run: its claim, its life lock, its keeper. Owns their order.

One rank leads: it claims the attempt and writes where it goes on from. The others join that attempt. The life
lock is held before the claim is written, so that no claim ever names a lock that nobody had; the claim is
taken before anything is read, so that from here on older attempts prune nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flashckpt import crashpoints
from flashckpt.checkpointer.environment import describe_environment
from flashckpt.checkpointer.stacks import Stacks
from flashckpt.commit import attempts
from flashckpt.commit.holder import check, here
from flashckpt.commit.run import open_run
from flashckpt.errors import DamagedError, RunError, RunHeldError
from flashckpt.events import log
from flashckpt.format.records import AttemptName
from flashckpt.keeper.client import KeeperClient, connect_or_start
from flashckpt.keeper.start import end_early, survival_warnings
from flashckpt.memory.runtime import (
    LifeLock,
    RuntimeFolder,
    base_folder,
    enter,
    identity_of,
    is_alive,
    trainer_lock_name,
)
from flashckpt.options import Environment, Keep, Options
from flashckpt.store.base import Store, open_store

Connect = Callable[[str, RuntimeFolder, LifeLock], KeeperClient]
"""Takes the run, its runtime folder and this process's life lock there; gives the link to the keeper."""

_held: set[tuple[str, int]] = set()
_held_guard = threading.Lock()


@dataclass
class Session:
    """One rank's place in a claimed attempt, with a keeper that knows it. `identity` names the run on this
    node, `leads` says who writes for all ranks where the attempt goes on from."""

    store: Store
    identity: str
    runtime: RuntimeFolder
    life: LifeLock
    attempt: AttemptName
    keeper: KeeperClient
    environment: Environment
    leads: bool
    stacks: Stacks | None = None
    closed: bool = False

    def start(self, parent: AttemptName | None, step: int, loaded: str | None) -> None:
        """Say where this attempt goes on from, and `loaded`, the slot that this rank took it out of. Who
        leads writes it: from here on older attempts commit nothing. Raises RunError where it cannot be
        written, or was written otherwise."""
        if self.leads:
            self._write_start(parent, step, loaded)
        else:
            self._check_start(parent, step)
        crashpoints.point("start.written")
        self.keeper.started(loaded=loaded, step=step)

    def _write_start(self, parent: AttemptName | None, step: int, loaded: str | None) -> None:
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

    def _check_start(self, parent: AttemptName | None, step: int) -> None:
        found = attempts.read_start(self.store, self.attempt)
        if found is None or (found.parent, found.step) != (parent, step):
            there = "nothing yet" if found is None else f"step {found.step} of {found.parent}"
            raise RunError(
                f"{self.store.url}: rank {self.environment.rank} took up step {step} of {parent}, and "
                f"attempt {self.attempt} goes on from {there}. Nothing that this rank captures is kept. "
                "Start all ranks again.",
                path=self.store.url,
                step=step,
            )

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
            _held.discard((self.identity, self.environment.rank))


def lead(
    path: str | os.PathLike[str],
    keep: Keep,
    options: Options,
    environment: Environment,
    connect: Connect = connect_or_start,
) -> Session:
    """Open or make the run, check that no other job has it, claim an attempt.

    Raises RunHeldError, RunError and its kin, KeeperError, OptionError for a scheme that is not there.
    """
    return _opened(path, None, keep, options, environment, connect)


def join(
    path: str | os.PathLike[str],
    attempt: AttemptName,
    keep: Keep,
    options: Options,
    environment: Environment,
    connect: Connect = connect_or_start,
) -> Session:
    """Take part, as another rank, in the attempt that the one that leads has claimed.

    Raises SupersededError where it is not the newest, RunError where it was never claimed, and what `lead`
    does.
    """
    return _opened(path, attempt, keep, options, environment, connect)


def _opened(
    path: str | os.PathLike[str],
    attempt: AttemptName | None,
    keep: Keep,
    options: Options,
    environment: Environment,
    connect: Connect,
) -> Session:
    store = open_store(path)
    identity = identity_of(_run_id(store, path, create=attempt is None), store.place())
    place = (identity, environment.rank)
    with _held_guard:
        if place in _held:
            raise RunHeldError(
                f"{store.url} is already attached by this process. Nothing was changed. Close the first "
                "Checkpointer, or let its loop end, before a second one is attached; for several epochs "
                "use loop(…, epochs=n) or Checkpointer.epochs.",
                path=store.url,
            )
        _held.add(place)
    try:
        return _placed(store, identity, attempt, keep, options, environment, connect)
    except BaseException:
        with _held_guard:
            _held.discard(place)
        raise


def _run_id(store: Store, path: str | os.PathLike[str], *, create: bool) -> str:
    try:
        return open_run(store, create=create).run_id
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


def _claim(store: Store, environment: Environment, runtime: RuntimeFolder, life: LifeLock) -> AttemptName:
    holder = here(runtime.path, life.name, job_id=environment.job_id, restart_count=environment.restart_count)
    # The check runs before each try: who loses a race for the number looks at the winner.
    with _writing(store):
        attempt = attempts.claim(
            store, holder, lambda: check(store, holder, lambda _, name: is_alive(runtime, name))
        )
    crashpoints.point("claim.taken")
    return attempt


def _check_claimed(store: Store, attempt: AttemptName) -> None:
    try:
        attempts.read_claim(store, attempt)
    except (FileNotFoundError, DamagedError) as error:
        raise RunError(
            f"{store.url}: attempt {attempt}, which this process was to join, was never claimed there. "
            "Nothing was changed. All ranks of a job must be given the same run.",
            path=store.url,
        ) from error
    attempts.check_newest(store, attempt)


def _placed(
    store: Store,
    identity: str,
    attempt: AttemptName | None,
    keep: Keep,
    options: Options,
    environment: Environment,
    connect: Connect,
) -> Session:
    if attempt is not None:
        _check_claimed(store, attempt)
    lock = trainer_lock_name(environment.rank)
    runtime, life = enter(base_folder(environment.runtime_folder), identity, lock)
    with contextlib.ExitStack() as undo:
        undo.callback(runtime.close)
        undo.callback(life.release, runtime)
        stacks = Stacks.open(runtime, life.name) if options.watchdog is not None else None
        if stacks is not None:
            undo.callback(stacks.close, runtime)
        name = attempt or _claim(store, environment, runtime, life)
        keeper = connect(store.url, runtime, life)
        if (unused := end_early(runtime)) >= 0:
            os.close(unused)
        keeper.hello(
            rank=environment.rank,
            world=environment.world,
            attempt=str(name),
            keep=keep,
            linger_s=options.linger_s,
            environment=describe_environment(environment),
            stacks_signal=stacks.signal_number if stacks is not None else 0,
            kill_when_stuck=options.watchdog_action == "kill",
        )
        undo.pop_all()
    for warning in survival_warnings():
        log.warning("%s", warning)
    leads = attempt is None
    return Session(store, identity, runtime, life, name, keeper, environment, leads, stacks)
