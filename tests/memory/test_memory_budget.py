"""How much memory may be taken: sums over cgroups of both versions, and taking in steps."""

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashckpt.errors import OutOfSpaceError
from flashckpt.memory import memory_budget, region
from flashckpt.memory.runtime import RuntimeFolder
from tests.descriptors import closed_after
from tests.memory.conftest import IDENTITY
from tests.memory.mounts import small_tmpfs

GIB = 1 << 30
NAME = "slot-00000-0-0000000000000000"
UNLIMITED_V1 = 9223372036854771712


class Node:
    """A machine in files: /proc and the cgroup trees that a test writes."""

    def __init__(self, root: Path, total: int, available: int) -> None:
        self.root = root
        (root / "meminfo").write_text(f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\n")
        self.mounts: list[str] = []
        self.groups: list[str] = []

    def v2(self, path: str, mount_root: str = "/") -> Path:
        point = self.root / "unified"
        self.mounts.append(f"30 20 0:26 {mount_root} {point} rw - cgroup2 cgroup2 rw")
        self.groups.append(f"0::{path}")
        return point

    def v1(self, path: str) -> Path:
        point = self.root / "memory"
        self.mounts.append(f"31 20 0:27 / {self.root / 'cpu'} rw - cgroup cgroup rw,cpu")
        self.mounts.append(f"32 20 0:28 / {point} rw - cgroup cgroup rw,memory")
        self.groups += ["7:cpu:/else", f"5:memory:{path}"]
        return point

    def room(self) -> int:
        (self.root / "mountinfo").write_text("\n".join(self.mounts))
        (self.root / "cgroup").write_text("\n".join(self.groups))
        return memory_budget.available_bytes(
            cgroup=str(self.root / "cgroup"),
            mountinfo=str(self.root / "mountinfo"),
            meminfo=str(self.root / "meminfo"),
        )


def v2_group(folder: Path, limit: int | str, usage: int, inactive: int = 0, high: int | str = "max") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nactive_file 99\n")


def v1_group(folder: Path, limit: int, usage: int, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive}\n")


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert Node(tmp_path, 320 * GIB, 100 * GIB).room() == 99 * GIB
    node = Node(tmp_path, 4 * GIB, 2 * GIB)
    assert node.room() == 2 * GIB - GIB // 8
    v2_group(node.v2("/"), GIB, 2 * GIB)
    assert node.room() == 0, "more is used than allowed"


def test_every_ancestor_counts_and_inactive_cache_is_free(tmp_path: Path) -> None:
    node = Node(tmp_path, 320 * GIB, 300 * GIB)
    point = node.v2("/job/step/task")
    v2_group(point / "job/step/task", "max", 5 * GIB)
    v2_group(point / "job/step", 200 * GIB, 50 * GIB)
    # Page cache of a data set counts as used: what is inactive of it can go.
    v2_group(point / "job", 64 * GIB, 60 * GIB, inactive=40 * GIB)
    assert node.room() == 44 * GIB - GIB
    v2_group(point / "job/step", 200 * GIB, 190 * GIB)
    assert node.room() == 10 * GIB - GIB
    v2_group(point / "job/step/task", "max", 5 * GIB, high=8 * GIB)
    assert node.room() == 3 * GIB - GIB // 4


def test_version_one_counts_the_whole_tree(tmp_path: Path) -> None:
    node = Node(tmp_path, 320 * GIB, 300 * GIB)
    point = node.v1("/docker/abc")
    v1_group(point, UNLIMITED_V1, 100 * GIB)
    v1_group(point / "docker", 64 * GIB, 60 * GIB, inactive=10 * GIB)
    v1_group(point / "docker/abc", UNLIMITED_V1, 20 * GIB)
    assert node.room() == 14 * GIB - GIB


@pytest.mark.parametrize(
    ("mount_root", "path"), [("/docker/abc", "/docker/abc"), ("/", "/../../else"), ("/", "/")]
)
def test_a_containers_own_view(tmp_path: Path, mount_root: str, path: str) -> None:
    node = Node(tmp_path, 320 * GIB, 300 * GIB)
    point = node.v2(path, mount_root)
    v2_group(point, 16 * GIB, 2 * GIB, inactive=GIB)
    assert node.room() == 15 * GIB - GIB // 2


def test_room_is_asked_for_again_before_each_step(folder: RuntimeFolder) -> None:
    answers = [64 << 20] + [16 << 20] * 3 + [1 << 20]
    asked: list[int] = []

    def available() -> int:
        found = os.fstat(descriptor)
        assert found.st_size == found.st_blocks * 512, "between steps it is as long as what it has"
        asked.append(answers[len(asked)])
        return asked[-1]

    descriptor = os.open(f"{folder.path}/x", os.O_RDWR | os.O_CREAT, 0o600)
    with pytest.raises(OutOfSpaceError) as raised:
        memory_budget.take(descriptor, 64 << 20, available=available, step_bytes=16 << 20)
    assert asked == answers
    assert raised.value.needed == 64 << 20
    assert raised.value.available == (48 << 20) + (1 << 20)
    assert "slots=2" in str(raised.value)
    assert os.fstat(descriptor).st_size == 48 << 20
    os.close(descriptor)


@pytest.mark.parametrize("kind", [region.NAMED, region.MEMFD])
def test_a_region_that_has_no_room_leaves_nothing(folder: RuntimeFolder, kind: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    left = iter([256 << 20, 256 << 20, 0])
    with pytest.raises(OutOfSpaceError):
        region.create(folder, NAME, 256 << 20, kind, available=lambda: next(left))
    assert folder.names() == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", [region.NAMED, region.MEMFD])
def test_every_byte_of_a_region_is_allocated(folder: RuntimeFolder, kind: str) -> None:
    made = region.create(folder, NAME, 3 << 20, kind)
    found = os.fstat(made.descriptor)
    assert made.kind == kind
    assert found.st_size == 3 << 20
    assert found.st_blocks * 512 >= 3 << 20
    if kind == region.MEMFD:
        with pytest.raises(PermissionError):
            os.ftruncate(made.descriptor, 0)
    else:
        assert found.st_mode & 0o777 == 0o600
    os.close(made.descriptor)


def test_a_small_shm_is_found_out_before_and_while_taking(runtime: Path) -> None:
    with small_tmpfs(8 << 20) as base:
        folder = closed_after(RuntimeFolder.open(str(base), IDENTITY))
        assert region.on_tmpfs(folder)
        assert region.kind_for(folder, 4 << 20) == region.NAMED
        assert region.kind_for(folder, 16 << 20) == region.MEMFD
        # It filled up since: the region goes to a memfd, and nothing of it stays here.
        made = region.create(folder, NAME, 16 << 20, region.NAMED)
        assert made.kind == region.MEMFD
        assert folder.names() == []
        os.close(made.descriptor)
        folder.close()


def test_a_runtime_folder_on_a_disk_keeps_no_region_by_name(tmp_path: Path) -> None:
    if any(
        mount.kind == "tmpfs" and str(tmp_path).startswith(mount.point) for mount in memory_budget.mounts()
    ):
        pytest.skip("temporary files are in memory here")
    folder = closed_after(RuntimeFolder.open(str(tmp_path), IDENTITY))
    assert region.kind_for(folder, 4096) == region.MEMFD


def test_the_nodes_lock_stays_until_the_last_thread_lets_go(folder: RuntimeFolder) -> None:
    """Threads of one process take memory side by side: closing the file for one would free it for others."""
    path = Path(folder.path).parent / "memory_budget.lock"

    def is_held() -> bool:
        code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True).returncode != 0

    with memory_budget.node_lock(folder):
        with memory_budget.node_lock(folder, timeout_s=0):
            assert is_held()
        assert is_held()
    assert not is_held()


HELD_OVER_A_FORK = """
import os, signal, sys
from flashckpt.memory import memory_budget
from flashckpt.memory.runtime import RuntimeFolder
with memory_budget.node_lock(RuntimeFolder.open(sys.argv[1], "f" * 32)):
    child = os.fork()
    if child == 0:
        signal.pause()
    print(child, flush=True)
    signal.pause()
"""


def test_the_nodes_lock_is_held_by_one_process_and_does_not_stay_with_its_child(
    folder: RuntimeFolder, runtime: Path
) -> None:
    """Its holder is killed, and a process that it has forked lives on."""
    command = [sys.executable, "-c", HELD_OVER_A_FORK, str(runtime)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        child = int(owner.stdout.readline())
        try:
            with (
                pytest.raises(OutOfSpaceError, match="Another job"),
                memory_budget.node_lock(folder, timeout_s=0),
            ):
                pass
            owner.kill()
            owner.wait()
            with memory_budget.node_lock(folder, timeout_s=0):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_memfds_that_cannot_all_be_opened_are_closed() -> None:
    with contextlib.ExitStack() as stack:
        for nonce in (1, 2, 3):
            stack.callback(os.close, os.memfd_create(region.region_name(0, 0, nonce), os.MFD_CLOEXEC))
        assert len(found := region.memfds_of(os.getpid())) == 3
        for each in found.values():
            os.close(each)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        there = set(map(int, os.listdir("/proc/self/fd")))
        # Two more descriptors fit: that of this listing, which is closed, and the first free one.
        free = [number for number in range(soft) if number not in there]
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[1], hard))
        with pytest.raises(OSError, match="Too many open files") as raised:
            region.memfds_of(os.getpid())
        assert raised.value.errno == errno.EMFILE
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert set(map(int, os.listdir("/proc/self/fd"))) == there
