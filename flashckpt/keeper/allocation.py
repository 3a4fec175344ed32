"""Allocation of slots and regions of constants to trainers.

Owns the open requests, which are served one after the other for each rank, and the sums by which memory is
reserved for the whole node before any is taken. A thread for each rank takes the memory; the keeper's state
changes only in its loop (`ask`, `next`). A trainer repeats its request until it has the answer. Regions for a
trainer that dies or does not repeat it are removed again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flashckpt import crashpoints
from flashckpt.errors import FlashckptError, KeeperError, OutOfSpaceError
from flashckpt.format.names import AttemptName
from flashckpt.keeper.protocol import LATER, Answer, ProtocolError, names, number, numbers, text
from flashckpt.memory import memory_budget
from flashckpt.memory.held_regions import MAX_REGIONS, HeldRegion, Made, Regions
from flashckpt.memory.region import MEMFD, SlotSize
from flashckpt.memory.slot import Sealed, SlotState
from flashckpt.options import MOST_SLOTS
from flashckpt.persist.job import Trainer
from flashckpt.threads import Worker

_MOST_SLOT_BYTES = 1 << 46
# The default number of slots: for the newest sealed snapshot, the one being written, the one being persisted,
# and among several ranks one that not all of them have yet.
_SLOTS_ALONE, _SLOTS_OF_SEVERAL, _FEWEST = 3, 4, 2
_RETRY_S = 0.1  # while released slots are still to go
_TRIES = 3  # if memory that was reserved was gone when it was taken
_ABANDONED_S = 10.0  # a trainer that waits repeats its request many times a second

SLOTS, CONSTANTS = "slots", "constants"


@dataclass(eq=False)
class _MemoryRequest:
    """A request for memory. `count`: 0 if the keeper decides. `needed`: the least size of a slot, `wanted`:
    the size if memory allows. `have`: the names of the trainer's slots. `node`: the preferred NUMA node.
    `given`: the regions that it gets, all of them once it `is_granted`. `error`: why it is refused."""

    message: dict[str, Any]
    trainer: Trainer
    purpose: str
    count: int
    needed: SlotSize
    wanted: SlotSize
    have: frozenset[str]
    node: int
    asked_at: float = 0.0
    retry_at: float = 0.0
    tries: int = 0
    given: list[HeldRegion] = field(default_factory=list)
    is_granted: bool = False
    error: FlashckptError | None = None

    @classmethod
    def parsed(cls, trainer: Trainer, message: dict[str, Any]) -> _MemoryRequest:
        """Raises ProtocolError."""
        needed = SlotSize(*numbers(message, "needed", 2, _MOST_SLOT_BYTES))
        wanted = SlotSize(*numbers(message, "wanted", 2, _MOST_SLOT_BYTES))
        purpose = text(message, "purpose", 16)
        if purpose not in (SLOTS, CONSTANTS):
            raise ProtocolError(f"{purpose!r} is not a purpose of memory. The connection was closed.")
        return cls(
            message,
            trainer,
            purpose,
            number(message, "count", 0, MOST_SLOTS),
            needed,
            SlotSize(max(needed[0], wanted[0]), max(needed[1], wanted[1])),
            frozenset(names(message, "have")),
            number(message, "node", memory_budget.NO_NODE, memory_budget.MOST_NODES - 1),
        )


@dataclass(frozen=True)
class _Plan:
    """The regions to make for a request, beside existing ones."""

    count: int
    size: SlotSize
    is_memfd: bool = False


class Allocation:
    """is_needed: whether a snapshot is the newest of its rank or still to be persisted. wake: the eventfd
    that wakes the keeper's loop. stands: whether this is still the keeper: if not, new regions may be another
    keeper's, and are neither granted nor removed."""

    def __init__(
        self,
        regions: Regions,
        is_needed: Callable[[HeldRegion, Sealed], bool],
        wake: int,
        available: Callable[[], int] = memory_budget.available_bytes,
        stands: Callable[[], bool] = lambda: True,
    ) -> None:
        self._regions, self._is_needed, self._stands = regions, is_needed, stands
        self._wake, self._available = wake, available
        self._requests: dict[str, _MemoryRequest] = {}  # by the life lock of the trainer
        self._workers: dict[int, Worker] = {}
        # The bytes that each rank is still to take; its thread counts them down.
        self._reserved: dict[int, int] = {}
        self._guard = threading.Lock()
        self._making: dict[int, _MemoryRequest] = {}  # by rank
        self._decided_for: AttemptName | None = None
        self._slots_each = 0

    @property
    def busy(self) -> bool:
        """Whether a request is not answered yet."""
        return bool(self._requests)

    def ask(self, trainer: Trainer, message: dict[str, Any]) -> Answer:
        """Answer a request, or LATER while its memory is taken. Raises ProtocolError if it is invalid,
        OutOfSpaceError, KeeperError."""
        request = self._requests.get(trainer.lock)
        if request is None or request.message != message:
            self._abandon(trainer.lock)
            request = self._requests[trainer.lock] = _MemoryRequest.parsed(trainer, message)
        request.asked_at = time.monotonic()
        self.next()
        is_abandoned = self._requests.get(trainer.lock) is not request  # the trainer has died
        if is_abandoned or (request.error is None and not request.is_granted):
            return LATER
        del self._requests[trainer.lock]
        if request.error is not None:
            raise request.error
        rows = [self._regions.row(held, trainer.pid, trainer.lock) for held in request.given]
        answer = {"slots": rows, "available": max(0, self._left_for(trainer.rank))}
        return answer, [held.slot.descriptor for held in request.given]

    def next(self) -> None:
        """Grant the regions that were made, and begin the next requests."""
        if not self._stands():
            return
        for worker in self._workers.values():
            worker.collect()
        for lock, request in list(self._requests.items()):
            rank, silent_s = request.trainer.rank, time.monotonic() - request.asked_at
            if rank in self._making:
                continue
            if silent_s > _ABANDONED_S or not self._regions.lives(lock):
                self._abandon(lock)
            elif request.error is None and not request.is_granted:
                self._begin(request)

    def is_on_its_way(self, held: HeldRegion) -> bool:
        """Whether a region was granted to a trainer that has not repeated its request yet."""
        return any(each.is_granted and held in each.given for each in self._requests.values())

    def _abandon(self, lock: str) -> None:
        """Forget the request of a trainer, and release what it was to get."""
        request = self._requests.pop(lock, None)
        for held in request.given if request is not None and request.is_granted else ():
            held.retired, held.writer = True, ""

    # ---- decisions

    def _begin(self, request: _MemoryRequest) -> None:
        if time.monotonic() < request.retry_at:
            return
        try:
            decide = self._region_for_constants if request.purpose == CONSTANTS else self._slots
            request.given, plan = decide(request)
            if plan is not None:
                self._make(request, plan)
            else:
                self._grant(request)
        except OutOfSpaceError as error:
            if any(map(self._is_leaving, self._regions.of_rank(request.trainer.rank))):
                request.retry_at = time.monotonic() + _RETRY_S
            else:
                request.error = error
        except (FlashckptError, OSError) as error:
            request.error = _as_refusal(error)

    def _slots(self, request: _MemoryRequest) -> tuple[list[HeldRegion], _Plan | None]:
        """The existing slots to grant, and the plan for the rest. Raises OutOfSpaceError. Prefers slots of
        the wanted size, then of the needed size, then fewer slots, then larger ones of earlier trainers."""
        trainer, lock = request.trainer, request.trainer.lock
        mine = [each for each in self._regions.of_rank(trainer.rank) if self._may_be_given(each, request)]
        large_enough = [each for each in mine if each.slot.size.holds(request.needed)]
        # Slots that were granted to this trainer before come first, then the smallest of earlier trainers.
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
            if self._fits(request, count, missing, size):
                self._clear(each for each in large_enough if each not in fit)
                return fit, _Plan(missing, size, self._has_memfd(trainer))
        if has + len(large_enough) >= count:
            return large_enough[: count - has], None
        num_bytes = request.needed.region_bytes
        available = len(large_enough) * num_bytes + self._left_for(trainer.rank)
        raise memory_budget.out_of_memory((count - has) * num_bytes, available)

    def _region_for_constants(self, request: _MemoryRequest) -> tuple[list[HeldRegion], _Plan | None]:
        trainer, size = request.trainer, request.needed
        for each in self._regions.constants_of(trainer.rank):
            is_empty = each.writer == trainer.lock and each.state() is SlotState.FREE
            if is_empty and each.slot.name not in request.have and each.slot.size.holds(size):
                return [each], None
        if not self._fits(request, 1, 1, size):
            raise memory_budget.out_of_memory(size.region_bytes, self._left_for(trainer.rank))
        return [], _Plan(1, size)

    def _may_be_given(self, held: HeldRegion, request: _MemoryRequest) -> bool:
        is_others = held.writer != request.trainer.lock and self._regions.is_written(held)
        is_fit = held.kind == MEMFD or not self._has_memfd(request.trainer)
        return not is_others and held.slot.name not in request.have and is_fit

    def _has(self, request: _MemoryRequest) -> int:
        """The number of slots that the trainer has and that are large enough."""
        held = self._regions.of_rank(request.trainer.rank)
        return sum(each.slot.name in request.have and each.slot.size.holds(request.needed) for each in held)

    def _has_memfd(self, trainer: Trainer) -> bool:
        """Whether its constants are in a memfd: snapshots in named memory must not name them."""
        regions = self._regions.constants_of(trainer.rank)
        return any(each.kind == MEMFD and each.writer == trainer.lock for each in regions)

    def _clear(self, regions: Iterable[HeldRegion]) -> None:
        """Remove unused slots of another size without a needed snapshot: new ones may need the memory."""
        for held in [each for each in regions if not self._regions.is_written(each)]:
            self._regions.remove_spent(held, self._is_needed)

    # ---- sums

    def _count(self, request: _MemoryRequest, size: SlotSize, here: int) -> int:
        """The number of slots of a size, `here` existing ones included: the user's, else three (four) if
        those of all ranks fit into half of the available memory, else two. Decided once a node."""
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
        """The bytes that may be taken now for a rank, without those reserved for other ranks."""
        with self._guard:
            others = sum(left for each, left in self._reserved.items() if each != rank)
        return self._available() - others

    def _fits(self, request: _MemoryRequest, count: int, missing: int, size: SlotSize) -> bool:
        """Whether there is memory for `missing` more, and for `count` of each rank that has none yet."""
        trainer, regions, is_constants = request.trainer, self._regions, request.purpose == CONSTANTS
        for rank in set(trainer.ranks) - {trainer.rank}:
            held = regions.constants_of(rank) if is_constants else regions.of_rank(rank)
            made = self._making.get(rank)
            is_coming = made is not None and made.purpose == request.purpose
            if is_coming or any(map(regions.is_written, held)):
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
        self._making[rank] = request
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
        if not self._stands() or self._requests.get(request.trainer.lock) is not request:
            return
        if any(self._regions.get(each.slot.name) is not each for each in request.given):
            return  # an unused region was removed meanwhile: decide again, with the new regions
        if request.purpose == SLOTS and len(held) < plan.count:
            # Fewer slots are enough for training.
            has = self._has(request) + len(request.given) + len(held)
            error = None if has >= _FEWEST else error
        if error is None:
            request.given += held
            self._grant(request)
            return
        for each in held:
            self._regions.remove(each)
        if isinstance(error, OutOfSpaceError) and request.tries < _TRIES:
            request.tries += 1  # another job took the memory meanwhile: decide again
        else:
            request.error = _as_refusal(error)

    # ---- granting

    def _grant(self, request: _MemoryRequest) -> None:
        """Assign the regions to the trainer, which has them once it repeats its request."""
        for held in request.given:
            held.retired, held.writer = False, request.trainer.lock
        for held in self._regions.of_rank(request.trainer.rank) if request.purpose == SLOTS else ():
            # Not slots that were granted just now, though their trainer may have died since.
            if held not in request.given and not self._regions.is_written(held):
                held.retired = True  # of an earlier attempt, and not granted
        request.is_granted = True
        crashpoints.point("memory.given")

    def _is_leaving(self, held: HeldRegion) -> bool:
        """Whether a retired slot goes soon: not if a trainer still writes it, nor if it holds the newest
        snapshot of its rank, or one that cannot be persisted."""
        state = held.state()
        if not held.retired or (state is not None and state.is_begun):
            return False
        sealed = held.sealed()
        if sealed is None or not self._is_needed(held, sealed):
            return True
        return held.slot.wants_persist(sealed.generation) and held.slot.failed != sealed.generation


def _as_refusal(error: Exception) -> FlashckptError:
    if isinstance(error, FlashckptError):
        return error
    return KeeperError(f"Memory for snapshots could not be taken: {error}. Until then no snapshot is kept.")
