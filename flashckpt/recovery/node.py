"""Access to a run from this node for a command: its runtime folder, its locks, the check for a living job.

A command that changes the run holds `recover.lock`, and the keeper's own lock if no keeper lives, so that no
keeper is elected meanwhile. It is refused, with the process, while a trainer lives. A dry run takes no lock.
"""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from flashckpt.commit.attempts import Probe, check_not_held, ending, local_owner
from flashckpt.commit.view import View, open_run
from flashckpt.errors import RunHeldError
from flashckpt.format.names import AttemptName
from flashckpt.format.owner import Owner
from flashckpt.keeper.node_keepers import living_trainers
from flashckpt.keeper.protocol import ELECTION_LOCK
from flashckpt.memory.runtime import (
    LifeLock,
    RuntimeFolder,
    base_folder,
    enter,
    holder_of,
    identity_of,
    is_alive,
)
from flashckpt.options import Environment
from flashckpt.store.base import Store

RECOVERY_LOCK = "recover.lock"


@contextlib.contextmanager
def runtime_of(store: Store, run: View) -> Iterator[RuntimeFolder | None]:
    """The run's runtime folder on this node, or None. RunHeldError if another user has one:
    only that user can read what is in it."""
    base, identity = base_folder(Environment.read().runtime_folder), _identity(store, run)
    own = os.path.join(base, f"flashckpt-{os.geteuid()}", identity)
    for theirs in set(glob.glob(os.path.join(glob.escape(base), "flashckpt-*", identity))) - {own}:
        user = os.path.basename(os.path.dirname(theirs)).removeprefix("flashckpt-")
        raise RunHeldError(
            f"{store.url} is in the memory of another user, user {user}, on this machine: {theirs}. Nothing "
            "was changed. Run this as that user, who alone can read and save what is there.",
            path=store.url,
        )
    with contextlib.ExitStack() as stack:
        runtime = None
        with contextlib.suppress(FileNotFoundError):
            opened = RuntimeFolder.open(base, identity, create=False)
            runtime = stack.enter_context(contextlib.closing(opened))
        yield runtime


def refuse_if_trained(store: Store) -> None:
    """RunHeldError if a living attempt of the run in this store would be superseded."""
    with runtime_of(store, open_run(store, create=False)) as runtime:
        check_not_held(store, *_probe(runtime))


def _probe(runtime: RuntimeFolder | None) -> tuple[Owner, Probe | None]:
    """This process as an owner, and how it finds out whether a trainer of the run lives on this node. If the
    run has no runtime folder here, none does, and the counter in the run's folder is watched."""
    if runtime is None:
        return local_owner(), None
    return local_owner(runtime.path), lambda _, lock: is_alive(runtime, lock)


def refuse_if_held(store: Store, runtime: RuntimeFolder | None) -> None:
    """RunHeldError, with process and attempt, while a job trains the run. May take some seconds if its last
    trainer was on another node: its counter is watched."""
    for lock, pid in living_trainers(runtime) if runtime is not None else ():
        view = View.of(store)
        theirs = view.catalogue.owner
        of = view.attempt if theirs is not None and theirs.lock == lock else "(not begun yet)"
        raise RunHeldError(
            f"{store.url} is held: attempt {of} is trained by process {pid or '(of another container)'} on "
            "this machine. Nothing was changed. Its own keeper saves what is in memory. Stop that job first.",
            path=store.url,
        )
    check_not_held(store, *_probe(runtime))


def died_here(store: Store, runtime: RuntimeFolder) -> AttemptName | None:
    """The newest attempt, if it is of this boot and runtime folder and its end is not recorded. It is dead if
    no trainer lives here."""
    view, me = View.of(store), local_owner(runtime.path)
    theirs, newest = view.catalogue.owner, view.attempt
    if newest is None or theirs is None or not theirs.lock or ending(view, newest):
        return None
    is_here = (theirs.boot_id, theirs.runtime_id) == (me.boot_id, me.runtime_id)
    return newest if is_here else None


@dataclass
class Hold:
    """A run that no job trains and no other command changes, for as long as `guard` does not raise.
    `election`: the keeper's lock, None while a keeper lives. `newest`: the newest attempt when the hold
    began. `is_view`: of a dry run, which changes nothing and holds no lock."""

    store: Store
    runtime: RuntimeFolder
    newest: AttemptName | None
    election: LifeLock | None = None
    is_view: bool = False

    def release_election(self) -> None:
        if self.election is not None:
            self.election.release(self.runtime)

    def guard(self) -> None:
        """Call before each deletion, and during long work. RunHeldError once a job has begun: what was saved
        by then stays saved, and the job's keeper saves the rest."""
        if self.is_view:
            return
        deposed = self.election is not None and not self.election.stands(self.runtime)
        if deposed or living_trainers(self.runtime) or View.of(self.store).attempt != self.newest:
            raise RunHeldError(
                f"A job has begun on {self.store.url} meanwhile: this ends here. What was committed or "
                "marked so far stays; the rest is left as it is, and that job's keeper saves what is in "
                "memory.",
                path=self.store.url,
            )


@contextlib.contextmanager
def hold(store: Store, run: View, *, dry_run: bool) -> Iterator[Hold]:
    """Keep other commands and keepers out; a dry run takes no lock. RunHeldError if a job or a command has
    the run. Leaves no file behind."""
    with contextlib.ExitStack() as stack:
        runtime = stack.enter_context(runtime_of(store, run))
        refuse_if_held(store, runtime)
        if dry_run:
            if runtime is None:
                base = stack.enter_context(tempfile.TemporaryDirectory())
                runtime = RuntimeFolder.open(base, _identity(store, run))
                stack.callback(runtime.close)
            yield Hold(store, runtime, run.attempt, is_view=True)
            return
        base = base_folder(Environment.read().runtime_folder)
        runtime, lock = enter(base, _identity(store, run), RECOVERY_LOCK, partial(_alone, store=store))
        held = Hold(store, runtime, run.attempt)
        for leave in (runtime.close, runtime.discard, partial(lock.release, runtime), held.release_election):
            stack.callback(leave)
        held.election = LifeLock.acquire(runtime, ELECTION_LOCK)
        held.guard()  # a job may have begun before the locks were taken
        yield held


def _alone(runtime: RuntimeFolder, name: str, store: Store) -> LifeLock:
    """Take a lock. RunHeldError if another recovery has it."""
    lock = LifeLock.acquire(runtime, name)
    if lock is None:
        who = holder_of(runtime, name) or "(of another container)"
        raise RunHeldError(
            f"{store.url} is being recovered by process {who} on this machine. Nothing was changed. Wait "
            "until it is done.",
            path=store.url,
        )
    return lock


def _identity(store: Store, run: View) -> str:
    return identity_of(run.run_id, store.place())
