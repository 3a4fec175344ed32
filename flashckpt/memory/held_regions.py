"""The slots that a keeper holds: made, adopted, handed over, cleared of the dead, removed.

Owns the descriptors and the names of regions. Changes words only where their owner is dead, and never
looks at an image.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashckpt import crashpoints
from flashckpt.errors import DamagedError, FlashckptError, FormatError, KeeperError, OutOfRoomError
from flashckpt.memory import numa, region, room
from flashckpt.memory.control_page import SlotHeader, SlotSize, round_up
from flashckpt.memory.region import MEMFD, NAMED, Region
from flashckpt.memory.runtime import (
    LifeLock,
    RuntimeFolder,
    TrainerLocks,
    is_alive,
    is_trainer_lock,
    rank_of_lock,
)
from flashckpt.memory.slot import Sealed, Slot, SlotState, Word

log = logging.getLogger(__name__)

MAX_REGIONS = 64  # of one rank


@dataclass
class HeldRegion:
    """A region that the keeper holds, a slot or what slots share. `writer` is the life lock of the trainer
    that may write it until it says that it does not; `retired` is one that no trainer uses any more."""

    slot: Slot
    kind: str
    writer: str = ""
    retired: bool = False

    def word(self) -> Word | None:
        """None for a word that is none, until it is mended."""
        try:
            return self.slot.state()
        except DamagedError:
            return None

    def state(self) -> SlotState | None:
        word = self.word()
        return None if word is None else word.state

    def sealed(self) -> Sealed | None:
        """What is sealed in it and not damaged."""
        try:
            return self.slot.sealed()
        except DamagedError:
            return None


@dataclass(frozen=True)
class Made:
    """What a request for memory came to: regions, and the error if fewer than asked were made."""

    regions: tuple[Region, ...]
    error: Exception | None


class Regions:
    """Held regions by name. `life` is this keeper's own lock: its index in each slot's owner table. `living`
    says whose slots are not to be touched."""

    def __init__(self, folder: RuntimeFolder, life: LifeLock, living: TrainerLocks | None = None) -> None:
        self._folder = folder
        self._life = life
        self._living = TrainerLocks(folder) if living is None else living
        self._held: dict[str, HeldRegion] = {}
        self._lent: tuple[Slot, ...] = ()
        self._leaving: list[Slot] = []

    def __len__(self) -> int:
        return len(self._held)

    def slots(self) -> list[HeldRegion]:
        """The slots: not what several of them share."""
        return [held for held in self._held.values() if not held.slot.header.holds_constants]

    def everything(self) -> list[HeldRegion]:
        """Everything: slots and the constants that they share."""
        return list(self._held.values())

    def get(self, name: str) -> HeldRegion | None:
        return self._held.get(name)

    def of_rank(self, rank: int) -> list[HeldRegion]:
        """The slots of a rank."""
        return [held for held in self.slots() if held.slot.rank == rank]

    def sealed(self, rank: int | None = None) -> list[Sealed]:
        """What is sealed in the slots (of a rank) and not damaged."""
        found = [held.sealed() for held in self.slots() if rank in (None, held.slot.rank)]
        return [each for each in found if each is not None]

    def constants_of(self, rank: int) -> list[HeldRegion]:
        """The regions that hold the constants of a rank."""
        return [each for each in self._constants() if each.slot.rank == rank]

    def _constants(self) -> list[HeldRegion]:
        return [held for held in self._held.values() if held.slot.header.holds_constants]

    def constants_named_by(self, sealed: Sealed) -> Slot | None:
        """The region that holds the constants of a snapshot; None where it has none, or its region is not
        here."""
        nonce = sealed.record.constants_nonce
        found = (each.slot for each in self._constants())
        return next((each for each in found if nonce and each.header.nonce == nonce), None)

    # Coming

    def make(
        self,
        rank: int,
        indexes: Sequence[int],
        size: SlotSize,
        *,
        available: Callable[[], int] = room.available_bytes,
        taken: Callable[[int], None] = lambda _: None,
        holds_constants: bool = False,
        is_memfd: bool = False,
        node: int = numa.NO_NODE,
    ) -> Made:
        """Allocate regions, in a thread of their rank: nothing of what is held is touched. See `put`, and
        `region.create` for `available`, `taken` and `node`."""
        num_bytes, made = size.region_bytes, list[Region]()
        kind = MEMFD if is_memfd else region.kind_for(self._folder, num_bytes * len(indexes))
        create = partial(region.create, available=available, taken=taken, node=node)
        for index in indexes:
            header = SlotHeader(
                identity=self._folder.identity,
                rank=rank,
                index=index,
                nonce=secrets.randbits(64) or 1,
                metadata_capacity=round_up(max(size.metadata_bytes, 1)),
                image_capacity=round_up(max(size.image_bytes, 1)),
                holds_constants=holds_constants,
            )
            try:
                found = create(self._folder, header.name, num_bytes, kind)
                made.append(found)
                crashpoints.point("slots.taken")
                Slot.format(found.descriptor, header)
            except (OSError, OutOfRoomError) as error:
                return Made(tuple(made), error)
        return Made(tuple(made), None)

    def put(self, found: Region) -> HeldRegion:
        """Take a region up; its descriptor is held here from now on, whatever happens.
        Raises DamagedError, FormatError or KeeperError for one that is no slot of this run."""
        try:
            slot = Slot.open(found.descriptor, map_image=False, identity=self._folder.identity)
        except BaseException:
            os.close(found.descriptor)
            raise
        known = self._held.get(slot.name)
        has = sum(each.slot.rank == slot.rank for each in self._held.values())
        if known is not None or has >= MAX_REGIONS:
            slot.close()
            if known is None:
                raise KeeperError(f"{slot.name}: this keeper already holds {has} regions of its rank.")
            return known
        held = HeldRegion(slot, found.kind)
        # After a keeper's restart a living owner may be writing it, though it has not spoken yet.
        for _, lock in self.living_owners(held):
            held.writer = lock
        self._held[slot.name] = held
        return held

    def take(self, made: Region) -> HeldRegion:
        """Take up a region that was just made: where it cannot be, nothing of it is left. See `put`."""
        try:
            return self.put(made)
        except BaseException:
            if made.kind == NAMED:
                self._folder.remove(made.name)
            raise

    def adopt_named(self) -> list[HeldRegion]:
        """Take up the regions that an earlier keeper left in the runtime folder. One that was never
        finished goes; one that is not ours, or damaged, is left alone and said."""
        adopted = []
        for name in filter(region.is_region_name, self._folder.names()):
            if name in self._held:
                continue
            try:
                found = region.open_named(self._folder, name)
                if not os.pread(found.descriptor, 8, 0).strip(b"\0"):
                    os.close(found.descriptor)
                    self._folder.remove(name)
                    continue
                held = self.put(found)
            except (OSError, KeeperError, DamagedError, FormatError) as error:
                log.warning("%s is not adopted: %s", name, error)
                continue
            if held.slot.name == name:
                adopted.append(held)
            else:
                log.warning("%s holds the slot %s and is not adopted", name, held.slot.name)
                self._forget(held)
        return adopted

    def remove_dead_locks(self) -> None:
        """Remove the lock files of trainers that are gone, those that nobody heard of included. Those of
        keepers go once what they left half written has gone."""
        for name in filter(is_trainer_lock, self._folder.names()):
            self._living.remove_dead(name)

    def living_ranks(self) -> set[int]:
        """The ranks of the trainers that live here, those that nobody heard of included."""
        locks = filter(is_trainer_lock, self._folder.names())
        ranks = {rank_of_lock(lock) for lock in locks if self._lives(lock)}
        return {rank for rank in ranks if rank is not None}

    def other_keepers(self) -> dict[str, bool]:
        """As `keeper_locks`, but for this keeper's."""
        return {
            nonce: lives
            for nonce, lives in keeper_locks(self._folder).items()
            if f"keeper-{nonce}.lock" != self._life.name
        }

    def forget_keeper(self, nonce: str) -> None:
        """Remove the lock of a keeper that is dead."""
        lock = f"keeper-{nonce}.lock"
        if not self._lives(lock):
            self._folder.remove(lock)

    def adopt_memfd(self, descriptor: int) -> HeldRegion:
        """Take up a memfd that a trainer hands back to a new keeper. See `put`."""
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_nlink != 0:
            os.close(descriptor)
            raise KeeperError("A descriptor that was handed over is no memfd of this user.")
        return self.put(Region("", MEMFD, descriptor, found.st_size))

    # Staying

    def row(self, held: HeldRegion, pid: int, lock: str) -> dict[str, Any]:
        """What a trainer is told with a slot's descriptor. Makes it an owner in the slot."""
        slot = held.slot
        return {
            "index": slot.index,
            "name": slot.name,
            "owner": slot.enroll(pid, lock, self._lives),
            "kind": held.kind,
            "num_bytes": slot.header.num_bytes,
            "holds_constants": slot.header.holds_constants,
        }

    def own_index(self, slot: Slot) -> int:
        """This process's index in a slot's owner table."""
        return slot.enroll(os.getpid(), self._life.name, self._lives)

    def reclaim(self) -> None:
        """Free what the dead were writing, unpin what they had pinned. A keeper that is not this one is
        none any more, even if it still lives: there is one a node and run."""
        for held in self._held.values():
            if held.slot.mend():
                log.warning("%s had a damaged state word; what it held is lost", held.slot.name)
                continue
            word = held.word()
            owner = None if word is None else held.slot.owner(word.owner)
            if word is None or (owner is not None and self._keeps(owner[1])):
                continue
            if word.state.is_begun:
                held.slot.free(word)
            elif word.state is SlotState.PINNED:
                held.slot.unpin(word)

    def living_owners(self, held: HeldRegion) -> list[tuple[int, str]]:
        """(pid, lock) of the trainers in a slot's owner table that are alive."""
        owners = (held.slot.owner(index) for index in range(1, 17))
        return [each for each in owners if each and not _is_keeper(each[1]) and self._lives(each[1])]

    def is_written(self, held: HeldRegion) -> bool:
        """Whether a living trainer may write it at any time."""
        return bool(held.writer) and self._lives(held.writer)

    # Going

    def drop_constants(self) -> None:
        """Let go of constants that no snapshot here names and no living trainer may yet use."""
        regions = self._constants()
        named = {each.record.constants_nonce for each in self.sealed()} if regions else set()
        for held in regions:
            if held.slot.header.nonce not in named and not self.is_written(held):
                self.remove(held)

    def remove_spent(self, held: HeldRegion, is_needed: Callable[[HeldRegion, Sealed], bool]) -> None:
        """Remove a slot that nobody writes, unless what is sealed in it is needed, or is still to be told as
        damaged."""
        word, sealed = held.word(), held.sealed()
        if word is not None and word.state is SlotState.SEALED:
            stays = held.slot.wants_persist(word.generation) if sealed is None else is_needed(held, sealed)
            if not stays:
                held.slot.free(word)
        if held.state() is SlotState.FREE:
            self.remove(held)

    def remove(self, held: HeldRegion) -> None:
        """Let a region go: its memory is free once the last mapping is gone."""
        if held.kind == NAMED:
            self._folder.remove(held.slot.name)
        self._forget(held)

    def lend(self, slots: Iterable[Slot]) -> None:
        """Another thread looks at these: none of them is unmapped under it before `given_back`, though it is
        removed."""
        self._lent = tuple(slots)

    def given_back(self) -> None:
        self._lent, leaving, self._leaving = (), self._leaving, []
        for slot in leaving:
            slot.close()

    def _forget(self, held: HeldRegion) -> None:
        self._held.pop(held.slot.name, None)
        if held.slot in self._lent:
            self._leaving.append(held.slot)
        else:
            held.slot.close()

    def _lives(self, lock: str) -> bool:
        return self._living.holds(lock)

    def _keeps(self, lock: str) -> bool:
        return lock == self._life.name if _is_keeper(lock) else self._lives(lock)


