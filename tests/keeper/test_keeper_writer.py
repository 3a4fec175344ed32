"""One job at a time, in this process: what happens to a snapshot while its bytes are on their way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashckpt import _native
from flashckpt.commit.commit_step import collect
from flashckpt.commit.view import View
from flashckpt.format.names import SnapshotId
from flashckpt.memory.slot import Slot, Word
from flashckpt.persist.job import JobState, StepOutcome
from flashckpt.persist.writer import Writer
from tests import run_view
from tests.events import ledger
from tests.keeper.driver import committed, eventually
from tests.keeper.fake import FakeTrainer
from tests.keeper.jobs import job_of


@pytest.fixture
def trainer(tmp_path: Path, runtime: Path) -> Iterator[FakeTrainer]:
    made = FakeTrainer(tmp_path / "run", runtime, keep=1)
    made.start()
    made.take_slots()
    yield made
    made.end()


def persisted(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch, after_write: Callable[[Slot, Word], object]
) -> StepOutcome:
    """Persist step 1, with something that happens when its bytes are on the disk for the first time."""
    slot, _ = trainer.snapshot(1)
    write = _native.write_file
    happened: list[bool] = []

    def write_file(*arguments: Any, **named: Any) -> Any:
        result = write(*arguments, **named)
        if not happened:
            happened.append(True)
            after_write(slot, slot.state())
        return result

    monkeypatch.setattr(_native, "write_file", write_file)
    # Pinned in this trainer's name: the node's keeper takes no pin away whose owner lives.
    return Writer(trainer.store, "0123abcd").persist(job_of(trainer, slot))


def test_a_snapshot_that_the_next_attempt_resumes_from_meanwhile_is_committed(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = SnapshotId(trainer.attempt, 1)

    def restart(slot: Slot, pinned: Word) -> None:
        run_view.begin(trainer.store, snapshot, 1)

    outcome = persisted(trainer, monkeypatch, restart)
    # It was written again, into the folder of the new attempt.
    assert outcome.state is JobState.COMMITTED, outcome.message
    assert [each.id for each in View.of(trainer.store).visible()] == [snapshot]
    assert committed(trainer.run) == [1]


def test_what_was_not_pinned_to_the_end_is_not_published(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper that was stopped: another one took the pin away, and the trainer wrote the slot anew."""
    outcome = persisted(trainer, monkeypatch, lambda slot, pinned: slot.unpin(pinned))
    assert outcome.state is JobState.FAILED
    assert all(slot.persisted == 0 for slot in trainer.slots)
    assert committed(trainer.run) == []
    assert [name for _, _, names in os.walk(trainer.run / "data") for name in names] == []


def test_a_deletion_beside_it_keeps_the_frozen_leaves_that_are_written(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = FakeTrainer(tmp_path / "run", runtime, constants_kib=16)
    trainer.start()
    trainer.take_slots()
    trainer.fill_region()
    slot, _ = trainer.snapshot(1)
    writer, write, found = Writer(trainer.store, "0123abcd"), _native.write_file, list[str]()

    def write_file(*arguments: Any, **named: Any) -> Any:
        result = write(*arguments, **named)
        collect(trainer.store, View.of(trainer.store).catalogue)
        found.extend(path.name for path in trainer.run.glob("data/*/*/*frozen-*"))
        return result

    monkeypatch.setattr(_native, "write_file", write_file)
    assert trainer.region is not None
    outcome = writer.persist(job_of(trainer, slot, trainer.region))
    assert outcome.state is JobState.COMMITTED, outcome.message
    assert len(found) == 2, "before and after the part that names it was begun"
    trainer.end()


def test_nothing_is_safe_where_the_run_was_before_it_was_moved(trainer: FakeTrainer) -> None:
    """It is moved after the look whether it stands."""
    slot, _ = trainer.snapshot(1)
    away = trainer.run.with_name("away")

    def moved() -> bool:
        trainer.run.rename(away)
        return True

    outcome = Writer(trainer.store, "0123abcd", stands=moved).persist(job_of(trainer, slot))
    assert (outcome.state, outcome.errno) == (JobState.FAILED, errno.ENOENT), outcome
    assert slot.persisted == 0
    assert not trainer.run.exists()
    away.rename(trainer.run)


def test_old_steps_go_after_the_commit_was_told(trainer: FakeTrainer) -> None:
    for step in range(1, 5):
        trainer.snapshot(step, persist=True)
        trainer.wait_committed(step)
    eventually(lambda: committed(trainer.run) == [3, 4])
    steps = eventually(
        lambda: sum((line["steps"] for line in ledger(trainer.run) if line["event"] == "prune"), [])
    )
    events = [line["event"] for line in ledger(trainer.run)]
    assert events.index("prune") > events.index("commit")
    assert steps[0] == 1
