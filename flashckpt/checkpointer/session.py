"""An attempt of a job on a run: its name, its life lock, its keeper and, of several ranks, how they open one
run.

Rank 0 leads: it names the attempt, and begins it once all ranks have loaded. The other ranks join the
attempt. Owns the order: the life lock is held before the attempt begins, so that each owner in the catalogue
names a lock that was held; and a start that fails before it has begun has changed nothing.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import logging
import os
import platform
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flashckpt import crashpoints
from flashckpt.catalogue.changes import Launch, ancestry, highest_number
from flashckpt.commit import attempts
from flashckpt.commit.attempts import check_not_held, local_owner
from flashckpt.commit.choice import Choice, Stored
from flashckpt.commit.commit_step import ALWAYS_KEPT, retain
from flashckpt.commit.tidying import tidy
from flashckpt.commit.view import HOME, View, check_writable, open_run, writers_in
from flashckpt.errors import (
    FlashckptError,
    KeeperError,
    NoSuchStepError,
    OptionError,
    RunError,
    RunHeldError,
)
from flashckpt.format.catalogue import EMPTY, NO_ATTEMPT, Catalogue
from flashckpt.format.names import AttemptName, SnapshotId, alive_path
from flashckpt.format.owner import Owner
from flashckpt.keeper.client import KeeperClient, may_have_memory
from flashckpt.keeper.node_keepers import newest_in_memory
from flashckpt.keeper.start import survival_warnings
from flashckpt.memory import forks
from flashckpt.memory.cache_folder import CachePlace, cached_paths, open_cached
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
from flashckpt.options import Call, Environment, Keep, Options, Remote
from flashckpt.ranks.coordination import Group
from flashckpt.replication.mirror import check_unanswered, prepare
from flashckpt.store import are_apart, open_store, options_of
from flashckpt.store.base import Store
from flashckpt.threads import start_thread

log = logging.getLogger(__name__)


_RESTARTS_HANG = (
    "torchrun may restart these ranks (%d restarts are left), and the restarted ranks can hang in "
    "init_process_group, before they reach flashckpt: they read the addresses of the dead ranks from "
    "torchrun's store (pytorch issue 135712). Checkpoints are not affected. Start torchrun with "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment."
)

Connect = Callable[[str, RuntimeFolder, LifeLock], KeeperClient]
"""Takes the run, its runtime folder and this process's life lock; returns the client of the keeper."""

# Guards the runs that this process holds, and the signals that it took for stacks and no longer uses.
_guard = threading.Lock()
_held: set[tuple[str, int]] = set()
_idle_signals: list[int] = []


