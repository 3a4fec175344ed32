"""How much memory may still be taken on this node, and taking it in small steps.

Owns the sums over cgroups and the node's lock. Never takes memory on trust: `fallocate` on a tmpfs
beyond a cgroup's limit does not fail, it calls the OOM killer, and page cache counts as used.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flashckpt import _native
from flashckpt.errors import OutOfRoomError
from flashckpt.memory.runtime import RuntimeFolder, lock_record

STEP_BYTES = 64 << 20
_LEAST_MARGIN_BYTES = 64 << 20
_MOST_MARGIN_BYTES = 1 << 30
_UNLIMITED = 1 << 60
_LOCK_TIMEOUT_S = 60.0
# For huge pages the kernel may have to move others' memory about, and whoever wants the lock waits meanwhile.
_SLOWEST_HUGE_STEP_S, _MOST_HUGE_S = 0.5, 20.0
# Of this thread's own time: small pages take 0.25 to 0.36 s a GiB and huge ones 0.06 to 0.13, but 2.5 to 5 in
# a virtual machine whose host has not backed that memory yet.
_DEAREST_HUGE_S_A_BYTE = 0.8 / (1 << 30)
# What the request itself may take, however small.
_LEAST_HUGE_S = 0.002
_HUGE_PAUSE_S = 60.0
# Memory that others have just given back comes first, and is cheap.
_TRIAL_BYTES, _MOST_TRIED_BYTES = 8 << 20, 256 << 20


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo: where which part of which file system is seen."""

    device: tuple[int, int]
    root: str
    point: str
    kind: str
    options: str


def mounts(mountinfo: str = "/proc/self/mountinfo") -> list[Mount]:
    found = []
    for line in _text(mountinfo).splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(tail) < 3:
            continue
        major, _, minor = fields[2].partition(":")
        root, point = _unescaped(fields[3]), _unescaped(fields[4])
        found.append(Mount((int(major), int(minor)), root, point, tail[0], tail[2]))
    return found


