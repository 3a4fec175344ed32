"""One slot: a region mapped, its word, its record, its metadata and (for a trainer) its image. And the ring
of a rank's slots: which of them is written next.

Owns the mapping and every change of the control page. The state word changes by compare-and-swap only:
FREE -> WRITING -> (UNCONFIRMED ->) SEALED <-> PINNED, SEALED -> FREE. Never frees or resizes the region
itself.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from flashckpt import _native
from flashckpt.errors import DamagedError, KeeperError
from flashckpt.format.layout import PAGE
from flashckpt.format.metadata import Geometry, Metadata
from flashckpt.format.names import AttemptName
from flashckpt.memory import control_page as page
from flashckpt.memory import forks
from flashckpt.memory.control_page import Record, SlotHeader, SlotSize

_MASK_48 = (1 << 48) - 1


class SlotState(IntEnum):
    FREE = 0
    WRITING = 1
    SEALED = 2
    PINNED = 3
    UNCONFIRMED = 4
    """Complete, and not yet trusted: its trainer has not confirmed it (docs/capture.md, "An abort")."""

    @property
    def is_begun(self) -> bool:
        """Whether the slot holds a snapshot that only its trainer may use. It is gone if the trainer dies."""
        return self in (SlotState.WRITING, SlotState.UNCONFIRMED)


class Word(NamedTuple):
    """The state word of a slot, taken apart: {state:8 | owner:8 | generation:48}."""

    state: SlotState
    owner: int
    generation: int

    def packed(self) -> int:
        return self.state | self.owner << 8 | self.generation << 16

    @classmethod
    def unpacked(cls, word: int) -> Word:
        """Raises DamagedError for a state that does not exist."""
        if word & 0xFF > SlotState.UNCONFIRMED:
            raise DamagedError(f"A slot's state word {word:#x} is none. The slot is not used.")
        return cls(SlotState(word & 0xFF), word >> 8 & 0xFF, word >> 16 & _MASK_48)


class Heartbeat(NamedTuple):
    """A trainer's sign of life: boundaries passed, CLOCK_MONOTONIC ns of the last (or of when the trainer
    began to be watched), its owner's index, and how many ns without a boundary are a hang; 0 while none
    is expected."""

    boundaries: int
    beat_ns: int
    owner: int
    patience_ns: int


@dataclass(frozen=True)
class Sealed:
    """A sealed (or pinned) snapshot of a slot: its word and its verified record."""

    slot: Slot = field(repr=False, compare=False)
    word: Word
    record: Record
    metadata_checksum: bytes

    @property
    def generation(self) -> int:
        return self.record.generation

    @property
    def key(self) -> tuple[str, int]:
        """Its slot, and the generation that it has in it."""
        return self.slot.name, self.generation

    @property
    def is_persisted(self) -> bool:
        return self.slot.persisted == self.generation

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def boundary(self) -> int:
        """Which boundary of that attempt it is: the same on all ranks."""
        return self.record.boundary

    @property
    def attempt(self) -> AttemptName:
        """The attempt that captured it."""
        return AttemptName(self.record.attempt_number, f"{self.record.attempt_nonce:08x}")

    @property
    def content(self) -> tuple[AttemptName, int, int]:
        """Which content it is, on all ranks: attempt, step and boundary."""
        return self.attempt, self.step, self.boundary

    @property
    def order(self) -> tuple[int, int]:
        """(number of the attempt, boundary): sorts snapshots of all ranks, newest last."""
        return self.record.attempt_number, self.record.boundary

    @property
    def age(self) -> tuple[int, int, int]:
        """Sorts snapshots of one rank, newest last."""
        return self.record.attempt_number, self.record.step, self.record.captured_ns


class Slot(forks.OwnDescriptor):
    """A mapped slot. The descriptor stays the caller's until `close`, which closes it too. Addresses are this
    process's; offsets are in bytes from the region's first."""

    def __init__(
        self, descriptor: int, header: SlotHeader, *, map_image: bool, is_read_only: bool = False
    ) -> None:
        self.header = header
        self.name, self.index, self.rank = header.name, header.index, header.rank
        self.size = SlotSize(header.metadata_capacity, header.image_capacity)
        self.image_offset = header.image_offset
        length = header.num_bytes if map_image else header.image_offset
        self._map: Any = None
        if is_read_only:
            self._map = mmap.mmap(descriptor, length, prot=mmap.PROT_READ)
        else:
            self._map = _native.Mapping(descriptor, length)
        self._address = _native.address_of(self._map)
        self.word_address = self._address + page.WORD_OFFSET
        self.metadata_address = self._address + PAGE
        self._maps_image = map_image
        # Last: a slot that could not be mapped has no descriptor, and its number is another file's soon.
        super().__init__(descriptor)

    @staticmethod
    def format(descriptor: int, header: SlotHeader) -> None:
        """Make a slot of an allocated region. The header is written last, so that a region without it is one
        whose maker died before it was whole."""
        _check_size(descriptor, header)
        os.pwrite(descriptor, bytes(PAGE - page.HEADER_END), page.HEADER_END)
        os.pwrite(descriptor, header.packed(), page.HEADER_OFFSET)

    @classmethod
    def open(
        cls,
        descriptor: int,
        *,
        map_image: bool,
        identity: bytes | None = None,
        is_read_only: bool = False,
    ) -> Slot:
        """Map a slot that was formatted before; one that is read-only can be looked at, and that is all.
        Raises DamagedError, FormatError, or KeeperError for a slot of another run."""
        header = SlotHeader.unpacked(os.pread(descriptor, page.HEADER_END, page.HEADER_OFFSET))
        _check_size(descriptor, header)
        if identity is not None and header.identity != identity:
            raise KeeperError(f"{header.name} is a slot of another run. It was left alone.")
        return cls(descriptor, header, map_image=map_image, is_read_only=is_read_only)

    def close(self) -> bool:
        """Unmap and close. Views of the slot must be gone; a mapping that is still viewed goes with them. A
        forked child leaves the mapping alone, which is not its own."""
        was_open = super().close()
        if was_open:
            try:
                self._map.close()
            except BufferError:
                del self._map
        return was_open

    # Places

    @property
    def mapping(self) -> _native.Mapping:
        """To make it known to a device, for as long as it is mapped."""
        found: _native.Mapping = self._map
        return found

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
        """Touch every page but the control page: a first touch by a copy would cost it twenty times as
        much."""
        _native.populate(self.metadata_address, sum(self.size), threads=1)

    # The word

    def state(self) -> Word:
        """Raises DamagedError for a word that is none."""
        return Word.unpacked(_native.load(self.word_address))

    def mend(self) -> bool:
        """Free a slot whose word is none (a flipped bit): nobody could ever change it again."""
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
        """Take a FREE or SEALED slot for writing: the new generation, or None if it is no longer to be
        had. What it held is gone from here on."""
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
        """Give up what is not sealed yet: WRITING or UNCONFIRMED -> FREE."""
        free = Word(SlotState.FREE, 0, generation)
        begun = (SlotState.WRITING, SlotState.UNCONFIRMED)
        return any(self.change(Word(state, owner, generation), free) for state in begun)

    def confirm(self, owner: int, generation: int) -> bool:
        """UNCONFIRMED -> SEALED. False if the slot no longer holds this snapshot."""
        unconfirmed = Word(SlotState.UNCONFIRMED, owner, generation)
        return self.change(unconfirmed, Word(SlotState.SEALED, 0, generation))

    def pin(self, owner: int, sealed: Word) -> Word | None:
        """SEALED -> PINNED: nobody overwrites it. The pinned word, or None if it is no longer sealed."""
        pinned = Word(SlotState.PINNED, owner, sealed.generation)
        if sealed.state is not SlotState.SEALED or not self.change(sealed, pinned):
            return None
        return pinned

    def unpin(self, pinned: Word) -> bool:
        """PINNED -> SEALED. False if somebody took the pin away: then the slot is not ours any more."""
        return self.change(pinned, Word(SlotState.SEALED, 0, pinned.generation))

    def holds(self, word: Word) -> bool:
        """Whether the word is exactly this one."""
        return _native.load(self.word_address) == word.packed()

    def free(self, word: Word) -> bool:
        """Drop a sealed or pinned snapshot: -> FREE, if the word is still that one."""
        return self.change(word, Word(SlotState.FREE, 0, word.generation))

    # The record and the metadata

    def write_record(self, record: Record) -> None:
        """Write the fields that the sealer will checksum. The slot must be this process's own, WRITING."""
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
        moves: memoryview | None = None,
        held: memoryview | None = None,
        confirms: bool = False,
    ) -> None:
        """Hand a slot whose metadata, but for the `count` digests, and record are written to the thread that
        seals it: once every wait is over, what comes late has been put in its place (moves: u64 triples of
        source, destination and bytes) and every digest is there, the last ones as they are `held` elsewhere
        (u64). `confirms`: the snapshot is left UNCONFIRMED, for this process to confirm."""
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
            moves=moves,
            held=held,
        )

    def sealed(self) -> Sealed | None:
        """What is sealed or pinned in the slot, or None. Raises DamagedError for a record whose checksum,
        generation or lengths are not right."""
        word = self.state()
        if word.state not in (SlotState.SEALED, SlotState.PINNED):
            return None
        data = bytes(self._view[page.RECORD_OFFSET : page.RECORD_OFFSET + page.RECORD_BYTES])
        after = self.state()
        if after.generation != word.generation or after.state not in (SlotState.SEALED, SlotState.PINNED):
            return None
        record = Record.unpacked(data, word.generation, self.size)
        return Sealed(self, word, record, data[: page.RECORD_FIELDS_OFFSET])

    def metadata(self, sealed: Sealed) -> Metadata:
        """The metadata of a sealed snapshot, copied. Raises DamagedError where it is not what was sealed."""
        data = bytes(self._view[PAGE : PAGE + sealed.record.metadata_bytes])
        if _native.xxh3_128(data) != sealed.metadata_checksum:
            raise DamagedError(
                "A slot's metadata does not match its checksum. The snapshot is not used.", step=sealed.step
            )
        metadata = Metadata.unpack(data)
        image, record = metadata.image, sealed.record
        found = image.shard.data_start, image.num_bytes, image.constants_bytes
        if found != (record.data_start, record.image_bytes, record.constants_bytes):
            raise DamagedError("A slot's plan contradicts its record. It is not used.", step=sealed.step)
        return metadata

    def not_held(self, metadata: Metadata) -> list[int]:
        """Of a region of constants: indexes, among the leaves of a snapshot that names it, of those that it
        was not sealed with; all of them where it was sealed with other leaves, or is damaged: then it was
        never this snapshot's. Whether its bytes still have their digests is for an audit to say."""
        first = metadata.image.first_constant
        try:
            sealed = self.sealed()
            held = self.metadata(sealed) if sealed is not None else None
        except DamagedError:
            held = None
        if held is None or held.layout != metadata.constants:
            return list(range(first, len(metadata.leaves)))
        pairs = enumerate(zip(held.digests, metadata.constants_digests, strict=True), first)
        return [index for index, (digest, wanted) in pairs if digest != wanted]

    # Words between trainer and keeper

    def request_persist(self, generation: int) -> None:
        """Ask that this generation be persisted, now or as soon as it is sealed."""
        self._store(page.PERSIST_OFFSET, generation)

    @property
    def asked(self) -> int:
        """The generation that was last asked to be persisted."""
        return self._load(page.PERSIST_OFFSET)

    def request_persist_after(self, asked: int, generation: int) -> bool:
        """The same beside a trainer that lives: what it has asked for since `asked` was read stands."""
        return _native.compare_exchange(self._address + page.PERSIST_OFFSET, asked, generation)

    def wants_persist(self, generation: int) -> bool:
        """Whether it was asked for and is not done."""
        return self._load(page.PERSIST_OFFSET) == generation != self.persisted

    @property
    def persisted(self) -> int:
        """The newest generation of this slot that is committed."""
        return self._load(page.PERSISTED_OFFSET)

    def set_persisted(self, generation: int) -> None:
        self._store(page.PERSISTED_OFFSET, generation)

    @property
    def failed(self) -> tuple[int, int]:
        """(generation, errno) of the last try that failed; errno 0 where there is none."""
        return self._load(page.FAILED_OFFSET), self._load(page.FAILED_ERRNO_OFFSET)

    def set_failed(self, generation: int, error_number: int) -> None:
        self._store(page.FAILED_ERRNO_OFFSET, error_number)
        self._store(page.FAILED_OFFSET, generation)

    @property
    def torn(self) -> tuple[int, tuple[int, ...]]:
        """(generation, indexes of the first leaves that differed, in image order) of the last snapshot
        that an audit discarded; no index where the record or the metadata itself was damaged."""
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
        """The trainer's sign that it passes boundaries."""
        self._store(page.PATIENCE_NS_OFFSET, heartbeat.patience_ns)
        self._store(page.BEAT_NS_OFFSET, heartbeat.beat_ns)
        self._store(page.BOUNDARIES_OFFSET, heartbeat.boundaries)
        # Last: what stands beside the owner of now must not be what an earlier one left.
        self._store(page.BEATER_OFFSET, heartbeat.owner)

    @property
    def heartbeat(self) -> Heartbeat:
        """As it was last written; its owner is 0 where that one is not the slot's any more."""
        offsets = page.BOUNDARIES_OFFSET, page.BEAT_NS_OFFSET, page.BEATER_OFFSET, page.PATIENCE_NS_OFFSET
        return Heartbeat(*map(self._load, offsets))

    @property
    def complete(self) -> tuple[int, int]:
        """(number of the attempt, boundary) of the newest snapshot that all ranks have sealed; zeros where
        this rank has no others."""
        return page.unpack_complete(self._load(page.COMPLETE_OFFSET))

    def set_complete(self, attempt_number: int, boundary: int) -> None:
        """Among several ranks: who keeps their schedule says it, from the attempt's start on."""
        self._store(page.COMPLETE_OFFSET, page.pack_complete(attempt_number, boundary))

    @property
    def stuck(self) -> tuple[int, int]:
        """(boundaries, beat_ns) of the heartbeat after which the keeper has told of a hang that it has not
        seen end; zeros for none."""
        return self._load(page.STUCK_BOUNDARIES_OFFSET), self._load(page.STUCK_SINCE_OFFSET)

    def set_stuck(self, boundaries: int, beat_ns: int) -> None:
        self._store(page.STUCK_BOUNDARIES_OFFSET, boundaries)
        self._store(page.STUCK_SINCE_OFFSET, beat_ns)

    # Owners

    def owner(self, index: int) -> tuple[int, str] | None:
        """(pid, lock) of an owner's index, None for one that is none."""
        if not 1 <= index <= page.OWNERS:
            return None
        start = page.OWNERS_OFFSET + (index - 1) * page.OWNER_BYTES
        return page.unpack_owner(bytes(self._view[start : start + page.OWNER_BYTES]))

    def enroll(self, pid: int, lock: str, is_alive: Callable[[str], bool]) -> int:
        """Give the holder of `lock` an owner's index in this slot, the keeper alone does. Entries of the
        dead are used again once no word names them. Raises KeeperError if all owners live."""
        entries = {index: self.owner(index) for index in range(1, page.OWNERS + 1)}
        for index, entry in entries.items():
            if entry is not None and entry[1] == lock:
                return index
        named = self.state().owner
        for index, entry in entries.items():
            if index != named and (entry is None or not is_alive(entry[1])):
                if self._load(page.BEATER_OFFSET) == index:
                    # The dead one's heartbeat is not that of who has its index from now on.
                    self._store(page.BEATER_OFFSET, 0)
                    self.set_stuck(0, 0)
                start = page.OWNERS_OFFSET + (index - 1) * page.OWNER_BYTES
                self._view[start : start + page.OWNER_BYTES] = page.pack_owner(pid, lock)
                return index
        raise KeeperError(f"{self.name} has {page.OWNERS} living owners. No further process can use it.")

    def _load(self, offset: int) -> int:
        return _native.load(self._address + offset)

    def _store(self, offset: int, value: int) -> None:
        _native.store(self._address + offset, value)