@dataclass(frozen=True)
class KnownRun:
    """What ranks know of a run before they open it. run_id: "" if it has none yet. above: the highest number
    of an attempt in its folder, and in the memory of other nodes than rank 0's. place: what rank 0 sees, for
    a message."""

    run_id: str = ""
    above: int = 0
    place: str = ""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where an attempt begins: the snapshot that this rank has loaded, with its step number, and where it has
    loaded it. choice: what it was chosen from; the leader has it."""

    parent: SnapshotId | None = None
    step: int = 0
    tier: str = "local"
    choice: Choice


@dataclass
class Session:
    """One rank of an attempt, connected to its keeper.

    identity: names the run on this node. leads: this rank begins the attempt, for all ranks of `group`.
    owner: this process, of the leader. after: the catalogue's writer when the leader found that no trainer of
    it lives. opened: the run when this rank has read it last. loaded: the snapshot that the attempt resumed
    from. remote: where the keeper copies steps; remote_run: that store at the start.
    cache: this node's disk for slots at rest. has_memory: this node may have snapshots in memory or cache;
    else the keeper starts beside the reading. complete: the newest snapshot that all ranks have at the start,
    as (number of the attempt, boundary); zeros in a world of one.
    """

    store: Store
    identity: str
    runtime: RuntimeFolder
    life: LifeLock
    attempt: AttemptName
    keeper: KeeperClient
    environment: Environment
    leads: bool
    group: Group
    opened: View
    stacks: Stacks | None = None
    closed: bool = False
    has_memory: bool = True
    complete: tuple[int, int] = (0, 0)
    run_id: str = ""
    owner: Owner | None = None
    after: AttemptName = NO_ATTEMPT
    loaded: SnapshotId | None = None
    remote: Remote | None = None
    cache: CachePlace | None = None
    remote_run: Stored | None = None

    def surroundings(self) -> dict[str, Any]:
        """Return the facts about this process that can change results; each snapshot has a copy. Devices
        count once the process uses CUDA: a query would initialise CUDA, and a child forked later could not
        use it."""
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

    def hello(self, keep: Keep, options: Options, *, is_first: bool) -> None:
        """Register with the keeper. is_first: this rank starts one, if the node has none."""
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
            cache=self.cache,
            grace_s=options.grace_s,
            is_first=None if self.has_memory else is_first,
        )

    def start(self, start: Start) -> None:
        """Wait for the keepers, which may have started beside the reading. Then the leader begins the attempt
        at the snapshot that all ranks have loaded. From here on older attempts commit nothing. A snapshot
        from memory or cache may be nowhere else, so the keeper saves it.

        Raises RunHeldError if another attempt has begun, or has committed a newer step; RunError if the
        version cannot be written, or ranks have loaded different snapshots.
        """
        parent, where = start.parent, _where(start.parent, start.step)

        def ready() -> str:
            self.keeper.ready()
            return where

        def begin(rows: list[str]) -> None:
            for rank, loaded in enumerate(rows):
                if loaded != where:
                    raise RunError(
                        f"{self.store.url}: rank {rank} has loaded {loaded}, and rank 0 {where}. Attempt "
                        f"{self.attempt} has not begun. Start all ranks again.",
                        path=self.store.url,
                        step=start.step,
                    )
            self._begin(start)

        self.group.agree("where the attempt begins", ready, begin)
        crashpoints.point("start.written")
        if self.environment.world > 1:
            first = SnapshotId(self.attempt, 0) if parent is None else parent
            self.complete = (first.attempt.number, first.boundary)
        self.loaded = parent
        if parent is not None and start.tier in ("memory", "cache"):
            self.group.guarded("what the keeper saves", partial(self.keeper.started, parent))

    def _begin(self, start: Start) -> None:
        parent, step, choice = start.parent, start.step, start.choice
        remote = self.remote_run if start.tier == "remote" else None
        launch = Launch(
            world=self.environment.world,
            owner=self.owner,
            parent_step=step,
            parent_url="" if remote is None else remote.store.url,
        )
        try:
            lineage = () if parent is None else ancestry(choice.lead, parent)
            begun = HOME.begin(
                choice.home, self.attempt, lineage, launch, after=self.after, is_here=start.tier == "local"
            )
            self.opened = View(choice.home, self.store).after(begun)
        except OSError as error:
            live = f"already that of step {step}" if parent is not None else "as it was"
            raise RunError(
                f"{self.store.url}: that attempt {self.attempt} begins at step {step} could not be written "
                f"({error.strerror or error}), so nothing it captures would count. The run is as it was; "
                f"the live state is {live}. Mend the storage, then start again.",
                path=self.store.url,
                step=step,
            ) from error
        _report_repeated(self.opened)

    def close(self) -> None:
        """Release the run; a second call does nothing. The keeper stays while it has something to persist."""
        if self.closed:
            return
        self.closed = True
        self.group.close()
        self.keeper.close()
        if self.stacks is not None:
            self.stacks.close(self.runtime)
        self.life.release(self.runtime)
        self.runtime.close()
        _give_back((self.identity, self.environment.rank))


def _where(parent: SnapshotId | None, step: int) -> str:
    return "nothing" if parent is None else f"step {step} of {parent.attempt} (boundary {parent.boundary})"


_REPORTED_STARTS = 4
"""At one step, in a row: a machine may fail a few times; a bad step or batch ends each start."""


def _report_repeated(view: View) -> None:
    """Warn of a start that is one of several at the same step: the state or the data there may end each."""
    count, step = view.catalogue.failed_starts + 1, view.catalogue.parent_step
    if count < _REPORTED_STARTS or view.parent is None:
        return
    older = max((each.step for each in view.visible() if each.step < step), default=None)
    log.warning(
        "%d starts in a row have resumed from step %d, and none of those before this one has saved a newer "
        "step. If the state of step %d or the data after it ends the job each time, examine both, or resume "
        "from an older step: `flashckpt branch %s %s` (`flashckpt ls` lists the steps)",
        count, step, step, view.store.url, "STEP" if older is None else older,
    )  # fmt: skip


def open_session(
    path: str | os.PathLike[str],
    keep: Keep,
    options: Options,
    environment: Environment,
    *,
    join: AttemptName | None = None,
    connect: Connect = KeeperClient,
    group: Group | None = None,
    known: KnownRun = KnownRun(),
    is_first: bool = False,
    has_memory: bool | None = None,
    remote: Remote | None = None,
    cache: CachePlace | None = None,
    seen: Catalogue = EMPTY,
) -> Session:
    """Open the run and take part in an attempt. The leader begins a new attempt: this makes a run that does
    not exist, and raises if another job holds the run. Other ranks `join` the attempt that the leader named.

    known: what the ranks have agreed on. is_first: of the ranks of its node that join, this one checks
    whether it sees the leader's folder. has_memory: that of the session, if another rank of the node has
    found out. remote: where the keeper copies steps. cache: this node's disk for slots at rest. seen: the
    version of the catalogue that this rank has read.

    Raises RunHeldError, RunError and its subclasses (SupersededError if the attempt to join is not the
    newest), KeeperError, OptionError for an unknown scheme and for a folder that is not the leader's.
    """
    store = open_store(path, options.storage_options)
    check_writable(store)
    if join is not None:
        _check_shared(store, join, known, environment, is_first=is_first)
    # The first rank of a node creates exclusively, too: a file server may still list none.
    opened = _run(store, path, known, seen, create=join is None or is_first)
    if join is not None:
        attempts.check_newest(opened, join)
    run_id = opened.run_id
    identity = identity_of(run_id, store.place())
    place = (identity, environment.rank)
    _hold(place, store)
    with contextlib.ExitStack() as undo:
        undo.callback(_give_back, place)
        runtime, life, stacks = _enter_node(environment, options, identity, undo)
        attempt, leads, owner, after = join, join is None, None, NO_ATTEMPT
        if attempt is None:
            owner = _owner(environment, runtime, life)
            newest = newest_on_node(runtime, identity, cache)
            attempt, after, opened = _reserve(opened, owner, runtime, known.above, newest, keep)
            undo.callback(_withdraw, store, attempt)
        if leads:
            crashpoints.point("attempt.reserved")
        keeper = connect(store.url, runtime, life)
        undo.callback(keeper.close)
        if has_memory is None:
            has_memory = cache is not None or may_have_memory(runtime)
        group = group or Group(environment)
        session = Session(
            store, identity, runtime, life, attempt, keeper, environment, leads=leads, group=group,
            stacks=stacks, run_id=run_id, remote=remote, cache=cache, owner=owner,
            after=after, opened=opened, has_memory=has_memory,
        )  # fmt: skip
        session.hello(keep, options, is_first=leads or is_first)
        undo.pop_all()
    for warning in survival_warnings():
        log.warning("%s", warning)
    if environment.rank == 0 and environment.restarts_left and environment.shares_rendezvous_store:
        log.warning(_RESTARTS_HANG, environment.restarts_left)
    return session


def _enter_node(
    environment: Environment, options: Options, identity: str, undo: contextlib.ExitStack
) -> tuple[RuntimeFolder, LifeLock, Stacks | None]:
    """Enter the runtime folder of the run on this node, with this process's life lock, and its files for
    stacks if there is a watchdog. `undo` leaves all of it."""
    base, lock = base_folder(environment.runtime_folder), trainer_lock_name(environment.rank)
    runtime, life = enter(base, identity, lock)
    undo.callback(runtime.close)
    undo.callback(life.release, runtime)
    stacks = Stacks.open(runtime, life.name) if options.watchdog is not None else None
    if stacks is not None:
        undo.callback(stacks.close, runtime)
    return runtime, life, stacks


def newest_on_node(
    runtime: RuntimeFolder | None, identity: str, cache: CachePlace | None
) -> tuple[AttemptName, int] | None:
    """Return the newest attempt with a snapshot in this node's memory or cache, and the snapshot's step.
    Return None without a snapshot. runtime: None if the node has nothing of the run in memory."""
    found = [] if runtime is None else [newest_in_memory(runtime)]
    found += [] if cache is None else [_newest_in_cache(cache, identity)]
    return max((each for each in found if each is not None), default=None)


def _newest_in_cache(cache: CachePlace, identity: str) -> tuple[AttemptName, int] | None:
    """As `newest_in_memory`. The keeper reports files that cannot be read."""
    found = []
    for path in cached_paths(cache.path, identity):
        with contextlib.suppress(FlashckptError, OSError), contextlib.closing(open_cached(path)) as slot:
            sealed = None if slot.header.holds_constants else slot.sealed()
            found += [] if sealed is None else [(sealed.attempt, sealed.step)]
    return max(found, default=None)


def _hold(place: tuple[str, int], store: Store) -> None:
    """Reserve a rank's place in a run on this node for this process."""
    with _guard:
        if place in _held:
            raise RunHeldError(
                f"{store.url} is already attached by this process. Nothing was changed. Close the first "
                "Checkpointer, or let its loop end, before a second one is attached; for several epochs "
                "use loop(…, epochs=n) or Checkpointer.epochs.",
                path=store.url,
            )
        _held.add(place)


