"""The processes of one peer: started in a session of their own, watched, and ended with all they left.

Owns starting, sampling memory, killing and cleaning up. Everything a peer starts inherits an environment
variable with this session's tag, by which it is found wherever it went: a saver that outlives its parent, a
daemon in a session of its own.
"""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import files, stopping

TAG = "FLASHCKPT_BENCH_TAG"
_OUTER = "FLASHCKPT_BENCH_OUTER_TAG"
_PERIOD_S = 0.05
# Resource trackers clean up after their process if they are given the time.
_GRACE_S = 2.0
# Named after a pid or a tag of this session, so that nothing of others can match: shared tensors of torch,
# DLRover's regions and sockets, flashckpt's runtime folder. multiprocessing's semaphores stay: their names do
# not say whose they are, and one that nobody has open yet may be about to be opened.
_LITTER = ("/dev/shm/torch_{pid}_*", "/dev/shm/*{tag}*", "/tmp/ckpt_sock/*{tag}*")
_ROOT = Path(__file__).resolve().parent.parent


class ProcessFailed(Exception):
    """A measuring process did not report. The message is the last line it wrote that says why."""


class TimedOut(ProcessFailed):
    """It was ended at its limit."""


@dataclass
class Sample:
    """Bytes of host memory at one moment: of their own in all processes of the session, and shared ones,
    counted once (the largest mapping any of them has, since they map the same)."""

    at_s: float
    own: int
    shared: int

    @property
    def total(self) -> int:
        return self.own + self.shared


@dataclass
class Session:
    python: str
    folder: Path
    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    samples: list[Sample] = field(default_factory=list)
    keeper_peak: int = 0
    _pids: set[int] = field(default_factory=set)
    _keepers: set[int] = field(default_factory=set)
    _strangers: set[int] = field(default_factory=set)

    def run(self, arguments: list[str], *, timeout_s: float, may_die: bool = False) -> float:
        """Run `python -m …` to its end. Returns seconds. Raises ProcessFailed with its reason."""
        log = self.folder / f"{arguments[0]}.log"
        began = time.monotonic()
        log.unlink(missing_ok=True)
        code = self.call([self.python, "-m", *arguments], log=log, timeout_s=timeout_s)
        if code is None:
            raise TimedOut(f"did not end within {timeout_s:.0f} s")
        if code != 0 and not (may_die and code == -signal.SIGKILL):
            raise ProcessFailed(_reason(log) or f"exit code {code}")
        return time.monotonic() - began

    def call(
        self, command: list[str], *, log: Path, timeout_s: float, environment: dict[str, str] | None = None
    ) -> int | None:
        """Run any command to its end, its output at the end of `log`. Returns its code, negative for a
        signal; None if it was ended for its time, and all with it that it had started."""
        os.makedirs(self._runtime, mode=0o700, exist_ok=True)
        with open(log, "a") as output:
            process = None
            try:
                with stopping.held():  # a process that has no name yet would be left behind
                    process = subprocess.Popen(
                        command,
                        cwd=_ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        env={**self.environment(), **(environment or {})},
                    )
                return self._watch(process, time.monotonic() + timeout_s)
            finally:
                if process is not None and process.poll() is None:  # the wait was interrupted
                    with stopping.held():
                        self.end_processes()
                        process.kill()
                        process.wait()

    @property
    def _runtime(self) -> str:
        """Regions in a folder of the session's own, so that they can be told from those of others."""
        return f"/dev/shm/flashckpt-bench-{self.tag}"

    def environment(self) -> dict[str, str]:
        inherited = dict(os.environ)
        # pip compiled the peers' modules when it installed them. flashckpt stands in a source tree: compiled
        # anew in each process, its modules would be half of a small load's CPU.
        inherited.pop("PYTHONDONTWRITEBYTECODE", None)
        return {
            **inherited,
            TAG: self.tag,
            # One that was started by another session's process is ended with it, too.
            **({_OUTER: os.environ[TAG]} if TAG in os.environ else {}),
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "FLASHCKPT_RUNTIME": self._runtime,
            "TORCHELASTIC_RUN_ID": self.tag,
        }

    def _watch(self, process: subprocess.Popen[bytes], end_s: float) -> int | None:
        while process.poll() is None:
            if time.monotonic() > end_s:
                self.end_processes()
                process.kill()  # it may have written over its environment, as programs that set a title do
                process.wait()
                return None
            self.sample()
            time.sleep(_PERIOD_S)
        return process.returncode

    def sample(self) -> None:
        own, shared = 0, 0
        for pid in self.processes():
            anonymous, of_files, mapped = _memory(pid)
            own += anonymous
            shared = max(shared, mapped)
            if pid in self._keepers:
                self.keeper_peak = max(self.keeper_peak, anonymous + of_files)
        self.samples.append(Sample(time.monotonic(), own, shared))

    def peak(self, phase: tuple[float, float]) -> int:
        """The most bytes at once within a phase; 0 when nothing was sampled in it."""
        began, ended = phase
        return max((sample.total for sample in self.samples if began <= sample.at_s <= ended), default=0)

    def processes(self) -> list[int]:
        """Pids of all living processes that carry the tag. A stranger is asked once, while it lives: a
        thousand reads of /proc a second would be felt by what is measured."""
        living = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._strangers &= living
        asked = {pid: self._is_ours(pid) for pid in living - self._strangers}
        found = [pid for pid, is_ours in asked.items() if is_ours]
        self._strangers.update(pid for pid, is_ours in asked.items() if is_ours is False)
        self._keepers.update(pid for pid in set(found) - self._pids if _is_keeper(pid))
        self._pids.update(found)
        return found

    def _is_ours(self, pid: int) -> bool | None:
        """None while it has no environment yet: in the middle of an exec it is empty."""
        wanted = {f"{name}={self.tag}".encode() for name in (TAG, _OUTER)}
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if not environment and _has_memory(pid):
                return None
            return not wanted.isdisjoint(environment.split(b"\0"))
        except OSError:
            return False

    def end_processes(self) -> None:
        """Kill what carries the tag until nothing does."""
        for _ in range(100):
            living = self.processes()
            if not living:
                return
            for pid in living:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(_PERIOD_S)

    def clean(self) -> None:
        """End what is left and remove what only processes of this session can have made elsewhere."""
        wait_until(lambda: not self.processes(), _GRACE_S)
        self.end_processes()
        for pattern in _LITTER:
            for pid in self._pids if "{pid}" in pattern else {0}:
                for path in glob.glob(pattern.format(pid=pid, tag=self.tag)):
                    files.remove(Path(path))


def wait_until(true: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(_PERIOD_S)
    return true()


def _memory(pid: int) -> tuple[int, int, int]:
    """Bytes of anonymous memory, of files (its program and libraries) and of shared memory, all resident."""
    values = {"RssAnon": 0, "RssFile": 0, "RssShmem": 0}
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in values:
                values[name] = int(rest.split()[0]) * 1024
    except OSError:
        pass
    return values["RssAnon"], values["RssFile"], values["RssShmem"]


def _has_memory(pid: int) -> bool:
    """Not so of the kernel's own threads, and of what is dead."""
    return Path(f"/proc/{pid}/statm").read_bytes().split()[0] != b"0"


def _is_keeper(pid: int) -> bool:
    try:
        return b"flashckpt/keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _reason(log: Path) -> str:
    """The last line of a traceback, which names the error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines or [""])[-1][:300]


if sys.platform != "linux":
    raise SystemExit("the benchmark reads /proc: it runs on Linux only")
