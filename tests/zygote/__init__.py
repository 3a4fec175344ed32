"""A process that has imported torch once and forks the programs of tests: real ones, to be really killed.

Owns the way to it, and to what it forks. A forked program is what a fresh interpreter would make of it, but
for what is settled once an interpreter runs: those variables of the environment, the seed of its hashes, and
the modules that are imported already. What depends on one of these is started with `subprocess`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests import process_guard
from tests.descriptors import readable

ROOT = Path(__file__).parents[2]
PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
# Read when an interpreter or a library starts, never again.
SETTLED = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_", "CUDA_", "LANG", "LC_")
# What takes long to import, of what a trainer imports until its first step: an optimizer imports dynamo.
PRELOADED = ("numpy", "torch._dynamo", "torch.utils.data", "flashckpt.checkpointer.resume")
# Threads that imports start (NumPy's pool, pyarrow's allocator): a process with threads must not be forked.
WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
LIMIT_S = 240.0

Stream = int | IO[Any] | None


class ZygoteError(Exception):
    """Nothing could be forked, or nothing is known any more of what was."""


class Zygote:
    """One such process. Whatever it has forked is gone after `close`."""

    def __init__(
        self, modules: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        """modules: imported before the first fork, in the place of `PRELOADED`. environment: more variables
        for these imports."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket, self._turn = ours, threading.Lock()
        self._environment = dict(os.environ)
        preloaded = PRELOADED if modules is None else modules
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote", str(its.fileno()), *preloaded],
                stdin=DEVNULL,
                cwd=ROOT,
                env={**os.environ, **WITHOUT_THREADS, **(environment or {})},
                pass_fds=[its.fileno()],
            )
        self._end = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_died(self) -> bool:
        return bool(readable(self._end, timeout_s=0))

    def start(
        self,
        arguments: Sequence[str],
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> Forked:
        """`python -m *arguments` in the repository's root; the rest as `subprocess.Popen` has it."""
        process_guard.starting(f"zygote {arguments}")
        environment = dict(os.environ if env is None else env)
        self._check(environment)
        streams = [_Ends.of(given, number) for number, given in enumerate((stdin, stdout, stderr))]
        try:
            message = [list(arguments), environment, start_new_session]
            pid = self._ask("fork", message, [each.its for each in streams])
        finally:
            for each in streams:
                each.close_its()
        return Forked(self, pid, [each.ours for each in streams])

    def run(
        self, arguments: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        """Until its end, and what it said."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = self.start(arguments, stdin=DEVNULL, stdout=out, stderr=err, env=env)
            try:
                status = process.wait(timeout)
            finally:
                process.kill()
            said = [
                os.pread(each.fileno(), os.fstat(each.fileno()).st_size, 0).decode() for each in (out, err)
            ]
        return subprocess.CompletedProcess(list(arguments), status, *said)

    def reap(self, pid: int) -> int:
        """The status of one that has ended, as `subprocess` gives it."""
        return int(self._ask("reap", pid))

    def close(self) -> None:
        with self._turn:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            try:
                self._process.wait(LIMIT_S)
            finally:
                self._process.kill()
                os.close(self._end)

    def _check(self, environment: Mapping[str, str]) -> None:
        for name in {*environment, *self._environment}:
            if name.startswith(SETTLED) and environment.get(name) != self._environment.get(name):
                raise ValueError(f"{name} is read when an interpreter starts: start one with subprocess")

    def _ask(self, what: str, about: object, descriptors: Sequence[int] = ()) -> Any:
        with self._turn:
            try:
                socket.send_fds(self._socket, [json.dumps([what, about]).encode()], descriptors)
                ready = readable(self._socket.fileno(), self._end, timeout_s=LIMIT_S)
                assert ready, f"the process that forks has not answered for {LIMIT_S:.0f} s"
                answer = self._socket.recv(1 << 16) if self._socket.fileno() in ready else b""
            except OSError:
                answer = b""
        if not answer:
            raise ZygoteError(
                f"The process that forks is gone: it cannot {what} any more. It may have said why."
            )
        found = json.loads(answer)
        if "failed" in found:
            raise ZygoteError(f"The process that forks cannot {what}: {found['failed']}")
        return found["done"]


class Forked:
    """A program that runs; of `subprocess.Popen` what tests need, with the same meaning."""

    def __init__(self, zygote: Zygote, pid: int, streams: Sequence[int]) -> None:
        self._zygote, self.pid = zygote, pid
        # Until it is reaped, its pid is nobody else's.
        self._end = os.pidfd_open(pid)
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = map(_opened, streams, "wrr")

    def poll(self) -> int | None:
        if self.returncode is None and readable(self._end, timeout_s=0):
            self.returncode = self._zygote.reap(self.pid)
            os.close(self._end)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not readable(self._end, timeout_s=timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._end, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _opened(descriptor: int, mode: str) -> IO[str] | None:
    return None if descriptor < 0 else open(descriptor, mode)


class _Ends:
    """A stream of a forked program: its end, and this process's where it is a pipe (else -1)."""

    def __init__(self, ours: int, its: int, is_made: bool) -> None:
        self.ours, self.its, self._is_made = ours, its, is_made

    @classmethod
    def of(cls, given: Stream, number: int) -> _Ends:
        if given is None:
            return cls(-1, number, False)
        if given == PIPE:
            read, write = os.pipe()
            return cls(write, read, True) if number == 0 else cls(read, write, True)
        if given == DEVNULL:
            return cls(-1, os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), True)
        return cls(-1, given if isinstance(given, int) else given.fileno(), False)

    def close_its(self) -> None:
        if self._is_made:
            os.close(self.its)


Program = subprocess.Popen[str] | Forked


def start(arguments: Sequence[str], *, fresh: bool = False, **how: Any) -> Program:
    """`python -m *arguments` in the repository's root, as `Zygote.start`; fresh: in a new interpreter."""
    if not fresh:
        return shared().start(arguments, **how)
    command = [sys.executable, "-m", *arguments]
    started: subprocess.Popen[str] = subprocess.Popen(command, text=True, cwd=ROOT, **how)
    return started


_shared: list[Zygote] = []


def shared() -> Zygote:
    """This process's own, made when first asked for, and again if it has died meanwhile."""
    if not _shared or _shared[-1].has_died:
        close_shared()
        _shared.append(Zygote())
    return _shared[-1]


def shared_descriptors() -> list[int]:
    """Those of this process that the shared one is reached through."""
    return [number for each in _shared for number in (each._socket.fileno(), each._end)]


def close_shared() -> None:
    while _shared:
        _shared.pop().close()
