"""The regions that a keeper holds: how they are made, adopted, granted, reclaimed from the dead and removed.

Owns the descriptors and the names of regions. Changes a state word only if its owner is dead, and never reads
an image.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flashckpt import crashpoints
from flashckpt.errors import DamagedError, FlashckptError, FormatError, KeeperError, OutOfSpaceError
from flashckpt.memory import memory_budget, region
from flashckpt.memory.region import CACHE, MEMFD, NAMED, Region, SlotHeader, SlotSize, round_up
from flashckpt.memory.runtime import RuntimeFolder, TrainerLocks, is_trainer_lock, rank_of_lock
from flashckpt.memory.slot import Capture, Sealed, Slot, SlotState, Word

log = logging.getLogger(__name__)

MAX_REGIONS = 64  # of one rank
_KEEPER = "keeper-"


@dataclass
class HeldRegion:
    """A slot, or constants that slots share, in memory or in the cache. `writer`: the life lock of the
    trainer that may write it until it releases it. `retired`: no trainer uses it. `path`: the file of a
    cached one, empty once that was removed. `found`: the snapshot in a cached one, which never changes."""

    slot: Slot
    kind: str
    writer: str = ""
    retired: bool = False
    path: str = ""
    found: Sealed | None = None

    def word(self) -> Word | None:
        """None while the state word is invalid."""
        try:
            return self.slot.state()
        except DamagedError:
            return None

    def state(self) -> SlotState | None:
        word = self.word()
        return None if word is None else word.state

    def sealed(self) -> Sealed | None:
        """Its sealed snapshot, None for none or for a damaged record."""
        if self.found is None:
            return self.slot.sealed_or_none()
        if self.slot.holds(self.found.word):
            return self.found
        word = self.word()
        if word is None or word.state not in (SlotState.SEALED, SlotState.PINNED):
            return None
        self.found = replace(self.found, word=word)
        return self.found


@dataclass(frozen=True)
class Made:
    """The regions made for a request for memory, and the error if they are fewer than requested."""

    regions: tuple[Region, ...]
    error: Exception | None


class Regions:
    """Held regions by name. nonce: names this keeper in the owner tables. living: the trainers whose slots
    are not touched. is_view: change nothing: written words stay in this process, and no
    name is removed. `not_adopted`: the named regions that cannot be held, each with the reason."""

    def __init__(
        self,
        folder: RuntimeFolder,
        nonce: str,
        living: TrainerLocks | None = None,
        *,
        is_view: bool = False,
    ) -> None:
        self._folder, self._is_view = folder, is_view
        self.not_adopted: dict[str, str] = {}
        self._own_name = f"{_KEEPER}{nonce}"
        self._living = TrainerLocks(folder) if living is None else living
        self._opened = weakref.WeakSet[Slot]()
        self._held: dict[str, HeldRegion] = {}
        self._cached: dict[str, HeldRegion] = {}
        self._cached_as: dict[Capture, HeldRegion] = {}  # cached slots by snapshot
        self._committed: dict[int, tuple[int, int]] = {}
        self._home_ended: dict[int, tuple[int, int]] = {}

    def slots(self) -> list[HeldRegion]:
        """The slots in memory, without constants."""
        return [held for held in self._held.values() if not held.slot.header.holds_constants]

    def cached(self) -> list[HeldRegion]:
        """The slots in the cache."""
        return list(self._cached_as.values())

    def everything(self) -> list[HeldRegion]:
        """Slots and constants, in memory and in the cache."""
        return [*self._held.values(), *self._cached.values()]

    def get(self, name: str) -> HeldRegion | None:
        return self._held.get(name)

    def of_rank(self, rank: int) -> list[HeldRegion]:
        """The slots of a rank."""
        return [held for held in self.slots() if held.slot.rank == rank]

    def sealed(self, rank: int | None = None) -> list[Sealed]:
        """The undamaged snapshots in the slots in memory (of a rank)."""
        found = [held.sealed() for held in self.slots() if rank in (None, held.slot.rank)]
        return [each for each in found if each is not None]

    def snapshots(self, rank: int | None = None) -> list[Sealed]:
        """The snapshots (of a rank) in memory and cache, each once: the cached copy if there is one."""
        found = [held.sealed() for held in self.cached() if rank in (None, held.slot.rank)]
        found += [each for each in self.sealed(rank) if self.in_cache(each) is None]
        return [each for each in found if each is not None]

    def in_cache(self, sealed: Sealed) -> HeldRegion | None:
        """The cached slot that holds the same snapshot."""
        return self._cached_as.get(sealed.capture)

    def constants_of(self, rank: int) -> list[HeldRegion]:
        """The regions in memory that hold the constants of a rank."""
        return [each for each in self._constants() if each.slot.rank == rank]

    def _constants(self) -> list[HeldRegion]:
        return [held for held in self._held.values() if held.slot.header.holds_constants]

    def all_cached(self) -> list[HeldRegion]:
        """Slots and constants in the cache."""
        return list(self._cached.values())

    def cached_named(self, name: str) -> HeldRegion | None:
        return self._cached.get(name)

    def cached_constants(self) -> list[HeldRegion]:
        """The regions of constants in the cache."""
        return [held for held in self._cached.values() if held.slot.header.holds_constants]

    def constants_named_by(self, sealed: Sealed) -> Slot | None:
        """The region with the constants of a snapshot, preferably in memory; None if the snapshot has none or
        the region is missing."""
        nonce = sealed.record.constants_nonce
        found = (each.slot for each in (*self._constants(), *self.cached_constants()))
        return next((each for each in found if nonce and each.header.nonce == nonce), None)

    # ---- making and adopting

    def make(
        self,
        rank: int,
        indexes: Sequence[int],
        size: SlotSize,
        *,
        available: Callable[[], int] = memory_budget.available_bytes,
        taken: Callable[[int], None] = lambda _: None,
        holds_constants: bool = False,
        is_memfd: bool = False,
        node: int = memory_budget.NO_NODE,
    ) -> Made:
        """Allocate regions, in a thread of their rank: touches no held region. See `put`, and `region.create`
        for `available`, `taken` and `node`."""
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
            except (OSError, OutOfSpaceError) as error:
                return Made(tuple(made), error)
        return Made(tuple(made), None)

    def put(self, found: Region) -> HeldRegion:
        """Hold a region; its descriptor is this object's from now on, also after an error. Raises
        DamagedError, FormatError or KeeperError for a region that is no slot of this run."""
        slot = Slot.open(
            found.descriptor, map_image=False, identity=self._folder.identity, is_view=self._is_view
        )
        self._opened.add(slot)
        known = self._held.get(slot.name)
        has = sum(each.slot.rank == slot.rank for each in self._held.values())
        if known is not None or has >= MAX_REGIONS:
            slot.close()
            if known is None:
                raise KeeperError(f"{slot.name}: this keeper already holds {has} regions of its rank.")
            return known
        held = HeldRegion(slot, found.kind)
        # The word of an earlier keeper means nothing: this keeper may not have found the copy yet.
        self._set_cached(slot)
        self._set_home_ended(slot)
        # After a keeper's restart a living owner may be writing it before it says hello.
        for _, lock in self.living_owners(held):
            held.writer = lock
        self._held[slot.name] = held
        return held

    def put_cached(self, slot: Slot, path: str) -> HeldRegion | None:
        """Hold a cached slot, or constants; None if another cached slot has its snapshot. Sets the words of
        the slots in memory with that snapshot."""
        sealed = slot.sealed()
        assert sealed is not None
        self._opened.add(slot)
        held = HeldRegion(slot, CACHE, path=path, found=sealed)
        if slot.header.holds_constants:
            self._cached[slot.name] = held
            return held
        if self.in_cache(sealed) is not None:
            slot.close()
            return None
        self._cached[slot.name] = self._cached_as[sealed.capture] = held
        for each in self.sealed(slot.rank):
            if each.capture == sealed.capture:
                if each.is_persisted:
                    slot.set_persisted(sealed.generation)
                elif sealed.is_persisted:
                    each.slot.set_persisted(each.generation)
                each.slot.set_cached(each.generation)
        return held

    def drop_cached(self, held: HeldRegion, *, is_spent: bool = False) -> None:
        """Forget a cached slot, or constants. A slot in memory with the snapshot replaces it, or may be
        overwritten if the snapshot `is_spent` and not requested at home. A snapshot that exists nowhere else
        is lost: then its request for the home ends."""
        self._cached.pop(held.slot.name, None)
        sealed = held.found  # the slot itself may be freed by now
        if sealed is None or self.in_cache(sealed) is not held:
            return
        del self._cached_as[sealed.capture]
        twins = [each for each in self.sealed(held.slot.rank) if each.capture == sealed.capture]
        for each in twins:
            each.slot.set_cached(0)
            is_requested = each.slot.wants_persist(each.generation)
            if is_spent and is_requested and not each.slot.wants_home(each.generation):
                each.slot.set_failed(each.generation)
        if not twins and held.slot.wants_home(sealed.generation):
            self._end_home(held.slot.rank, sealed.order)

    def committed(self, rank: int, order: tuple[int, int]) -> None:
        """Note a commit of a snapshot of a rank in all its slots in memory, which may hold others by now."""
        self._committed[rank] = max(order, self.newest_committed(rank))
        self._end_home(rank, order)

    def newest_committed(self, rank: int) -> tuple[int, int]:
        """The order of the newest snapshot of a rank that this keeper committed; zeros for none."""
        return self._committed.get(rank, (0, 0))

    def _end_home(self, rank: int, order: tuple[int, int]) -> None:
        self._home_ended[rank] = max(order, self._home_ended.get(rank, order))
        for held in self.of_rank(rank):
            self._set_home_ended(held.slot)

    def _set_home_ended(self, slot: Slot) -> None:
        order = self._home_ended.get(slot.rank, (0, 0))
        if slot.home_ended < order:
            slot.set_home_ended(*order)

    def lost_file(self, held: HeldRegion) -> None:
        """Keep a cached slot whose file was removed, from its open file, until its snapshot is at home; drop
        it if memory has the snapshot and the home does not get it: then it is copied again."""
        twins = [each for each in self.sealed(held.slot.rank) if self.in_cache(each) is held]
        if any(not each.slot.wants_home(each.generation) for each in twins):
            self.drop_cached(held)
            return
        held.path = ""
        for each in twins:
            each.slot.set_cached(0)

    def _set_cached(self, slot: Slot) -> None:
        sealed = slot.sealed_or_none()
        cached = None if sealed is None else self.in_cache(sealed)
        is_there = cached is not None and bool(cached.path)
        slot.set_cached(sealed.generation if sealed is not None and is_there else 0)

    def take(self, made: Region) -> HeldRegion:
        """Hold a region that was just made, or remove it if that fails. See `put`."""
        try:
            return self.put(made)
        except BaseException:
            if made.kind == NAMED:
                self._folder.remove(made.name)
            raise

    def adopt_named(self) -> list[HeldRegion]:
        """Hold the regions that an earlier keeper left in the runtime folder. Removes unfinished ones; logs
        and leaves damaged ones and those of others."""
        adopted = []
        for name in filter(region.is_region_name, self._folder.names()):
            if name in self._held:
                continue
            try:
                flags = os.O_RDONLY if self._is_view else os.O_RDWR
                descriptor = self._folder.open_file(name, flags)
                if not os.pread(descriptor, 8, 0).strip(b"\0"):
                    os.close(descriptor)
                    self._remove_name(name)
                    continue
                held = self.put(Region(name, NAMED, descriptor))
            except (OSError, KeeperError, DamagedError, FormatError) as error:
                log.warning("%s is not adopted: %s", name, str(error))  # a log may keep its arguments
                self.not_adopted[name] = str(error)
                continue
            if held.slot.name == name:
                adopted.append(held)
            else:
                log.warning("%s holds the slot %s and is not adopted", name, held.slot.name)
                self.not_adopted[name] = f"it holds the slot {held.slot.name}"
                del self._held[held.slot.name]
        return adopted

    def remove_dead_locks(self) -> None:
        """Remove the lock files of dead trainers, also of trainers that never said hello."""
        for name in filter(is_trainer_lock, self._folder.names()):
            self._living.remove_dead(name)

    def living_ranks(self) -> set[int]:
        """The ranks of the trainers that live here, also of those that have not said hello."""
        locks = filter(is_trainer_lock, self._folder.names())
        ranks = {rank_of_lock(lock) for lock in locks if self.lives(lock)}
        return {rank for rank in ranks if rank is not None}

    def adopt_memfd(self, descriptor: int) -> HeldRegion:
        """Hold a memfd that a trainer hands to a new keeper. See `put`."""
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_nlink != 0:
            os.close(descriptor)
            raise KeeperError("A descriptor that was handed over is not a memfd of this user.")
        return self.put(Region("", MEMFD, descriptor))

    # ---- use

    def row(self, held: HeldRegion, pid: int, lock: str) -> dict[str, Any]:
        """The row of an answer that describes a slot. Makes the trainer an owner of the slot, unless it is in
        the cache, which trainers only read."""
        slot = held.slot
        return {
            "name": slot.name,
            "owner": 0 if held.kind == CACHE else slot.enroll(pid, lock, self._keeps),
            "kind": held.kind,
            "path": held.path,
            "num_bytes": slot.header.num_bytes,
            "holds_constants": slot.header.holds_constants,
        }

    def own_index(self, slot: Slot) -> int:
        """This process's index in a slot's owner table."""
        return slot.enroll(os.getpid(), self._own_name, self._keeps)

    def reclaim(self) -> None:
        """Free the slots that dead processes were writing, and unpin those that they had pinned. Any other
        keeper counts as dead: a run has one keeper on a node."""
        for held in self._held.values():
            if held.slot.mend():
                log.warning("%s had a damaged state word; its snapshot is lost", held.slot.name)
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
        """(pid, lock) of the living trainers in a slot's owner table."""
        owners = (held.slot.owner(index) for index in range(1, 17))
        return [each for each in owners if each and not each[1].startswith(_KEEPER) and self.lives(each[1])]

    def is_written(self, held: HeldRegion) -> bool:
        """Whether a living trainer may write it at any time."""
        return bool(held.writer) and self.lives(held.writer)

    # ---- removal

    def drop_constants(self) -> None:
        """Remove constants that no snapshot here names and no living trainer may write. A slot that could
        not be adopted may name any constants of its rank."""
        regions = self._constants()
        named = {each.record.constants_nonce for each in self.sealed()} if regions else set()
        unknown = {region.rank_of(name) for name in self.not_adopted if name.startswith("slot-")}
        for held in regions:
            is_named = held.slot.header.nonce in named or held.slot.rank in unknown
            if not is_named and not self.is_written(held):
                self.remove(held)

    def remove_spent(self, held: HeldRegion, is_needed: Callable[[HeldRegion, Sealed], bool]) -> None:
        """Remove a slot that no trainer writes, unless its snapshot is needed, or damaged and not
        reported."""
        word, sealed = held.word(), held.sealed()
        if word is not None and word.state is SlotState.SEALED:
            stays = held.slot.wants_persist(word.generation) if sealed is None else is_needed(held, sealed)
            if not stays:
                held.slot.free(word)
        if held.state() is SlotState.FREE:
            self.remove(held)

    def remove(self, held: HeldRegion) -> None:
        """Remove a region; its memory is free once the last mapping is gone. A worker that reads the slot
        keeps it open until then."""
        if held.kind == NAMED:
            self._remove_name(held.slot.name)
        self._held.pop(held.slot.name, None)

    def _remove_name(self, name: str) -> None:
        if not self._is_view:
            self._folder.remove(name)

    def close(self) -> None:
        """Close all slots, also removed ones that are referred to."""
        for slot in list(self._opened):
            slot.close()

    def lives(self, lock: str) -> bool:
        """Whether a living process holds this life lock."""
        return self._living.holds(lock)

    def _keeps(self, owner: str) -> bool:
        return owner == self._own_name if owner.startswith(_KEEPER) else self.lives(owner)


def sealed_in(folder: RuntimeFolder) -> Iterator[Sealed]:
    """The snapshots in the named regions of a runtime folder, each mapped until the next one is yielded."""
    for name in filter(region.is_region_name, folder.names()):
        with contextlib.suppress(FlashckptError, OSError):
            descriptor = folder.open_file(name, os.O_RDONLY)
            slot = Slot.open(descriptor, map_image=False, identity=folder.identity, is_view=True)
            if not slot.header.holds_constants and (found := slot.sealed()):
                yield found
