"""A slot: a mapped region with its state word, record, metadata and (for a trainer) image. And the ring of a
rank's slots, which decides which of them is written next.

Owns the mapping and every change of the control page. The state word changes by compare-and-swap only:
FREE -> WRITING -> (UNCONFIRMED ->) SEALED <-> PINNED, SEALED -> FREE. Never frees or resizes the region.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

from flashckpt import _native
from flashckpt.errors import DamagedError, KeeperError
from flashckpt.format.layout import PAGE
from flashckpt.format.metadata import Geometry, Metadata
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.memory import forks
from flashckpt.memory import region as page
from flashckpt.memory.region import Record, SlotHeader, SlotSize

_MASK_48 = (1 << 48) - 1


class SlotState(IntEnum):
    FREE = 0
    WRITING = 1
    SEALED = 2
    PINNED = 3
    UNCONFIRMED = 4
    """Complete, but not confirmed by its trainer yet (docs/capture.md, "An abort")."""

    @property
    def is_begun(self) -> bool:
        """Whether only its trainer may use the snapshot, which is lost if the trainer dies."""
        return self in (SlotState.WRITING, SlotState.UNCONFIRMED)


class Word(NamedTuple):
    """The fields of a state word: {state:8 | owner:8 | generation:48}."""

    state: SlotState
    owner: int
    generation: int

    def packed(self) -> int:
        return self.state | self.owner << 8 | self.generation << 16

    @classmethod
    def unpacked(cls, word: int) -> Word:
        """Raises DamagedError for a state that does not exist."""
        if word & 0xFF > SlotState.UNCONFIRMED:
            raise DamagedError(f"A slot's state word {word:#x} is invalid. The slot is not used.")
        return cls(SlotState(word & 0xFF), word >> 8 & 0xFF, word >> 16 & _MASK_48)


class Heartbeat(NamedTuple):
    """A trainer's sign of life: the number of boundaries passed, CLOCK_MONOTONIC ns of the last (or of the
    begin of the watch), the index of its owner, and the timeout: ns without a boundary that are a hang, 0
    while no boundary is expected."""

    boundaries: int
    beat_ns: int
    owner: int
    timeout_ns: int


class Capture(NamedTuple):
    """Identifies a snapshot of a rank in any slot. A boundary may be captured again after a torn capture."""

    rank: int
    id: SnapshotId
    captured_ns: int
    metadata_checksum: bytes


@dataclass(frozen=True)
class Sealed:
    """A sealed or pinned snapshot of a slot: its state word and its verified record."""

    slot: Slot = field(repr=False, compare=False)
    word: Word
    record: Record
    metadata_checksum: bytes

    @property
    def generation(self) -> int:
        return self.record.generation

    @property
    def key(self) -> tuple[str, int]:
        """The name of its slot, and its generation there."""
        return self.slot.name, self.generation

    @property
    def is_persisted(self) -> bool:
        return self.slot.persisted == self.generation

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def boundary(self) -> int:
        """The index of its boundary in the attempt: the same on all ranks."""
        return self.record.boundary

    @property
    def attempt(self) -> AttemptName:
        """The attempt that captured it."""
        return AttemptName(self.record.attempt_number, f"{self.record.attempt_nonce:08x}")

    @cached_property
    def id(self) -> SnapshotId:
        """Identifies the snapshot on all ranks."""
        return SnapshotId(self.attempt, self.boundary)

    @cached_property
    def capture(self) -> Capture:
        return Capture(self.slot.rank, self.id, self.record.captured_ns, self.metadata_checksum)

    @property
    def order(self) -> tuple[int, int]:
        """(number of the attempt, boundary): sorts snapshots of all ranks, newest last."""
        return self.record.attempt_number, self.record.boundary

    @property
    def age(self) -> tuple[int, int, int]:
        """Sorts snapshots of one rank, newest last. A boundary may be captured again after a torn capture."""
        return *self.order, self.record.captured_ns


class Slot(forks.OwnDescriptor):
    """A mapped slot. `close`, or the end of the last reference, closes the descriptor, too. Addresses are
    this process's; offsets are in bytes from the start of the region. `image`: of a cached slot the
    descriptor of its file, closed with it. That image is read with pread and never mapped, since a disk error
    would be a SIGBUS."""

    _image = -1

    def __init__(
        self,
        descriptor: int,
        header: SlotHeader,
        *,
        map_image: bool,
        is_view: bool = False,
        image: int = -1,
    ) -> None:
        self.header = header
        self.name, self.index, self.rank = header.name, header.index, header.rank
        self.size = SlotSize(header.metadata_capacity, header.image_capacity)
        self.image_offset = header.image_offset
        length = header.num_bytes if map_image else header.image_offset
        self._map: Any = None
        if is_view:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            self._map = mmap.mmap(descriptor, length, flags=mmap.MAP_PRIVATE, prot=protection)
        else:
            self._map = _native.Mapping(descriptor, length)
        self._address = _native.address_of(self._map)
        self.word_address = self._address + page.WORD_OFFSET
        self.metadata_address = self._address + PAGE
        self._maps_image = map_image
        # Last: a slot that could not be mapped has no descriptor, and its number is another file's soon.
        self.is_cached, self._image = image >= 0, image
        super().__init__(descriptor)

    @staticmethod
    def format(descriptor: int, header: SlotHeader) -> None:
        """Make a slot of an allocated region. Writes the header last: without it a region is unfinished."""
        _check_size(descriptor, header)
        os.pwrite(descriptor, bytes(PAGE - page.HEADER_END), page.HEADER_END)
        os.pwrite(descriptor, header.packed(), page.HEADER_OFFSET)

    @classmethod
    def open(
        cls, descriptor: int, *, map_image: bool, identity: bytes | None = None, is_view: bool = False
    ) -> Slot:
        """Map a formatted slot, which owns the descriptor from now on, also after an error. is_view: written
        words stay in this process, and the descriptor may be read-only. Raises DamagedError, FormatError,
        KeeperError (another run), OSError."""
        try:
            header = SlotHeader.unpacked(os.pread(descriptor, page.HEADER_END, page.HEADER_OFFSET))
            _check_size(descriptor, header)
            if identity is not None and header.identity != identity:
                raise KeeperError(f"{header.name} is a slot of another run. It was left alone.")
            return cls(descriptor, header, map_image=map_image, is_view=is_view)
        except BaseException:
            os.close(descriptor)
            raise

    def forked(self) -> None:
        super().forked()
        if self._image >= 0:
            forks.close(self._image)
        self._image = -1

    def __del__(self) -> None:
        self.close()

    def close(self) -> bool:
        """Unmap and close; returns whether it was open. A mapping with open views lives until they are gone.
        A forked child leaves the mapping alone."""
        image, self._image = self._image, -1
        if image >= 0:
            os.close(image)
        was_open = super().close()
        if was_open:
            try:
                self._map.close()
            except BufferError:
                del self._map
        return was_open

    # ---- addresses and views

    @property
    def mapping(self) -> _native.Mapping:
        """The mapping, for registration with a device."""
        found: _native.Mapping = self._map
        return found

    @property
    def image_descriptor(self) -> int:
        """The file that holds the image at `image_offset`."""
        return self._image if self.is_cached else self.descriptor

    @property
    def image_address(self) -> int:
        assert self._maps_image, "this process maps no image"
        return self._address + self.image_offset

    @property
    def metadata_view(self) -> memoryview:
        return self._view[PAGE : self.image_offset]

    @property
    def image_view(self) -> memoryview:
        assert self._maps_image, "this process maps no image"
        return self._view[self.image_offset :]

    @property
    def _view(self) -> memoryview:
        return memoryview(self._map)

    def populate(self) -> None:
        """Touch every page but the control page: the first touch would make a copy twenty times slower."""
        _native.populate(self.metadata_address, sum(self.size), threads=1)

    # ---- the state word

    def state(self) -> Word:
        """Raises DamagedError for an invalid state word."""
        return Word.unpacked(_native.load(self.word_address))

    def mend(self) -> bool:
        """Reset a slot whose state word is invalid (a flipped bit), and return whether it was."""
        raw = _native.load(self.word_address)
        try:
            Word.unpacked(raw)
        except DamagedError:
            free = Word(SlotState.FREE, 0, raw >> 16)
            return _native.compare_exchange(self.word_address, raw, free.packed())
        return False

    def change(self, expected: Word, desired: Word) -> bool:
        return _native.compare_exchange(self.word_address, expected.packed(), desired.packed())

    def begin(self, owner: int) -> int | None:
        """Take a FREE or SEALED slot for writing, and drop its snapshot. Returns the new generation, or None
        if another process was faster."""
        word = self.state()
        if word.state is SlotState.SEALED:
            free = Word(SlotState.FREE, 0, word.generation)
            if not self.change(word, free):
                return None
            word = free
        if word.state is not SlotState.FREE:
            return None
        generation = word.generation + 1
        return generation if self.change(word, Word(SlotState.WRITING, owner, generation)) else None

    def abandon(self, owner: int, generation: int) -> bool:
        """Drop a snapshot that is not sealed: WRITING or UNCONFIRMED -> FREE."""
        free = Word(SlotState.FREE, 0, generation)
        begun = (SlotState.WRITING, SlotState.UNCONFIRMED)
        return any(self.change(Word(state, owner, generation), free) for state in begun)

    def confirm(self, sealer: _native.Sealer, owner: int, generation: int) -> bool:
        """UNCONFIRMED -> SEALED, now or when the copies of the snapshot have ended. False if the slot no
        longer holds it."""
        return sealer.confirm(
            word=self.word_address,
            writing=Word(SlotState.WRITING, owner, generation).packed(),
            unconfirmed=Word(SlotState.UNCONFIRMED, owner, generation).packed(),
            sealed=Word(SlotState.SEALED, 0, generation).packed(),
        )

    def pin(self, owner: int, sealed: Word) -> Word | None:
        """SEALED -> PINNED, so that no trainer overwrites it. Returns the new word, None if it is not
        sealed."""
        pinned = Word(SlotState.PINNED, owner, sealed.generation)
        if sealed.state is not SlotState.SEALED or not self.change(sealed, pinned):
            return None
        return pinned

    def unpin(self, pinned: Word) -> bool:
        """PINNED -> SEALED. False if another process removed the pin."""
        return self.change(pinned, Word(SlotState.SEALED, 0, pinned.generation))

    def holds(self, word: Word) -> bool:
        """Whether this is the state word."""
        return _native.load(self.word_address) == word.packed()

    def free(self, word: Word) -> bool:
        """Drop a sealed or pinned snapshot: -> FREE, if this is still the state word."""
        return self.change(word, Word(SlotState.FREE, 0, word.generation))

    # ---- record and metadata

    def write_record(self, record: Record) -> None:
        """Write the fields that the sealer will checksum. This process must be writing the slot."""
        start = page.RECORD_OFFSET + page.RECORD_FIELDS_OFFSET
        fields = record.packed()
        self._view[start : start + len(fields)] = fields

    def submit(
        self,
        sealer: _native.Sealer,
        owner: int,
        generation: int,
        places: Geometry,
        count: int,
        *,
        waits: Sequence[int] = (),
        landed: memoryview | None = None,
        held: memoryview | None = None,
        confirms: bool = False,
    ) -> None:
        """Hand a slot to the thread that seals it; all but the `count` digests of its metadata must be
        written. The thread seals after all `waits` if all digests are present, those of `landed` (u64 triples
        of address, bytes and entry) are those of the bytes there, and the last ones are those of `held`
        (u64). `confirms`: leave it UNCONFIRMED."""
        sealed = Word(SlotState.SEALED, 0, generation)
        unconfirmed = Word(SlotState.UNCONFIRMED, owner, generation)
        sealer.submit(
            waits=waits,
            word=self.word_address,
            expected=Word(SlotState.WRITING, owner, generation).packed(),
            desired=(unconfirmed if confirms else sealed).packed(),
            record=self._address + page.RECORD_OFFSET,
            metadata=self.metadata_address,
            metadata_bytes=places.num_bytes,
            table=self.metadata_address + places.table,
            table_count=count,
            landed=landed,
            held=held,
        )

    def record_bytes(self) -> bytes:
        return bytes(self._view[page.RECORD_OFFSET : page.RECORD_OFFSET + page.RECORD_BYTES])

    def sealed(self) -> Sealed | None:
        """The sealed or pinned snapshot, or None. Raises DamagedError for an invalid record."""
        word = self.state()
        if word.state not in (SlotState.SEALED, SlotState.PINNED):
            return None
        data = self.record_bytes()
        after = self.state()
        if after.generation != word.generation or after.state not in (SlotState.SEALED, SlotState.PINNED):
            return None
        record = Record.unpacked(data, word.generation, self.size)
        return Sealed(self, word, record, data[: page.RECORD_FIELDS_OFFSET])

    def sealed_or_none(self) -> Sealed | None:
        """The same, and None for a damaged record."""
        try:
            return self.sealed()
        except DamagedError:
            return None

    def metadata(self, sealed: Sealed) -> Metadata:
        """A copy of the metadata of a sealed snapshot. Raises DamagedError."""
        data = bytes(self._view[PAGE : PAGE + sealed.record.metadata_bytes])
        if _native.xxh3_128(data) != sealed.metadata_checksum:
            raise DamagedError(
                "A slot's metadata does not match its checksum. The snapshot is not used.", step=sealed.step
            )
        metadata = Metadata.unpack(data)
        image, record = metadata.image, sealed.record
        found = image.shard.data_start, image.num_bytes, image.constants.num_bytes
        if found != (record.data_start, record.image_bytes, record.constants_bytes):
            raise DamagedError("A slot's plan contradicts its record. It is not used.", step=sealed.step)
        return metadata

    def not_held(self, metadata: Metadata) -> list[int]:
        """The indexes of the constants of a snapshot that this region of constants does not have, by digests
        and layout: all of them if it is damaged. Does not read the bytes."""
        first = metadata.image.first_constant
        try:
            sealed = self.sealed()
            held = self.metadata(sealed) if sealed is not None else None
        except DamagedError:
            held = None
        if held is None or held.image.shard != metadata.image.constants:
            return list(range(first, len(metadata.leaves)))
        pairs = enumerate(zip(held.digests, metadata.constants_digests, strict=True), first)
        return [index for index, (digest, wanted) in pairs if digest != wanted]

    # ---- words between trainer and keeper

    def request_persist(self, generation: int, *, home: bool = True) -> None:
        """Request that this generation is persisted once it is sealed; without `home`, that it is copied into
        the cache, if that is usable."""
        if home:
            self._store(page.HOME_OFFSET, generation)
        self._store(page.PERSIST_OFFSET, generation)

    def wants_home(self, generation: int) -> bool:
        """Whether it was requested at home and is not committed."""
        return self._load(page.HOME_OFFSET) == generation and self.wants_persist(generation)

    @property
    def asked(self) -> int:
        """The generation that was requested last."""
        return self._load(page.PERSIST_OFFSET)

    def request_persist_after(self, asked: int, generation: int) -> bool:
        """Request this generation at home, unless another request was made since `asked` was read."""
        if not _native.compare_exchange(self._address + page.PERSIST_OFFSET, asked, generation):
            return False
        self._store(page.HOME_OFFSET, generation)
        return True

    def wants_persist(self, generation: int) -> bool:
        """Whether it was requested and is not committed."""
        return self._load(page.PERSIST_OFFSET) == generation != self.persisted

    @property
    def persisted(self) -> int:
        """The newest generation of this slot that is committed."""
        return self._load(page.PERSISTED_OFFSET)

    def set_persisted(self, generation: int) -> None:
        self._store(page.PERSISTED_OFFSET, generation)

    @property
    def cached(self) -> int:
        """The generation that the running keeper has found whole in the node's cache, 0 for none."""
        return self._load(page.CACHED_OFFSET)

    def set_cached(self, generation: int) -> None:
        self._store(page.CACHED_OFFSET, generation)

    @property
    def home_ended(self) -> tuple[int, int]:
        """(attempt number, boundary) of the newest snapshot of this rank, in any slot, whose request for the
        home has ended: it is committed, or its only copy is lost. Zeros for none."""
        return page.unpack_complete(self._load(page.HOME_ENDED_OFFSET))

    def set_home_ended(self, attempt_number: int, boundary: int) -> None:
        self._store(page.HOME_ENDED_OFFSET, page.pack_complete(attempt_number, boundary))

    @property
    def failed(self) -> int:
        """The generation whose last try to save it has failed."""
        return self._load(page.FAILED_OFFSET)

    def set_failed(self, generation: int) -> None:
        self._store(page.FAILED_OFFSET, generation)

    @property
    def torn(self) -> tuple[int, tuple[int, ...]]:
        """(generation, indexes of the first leaves that differed) of the last snapshot that an audit
        discarded; no index if its record or metadata was damaged."""
        generation = self._load(page.TORN_OFFSET)
        count = min(self._load(page.TORN_COUNT_OFFSET), page.TORN_LEAVES)
        return generation, tuple(self._load(page.TORN_LEAVES_OFFSET + 8 * i) for i in range(count))

    def set_torn(self, generation: int, leaves: Sequence[int]) -> None:
        named = leaves[: page.TORN_LEAVES]
        for i, leaf in enumerate(named):
            self._store(page.TORN_LEAVES_OFFSET + 8 * i, leaf)
        self._store(page.TORN_COUNT_OFFSET, len(named))
        self._store(page.TORN_OFFSET, generation)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Write the trainer's heartbeat."""
        self._store(page.TIMEOUT_NS_OFFSET, heartbeat.timeout_ns)
        self._store(page.BEAT_NS_OFFSET, heartbeat.beat_ns)
        self._store(page.BOUNDARIES_OFFSET, heartbeat.boundaries)
        # Last: the values must not be those of an earlier owner.
        self._store(page.BEATER_OFFSET, heartbeat.owner)

    @property
    def heartbeat(self) -> Heartbeat:
        """The last heartbeat; its owner is 0 if that process is no owner of the slot any more."""
        offsets = page.BOUNDARIES_OFFSET, page.BEAT_NS_OFFSET, page.BEATER_OFFSET, page.TIMEOUT_NS_OFFSET
        return Heartbeat(*map(self._load, offsets))

    @property
    def complete(self) -> tuple[int, int]:
        """(attempt number, boundary) of the newest snapshot that all ranks have sealed; zeros if alone."""
        return page.unpack_complete(self._load(page.COMPLETE_OFFSET))

    def set_complete(self, attempt_number: int, boundary: int) -> None:
        self._store(page.COMPLETE_OFFSET, page.pack_complete(attempt_number, boundary))

    # ---- owners

    def owner(self, index: int) -> tuple[int, str] | None:
        """(pid, lock) of the owner with this index, or None."""
        if not 1 <= index <= page.OWNERS:
            return None
        start = page.OWNERS_OFFSET + (index - 1) * page.OWNER_BYTES
        return page.unpack_owner(bytes(self._view[start : start + page.OWNER_BYTES]))

    def enroll(self, pid: int, lock: str, is_alive: Callable[[str], bool]) -> int:
        """Give the holder of `lock` an index in the owner table; only the keeper may. Reuses entries of dead
        owners that the state word does not name, once no entry is free: a keeper that was replaced may
        continue, and must not take the pin of another for its own. Raises KeeperError if all owners live."""
        entries = {index: self.owner(index) for index in range(1, page.OWNERS + 1)}
        for index, entry in entries.items():
            if entry is not None and entry[1] == lock:
                return index
        named = self.state().owner
        for index, entry in sorted(entries.items(), key=lambda item: item[1] is not None):
            if index != named and (entry is None or not is_alive(entry[1])):
                if self._load(page.BEATER_OFFSET) == index:
                    # The heartbeat of the dead owner is not that of the new one.
                    self._store(page.BEATER_OFFSET, 0)
                start = page.OWNERS_OFFSET + (index - 1) * page.OWNER_BYTES
                self._view[start : start + page.OWNER_BYTES] = page.pack_owner(pid, lock)
                return index
        raise KeeperError(f"{self.name} has {page.OWNERS} living owners. No other process can use it.")

    def _load(self, offset: int) -> int:
        return _native.load(self._address + offset)

    def _store(self, offset: int, value: int) -> None:
        _native.store(self._address + offset, value)


