"""The keeper's server: the listening socket, the requests of trainers, and the outcomes that it reports to
them.

Owns the connections, the meaning of each request, and the bounded history of outcomes. Never blocks: a
request that takes long is answered with LATER until it is done.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashckpt.errors import DamagedError, FlashckptError, FormatError, KeeperError, OutOfSpaceError
from flashckpt.format.layout import EVERY
from flashckpt.format.names import MAX_BOUNDARY, MAX_RANK, AttemptName, SnapshotId
from flashckpt.keeper.allocation import Allocation
from flashckpt.keeper.liveness import ExitRule, RunFolder, TrainerRegistry
from flashckpt.keeper.mirror_upload import MirrorUpload
from flashckpt.keeper.protocol import (
    LATER,
    MAX_DESCRIPTORS,
    PROTOCOL,
    SOCKET_NAME,
    Answer,
    CacheStatus,
    Failure,
    ProtocolError,
    Status,
    TornSnapshot,
    cache_of,
    close_all,
    flag,
    keep_of,
    names,
    number,
    peer_uid,
    receive,
    remote_of,
    seconds,
    send,
    text,
)
from flashckpt.memory.held_regions import HeldRegion, Regions
from flashckpt.memory.region import CACHE
from flashckpt.memory.runtime import RuntimeFolder, check_name
from flashckpt.persist.job import JobState, StepJob, StepOutcome, Trainer
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.queue import UNKNOWN, Queue
from flashckpt.persist.slot_cache import SlotCache
from flashckpt.store import give_options

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 256
_BACKLOG = 128
_MAX_PATH = 4096
_MOST_RANKS = 1024
_MOST_COMMITTED = 64
_MOST_CACHED = 8
_MOST_FAILURES = 16
_MOST_TORN = 4
_MOST_TEXT = 400
_MOST_LEAVES = 22
_MOST_NAMES_BYTES = 4096


@dataclass(eq=False)
class Connection:
    """A peer of the keeper. `lock`: the life lock of the trainer, from its hello."""

    peer: socket.socket
    pid: int
    lock: str | None = None


# Takes a connection, a message and its descriptors, which it must close or keep.
Answering = Callable[[Connection, dict[str, Any], list[int]], Answer]


class Server:
    def __init__(self, folder: RuntimeFolder, answer: Answering) -> None:
        self._answer = answer
        self._folder = folder
        self._connections: dict[int, Connection] = {}
        # Remove the socket of a dead keeper; raise for anything else under its name.
        if folder.check_socket(SOCKET_NAME):
            folder.remove(SOCKET_NAME)
        self._listener = self._listening()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def register(self, poll: select.poll) -> None:
        poll.register(self._listener.fileno(), select.POLLIN)
        for descriptor in self._connections:
            poll.register(descriptor, select.POLLIN)

    def serve(self, ready: Sequence[int]) -> None:
        """Serve the ready descriptors among those registered."""
        for descriptor in ready:
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._connections:
                self._serve(self._connections[descriptor])

    def restore_name(self) -> None:
        """Make the socket again if its name was removed. Only for the elected keeper."""
        if self._folder.inode(SOCKET_NAME) is None:
            log.warning("the keeper's socket was removed: it is made again")
            self._listener.close()
            self._listener = self._listening()

    def _listening(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        before = os.umask(0o177)
        try:
            listener.bind(self._folder.reachable(SOCKET_NAME))
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
        return listener

    def close(self) -> None:
        self._listener.close()
        close_all([self._spare])
        for connection in self._connections.values():
            connection.peer.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away(error)
            return
        pid, uid = peer_uid(peer)
        if uid != os.geteuid() or len(self._connections) >= _MOST_CONNECTIONS:
            log.warning("a connection of user %d, process %d was refused", uid, pid)
            peer.close()
            return
        peer.setblocking(False)
        self._connections[peer.fileno()] = Connection(peer, pid)

    def _turn_away(self, error: OSError) -> None:
        """Refuse a connection for want of descriptors; otherwise its peer would wait."""
        close_all([self._spare])
        self._spare = -1
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return  # a thread was faster; the next try comes at once
        with contextlib.suppress(OSError):
            why = (
                f"The keeper cannot serve another connection: {error.strerror}. It has the limit of open "
                "files of the process that started it: raise that (ulimit -n)."
            )
            send(peer, {"ok": False, "kind": "keeper", "error": why})
        # Keep it open until the next one: a peer that is still sending would not read the refusal.
        self._spare = peer.detach()

    def _serve(self, connection: Connection) -> None:
        descriptors: list[int] = []
        try:
            message, descriptors = receive(connection.peer)
            fields, given = self._answer(connection, message, descriptors)
            self._send(connection, {"ok": True, **fields}, given)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._hang_up(connection)
        except ProtocolError as error:
            close_all(descriptors)
            log.warning("process %d: %s", connection.pid, error)
            self._refuse(connection, error)
            self._hang_up(connection)
        except FlashckptError as error:
            self._refuse(connection, error)

    def _refuse(self, connection: Connection, error: FlashckptError) -> None:
        answer: dict[str, Any] = {"ok": False, "kind": "keeper", "error": str(error)[:4000]}
        if isinstance(error, OutOfSpaceError):
            answer |= {"kind": "space", "needed": error.needed, "available": error.available}
        self._send(connection, answer)

    def _send(self, connection: Connection, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send an answer, or hang up: the keeper waits for no peer that does not read. Raises ProtocolError
        for an answer that is too long."""
        try:
            send(connection.peer, message, descriptors)
        except OSError:
            self._hang_up(connection)

    def _hang_up(self, connection: Connection) -> None:
        self._connections.pop(connection.peer.fileno(), None)
        connection.peer.close()


