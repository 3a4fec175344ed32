"""A peer's session: what it starts is found wherever it went, and ended; nothing else is."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.session import ProcessFailed, Session, wait_until
from tests.waiting import until

pytestmark = pytest.mark.process

_DAEMON = """
import os, sys, time
tag = os.environ["FLASHCKPT_BENCH_TAG"]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(f"/dev/shm/left_{tag}", "w").close()
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
while not os.path.exists(sys.argv[1]) or not os.path.getsize(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    made = Session(sys.executable, tmp_path)
    yield made
    made.clean()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes a module of a source, for `python -m`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(source: str) -> str:
        (tmp_path / "benched.py").write_text(source)
        return "benched"

    return make


def test_a_daemon_in_a_session_of_its_own_is_found_and_ended(
    session: Session, module: Callable[[str], str]
) -> None:
    pid_file = session.folder / "pid"
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        session.run([module(_DAEMON), str(pid_file)], timeout_s=60)
        daemon = int(pid_file.read_text())
        assert session.processes() == [daemon]
        session.clean()
        assert wait_until(lambda: not os.path.exists(f"/proc/{daemon}/environ") or _is_dead(daemon), 240)
        assert not os.path.exists(f"/dev/shm/left_{session.tag}")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_process_that_does_not_end_is_ended_and_said_so(
    session: Session, module: Callable[[str], str]
) -> None:
    with pytest.raises(ProcessFailed, match="did not end within"):
        session.run([module("import time; time.sleep(600)")], timeout_s=0.5)
    assert session.processes() == []


@pytest.mark.long
def test_a_process_that_hides_its_tag_is_ended_too(session: Session, module: Callable[[str], str]) -> None:
    """As one does that writes its title over its environment."""
    with pytest.raises(ProcessFailed, match="did not end within"):
        session.run([module(_HIDDEN), str(session.folder / "hidden")], timeout_s=20)
    assert (session.folder / "hidden").exists()


def test_shared_memory_is_counted_once(session: Session, module: Callable[[str], str]) -> None:
    """Two processes that map the same 64 MiB have 64 MiB of it together. Both wait until that was seen."""
    seen = session.folder / "seen"

    def note() -> None:
        until(lambda: any(sample.shared >= 64 << 20 for sample in list(session.samples)), "a sample of both")
        seen.touch()

    noting = threading.Thread(target=note)
    noting.start()
    session.run([module(_SHARED), str(seen)], timeout_s=280)
    noting.join()
    assert max(sample.shared for sample in session.samples) < 100 << 20


_HIDDEN = """
import ctypes, sys, time
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
begin, end = int(fields[47]), int(fields[48])
ctypes.memset(begin, 120, end - begin)
assert b"FLASHCKPT_BENCH_TAG" not in open("/proc/self/environ", "rb").read()
open(sys.argv[1], "w").close()
time.sleep(600)
"""

_SHARED = """
import mmap, os, sys, time
memory = mmap.mmap(-1, 64 << 20)
memory[:] = b"x" * (64 << 20)
child = os.fork()
if child == 0:
    memory[:] = b"y" * (64 << 20)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    os._exit(0)
os.waitpid(child, 0)
"""


def _is_dead(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