def available_bytes(
    *,
    cgroup: str = "/proc/self/cgroup",
    mountinfo: str = "/proc/self/mountinfo",
    meminfo: str = "/proc/meminfo",
) -> int:
    """Bytes that may be taken now: the least of what the machine has available and what each ancestor
    cgroup (v1 and v2) leaves, less a margin of 1/32 of the smallest limit (64 MiB to 1 GiB)."""
    machine = _fields(_text(meminfo))
    limits = [(machine.get("MemTotal:", 0) << 10, machine.get("MemAvailable:", 0) << 10)]
    for folder, version in _memory_cgroups(_text(cgroup), mounts(mountinfo)):
        limits.append(_limit_and_room(folder, version))
    smallest = min(limit for limit, _ in limits)
    margin = min(max(smallest // 32, _LEAST_MARGIN_BYTES), _MOST_MARGIN_BYTES)
    return max(0, min(room for _, room in limits) - margin)


class _NodeLock:
    """The lock file of one place: record locks are a process's, so its threads share one descriptor. Closing
    any other would let go of the lock."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.descriptor = -1
        self.holders = 0


_node_locks: dict[str, _NodeLock] = {}


@contextlib.contextmanager
def node_lock(folder: RuntimeFolder, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the node's one lock for taking memory (one a user: users share no files). It is held against other
    processes; threads of this one hold it together, and settle by their own sums who takes what.

    Raises OutOfRoomError if another job still takes memory after `timeout_s`.
    """
    path = os.path.join(os.path.dirname(folder.path), "room.lock")
    lock = _node_locks.setdefault(path, _NodeLock())
    until = time.monotonic() + timeout_s
    while not _locked(lock, path):
        if time.monotonic() > until:
            raise OutOfRoomError(
                "Another job on this node is taking memory for its slots and does not come to an end. "
                "Nothing was taken for this one; it is tried again at the next boundary.",
                path=path,
            )
        time.sleep(0.02)
    try:
        yield
    finally:
        with lock.guard:
            lock.holders -= 1
            if not lock.holders:
                os.close(lock.descriptor)
                lock.descriptor = -1


def _locked(lock: _NodeLock, path: str) -> bool:
    with lock.guard:
        if not lock.holders:
            # A record lock is its process's: one of flock would stay with a forked child.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            if not lock_record(descriptor):
                os.close(descriptor)
                return False
            lock.descriptor = descriptor
        lock.holders += 1
        return True


def take(
    descriptor: int,
    num_bytes: int,
    *,
    available: Callable[[], int] = available_bytes,
    step_bytes: int = STEP_BYTES,
    taken: Callable[[int], None] = lambda _: None,
) -> None:
    """Allocate the first `num_bytes` of a region in steps, asking for room before each, and telling `taken`
    the bytes of each afterwards: in huge pages as far as the kernel has them to give.

    Call it under `node_lock`. Raises OutOfRoomError, with what was taken so far still allocated (the
    caller closes or removes the region); OSError where the file system refuses.
    """
    if (room := available()) < num_bytes:
        raise out_of_room(num_bytes, room)
    done, huge_left_s = 0, _MOST_HUGE_S
    while done < num_bytes:
        step = min(step_bytes, num_bytes - done)
        room = available()
        if room < step:
            raise out_of_room(num_bytes, done + room)
        if huge_left_s > 0:
            huge_left_s -= huge_pages.take(descriptor, done, step)
        _native.allocate(descriptor, done, step)
        taken(step)
        done += step


class HugePages:
    """Those that one process asks for, whose threads judge together: where some of them were dear, none are
    asked for in the next minute, for whatever memory. `thread_time` is the seconds of a core that the calling
    thread has had."""

    def __init__(self, thread_time: Callable[[], float] = time.thread_time) -> None:
        self._thread_time, self._not_before_s = thread_time, -math.inf

    def take(self, descriptor: int, start: int, num_bytes: int) -> float:
        """Ask for them in these bytes of a region. Gives the seconds that it took; infinite where no more are
        to be asked for in this region."""
        began_s, began_own_s = time.monotonic(), self._thread_time()
        if began_s < self._not_before_s:
            return math.inf
        taken = _native.allocate_huge(descriptor, start, num_bytes)
        took_s = time.monotonic() - began_s
        if self._was_dear(began_own_s, num_bytes):
            return math.inf
        return took_s if taken and took_s < _SLOWEST_HUGE_STEP_S else math.inf

    def tried(self, memory: _native.Mapping, num_bytes: int) -> _native.Mapping:
        """This memory of the process's own, of which nothing was touched yet: it comes in huge pages unless
        they are dear, which its first quarter tells, as much of it as that takes."""
        if num_bytes < STEP_BYTES:
            return memory
        address, most = _native.address_of(memory), min(num_bytes // 4, _MOST_TRIED_BYTES)
        if any(self._is_dear(address + start) for start in range(0, most, _TRIAL_BYTES)):
            memory.prefer_small_pages()
        return memory

    def _is_dear(self, address: int) -> bool:
        """Whether those that are touched first from here on are dear, or others were in the last minute."""
        if time.monotonic() < self._not_before_s:
            return True
        began_own_s = self._thread_time()
        _native.populate(address, _TRIAL_BYTES, 1)
        return self._was_dear(began_own_s, _TRIAL_BYTES)

    def _was_dear(self, began_own_s: float, num_bytes: int) -> bool:
        is_dear = self._thread_time() - began_own_s > _LEAST_HUGE_S + num_bytes * _DEAREST_HUGE_S_A_BYTE
        if is_dear:
            self._not_before_s = time.monotonic() + _HUGE_PAUSE_S
        return is_dear


huge_pages = HugePages()


def out_of_room(needed: int, available: int) -> OutOfRoomError:
    """The error for a region or slots of `needed` bytes where `available` bytes may be taken."""
    return OutOfRoomError(
        f"Snapshots need {needed:,} bytes of host memory and {max(available, 0):,} may be taken here "
        "(the least of what the machine and every cgroup above this process leave, less a margin). "
        "Nothing was taken, and no snapshot is kept until there is room. Give the job more memory, hold "
        "fewer snapshots (Options(slots=2)), use fewer loader workers or smaller batches in host memory, "
        "or spread the state over more ranks.",
        needed=needed,
        available=max(available, 0),
    )


def _memory_cgroups(lines: str, mounted: list[Mount]) -> Iterator[tuple[str, int]]:
    """All folders of memory cgroups above this process that can be seen, with their version."""
    for line in lines.splitlines():
        _, controllers, path = line.split(":", 2)
        version = 2 if controllers == "" else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        for mount in mounted:
            has_memory = mount.kind == "cgroup" and "memory" in mount.options.split(",")
            if mount.kind == "cgroup2" if version == 2 else has_memory:
                yield from ((folder, version) for folder in _ancestors(mount, path))
                break


def _ancestors(mount: Mount, path: str) -> Iterator[str]:
    """From the process's own folder up to the mount's. In a container the mount's root is the path
    itself, or a path outside what is mounted: then the mount is all that can be seen."""
    root = mount.root.rstrip("/")
    inside = path[len(root) :] if path == root or path.startswith(root + "/") else ""
    if ".." in inside.split("/"):
        inside = ""
    folder = os.path.normpath(mount.point + "/" + inside)
    while True:
        yield folder
        if len(folder) <= len(mount.point.rstrip("/")):
            return
        folder = os.path.dirname(folder)


def _limit_and_room(folder: str, version: int) -> tuple[int, int]:
    """The limit of one cgroup and what it leaves: limit − (usage − inactive file)."""
    limits, usage, inactive = (
        (("memory.max", "memory.high"), "memory.current", "inactive_file")
        if version == 2
        else (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
    )
    limit = min(_number(os.path.join(folder, name)) for name in limits)
    if limit >= _UNLIMITED:
        return _UNLIMITED, _UNLIMITED
    used = _text(os.path.join(folder, usage)).strip()
    if not used.isdigit():
        return _UNLIMITED, _UNLIMITED
    cache = _fields(_text(os.path.join(folder, "memory.stat"))).get(inactive, 0)
    return limit, limit - max(0, int(used) - cache)


def _number(path: str) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else _UNLIMITED


def _fields(text: str) -> dict[str, int]:
    """Lines of a name, a number and perhaps a unit."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # that it cannot be asked does not mean that there is none
        return ""


def _unescaped(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
