"""One incarnation of the job on a run: its claim, its life lock, its keeper. Owns their order.

One rank leads: it claims the attempt and writes where it goes on from. The others join that attempt. The life
lock is held before the claim is written, so that no claim ever names a lock that nobody had; the claim is
taken before anything is read, so that from here on older attempts prune nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flashckpt import crashpoints
from flashckpt.checkpointer.life_sign import LifeSign
from flashckpt.commit import attempts, retention
from flashckpt.commit.attempts import open_run
from flashckpt.commit.holder import check, here
from flashckpt.commit.lineage import VisibleStep
from flashckpt.errors import DamagedError, FlashckptError, KeeperError, RunError, RunHeldError
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Holder
from flashckpt.format.replicas import Ranks
from flashckpt.keeper.client import KeeperClient, connect_or_start, newest_in_memory
from flashckpt.keeper.start import end_early, survival_warnings
from flashckpt.memory import forks
from flashckpt.memory.runtime import (
    LifeLock,
    RuntimeFolder,
    base_folder,
    enter,
    identity_of,
    is_alive,
    stacks_name,
    trainer_lock_name,
)
from flashckpt.options import Environment, Keep, Options, Remote
from flashckpt.ranks.group import Alone, Group
from flashckpt.store import open_store
from flashckpt.store.base import Store

if TYPE_CHECKING:
    from flashckpt.tiers.nearest import RemoteRun

log = logging.getLogger(__name__)

_RESTARTS_HANG = (
    "torchrun may restart these ranks (%d restarts are left), and the restarted ranks can hang in "
    "init_process_group, before they reach flashckpt: they read the addresses of the dead ranks from "
    "torchrun's store (pytorch issue 135712). Checkpoints are not affected. Start torchrun with "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment."
)

Connect = Callable[[str, RuntimeFolder, LifeLock], KeeperClient]
"""Takes the run, its runtime folder and this process's life lock there; gives the link to the keeper."""

# A remote may have steps of far more attempts than have any here.
_NEAR_OF_REMOTE = 4096

# Guarded: what this process holds, and the signals that it has taken for stacks and uses no more.
_guard = threading.Lock()
_held: set[tuple[str, int]] = set()
_idle_signals: list[int] = []


@dataclass(frozen=True)
class KnownRun:
    """What ranks know of a run before they open it: its id, empty where it has none yet; the highest number
    of an attempt in any of their folders, and in the memory of nodes other than rank 0's."""

    run_id: str = ""
    above: int = 0


