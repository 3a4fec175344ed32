"""A trainer's client of its node's keeper: finds the keeper or starts one, reconnects, and makes the
requests; `KeeperWait` decides how long a process waits for a keeper.

Owns the sockets, the descriptors for the next keeper, and the requests that are repeated to it. The training
thread never calls it between two batches.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from flashckpt.errors import FlashckptError, KeeperError, OutOfSpaceError
from flashckpt.format.names import SnapshotId
from flashckpt.keeper import start
from flashckpt.keeper.protocol import (
    ELECTION_LOCK,
    LOG_NAME,
    MAX_DESCRIPTORS,
    MAX_NAMES,
    PROTOCOL,
    SOCKET_NAME,
    Failure,
    ProtocolError,
    Refusal,
    Status,
    close_all,
    connect,
    peer_uid,
    receive,
    send,
)
from flashckpt.memory import forks
from flashckpt.memory.cache_folder import CachePlace, open_cached
from flashckpt.memory.memory_budget import NO_NODE
from flashckpt.memory.region import CACHE, MEMFD, SlotSize, is_region_name, memfds_of
from flashckpt.memory.runtime import LifeLock, RuntimeFolder, holder_of, is_alive
from flashckpt.memory.slot import Slot
from flashckpt.options import Keep, Remote
from flashckpt.store import options_of
from flashckpt.threads import start_thread

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_START_AGAIN_S = 5.0
_RETRY_S = 0.05
# Pauses before a request is repeated, which grow: each wakes the keeper.
_FIRST_LATER_S, _MOST_LATER_S = 0.01, 0.2
_TRIES = 4
_CLOSE_TIMEOUT_S = 2.0
# An answer that was under way when a wait began may be older than what was asked for.
_FRESH_ANSWERS = 2
# After this many keepers without a commit, writes do not count as progress any more.
_MOST_KEEPERS = 4

T = TypeVar("T")
Answer = tuple[dict[str, Any], list[int]]
# Takes an answer and its descriptors, which it must close or keep.
TakeAnswer = Callable[[dict[str, Any], list[int]], T]


@dataclass(frozen=True)
class SlotGrant:
    """A slot, or region of constants, that the keeper granted. The receiver closes `descriptor`, or `open`
    takes it over; it is -1 for a cached one, whose file is `path`. `owner`: this trainer's index in the slot.
    `kind`: "named", "memfd" or "cache"."""

    descriptor: int
    name: str
    owner: int
    kind: str
    num_bytes: int
    holds_constants: bool = False
    path: str = ""

    @property
    def outlives_both(self) -> bool:
        """Whether the slot survives the death of trainer and keeper together."""
        return self.kind != MEMFD

    def open(self, *, map_image: bool = True) -> Slot:
        """Map the slot, which owns the descriptor from now on, except the image of a cached slot."""
        if self.kind == CACHE:
            return open_cached(self.path)
        return Slot.open(self.descriptor, map_image=map_image)


class HeldDescriptors:
    """The descriptors of regions that a trainer holds for the next keeper, which may not find them by
    name."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self._lent: set[str] = set()
        self._has_slots = False
        self._lock = threading.Lock()
        forks.hold(self)

    def forked(self) -> None:
        for descriptor in self.held.values():
            forks.close(descriptor)
        self.held, self._lent, self._lock = {}, set(), threading.Lock()

    def keep(self, descriptors: Mapping[str, int], *, lent: bool = False) -> None:
        """Hold duplicates of the descriptors of regions, by name, that this trainer uses, or (`lent`) may
        resume from: these until a keeper has them and this trainer has slots."""
        with self._lock:
            for name in descriptors.keys() - self.held.keys():
                self.held[name] = os.dup(descriptors[name])
                self._lent |= {name} if lent else set()
            self._lent -= set() if lent else descriptors.keys()

    def end_loans(self) -> None:
        """Let go of regions that were only read: this trainer has slots now."""
        with self._lock:
            self._has_slots = True
            self._let_go(self._lent)
            self._lent.clear()

    def handed_over(self) -> None:
        """Note that the keeper has all descriptors."""
        if self._has_slots:
            self.end_loans()

    def release(self, names: Sequence[str]) -> None:
        with self._lock:
            self._let_go(names)

    def nameless(self) -> list[int]:
        """New descriptors of the regions that no keeper finds: memfds, and regions whose name was removed."""
        with self._lock:
            return [os.dup(each) for each in self.held.values() if not os.fstat(each).st_nlink]

    def close(self) -> None:
        with self._lock:
            self._let_go(list(self.held))

    def _let_go(self, names: Collection[str]) -> None:
        # Forget them first: a child that is forked in between must not close reused numbers.
        close_all([self.held.pop(name) for name in names if name in self.held])


