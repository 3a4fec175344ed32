"""The control page of a slot, to the byte: what does not move, the words, the record, the owners.

Owns offsets and encodings; touches no region. docs/memory.md draws the page. Little-endian throughout.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import NamedTuple

from flashckpt import _native
from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.layout import PAGE
from flashckpt.memory.region import constants_region_name, region_name

MAGIC = b"FLCKSLOT"
# A region that holds the constants of several snapshots, laid out as a slot and written once.
CONSTANTS_MAGIC = b"FLCKCNST"
VERSION = 1

# What does not move: 240 bytes and their XXH3-128.
FIXED_OFFSET = 0
_FIXED = struct.Struct("<8sIII4x16sQQQQQQ")
_FIXED_BYTES = 240
_MOST_BYTES = 1 << 62
FIXED_END = 256

# Words, each group on cache lines of its own: who writes them is said in docs/memory.md.
WORD_OFFSET = 256
PERSIST_OFFSET = 320
PERSISTED_OFFSET = 384
FAILED_OFFSET = 392
FAILED_ERRNO_OFFSET = 400
TORN_OFFSET = 448
TORN_COUNT_OFFSET = 456
TORN_LEAVES_OFFSET = 464
TORN_LEAVES = 22
BOUNDARIES_OFFSET = 640
BEAT_NS_OFFSET = 648
BEATER_OFFSET = 656
PATIENCE_NS_OFFSET = 664
STUCK_BOUNDARIES_OFFSET = 704
STUCK_SINCE_OFFSET = 712

# The sealed record: XXH3-128 of the metadata, fields, XXH3-128 of both.
RECORD_OFFSET = 768
RECORD_BYTES = 256
RECORD_FIELDS_OFFSET = 16
RECORD_FIELDS_END = 240
_RECORD = struct.Struct("<16Q")

# The owner table: entry i is owner i + 1.
OWNERS_OFFSET = 1024
OWNERS = 16
OWNER_BYTES = 64
_OWNER = struct.Struct("<Q48s")

_MASK_48 = (1 << 48) - 1


class State(IntEnum):
    FREE = 0
    WRITING = 1
    SEALED = 2
    PINNED = 3


class Word(NamedTuple):
    """The state word of a slot, taken apart: {state:8 | owner:8 | generation:48}."""

    state: State
    owner: int
    generation: int

    def packed(self) -> int:
        return self.state | self.owner << 8 | self.generation << 16

    @classmethod
    def unpacked(cls, word: int) -> Word:
        """Raises DamagedError for a state that does not exist."""
        if word & 0xFF > State.PINNED:
            raise DamagedError(f"A slot's state word {word:#x} is none. The slot is not used.")
        return cls(State(word & 0xFF), word >> 8 & 0xFF, word >> 16 & _MASK_48)


class Heartbeat(NamedTuple):
    """A trainer's sign of life: boundaries passed, CLOCK_MONOTONIC ns of the last (or of when the trainer
    began to be watched), its owner's index, and how many ns without a boundary are a hang; 0 while none
    is expected."""

    boundaries: int
    beat_ns: int
    owner: int
    patience_ns: int


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What does not move in a slot. Offsets and sizes are in bytes from the region's first."""

    index: int
    rank: int
    identity: bytes
    nonce: int
    metadata_capacity: int
    image_capacity: int
    holds_constants: bool = False

    @property
    def name(self) -> str:
        if self.holds_constants:
            return constants_region_name(self.rank, self.nonce)
        return region_name(self.rank, self.index, self.nonce)

    @property
    def metadata_offset(self) -> int:
        return PAGE

    @property
    def image_offset(self) -> int:
        return PAGE + self.metadata_capacity

    @property
    def num_bytes(self) -> int:
        return self.image_offset + self.image_capacity

    def packed(self) -> bytes:
        fields = _FIXED.pack(
            CONSTANTS_MAGIC if self.holds_constants else MAGIC, VERSION, self.index, self.rank,
            self.identity, self.nonce, self.num_bytes,
            self.metadata_offset, self.metadata_capacity, self.image_offset, self.image_capacity,
        ).ljust(_FIXED_BYTES, b"\0")  # fmt: skip
        return fields + _native.xxh3_128(fields)

    @classmethod
    def unpacked(cls, data: bytes) -> Fixed:
        """Raises DamagedError unless every field is what `packed` wrote, FormatError for another version."""
        fields = data[:_FIXED_BYTES]
        if len(data) < FIXED_END or _native.xxh3_128(fields) != data[_FIXED_BYTES:FIXED_END]:
            raise DamagedError("A slot's control page does not match its checksum. The slot is not used.")
        magic, version, index, rank, identity, nonce, num_bytes, *rest = _FIXED.unpack_from(fields)
        if max(num_bytes, *rest) >= _MOST_BYTES:
            raise DamagedError("A slot's control page claims more than memory can be. The slot is not used.")
        if magic not in (MAGIC, CONSTANTS_MAGIC):
            raise DamagedError("A region does not begin as a slot does. It is not used.")
        if version != VERSION:
            raise FormatError(f"A slot has version {version}; this library reads {VERSION}. It was left.")
        fixed = cls(
            index=index,
            rank=rank,
            identity=identity,
            nonce=nonce,
            metadata_capacity=rest[1],
            image_capacity=rest[3],
            holds_constants=magic == CONSTANTS_MAGIC,
        )
        if fixed.packed() != data[:FIXED_END] or num_bytes % PAGE or fixed.image_offset % PAGE:
            raise DamagedError("A slot's control page contradicts itself. The slot is not used.")
        return fixed


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a trainer writes about a snapshot before the sealer checksums and seals it. `image_bytes` are
    those of the shard; `constants_start` and `constants_bytes` are both 0 where there are no constants.
    `constants_nonce` names the region that holds
    them, where it is not the slot itself: then they have no start here."""

    attempt_number: int
    attempt_nonce: int
    step: int
    generation: int
    plan_id: int
    plan_bytes: int
    table_count: int
    values_bytes: int
    metadata_bytes: int
    image_bytes: int
    data_start: int
    captured_ns: int
    flags: int = 0
    constants_start: int = 0
    constants_bytes: int = 0
    constants_nonce: int = 0

    def fits(self, metadata_capacity: int, image_capacity: int) -> bool:
        """Whether what it describes can stand in a slot of these capacities."""
        end = self.image_bytes
        if self.constants_nonce:
            if self.constants_start or not self.constants_bytes:
                return False
        elif self.constants_start or self.constants_bytes:
            if self.constants_start % PAGE or self.constants_start < end or not self.constants_bytes:
                return False
            end = self.constants_start + self.constants_bytes
        return (
            self.metadata_bytes <= metadata_capacity
            and end <= image_capacity
            and self.data_start <= self.image_bytes
        )

    def packed(self) -> bytes:
        """The fields' bytes [16:240] of the record: the checksums around them are the sealer's."""
        return _RECORD.pack(*astuple(self)).ljust(RECORD_FIELDS_END - RECORD_FIELDS_OFFSET, b"\0")

    @classmethod
    def unpacked(cls, data: bytes) -> Record:
        """Raises DamagedError where the record's own checksum does not match."""
        if _native.xxh3_128(data[:RECORD_FIELDS_END]) != data[RECORD_FIELDS_END:RECORD_BYTES]:
            raise DamagedError("A slot's record does not match its checksum. The snapshot is not used.")
        fields = _RECORD.unpack_from(data, RECORD_FIELDS_OFFSET)
        return cls(**dict(zip(cls.__dataclass_fields__, fields, strict=True)))


def pack_owner(pid: int, lock: str) -> bytes:
    """An entry of the owner table: whoever holds the lock of that name is the owner."""
    entry = _OWNER.pack(pid, lock.encode())
    return entry + _native.xxh3_64(entry).to_bytes(8, "little")


def unpack_owner(entry: bytes) -> tuple[int, str] | None:
    """Pid and lock of an entry, None for one that was never written, or only half."""
    fields = entry[: _OWNER.size]
    if _native.xxh3_64(fields).to_bytes(8, "little") != entry[_OWNER.size :]:
        return None
    pid, lock = _OWNER.unpack(fields)
    try:
        return pid, lock.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        return None


def round_up(num_bytes: int) -> int:
    """To whole pages."""
    return -(-num_bytes // PAGE) * PAGE