@contextlib.contextmanager
def opened_region(folder: RuntimeFolder, name: str) -> Iterator[Slot | str | None]:
    """Map a named region read-only, for the time of the block. Gives the reason in words where it cannot be
    read, None for a region whose making was cut off."""
    with contextlib.ExitStack() as stack:
        found: Slot | str | None = None
        try:
            descriptor = region.open_named(folder, name, os.O_RDONLY).descriptor
            stack.callback(os.close, descriptor)
            if os.pread(descriptor, 8, 0).strip(b"\0"):
                slot = Slot.open(descriptor, map_image=False, identity=folder.identity, is_read_only=True)
                stack.pop_all()  # the slot closes it from here on
                found = stack.enter_context(contextlib.closing(slot))
        except (FlashckptError, OSError) as error:
            found = str(error)
        yield found


def sealed_in(folder: RuntimeFolder) -> Iterator[Sealed]:
    """The snapshots in the named regions of a runtime folder, each mapped until the next one is drawn."""
    for name in filter(region.is_region_name, folder.names()):
        with opened_region(folder, name) as slot, contextlib.suppress(DamagedError):
            if isinstance(slot, Slot) and not slot.header.holds_constants and (found := slot.sealed()):
                yield found


def keeper_locks(folder: RuntimeFolder) -> dict[str, bool]:
    """Nonces of the keepers that have a lock here, and whether each still lives: one of which that cannot be
    told does."""
    found = {}
    for name in folder.names():
        if _is_keeper(name) and name.endswith(".lock"):
            try:
                lives = is_alive(folder, name)
            except KeeperError:
                lives = True
            found[name.removeprefix("keeper-").removesuffix(".lock")] = lives
    return found


def _is_keeper(lock: str) -> bool:
    return lock.startswith("keeper-")