@dataclass
class Session:
    """One rank's place in a claimed attempt, with a keeper that knows it. `identity` names the run on this
    node, `leads` says who writes where the attempt goes on from, for all ranks or, where nodes have folders
    of their own, for those of its folder; `group` are all ranks, `ranks` those of its folder, None for all.
    `run_id` is what run.json says, `loaded` the step that the attempt went on from, `remote` where the keeper
    copies steps to.
    `complete` is the snapshot that all ranks have when the attempt starts (number of the attempt, boundary);
    zeros for a rank alone. `remote_run` is what its remote had of the run, None where it has no remote."""

    store: Store
    identity: str
    runtime: RuntimeFolder
    life: LifeLock
    attempt: AttemptName
    keeper: KeeperClient
    environment: Environment
    leads: bool
    group: Group
    stacks: Stacks | None = None
    life_sign: LifeSign | None = None
    closed: bool = False
    complete: tuple[int, int] = (0, 0)
    ranks: Ranks | None = None
    run_id: str = ""
    loaded: VisibleStep | None = None
    remote: Remote | None = None
    remote_run: RemoteRun | None = None

    def surroundings(self) -> dict[str, Any]:
        """What around this process can change numbers, in plain values; each snapshot has a copy. Devices
        count from the moment that the process uses CUDA: a question for them would initialise it, and a child
        that is forked after that cannot use CUDA."""
        cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return {
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if cuda else platform.machine(),
            "devices": torch.cuda.device_count() if cuda else 0,
            "world": self.environment.world,
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul_precision": torch.get_float32_matmul_precision(),
        }

    def hello(self, keep: Keep, options: Options) -> None:
        """Tell the keeper who this is."""
        self.keeper.hello(
            rank=self.environment.rank,
            world=self.environment.world,
            attempt=str(self.attempt),
            keep=keep,
            linger_s=options.linger_s,
            environment=self.surroundings(),
            stacks_signal=self.stacks.signal_number if self.stacks is not None else 0,
            kill_when_stuck=options.watchdog_action == "kill",
            ranks=self.group.node,
            remote=self.remote,
            grace_s=options.grace_s,
        )

    def start(
        self,
        parent: AttemptName | None = None,
        step: int = 0,
        boundary: int = 0,
        *,
        from_memory: bool = False,
    ) -> None:
        """Say where this attempt goes on from: a boundary of another one, which this rank took up. Who leads
        writes it: from here on older attempts commit nothing, and what any rank has of that boundary in
        memory is this attempt's. `from_memory`: it may be nowhere else, and the keeper is to save it. Raises
        RunError where it cannot be written, or was written otherwise."""
        if self.leads:
            self._write_start(parent, step, boundary)
        else:
            self._check_start(parent, step, boundary)
        crashpoints.point("start.written")
        if self.environment.world > 1:
            self.complete = (self.attempt.number, 0) if parent is None else (parent.number, boundary)
        self.loaded = None if parent is None else VisibleStep(step, parent)
        if parent is not None and from_memory:
            self.keeper.started(parent, step, boundary)

    def _write_start(self, parent: AttemptName | None, step: int, boundary: int) -> None:
        try:
            world = self.environment.world
            near = attempts.NEAR if self.remote is None else _NEAR_OF_REMOTE
            attempts.start(self.store, self.attempt, parent, step, world, boundary, self.ranks, near=near)
        except OSError as error:
            live = f"already that of step {step}" if parent is not None else "as it was"
            raise RunError(
                f"{self.store.url}: that attempt {self.attempt} begins at step {step} could not be written "
                f"({error.strerror or error}), so nothing it captures would count. The run is as it was; "
                f"the live state is {live}. Mend the storage, then start again.",
                path=self.store.url,
                step=step,
            ) from error

    def _check_start(self, parent: AttemptName | None, step: int, boundary: int) -> None:
        found = attempts.read_start(self.store, self.attempt)
        if found is None or (found.parent, found.step, found.boundary) != (parent, step, boundary):
            there = "nothing yet" if found is None else _where(found.parent, found.step, found.boundary)
            raise RunError(
                f"{self.store.url}: rank {self.environment.rank} took up {_where(parent, step, boundary)}, "
                f"and attempt {self.attempt} goes on from {there}. Nothing that this rank captures is kept. "
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
        self.group.close()
        self.keeper.close()
        if self.life_sign is not None:
            self.life_sign.close()
        if self.stacks is not None:
            self.stacks.close(self.runtime)
        self.life.release(self.runtime)
        self.runtime.close()
        _let_go((self.identity, self.environment.rank))


def _where(parent: AttemptName | None, step: int, boundary: int) -> str:
    return f"step {step} of {parent} (boundary {boundary})"


def open_session(
    path: str | os.PathLike[str],
    keep: Keep,
    options: Options,
    environment: Environment,
    *,
    join: AttemptName | None = None,
    connect: Connect = connect_or_start,
    group: Group | None = None,
    known: KnownRun = KnownRun(),
    claims: bool = False,
    remote: Remote | None = None,
) -> Session:
    """Open the run and take part in an attempt on it: lead a new one, for which the run is made if it is not
    there and must be held by no other job; or `join`, as another rank, the one that the leader has claimed.
    `known` is what ranks have agreed on. `claims`: where the folder has no claim of the attempt to join, it
    is another disk than the leader's, and is claimed for it as well. `remote`: where the keeper copies steps.

    Raises RunHeldError, RunError and its kin (SupersededError where the attempt to join is not the newest),
    KeeperError, OptionError for a scheme that is not there.
    """
    store = open_store(path, options.storage_options)
    run_id = _run_id(store, path, known, create=join is None or claims)
    identity = identity_of(run_id, store.place())
    place = (identity, environment.rank)
    _hold(place, store)
    with contextlib.ExitStack() as undo:
        undo.callback(_let_go, place)
        if join is not None and not claims:
            _check_claimed(store, join)
        base, lock = base_folder(environment.runtime_folder), trainer_lock_name(environment.rank)
        runtime, life = enter(base, identity, lock)
        undo.callback(runtime.close)
        undo.callback(life.release, runtime)
        stacks = Stacks.open(runtime, life.name) if options.watchdog is not None else None
        if stacks is not None:
            undo.callback(stacks.close, runtime)
        holder = _holder(environment, runtime, life)
        if join is None:
            above = max(known.above, highest_in_memory(store, runtime))
            attempt, leads = _claim(store, holder, runtime, above), True
        else:
            attempt, leads = join, claims and _claim_too(store, holder, runtime, join)
        life_sign = LifeSign(store, attempt) if leads else None
        if life_sign is not None:
            undo.callback(life_sign.close)
            crashpoints.point("claim.taken")
        keeper = connect(store.url, runtime, life)
        undo.callback(keeper.close)
        if (unused := end_early(runtime)) >= 0:
            os.close(unused)
        group = group or Alone(environment)
        session = Session(
            store, identity, runtime, life, attempt, keeper, environment, leads=leads, group=group,
            stacks=stacks, life_sign=life_sign, run_id=run_id, remote=remote,
        )  # fmt: skip
        session.hello(keep, options)
        undo.pop_all()
    for warning in survival_warnings():
        log.warning("%s", warning)
    if environment.rank == 0 and environment.restarts_left and environment.shares_rendezvous_store:
        log.warning(_RESTARTS_HANG, environment.restarts_left)
    return session


def highest_in_memory(store: Store, runtime: RuntimeFolder) -> int:
    """The number of the newest attempt that has a snapshot in this node's memory, 0 where there is none. The
    next attempt takes a higher one: its own snapshots must be the newest in memory, also where an older copy
    of the run's folder was put in its place and that attempt is not known there any more. The log says so."""
    found = newest_in_memory(runtime)
    if found is None:
        return 0
    (attempt, step), newest = found, attempts.highest_number(store)
    if attempt.number > newest:
        log.warning(
            "this node's memory has step %d of attempt %s, and %s knows no attempt after number %d: an older "
            "copy of the folder was put in its place. The run resumes from what the folder has. Snapshots in "
            "memory are not used, and are freed once a step of this attempt is committed. To resume from "
            "them, stop now, put the newer copy back, and start again.",
            step, attempt, store.url, newest,
        )  # fmt: skip
    return attempt.number


def check_not_held(store: Store, run_id: str, environment: Environment) -> None:
    """RunHeldError where this process has the run, or another job trains it; may take some seconds, as
    `holder.check` does. Changes nothing."""
    identity = identity_of(run_id, store.place())
    place = (identity, environment.rank)
    _hold(place, store)
    _let_go(place)
    job_id, restart_count = environment.job_id, environment.restart_count
    me = functools.partial(here, job_id=job_id, restart_count=restart_count)
    try:
        runtime = RuntimeFolder.open(base_folder(environment.runtime_folder), identity, create=False)
    except FileNotFoundError:
        check(store, me())
        return
    with contextlib.closing(runtime):
        check(store, me(runtime.path), lambda _, name: is_alive(runtime, name))


def _hold(place: tuple[str, int], store: Store) -> None:
    """The place of a rank in a run on this node is this process's, once."""
    with _guard:
        if place in _held:
            raise RunHeldError(
                f"{store.url} is already attached by this process. Nothing was changed. Close the first "
                "Checkpointer, or let its loop end, before a second one is attached; for several epochs "
                "use loop(…, epochs=n) or Checkpointer.epochs.",
                path=store.url,
            )
        _held.add(place)


def _let_go(place: tuple[str, int]) -> None:
    with _guard:
        _held.discard(place)


def _run_id(store: Store, path: str | os.PathLike[str], known: KnownRun, *, create: bool) -> str:
    try:
        found = open_run(store, create=create, run_id=known.run_id).run_id
    except OSError as error:
        raise RunError(
            f"The run's folder {os.fspath(path)} cannot be used: {error.strerror or error}. Nothing was "
            "written and training has not begun. Choose a folder that this user can write.",
            path=path,
        ) from error
    if known.run_id not in ("", found):
        raise RunHeldError(f"{store.url}: another job has made a run of it meanwhile. Nothing was changed.")
    return found


def _claim(store: Store, holder: Holder, runtime: RuntimeFolder, above: int) -> AttemptName:
    with _writable(store):
        return attempts.claim(store, holder, lambda: _look(store, holder, runtime), above)


def _claim_too(store: Store, holder: Holder, runtime: RuntimeFolder, attempt: AttemptName) -> bool:
    """Claim the attempt that rank 0 has claimed. False where it is claimed here: by rank 0, whose folder this
    is then, or by another that shares it. That the name is taken is what tells, and no list or look, which
    on a file server may be old."""
    with _writable(store):
        if attempts.newest_claimed(store) != attempt:
            _look(store, holder, runtime, attempt)
        if attempts.claim_as(store, attempt, holder):
            return True
    _check_claimed(store, attempt)
    return False


def _holder(environment: Environment, runtime: RuntimeFolder, life: LifeLock) -> Holder:
    job_id, restart_count = environment.job_id, environment.restart_count
    return here(runtime.path, life.name, job_id=job_id, restart_count=restart_count)


def _look(store: Store, holder: Holder, runtime: RuntimeFolder, ours: AttemptName | None = None) -> None:
    """Before each try to claim: who loses a race for the number looks at the winner."""
    check(store, holder, lambda _, name: is_alive(runtime, name), ours=ours)
    try:
        retention.sweep_dead(store)
    except (OSError, FlashckptError) as error:
        log.debug("what dead attempts left could not be removed: %s", error)


@contextlib.contextmanager
def _writable(store: Store) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # a run that was there can be on a disk that has filled up since
        raise RunError(
            f"{store.url} cannot be written: {error.strerror or error}. What is committed is as it was, what "
            "is in memory stays there, and training has not begun. Make room or mend the storage, and start "
            "again.",
            path=store.url,
        ) from error


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


def log_differences(saved: object, now: dict[str, Any]) -> None:
    """One line naming what is no longer as it was. Such a run goes on exactly from its state; its
    further numbers may differ."""
    if not isinstance(saved, dict):
        return
    changed = [
        f"{key} {saved[key]!r} -> {now[key]!r}" for key in now if key in saved and saved[key] != now[key]
    ]
    if changed:
        log.warning("resumed in another environment, numbers may differ from here on: %s", ", ".join(changed))


# Not the first ones: libraries that take a real-time signal begin there, or at the last.
_SIGNALS_SKIPPED = 10


@dataclass(eq=False)
class Stacks:
    """A signal that writes all Python stacks into a file of its own; `signal_number` is what the keeper
    sends, 0 where there is none to be had.

    The handler is faulthandler's, in C: it needs neither the GIL nor a Python instruction, so that it works
    while the trainer is stuck in native code. It never takes a signal that anything else has a handler for,
    blocks or ignores, and never gives one back: the default action of a real-time signal that comes a moment
    too late is the end of the process.
    """

    signal_number: int
    name: str
    _descriptor: int = -1

    def __post_init__(self) -> None:
        forks.hold(self)

    def forked(self) -> None:
        if self._descriptor >= 0:
            if self.signal_number:
                # Nobody asks a child for its stacks: a signal must not write into what has the number next.
                faulthandler.register(self.signal_number, file=_nowhere(), all_threads=True, chain=False)
            forks.close(self._descriptor)
            self._descriptor = -1

    @classmethod
    def open(cls, folder: RuntimeFolder, lock: str) -> Stacks:
        """Take a signal, and make the file for the holder of the life lock `lock`. Without either the run
        goes on, and a hang is reported without stacks unless py-spy can read them."""
        name = stacks_name(lock)
        try:
            descriptor = folder.open_file(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except (OSError, KeeperError) as error:
            log.warning("stacks of a stuck trainer will not be had: %s", error)
            return cls(0, name)
        taken = _take(descriptor)
        if taken == 0:
            log.debug("no real-time signal is free: stacks of a stuck trainer are had by py-spy alone")
        return cls(taken, name, descriptor)

    def close(self, folder: RuntimeFolder) -> None:
        """Remove the file. The signal stays taken and does nothing from now on."""
        if self._descriptor < 0:
            return
        if self.signal_number:
            with _guard:
                # Before the descriptor goes: a late signal must not write into whatever has its number next.
                faulthandler.register(self.signal_number, file=_nowhere(), all_threads=True, chain=False)
                _idle_signals.append(self.signal_number)
        folder.remove(self.name)
        # Forgotten first: a child that is forked in between must not close what has the number next.
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


@functools.cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _take(descriptor: int) -> int:
    with _guard:
        number = _idle_signals.pop() if _idle_signals else _free()
        if number == 0:
            return 0
        try:
            faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
        except (OSError, RuntimeError, ValueError) as error:
            log.debug("signal %d cannot be taken: %s", number, error)
            return 0
        return number


def _free() -> int:
    """A real-time signal that is neither caught, ignored nor blocked, by the kernel's own word."""
    used = 0
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:")):
                used |= int(line.split()[1], 16)
    for number in range(signal.SIGRTMIN + _SIGNALS_SKIPPED, signal.SIGRTMAX):
        if not used >> (number - 1) & 1:
            return number
    return 0
