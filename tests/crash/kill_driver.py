"""Lives a run again and again in a forked child that kills itself at its n-th system call, for every n.

A program of its own: `python -m tests.crash.kill_driver FOLDER`. Writes what went wrong as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback

from tests.crash.mortal import MortalSystem
from tests.crash.scenario import Expected, live


class Mortal(MortalSystem):
    """Kills its process at the call number `last`: before it, or half way through a write."""

    def __init__(self, last: int) -> None:
        self.last, self.calls = last, 0

    def live(self) -> None:
        self.calls += 1
        if self.calls == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, file: int, data: memoryview) -> int:
        if self.calls + 1 == self.last:
            super(MortalSystem, self).write(file, data[: len(data) // 2])
        return super().write(file, data)


def lived(run: str, said: str, last: int) -> int:
    """The exit status of a child that lives until its call number `last`."""
    child = os.fork()
    if child == 0:
        try:
            with open(said, "w", buffering=1) as file:
                live(run, Mortal(last), lambda what, step: print(what, step, sep=":", file=file))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def expected_of(said: str) -> Expected:
    expected = Expected()
    with open(said) as file:
        for line in file:
            what, step = line.split(":")
            expected.say(what, int(step))
    return expected


def main(folder: str) -> None:
    faults, last = [], 0
    while True:
        last += 1
        run, said = f"{folder}/run-{last}", f"{folder}/said-{last}"
        status = lived(run, said, last)
        if status and not os.WIFSIGNALED(status):
            faults.append(f"call {last}: the run itself failed")
            break
        expected = expected_of(said)
        # What was begun may be committed already when the kill comes before the run says so.
        faults += [f"call {last}: {fault}" for fault in _faults(expected, run)]
        shutil.rmtree(run, ignore_errors=True)
        if not status:
            break
    print(json.dumps({"calls": last - 1, "faults": faults}))


def _faults(expected: Expected, run: str) -> list[str]:
    try:
        return expected.faults(run)
    except Exception:
        return [traceback.format_exc()]


if __name__ == "__main__":
    main(sys.argv[1])
