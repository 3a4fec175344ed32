"""Constants shards that dead keepers left: they take the room of none that is written after them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from flashckpt.commit import constants
from flashckpt.commit.verification import verify
from flashckpt.errors import KeeperError
from flashckpt.format.names import AttemptName, attempt_folder, constants_name
from flashckpt.persist.job import JobState
from flashckpt.persist.writer import Writer
from flashckpt.store import open_store
from flashckpt.store.base import Store
from tests.keeper.driver import committed, eventually
from tests.keeper.fake import FakeTrainer, keeper_pid
from tests.keeper.jobs import snapshot_of
from tests.keeper.test_keeper_constants import alone as alone
from tests.keeper.test_keeper_constants import attached, files, named, order, saved
from tests.memory.mounts import small_tmpfs
from tests.recovery.scene import Crash, recovered, rows

# Between the constants, which are whole then, and the part that is to name them.
BEFORE_ITS_PART = "write.begun:1:kill"


def test_what_a_killed_keeper_wrote_is_no_longer_in_the_way(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with room for the constants once, as one of a large base is."""
    with small_tmpfs(24 << 20) as disk:
        with monkeypatch.context() as armed:
            armed.setenv("FLASHCKPT_CRASH_AT", BEFORE_ITS_PART)
            trainer = attached(disk / "run", runtime, constants_kib=16 << 10, kib=16)
        trainer.snapshot(1, persist=True)
        trainer.wait_committed(1)
        assert trainer.client.restarts == 1
        assert committed(trainer.run) == [1]
        [file] = files(trainer)
        assert named(trainer.run, 1).shard.file == file.name
        saved(trainer, 2)
        assert files(trainer) == [file]
        assert verify(open_store(str(trainer.run))).ok
        trainer.end()


def tended(trainer: FakeTrainer) -> None:
    with contextlib.suppress(KeeperError):  # one that comes after many that died has to wait
        trainer.client.tend()


def test_keepers_that_are_killed_over_and_over_leave_one_file(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as armed:
        armed.setenv("FLASHCKPT_CRASH_AT", BEFORE_ITS_PART)
        trainer = attached(tmp_path / "run", runtime)
        trainer.snapshot(1, persist=True)

        def restarted() -> bool:
            tended(trainer)
            return trainer.client.restarts >= 3

        eventually(restarted)
        assert len(files(trainer)) <= 1

    def is_committed() -> bool:
        tended(trainer)
        return committed(trainer.run) == [1]

    eventually(is_committed)
    assert len(files(trainer)) == 1
    trainer.end()


def test_nor_is_it_in_the_way_of_a_recovery(
    small_disk: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_disk / "run"
    with monkeypatch.context() as armed:
        armed.setenv("FLASHCKPT_CRASH_AT", BEFORE_ITS_PART)
        crash = Crash(run, runtime, kib=16, constants_kib=5 << 10).slots()
    crash.trainer.do("snapshot", 1, True)
    eventually(lambda: keeper_pid(crash.folder) is None)
    crash.trainer.kill()
    [left] = run.glob("attempts/*/constants-*")
    assert rows(recovered(run), "snapshot") == [("snapshot", "committed", 1)]
    assert committed(run) == [1]
    assert len(list(run.glob("attempts/*/constants-*"))) == 1
    assert not crash.regions()


def left_behind(trainer: FakeTrainer, number: int) -> str:
    name = constants_name(0, number)
    (trainer.run / attempt_folder(trainer.attempt) / name).write_bytes(b"half")
    return name


def test_what_another_keeper_may_still_name_stays(alone: FakeTrainer) -> None:
    left = left_behind(alone, 4)
    writer = Writer(alone.store, "0123abcd")
    assert writer.persist(order(alone, 1)).state is JobState.COMMITTED
    assert [file.name for file in files(alone)] == [left, constants_name(0, 5)]


def test_nothing_goes_without_the_pin(alone: FakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another keeper has begun meanwhile, and may have written what stands there."""
    left, look = left_behind(alone, 4), constants.unnamed_of

    def unnamed_of(store: Store, attempt: AttemptName, rank: int) -> list[str]:
        found = look(store, attempt, rank)
        slot = snapshot_of(asked).slot
        assert slot.unpin(slot.state())
        assert slot.pin(snapshot_of(asked).owner + 1, slot.state()) is not None
        return found

    monkeypatch.setattr(constants, "unnamed_of", unnamed_of)
    asked = order(alone, 1, is_alone=True)
    assert Writer(alone.store, "0123abcd").persist(asked).state is JobState.FAILED
    assert [file.name for file in files(alone)] == [left]


def test_what_a_part_names_stays(alone: FakeTrainer) -> None:
    writer = Writer(alone.store, "0123abcd")
    assert writer.persist(order(alone, 1)).state is JobState.COMMITTED
    [first] = files(alone)
    left_behind(alone, 4)
    other = alone.run / attempt_folder(alone.attempt) / constants_name(1, 1)
    other.write_bytes(b"of another rank")
    # Cut short, it is written again; and a step that is not committed any more still names it.
    first.write_bytes(first.read_bytes()[:-1])
    assert writer.persist(order(alone, 2, is_alone=True)).state is JobState.COMMITTED
    names = [file.name for file in files(alone)]
    assert names == [first.name, constants_name(0, 5), other.name], "no number comes again"
    assert committed(alone.run) == [2]


def test_no_name_comes_again_of_what_made_room(alone: FakeTrainer) -> None:
    """Of another keeper's file, which has decided to name it, and sleeps."""
    left_behind(alone, 3)
    writer = Writer(alone.store, "0123abcd")
    assert writer.persist(order(alone, 1, is_alone=True)).state is JobState.COMMITTED
    [file] = files(alone)
    assert file.name == constants_name(0, 4)
    file.unlink()
    left_behind(alone, 6)
    assert writer.persist(order(alone, 2, is_alone=True)).state is JobState.COMMITTED
    assert named(alone.run, 2).shard.file == constants_name(0, 7)


def test_what_a_manifest_names_stays_though_its_part_is_lost(alone: FakeTrainer) -> None:
    writer = Writer(alone.store, "0123abcd")
    assert writer.persist(order(alone, 1)).state is JobState.COMMITTED
    [first], [part] = files(alone), alone.run.glob("steps/*/*/part-*")
    lost, data = part.rename(alone.run / "lost"), first.read_bytes()
    first.write_bytes(data[:-1])
    assert writer.persist(order(alone, 2, is_alone=True)).state is JobState.COMMITTED
    assert [file.name for file in files(alone)] == [first.name, constants_name(0, 2)]
    lost.rename(part)
    first.write_bytes(data)
    assert committed(alone.run) == [1, 2]
