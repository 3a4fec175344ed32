"""Runs that were left in every kind of mess at once: functions of a run's folder and a runtime folder."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from flashckpt.commit.lineage import branch
from flashckpt.store import open_store
from tests.keeper.test_keeper_deaths import flip_image
from tests.recovery.scene import Crash


def everything(run: Path, runtime: Path) -> None:
    """In memory: 3 without a commit, 4 good, 5 torn. At rest: 1 whole, 2 damaged, 3 in parts, orphans."""
    crash = Crash(run, runtime, kib=64).slots().commit(1, 2, 3)
    crash.seal(4)
    [torn] = crash.seal(5)
    flip_image(Path(crash.folder.path) / torn)
    crash.both_killed()
    flip_image(next(crash.data(2).glob("rank-*")))
    crash.uncommit(3)
    crash.half_written(0)
    crash.half_written(1)
    crash.half_written(9)
    old(run / f"alive/.{crash.attempt}.{'a' * 16}.tmp")
    old(run / f".probe-{'a' * 16}")


def old(path: Path) -> Path:
    """A file whose write was cut off two days ago."""
    path.write_bytes(b"{")
    os.utime(path, (time.time() - 2 * 86400.0,) * 2)
    return path


def left_branch(run: Path, runtime: Path) -> Crash:
    """A step in memory of a branch that was left, and half of one at rest."""
    crash = Crash(run, runtime, kib=64).slots().commit(1, 2, 3)
    crash.seal(7)
    crash.both_killed()
    crash.half_written(6)
    branch(open_store(str(run)), 1)
    return crash


def overtaken_branch(run: Path, runtime: Path) -> Crash:
    """The branch has a sealed step of its own, committed nowhere yet."""
    first = left_branch(run, runtime)
    second = Crash(run, runtime, parent=first.attempt, step=1, kib=64).slots()
    second.seal(2, 3)
    return second.both_killed()


def asked_for(run: Path, runtime: Path) -> None:
    """Two steps of which the older was asked for."""
    crash = Crash(run, runtime, kib=64).slots()
    crash.seal(5, persist=True)
    crash.seal(6)
    crash.both_killed()


def no_slots(run: Path, runtime: Path) -> None:
    """Regions that are no slots: a page is damaged, a making was cut off, one is of something else."""
    crash = Crash(run, runtime, kib=64).slots()
    [page] = crash.seal(1)
    crash.seal(2)
    crash.both_killed()
    folder = Path(crash.folder.path)
    with open(folder / page, "r+b") as file:
        file.seek(40)
        file.write(b"\xee")
    for name, data in ((f"slot-00000-7-{7:016x}", bytes(8192)), (f"slot-00000-8-{8:016x}", b"x" * 8192)):
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)


MESSES: list[Callable[[Path, Path], object]] = [
    everything,
    left_branch,
    overtaken_branch,
    asked_for,
    no_slots,
]
