"""Regions: host memory of our own, named in the runtime folder or a memfd.

Owns how a region is made, found and removed. Never maps one, and never uses
multiprocessing.shared_memory, whose tracker unlinks a region after a SIGKILL of its maker.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from flashckpt.memory import numa, room
from flashckpt.memory.runtime import RuntimeFolder

NAMED = "named"
MEMFD = "memfd"
_NAME = re.compile(r"slot-(\d{5})-(\d{1,3})-([0-9a-f]{16})|constants-(\d{5})-([0-9a-f]{16})")
# Kept free in the file system of named regions, for sockets, locks and the log.
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class Region:
    """An allocated region and the descriptor that whoever holds this must close."""

    name: str
    kind: str
    descriptor: int
    num_bytes: int


def region_name(rank: int, index: int | None, nonce: int) -> str:
    """Of a slot; without an index, of a rank's constants."""
    return f"constants-{rank:05d}-{nonce:016x}" if index is None else f"slot-{rank:05d}-{index}-{nonce:016x}"


def rank_of(name: str) -> int:
    """The rank whose region has this name."""
    return int(name.split("-")[1])


def is_region_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def memfds_of(pid: int) -> list[Region]:
    """The memfds of this library that a process of this user has open, each once. Raises OSError."""
    found: dict[str, Region] = {}
    folder = f"/proc/{pid}/fd"
    for each in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"{folder}/{each}")
            name = target.removeprefix("/memfd:").removesuffix(" (deleted)")
            if target.startswith("/memfd:") and is_region_name(name) and name not in found:
                descriptor = os.open(f"{folder}/{each}", os.O_RDWR | os.O_CLOEXEC)
                found[name] = Region(name, MEMFD, descriptor, os.fstat(descriptor).st_size)
    return list(found.values())


def kind_for(folder: RuntimeFolder, num_bytes: int) -> str:
    """NAMED where the runtime folder is a tmpfs with room for `num_bytes`, else MEMFD: not bound by the
    size of /dev/shm (64 MB in a default container), but gone with the last process that holds it."""
    if not on_tmpfs(folder):
        return MEMFD
    found = os.fstatvfs(folder.descriptor)
    return NAMED if found.f_bavail * found.f_frsize >= num_bytes + _SPARE_BYTES else MEMFD


def on_tmpfs(folder: RuntimeFolder) -> bool:
    device = os.fstat(folder.descriptor).st_dev
    place = (os.major(device), os.minor(device))
    return any(mount.device == place and mount.kind == "tmpfs" for mount in room.mounts())


def create(
    folder: RuntimeFolder,
    name: str,
    num_bytes: int,
    kind: str,
    *,
    available: Callable[[], int] = room.available_bytes,
    taken: Callable[[int], None] = lambda _: None,
    node: int = numa.NO_NODE,
) -> Region:
    """Make a region of `num_bytes`, every byte of it allocated: touching it can never be SIGBUS.

    Takes the node's lock. A named region that its file system has no room for becomes a memfd. `taken` is
    told the bytes of each step. `node` is the NUMA node that the memory comes from where it has some.
    Raises OutOfRoomError with nothing left behind.
    """

    def take(descriptor: int) -> None:
        numa.prefer(descriptor, num_bytes, node)
        room.take(descriptor, num_bytes=num_bytes, available=available, taken=taken)

    with room.node_lock(folder):
        if kind == NAMED:
            descriptor = folder.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                take(descriptor)
                return Region(name, NAMED, descriptor, num_bytes)
            except BaseException as error:
                folder.remove(name)
                os.close(descriptor)
                if _errno(error) not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            take(descriptor)
            # Nobody who is handed the descriptor can cut the region under the others' mappings.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return Region(name, MEMFD, descriptor, num_bytes)
        except BaseException as error:
            os.close(descriptor)
            if _errno(error) in (errno.ENOSPC, errno.ENOMEM):
                raise room.out_of_room(num_bytes, 0) from error
            raise


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def open_named(folder: RuntimeFolder, name: str, flags: int = os.O_RDWR) -> Region:
    """Open a region found in the runtime folder. Raises KeeperError for one that is not ours alone."""
    descriptor = folder.open_file(name, flags)
    return Region(name, NAMED, descriptor, os.fstat(descriptor).st_size)
