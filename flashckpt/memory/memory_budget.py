"""The memory budget of this node: how much memory may be taken, and taking it in small steps, on a NUMA node.

Owns the sums over cgroups and the node's lock. Checks before each step: `fallocate` on a tmpfs beyond a
cgroup's limit does not fail but calls the OOM killer, and page cache counts as used.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flashckpt import _native
from flashckpt.errors import OutOfSpaceError
from flashckpt.memory.runtime import RuntimeFolder, lock_record

STEP_BYTES = 64 << 20
_LEAST_MARGIN_BYTES = 64 << 20
_MOST_MARGIN_BYTES = 1 << 30
_UNLIMITED = 1 << 60
_LOCK_TIMEOUT_S = 60.0
# For huge pages the kernel may have to move memory of others, while other processes wait for the lock.
_SLOWEST_HUGE_STEP_S, _MOST_HUGE_S = 0.5, 20.0
# CPU time of the thread: small pages take 0.25 to 0.36 s a GiB and huge ones 0.06 to 0.13 s, but 2.5 to 5 s
# in a virtual machine whose host has not backed that memory yet.
_MAX_HUGE_S_PER_BYTE = 0.8 / (1 << 30)
_HUGE_CALL_S = 0.002  # of a request of any size
_HUGE_PAUSE_S = 60.0


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo."""

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
    """Bytes that may be taken now: the least of the available memory of the machine and of each ancestor
    cgroup (v1 and v2), less a margin of 1/32 of the smallest limit (64 MiB to 1 GiB)."""
    machine = _fields(_text(meminfo))
    limits = [(machine.get("MemTotal:", 0) << 10, machine.get("MemAvailable:", 0) << 10)]
    for folder, version in _memory_cgroups(_text(cgroup), mounts(mountinfo)):
        limits.append(_limit_and_rest(folder, version))
    smallest = min(limit for limit, _ in limits)
    margin = min(max(smallest // 32, _LEAST_MARGIN_BYTES), _MOST_MARGIN_BYTES)
    return max(0, min(rest for _, rest in limits) - margin)


class _NodeLock:
    """The lock file of one place. A record lock belongs to the process, so its threads share one descriptor:
    closing another one would release the lock."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.descriptor = -1
        self.owners = 0


_node_locks: dict[str, _NodeLock] = {}


@contextlib.contextmanager
def node_lock(folder: RuntimeFolder, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the node's lock for taking memory (one for each user) against other processes; threads of one
    process hold it together and agree by their own sums. Raises OutOfSpaceError if another job still holds it
    after `timeout_s`."""
    path = os.path.join(os.path.dirname(folder.path), "memory_budget.lock")
    lock = _node_locks.setdefault(path, _NodeLock())
    until = time.monotonic() + timeout_s
    while not _locked(lock, path):
        if time.monotonic() > until:
            raise OutOfSpaceError(
                "Another job on this node has been taking memory for its slots for too long. "
                "Nothing was taken for this one; it is tried again at the next boundary.",
                path=path,
            )
        time.sleep(0.02)
    try:
        yield
    finally:
        with lock.guard:
            lock.owners -= 1
            if not lock.owners:
                os.close(lock.descriptor)
                lock.descriptor = -1


def _locked(lock: _NodeLock, path: str) -> bool:
    with lock.guard:
        if not lock.owners:
            # A record lock, since one of flock would stay with a forked child.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            if not lock_record(descriptor):
                os.close(descriptor)
                return False
            lock.descriptor = descriptor
        lock.owners += 1
        return True


def take(
    descriptor: int,
    num_bytes: int,
    *,
    start: int = 0,
    available: Callable[[], int] = available_bytes,
    step_bytes: int = STEP_BYTES,
    taken: Callable[[int], None] = lambda _: None,
) -> None:
    """Allocate `num_bytes` of a region from `start` on in steps, in huge pages as far as the kernel has them.
    Checks `available` before each step, and passes its bytes to `taken` afterwards.

    Call it under `node_lock`. Raises OutOfSpaceError, with the steps so far still allocated (the caller
    closes or removes the region); OSError if the file system refuses.
    """
    if (rest := available()) < num_bytes:
        raise out_of_memory(num_bytes, rest)
    done, huge_left_s = 0, _MOST_HUGE_S
    while done < num_bytes:
        step = min(step_bytes, num_bytes - done)
        rest = available()
        if rest < step:
            raise out_of_memory(num_bytes, done + rest)
        if huge_left_s > 0:
            huge_left_s -= huge_pages.take(descriptor, start + done, step)
        _native.allocate(descriptor, start + done, step)
        taken(step)
        done += step


class HugePages:
    """The huge pages of a process. After slow ones, none of its threads requests any for a minute.
    thread_time: returns the CPU time of the calling thread."""

    def __init__(self, thread_time: Callable[[], float] = time.thread_time) -> None:
        self._thread_time, self._not_before_s = thread_time, -math.inf

    def take(self, descriptor: int, start: int, num_bytes: int) -> float:
        """Request huge pages for these bytes of a region. Returns the seconds that it took, infinite if no
        more are to be requested for this region."""
        began_s, began_own_s = time.monotonic(), self._thread_time()
        if began_s < self._not_before_s:
            return math.inf
        taken = _native.allocate_huge(descriptor, start, num_bytes)
        took_s = time.monotonic() - began_s
        if self._was_slow(began_own_s, num_bytes):
            return math.inf
        return took_s if taken and took_s < _SLOWEST_HUGE_STEP_S else math.inf

    def _was_slow(self, began_own_s: float, num_bytes: int) -> bool:
        is_slow = self._thread_time() - began_own_s > _HUGE_CALL_S + num_bytes * _MAX_HUGE_S_PER_BYTE
        if is_slow:
            self._not_before_s = time.monotonic() + _HUGE_PAUSE_S
        return is_slow


huge_pages = HugePages()


def out_of_memory(needed: int, available: int) -> OutOfSpaceError:
    """The error for `needed` bytes when only `available` may be taken."""
    return OutOfSpaceError(
        f"Snapshots need {needed:,} bytes of host memory and {max(available, 0):,} may be taken here "
        "(the least of what the machine and every cgroup above this process leave, less a margin). "
        "Nothing was taken, and no snapshot is kept until there is memory. Give the job more memory, hold "
        "fewer snapshots (Options(slots=2)), use fewer loader workers or smaller batches in host memory, "
        "or spread the state over more ranks.",
        needed=needed,
        available=max(available, 0),
    )


def _memory_cgroups(lines: str, mounted: list[Mount]) -> Iterator[tuple[str, int]]:
    """The visible folders of memory cgroups above this process, with their version."""
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
    """From the process's own folder up to the mount's. In a container the root of the mount is the path
    itself, or a path outside of it: then only the mount is visible."""
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


def _limit_and_rest(folder: str, version: int) -> tuple[int, int]:
    """The limit of a cgroup, and limit − (usage − inactive file)."""
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
            raise  # the file may exist
        return ""


def _unescaped(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


log = logging.getLogger(__name__)

NO_NODE = -1
MOST_NODES = 1024
_SYSFS = Path("/sys")


def node_of_pci(domain: int, bus: int, device: int, sysfs: Path = _SYSFS) -> int:
    """The NUMA node of function 0 of a PCI device. NO_NODE if it has one node, or is not known."""
    place = sysfs / "bus/pci/devices" / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "numa_node"
    try:
        node = int(place.read_text())
        nodes = sum(
            each.name.removeprefix("node").isdigit() for each in (sysfs / "devices/system/node").iterdir()
        )
    except (OSError, ValueError):
        return NO_NODE
    return node if nodes > 1 and 0 <= node < MOST_NODES else NO_NODE


def prefer_node(descriptor: int, num_bytes: int, node: int) -> None:
    """Prefer this NUMA node for the memory of a file on tmpfs, before any is taken. The policy belongs to the
    file, for every process that maps it. NO_NODE: changes nothing."""
    if node == NO_NODE:
        return
    try:
        _native.prefer_node(descriptor, num_bytes, node)
    except OSError as error:
        # In containers without CAP_SYS_NICE, or kernels without NUMA; a slot on another node is only slower.
        log.info("memory of NUMA node %d cannot be preferred (%s): slots come from any node", node, error)
