"""What trainers ask, and what they are answered. Owns the meaning of each request; does nothing long:
memory is taken by a worker, and who asks is told to ask again."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from flashckpt.errors import DamagedError, FlashckptError, FormatError, KeeperError, OutOfRoomError
from flashckpt.events import Event
from flashckpt.format.layout import PAGE
from flashckpt.format.names import MAX_RANK, MAX_STEP, AttemptName
from flashckpt.keeper.protocol import (
    MAX_DESCRIPTORS,
    PROTOCOL,
    ProtocolError,
    Status,
    close_all,
    flag,
    number,
    numbers,
    seconds,
    text,
)
from flashckpt.keeper.regions import HeldRegion, Made, Regions
from flashckpt.keeper.server import Connection
from flashckpt.keeper.trainers import Roster, Trainer
from flashckpt.memory import room
from flashckpt.memory.page import State, round_up
from flashckpt.memory.region import MEMFD, NAMED
from flashckpt.memory.runtime import check_name
from flashckpt.memory.slot import Sealed
from flashckpt.options import MOST_SLOTS, Keep
from flashckpt.persist.ledger import Ledger
from flashckpt.persist.worker import Worker

_MOST_SLOT_BYTES = 1 << 46
MAX_PATH = 4096
_MOST_RANKS = 1024

Reply = tuple[dict[str, Any], Sequence[int]]


class Desk:
    """Answers one message at a time, in the keeper's loop."""

    def __init__(
        self,
        regions: Regions,
        roster: Roster,
        ledger: Ledger,
        maker: Worker,
        status: Callable[[AttemptName | None, bool], Status],
        told: Callable[[str], None],
        try_again: Callable[[], None],
        is_needed: Callable[[HeldRegion, Sealed], bool],
        taken_up: Callable[[str, int], None],
        describe: Callable[[], dict[str, Any]],
        discard: Callable[[], None],
    ) -> None:
        self._regions = regions
        self._roster = roster
        self._ledger = ledger
        self._maker = maker
        self._status, self._told, self._try_again = status, told, try_again
        self._is_needed, self._taken_up = is_needed, taken_up
        self._describe, self._discard = describe, discard
        # By life lock: what one trainer had no room for, the next of its rank is not to be told.
        self._refusals: dict[str, Exception] = {}
        self._unshared: dict[str, Exception] = {}  # likewise, of a region for shared constants
        self._waiting: set[str] = set()  # life locks of trainers that wait for what others are to leave
        # The region that is being made for a rank to read into. Written by the maker's thread, closed here.
        self._growing: dict[int, int] = {}

    def answer(self, connection: Connection, message: dict[str, Any], descriptors: list[int]) -> Reply:
        """Raises ProtocolError for what is no request, KeeperError or OutOfRoomError for what cannot be."""
        op = message.get("op")
        if op != "adopt":
            close_all(descriptors)
            descriptors.clear()
        match op:
            case "hello":
                return self._hello(connection, message)
            case "slots":
                return self._slots(self._who(connection), message)
            case "constants":
                return self._constants(self._who(connection), message)
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

    def _slots(self, trainer: Trainer, message: dict[str, Any]) -> Reply:
        count = number(message, "count", 1, MOST_SLOTS)
        minimum = number(message, "minimum", 1, count)
        metadata_bytes = number(message, "metadata_bytes", 1, _MOST_SLOT_BYTES)
        image_bytes = number(message, "image_bytes", 1, _MOST_SLOT_BYTES)
        most_image_bytes = number(message, "most_image_bytes", image_bytes, _MOST_SLOT_BYTES)
        least_metadata_bytes, least_image_bytes = numbers(message, "least_bytes", 2, _MOST_SLOT_BYTES)
        mine = self._regions.of_rank(trainer.rank)
        reading = count == 1
        refusal = self._refusals.pop(trainer.lock, None) if reading else self._refusal(trainer, mine)
        # What others left and is more than twice too large goes, unless there is no memory for another.
        spares = not reading and refusal is None
        fit = [
            held
            for held in mine
            if held.slot.metadata_capacity >= least_metadata_bytes
            and least_image_bytes <= held.slot.image_capacity <= most_image_bytes
            and not (spares and held.slot.image_capacity > 2 * image_bytes and held.writer != trainer.lock)
        ]
        if reading:
            fit = self._overwritable(fit, in_need=refusal is not None)
        else:
            # What the trainer writes already comes first: it must not be asked to change without need. Of
            # what others left, the smallest that are large enough.
            fit.sort(key=lambda held: (held.writer != trainer.lock, held.slot.image_capacity))
        if len(fit) >= count or refusal is not None and len(fit) >= minimum:
            self._refusals.pop(trainer.lock, None)
            self._waiting.discard(trainer.lock)
            return self._granted(trainer, fit[:count], () if reading else mine)
        if refusal is not None and trainer.lock not in self._waiting:
            num_bytes = PAGE + round_up(metadata_bytes) + round_up(image_bytes)
            raise self._refused(refusal, fit, num_bytes, minimum)
        if refusal is None and not self._maker.busy:
            missing = count - len(fit)
            smaller = most_image_bytes < _MOST_SLOT_BYTES
            self._make(
                trainer, missing, mine, fit, metadata_bytes, image_bytes, reading=reading, smaller=smaller
            )
        growing = self._growing.get(trainer.rank)
        if not reading or message.get("early") is not True or growing is None:
            return {"preparing": True}, ()
        return {"preparing": True, "image_offset": PAGE + round_up(metadata_bytes)}, (growing,)

    def _refusal(self, trainer: Trainer, mine: Sequence[HeldRegion]) -> Exception | None:
        """What the last try to make slots for a trainer failed of. It stands as long as memory is on its way
        that they may need: then the trainer waits (`_waiting`), and once that has come it is tried again."""
        refusal = self._refusals.pop(trainer.lock, None)
        if isinstance(refusal, OutOfRoomError) and any(map(self._is_leaving, mine)):
            self._refusals[trainer.lock] = refusal
            self._waiting.add(trainer.lock)
        elif trainer.lock in self._waiting:
            self._waiting.discard(trainer.lock)
            return None
        return refusal

    def _is_leaving(self, held: HeldRegion) -> bool:
        """Whether a slot that no trainer uses any more goes soon: not where it holds the newest snapshot of
        its rank, nor one that cannot be persisted."""
        if not held.retired:
            return False
        sealed = held.sealed()
        if sealed is None or not self._is_needed(held, sealed):
            return True
        return held.slot.wants_persist(sealed.generation) and held.slot.failed[0] != sealed.generation

    def _overwritable(self, fit: list[HeldRegion], *, in_need: bool) -> list[HeldRegion]:
        """Slots that a resume may read a step into: empty ones, then those whose snapshot is committed,
        since the resume may yet come down to another. Without room for a new slot (`in_need`) also one
        that is neither the newest nor asked for."""
        empty = [held for held in fit if held.state() is State.FREE]
        sealed = [(held, each) for held in fit if (each := held.sealed()) is not None]
        free = [pair for pair in sealed if pair[1].word.state is State.SEALED]
        done = [held for held, each in free if held.slot.persisted == each.generation]
        if not in_need or empty or done:
            return empty + done
        newest = max((each.age for _, each in sealed), default=None)
        return [
            held
            for held, each in sorted(free, key=lambda pair: pair[1].age)
            if each.age != newest and not held.slot.wants_persist(each.generation)
        ]

    def _make(
        self,
        trainer: Trainer,
        count: int,
        mine: list[HeldRegion],
        fit: list[HeldRegion],
        metadata_bytes: int,
        image_bytes: int,
        *,
        reading: bool,
        smaller: bool,
    ) -> None:
        for held in mine:
            # Of another size and nobody's: it goes first, its room may be what the new one needs.
            if held not in fit and self._is_left(held, reading):
                self._regions.remove(held)
        rank = trainer.rank
        taken = {held.slot.index for held in self._regions.of_rank(rank)}
        indexes = [index for index in range(len(taken) + count) if index not in taken][:count]

        def begun(descriptor: int) -> None:
            if rank not in self._growing:
                self._growing[rank] = os.dup(descriptor)

        def done(made: Made | BaseException) -> None:
            growing = self._growing.pop(rank, None)
            if growing is not None:
                os.close(growing)
            if isinstance(made, BaseException):
                made = Made((), KeeperError(f"Slots could not be made: {made}"))
            for found in made.regions:
                try:
                    held = self._regions.take(found)
                except FlashckptError as error:
                    # More than one keeper holds, of all its trainers: no reason to end for it.
                    made = Made((), error)
                    continue
                if smaller and self._lives_shorter(held):
                    # Nobody gives up what outlives all processes for what does not.
                    self._regions.remove(held)
                    made = Made((), room.out_of_room(found.num_bytes, 0))
            if made.error is not None:
                living = {each.lock for each in self._roster.all()}
                refusals = {**self._refusals, trainer.lock: made.error}
                self._refusals = {lock: each for lock, each in refusals.items() if lock in living}

        # Snapshots in memory that outlives all processes must not name what does not.
        regions = [held for held in self._regions.constants_of(rank) if held.writer == trainer.lock]
        only = MEMFD if any(held.kind == MEMFD for held in regions) else None
        early = begun if reading else None
        self._maker.submit(
            lambda: self._regions.make(rank, indexes, metadata_bytes, image_bytes, begun=early, only=only),
            done,
        )

    def _is_left(self, held: HeldRegion, reading: bool) -> bool:
        """Whether a slot may be removed: it is nobody's, and holds nothing that is needed. A resume that
        reads may still come down to each of those that it has seen; who asks for slots to write has done."""
        if held.state() is State.FREE and not self._regions.is_used(held):
            return True
        sealed = held.sealed()
        if reading or sealed is None or self._regions.is_written(held) or self._is_needed(held, sealed):
            return False
        return sealed.word.state is State.SEALED and held.slot.free(sealed.word)

    def _refused(self, refusal: Exception, fit: list[HeldRegion], num_bytes: int, minimum: int) -> Exception:
        for held in fit:
            if held.state() is State.FREE and not self._regions.is_used(held):
                self._regions.remove(held)
        if isinstance(refusal, OutOfRoomError):
            return room.out_of_room(minimum * num_bytes, len(fit) * num_bytes + refusal.available)
        return KeeperError(f"Slots could not be made: {refusal}. No snapshot is kept until they are.")

    def _granted(self, trainer: Trainer, given: list[HeldRegion], mine: Sequence[HeldRegion]) -> Reply:
        for held in mine:
            # A trainer takes new slots up later than it is given them: until it releases the ones it has,
            # it writes those.
            if held not in given and not self._regions.is_written(held):
                held.retired = True
        for held in given:
            held.retired = False
            held.writer = trainer.lock if mine else held.writer
        rows = [self._regions.row(held, trainer.pid, trainer.lock) for held in given]
        return {"slots": rows}, [held.slot.descriptor for held in given]

    def _constants(self, trainer: Trainer, message: dict[str, Any]) -> Reply:
        """A region for what the trainer's slots share: a new one, or the named one, which survived."""
        if "name" in message:
            name = text(message, "name", 64)
            found = [held for held in self._regions.constants_of(trainer.rank) if held.slot.name == name]
            if not found:
                raise KeeperError(
                    f"{name} is not here any more. No snapshot may name it; each holds its own."
                )
            return self._given(trainer, found)
        metadata_bytes = number(message, "metadata_bytes", 1, _MOST_SLOT_BYTES)
        image_bytes = number(message, "image_bytes", 1, _MOST_SLOT_BYTES)
        made = [
            held
            for held in self._regions.constants_of(trainer.rank)
            if held.writer == trainer.lock and held.state() is State.FREE
            and held.slot.metadata_capacity >= metadata_bytes and held.slot.image_capacity >= image_bytes
        ]  # fmt: skip
        if made:
            return self._given(trainer, made[:1])
        refusal = self._unshared.pop(trainer.lock, None)
        if refusal is not None:
            raise refusal if isinstance(refusal, OutOfRoomError) else KeeperError(str(refusal))
        if not self._maker.busy:
            self._make_constants(trainer, metadata_bytes, image_bytes)
        return {"preparing": True}, ()

    def _make_constants(self, trainer: Trainer, metadata_bytes: int, image_bytes: int) -> None:
        rank, lock = trainer.rank, trainer.lock

        def done(made: Made | BaseException) -> None:
            error = made if isinstance(made, BaseException) else made.error
            for found in made.regions if isinstance(made, Made) else ():
                try:
                    held = self._regions.take(found)
                except FlashckptError as refused:
                    error = refused
                    continue
                held.writer = lock
                if error is None and self._lives_shorter(held):
                    error = KeeperError("there is no room for it where the slots are")
                if error is not None:
                    self._regions.remove(held)
            if error is not None:
                living = {each.lock for each in self._roster.all()}
                why = error if isinstance(error, Exception) else KeeperError(str(error))
                refusals = {**self._unshared, lock: why}
                self._unshared = {lock: each for lock, each in refusals.items() if lock in living}

        only = NAMED if any(held.kind == NAMED for held in self._regions.of_rank(rank)) else None
        self._maker.submit(
            lambda: self._regions.make(
                rank, [0], metadata_bytes, image_bytes, holds_constants=True, only=only
            ),
            done,
        )

    def _lives_shorter(self, held: HeldRegion) -> bool:
        """Whether a region goes with its last process where slots of its rank, which are to need it or are
        to be replaced by it, do not."""
        slots = self._regions.of_rank(held.slot.rank)
        return held.kind == MEMFD and any(each.kind == NAMED for each in slots)

    def _given(self, trainer: Trainer, regions: Sequence[HeldRegion]) -> Reply:
        for held in regions:
            held.writer = trainer.lock
        rows = [self._regions.row(held, trainer.pid, trainer.lock) for held in regions]
        return {"slots": rows}, [held.slot.descriptor for held in regions]

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