class KeeperConnection:
    """A connection to the keeper of a run, which is started or replaced as needed. `restarts` counts the
    keepers after the first. `longest_pause_s` limits the pause before the next keeper after many that died,
    during which calls raise KeeperError. A keeper that is silent for `timeout_s` is replaced. For any
    thread."""

    def __init__(self, run_path: str, runtime: RuntimeFolder, life: LifeLock, timeout_s: float) -> None:
        self._run_path, self._runtime, self._life = run_path, runtime, life
        self._timeout_s = timeout_s
        self._held = HeldDescriptors()
        self._lock = threading.RLock()
        self._peer: socket.socket | None = None
        self._closed = False
        self._elected: tuple[int, int] | None = None
        self._known: tuple[tuple[int, int] | None, int] | None = None
        # The message by which each keeper knows this trainer; empty before the first.
        self._hello: dict[str, Any] = {}
        self._pauses = start.Pauses()
        self._started_s = -_START_AGAIN_S  # when the awaited keeper was started, here or by another trainer
        self._keeper_end = -1  # readable (POLLHUP) once the keeper that was started last has ended
        self._first_error: Exception | None = None  # of the thread that `introduce_first` has started
        self._is_left = False
        self.longest_pause_s = start.LONGEST_PAUSE_S
        self.restarts = 0
        forks.hold(self)

    def forked(self) -> None:
        # The connection is the parent's: a message of the child would be taken for the parent's.
        if self._peer is not None:
            forks.close(self._peer.detach())
        if self._keeper_end >= 0:
            forks.close(self._keeper_end)
        self._peer, self._keeper_end, self._lock = None, -1, threading.RLock()

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises KeeperError, OutOfSpaceError."""
        return self.call_with_descriptors(message, _alone)

    def introduce(self, **changes: Any) -> None:
        """Send the hello of this trainer with these changes, now and to each new keeper."""
        with self._lock:  # no keeper comes between the two
            hello = {**self._hello, **changes}
            self.call(hello)
            self._hello = hello

    def introduce_first(self, hello: dict[str, Any], *, starts: bool) -> None:
        """Do as `introduce` to a keeper that does not run yet, and wait for nothing: a thread connects. The
        next call waits for it, and raises its error. starts: start the keeper; else another trainer of this
        node does."""
        with self._lock:
            self._hello = hello
            if starts and not is_alive(self._runtime, ELECTION_LOCK):
                self._start()
            self._started_s = time.monotonic()
        start_thread("flashckpt-keeper", self._connect)

    def _connect(self) -> None:
        with self._lock:
            try:
                if not self._is_left:
                    self._connected(unless_left=True)
            except (OSError, EOFError):
                self._drop()  # the keeper was killed: the next call connects to another
            except Exception as error:
                self._first_error = error

    def release(self, names: Sequence[str]) -> None:
        """Release slots that this trainer does not map any more."""
        with self._lock:
            self.introduce(released=[*self._hello["released"], *names][-MAX_NAMES:])
            # Only now: a keeper that is started by this call gets memfds from this process alone.
            self._held.release(names)

    def call_with_descriptors(self, message: dict[str, Any], take: TakeAnswer[T]) -> T:
        """Make a request, and return what `take` makes of the answer and its descriptors."""
        with self._lock:
            error, self._first_error = self._first_error, None
            if error is not None:
                raise error
            tries = 1
            while True:
                try:
                    found = _exchanged(self._connected(), message)
                    break
                except (OSError, EOFError) as error:
                    self._drop()
                    if tries >= _TRIES:
                        raise _unreachable(self._runtime, f"it does not answer ({error})") from error
                    if isinstance(error, TimeoutError):
                        self._depose()
                        tries = _TRIES
                    else:
                        # A keeper that is being killed takes connections until its listener is closed.
                        time.sleep(_RETRY_S)
                        tries += 1
                except BaseException:
                    # Interrupted: this answer would be taken for that of the next request.
                    self._drop()
                    raise
            return take(*_accepted(*found))

    def call_until_done(self, message: dict[str, Any], take: TakeAnswer[T]) -> T:
        """The same for a request that may take long: repeats it until the keeper, or its successor, has done
        it. Other threads make their requests meanwhile. Raises KeeperError after `stop_waiting`."""

        def taken(answer: dict[str, Any], descriptors: list[int]) -> T | None:
            return None if answer.get("later") else take(answer, descriptors)

        pause_s = _FIRST_LATER_S
        while not self._closed:
            if (found := self.call_with_descriptors(message, taken)) is not None:
                return found
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_LATER_S)
        raise KeeperError("The run was closed while it waited for its keeper.")

    def stop_waiting(self) -> None:
        """End all waits of `call_until_done`: the run ends."""
        self._closed = True

    def tend(self) -> bool:
        """Start a keeper again if it is dead or silent, and return whether this trainer has a new one. Call
        it once a second or so."""
        with self._lock:
            before = self.restarts
            if self._was_swept():
                self._drop()
            self.call({"op": "ping"})
            return self.restarts > before

    def close(self) -> None:
        """Disconnect, and close all descriptors."""
        self._is_left = True
        # Another thread may wait for a silent keeper: then the end of the process closes them.
        if not self._lock.acquire(timeout=_CLOSE_TIMEOUT_S):
            return
        try:
            self._drop()
            self._watch_end(-1)
            self._held.close()
        finally:
            self._lock.release()

    def ready(self) -> None:
        """Wait until a keeper answers. Raises KeeperError."""
        self.call({"op": "ping"})

    def _connected(self, *, unless_left: bool = False) -> socket.socket:
        """The connection; connects and starts a keeper as needed. unless_left: raise KeeperError once `close`
        was called."""
        if self._peer is not None:
            return self._peer
        self._was_swept()
        until = time.monotonic() + _START_TIMEOUT_S
        silent, silent_since = self._runtime.inode(ELECTION_LOCK), time.monotonic()
        while (peer := self._reach()) is None:
            now, elected = time.monotonic(), self._elected
            if elected is None or elected != silent or not is_alive(self._runtime, ELECTION_LOCK):
                silent, silent_since = elected, now
            elif now - silent_since > self._timeout_s + _START_AGAIN_S:
                # A keeper that is elected and has no socket hangs, and would block others for ever.
                self._depose()
            if now > until:
                raise _unreachable(self._runtime, f"it did not answer within {_START_TIMEOUT_S:.0f} s")
            if unless_left and self._is_left:
                raise KeeperError("The run was released before its keeper answered.")
            is_due = now - self._started_s > _START_AGAIN_S or self._has_ended()
            if is_due and not is_alive(self._runtime, ELECTION_LOCK):
                if self._pauses.left_s(self.longest_pause_s) > 0:
                    raise _unreachable(
                        self._runtime, "keepers die soon after their start; the next has to wait"
                    )
                self._start()
            time.sleep(_RETRY_S)
        self._watch_end(-1)
        self._started_s = -_START_AGAIN_S  # the next one is started as soon as it is needed
        self._peer = peer
        self._introduce(peer)
        return peer

    def _start(self) -> None:
        self._watch_end(start.start(self._run_path, self._runtime))
        self._pauses.started()
        self._started_s = time.monotonic()

    def _was_swept(self) -> bool:
        """Make the runtime folder and the life lock again if they were removed (a logout that clears shared
        memory, a cleaner of temporary files). Returns whether they were."""
        runtime, life = self._runtime, self._life
        is_gone = not runtime.exists()
        if is_gone:
            runtime.renew()
        if life.stands(runtime):
            return False
        life.renew(runtime)
        log.warning(
            "%s was removed while this run was trained. It was made again, and the snapshots in memory are "
            "handed to a new keeper; if all processes die before the next commit, they are lost. Stop its "
            "removal, or set FLASHCKPT_RUNTIME to another folder.",
            runtime.path if is_gone else f"{runtime.path}/{life.name}",
        )
        return True

    def _watch_end(self, descriptor: int) -> None:
        """Watch the end of the keeper that was started last by this descriptor; -1: of none."""
        if self._keeper_end >= 0:
            os.close(self._keeper_end)
        self._keeper_end = descriptor

    def _has_ended(self) -> bool:
        """Whether the keeper that was started last has ended: it was killed, or another was elected, which
        may be gone by now. False after many deaths: then the next start waits."""
        if self._keeper_end < 0 or self._pauses.left_s() > 0:
            return False
        poll = select.poll()
        poll.register(self._keeper_end, 0)
        return bool(poll.poll(0))

    def _introduce(self, peer: socket.socket) -> None:
        """Hand descriptors over to a keeper that may be a new one, and say hello."""
        # The next keeper may reuse the lock's file, so compare the process, too.
        found = self._elected, peer_uid(peer)[0]
        try:
            self._hand_over(peer)
            if self._hello:
                asked(peer, self._hello)
        except BaseException:
            self._drop()
            raise
        self.restarts += self._known not in (None, found)
        self._known = found

    def _hand_over(self, peer: socket.socket) -> None:
        nameless = self._held.nameless()
        try:
            for first in range(0, len(nameless), MAX_DESCRIPTORS):
                try:
                    asked(peer, {"op": "adopt"}, nameless[first : first + MAX_DESCRIPTORS])
                except KeeperError as error:
                    # A damaged slot must not keep a run from having a keeper.
                    log.error("the new keeper: %s", error)
        finally:
            close_all(nameless)
        self._held.handed_over()

    def _reach(self) -> socket.socket | None:
        self._elected = self._runtime.inode(ELECTION_LOCK)
        return connect(self._runtime, self._timeout_s)

    def _depose(self) -> None:
        """Remove the names of a keeper that lives and does not answer (stopped, or hanging in storage), so
        that another can be elected. When it wakes it finds that it is not the keeper any more."""
        self._drop()
        self._take_memfds()
        # Not those of a new keeper that another trainer has started meanwhile.
        if self._runtime.inode(ELECTION_LOCK) == self._elected:
            for name in (SOCKET_NAME, ELECTION_LOCK):
                self._runtime.remove(name)

    def _take_memfds(self) -> None:
        """Hold the memfds of a silent keeper for its successor: one may be the newest snapshot, and a start
        must not resume from an older one because the keeper is slow."""
        pid = holder_of(self._runtime, ELECTION_LOCK)
        try:
            found = {} if pid is None else memfds_of(pid)
            try:
                self._held.keep(found, lent=True)
            finally:
                close_all([*found.values()])
        except OSError as error:
            log.error(
                "The keeper %d of %s does not answer and is replaced, and its memory cannot be read (%s). "
                "Snapshots in memfds that are not committed are lost; those in named regions are kept. Give "
                "the processes of this user one pid namespace, or /dev/shm room for the slots.",
                pid, self._runtime.path, error,
            )  # fmt: skip

    def _drop(self) -> None:
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.close()
            self._peer = None


def _exchanged(peer: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> Answer:
    send(peer, message, descriptors)
    return receive(peer)


def _accepted(answer: dict[str, Any], received: list[int]) -> Answer:
    if answer.get("ok") is True:
        return answer, received
    close_all(received)
    message = str(answer.get("error", "The keeper refused without a reason."))
    if answer.get("kind") == "space":
        raise OutOfSpaceError(message, needed=int(answer["needed"]), available=int(answer["available"]))
    raise Refusal(message)


def _alone(answer: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    close_all(descriptors)
    return answer


def asked(peer: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> Answer:
    """The keeper's answer to a message, with its descriptors. Raises its refusal, OSError, EOFError."""
    return _accepted(*_exchanged(peer, message, descriptors))


