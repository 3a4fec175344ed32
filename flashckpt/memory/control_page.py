"""How a slot's region is laid out, to the byte: its size, and what its control page holds.

Owns offsets and encodings; touches no region. docs/memory.md draws the page. Little-endian throughout.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass
from typing import NamedTuple

from flashckpt import _native
from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.layout import PAGE
from flashckpt.memory.region import region_name

MAGIC = b"FLCKSLOT"
# A region that holds the constants of several snapshots, laid out as a slot and written once.
CONSTANTS_MAGIC = b"FLCKCNST"
VERSION = 1

# What does not change: 240 bytes and their XXH3-128.
HEADER_OFFSET = 0
_HEADER = struct.Struct("<8sIII4x16sQQQQQQ")
_HEADER_BYTES = 240
_MOST_BYTES = 1 << 62
HEADER_END = 256

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
COMPLETE_OFFSET = 672
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

# Headroom in a slot for what a patch may add, beside a mebibyte: a sixteenth of the image, half of the
# metadata.
_IMAGE_SLACK = 16
_METADATA_SLACK = 2
_LEAST_SLACK_BYTES = 1 << 20

# The word of the newest complete snapshot: the number of its attempt above, its boundary below.
_BOUNDARY_BITS = 34


def round_up(num_bytes: int) -> int:
    """To whole pages."""
    return -(-num_bytes // PAGE) * PAGE


class SlotSize(NamedTuple):
    """Bytes of metadata and of image that a slot has room for, or that a state needs."""

    metadata_bytes: int
    image_bytes: int

    @property
    def region_bytes(self) -> int:
        """What a region for it takes: with the control page, in whole pages."""
        return PAGE + round_up(self.metadata_bytes) + round_up(self.image_bytes)

    def holds(self, other: SlotSize) -> bool:
        return self.metadata_bytes >= other.metadata_bytes and self.image_bytes >= other.image_bytes

    def with_slack(self, parts: int = 1) -> SlotSize:
        """Room for a state that needs this, in whole pages, with headroom for what a patch may add; or with
        one of so many `parts` of the headroom."""
        metadata_slack = self.metadata_bytes // _METADATA_SLACK + _LEAST_SLACK_BYTES
        image_slack = self.image_bytes // _IMAGE_SLACK + _LEAST_SLACK_BYTES
        return SlotSize(
            round_up(self.metadata_bytes + metadata_slack // parts),
            round_up(self.image_bytes + image_slack // parts),
        )

    def grown(self) -> SlotSize:
        """Half as much again, for a state that has outgrown its slots and may go on growing: it outgrows
        slots seldom then, however small its steps are."""
        return SlotSize(
            round_up(self.metadata_bytes + self.metadata_bytes // 2),
            round_up(self.image_bytes + self.image_bytes // 2),
        )


@dataclass(frozen=True, kw_only=True)
class SlotHeader:
    """What does not change in a slot. Offsets and sizes are in bytes from the region's first."""

    index: int
    rank: int
    identity: bytes
    nonce: int
    metadata_capacity: int
    image_capacity: int
    holds_constants: bool = False

    @property
    def name(self) -> str:
        return region_name(self.rank, None if self.holds_constants else self.index, self.nonce)

    @property
    def image_offset(self) -> int:
        return PAGE + self.metadata_capacity

    @property
    def num_bytes(self) -> int:
        return self.image_offset + self.image_capacity

    def packed(self) -> bytes:
        fields = _HEADER.pack(
            CONSTANTS_MAGIC if self.holds_constants else MAGIC, VERSION, self.index, self.rank,
            self.identity, self.nonce, self.num_bytes,
            PAGE, self.metadata_capacity, self.image_offset, self.image_capacity,
        ).ljust(_HEADER_BYTES, b"\0")  # fmt: skip
        return fields + _native.xxh3_128(fields)

    @classmethod
    def unpacked(cls, data: bytes) -> SlotHeader:
        """Raises DamagedError unless every field is what `packed` wrote, FormatError for another version."""
        fields = data[:_HEADER_BYTES]
        if len(data) < HEADER_END or _native.xxh3_128(fields) != data[_HEADER_BYTES:HEADER_END]:
            raise DamagedError("A slot's control page does not match its checksum. The slot is not used.")
        magic, version, index, rank, identity, nonce, num_bytes, *rest = _HEADER.unpack_from(fields)
        if max(num_bytes, *rest) >= _MOST_BYTES:
            raise DamagedError("A slot's control page claims more than memory can be. The slot is not used.")
        if magic not in (MAGIC, CONSTANTS_MAGIC):
            raise DamagedError("A region does not begin as a slot does. It is not used.")
        if version != VERSION:
            raise FormatError(f"A slot has version {version}; this library reads {VERSION}. It was left.")
        header = cls(
            index=index,
            rank=rank,
            identity=identity,
            nonce=nonce,
            metadata_capacity=rest[1],
            image_capacity=rest[3],
            holds_constants=magic == CONSTANTS_MAGIC,
        )
        if header.packed() != data[:HEADER_END] or num_bytes % PAGE or header.image_offset % PAGE:
            raise DamagedError("A slot's control page contradicts itself. The slot is not used.")
        return header


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a trainer writes about a snapshot before the sealer checksums and seals it. `image_bytes` are
    those of the slot's image; `constants_nonce` names the region that holds the constants, `constants_bytes`
    are those of its image: both are 0 where there are none. `boundary` is its ordinal in the attempt,
    which is the same on all ranks: attempt and boundary say which content it is, and a step's number alone
    does not."""

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
    constants_bytes: int = 0
    constants_nonce: int = 0
    boundary: int = 0

    def packed(self) -> bytes:
        """The fields' bytes [16:240] of the record: the checksums around them are the sealer's."""
        return _RECORD.pack(*astuple(self)).ljust(RECORD_FIELDS_END - RECORD_FIELDS_OFFSET, b"\0")

    @classmethod
    def unpacked(cls, data: bytes, generation: int, size: SlotSize) -> Record:
        """Raises DamagedError where the record's own checksum does not match, or what it describes is not of
        this generation, or cannot stand in a slot of this size."""
        if _native.xxh3_128(data[:RECORD_FIELDS_END]) != data[RECORD_FIELDS_END:RECORD_BYTES]:
            raise DamagedError("A slot's record does not match its checksum. The snapshot is not used.")
        fields = _RECORD.unpack_from(data, RECORD_FIELDS_OFFSET)
        record = cls(**dict(zip(cls.__dataclass_fields__, fields, strict=True)))
        if record.generation != generation or not record.fits(size):
            raise DamagedError("A slot's record contradicts its region. The snapshot is not used.")
        return record

    def fits(self, size: SlotSize) -> bool:
        """Whether what it describes can stand in a slot of this size."""
        return (
            self.metadata_bytes <= size.metadata_bytes
            and self.data_start <= self.image_bytes <= size.image_bytes
            and bool(self.constants_nonce) == bool(self.constants_bytes)
        )


def pack_complete(attempt_number: int, boundary: int) -> int:
    """The word that names the newest complete snapshot."""
    return attempt_number << _BOUNDARY_BITS | boundary


def unpack_complete(word: int) -> tuple[int, int]:
    """Number of the attempt and boundary; zeros where none was ever named."""
    return word >> _BOUNDARY_BITS, word & (1 << _BOUNDARY_BITS) - 1


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