def newest_complete(held: Iterable[Sealed]) -> tuple[int, int] | None:
    """(attempt number, boundary) of the newest snapshot that all ranks of the job have, by the control page
    of the newest snapshot of this rank. None for a rank alone."""
    newest = max(held, key=lambda each: each.age, default=None)
    named = (0, 0) if newest is None else newest.slot.complete
    return named if named[0] else None


def must_stay(sealed: Sealed, held: Sequence[Sealed]) -> bool:
    """Whether this snapshot, of those that a rank holds, must not be overwritten: of a rank alone the newest;
    among several ranks the newest complete one and all newer ones, which may be complete next."""
    complete = newest_complete(held)
    if complete is None:
        return sealed.age == max((each.age for each in held), default=sealed.age)
    return sealed.order >= complete


class SlotRing:
    """The slots of one rank, and the order in which they are written. Never overwrites a snapshot that
    `must_stay`, nor a requested one that is neither cached nor failed. `is_single`: there is one slot, which
    is overwritten once its snapshot is committed or cached. `incomplete`: the `order` of snapshots that other
    ranks missed: they are overwritten however new they are, or the slots would run out."""

    def __init__(self, slots: Sequence[Slot], *, is_single: bool = False) -> None:
        self.slots, self.is_single = tuple(slots), is_single
        self.incomplete: Collection[tuple[int, int]] = frozenset()

    def without(self, slot: Slot) -> SlotRing | None:
        """The ring without one slot; None for an empty one."""
        left = [each for each in self.slots if each is not slot]
        return SlotRing(left, is_single=self.is_single) if left else None

    def take(self) -> Slot | None:
        """The slot to write next; None while all are in use: then the boundary is skipped.

        A free slot comes first, then one with a damaged record, the oldest sealed one, and the oldest whose
        save failed.
        """
        for slot in self.slots:
            if _state(slot) is SlotState.FREE:
                return slot
        sealed = self._sealed()
        held = [each for _, each in sealed if each is not None]
        choices = []
        for slot, each in sealed:
            if each is None:
                choices.append(((0, (0, 0, 0)), slot))
            elif each.word.state is not SlotState.SEALED:
                continue
            elif not must_stay(each, held) or each.order in self.incomplete:
                waits = slot.wants_persist(each.generation) and slot.cached != each.generation
                if not waits or slot.failed == each.generation:
                    choices.append(((1 if waits else 0, each.age), slot))
            elif self.is_single and each.generation in (slot.persisted, slot.cached):
                choices.append(((0, each.age), slot))
        return min(choices, key=lambda choice: choice[0])[1] if choices else None

    def begin(self, complete: tuple[int, int], attempt_number: int) -> None:
        """Begin an attempt: note the snapshot that all ranks resumed from as the newest complete one, and
        free newer snapshots of earlier attempts. `complete` is (0, 0) for a rank alone."""
        self.set_complete(*complete)
        for slot, sealed in self._sealed() if any(complete) else ():
            is_left = sealed is not None and complete < sealed.order < (attempt_number, 0)
            if sealed is not None and is_left and sealed.word.state is SlotState.SEALED:
                slot.free(sealed.word)

    def set_complete(self, attempt_number: int, boundary: int) -> None:
        """Note in every slot that all ranks have sealed this boundary, or resumed from it."""
        for slot in self.slots:
            slot.set_complete(attempt_number, boundary)

    def request_single(self) -> None:
        """Request a save of the snapshot in a single slot, which cannot be overwritten before; also if it was
        requested for a cache that passed it by."""
        newest = self.newest_sealed() if self.is_single else None
        if newest is None:
            return
        slot, generation = newest[0], newest[1].generation
        is_passed_by = slot.failed == generation and not slot.wants_home(generation)
        if slot.asked != generation or is_passed_by:
            slot.request_persist(generation)

    def newest_sealed(self) -> tuple[Slot, Sealed] | None:
        """The newest snapshot with an undamaged record."""
        whole = [(slot, each) for slot, each in self._sealed() if each is not None]
        return max(whole, key=lambda pair: pair[1].age, default=None)

    def _sealed(self) -> list[tuple[Slot, Sealed | None]]:
        """Sealed and pinned slots; with None for a sealed one with a damaged record."""
        found: list[tuple[Slot, Sealed | None]] = []
        for slot in self.slots:
            try:
                sealed = slot.sealed()
            except DamagedError:
                if _state(slot) is SlotState.SEALED:
                    found.append((slot, None))
                continue
            if sealed is not None:
                found.append((slot, sealed))
        return found


def _state(slot: Slot) -> SlotState | None:
    """None for an invalid state word, which the keeper resets."""
    try:
        return slot.state().state
    except DamagedError:
        return None


def _check_size(descriptor: int, header: SlotHeader) -> None:
    """Raise DamagedError for a region shorter than its mapping would be: touching it would be a SIGBUS."""
    capacities = (header.metadata_capacity, header.image_capacity)
    if any(size % PAGE or size <= 0 for size in capacities):
        raise DamagedError(f"{header.name}: capacities must be whole pages.")
    num_bytes = os.fstat(descriptor).st_size
    if num_bytes < header.num_bytes:
        raise DamagedError(
            f"{header.name} is {num_bytes} bytes long where {header.num_bytes} are needed. It is not used."
        )
