"""A real keeper and a remote that is slow, dead or full: what is committed here waits for nothing, and what
arrives there is whole."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from flashckpt.commit.verification import verify
from flashckpt.commit.view import View, open_run
from flashckpt.format.names import CommitName, SnapshotId
from flashckpt.keeper.mirror_upload import MirrorUpload
from flashckpt.keeper.protocol import RemoteStatus
from flashckpt.options import Keep, Remote
from flashckpt.persist.job import Trainer
from flashckpt.persist.ledger import Ledger
from flashckpt.replication.run_copy import StepCopier
from flashckpt.store import open_store
from tests.commit.runs import name_of
from tests.events import ledger
from tests.folders import contents
from tests.keeper.driver import begun, committed, ended, eventually, kill_keeper, saved, told
from tests.keeper.fake import FakeTrainer
from tests.replication.test_mirror import Tiers

pytestmark = pytest.mark.process


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "remote"


def mirrored(tmp_path: Path, runtime: Path, remote: Remote, **options: Any) -> FakeTrainer:
    return begun(tmp_path / "run", runtime, keep=2, remote=remote, **options)


def status_of(trainer: FakeTrainer) -> RemoteStatus:
    found = trainer.client.status().remote
    assert found is not None
    return found


def arrived(trainer: FakeTrainer, step: int) -> None:
    trainer.wait_for(lambda status: status.remote.newest == step and not status.remote.waits)


def of(remote: Path) -> list[int]:
    """What a resume from the remote would see, all of it whole."""
    store = open_store(str(remote))
    assert verify(store).ok
    return [each.step for each in View.of(store).visible()]


def test_each_commit_is_copied_and_the_last_before_the_keeper_leaves(
    tmp_path: Path, runtime: Path, there: Path
) -> None:
    trainer = mirrored(tmp_path, runtime, Remote(url=str(there), keep=Keep(last=3), compress="zstd"))
    for step in (1, 2, 3, 4):
        saved(trainer, step)
        arrived(trainer, step)
    saved(trainer, 5)
    counts = trainer.client.status().counts
    ended(trainer)
    assert of(there) == [3, 4, 5]
    assert committed(trainer.run) == [4, 5]
    assert View.of(open_store(str(there))).visible()[-2:] == View.of(trainer.store).visible()
    lines = ledger(trainer.run)
    assert [line["step"] for line in lines if line["event"] == "mirror"] == [1, 2, 3, 4, 5]
    assert [line["steps"] for line in lines if line["event"] == "prune" and "remote" in line] == [[1], [2]]
    assert not [line for line in lines if line["event"] == "error"]
    assert counts["mirrored"] >= 4
    shards = [path.name for path in (there / "data").rglob("rank-*")]
    assert len(shards) == 3
    assert all(name.endswith(".zst") for name in shards)


def test_a_slow_remote_gets_whole_steps_and_holds_up_nothing(
    tmp_path: Path, runtime: Path, faults: Path, there: Path, keeper: int
) -> None:
    trainer = mirrored(tmp_path, runtime, Remote(url=str(there)))
    (faults / "copy.pause").touch()
    saved(trainer, 1)
    eventually(lambda: (faults / "copy.paused").exists())
    saved(trainer, *range(2, 8))
    eventually(lambda: committed(trainer.run) == [1, 6, 7])
    found = trainer.client.status()
    assert found.remote == RemoteStatus(url=str(there), copying=1, waits=True)
    assert found.counts["mirror_skipped"] == 5, "2 to 6, over which the newest went"
    assert of(there) == []
    (faults / "copy.pause").unlink()
    arrived(trainer, 7)
    assert of(there) == [1, 7]
    eventually(lambda: committed(trainer.run) == [6, 7])
    ended(trainer)


def test_a_keeper_that_is_killed_in_a_copy(
    tmp_path: Path, runtime: Path, faults: Path, there: Path, keeper: int
) -> None:
    trainer = mirrored(tmp_path, runtime, Remote(url=str(there)))
    saved(trainer, 1)
    arrived(trainer, 1)
    (faults / "copy.pause").touch()
    saved(trainer, 2)
    eventually(lambda: (faults / "copy.paused").exists())
    assert kill_keeper(trainer.folder) == keeper
    assert of(there) == [1]
    trainer.client.tend()
    arrived(trainer, 2)
    saved(trainer, 3)
    ended(trainer)
    assert of(there) == [1, 2, 3]


def test_a_remote_that_hangs(tmp_path: Path, runtime: Path, silent: str) -> None:
    options = {"endpoint": silent, "access_key_id": "a", "secret_access_key": "geheim", "region": "eu"}
    trainer = mirrored(tmp_path, runtime, Remote(url="s3://bucket/run", options=options), grace_s=0.5)
    saved(trainer, *range(1, 6))
    assert status_of(trainer).waits
    eventually(lambda: committed(trainer.run) == [4, 5])
    began = time.monotonic()
    ended(trainer)
    assert time.monotonic() - began >= 0.5
    [line] = [line for line in told(trainer.run, "error", 1) if line["what"] == "mirror"]
    assert line["step"] == 5
    assert "Step 5, the last, did not reach s3://bucket/run" in line["message"]
    assert not any(b"geheim" in data for data in contents(tmp_path, runtime))


def test_a_remote_that_takes_nothing_and_then_does(tmp_path: Path, runtime: Path, there: Path) -> None:
    there.write_text("a disk that is not mounted")
    trainer = mirrored(tmp_path, runtime, Remote(url=str(there)))
    saved(trainer, 1, 2)
    trainer.wait_for(lambda status: status.counts.get("mirror_failed", 0) >= 2)
    assert "NotADirectory" in status_of(trainer).error
    saved(trainer, 3)
    there.unlink()
    arrived(trainer, 3)
    assert (status_of(trainer).error, of(there)) == ("", [3])
    assert len([line for line in ledger(trainer.run) if line["event"] == "error"]) == 1, "said once"
    ended(trainer)


def test_the_next_attempt_goes_on_with_the_remote(
    run: Path, tmp_path: Path, runtime: Path, there: Path
) -> None:
    remote = Remote(url=str(there), keep=Keep(last=9))
    first = mirrored(tmp_path, runtime, remote)
    saved(first, 1, 2)
    ended(first)
    second = begun(run, runtime, remote=remote, parent=first.attempt, step=2)
    saved(second, 3)
    ended(second)
    there_now, here_now = View.of(open_store(str(there))), View.of(second.store)
    assert there_now.visible()[-1] == here_now.visible()[-1] == CommitName(3, second.attempt, 3)
    assert there_now.parent == here_now.parent == SnapshotId(first.attempt, 2)


@pytest.mark.parametrize(
    ("every", "steps", "found"),
    [
        (10, {4: False, 12: True, 18: False, 20: True, 29: False, 45: True, 47: False}, [12, 20, 45, 47]),
        ("1d", {1: True, 2: False, 3: False}, [1, 3]),
    ],
)
def test_an_interval(
    tmp_path: Path, runtime: Path, there: Path, every: str | int, steps: dict[int, bool], found: list[int]
) -> None:
    """The first that is committed at each multiple or after it, or the first of a day; and the last."""
    trainer = mirrored(tmp_path, runtime, Remote(url=str(there), every=every, keep=Keep(last=9)))
    for step, is_due in steps.items():
        saved(trainer, step)
        if is_due:
            eventually(lambda step=step: status_of(trainer).newest == step)
    ended(trainer)
    assert of(there) == found


def test_a_remote_that_another_job_has_taken(tmp_path: Path, runtime: Path, there: Path) -> None:
    trainer = mirrored(tmp_path, runtime, Remote(url=str(there)), grace_s=86_400.0)
    saved(trainer, 1)
    arrived(trainer, 1)
    shutil.rmtree(there)
    other = open_run(open_store(str(there)), create=True)
    saved(trainer, 2)
    trainer.wait_for(lambda status: other.run_id in status.remote.error)
    assert os.listdir(there) == ["catalogue"]
    ended(trainer)  # without the grace: another try does not mend it
    lines = [line for line in ledger(trainer.run) if line["event"] == "error"]
    assert "holds another run" in lines[0]["message"]
    assert "did not reach" in lines[-1]["message"]


def test_of_several_nodes_that_of_rank_0_copies_and_deletes(
    run: Path, runtime: Path, other_node: Path, there: Path
) -> None:
    """One folder, two nodes: the other's keeper leaves a step that is being copied alone."""
    how = {"world": 2, "remote": Remote(url=str(there)), "keep": 2}
    first = FakeTrainer(run, runtime, **how, rank=0, ranks=[0])
    second = FakeTrainer(run, other_node, **how, rank=1, ranks=[1], join=str(first.attempt))
    for trainer in (first, second):
        trainer.start()
        trainer.take_slots()
    for step in range(1, 5):
        for trainer in (first, second):
            trainer.snapshot(step, persist=True)
        for trainer in (first, second):
            trainer.wait_committed(step)
            trainer.ring.set_complete(first.attempt.number, step)
    arrived(first, 4)
    assert second.client.status().remote is None
    eventually(lambda: [each.step for each in View.of(first.store).visible()] == [3, 4])
    ended(first)
    second.end()
    assert of(there)[-1] == 4