class Requests:
    """Answers messages in the keeper's loop."""

    def __init__(
        self,
        regions: Regions,
        registry: TrainerRegistry,
        ledger: Ledger,
        allocation: Allocation,
        queue: Queue,
        outcomes: Outcomes,
        run_folder: RunFolder,
        exit_rule: ExitRule,
        mirroring: MirrorUpload,
        cache: SlotCache,
    ) -> None:
        self._regions, self._registry, self._ledger, self._allocation = regions, registry, ledger, allocation
        self._queue, self._outcomes, self._run_folder, self._exit = queue, outcomes, run_folder, exit_rule
        self._mirroring, self._cache = mirroring, cache

    def answer(self, connection: Connection, message: dict[str, Any], descriptors: list[int]) -> Answer:
        """The answer to a request. Raises ProtocolError for an invalid request, KeeperError or
        OutOfSpaceError for a refusal."""
        op = message.get("op")
        if op != "adopt":
            close_all(descriptors)
            descriptors.clear()
        match op:
            case "hello":
                self._hello(connection, message)
            case "memory":
                return self._allocation.ask(self._trainer(connection), message)
            case "keep":
                return self._keep(self._trainer(connection), message)
            case "surviving" | "same_boundary" if self._cache.is_adopting:
                return LATER  # the contents of the cache are not known yet
            case "surviving":
                return self._surviving(self._trainer(connection))
            case "same_boundary":
                return self._same_boundary(self._trainer(connection), message)
            case "adopt":
                return self._adopt(descriptors)
            case "event":
                self._event(self._trainer(connection), message)
            case "status":
                return self._status(self._registry.get(connection.lock), message)
            case "describe":
                return {"keeper": self._described()}, ()
            case "discard":
                self._discard()
            case "ping":
                pass
            case _:
                raise ProtocolError(f"{str(op)[:40]!r} is not a request. The connection was closed.")
        return {}, ()

    def _trainer(self, connection: Connection) -> Trainer:
        trainer = self._registry.get(connection.lock)
        if trainer is None:
            raise ProtocolError("A request came before the hello of its sender. The connection was closed.")
        return trainer

    def _hello(self, connection: Connection, message: dict[str, Any]) -> None:
        if number(message, "protocol") != PROTOCOL:
            raise KeeperError(
                f"This keeper speaks protocol {PROTOCOL}, the trainer {message['protocol']}: two versions of "
                "flashckpt on one run. Nothing was changed. Use one, or wait until the older keeper has left."
            )
        lock, attempt = text(message, "lock", 64), AttemptName.parse(text(message, "attempt", 64))
        environment = message.get("environment")
        try:
            check_name(lock)
        except KeeperError as error:
            raise ProtocolError(str(error)) from error
        if attempt is None or not lock.startswith("trainer-") or not isinstance(environment, dict):
            raise ProtocolError("The hello of a trainer is invalid. The connection was closed.")
        known, resumed = self._registry.get(lock), _resumed(message)
        if known is not None and known.attempt not in (None, attempt):
            raise ProtocolError(f"{lock} is of attempt {known.attempt}. The connection was closed.")
        trainer = Trainer(
            lock=lock,
            rank=number(message, "rank", 0, MAX_RANK),
            pid=connection.pid,
            world=number(message, "world", 1, MAX_RANK),
            ranks=_ranks(message),
            attempt=attempt,
            resumed=resumed,
            closing=flag(message, "closing"),
            unsaved=flag(message, "unsaved"),
            keep=keep_of(message),
            linger_s=seconds(message, "linger_s"),
            environment=environment,
            stacks_signal=number(message, "stacks_signal", 0, 64),
            kill_when_stuck=flag(message, "kill_when_stuck"),
            remote=remote_of(message),
            grace_s=seconds(message, "grace_s"),
            cache=cache_of(message),
        )
        released = names(message, "released")
        self._registry.watch(trainer)
        connection.lock = lock
        newest = self._registry.newest()
        self._cache.set_place(None if newest is None else newest.cache)
        self._note_run_path(message)
        if storage := _storage(message):
            give_options(self._run_folder.url, storage)
        if resumed is not None and (known is None or known.resumed != resumed):
            self._queue.resumed(resumed)
        for held in map(self._regions.get, released):
            # Not if it was granted since, to another living trainer or again to this one.
            if held is None or self._allocation.is_on_its_way(held):
                continue
            if held.writer == lock or not self._regions.is_written(held):
                held.retired, held.writer = True, ""

    def _note_run_path(self, message: dict[str, Any]) -> None:
        """Note the path under which the sender has found the run."""
        if "run" in message:
            self._run_folder.found_at(text(message, "run", _MAX_PATH))

    def _keep(self, trainer: Trainer, message: dict[str, Any]) -> Answer:
        """Grant a region of constants that survived, which the trainer's snapshots name again."""
        name = text(message, "name", 64)
        for held in self._regions.constants_of(trainer.rank):
            if held.slot.name == name:
                held.writer = trainer.lock
                row = self._regions.row(held, trainer.pid, trainer.lock)
                return {"slots": [row]}, [held.slot.descriptor]
        raise KeeperError(f"{name} does not exist any more. Each snapshot holds its own constants.")

    def _surviving(self, trainer: Trainer) -> Answer:
        """Slots with a sealed snapshot, and constants, in memory and in the cache."""
        found = [held for held in self._regions.of_rank(trainer.rank) if held.sealed() is not None]
        constants = [held for held in self._regions.constants_of(trainer.rank) if held.sealed() is not None]
        found = (constants + found)[:MAX_DESCRIPTORS]
        rows = [self._regions.row(held, trainer.pid, trainer.lock) for held in found]
        rest = [self._regions.row(held, trainer.pid, trainer.lock) for held in self._cached_of(trainer.rank)]
        return {"slots": rows, "cached": rest}, [held.slot.descriptor for held in found]

    def _cached_of(self, rank: int) -> list[HeldRegion]:
        """The newest cached slots of a rank, newest first, and the constants that they name."""
        held = [each for each in self._regions.cached() if each.slot.rank == rank and each.path]
        rows = [(sealed, each) for each in held if (sealed := each.sealed()) is not None]
        rows = sorted(rows, key=lambda row: row[0].age, reverse=True)[:_MOST_CACHED]
        named = {sealed.record.constants_nonce for sealed, _ in rows}
        constants = [each for each in self._regions.cached_constants() if each.slot.header.nonce in named]
        return [each for each in constants if each.path] + [each for _, each in rows]

    def _same_boundary(self, trainer: Trainer, message: dict[str, Any]) -> Answer:
        """The slots of other ranks with the same snapshot, as many as one answer holds."""
        snapshot = _snapshot(message)

        def has_it(held: HeldRegion) -> bool:
            sealed = held.sealed()
            return sealed is not None and sealed.id == snapshot and held.slot.rank != trainer.rank

        by_rank = {held.slot.rank: held for held in self._regions.slots() if has_it(held)}
        paths = [held.path for held in self._regions.cached() if held.path and has_it(held)]
        ranks = sorted(by_rank)[:MAX_DESCRIPTORS]
        return {"cached": paths}, [by_rank[rank].slot.descriptor for rank in ranks]

    def _adopt(self, descriptors: list[int]) -> Answer:
        adopted, wrong = [], []
        while descriptors:
            try:
                adopted.append(self._regions.adopt_memfd(descriptors.pop()))
            except (DamagedError, FormatError, KeeperError, OSError) as error:
                wrong.append(str(error))
        self._registry.watch_owners(self._regions, adopted)
        for rank in {held.slot.rank for held in adopted}:
            if not self._registry.of_rank(rank):
                self._queue.rescue(rank)  # its trainer died while the keeper was replaced
        names = [held.slot.name for held in adopted]
        self._ledger.add(None, Event.ADOPT, slots=names, kind="memfd")
        if wrong:
            raise KeeperError(f"A slot that was handed over is invalid, all others were taken: {wrong[0]}")
        return {"names": names}, ()

    def _discard(self) -> None:
        if len(self._registry):
            raise KeeperError("A trainer of this run lives: nothing is discarded.")
        self._exit.discard()

    def _event(self, trainer: Trainer, message: dict[str, Any]) -> None:
        event = message.get("event")
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise ProtocolError("An event has no name. The connection was closed.")
        fields = {"rank": trainer.rank} | {key: value for key, value in event.items() if key != "event"}
        self._ledger.add(str(trainer.attempt), event["event"], **fields)

    def _status(self, trainer: Trainer | None, message: dict[str, Any]) -> Answer:
        self._note_run_path(message)
        if message.get("again") is True:
            self._queue.try_again()
            self._outcomes.forget_failures(self._queue.given_up())
        if message.get("awaited") is True:
            self._queue.expedite()
        status = self._outcomes.status(self._queue, trainer)
        found = replace(status, remote=self._mirroring.status(), cache=self._cache_status())
        return {"status": found.to_dict()}, ()

    def _cache_status(self) -> CacheStatus | None:
        if not self._cache.path:
            return None
        cached = tuple(self._queue.cached()[-_MOST_COMMITTED:])
        return CacheStatus(cached, self._cache.error)

    def _described(self) -> dict[str, Any]:
        """The fields of a `KeeperRow`, besides: whether it `is_saving`, and attempt and step of the `newest`
        snapshot in memory."""
        memory = [held for held in self._regions.everything() if held.kind != CACHE]
        sealed = self._regions.sealed()
        cached = [each for held in self._regions.cached() if (each := held.sealed()) is not None]
        newest = max(((each.attempt, each.step) for each in self._regions.snapshots()), default=None)
        return {
            "is_saving": self._queue.is_pending(),
            "newest": None if newest is None else [str(newest[0]), newest[1]],
            "run": self._run_folder.url,
            "run_is_gone": self._exit.run_is_gone,
            "lingers_s": round(self._exit.lingers_s, 1),
            "slots": len(self._regions.slots()),
            "num_bytes": sum(held.slot.header.num_bytes for held in memory),
            "newest_sealed": max((each.step for each in sealed), default=None),
            "newest_committed": max((each.step for each in sealed if each.is_persisted), default=None),
            "cache": self._cache.path or None,
            "cached_bytes": self._cache.num_bytes,
            "newest_cached": max((each.step for each in cached), default=None),
            "not_at_home": sorted({each.step for each in cached if not each.is_persisted}),
        }


