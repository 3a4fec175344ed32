"""One slot: a region mapped, its word, its record, its metadata and (for a trainer) its image.

Owns the mapping and every change of the control page. The state word changes by compare-and-swap only:
FREE -> WRITING -> SEALED <-> PINNED, SEALED -> FREE. Never frees or resizes the region itself.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flashckpt import _native
from flashckpt.errors import DamagedError, KeeperError
from flashckpt.format.layout import PAGE
from flashckpt.format.metadata import Metadata
from flashckpt.format.names import AttemptName
from flashckpt.memory import forks, page
from flashckpt.memory.page import Fixed, Heartbeat, Record, State, Word


@dataclass(frozen=True)
class Sealed:
    """A sealed (or pinned) snapshot of a slot: its word and its verified record."""

    word: Word
    record: Record
    metadata_checksum: bytes

    @property
    def generation(self) -> int:
        return self.record.generation

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def attempt(self) -> AttemptName:
        """The attempt that captured it."""
        return AttemptName(self.record.attempt_number, f"{self.record.attempt_nonce:08x}")

    @property
    def age(self) -> tuple[int, int, int]:
        """Sorts snapshots of one rank, newest last."""
        return self.record.attempt_number, self.record.step, self.record.captured_ns


class Slot:
    """A mapped slot. The descriptor stays the caller's until `close`, which closes it too."""

    def __init__(self, descriptor: int, fixed: Fixed, *, map_image: bool, is_read_only: bool = False) -> None:
        self.descriptor = descriptor
        self.fixed = fixed
        length = fixed.num_bytes if map_image else fixed.image_offset
        self._map: Any = None
        if is_read_only:
            self._map = mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ)
        else:
            self._map = _native.Mapping(descriptor, length)
        self._address = _native.address_of(self._map)
        self._maps_image = map_image
        forks.hold(self)

    def forked(self) -> None:
        # Its mapping is not the child's, which leaves it alone.
        forks.close(self.descriptor)
        self.descriptor = -1

    @staticmethod
    def format(
        descriptor: int,
        *,
        identity: bytes,
        rank: int,
        index: int,
        nonce: int,
        metadata_capacity: int,
        image_capacity: int,
        holds_constants: bool = False,
    ) -> Fixed:
        """Make a slot of an allocated region: capacities in bytes, whole pages. The fixed part is written
        last, so that a region without it is one whose maker died before it was whole. `holds_constants`: it
        is not written in turn, but once, with what the snapshots in several slots share."""
        fixed = Fixed(
            index=index,
            rank=rank,
            identity=identity,
            nonce=nonce,
            metadata_capacity=metadata_capacity,
            image_capacity=image_capacity,
            holds_constants=holds_constants,
        )
        _check_size(descriptor, fixed)
        os.pwrite(descriptor, bytes(PAGE - page.FIXED_END), page.FIXED_END)
        os.pwrite(descriptor, fixed.packed(), page.FIXED_OFFSET)
        return fixed

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
        fixed = Fixed.unpacked(os.pread(descriptor, page.FIXED_END, page.FIXED_OFFSET))
        _check_size(descriptor, fixed)
        if identity is not None and fixed.identity != identity:
            raise KeeperError(f"{fixed.name} is a slot of another run. It was left alone.")
        return cls(descriptor, fixed, map_image=map_image, is_read_only=is_read_only)

    def close(self) -> None:
        """Unmap and close. Views of the slot must be gone; a mapping that is still viewed goes with them."""
        # Forgotten first: a child that is forked in between must not close what has the number next.
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            try:
                self._map.close()
            except BufferError:
                del self._map

    # Places

    @property
    def name(self) -> str:
        return self.fixed.name

    @property
    def index(self) -> int:
        return self.fixed.index

    @property
    def rank(self) -> int:
        return self.fixed.rank

    @property
    def mapping(self) -> _native.Mapping:
        """To make it known to a device, for as long as it is mapped."""
        found: _native.Mapping = self._map
        return found

    @property
    def word_address(self) -> int:
        return self._address + page.WORD_OFFSET

    @property
    def record_address(self) -> int:
        return self._address + page.RECORD_OFFSET

    @property
    def metadata_address(self) -> int:
        return self._address + self.fixed.metadata_offset

    @property
    def metadata_capacity(self) -> int:
        return self.fixed.metadata_capacity

    @property
    def image_offset(self) -> int:
        return self.fixed.image_offset

    @property
    def image_capacity(self) -> int:
        return self.fixed.image_capacity

    @property
    def image_address(self) -> int:
        assert self._maps_image, "this process maps no image"
        return self._address + self.fixed.image_offset

    @property
    def metadata_view(self) -> memoryview:
        return self._view[self.fixed.metadata_offset : self.fixed.image_offset]

    @property
    def image_view(self) -> memoryview:
        assert self._maps_image, "this process maps no image"
        return self._view[self.fixed.image_offset :]

    @property
    def _view(self) -> memoryview:
        return memoryview(self._map)

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
            free = Word(State.FREE, 0, raw >> 16)
            return _native.compare_exchange(self.word_address, raw, free.packed())
        return False

    def change(self, expected: Word, desired: Word) -> bool:
        return _native.compare_exchange(self.word_address, expected.packed(), desired.packed())

    def begin(self, owner: int) -> int | None:
        """Take a FREE or SEALED slot for writing: the new generation, or None if it is no longer to be
        had. What it held is gone from here on."""
        word = self.state()
        if word.state is State.SEALED:
            free = Word(State.FREE, 0, word.generation)
            if not self.change(word, free):
                return None
            word = free
        if word.state is not State.FREE:
            return None
        generation = word.generation + 1
        return generation if self.change(word, Word(State.WRITING, owner, generation)) else None

    def abandon(self, owner: int, generation: int) -> bool:
        """Give up what is being written: WRITING -> FREE."""
        return self.change(Word(State.WRITING, owner, generation), Word(State.FREE, 0, generation))

    def pin(self, owner: int, sealed: Word) -> Word | None:
        """SEALED -> PINNED: nobody overwrites it. The pinned word, or None if it is no longer sealed."""
        pinned = Word(State.PINNED, owner, sealed.generation)
        if sealed.state is not State.SEALED or not self.change(sealed, pinned):
            return None
        return pinned

    def unpin(self, pinned: Word) -> bool:
        """PINNED -> SEALED. False if somebody took the pin away: then the slot is not ours any more."""
        return self.change(pinned, Word(State.SEALED, 0, pinned.generation))

    def holds(self, word: Word) -> bool:
        """Whether the word is exactly this one."""
        return _native.load(self.word_address) == word.packed()

    def free(self, word: Word) -> bool:
        """Drop a sealed or pinned snapshot: -> FREE, if the word is still that one."""
        return self.change(word, Word(State.FREE, 0, word.generation))

    # The record and the metadata

    def write_record(self, record: Record) -> None:
        """Write the fields that the sealer will checksum. The slot must be this process's own, WRITING."""
        start = page.RECORD_OFFSET + page.RECORD_FIELDS_OFFSET
        fields = record.packed()
        self._view[start : start + len(fields)] = fields

    def sealed(self) -> Sealed | None:
        """What is sealed or pinned in the slot, or None. Raises DamagedError for a record whose checksum,
        generation or lengths are not right."""
        word = self.state()
        if word.state not in (State.SEALED, State.PINNED):
            return None
        data = bytes(self._view[page.RECORD_OFFSET : page.RECORD_OFFSET + page.RECORD_BYTES])
        after = self.state()
        if after.generation != word.generation or after.state not in (State.SEALED, State.PINNED):
            return None
        record = Record.unpacked(data)
        fits = record.fits(self.metadata_capacity, self.image_capacity)
        if record.generation != word.generation or not fits:
            raise DamagedError("A slot's record contradicts its region. The snapshot is not used.")
        return Sealed(word, record, data[: page.RECORD_FIELDS_OFFSET])

    def metadata(self, sealed: Sealed) -> Metadata:
        """The metadata of a sealed snapshot, copied. Raises DamagedError where it is not what was sealed."""
        start = self.fixed.metadata_offset
        data = bytes(self._view[start : start + sealed.record.metadata_bytes])
        if _native.xxh3_128(data) != sealed.metadata_checksum:
            raise DamagedError(
                "A slot's metadata does not match its checksum. The snapshot is not used.", step=sealed.step
            )
        metadata = Metadata.unpack(data)
        layout, image, record = metadata.layout, metadata.image, sealed.record
        found = layout.data_start, layout.num_bytes, image.constants_start, image.constants_bytes
        said = record.data_start, record.image_bytes, record.constants_start, record.constants_bytes
        if found != said or metadata.shared != bool(record.constants_nonce):
            raise DamagedError("A slot's plan contradicts its record. It is not used.", step=sealed.step)
        return metadata

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
        return Heartbeat(
            self._load(page.BOUNDARIES_OFFSET),
            self._load(page.BEAT_NS_OFFSET),
            self._load(page.BEATER_OFFSET),
            self._load(page.PATIENCE_NS_OFFSET),
        )

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


def digest_table(count: int) -> array[int]:
    """A table in which no digest is taken yet: a seal refuses it as it is."""
    return array("Q", [_native.EMPTY_DIGEST]) * count


def _check_size(descriptor: int, fixed: Fixed) -> None:
    """A mapping longer than its file is a SIGBUS waiting for its touch."""
    capacities = (fixed.metadata_capacity, fixed.image_capacity)
    if any(size % PAGE or size <= 0 for size in capacities):
        raise DamagedError(f"{fixed.name}: capacities must be whole pages.")
    num_bytes = os.fstat(descriptor).st_size
    if num_bytes < fixed.num_bytes:
        raise DamagedError(
            f"{fixed.name} is {num_bytes} bytes long where {fixed.num_bytes} are needed. It is not used."
        )
