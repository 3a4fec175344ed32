"""The keeper's socket: who may connect, what trainers ask and are told, and what becomes of a message that is
no request.

Owns the listening socket, the connections, the meaning of each request, and the count of how tries to persist
have ended. Never blocks, and does nothing long: a request for memory is answered by `allocation` once it was
taken.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from flashckpt.errors import DamagedError, FlashckptError, FormatError, KeeperError
from flashckpt.format.names import MAX_BOUNDARY, MAX_RANK, MAX_STEP, AttemptName
from flashckpt.format.replicas import EVERY
from flashckpt.keeper.allocation import Allocation
from flashckpt.keeper.mirroring import Mirroring
from flashckpt.keeper.protocol import (
    MAX_DESCRIPTORS,
    PROTOCOL,
    SOCKET_NAME,
    Connection,
    Failure,
    ProtocolError,
    Status,
    TornSnapshot,
    close_all,
    flag,
    names,
    number,
    peer_uid,
    receive,
    remote_of,
    seconds,
    send,
    text,
)
from flashckpt.keeper.run_folder import RunFolder
from flashckpt.keeper.trainers import ExitRule, Roster, Trainer
from flashckpt.memory.held_regions import HeldRegion, Regions
from flashckpt.memory.runtime import RuntimeFolder, check_name
from flashckpt.options import Keep
from flashckpt.persist.job import JobState, StepJob, StepOutcome, Void
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.queue import Queue
from flashckpt.store import give_options

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 256
_BACKLOG = 128
_MAX_PATH = 4096
_MOST_RANKS = 1024
_MOST_COMMON = 64
_MOST_COMMITTED = 64
_MOST_FAILURES = 16
_MOST_TORN = 4
_MOST_TEXT = 400
_MOST_LEAVES = 22
_MOST_NAMES_BYTES = 4096

Answer = tuple[dict[str, Any], Sequence[int]]
# Takes a connection, a message and its descriptors (which it must close or keep); returns the answer and the
# descriptors to send with it (which stay whose they are), or None for one that comes later.
Answering = Callable[[Connection, dict[str, Any], list[int]], Answer | None]


class Server:
    def __init__(self, folder: RuntimeFolder, answer: Answering) -> None:
        self._answer = answer
        self._folder = folder
        self._connections: dict[int, Connection] = {}
        # What a dead keeper left under the name goes; anything that is not ours is refused.
        if folder.check_socket(SOCKET_NAME):
            folder.remove(SOCKET_NAME)
        self._listener = self._listening()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def register(self, poll: select.poll) -> None:
        self._connections = {each: one for each, one in self._connections.items() if one.is_open}
        poll.register(self._listener.fileno(), select.POLLIN)
        for descriptor in self._connections:
            poll.register(descriptor, select.POLLIN)

    def serve(self, ready: Sequence[int]) -> None:
        """Answer those of the ready descriptors that are ours."""
        for descriptor in ready:
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._connections and self._connections[descriptor].is_open:
                self._serve(self._connections[descriptor])

    def mend(self) -> None:
        """Be found again where the socket's name was removed. To be called by the elected keeper alone."""
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
            connection.close()

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
        """Whoever cannot be let in for want of a descriptor is told so: it would wait for its answer."""
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
        # Open until the next one comes: who is hung up on while it speaks hears nothing.
        self._spare = peer.detach()

    def _serve(self, connection: Connection) -> None:
        descriptors: list[int] = []
        try:
            message, descriptors = receive(connection.peer)
            answer = self._answer(connection, message, descriptors)
            if answer is not None:
                connection.tell(*answer)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            connection.close()
        except ProtocolError as error:
            close_all(descriptors)
            log.warning("process %d: %s", connection.pid, error)
            connection.refuse(error)
            connection.close()
        except FlashckptError as error:
            connection.refuse(error)


