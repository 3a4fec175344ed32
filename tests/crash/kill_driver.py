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

from flashckpt.store.system import System
from tests.crash.scenario import Expected, live


class Mortal(System):
    """Kills its process at the call number `last`: before it, or half way through a write."""

    def __init__(self, last: int) -> None:
        self.last, self.calls = last, 0

    def _live(self) -> None:
        self.calls += 1
        if self.calls == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def create(self, name: str, folder: int) -> int:
        self._live()
        return super().create(name, folder)

    def write(self, file: int, data: memoryview) -> int:
        if self.calls + 1 == self.last:
            super().write(file, data[: len(data) // 2])
        self._live()
        return super().write(file, data)

    def sync(self, file: int) -> None:
        self._live()

    def sync_folder(self, folder: int) -> None:
        self._live()

    def link(self, source: str, target: str, source_folder: int, target_folder: int) -> None:
        self._live()
        super().link(source, target, source_folder, target_folder)

    def rename(self, source: str, target: str, folder: int) -> None:
        self._live()
        super().rename(source, target, folder)

    def make_folder(self, name: str, folder: int) -> None:
        self._live()
        super().make_folder(name, folder)

    def remove(self, name: str, folder: int) -> None:
        self._live()
        super().remove(name, folder)

    def remove_folder(self, name: str, folder: int) -> None:
        self._live()
        super().remove_folder(name, folder)


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