def newest_complete(held: Iterable[Sealed]) -> tuple[int, int] | None:
    """(number of the attempt, boundary) of the newest snapshot that all ranks of the job have, as the control
    page of the newest that this rank holds says. None for a rank that has no others."""
    newest = max(held, key=lambda each: each.age, default=None)
    named = (0, 0) if newest is None else newest.slot.complete
    return named if named[0] else None


def must_stay(sealed: Sealed, held: Sequence[Sealed]) -> bool:
    """Whether this one of the snapshots that a rank holds is never overwritten: the newest where it is alone;
    among ranks the newest complete one and all that are newer, of which each may be complete next."""
    complete = newest_complete(held)
    if complete is None:
        return sealed.age == max((each.age for each in held), default=sealed.age)
    return sealed.order >= complete


class SlotRing:
    """The slots of one rank, and the order in which they are written. A snapshot that `must_stay` is never
    given away, nor one that is still to be persisted and whose try has not failed. `is_single`: there is to
    be one slot, whose snapshot is given away once it is committed. `void`: snapshots, by their `order`, that
    other ranks have missed: they are given away however new they are, or ranks that miss different ones would
    fill up with what nobody else has."""

    def __init__(self, slots: Sequence[Slot], *, is_single: bool = False) -> None:
        self.slots, self.is_single = tuple(slots), is_single
        self.void: Collection[tuple[int, int]] = frozenset()

    def without(self, slot: Slot) -> SlotRing | None:
        """The others; None where there are none."""
        left = [each for each in self.slots if each is not slot]
        return SlotRing(left, is_single=self.is_single) if left else None

    def take(self) -> Slot | None:
        """The slot to write next, for `begin`; None while all are in use: then the boundary is skipped.

        FREE before the oldest sealed before the oldest whose persisting failed. A slot whose record is
        damaged holds nothing and counts as the oldest.
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
            elif not must_stay(each, held) or each.order in self.void:
                waits = slot.wants_persist(each.generation)
                if not waits or slot.failed[0] == each.generation:
                    choices.append(((1 if waits else 0, each.age), slot))
            elif self.is_single and slot.persisted == each.generation:
                choices.append(((0, each.age), slot))
        return min(choices, key=lambda choice: choice[0])[1] if choices else None

    def begin(self, complete: tuple[int, int], attempt_number: int) -> None:
        """Say in slots that an attempt was given what stays: among ranks what they went on from, until all
        have a newer one. What an earlier attempt had beyond that is nobody's any more, and in the way of what
        comes. `complete` is (0, 0) for a rank alone."""
        self.set_complete(*complete)
        for slot, sealed in self._sealed() if any(complete) else ():
            is_left = sealed is not None and complete < sealed.order < (attempt_number, 0)
            if sealed is not None and is_left and sealed.word.state is SlotState.SEALED:
                slot.free(sealed.word)

    def set_complete(self, attempt_number: int, boundary: int) -> None:
        """Say in every slot that all ranks have sealed this boundary, or went on from it."""
        for slot in self.slots:
            slot.set_complete(attempt_number, boundary)

    def make_room(self) -> None:
        """Nothing can be taken: where that is so until the only snapshot is committed, ask for that."""
        newest = self.newest_sealed() if self.is_single else None
        if newest is not None and newest[0].asked != newest[1].generation:
            newest[0].request_persist(newest[1].generation)

    def newest_sealed(self) -> tuple[Slot, Sealed] | None:
        """The newest snapshot that is whole as far as its record says."""
        whole = [(slot, each) for slot, each in self._sealed() if each is not None]
        return max(whole, key=lambda pair: pair[1].age, default=None)

    def _sealed(self) -> list[tuple[Slot, Sealed | None]]:
        """Slots that are sealed or pinned, with None where a sealed one's record is damaged."""
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
    """None for a word that is none: the keeper mends it."""
    try:
        return slot.state().state
    except DamagedError:
        return None


def _check_size(descriptor: int, header: SlotHeader) -> None:
    """A mapping longer than its file is a SIGBUS waiting for its touch."""
    capacities = (header.metadata_capacity, header.image_capacity)
    if any(size % PAGE or size <= 0 for size in capacities):
        raise DamagedError(f"{header.name}: capacities must be whole pages.")
    num_bytes = os.fstat(descriptor).st_size
    if num_bytes < header.num_bytes:
        raise DamagedError(
            f"{header.name} is {num_bytes} bytes long where {header.num_bytes} are needed. It is not used."
        )
