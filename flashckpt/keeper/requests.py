"""What trainers ask, and what they are answered. Owns the meaning of each request; does nothing long: one for
memory is answered by `allocation` once it was taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flashckpt.errors import DamagedError, FormatError, KeeperError
from flashckpt.events import Event
from flashckpt.format.names import MAX_RANK, MAX_STEP, AttemptName
from flashckpt.keeper.allocation import Allocation
from flashckpt.keeper.protocol import (
    MAX_DESCRIPTORS,
    PROTOCOL,
    ProtocolError,
    Status,
    close_all,
    flag,
    number,
    seconds,
    text,
)
from flashckpt.keeper.server import Connection
from flashckpt.keeper.trainers import Roster, Trainer
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.runtime import check_name
from flashckpt.options import Keep
from flashckpt.persist.ledger import Ledger

_MOST_SLOT_BYTES = 1 << 46
MAX_PATH = 4096
_MOST_RANKS = 1024

Reply = tuple[dict[str, Any], Sequence[int]]


class Requests:
    """Answers one message at a time, in the keeper's loop."""

    def __init__(
        self,
        regions: Regions,
        roster: Roster,
        ledger: Ledger,
        allocation: Allocation,
        status: Callable[[AttemptName | None, bool], Status],
        told: Callable[[str], None],
        try_again: Callable[[], None],
        taken_up: Callable[[str, int], None],
        describe: Callable[[], dict[str, Any]],
        discard: Callable[[], None],
    ) -> None:
        self._regions = regions
        self._roster = roster
        self._ledger = ledger
        self._allocation = allocation
        self._status, self._told, self._try_again = status, told, try_again
        self._taken_up = taken_up
        self._describe, self._discard = describe, discard

    def answer(self, connection: Connection, message: dict[str, Any], descriptors: list[int]) -> Reply | None:
        """None for a request for memory, whose answer comes once it was taken. Raises ProtocolError for what
        is no request, KeeperError or OutOfRoomError for what cannot be."""
        op = message.get("op")
        if op != "adopt":
            close_all(descriptors)
            descriptors.clear()
        match op:
            case "hello":
                return self._hello(connection, message)
            case "memory":
                self._allocation.ask(connection, self._who(connection), message)
                return None
            case "keep":
                return self._keep(self._who(connection), message)
            case "surviving":
                return self._surviving(self._who(connection))
            case "started":
                self._who(connection)
                return self._started(message)
            case "adopt":
                return self._adopt(descriptors)
            case "release":
                return self._release(message)
            case "event":
                return self._event(self._who(connection), message)
            case "closing":
                return self._closing(self._who(connection))
            case "status":
                self._hear_of_run(message)
                if message.get("again") is True:
                    self._try_again()
                known, awaited = self._roster.get(connection.lock), message.get("awaited") is True
                return {"status": self._status(known.attempt if known else None, awaited).to_dict()}, ()
            case "describe":
                return {"keeper": self._describe()}, ()
            case "discard":
                if len(self._roster):
                    raise KeeperError("A trainer of this run lives: nothing is discarded.")
                self._discard()
                return {}, ()
            case "ping":
                return {}, ()
        raise ProtocolError(f"{str(op)[:40]!r} is no request. The connection was closed.")

    def _who(self, connection: Connection) -> Trainer:
        trainer = self._roster.get(connection.lock)
        if trainer is None:
            raise ProtocolError("A request came before its sender said who it is. The connection was closed.")
        return trainer

    def _hello(self, connection: Connection, message: dict[str, Any]) -> Reply:
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
        )
        self._roster.watch(trainer)
        connection.lock = lock
        self._hear_of_run(message)
        return {}, ()

    def _hear_of_run(self, message: dict[str, Any]) -> None:
        """Where who asks has found the run; a trainer says it once, with its name."""
        if "run" in message:
            self._told(text(message, "run", MAX_PATH))

    def _keep(self, trainer: Trainer, message: dict[str, Any]) -> Reply:
        """A region of constants that survived: this trainer's snapshots go on naming it."""
        name = text(message, "name", 64)
        for held in self._regions.constants_of(trainer.rank):
            if held.slot.name == name:
                held.writer = trainer.lock
                row = self._regions.row(held, trainer.pid, trainer.lock)
                return {"slots": [row]}, [held.slot.descriptor]
        raise KeeperError(f"{name} is not here any more. No snapshot may name it; each holds its own.")

    def _surviving(self, trainer: Trainer) -> Reply:
        """Slots with a sealed snapshot, and the constants that they share."""
        found = [held for held in self._regions.of_rank(trainer.rank) if held.sealed() is not None]
        shared = [held for held in self._regions.constants_of(trainer.rank) if held.sealed() is not None]
        found = (shared + found)[:MAX_DESCRIPTORS]
        rows = [self._regions.row(held, trainer.pid, trainer.lock) for held in found]
        return {"slots": rows}, [held.slot.descriptor for held in found]

    def _started(self, message: dict[str, Any]) -> Reply:
        step = number(message, "step", 0, MAX_STEP)
        loaded = message.get("loaded")
        if isinstance(loaded, str):
            self._taken_up(loaded, step)
        return {}, ()

    def _adopt(self, descriptors: list[int]) -> Reply:
        names, wrong = [], []
        while descriptors:
            try:
                names.append(self._regions.adopt_memfd(descriptors.pop()).slot.name)
            except (DamagedError, FormatError, KeeperError, OSError) as error:
                wrong.append(str(error))
        self._ledger.add(None, Event.ADOPT, slots=names, kind="memfd")
        if wrong:
            raise KeeperError(f"A slot that was handed over is none, all others were taken: {wrong[0]}")
        return {"names": names}, ()

    def _release(self, message: dict[str, Any]) -> Reply:
        names = message.get("names")
        if not isinstance(names, list) or len(names) > MAX_DESCRIPTORS:
            raise ProtocolError("A list of slots is none. The connection was closed.")
        for name in names:
            held = self._regions.get(name) if isinstance(name, str) else None
            if held is not None:
                held.retired, held.writer = True, ""
        return {}, ()

    def _event(self, trainer: Trainer, message: dict[str, Any]) -> Reply:
        event = message.get("event")
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise ProtocolError("An event has no name. The connection was closed.")
        fields = {key: value for key, value in event.items() if key != "event"}
        self._ledger.add(str(trainer.attempt), event["event"], **fields)
        return {}, ()

    def _closing(self, trainer: Trainer) -> Reply:
        trainer.closing = True
        return {}, ()


def _ranks(message: dict[str, Any]) -> tuple[int, ...]:
    """The ranks of a trainer's node."""
    ranks = message.get("ranks")
    if not isinstance(ranks, list) or not 1 <= len(ranks) <= _MOST_RANKS:
        raise ProtocolError("A trainer's ranks are none. The connection was closed.")
    found = {number({"ranks": each}, "ranks", 0, number(message, "world", 1, MAX_RANK) - 1) for each in ranks}
    if number(message, "rank", 0, MAX_RANK) not in found:
        raise ProtocolError("A trainer is none of its node's ranks. The connection was closed.")
    return tuple(sorted(found))