@contextmanager
def mirroring_of(tiers: Tiers, counted: list[str]) -> Iterator[MirrorUpload]:
    """A keeper's, without the keeper: each call comes when the test makes it. It has begun to look."""
    with closing(Ledger(tiers.source)) as lines:
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        mirroring = MirrorUpload(tiers.source, wake, lines, lambda what, count: counted.append(what))
        remote = Remote(url=str(tiers.there), keep=Keep(last=3))
        mirroring.set_newest(Trainer(lock="l", rank=0, attempt=tiers.attempt, remote=remote))
        mirroring.next(time.monotonic())
        yield mirroring
        worker = mirroring._worker
        worker.close()
        eventually(lambda: worker.collect() or not worker.busy)
        os.close(wake)


def has_copied(mirroring: MirrorUpload, step: int) -> bool:
    mirroring.next(time.monotonic())
    found = mirroring.status()
    return found is not None and found.newest == step and not found.waits


def test_a_step_that_is_committed_while_the_remote_is_looked_at_is_copied_once(tmp_path: Path) -> None:
    """The look finds it before its commit was told here."""
    tiers = Tiers(tmp_path)
    tiers.add(1)
    with mirroring_of(tiers, []) as mirroring:
        mirroring.committed(name_of(1, tiers.attempt))
        eventually(lambda: has_copied(mirroring, 1))
    assert [line["outcome"] for line in ledger(tiers.run) if line["event"] == "mirror"] == ["copied"]
    assert tiers.steps() == [1]


def test_a_step_that_a_look_is_copying_when_its_commit_is_told_is_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one takes its place among what is wanted, and nothing went over it."""
    tiers, may_go_on, write = Tiers(tmp_path), threading.Event(), StepCopier._write

    def slow(copier: StepCopier, *arguments: Any) -> int:
        assert may_go_on.wait(240)
        return write(copier, *arguments)

    monkeypatch.setattr(StepCopier, "_write", slow)
    counted: list[str] = []
    tiers.add(1)
    with mirroring_of(tiers, counted) as mirroring:
        eventually(lambda: mirroring.copying is not None)
        for step in (1, 2, 3):
            if step > 1:
                tiers.add(step)
            mirroring.committed(name_of(step, tiers.attempt))
        assert counted == ["mirror_skipped"], "step 2 alone"
        may_go_on.set()
        eventually(lambda: has_copied(mirroring, 3))
    assert tiers.steps() == [1, 3]
