"""Memory for a trainer: one request, one answer.

Owns the requests that are not answered yet, one after the other for each rank, and the sums by which a set
is reserved for the whole node before any of it is taken. A thread a rank takes the memory; everything that
the keeper knows changes in its loop alone (`next`). A trainer that dies, or hangs up, while it waits has what
was made for it taken back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flashckpt import crashpoints
from flashckpt.errors import FlashckptError, KeeperError, OutOfRoomError
from flashckpt.format.names import AttemptName
from flashckpt.keeper.protocol import Connection, ProtocolError, names, number, numbers, text
from flashckpt.keeper.trainers import Trainer
from flashckpt.memory import numa, room
from flashckpt.memory.control_page import SlotSize
from flashckpt.memory.held_regions import MAX_REGIONS, HeldRegion, Made, Regions
from flashckpt.memory.region import MEMFD
from flashckpt.memory.slot import Sealed, SlotState
from flashckpt.options import MOST_SLOTS
from flashckpt.persist.worker import Worker

_MOST_SLOT_BYTES = 1 << 46
# Snapshots held where nobody says how many: the newest sealed, the one being written, the one being
# persisted, and with several ranks one that not all of them have yet.
_SLOTS_ALONE, _SLOTS_OF_SEVERAL, _FEWEST = 3, 4, 2
# Where what has been released is still to leave: the next look whether it has.
_LOOK_S = 0.1
# Of memory that was there when it was reserved, and was not when it was taken.
_TRIES = 3

SLOTS, CONSTANTS = "slots", "constants"


@dataclass(eq=False)
class _MemoryRequest:
    """What was asked for. `count` is 0 where the keeper decides; `needed` is what a slot has to hold,
    `wanted` what it is to have room for where there is memory; `have` names what the trainer writes; `node`
    is the NUMA node that new memory comes from where it has some."""

    connection: Connection
    trainer: Trainer
    purpose: str
    count: int
    needed: SlotSize
    wanted: SlotSize
    have: frozenset[str]
    node: int
    look_at: float = 0.0
    tries: int = 0
    given: list[HeldRegion] = field(default_factory=list)

    @classmethod
    def parsed(cls, connection: Connection, trainer: Trainer, message: dict[str, Any]) -> _MemoryRequest:
        """Raises ProtocolError."""
        needed = SlotSize(*numbers(message, "needed", 2, _MOST_SLOT_BYTES))
        wanted = SlotSize(*numbers(message, "wanted", 2, _MOST_SLOT_BYTES))
        purpose = text(message, "purpose", 16)
        if purpose not in (SLOTS, CONSTANTS):
            raise ProtocolError(
                f"{purpose!r} is nothing that memory is asked for. The connection was closed."
            )
        return cls(
            connection,
            trainer,
            purpose,
            number(message, "count", 0, MOST_SLOTS),
            needed,
            SlotSize(max(needed[0], wanted[0]), max(needed[1], wanted[1])),
            frozenset(names(message, "have")),
            number(message, "node", numa.NO_NODE, numa.MOST_NODES - 1),
        )


@dataclass(frozen=True)
class _Plan:
    """What is to be made for a request, beside what it is given of what is here."""

    count: int
    size: SlotSize
    is_memfd: bool = False


class Allocation:
    """`is_needed` says whether a snapshot is the newest of its rank or still to be persisted; `wake` is the
    eventfd that wakes the keeper's loop; `stands` says whether this is still the keeper: otherwise what is
    made here may be another one's, and is neither given nor taken back."""

    def __init__(
        self,
        regions: Regions,
        is_needed: Callable[[HeldRegion, Sealed], bool],
        wake: int,
        available: Callable[[], int] = room.available_bytes,
        stands: Callable[[], bool] = lambda: True,
    ) -> None:
        self._regions, self._is_needed, self._stands = regions, is_needed, stands
        self._wake, self._available = wake, available
        self._waiting: dict[int, deque[_MemoryRequest]] = {}
        self._workers: dict[int, Worker] = {}
        # Bytes that each rank is still to take. Its own thread counts them down.
        self._reserved: dict[int, int] = {}
        self._guard = threading.Lock()
        self._making: dict[int, str] = {}  # for what, by rank
        self._decided_for: AttemptName | None = None
        self._slots_each = 0

    @property
    def busy(self) -> bool:
        """Whether something is asked and not answered yet."""
        return any(self._waiting.values())

    def ask(self, connection: Connection, trainer: Trainer, message: dict[str, Any]) -> None:
        """Take up a request, whose answer comes from `next`. Raises ProtocolError for what is none."""
        request = _MemoryRequest.parsed(connection, trainer, message)
        self._waiting.setdefault(trainer.rank, deque()).append(request)

    def next(self) -> None:
        """Hand over what was made, and begin what can be."""
        if not self._stands():
            return
        for rank, waiting in self._waiting.items():
            worker = self._workers.get(rank)
            if worker is not None:
                worker.collect()
            while waiting and not (worker is not None and worker.busy):
                if waiting[0].connection.is_open and not self._begin(waiting[0]):
                    break  # it waits for what is to leave, or is being made
                waiting.popleft()
                worker = self._workers.get(rank)

    # ---- what a request comes to

    def _begin(self, request: _MemoryRequest) -> bool:
        """Whether it is answered already."""
        if time.monotonic() < request.look_at:
            return False
        try:
            request.given, plan = self._decided(request)
            if plan is not None:
                self._make(request, plan)
                return False
            self._give(request)
        except OutOfRoomError as error:
            if any(map(self._is_leaving, self._regions.of_rank(request.trainer.rank))):
                request.look_at = time.monotonic() + _LOOK_S
                return False
            request.connection.refuse(error)
        except (FlashckptError, OSError, RuntimeError) as error:  # the last where there are no more threads
            request.connection.refuse(_told(error))
        return True

    def _decided(self, request: _MemoryRequest) -> tuple[list[HeldRegion], _Plan | None]:
        """What is given of what is here, and what is made for the rest. OutOfRoomError where it cannot be."""
        if request.purpose == CONSTANTS:
            return self._region_for_constants(request)
        return self._slots(request)

    def _slots(self, request: _MemoryRequest) -> tuple[list[HeldRegion], _Plan | None]:
        """Room to grow before none, then fewer slots; then those that others left and that are too large."""
        trainer, lock = request.trainer, request.trainer.lock
        mine = [each for each in self._regions.of_rank(trainer.rank) if self._may_be_given(each, request)]
        large_enough = [each for each in mine if each.slot.size.holds(request.needed)]
        # What this trainer was given before comes first; of what others left, the smallest.
        large_enough.sort(key=lambda each: (each.writer != lock, each.slot.size.image_bytes))
        most = 2 * request.wanted.image_bytes
        fit = [each for each in large_enough if each.writer == lock or each.slot.size.image_bytes <= most]
        self._clear(each for each in mine if each not in large_enough)
        has = self._has(request)
        count = 0
        for size, is_few in ((request.wanted, False), (request.needed, False), (request.needed, True)):
            count = self._count(request, size, has + len(fit))
            count = min(count, _FEWEST) if is_few else count
            missing = count - has - len(fit)
            if missing <= 0:
                return fit[: max(count - has, 0)], None
            if self._has_room(request, count, missing, size):
                self._clear(each for each in large_enough if each not in fit)
                return fit, _Plan(missing, size, self._has_memfd(trainer))
        if has + len(large_enough) >= count:
            return large_enough[: count - has], None
        num_bytes = request.needed.region_bytes
        available = len(large_enough) * num_bytes + self._left_for(trainer.rank)
        raise room.out_of_room((count - has) * num_bytes, available)

    def _region_for_constants(self, request: _MemoryRequest) -> tuple[list[HeldRegion], _Plan | None]:
        trainer, size = request.trainer, request.needed
        for each in self._regions.constants_of(trainer.rank):
            is_empty = each.writer == trainer.lock and each.state() is SlotState.FREE
            if is_empty and each.slot.name not in request.have and each.slot.size.holds(size):
                return [each], None
        if not self._has_room(request, 1, 1, size):
            raise room.out_of_room(size.region_bytes, self._left_for(trainer.rank))
        return [], _Plan(1, size)

    def _may_be_given(self, held: HeldRegion, request: _MemoryRequest) -> bool:
        is_others = held.writer != request.trainer.lock and self._regions.is_written(held)
        is_fit = held.kind == MEMFD or not self._has_memfd(request.trainer)
        return not is_others and held.slot.name not in request.have and is_fit

    def _has(self, request: _MemoryRequest) -> int:
        """How many slots the trainer has that are large enough."""
        held = self._regions.of_rank(request.trainer.rank)
        return sum(each.slot.name in request.have and each.slot.size.holds(request.needed) for each in held)

    def _has_memfd(self, trainer: Trainer) -> bool:
        """Whether its constants stand in a memfd: snapshots in memory that outlives all processes must not
        name what does not."""
        regions = self._regions.constants_of(trainer.rank)
        return any(each.kind == MEMFD and each.writer == trainer.lock for each in regions)

    def _clear(self, regions: Iterable[HeldRegion]) -> None:
        """Remove slots of another size that are nobody's and hold nothing that is needed, before others are
        made: their room may be what these need."""
        for held in [each for each in regions if not self._regions.is_written(each)]:
            self._regions.remove_spent(held, self._is_needed)

    # ---- sums

    def _count(self, request: _MemoryRequest, size: SlotSize, here: int) -> int:
        """How many slots of a size, of which so many are here: what the user said, else three (or four) where
        those of all ranks of the node fit into half of what is available, else two. Decided once a node."""
        if request.count:
            return request.count
        trainer, ranks = request.trainer, len(request.trainer.ranks)
        if ranks > 1 and self._decided_for == trainer.attempt:
            return self._slots_each
        count = _SLOTS_ALONE if ranks == 1 else _SLOTS_OF_SEVERAL
        available = self._left_for(trainer.rank) + here * size.region_bytes
        fits = ranks * count * size.region_bytes <= available // 2
        self._decided_for, self._slots_each = trainer.attempt, count if fits else _FEWEST
        return self._slots_each

    def _left_for(self, rank: int) -> int:
        """Bytes that may be taken now for a rank: without what others are still to take."""
        with self._guard:
            others = sum(left for each, left in self._reserved.items() if each != rank)
        return self._available() - others

    def _has_room(self, request: _MemoryRequest, count: int, missing: int, size: SlotSize) -> bool:
        """Whether so many more can be made, and up to `count` for each rank of the node whose own are still
        to come."""
        trainer, regions, is_constants = request.trainer, self._regions, request.purpose == CONSTANTS
        for rank in set(trainer.ranks) - {trainer.rank}:
            held = regions.constants_of(rank) if is_constants else regions.of_rank(rank)
            if self._making.get(rank) == request.purpose or any(map(regions.is_written, held)):
                continue
            has = sum(each.slot.size.holds(size) for each in held)
            missing += max(count - has, 0)
        return missing * size.region_bytes <= self._left_for(trainer.rank)

    # ---- making

    def _make(self, request: _MemoryRequest, plan: _Plan) -> None:
        rank = request.trainer.rank
        held = len(self._regions.of_rank(rank)) + len(self._regions.constants_of(rank))
        if held + plan.count > MAX_REGIONS:
            raise KeeperError(f"This keeper already holds {held} of at most {MAX_REGIONS} regions of a rank.")
        if rank not in self._workers:
            self._workers[rank] = Worker(f"memory-{rank}", self._wake)
        taken = {held.slot.index for held in self._regions.of_rank(rank)}
        indexes = [index for index in range(len(taken) + plan.count) if index not in taken][: plan.count]
        with self._guard:
            self._reserved[rank] = plan.count * plan.size.region_bytes
        self._making[rank] = request.purpose
        crashpoints.point("memory.reserved")
        make = partial(
            self._regions.make, rank, [0] if request.purpose == CONSTANTS else indexes, plan.size,
            available=lambda: self._left_for(rank),
            taken=partial(self._count_down, rank),
            holds_constants=request.purpose == CONSTANTS,
            is_memfd=plan.is_memfd,
            node=request.node,
        )  # fmt: skip
        self._workers[rank].submit(make, partial(self._made, request, plan))

    def _count_down(self, rank: int, num_bytes: int) -> None:
        with self._guard:
            self._reserved[rank] = max(0, self._reserved.get(rank, 0) - num_bytes)

    def _made(self, request: _MemoryRequest, plan: _Plan, made: Made | BaseException) -> None:
        rank = request.trainer.rank
        with self._guard:
            self._reserved.pop(rank, None)
        self._making.pop(rank, None)
        if isinstance(made, BaseException):
            made = Made((), KeeperError(f"No memory could be taken: {made}"))
        error, held = made.error, list[HeldRegion]()
        for found in made.regions:
            try:
                held.append(self._regions.take(found))
            except FlashckptError as refused:
                error = refused
        crashpoints.point("memory.made")
        if not self._stands():
            return
        if any(self._regions.get(each.slot.name) is not each for each in request.given):
            return  # it was nobody's, and went meanwhile: decided anew, with what was made
        if request.purpose == SLOTS and len(held) < plan.count:
            # Fewer do, where these are enough to go on with.
            has = self._has(request) + len(request.given) + len(held)
            error = None if has >= _FEWEST else error
        if error is None:
            self._give(request, held)
        else:
            self._take_back(held)
            if isinstance(error, OutOfRoomError) and request.tries < _TRIES:
                request.tries += 1  # others took it meanwhile: decided anew by what is left
                return
            request.connection.refuse(_told(error))
        self._waiting[rank].popleft()

    # ---- giving

    def _give(self, request: _MemoryRequest, made: Sequence[HeldRegion] = ()) -> None:
        """Hand the regions over. What was made for somebody who is not there any more is taken back."""
        trainer, given = request.trainer, [*request.given, *made]
        rank = trainer.rank
        try:
            rows = [self._regions.row(held, trainer.pid, trainer.lock) for held in given]
            answer = {"slots": rows, "available": max(0, self._left_for(rank))}
            is_told = request.connection.tell(answer, [held.slot.descriptor for held in given])
        except FlashckptError as error:
            request.connection.refuse(error)
            is_told = False
        if not is_told:
            self._take_back(made)
            return
        for held in given:
            held.retired = False
            held.writer = trainer.lock
        for held in self._regions.of_rank(rank) if request.purpose == SLOTS else ():
            # What was given just now is not, though its trainer may have died since it was told.
            if held not in given and not self._regions.is_written(held):
                held.retired = True  # of an earlier attempt, and not wanted
        crashpoints.point("memory.given")

    def _take_back(self, made: Sequence[HeldRegion]) -> None:
        for held in made:
            if held.state() is SlotState.FREE:
                self._regions.remove(held)

    def _is_leaving(self, held: HeldRegion) -> bool:
        """Whether a slot that no trainer uses any more goes soon: not where one writes it all the same, nor
        where it holds the newest snapshot of its rank, or one that cannot be persisted."""
        state = held.state()
        if not held.retired or (state is not None and state.is_begun):
            return False
        sealed = held.sealed()
        if sealed is None or not self._is_needed(held, sealed):
            return True
        return held.slot.wants_persist(sealed.generation) and held.slot.failed[0] != sealed.generation


def _told(error: Exception) -> FlashckptError:
    """In words for whoever asked."""
    if isinstance(error, FlashckptError):
        return error
    return KeeperError(f"Memory for snapshots could not be taken: {error}. None is kept until it is.")
