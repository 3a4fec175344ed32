"""One job at a time, in this process: what happens to a snapshot while its bytes are on their way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashckpt import _native
from flashckpt.commit import attempts, holder, lineage
from flashckpt.format.layout import Layout, Leaf, SlotImage
from flashckpt.memory.slot import Slot, Word
from flashckpt.persist.job import JobState, StepJob, StepOutcome, Void
from flashckpt.persist.writer import Writer
from tests.events import ledger
from tests.keeper import fake
from tests.keeper.driver import committed, eventually
from tests.keeper.fake import FakeTrainer, content
from tests.keeper.jobs import failing_for, job_of, snapshot_of


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


def test_a_snapshot_whose_attempt_goes_on_meanwhile_is_the_next_attempts(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = []

    def restart(slot: Slot, pinned: Word) -> None:
        claimed.append(attempts.claim(trainer.store, holder.here(trainer.folder.path, trainer.life.name)))
        attempts.start(trainer.store, claimed[0], trainer.attempt, 1, 1, 1)

    outcome = persisted(trainer, monkeypatch, restart)
    assert (outcome.state, outcome.attempt) == (JobState.COMMITTED, str(claimed[0])), outcome.message
    assert [each.attempt for each in lineage.visible(trainer.store)] == claimed
    assert committed(trainer.run) == [1]


def test_what_was_not_pinned_to_the_end_is_not_published(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper that was stopped: another one took the pin away, and the trainer wrote the slot anew."""
    outcome = persisted(trainer, monkeypatch, lambda slot, pinned: slot.unpin(pinned))
    assert outcome.state is JobState.FAILED
    assert all(slot.persisted == 0 for slot in trainer.slots)
    assert committed(trainer.run) == []
    assert [name for _, _, names in os.walk(trainer.run / "steps") for name in names] == []


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


def one_number(trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch, seed: int) -> StepJob:
    """A snapshot of step 1 whose bytes are those of the step `seed`."""
    with monkeypatch.context() as patch:
        patch.setattr(fake, "content", lambda leaf, _step: content(leaf, seed))
        slot, _ = trainer.snapshot(1)
    return job_of(trainer, slot)


@pytest.mark.parametrize("fault", ["", "manifest"])
def test_another_content_of_a_number_is_never_taken_for_committed(
    trainer: FakeTrainer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Also where the keeper that wrote the part of the first died before the manifest."""
    first, other = (one_number(trainer, monkeypatch, seed) for seed in (1, 2))
    writer = Writer(trainer.store, "0123abcd")
    if fault:
        with monkeypatch.context() as patch:
            patch.setattr(trainer.store, "create", failing_for("manifest.json", trainer.store.create))
            assert writer.persist(first).state is JobState.FAILED
    else:
        assert writer.persist(first).state is JobState.COMMITTED
    outcome = Writer(trainer.store, "4567abcd").persist(other)
    assert outcome.void is Void.SUPERSEDED
    assert "another snapshot of step 1" in outcome.message
    mine, theirs = snapshot_of(first), snapshot_of(other)
    assert theirs.slot.persisted != theirs.generation
    assert writer.persist(first).state is JobState.COMMITTED
    assert mine.slot.persisted == mine.generation


def test_a_content_that_differs_in_a_former_constant_alone_is_another(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The region goes on with its first bytes, the same for both."""
    trainer = FakeTrainer(tmp_path / "run", runtime, constants_kib=4)
    trainer.start()
    changed = Leaf(name="base.weight", dtype="float32", shape=(4,))
    trainer.layout = Layout.of([*trainer.layout.leaves, changed])
    trainer.image = SlotImage(trainer.layout, trainer.constants)
    trainer.take_slots()
    assert trainer.region is not None
    jobs = []
    for seed in (1, 2):

        def bytes_of(leaf: Leaf, _: int, seed: int = seed) -> bytes:
            return bytes([seed if leaf.name == changed.name else 0]) * leaf.num_bytes

        with monkeypatch.context() as patch:
            patch.setattr(fake, "content", bytes_of)
            jobs.append(job_of(trainer, trainer.snapshot(1)[0], trainer.region))
    writer = Writer(trainer.store, "0123abcd")
    assert writer.persist(jobs[0]).state is JobState.COMMITTED
    outcome = writer.persist(jobs[1])
    assert outcome.void is Void.SUPERSEDED, outcome
    theirs = snapshot_of(jobs[1])
    assert theirs.slot.persisted != theirs.generation
    trainer.end()