def _snapshot(message: dict[str, Any]) -> SnapshotId:
    attempt = AttemptName.parse(text(message, "attempt", 64))
    if attempt is None:
        raise ProtocolError("The attempt of a snapshot has an invalid name. The connection was closed.")
    return SnapshotId(attempt, number(message, "boundary", 0, MAX_BOUNDARY))


def _resumed(message: dict[str, Any]) -> SnapshotId | None:
    """The snapshot in memory from which a trainer's attempt has resumed."""
    named = message.get("resumed")
    return _snapshot(named) if isinstance(named, dict) else None


def _storage(message: dict[str, Any]) -> dict[str, str | int | float | bool]:
    """The options of the run's store."""
    found = message.get("storage", {})
    if not isinstance(found, dict) or not all(isinstance(each, (str, int, float)) for each in found.values()):
        raise ProtocolError("The options of a store are invalid. The connection was closed.")
    return found


def _ranks(message: dict[str, Any]) -> tuple[int, ...]:
    """The ranks of a trainer's node."""
    ranks = message.get("ranks")
    if not isinstance(ranks, list) or not 1 <= len(ranks) <= _MOST_RANKS:
        raise ProtocolError("A trainer's ranks are invalid. The connection was closed.")
    world = number(message, "world", 1, MAX_RANK)
    found = {number({"ranks": each}, "ranks", 0, world - 1) for each in ranks}
    if number(message, "rank", 0, MAX_RANK) not in found:
        raise ProtocolError("A trainer is not among the ranks of its node. The connection was closed.")
    return tuple(sorted(found))