class Requests:
    """Answers one message at a time, in the keeper's loop."""

    def __init__(
        self,
        regions: Regions,
        roster: Roster,
        ledger: Ledger,
        allocation: Allocation,
        queue: Queue,
        outcomes: Outcomes,
        run_folder: RunFolder,
        exit_rule: ExitRule,
        mirroring: Mirroring,
    ) -> None:
        self._regions, self._roster, self._ledger, self._allocation = regions, roster, ledger, allocation
        self._queue, self._outcomes, self._run_folder, self._exit = queue, outcomes, run_folder, exit_rule
        self._mirroring = mirroring

    def answer(
        self, connection: Connection, message: dict[str, Any], descriptors: list[int]
    ) -> Answer | None:
        """None for a request for memory, whose answer comes once it was taken. Raises ProtocolError for what
        is no request, KeeperError or OutOfRoomError for what cannot be."""
        op = message.get("op")
        if op != "adopt":
            close_all(descriptors)
            descriptors.clear()
        match op:
            case "hello":
                self._hello(connection, message)
            case "memory":
                self._allocation.ask(connection, self._who(connection), message)
                return None
            case "keep":
                return self._keep(self._who(connection), message)
            case "surviving":
                return self._surviving(self._who(connection))
            case "same_boundary":
                return self._same_boundary(self._who(connection), message)
            case "started":
                self._who(connection)
                self._started(message)
            case "adopt":
                return self._adopt(descriptors)
            case "release":
                self._release(self._who(connection), message)
            case "event":
                self._event(self._who(connection), message)
            case "closing":
                self._who(connection).closing = True
            case "status":
                return self._status(self._roster.get(connection.lock), message)
            case "describe":
                return {"keeper": self._described()}, ()
            case "discard":
                self._discard()
            case "ping":
                pass
            case _:
                raise ProtocolError(f"{str(op)[:40]!r} is no request. The connection was closed.")
        return {}, ()

    def _who(self, connection: Connection) -> Trainer:
        trainer = self._roster.get(connection.lock)
        if trainer is None:
            raise ProtocolError("A request came before its sender said who it is. The connection was closed.")
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
            raise ProtocolError("A trainer's name is none. The connection was closed.")
        known = self._roster.get(lock)
        if known is not None and known.attempt not in (None, attempt):
            raise ProtocolError(f"{lock} is of attempt {known.attempt}. The connection was closed.")
        every = number(message, "keep_every")
        trainer = Trainer(
            lock=lock,
            rank=number(message, "rank", 0, MAX_RANK),
            pid=connection.pid,
            world=number(message, "world", 1, MAX_RANK),
            ranks=_ranks(message),
            attempt=attempt,
            keep=Keep(last=number(message, "keep_last", 1), every_steps=every or None),
            linger_s=seconds(message, "linger_s"),
            environment=environment,
            stacks_signal=number(message, "stacks_signal", 0, 64),
            kill_when_stuck=flag(message, "kill_when_stuck"),
            remote=remote_of(message),
            grace_s=seconds(message, "grace_s"),
        )
        self._roster.watch(trainer)
        connection.lock = lock
        self._hear_of_run(message)
        if storage := _storage(message):
            give_options(self._run_folder.url, storage)

    def _started(self, message: dict[str, Any]) -> None:
        parent = AttemptName.parse(text(message, "parent", 64))
        if parent is None:
            raise ProtocolError("What an attempt went on from has no name. The connection was closed.")
        self._queue.taken_up(parent, *_place(message))

    def _hear_of_run(self, message: dict[str, Any]) -> None:
        """Where who asks has found the run; a trainer says it once, with its name."""
        if "run" in message:
            self._run_folder.told(text(message, "run", _MAX_PATH))

    def _keep(self, trainer: Trainer, message: dict[str, Any]) -> Answer:
        """A region of constants that survived: this trainer's snapshots go on naming it."""
        name = text(message, "name", 64)
        for held in self._regions.constants_of(trainer.rank):
            if held.slot.name == name:
                held.writer = trainer.lock
                row = self._regions.row(held, trainer.pid, trainer.lock)
                return {"slots": [row]}, [held.slot.descriptor]
        raise KeeperError(f"{name} is not here any more. No snapshot may name it; each holds its own.")

    def _surviving(self, trainer: Trainer) -> Answer:
        """Slots with a sealed snapshot, and the constants that they share."""
        found = [held for held in self._regions.of_rank(trainer.rank) if held.sealed() is not None]
        constants = [held for held in self._regions.constants_of(trainer.rank) if held.sealed() is not None]
        found = (constants + found)[:MAX_DESCRIPTORS]
        rows = [self._regions.row(held, trainer.pid, trainer.lock) for held in found]
        return {"slots": rows}, [held.slot.descriptor for held in found]

    def _same_boundary(self, trainer: Trainer, message: dict[str, Any]) -> Answer:
        """The slots of other ranks with the snapshot of one boundary, to be looked at: those of the lowest
        ranks from `first` on, as many as one answer takes."""
        content = (AttemptName.parse(text(message, "attempt", 64)), *_place(message))
        first = number(message, "first", 0, MAX_RANK)
        by_rank: dict[int, HeldRegion] = {}
        for held in self._regions.slots():
            sealed = held.sealed() if held.slot.rank >= first else None
            if sealed is not None and sealed.content == content and held.slot.rank != trainer.rank:
                by_rank[held.slot.rank] = held
        found = [by_rank[rank] for rank in sorted(by_rank)[:MAX_DESCRIPTORS]]
        return {"is_all": len(found) == len(by_rank)}, [held.slot.descriptor for held in found]

    def _adopt(self, descriptors: list[int]) -> Answer:
        names, ranks, wrong = [], set(), []
        while descriptors:
            try:
                slot = self._regions.adopt_memfd(descriptors.pop()).slot
                names.append(slot.name)
                ranks.add(slot.rank)
            except (DamagedError, FormatError, KeeperError, OSError) as error:
                wrong.append(str(error))
        for rank in ranks:
            if not self._roster.of_rank(rank):
                self._queue.rescue(rank)  # a dead trainer's, of a keeper that was replaced
        self._ledger.add(None, Event.ADOPT, slots=names, kind="memfd")
        if wrong:
            raise KeeperError(f"A slot that was handed over is none, all others were taken: {wrong[0]}")
        return {"names": names}, ()

    def _release(self, trainer: Trainer, message: dict[str, Any]) -> None:
        for held in map(self._regions.get, names(message, "names")):
            # One that another living trainer was given since stays that one's.
            if held and (held.writer == trainer.lock or not self._regions.is_written(held)):
                held.retired, held.writer = True, ""

    def _discard(self) -> None:
        if len(self._roster):
            raise KeeperError("A trainer of this run lives: nothing is discarded.")
        self._exit.discard()

    def _event(self, trainer: Trainer, message: dict[str, Any]) -> None:
        event = message.get("event")
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise ProtocolError("An event has no name. The connection was closed.")
        fields = {"rank": trainer.rank} | {key: value for key, value in event.items() if key != "event"}
        self._ledger.add(str(trainer.attempt), event["event"], **fields)

    def _status(self, trainer: Trainer | None, message: dict[str, Any]) -> Answer:
        self._hear_of_run(message)
        if message.get("again") is True:
            self._queue.try_again()
            self._outcomes.forget_failures(self._queue.given_up())
        if message.get("awaited") is True:
            self._queue.hurry()
        if trainer is not None and message.get("common"):
            trainer.common = _boundaries(message)
        attempt = trainer.attempt if trainer is not None else None
        committed = self._queue.committed(attempt)
        status = self._outcomes.status(self._queue, str(attempt) if attempt else None, committed)
        return {"status": replace(status, remote=self._mirroring.status()).to_dict()}, ()

    def _described(self) -> dict[str, Any]:
        """What `flashckpt keepers` shows."""
        return {
            "pid": os.getpid(),
            "run": self._run_folder.url,
            "run_is_gone": self._exit.run_is_gone,
            "is_saving": self._queue.is_pending(),
            "lingers_s": round(self._exit.lingers_s, 1),
            "remote": None if (remote := self._mirroring.status()) is None else asdict(remote),
            "trainers": [
                {"pid": each.pid, "rank": each.rank, "attempt": str(each.attempt) if each.attempt else None}
                for each in self._roster.all()
            ],
            "regions": [_described(held) for held in self._regions.everything()],
        }


