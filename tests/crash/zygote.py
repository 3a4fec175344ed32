"""A process that has imported torch once and forks trainers: each a real process, to be really killed.

A program of its own: `python -m tests.crash.zygote`. One JSON line in, one out: ["fork", folder,
environment, arguments], ["wait", pid], ["reference", steps].
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Zygote:
    """The handle on it. Ends it, and with it nothing else, at `close`."""

    def __init__(self) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **threads},
        )

    def fork(self, stderr: Path, environment: Mapping[str, str], **arguments: Any) -> int:
        """A trainer with its pid; what it says goes to the end of `stderr`."""
        return int(self._ask("fork", str(stderr), dict(environment), arguments))

    def wait(self, pid: int) -> int:
        """The exit status of a trainer that ended or is about to: negative for a signal."""
        return int(self._ask("wait", pid))

    def reference(self, steps: int) -> list[int]:
        found: list[int] = self._ask("reference", steps)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)

    def _ask(self, *message: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _fork(stderr: str, environment: dict[str, str], arguments: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _become(stderr, environment)
            from flashckpt import crashpoints
            from tests.crash import tiny

            crashpoints.arm(environment.get("FLASHCKPT_CRASH_AT", ""))
            tiny.train(**arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def _become(stderr: str, environment: dict[str, str]) -> None:
    """Streams and environment of its own: the pipes to the tests are the zygote's."""
    log = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.update(environment)


def _reference(steps: int) -> list[int]:
    """In a child: what a training leaves in a process (threads, random numbers) is not for the next."""
    from tests.crash import tiny

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with open(write, "w") as file:
            json.dump(tiny.reference(steps), file)
        os._exit(0)
    os.close(write)
    with open(read) as file:
        found: list[int] = json.load(file)
    os.waitpid(pid, 0)
    return found


def main() -> None:
    import torch

    import flashckpt
    from tests.crash import tiny

    flashckpt.loop  # noqa: B018  (imports what a trainer needs, once)
    assert tiny.made()
    torch.set_num_threads(1)
    for line in sys.stdin:
        what, *rest = json.loads(line)
        if what == "fork":
            answer: Any = _fork(*rest)
        elif what == "wait":
            answer = os.waitstatus_to_exitcode(os.waitpid(rest[0], 0)[1])
        else:
            answer = _reference(*rest)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