# ---- outcomes


class Outcomes:
    """A bounded history of outcomes, newest last, each with its snapshot: an attempt waits for its own, and
    for the one that it resumed from. A branch may resume from an older step than others have committed."""

    def __init__(self, keeper: str) -> None:
        self._keeper = keeper
        self._committed: list[tuple[SnapshotId, int]] = []
        self._failures: dict[tuple[str, int], tuple[SnapshotId, Failure]] = {}
        self._torn: list[tuple[SnapshotId, TornSnapshot]] = []
        self._diverged: dict[str, tuple[str, ...]] = {}
        self._counts: Counter[str] = Counter()
        self.superseded_by: str | None = None

    def count(self, name: str, number: int = 1) -> None:
        self._counts[name] += number

    def record(self, job: StepJob, outcome: StepOutcome) -> None:
        """Record the outcome of a try."""
        if outcome.state is JobState.COMMITTED:
            self._commit(job, outcome)
        elif outcome.state is JobState.TORN:
            self._tear(job, outcome)
        elif outcome.state in (JobState.FAILED, JobState.SUPERSEDED, JobState.DIVERGED):
            self._fail(job, outcome)
            self._diverge(str(job.attempt), outcome)

    def _commit(self, job: StepJob, outcome: StepOutcome) -> None:
        """A commit settles the failures of its attempt up to its boundary."""
        self.count("committed")
        self.count("persisted_bytes", outcome.num_bytes)
        if outcome.num_bytes:
            self.count("direct" if outcome.direct else "buffered")
        row = (job.id, job.step)
        others = [each for each in self._committed if each != row]
        self._committed = [*others, row][-_MOST_COMMITTED:]
        self._failures = {
            key: (of, each)
            for key, (of, each) in self._failures.items()
            if of.boundary > job.boundary or of.attempt != job.attempt
        }

    def _fail(self, job: StepJob, outcome: StepOutcome) -> None:
        self.count("failed")
        for each in job.members():
            failure = Failure(
                job.step, each.generation, outcome.message[:_MOST_TEXT], outcome.errno, bool(outcome.diverged)
            )
            self._failures[each.slot.name, each.generation] = (job.id, failure)
        while len(self._failures) > _MOST_FAILURES:
            del self._failures[next(iter(self._failures))]

    def _diverge(self, attempt: str, outcome: StepOutcome) -> None:
        if outcome.diverged:
            names = {*self._diverged.pop(attempt, ()), *outcome.diverged}
            if EVERY in names or len(json.dumps(list(names))) > _MOST_NAMES_BYTES:
                names = {EVERY}
            self._diverged = {attempt: tuple(sorted(names))}

    def _tear(self, job: StepJob, outcome: StepOutcome) -> None:
        self.count("torn")
        names = tuple(name[:_MOST_TEXT] for _, name in outcome.leaves[:_MOST_LEAVES])
        for each in job.members():
            if each.slot.name == outcome.slot:
                self._failures.pop((outcome.slot, each.generation), None)
                torn = TornSnapshot(job.step, each.generation, outcome.slot, names)
                self._torn = [*self._torn, (job.id, torn)][-_MOST_TORN:]

    def forget_failures(self, given_up: set[tuple[str, int]]) -> None:
        """Forget all failures but those of jobs that were given up."""
        self._failures = {key: each for key, each in self._failures.items() if key in given_up}

    def status(self, queue: Queue, trainer: Trainer | None) -> Status:
        """The status for a trainer: its attempt's snapshots, the one it resumed from, and damaged ones. None:
        all."""
        attempt = None if trainer is None else trainer.attempt

        def concerns(of: SnapshotId) -> bool:
            resumed = None if trainer is None else trainer.resumed
            return attempt is None or of.attempt == attempt or of in (resumed, UNKNOWN)

        steps = {step for of, step in [*self._committed, *queue.committed()] if concerns(of)}
        waiting = sorted(queue.waiting())[:_MOST_COMMITTED]
        failed = {each.step for _, each in self._failures.values()}
        return Status(
            keeper=self._keeper,
            committed=tuple(sorted(steps)[-_MOST_COMMITTED:]),
            newest_committed=max(steps, default=None),
            persisting=None if (job := queue.persisting) is None else job.step,
            waiting=tuple(waiting),
            for_others=tuple(sorted(queue.waiting(for_others=True))[:_MOST_COMMITTED]),
            failing=tuple(step for step in waiting if step in failed),
            unsaved=tuple(sorted(queue.unsaved())[-_MOST_COMMITTED:]),
            failures=tuple(each for of, each in self._failures.values() if concerns(of)),
            torn=tuple(each for of, each in self._torn if concerns(of)),
            diverged=tuple(
                name
                for of, each in self._diverged.items()
                if attempt is None or of == str(attempt)
                for name in each
            ),
            superseded_by=self.superseded_by,
            progress_bytes=queue.progress_bytes,
            counts=dict(self._counts + Counter(audited=queue.sound)),
        )