def _place(message: dict[str, Any]) -> tuple[int, int]:
    """A step and its boundary."""
    return number(message, "step", 0, MAX_STEP), number(message, "boundary", 0, MAX_BOUNDARY)


def _described(held: HeldRegion) -> dict[str, Any]:
    sealed = held.sealed()
    slot = held.slot
    return {
        "name": slot.name,
        "kind": held.kind,
        "num_bytes": slot.header.num_bytes,
        "constants": slot.header.holds_constants,
        "step": None if sealed is None else sealed.step,
        "attempt": None if sealed is None else str(sealed.attempt),
        "committed": sealed is not None and sealed.is_persisted,
    }


def _boundaries(message: dict[str, Any]) -> tuple[int, ...]:
    found = message["common"]
    if not isinstance(found, list) or len(found) > _MOST_COMMON:
        raise ProtocolError("The boundaries that all nodes have are none. The connection was closed.")
    return tuple(number({"boundary": each}, "boundary", 0, MAX_BOUNDARY) for each in found)


def _storage(message: dict[str, Any]) -> dict[str, str | int | float | bool]:
    """What a trainer opens the run's store with; empty where it was given nothing."""
    found = message.get("storage", {})
    if not isinstance(found, dict) or not all(isinstance(each, (str, int, float)) for each in found.values()):
        raise ProtocolError("The options of a store are none. The connection was closed.")
    return found


def _ranks(message: dict[str, Any]) -> tuple[int, ...]:
    """The ranks of a trainer's node."""
    ranks = message.get("ranks")
    if not isinstance(ranks, list) or not 1 <= len(ranks) <= _MOST_RANKS:
        raise ProtocolError("A trainer's ranks are none. The connection was closed.")
    world = number(message, "world", 1, MAX_RANK)
    found = {number({"ranks": each}, "ranks", 0, world - 1) for each in ranks}
    if number(message, "rank", 0, MAX_RANK) not in found:
        raise ProtocolError("A trainer is none of its node's ranks. The connection was closed.")
    return tuple(sorted(found))


