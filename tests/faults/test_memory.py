"""Shared memory that is too small or becomes full, and a cgroup that leaves no room."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashckpt.memory.region import MEMFD, NAMED, is_region_name
from tests.faults.training import Training, training
from tests.memory.mounts import fill, small_tmpfs
from tests.processes import end, keepers_of
from tests.waiting import until

_CGROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_LIMIT_BYTES = 512 << 20


@pytest.fixture
def small_runtime(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder on a shared memory of 8 MiB."""
    monkeypatch.setenv("FLASHCKPT_RUNTIME", str(small_disk))
    yield small_disk
    end(keepers_of(small_disk))


def regions(runtime: Path) -> list[str]:
    return [path.name for path in runtime.rglob("slot-*") if is_region_name(path.name)]


def outlives_its_keeper(trained: Training, memory: Path) -> None:
    trained.goes_on()
    trained.recovers()
    end(keepers_of(memory))
    trained.goes_on()
    trained.recovers()


def test_shared_memory_that_is_too_small_for_slots(tmp_path: Path, small_runtime: Path) -> None:
    """Slots of 3 MiB, three of them: they are memfds then, and outlive the keeper all the same."""
    with training(tmp_path / "run", size=900) as trained:
        assert regions(small_runtime) == []
        outlives_its_keeper(trained, small_runtime)


@pytest.mark.process
def test_shared_memory_that_becomes_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a slot needs was taken when it was made: a full tmpfs can neither stop nor kill anybody."""
    with small_tmpfs(64 << 20) as memory:
        monkeypatch.setenv("FLASHCKPT_RUNTIME", str(memory))
        with training(tmp_path / "run") as trained:
            assert len(regions(memory)) >= 2
            fill(memory)
            outlives_its_keeper(trained, memory)
        until(lambda: not keepers_of(memory), "the keeper to leave")


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup with a limit. Skipped, with the reason, where none can be made."""
    reasons = []
    for base, limit in zip(_CGROUPS, ("memory.limit_in_bytes", "memory.max"), strict=True):
        made = base / f"flashckpt-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError as error:
            reasons.append(str(error))
            continue
        try:
            (made / limit).write_text(str(_LIMIT_BYTES))
        except OSError as error:
            reasons.append(str(error))
            made.rmdir()
            continue
        yield made
        made.rmdir()
        return
    pytest.skip(f"no memory cgroup can be made here: {'; '.join(reasons)}")


PROGRAM = """
import os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
from flashckpt.errors import OutOfSpaceError
from flashckpt.memory.region import create
from flashckpt.memory.runtime import RuntimeFolder
folder, made = RuntimeFolder.open(sys.argv[2], "ab" * 16), 0
try:
    while made < 100:
        create(folder, f"slot-00000-{made}-{made:016x}", 32 << 20, sys.argv[3])
        made += 1
except OutOfSpaceError as error:
    print(made, error.available)
"""


@pytest.mark.parametrize("kind", [NAMED, MEMFD])
def test_no_more_is_taken_than_a_cgroup_leaves(kind: str, cgroup: Path, runtime: Path) -> None:
    """Beyond the limit there is no error, only the OOM killer: regions are refused before it."""
    command = [sys.executable, "-c", PROGRAM, str(cgroup), str(runtime), kind]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    made, available = map(int, found.stdout.split())
    assert 1 <= made < _LIMIT_BYTES // (32 << 20)
    assert available < 32 << 20
