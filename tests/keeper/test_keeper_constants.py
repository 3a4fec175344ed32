"""Constants on their way to storage: written once a run, never torn, whole wherever a keeper is struck."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashckpt import _native
from flashckpt.commit.steps import read_step
from flashckpt.commit.verification import verify
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.format.records import Contents
from flashckpt.persist.job import JobState, StepJob
from flashckpt.store import open_store
from tests import run_view
from tests.commit.runs import newest_of
from tests.folders import flip
from tests.keeper.driver import committed, saved, the_keeper, told
from tests.keeper.fake import FakeTrainer, keeper_pid
from tests.keeper.jobs import Persister, job_of, snapshot_of


def attached(
    run: Path, base: Path, parent: AttemptName | None = None, step: int = 0, *, filled: bool = True
) -> FakeTrainer:
    """With slots that name a region of constants, where it is `filled`."""
    trainer = FakeTrainer(run, base, constants_kib=64, keep=20)
    trainer.start(parent, step)
    if not filled:
        trainer.without_constants()
    trainer.take_slots()
    return trainer


def files(trainer: FakeTrainer) -> list[Path]:
    """The frozen files that a trainer's attempt has written."""
    return sorted(trainer.run.glob(f"data/{trainer.attempt}/*/frozen-*.safetensors"))


def named(run: Path, step: int) -> Contents:
    """The constants that a step's part names."""
    store = open_store(str(run))
    name = newest_of(store, step)
    constants = read_step(store, name).rank(0).constants
    assert constants is not None
    return constants


def flip_constant(trainer: FakeTrainer) -> None:
    """Flip one bit of base.weight in the region."""
    trainer.region.image_view[trainer.constants.data_start + 1000] ^= 4


@pytest.fixture
def alone(run: Path, runtime: Path) -> FakeTrainer:
    """A trainer whose keeper stands still, so that a test's own drain is the only one."""
    trainer = attached(run, runtime)
    os.kill(the_keeper(trainer.folder), signal.SIGSTOP)
    return trainer


def order(trainer: FakeTrainer, step: int, spoil: Callable[[], object] | None = None) -> StepJob:
    slot, _ = trainer.snapshot(step)
    if spoil is not None:
        spoil()
    assert trainer.region is not None
    return job_of(trainer, slot, trainer.region)


def test_the_second_step_and_a_new_attempt_write_no_constants(run: Path, runtime: Path) -> None:
    first = attached(run, runtime)
    saved(first, 1, 2)
    [old] = files(first)
    sizes = [line["num_bytes"] for line in told(first.run, "persist", 2)]
    first.end()
    assert sizes == [first.layout.num_bytes + old.stat().st_size, first.layout.num_bytes]
    second = attached(run, runtime, first.attempt, 2)
    saved(second, 3, 4)
    sizes = [line["num_bytes"] for line in told(first.run, "persist", 4)[2:]]
    assert sizes == [second.layout.num_bytes] * 2
    assert files(second) == []
    assert named(first.run, 4).file == old.name
    assert committed(first.run) == [1, 2, 3, 4]
    second.end()
    third = attached(run, runtime, second.attempt, 4)
    saved(third, 5)
    assert files(third) == []
    assert named(first.run, 5).file == old.name
    assert verify(open_store(str(first.run))).ok