def _give_back(place: tuple[str, int]) -> None:
    with _guard:
        _held.discard(place)


def _run(
    store: Store, path: str | os.PathLike[str], known: KnownRun, seen: Catalogue, *, create: bool
) -> View:
    try:
        found = open_run(store, create=create, run_id=known.run_id, known=seen)
    except OSError as error:
        raise RunError(
            f"The run's folder {os.fspath(path)} cannot be used: {error.strerror or error}. Nothing was "
            "written and training has not begun. Choose a folder that this user can write.",
            path=path,
        ) from error
    if known.run_id not in ("", found.run_id):
        raise RunHeldError(f"{store.url}: another job has made a run of it meanwhile. Nothing was changed.")
    return found


def _reserve(
    run: View,
    owner: Owner,
    runtime: RuntimeFolder,
    above: int,
    in_memory: tuple[AttemptName, int] | None,
    keep: Keep,
) -> tuple[AttemptName, AttemptName, View]:
    """Name the next attempt, once it is sure that no job trains the run, and commit the whole snapshots that
    the one before has left. Return the name, the writer that has no trainer, and the run. RunHeldError. The
    name is above number `above`, and above those `in_memory`, so that the attempt's own snapshots are the
    newest there.

    For each step that is committed here, an older one that `keep` does not keep is deleted, unless the run
    has more steps than `keep` keeps. So a job that dies before each commit does not fill the storage, and a
    wrong `keep` costs no other step."""
    store = run.store
    with _writable(store):
        before = check_not_held(store, owner, lambda _, name: is_alive(runtime, name), run=run)
        view, highest = attempts.settle(before)
        every = keep.every_steps or 0
        counted = [each for each in before.visible() if not every or each.step % every]
        if (
            len(view.checkpoints) > len(before.checkpoints)
            and len(counted) <= max(keep.last, ALWAYS_KEPT) + 2
        ):
            view, _ = retain(view, keep)
        if in_memory is not None:
            above = max(above, in_memory[0].number)
            _report_older_copy(view, highest, *in_memory)
        name = attempts.next_attempt(max(highest, above))
        attempts.reserve(store, name)
    tidy(view, name)
    return name, before.catalogue.writer, view