def _unreachable(runtime: RuntimeFolder, reason: str) -> KeeperError:
    return KeeperError(
        f"The keeper cannot be asked: {reason}. Training is not touched; sealed snapshots stay in memory and "
        f"are persisted as soon as a keeper runs. Its log: {os.path.join(runtime.path, LOG_NAME)}",
        path=runtime.path,
    )


_TIMEOUT_S = 30.0


class KeeperClient(KeeperConnection):
    """The requests of a trainer to its node's keeper. The next call after a keeper's death starts another,
    which gets this trainer's hello and memfds again."""

    def __init__(
        self, run_path: str, runtime: RuntimeFolder, life: LifeLock, *, timeout_s: float = _TIMEOUT_S
    ) -> None:
        super().__init__(run_path, runtime, life, timeout_s)
        self.available_bytes = 0  # of the node, when slots were granted last

    def hello(
        self,
        *,
        rank: int,
        world: int,
        attempt: str,
        keep: Keep,
        linger_s: float,
        environment: Mapping[str, Any] | None = None,
        stacks_signal: int = 0,
        kill_when_stuck: bool = False,
        ranks: Sequence[int] = (),
        remote: Remote | None = None,
        grace_s: float = 60.0,
        cache: CachePlace | None = None,
        is_first: bool | None = None,
    ) -> None:
        """Introduce this trainer: from now on the keeper watches its life lock.

        attempt: the name of the attempt. environment: plain JSON of some 10 kB at most, stored in every part.
        stacks_signal: makes this process write its Python stacks into its file (0: no signal does).
        kill_when_stuck: the keeper may kill it when it is stuck. ranks: those of its node (default: itself
        alone), whose snapshots of a step make one part. remote: where committed steps are copied to. grace_s:
        how long the keeper, after the last trainer, waits for a remote without progress. cache: where
        snapshots are copied to on this node first. is_first: not None if no keeper runs here yet: nothing
        waits for it, and it is started if this is true."""
        hello: dict[str, Any] = dict(
            op="hello",
            protocol=PROTOCOL,
            rank=rank,
            world=world,
            ranks=list(ranks) or [rank],
            attempt=attempt,
            lock=self._life.name,
            keep=asdict(keep),
            linger_s=linger_s,
            environment=dict(environment or {}),
            run=self._run_path,
            # A keeper that runs already may have credentials that were replaced since.
            storage=options_of(self._run_path),
            stacks_signal=stacks_signal,
            kill_when_stuck=kill_when_stuck,
            grace_s=grace_s,
            remote=None if remote is None else asdict(remote),
            cache=None if cache is None else asdict(cache),
            resumed=None,
            released=[],
            closing=False,
            unsaved=False,
        )
        if is_first is None:
            self.introduce(**hello)
        else:
            self.introduce_first(hello, starts=is_first)

    def slots(
        self,
        count: int,
        needed: SlotSize,
        wanted: SlotSize | None = None,
        have: Sequence[str] = (),
        node: int = NO_NODE,
    ) -> list[SlotGrant]:
        """Slots for this trainer to write, surviving ones of this rank or new ones, each of at least the size
        `needed`, and `wanted` if memory allows. `count` of them (0: the keeper decides; two if memory allows
        no more), less those in `have`, the names of the slots that this trainer holds, that are large enough.
        New ones come from the NUMA node `node` as far as it has memory.

        Blocks while memory is taken (at most a second a GiB). Raises OutOfSpaceError with bytes needed and
        available, KeeperError.
        """
        grants = self._requested("slots", count, needed, wanted or needed, have, node)
        self._held.end_loans()
        return grants

    def constants(self, size: SlotSize, node: int = NO_NODE) -> SlotGrant:
        """A free region for the constants of this trainer. It stays until this trainer has released it or
        died, and no snapshot names it. Blocks and raises as `slots`."""
        return _one(self._requested("constants", 1, size, size, (), node))

    def _requested(
        self,
        purpose: str,
        count: int,
        needed: SlotSize,
        wanted: SlotSize,
        have: Sequence[str],
        node: int,
    ) -> list[SlotGrant]:
        asked = {"purpose": purpose, "count": count, "needed": needed, "wanted": wanted, "have": list(have)}
        return self.call_until_done({"op": "memory", **asked, "node": node}, self._kept)

    def keep_constants(self, name: str) -> SlotGrant:
        """The surviving region of constants with this name, for snapshots of this trainer to name. Raises
        KeeperError if it is gone."""
        return _one(self.call_with_descriptors({"op": "keep", "name": name}, self._kept))

    def surviving(self) -> list[SlotGrant]:
        """This rank's slots with a sealed snapshot of any attempt, and its constants, in memory and in the
        cache. Waits until a new cache was read."""
        return self.call_until_done({"op": "surviving"}, self._lent)

    def of_same_boundary(self, snapshot: SnapshotId) -> list[Slot]:
        """The slots of this node's other ranks with this snapshot, mapped, for the caller to close: of each
        rank the one in memory, then the cached one. Their ranks may overwrite them."""

        def taken(answer: dict[str, Any], descriptors: list[int]) -> list[Slot]:
            try:
                found = [Slot.open(descriptors.pop(0), map_image=True) for _ in range(len(descriptors))]
            finally:
                close_all(descriptors)  # those that are left after an error
            for path in answer["cached"]:
                with contextlib.suppress(OSError, FlashckptError):  # it may be gone, or damaged
                    found.append(open_cached(path, self._runtime.identity))
            return sorted(found, key=lambda slot: (slot.rank, slot.is_cached))

        asked = {"attempt": str(snapshot.attempt), "boundary": snapshot.boundary}
        return self.call_until_done({"op": "same_boundary", **asked}, taken)

    def started(self, parent: SnapshotId) -> None:
        """Report that this trainer's attempt has started, resumed from this snapshot in memory."""
        self.introduce(resumed={"attempt": str(parent.attempt), "boundary": parent.boundary})

    def status(self, *, awaited: bool = False) -> Status:
        """What the keeper has done. awaited: a trainer waits, so that failures are retried soon."""
        answer = self.call({"op": "status", "awaited": awaited})
        found = answer.get("status")
        if not isinstance(found, dict):
            raise ProtocolError("The keeper's answer holds no status.")
        return Status.from_dict(found)

    def event(self, event: dict[str, Any]) -> None:
        """Add a line to the run's ledger; the keeper adds the time."""
        self.call({"op": "event", "event": event})

    def closing(self, *, unsaved: bool = False) -> None:
        """Report that this trainer ends in order: the keeper leaves after it has persisted all requests.
        unsaved: the run ends although storage failed for the grace."""
        self.introduce(closing=not unsaved, unsaved=unsaved)

    def _kept(self, answer: dict[str, Any], descriptors: list[int], *, lent: bool = False) -> list[SlotGrant]:
        """Regions that this trainer uses from now on, or (`lent`) reads."""
        rows = answer.get("slots")
        self.available_bytes = int(answer.get("available", self.available_bytes))
        try:
            if not isinstance(rows, list) or len(rows) != len(descriptors):
                raise ProtocolError("The keeper's answer does not say what its descriptors are.")
            grants = [SlotGrant(each, **row) for each, row in zip(descriptors, rows, strict=True)]
            grants += [SlotGrant(-1, **row) for row in answer.get("cached", [])]
            granted = {grant.name: grant.descriptor for grant in grants}
            kept = [grant.name for grant in grants if grant.kind == MEMFD or not lent]
            self._held.keep({name: granted[name] for name in kept}, lent=lent)
            self._hello["released"] = [name for name in self._hello["released"] if name not in granted]
        except BaseException:
            close_all(descriptors)
            raise
        return grants

    def _lent(self, answer: dict[str, Any], descriptors: list[int]) -> list[SlotGrant]:
        return self._kept(answer, descriptors, lent=True)


