"""Runs that were left in every kind of mess at once: functions of a run's folder and a runtime folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flashckpt.commit import attempts
from flashckpt.commit.holder import here
from flashckpt.commit.lineage import branch
from flashckpt.format.names import AttemptName
from flashckpt.store import open_store
from tests.keeper.test_keeper_deaths import flip_image
from tests.recovery.scene import Crash


def everything(run: Path, runtime: Path) -> None:
    """In memory: 3 without its manifest, 4 good, 5 torn. At rest: 1 whole, 2 damaged, 3 in parts, debris."""
    crash = Crash(run, runtime, kib=64).slots().commit(1, 2, 3)
    crash.seal(4)
    [torn] = crash.seal(5)
    flip_image(Path(crash.folder.path) / torn)
    crash.both_killed()
    step = f"steps/{{:012d}}/{crash.attempt}"
    flip_image(next((run / step.format(2)).glob("shard*")))
    (run / step.format(3) / "manifest.json").unlink()
    (run / step.format(1) / "shard-00000-0123456789ab.safetensors").write_bytes(b"cut off")
    (run / step.format(3) / f".part-00000.json.{'0' * 16}.tmp").write_bytes(b"{")
    (run / step.format(9)).mkdir(parents=True)
    (run / step.format(9) / "shard-00000-0123456789ab.safetensors").write_bytes(b"cut off")
    (run / f"attempts/.000001.json.{'a' * 16}.tmp").write_bytes(b"")
    attempts.mark_ended(open_store(str(run)), attempts.claim(open_store(str(run)), here()), "dead")
    attempts.mark_ended(open_store(str(run)), attempts.claim(open_store(str(run)), here()), "dead")


def left_branch(run: Path, runtime: Path) -> None:
    """A step in memory of a branch that was left, and one at rest that wants only its manifest."""
    crash = Crash(run, runtime, kib=64).slots().commit(1, 2, 3)
    crash.seal(7)
    crash.both_killed()
    (run / f"steps/{3:012d}/{crash.attempt}/manifest.json").unlink()
    branch(open_store(str(run)), 1)


def overtaken_branch(run: Path, runtime: Path) -> None:
    """The branch has a sealed step of its own, committed nowhere yet."""
    left_branch(run, runtime)
    made = attempts.newest_started(open_store(str(run)))
    second = Crash(run, runtime, parent=str(made), step=1, kib=64).slots()
    second.seal(2, 3)
    second.both_killed()


def asked_for(run: Path, runtime: Path) -> None:
    """Two steps of which the older was asked for."""
    crash = Crash(run, runtime, kib=64).slots()
    crash.seal(5, persist=True)
    crash.seal(6)
    crash.both_killed()


def damaged_at_rest(run: Path, runtime: Path) -> None:
    """The newest step is damaged at rest and whole in memory."""
    crash = Crash(run, runtime, kib=64).slots().commit(1, 2)
    crash.both_killed()
    flip_image(next(run.glob(f"steps/{2:012d}/*/shard*")))


def resumed_from(run: Path, runtime: Path) -> None:
    """A second attempt went on from a slot and died before it had committed anything."""
    first = Crash(run, runtime, kib=64).slots()
    first.seal(4)
    first.both_killed()
    store = open_store(str(run))
    second = attempts.claim(store, here())
    attempts.start(store, second, AttemptName.parse(first.attempt), 4, 1, 4)
    attempts.mark_ended(store, second, "dead")


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


MESSES: list[Callable[[Path, Path], None]] = [
    everything,
    left_branch,
    overtaken_branch,
    asked_for,
    damaged_at_rest,
    resumed_from,
    no_slots,
]