def _report_older_copy(view: View, highest: int, attempt: AttemptName, step: int) -> None:
    """Warn if the folder knows no attempt as new as a snapshot in memory."""
    if attempt.number > highest:
        log.warning(
            "this node has step %d of attempt %s in memory or cache, and %s knows no attempt after number "
            "%d: an older copy of the folder was put in its place. The run resumes from what the folder has. "
            "Those snapshots are not used, and are freed once a step of this attempt is committed. To resume "
            "from them, stop now, put the newer copy back, and start again.",
            step, attempt, view.store.url, highest,
        )  # fmt: skip


def _withdraw(store: Store, name: AttemptName) -> None:
    """Leave nothing of an attempt that does not begin."""
    with contextlib.suppress(OSError, FlashckptError):
        store.remove(alive_path(name))


def _owner(environment: Environment, runtime: RuntimeFolder, life: LifeLock) -> Owner:
    job_id, restart_count = environment.job_id, environment.restart_count
    return local_owner(runtime.path, life.name, job_id=job_id, restart_count=restart_count)


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


def _check_shared(
    store: Store, attempt: AttemptName, known: KnownRun, environment: Environment, *, is_first: bool
) -> None:
    """Raise OptionError if rank 0 has not reserved the attempt in this store, which is then another folder.
    The first rank of a node finds out by an exclusive create: a listing or a read by a file server may be
    outdated."""
    with _writable(store):
        is_shared = attempts.is_reserved(store, attempt, exclusively=is_first)
    if not is_shared:
        raise not_shared(place_of(store, environment.rank), known.place)