# ---- what became of what was asked for


class Outcomes:
    """Bounded memory of outcomes, newest last, each with the attempt that it belongs to: a branch may
    train on from an older step, and what another attempt committed is not what it waits for."""

    def __init__(self, keeper: str) -> None:
        self._keeper = keeper
        self._committed: list[tuple[str, int]] = []
        self._failures: dict[tuple[str, int], tuple[str, Failure]] = {}
        self._torn: list[tuple[str, TornSnapshot]] = []
        self._diverged: dict[str, tuple[str, ...]] = {}
        self._counts: Counter[str] = Counter()
        self.superseded_by: str | None = None

    def count(self, name: str, number: int = 1) -> None:
        self._counts[name] += number

    def told(self, job: StepJob, outcome: StepOutcome) -> None:
        """A try of a step has come to an end."""
        if outcome.state is JobState.COMMITTED:
            self._commit(job, outcome)
        elif outcome.void is Void.TORN:
            self._tear(job, outcome)
        elif outcome.state is JobState.FAILED or outcome.void in (Void.SUPERSEDED, Void.DIVERGED):
            self._fail(job, outcome)
            self._diverge(outcome)

    def _commit(self, job: StepJob, outcome: StepOutcome) -> None:
        """A committed step settles its attempt's failures of all steps up to it."""
        self.count("committed")
        self.count("persisted_bytes", outcome.num_bytes)
        if outcome.num_bytes:
            self.count("direct" if outcome.direct else "buffered")
        row = (outcome.attempt, job.step)
        others = [each for each in self._committed if each != row]
        self._committed = [*others, row][-_MOST_COMMITTED:]
        self._failures = {
            key: (attempt, each)
            for key, (attempt, each) in self._failures.items()
            if each.step > job.step or attempt != outcome.attempt
        }

    def _fail(self, job: StepJob, outcome: StepOutcome) -> None:
        self.count("failed")
        for each in job.members():
            failure = Failure(
                job.step, each.generation, outcome.message[:_MOST_TEXT], outcome.errno, bool(outcome.diverged)
            )
            self._failures[each.slot.name, each.generation] = (outcome.attempt, failure)
        while len(self._failures) > _MOST_FAILURES:
            del self._failures[next(iter(self._failures))]

    def _diverge(self, outcome: StepOutcome) -> None:
        if outcome.diverged:
            names = {*self._diverged.pop(outcome.attempt, ()), *outcome.diverged}
            if EVERY in names or len(json.dumps(list(names))) > _MOST_NAMES_BYTES:
                names = {EVERY}
            self._diverged = {outcome.attempt: tuple(sorted(names))}

    def _tear(self, job: StepJob, outcome: StepOutcome) -> None:
        self.count("torn")
        names = tuple(name[:_MOST_TEXT] for _, name in outcome.leaves[:_MOST_LEAVES])
        for each in job.members():
            if each.slot.name == outcome.slot:
                self._failures.pop((outcome.slot, each.generation), None)
                torn = TornSnapshot(job.step, each.generation, outcome.slot, names)
                self._torn = [*self._torn, (outcome.attempt, torn)][-_MOST_TORN:]

    def forget_failures(self, given_up: set[tuple[str, int]]) -> None:
        """All but those of these slots and generations, which nobody tries again."""
        self._failures = {key: each for key, each in self._failures.items() if key in given_up}

    def status(self, queue: Queue, attempt: str | None, committed: Iterable[int]) -> Status:
        """What concerns an attempt (None: all). `committed` are steps of it that slots say are."""

        def concerns(owner: str) -> bool:
            return attempt is None or owner in (attempt, "")

        steps = {step for owner, step in self._committed if concerns(owner)} | set(committed)
        waiting = sorted(queue.waiting())[:_MOST_COMMITTED]
        failed = {each.step for _, each in self._failures.values()}
        return Status(
            keeper=self._keeper,
            committed=tuple(sorted(steps)[-_MOST_COMMITTED:]),
            newest_committed=max(steps, default=None),
            persisting=queue.writing.step if queue.writing is not None else None,
            waiting=tuple(waiting),
            for_others=tuple(sorted(queue.waiting(for_others=True))[:_MOST_COMMITTED]),
            failing=tuple(step for step in waiting if step in failed),
            failures=tuple(each for owner, each in self._failures.values() if concerns(owner)),
            torn=tuple(each for owner, each in self._torn if concerns(owner)),
            diverged=tuple(name for of, each in self._diverged.items() if concerns(of) for name in each),
            superseded_by=self.superseded_by,
            progress_bytes=queue.progress_bytes,
            counts=dict(self._counts + Counter(audited=queue.sound)),
        )
