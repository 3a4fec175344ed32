"""One job at a time, in this process: what happens to a snapshot while its bytes are on their way."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from flashckpt import _native
from flashckpt.commit.commit_step import collect
from flashckpt.commit.view import View
from flashckpt.persist.job import JobState
from tests.keeper.driver import begun, committed
from tests.keeper.fake import FakeTrainer
from tests.keeper.jobs import Persister, job_of


@pytest.fixture
def trainer(run: Path, runtime: Path) -> FakeTrainer:
    return begun(run, runtime, keep=1)


def test_what_was_not_pinned_to_the_end_is_not_published(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper that was stopped: another one took the pin away, and the trainer wrote the slot anew."""
    slot, _ = trainer.snapshot(1)
    write = _native.write_file

    def write_file(*arguments: Any, **named: Any) -> Any:
        result = write(*arguments, **named)
        slot.unpin(slot.state())
        return result

    monkeypatch.setattr(_native, "write_file", write_file)
    # Pinned in this trainer's name: the node's keeper takes no pin away whose owner lives.
    outcome = Persister(trainer.store, "0123abcd").persist(job_of(trainer, slot))
    assert outcome.state is JobState.FAILED
    assert all(slot.persisted == 0 for slot in trainer.slots)
    assert committed(trainer.run) == []
    assert [name for _, _, names in os.walk(trainer.run / "data") for name in names] == []


def test_a_deletion_beside_it_keeps_the_frozen_leaves_that_are_written(
    run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = begun(run, runtime, constants_kib=16)
    trainer.fill_region()
    slot, _ = trainer.snapshot(1)
    writer, write, found = Persister(trainer.store, "0123abcd"), _native.write_file, list[str]()

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


def test_nothing_is_safe_where_the_run_was_before_it_was_moved(trainer: FakeTrainer) -> None:
    """It is moved after the look whether it stands."""
    slot, _ = trainer.snapshot(1)
    away = trainer.run.with_name("away")

    def moved() -> bool:
        trainer.run.rename(away)
        return True

    outcome = Persister(trainer.store, "0123abcd", stands=moved).persist(job_of(trainer, slot))
    assert (outcome.state, outcome.errno) == (JobState.FAILED, errno.ENOENT), outcome
    assert slot.persisted == 0
    assert not trainer.run.exists()
    away.rename(trainer.run)