def place_of(store: Store, rank: int) -> str:
    """Describe the folder that a rank sees, and its host, for a message."""
    return f"{store.url} on {local_owner().host} (rank {rank})"


def not_shared(place: str, other: str) -> OptionError:
    """Return the error for two places (`place_of`) that are not one folder."""
    return OptionError(
        f"The run's path is not one folder on all nodes: {place} is not {other}. Nothing was loaded or "
        "changed. Name a folder that all nodes see, or object storage with a disk of each node as its cache: "
        'attach("s3://bucket/run", cache="/nvme").'
    )


def log_differences(saved: object, now: dict[str, Any]) -> None:
    """Log what differs from the environment that was saved. The state is exact; later results may differ."""
    if not isinstance(saved, dict):
        return
    changed = [
        f"{key} {saved[key]!r} -> {now[key]!r}" for key in now if key in saved and saved[key] != now[key]
    ]
    if changed:
        log.warning("resumed in another environment, numbers may differ from here on: %s", ", ".join(changed))


# Libraries that take a real-time signal begin with the first or the last.
_SIGNALS_SKIPPED = 10


@dataclass(eq=False)
class Stacks:
    """A signal that writes all Python stacks into a file. signal_number: what the keeper sends; 0 if there is
    none.

    The handler is faulthandler's, in C, and needs neither the GIL nor a Python instruction: it works while
    the trainer is stuck in native code. A signal that is handled, blocked or ignored is never taken, and a
    taken one is never given back: the default action of a late real-time signal ends the process.
    """

    signal_number: int
    name: str
    _descriptor: int = -1

    def __post_init__(self) -> None:
        forks.hold(self)

    def forked(self) -> None:
        if self._descriptor >= 0:
            if self.signal_number:
                # A signal to the child must not write into the file that has the descriptor next.
                faulthandler.register(self.signal_number, file=_nowhere(), all_threads=True, chain=False)
            forks.close(self._descriptor)
            self._descriptor = -1

    @classmethod
    def open(cls, folder: RuntimeFolder, lock: str) -> Stacks:
        """Take a signal, and create the file for the life lock `lock`. If either fails, a hang is reported
        without stacks."""
        name = stacks_name(lock)
        try:
            descriptor = folder.open_file(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except (OSError, KeeperError) as error:
            log.warning("stacks of a stuck trainer cannot be written: %s", error)
            return cls(0, name)
        taken = _take(descriptor)
        if taken == 0:
            log.debug("no real-time signal is free: a stuck trainer is reported without stacks")
        return cls(taken, name, descriptor)

    def close(self, folder: RuntimeFolder) -> None:
        """Remove the file. The signal stays taken, and does nothing from now on."""
        if self._descriptor < 0:
            return
        if self.signal_number:
            with _guard:
                # Before the close: a late signal must not write into the file that has the descriptor next.
                faulthandler.register(self.signal_number, file=_nowhere(), all_threads=True, chain=False)
                _idle_signals.append(self.signal_number)
        folder.remove(self.name)
        # Reset first: a child that is forked in between must not close the file that has the number next.
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
    """Return a real-time signal that, by /proc, is neither caught, ignored nor blocked; 0 if there is
    none."""
    used = 0
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:")):
                used |= int(line.split()[1], 16)
    for number in range(signal.SIGRTMIN + _SIGNALS_SKIPPED, signal.SIGRTMAX):
        if not used >> (number - 1) & 1:
            return number
    return 0


# How long a remote is asked before the start.
_REMOTE_TIMEOUT_S = 30.0
# Errors that last until a user changes something; others may pass.
_PERMANENT = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENODEV, errno.ENAMETOOLONG, errno.ELOOP}
)


