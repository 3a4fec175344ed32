"""A process that has imported the keeper once and forks the keepers of tests: a start takes 0.3 s of CPU,
nine tenths of them for imports.

Owns the way to it. A forked keeper runs `main()` of the program with the same orders, streams, session,
environment and command line, and belongs to init. A trainer that was not forked by `tests.zygote`, or whose
circumstances differ from this process's (limits, CPUs, what an interpreter reads when it starts), starts its
keeper as users do.

`python -m tests.zygote.keepers SOCKET PIPE PADDING`: the process that forks. It ends when PIPE shows the end
of the process that started it.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from tests import process_guard
from tests.zygote.forking import MESSAGE_BYTES, forget, preload

ROOT = Path(__file__).parents[2]
ADDRESS = "TESTS_KEEPERS"
"""The variable of the environment that names the socket. Without it, keepers are started as users do."""
_PROGRAM = "flashckpt.keeper.__main__"
_PRELOADED = (_PROGRAM, "flashckpt.keeper.daemon", "flashckpt.keeper.mirror_upload")
_SETTLED = ("PYTHON", "LD_", "LANG", "LC_", "MALLOC_")
_STATUS = ("Umask", "Uid", "Gid", "Groups", "Cpus_allowed", "SigIgn", "NoNewPrivs", "Seccomp")
_ROOM = 1 << 16


def circumstances() -> dict[str, Any]:
    """What a started program would inherit and a forked one does not."""
    with open("/proc/thread-self/status") as file:
        status = dict(line.rstrip("\n").split(":", 1) for line in file)
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        **{name: status.get(name) for name in _STATUS},
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": [list(resource.getrlimit(limit)) for limit in limits],
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid", "user")],
        "settled": sorted(pair for pair in os.environ.items() if pair[0].startswith(_SETTLED)),
        "python": sys.executable,
    }


def fork_keepers() -> None:
    """Let this process's keepers be forked, where the environment names who does that."""
    from flashckpt.keeper import start

    if (program := start._start_program).__module__ == start.__name__:

        def started(run_path: str, orders: bytes, log_file: int, held: int) -> None:
            if not _forked(run_path, orders, log_file, held):
                program(run_path, orders, log_file, held)

        start._start_program = started


def _forked(run_path: str, orders: bytes, log_file: int, held: int) -> bool:
    address = os.environ.get(ADDRESS, "")
    if not address:
        return False
    process_guard.starting(f"keeper of {run_path}")
    mask = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    message = json.dumps([circumstances(), dict(os.environ), mask, run_path, orders.decode()])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        try:
            asked.connect("\0" + address)
            socket.send_fds(asked, [message.encode()], [log_file, held])
            return asked.recv(16) == b"0"
        except OSError:
            return False


class Keepers:
    """The process that forks keepers, for this process and the trainers that it has forked."""

    def __init__(self) -> None:
        address = f"flashckpt-tests-keepers-{os.getpid()}-{time.monotonic_ns()}"
        reading, self._held = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind("\0" + address)
            listening.listen(64)
            numbers = [listening.fileno(), reading]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote.keepers", *map(str, numbers), " " * _ROOM],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "TESTS_ROOM": " " * _ROOM},
                pass_fds=numbers,
                start_new_session=True,
            )
        os.close(reading)
        os.environ[ADDRESS] = address

    def close(self) -> None:
        os.environ.pop(ADDRESS, None)
        os.close(self._held)
        self._process.wait(60)


def _serve(listening: socket.socket, held: int) -> None:
    """Returns when who started this process is gone."""
    own = json.loads(json.dumps(circumstances()))
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    poll.register(held, select.POLLHUP)
    while True:
        ready = {number for number, _ in poll.poll()}
        if held in ready:
            return
        with listening.accept()[0] as asked:
            try:
                message, descriptors, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, 2)
            except OSError:
                continue
            if not message:
                continue
            of_asking, environment, mask, run_path, orders = json.loads(message)
            status = 1
            if of_asking == own and _size(environment) < _ROOM:
                if (child := os.fork()) == 0:
                    for number in (listening.fileno(), asked.fileno(), held):
                        os.close(number)
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                    _become_keeper(descriptors[0], environment, run_path, orders)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(OSError):  # who has asked may be killed meanwhile
                asked.send(str(status).encode())


def _size(environment: dict[str, str]) -> int:
    return len(os.fsencode("\0".join(f"{name}={value}" for name, value in environment.items())))


def _become_keeper(log_file: int, environment: dict[str, str], run_path: str, orders: str) -> NoReturn:
    """Runs the program as its start would have: it reads its orders and forks."""
    status = 1
    try:
        os.setsid()
        os.chdir("/")
        given = os.memfd_create("orders")
        os.write(given, orders.encode())
        os.lseek(given, 0, os.SEEK_SET)
        for number, descriptor in enumerate((given, log_file, log_file)):
            os.dup2(descriptor, number)
        os.close(given)
        os.close(log_file)
        os.environ.clear()
        os.environ.update(environment)
        program = importlib.import_module(_PROGRAM)
        _show([sys.executable, "-I", str(program.__file__), run_path], environment)
        forget()
        sys.argv[1:] = [run_path]
        program.main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _show(arguments: list[str], environment: dict[str, str]) -> None:
    """Let /proc show this command line and environment: both are read from the process's own memory."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    # Fields 48 to 51 of the line: where arguments and environment begin and end.
    arguments_at, arguments_end, environment_at, environment_end = map(int, fields[45:49])
    texts = [f"{name}={value}" for name, value in environment.items()]
    for shown, begin, end in (
        (arguments, arguments_at, arguments_end),
        (texts, environment_at, environment_end),
    ):
        data = os.fsencode("\0".join(shown) + "\0").ljust(end - begin, b"\0")
        ctypes.memmove(begin, data, end - begin)


def main() -> None:
    held = int(sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        preload(_PRELOADED)
        _serve(listening, held)


if __name__ == "__main__":
    main()
