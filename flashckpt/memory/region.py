"""Regions of host memory, named in the runtime folder or memfds, and their layout to the byte.

Owns how a region is made and found, its names, its size, and the offsets and encodings of its control page,
which docs/memory.md draws. Little-endian throughout. Never maps a region, and never uses
multiprocessing.shared_memory, whose tracker unlinks a region after a SIGKILL of its maker.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import NamedTuple

from flashckpt import _native
from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.layout import PAGE
from flashckpt.memory import memory_budget
from flashckpt.memory.runtime import RuntimeFolder

NAMED = "named"
MEMFD = "memfd"
CACHE = "cache"
"""Not memory, but a file on a disk of the node: see cache_folder.py."""
_NAME = re.compile(r"slot-(\d{5})-(\d{1,3})-([0-9a-f]{16})|constants-(\d{5})-([0-9a-f]{16})")
_SPARE_BYTES = 1 << 20  # kept free in the file system of named regions, for sockets, locks and the log


@dataclass(frozen=True)
class Region:
    """An allocated region, whose descriptor the owner of this object closes."""

    name: str
    kind: str
    descriptor: int


def region_name(rank: int, index: int | None, nonce: int) -> str:
    """The name of a slot, or, without an index, of a region of constants."""
    return f"constants-{rank:05d}-{nonce:016x}" if index is None else f"slot-{rank:05d}-{index}-{nonce:016x}"


def rank_of(name: str) -> int:
    """The rank whose region has this name."""
    return int(name.split("-")[1])


def is_region_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def memfds_of(pid: int) -> dict[str, int]:
    """Descriptors, for the caller to close, of the regions in memfds that a process of this user has open, by
    name. Raises OSError."""
    found: dict[str, int] = {}
    folder = f"/proc/{pid}/fd"
    with contextlib.ExitStack() as opened:
        for each in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(f"{folder}/{each}")
                name = target.removeprefix("/memfd:").removesuffix(" (deleted)")
                if target.startswith("/memfd:") and is_region_name(name) and name not in found:
                    found[name] = os.open(f"{folder}/{each}", os.O_RDWR | os.O_CLOEXEC)
                    opened.callback(os.close, found[name])
        opened.pop_all()  # the caller closes them from now on
    return found


def kind_for(folder: RuntimeFolder, num_bytes: int) -> str:
    """NAMED if the runtime folder is a tmpfs with space for `num_bytes`, else MEMFD: not limited by the size
    of /dev/shm (64 MB in a default container), but lost with the last process that holds it."""
    if not on_tmpfs(folder):
        return MEMFD
    found = os.fstatvfs(folder.descriptor)
    return NAMED if found.f_bavail * found.f_frsize >= num_bytes + _SPARE_BYTES else MEMFD


def on_tmpfs(folder: RuntimeFolder) -> bool:
    device = os.fstat(folder.descriptor).st_dev
    place = (os.major(device), os.minor(device))
    return any(mount.device == place and mount.kind == "tmpfs" for mount in memory_budget.mounts())


def create(
    folder: RuntimeFolder,
    name: str,
    num_bytes: int,
    kind: str,
    *,
    available: Callable[[], int] = memory_budget.available_bytes,
    taken: Callable[[int], None] = lambda _: None,
    node: int = memory_budget.NO_NODE,
) -> Region:
    """Make a region of `num_bytes`, all of them allocated, so that touching it is never a SIGBUS.

    Takes the node's lock. A named region that does not fit into its file system becomes a memfd. taken:
    receives the bytes of each step. node: the preferred NUMA node. Raises OutOfSpaceError, and leaves nothing
    behind.
    """

    def take(descriptor: int) -> None:
        memory_budget.prefer_node(descriptor, num_bytes, node)
        memory_budget.take(descriptor, num_bytes=num_bytes, available=available, taken=taken)

    with memory_budget.node_lock(folder):
        if kind == NAMED:
            descriptor = folder.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                take(descriptor)
                return Region(name, NAMED, descriptor)
            except BaseException as error:
                folder.remove(name)
                os.close(descriptor)
                if _errno(error) not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            take(descriptor)
            # No process with the descriptor may truncate the region under the mappings of others.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return Region(name, MEMFD, descriptor)
        except BaseException as error:
            os.close(descriptor)
            if _errno(error) in (errno.ENOSPC, errno.ENOMEM):
                raise memory_budget.out_of_memory(num_bytes, 0) from error
            raise


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


MAGIC = b"FLCKSLOT"
CONSTANTS_MAGIC = b"FLCKCNST"  # of a region with constants of several snapshots, laid out as a slot
VERSION = 1

# The header, which never changes: 240 bytes and their XXH3-128.
HEADER_OFFSET = 0
_HEADER = struct.Struct("<8sIII4x16sQQQQQQ")
_HEADER_BYTES = 240
_MOST_BYTES = 1 << 62
HEADER_END = 256

# Words, each group on cache lines of its own; docs/memory.md lists their writers.
WORD_OFFSET = 256
PERSIST_OFFSET = 320
HOME_OFFSET = 328
PERSISTED_OFFSET = 384
FAILED_OFFSET = 392
CACHED_OFFSET = 408
# Only in files of a cache: the checksum of the words "home" and "persisted".
WORDS_CHECKSUM_OFFSET = 416
HOME_ENDED_OFFSET = 424
TORN_OFFSET = 448
TORN_COUNT_OFFSET = 456
TORN_LEAVES_OFFSET = 464
TORN_LEAVES = 22
BOUNDARIES_OFFSET = 640
BEAT_NS_OFFSET = 648
BEATER_OFFSET = 656
TIMEOUT_NS_OFFSET = 664
COMPLETE_OFFSET = 672

# The sealed record: XXH3-128 of the metadata, fields, XXH3-128 of both.
RECORD_OFFSET = 768
RECORD_BYTES = 256
RECORD_FIELDS_OFFSET = 16
RECORD_FIELDS_END = 240
_RECORD = struct.Struct("<14Q")

# The owner table: entry i is owner i + 1.
OWNERS_OFFSET = 1024
OWNERS = 16
OWNER_BYTES = 64
_OWNER = struct.Struct("<Q48s")

# Headroom in a slot for later changes of the state, beside a mebibyte: a part of the image, and of the
# metadata.
_IMAGE_SLACK = 16
_METADATA_SLACK = 2
_LEAST_SLACK_BYTES = 1 << 20

_BOUNDARY_BITS = 34  # of a word that names a snapshot; the attempt number is above them


def round_up(num_bytes: int) -> int:
    """To whole pages."""
    return -(-num_bytes // PAGE) * PAGE


class SlotSize(NamedTuple):
    """Bytes of metadata and image, as the capacity of a slot or the need of a state."""

    metadata_bytes: int
    image_bytes: int

    @property
    def region_bytes(self) -> int:
        """The size of a region for it, with the control page, in whole pages."""
        return PAGE + round_up(self.metadata_bytes) + round_up(self.image_bytes)

    def holds(self, other: SlotSize) -> bool:
        return self.metadata_bytes >= other.metadata_bytes and self.image_bytes >= other.image_bytes

    def with_slack(self, parts: int = 1) -> SlotSize:
        """The capacity for a state that needs this, in whole pages, with headroom, or with one of so many
        `parts` of the headroom."""
        metadata_slack = self.metadata_bytes // _METADATA_SLACK + _LEAST_SLACK_BYTES
        image_slack = self.image_bytes // _IMAGE_SLACK + _LEAST_SLACK_BYTES
        return SlotSize(
            round_up(self.metadata_bytes + metadata_slack // parts),
            round_up(self.image_bytes + image_slack // parts),
        )

    def grown(self) -> SlotSize:
        """Half as much again, for a state that has outgrown its slots and may keep growing in small steps."""
        return SlotSize(
            round_up(self.metadata_bytes + self.metadata_bytes // 2),
            round_up(self.image_bytes + self.image_bytes // 2),
        )


@dataclass(frozen=True, kw_only=True)
class SlotHeader:
    """The header of a region. Offsets and sizes in bytes."""

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
        """Raises DamagedError unless `data` is a result of `packed`, FormatError for another version."""
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
    """The record of a snapshot, which the trainer writes before the sealer checksums and seals it.
    `image_bytes`: of the slot's image. `constants_nonce`: names the region with the constants, and
    `constants_bytes` is the size of its image; both are 0 without constants. `boundary`: its index in the
    attempt, the same on all ranks. Attempt and boundary identify the snapshot."""

    attempt_number: int
    attempt_nonce: int
    step: int
    generation: int
    plan_id: int
    table_count: int
    values_bytes: int
    metadata_bytes: int
    image_bytes: int
    data_start: int
    captured_ns: int
    constants_bytes: int = 0
    constants_nonce: int = 0
    boundary: int = 0

    def packed(self) -> bytes:
        """Bytes [16:240] of the record; the sealer writes the checksums around them."""
        return _RECORD.pack(*astuple(self)).ljust(RECORD_FIELDS_END - RECORD_FIELDS_OFFSET, b"\0")

    @classmethod
    def unpacked(cls, data: bytes, generation: int, size: SlotSize) -> Record:
        """Raises DamagedError if the checksum does not match, or the record is of another generation, or
        describes a snapshot that does not fit into a slot of this size."""
        if _native.xxh3_128(data[:RECORD_FIELDS_END]) != data[RECORD_FIELDS_END:RECORD_BYTES]:
            raise DamagedError("A slot's record does not match its checksum. The snapshot is not used.")
        fields = _RECORD.unpack_from(data, RECORD_FIELDS_OFFSET)
        record = cls(**dict(zip(cls.__dataclass_fields__, fields, strict=True)))
        if record.generation != generation or not record.fits(size):
            raise DamagedError("A slot's record contradicts its region. The snapshot is not used.")
        return record

    def fits(self, size: SlotSize) -> bool:
        """Whether the snapshot fits into a slot of this size."""
        return (
            self.metadata_bytes <= size.metadata_bytes
            and self.data_start <= self.image_bytes <= size.image_bytes
            and bool(self.constants_nonce) == bool(self.constants_bytes)
        )


def pack_complete(attempt_number: int, boundary: int) -> int:
    """The word that names a snapshot by the number of its attempt and its boundary."""
    return attempt_number << _BOUNDARY_BITS | boundary


def unpack_complete(word: int) -> tuple[int, int]:
    """Attempt number and boundary; zeros for an empty word."""
    return word >> _BOUNDARY_BITS, word & (1 << _BOUNDARY_BITS) - 1


def pack_owner(pid: int, lock: str) -> bytes:
    """An entry of the owner table: the owner is the process that holds the lock of this name."""
    entry = _OWNER.pack(pid, lock.encode())
    return entry + _native.xxh3_64(entry).to_bytes(8, "little")


def unpack_owner(entry: bytes) -> tuple[int, str] | None:
    """Pid and lock of an entry, None for an empty or unfinished one."""
    fields = entry[: _OWNER.size]
    if _native.xxh3_64(fields).to_bytes(8, "little") != entry[_OWNER.size :]:
        return None
    pid, lock = _OWNER.unpack(fields)
    try:
        return pid, lock.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        return None