def remote_of(call: Call, url: str) -> Remote | None:
    """Return the remote that a call asks for, for the run at `url`. Raises OptionError if it is no store, or
    the same place. Contacts no server."""
    if call.remote is None:
        return None
    options, given = call.options, call.options.remote_storage_options
    store = open_store(call.remote, options.storage_options if given is None else given)
    if not are_apart(store.url, url):
        raise OptionError(
            f"remote={store.url!r}: the run itself is in {url}, and one is in the other. Nothing was started."
            " Name a place apart from it, on other storage."
        )
    known: Mapping[str, Any] = options_of(store.url)
    return Remote(
        url=store.url,
        every=call.remote_every,
        keep=call.remote_keep or call.keep,
        options=known,
        compress=options.remote_compress,
    )


def remote_state(remote: Remote, local: Store, run_id: str) -> tuple[View, int] | str:
    """Return as `mirror.prepare`, or why the remote does not answer. run_id: that of the run that `local`
    holds, "" if it has none.

    Waits for some seconds. Raises as `mirror.prepare`, with OptionError or RunError for what the user has to
    change. A remote that does not answer is no error if there is a run here. Writes only a small file, and
    removes it.
    """
    found: list[tuple[View, int]] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(_probe_remote(open_store(remote.url, remote.options).brief(), local, run_id))
        except Exception as error:
            errors.append(error)

    # In a thread: a file server that is away blocks without end.
    thread = start_thread("flashckpt-remote", run)
    thread.join(_REMOTE_TIMEOUT_S)
    if found:
        return found[0]
    error = errors[0] if errors else TimeoutError(f"nothing came for {_REMOTE_TIMEOUT_S:.0f} s")
    if not isinstance(error, OSError):
        raise error
    why = str(error.strerror or error)
    if error.errno not in _PERMANENT:
        check_unanswered(local, open_store(remote.url, remote.options), run_id, why)
        return why
    raise RunError(
        f"The remote {remote.url} cannot be used: {why}. Nothing was changed, and training has not begun. "
        "Correct `remote`, its credentials or its options, or leave it out.",
        path=remote.url,
    ) from error


def _probe_remote(store: Store, local: Store, run_id: str) -> tuple[View, int]:
    found = prepare(local, store, run_id)
    if store.is_folder:  # a folder, where the check of a store asks nothing
        probe = f".probe-{secrets.token_hex(8)}"
        store.create(probe, b"")
        store.remove(probe)
    return found


