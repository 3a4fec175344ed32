"""A keeper that is forked is what a start would have made of it; where it would not be, it is started."""

import os
import resource
from pathlib import Path

import pytest

from tests.descriptors import readable
from tests.keeper.fake import FakeTrainer, keeper_pid
from tests.zygote.keepers import ADDRESS, Keepers

pytestmark = pytest.mark.process


def keeper_of(run: Path, runtime: Path) -> int:
    pid = keeper_pid(FakeTrainer(run, runtime).folder)
    assert pid is not None
    return pid


def is_forked(pid: int) -> bool:
    """The room for the environment of a process that is forked is that of the process that forks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[48]) - int(fields[47]) > 1 << 16


def told(pid: int) -> dict[str, object]:
    """What /proc says of a keeper, where it must be equal."""
    proc = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    fields = (proc / "stat").read_text().rpartition(")")[2].split()
    pairs = (proc / "environ").read_bytes().rstrip(b"\0").split(b"\0")
    return {
        "status": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "Umask", "Cpus_allowed")],
        "command": (proc / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")[:3],
        # Libraries add the terminal's size without Python's knowledge.
        "environment": {
            pair for pair in pairs if not pair.startswith((ADDRESS.encode(), b"COLUMNS", b"LINES"))
        },
        "parent, nice": (fields[1], fields[16]),
        "leads": (fields[2] == str(pid), fields[3] == str(pid)),
        "folder": os.readlink(proc / "cwd"),
        "streams": [Path(os.readlink(proc / "fd" / number)).name for number in "012"],
    }


def test_it_has_what_a_started_keeper_has(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = keeper_of(tmp_path / "forked", runtime)
    monkeypatch.delenv(ADDRESS)
    started = keeper_of(tmp_path / "started", runtime)
    assert (is_forked(forked), is_forked(started)) == (True, False)
    assert told(forked) == told(started)


@pytest.mark.parametrize("what", ["limit", "variable"])
def test_what_a_fork_would_not_inherit_is_started(
    what: str, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    if what == "variable":
        monkeypatch.setenv("PYTHONHASHSEED", "1")
    else:
        resource.setrlimit(resource.RLIMIT_CORE, (0 if before[0] else 1, before[1]))
    try:
        assert not is_forked(keeper_of(tmp_path / "run", runtime))
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


def test_the_process_that_forks_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS, os.environ[ADDRESS])
    keepers = Keepers()
    end = os.pidfd_open(keepers._process.pid)
    os.close(keepers._held)
    assert readable(end)
    os.close(end)
    keepers._process.wait()