def test_a_keeper_killed_before_its_part_is_replaced(
    run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_CRASH_AT", "write.written")
    trainer = attached(run, runtime)
    monkeypatch.delenv("FLASHCKPT_CRASH_AT")
    pid = keeper_pid(trainer.folder)
    saved(trainer, 1)
    assert keeper_pid(trainer.folder) != pid
    # The dead keeper's file stays in the folder, unnamed: the next step names the one that stands.
    written, file = files(trainer), named(trainer.run, 1).file
    assert file in [each.name for each in written]
    saved(trainer, 2)
    assert named(trainer.run, 2).file == file
    assert files(trainer) == written
    assert committed(trainer.run) == [1, 2]
    assert verify(open_store(str(trainer.run))).ok


def test_a_header_of_constants_that_is_none_is_never_written(alone: FakeTrainer) -> None:
    def spoil() -> None:
        alone.region.image_view[20] ^= 1

    outcome = Persister(alone.store, "0123abcd").persist(order(alone, 1, spoil))
    assert outcome.state is JobState.TORN
    assert files(alone) == []


def test_a_step_whose_constants_stand_on_storage_does_not_need_those_in_memory(alone: FakeTrainer) -> None:
    """The digests of its boundary are those of the file, so what the file holds is what the step had."""
    writer = Persister(alone.store, "0123abcd")
    assert writer.persist(order(alone, 1)).state is JobState.COMMITTED
    [file] = files(alone)
    outcome = writer.persist(order(alone, 2, lambda: flip_constant(alone)))
    assert outcome.state is JobState.COMMITTED
    assert named(alone.run, 2).file == file.name
    assert committed(alone.run) == [1, 2]
    assert files(alone) == [file]


def test_a_file_that_was_taken_away_is_written_again_under_another_name(alone: FakeTrainer) -> None:
    writer = Persister(alone.store, "0123abcd")
    assert writer.persist(order(alone, 1)).state is JobState.COMMITTED
    [file] = files(alone)
    file.unlink()
    outcome = writer.persist(order(alone, 2))
    assert outcome.state is JobState.SUPERSEDED, "it was thought to be there"
    assert writer.persist(order(alone, 3)).state is JobState.COMMITTED
    assert named(alone.run, 3).file != file.name
    assert committed(alone.run) == [3], "step 1 has lost its constants and is not whole any more"


def test_a_name_that_a_step_gives_is_not_taken_for_another_file(alone: FakeTrainer) -> None:
    writer = Persister(alone.store, "0123abcd")
    assert writer.persist(order(alone, 1)).state is JobState.COMMITTED
    [file] = files(alone)
    lost = file.rename(alone.run / "lost")
    writer = Persister(alone.store, "4567cdef")
    assert writer.persist(order(alone, 2)).state is JobState.COMMITTED
    [other] = files(alone)
    assert other.name != file.name
    lost.rename(file)
    assert committed(alone.run) == [1, 2]
    assert verify(alone.store).ok


def rot(file: Path) -> None:
    flip(file, file.stat().st_size - 3)


@pytest.mark.every_set
@pytest.mark.parametrize("befalls", [rot, Path.unlink])
def test_a_new_attempt_does_not_name_a_file_that_is_damaged_or_gone(
    alone: FakeTrainer, befalls: Callable[[Path], object]
) -> None:
    writer = Persister(alone.store, "0123abcd")
    assert writer.persist(order(alone, 1)).state is JobState.COMMITTED
    [file] = files(alone)
    befalls(file)
    alone.attempt = run_view.begin(alone.store, SnapshotId(alone.attempt, 1), 1)
    assert writer.persist(order(alone, 2)).state is JobState.COMMITTED
    [file] = files(alone)
    assert named(alone.run, 2).file == file.name
    assert verify(alone.store, 2).ok


def test_constants_that_were_written_without_the_pin_are_not_believed(
    alone: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may have read what another keeper, or a trainer, put into the slot after the digests did."""
    write, written = _native.write_file, []

    def write_file(path: str, *arguments: Any, **named: Any) -> Any:
        result = write(path, *arguments, **named)
        written.append(path)
        if len(written) == 1:
            slot = snapshot_of(asked).slot
            assert slot.unpin(slot.state())
            assert slot.pin(snapshot_of(asked).owner + 1, slot.state()) is not None
        return result

    monkeypatch.setattr(_native, "write_file", write_file)
    writer, asked = Persister(alone.store, "0123abcd"), order(alone, 1)
    assert writer.persist(asked).state is JobState.FAILED
    assert ["/.frozen-" in path for path in written] == [True]
    assert files(alone) == []
    slot = snapshot_of(asked).slot
    assert slot.unpin(slot.state())
    assert writer.persist(asked).state is JobState.COMMITTED
    assert ["/.frozen-" in path for path in written] == [True, True, False]
    assert committed(alone.run) == [1]