def open_together(
    path: str | os.PathLike[str],
    keep: Keep,
    options: Options,
    group: Group,
    remote: Remote | None = None,
    cache: CachePlace | None = None,
) -> Session:
    """Take part in one attempt with all ranks: rank 0 asks the remote, then names the attempt; then one rank
    of each other node joins, and finds or starts its keeper; then the others join. Raises OptionError if the
    path is not one folder for all ranks."""
    session: Session | None = None
    home = mirror = EMPTY  # the versions that this rank has read

    def opened(known: KnownRun, join: AttemptName | None, has_memory: bool | None = None) -> list[str]:
        nonlocal session
        session = open_session(
            path, keep, options, group.environment, join=join, group=group, known=known,
            is_first=rank == first, has_memory=has_memory, remote=remote, cache=cache, seen=home,
        )  # fmt: skip
        return [str(session.attempt), session.run_id, place_of(session.store, group.environment.rank)]

    def of_node() -> list[Any]:
        nonlocal home
        state, home = _state_of_node(path, options, group, cache)
        return state

    def of_remote() -> list[Any]:
        nonlocal home, mirror
        assert remote is not None
        mine = known
        if not mine.run_id:
            home, above = _folder_state(path, options)
            mine = KnownRun(home.run_id, above)
        found = remote_state(remote, open_store(path, options.storage_options), mine.run_id)
        if isinstance(found, str):
            return [mine.run_id, mine.above, found]
        mirror = found[0].catalogue
        return [mirror.run_id, max(mine.above, found[1]), ""]

    rank, first = group.environment.rank, group.node[0]
    try:
        known, problem = KnownRun(), ""
        if group.environment.world > 1:
            asked = of_node if rank == first else _nothing
            known = KnownRun(*group.agree("which run it is", asked, _one_run))
        if remote is not None:
            run_id, above, problem = group.led("what the run's remote has", of_remote)
            known = KnownRun(run_id, max(known.above, above))
        name, run_id, place = group.led("the opening of the run", partial(opened, known, None))
        named, known = AttemptName.parse(name), KnownRun(run_id, place=place)

        def first_joins() -> bool:
            if rank == first and not group.leads:
                opened(known, named)
            return session is not None and session.has_memory

        has_memory = group.agree("a keeper for each node", first_joins, any)
        joins = partial(opened, known, named, has_memory)
        group.together("the keeper of this node", joins if rank != first else _nothing)
        assert session is not None
        if remote is not None:
            there = open_store(remote.url, remote.options)
            session.remote_run = Stored(mirror, there, problem=problem)
    except BaseException:
        if session is not None:
            session.close()
        raise
    return session


def _nothing() -> None:
    """The operation of a rank while others have one."""


def _folder_state(path: str | os.PathLike[str], options: Options) -> tuple[Catalogue, int]:
    """Return the run's catalogue in the folder that this node sees, and the highest number of an attempt.
    Return EMPTY and 0 if the folder has no run."""
    store = open_store(path, options.storage_options)
    try:
        catalogue = open_run(store, create=False).catalogue
        return catalogue, highest_number(catalogue, writers_in(store))
    except NoSuchStepError:
        return EMPTY, 0
    except OSError as error:
        raise RunError(
            f"The run's folder {os.fspath(path)} cannot be read: {error.strerror or error}. Nothing was "
            "written and training has not begun. Choose a folder that this user can use.",
            path=path,
        ) from error


def _state_of_node(
    path: str | os.PathLike[str], options: Options, group: Group, cache: CachePlace | None
) -> tuple[list[Any], Catalogue]:
    """Return the run's id, "" if it has none, the highest number of an attempt, and the folder's place, for
    the first rank of a node; and the catalogue that was read. On nodes without rank 0, this node's memory and
    cache count, too."""
    catalogue, above = _folder_state(path, options)
    store, base = open_store(path, options.storage_options), base_folder(group.environment.runtime_folder)
    if catalogue.run_id and not group.leads:
        identity = identity_of(catalogue.run_id, store.place())
        with contextlib.ExitStack() as stack:
            runtime = None
            with contextlib.suppress(FileNotFoundError):
                opened = RuntimeFolder.open(base, identity, create=False)
                runtime = stack.enter_context(contextlib.closing(opened))
            newest = newest_on_node(runtime, identity, cache)
            above = max(above, newest[0].number if newest is not None else 0)
    return [catalogue.run_id, above, place_of(store, group.environment.rank)], catalogue


def _one_run(rows: list[Any]) -> list[Any]:
    """Return the run's id and the highest number of an attempt. Raises OptionError if nodes see different
    runs."""
    found = [row for row in rows if row is not None]
    ids: dict[str, str] = {}
    for run_id, _, place in found:
        if run_id:
            ids.setdefault(run_id, place)
    if len(ids) > 1:
        first, other = list(ids.values())[:2]
        raise not_shared(other, first)
    return [next(iter(ids), ""), max(above for _, above, _ in found)]