def _one(grants: list[SlotGrant]) -> SlotGrant:
    if len(grants) != 1:
        close_all([grant.descriptor for grant in grants])
        raise ProtocolError("The keeper's answer is not one region.")
    return grants[0]


def may_have_memory(runtime: RuntimeFolder) -> bool:
    """Whether this node may have snapshots of the run in memory: a keeper lives, or a region has a name."""
    return is_alive(runtime, ELECTION_LOCK) or any(map(is_region_name, runtime.names()))


@dataclass(frozen=True, kw_only=True)
class WaitTimeouts:
    """Seconds without progress after which a keeper is not waited for any longer.

    writing_s: while it writes a file, which it may be syncing. idle_s: while it writes nothing. failing_s:
    while storage fails; also the time for which tries may fail. others_s: while only parts of other
    nodes are missing, whose keepers work unseen.
    """

    writing_s: float
    idle_s: float
    failing_s: float
    others_s: float

    @classmethod
    def same(cls, timeout_s: float, others_s: float | None = None) -> WaitTimeouts:
        """The same timeout in each case, but for the parts of other nodes."""
        others_s = timeout_s if others_s is None else others_s
        return cls(writing_s=timeout_s, idle_s=timeout_s, failing_s=timeout_s, others_s=others_s)


class KeeperWait:
    """One wait for a keeper: decides from the keeper's answers whether to wait longer.

    step: the step that is waited for; None for whatever the keeper has to save. generation: that of its
    snapshot; None for any. before: the answer before the wait.

    Progress is a write or a commit. A keeper that is killed at each try (no memory is left for it) also
    writes before it dies, and so does its successor: after a few keepers without a commit, only commits
    count. A failure of storage may pass (a server's hiccup, a disk on which a user makes room), and the
    keeper tries again: the first failure ends no wait.
    """

    def __init__(
        self,
        before: Status,
        timeouts: WaitTimeouts,
        *,
        step: int | None = None,
        generation: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeouts, self._step, self._generation, self._clock = timeouts, step, generation, clock
        self._torn_before, self._newest, self._answers = before.torn, before, 0
        self._keepers, self._committed = {before.keeper}, set(before.committed)
        self._counts_writes = True
        self._progress = self._progress_of(before)
        self._moved_s = clock()
        self._failing_since_s: float | None = None

    def has_stalled(self, status: Status, *, awaits_others: bool = True) -> bool:
        """Whether the keeper has made no progress for too long. awaits_others: the ranks of other nodes
        live."""
        # A new keeper knows fewer commits than the one before: those of the snapshots in slots.
        if not self._committed.issuperset(status.committed):
            self._committed.update(status.committed)
            self._keepers.clear()
            self._counts_writes = True
        self._answers += status is not self._newest
        self._newest = status
        self._keepers.add(status.keeper)
        progress = self._progress_of(status)
        if progress != self._progress:
            self._progress, self._moved_s = progress, self._clock()
        return self.still_s > self._timeout_s(status, awaits_others)

    def refusal(self, status: Status) -> str | None:
        """Return why the keeper will not save the snapshot: it was torn, the keeper has given it up, or tries
        fail for too long. None while it may still be saved. It is asked with each answer, before
        `has_stalled`, so that a try in progress is waited for until it has failed, too."""
        for torn in status.torn:
            if torn.step == self._step and torn not in self._torn_before:
                return f"its bytes are not those of its boundary ({', '.join(torn.leaves) or 'metadata'})"
        if self._step is None and not (status.failing and self._counts_writes):
            self._failing_since_s = None
            return None
        failure = self.failure(status)
        if failure is None:
            return None
        now_s = self._clock()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        has_failed_again = status.counts.get("failed", 0) != self._newest.counts.get("failed", 0)
        steps = status.failing if self._step is None else (self._step,)
        if status.persisting in steps and not has_failed_again:
            return None
        # The first answer may be older than the request.
        is_given_up = self._step not in (None, *status.waiting) and self._answers >= _FRESH_ANSWERS
        if is_given_up or now_s - self._failing_since_s > self._timeouts.failing_s:
            return failure.message
        return None

    def failure(self, status: Status) -> Failure | None:
        """Return the last failed try."""
        steps = status.failing if self._step is None else (self._step,)
        for failure in reversed(status.failures):
            if failure.step in steps and self._generation in (None, failure.generation):
                return failure
        return Failure(steps[-1], 0, "storage fails", 0) if self._step is None and steps else None

    @property
    def still_s(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._moved_s

    def count_commits_only(self) -> None:
        """Ignore what fails until the next commit: another snapshot is waited for."""
        self._counts_writes = False

    def _timeout_s(self, status: Status, awaits_others: bool) -> float:
        steps = set(status.waiting) if self._step is None else {self._step}
        if steps and steps <= set(status.for_others):
            return self._timeouts.others_s if awaits_others else self._timeouts.idle_s
        if status.persisting is not None:
            return self._timeouts.writing_s
        return self._timeouts.failing_s if status.failing and self._counts_writes else self._timeouts.idle_s

    def _progress_of(self, status: Status) -> object:
        if not self._counts_writes or len(self._keepers) > _MOST_KEEPERS:
            return len(self._committed)
        return status.keeper, len(self._committed), status.progress_bytes
