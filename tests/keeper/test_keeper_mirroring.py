"""A real keeper and a remote that is slow, dead or full: what is committed here waits for nothing, and what
arrives there is whole."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from flashckpt.commit import attempts, holder, lineage
from flashckpt.commit.attempts import open_run
from flashckpt.commit.lineage import VisibleStep
from flashckpt.commit.verification import verify
from flashckpt.format.names import AttemptName
from flashckpt.keeper.mirroring import Mirroring
from flashckpt.keeper.protocol import RemoteStatus
from flashckpt.keeper.trainers import Trainer
from flashckpt.options import Keep, Remote
from flashckpt.persist.ledger import Ledger
from flashckpt.store import open_store
from flashckpt.store.base import Store
from flashckpt.tiers.step_copy import StepCopier
from tests.events import ledger
from tests.folders import contents
from tests.keeper.driver import Process, committed, eventually, kill_keeper, told
from tests.keeper.fake import FakeTrainer, keeper_pid
from tests.tiers.test_mirror import Tiers
from tests.tiers.test_node_parts import Nodes

pytestmark = pytest.mark.process


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "remote"


def begun(tmp_path: Path, runtime: Path, remote: Remote | None, **options: Any) -> FakeTrainer:
    trainer = FakeTrainer(tmp_path / "run", runtime, **{"keep": 2, "remote": remote, **options})
    trainer.start()
    trainer.take_slots()
    return trainer


def saved(trainer: FakeTrainer, *steps: int) -> None:
    for step in steps:
        trainer.snapshot(step, persist=True)
        trainer.wait_committed(step)


def status_of(trainer: FakeTrainer) -> RemoteStatus:
    found = trainer.client.status().remote
    assert found is not None
    return found


def arrived(trainer: FakeTrainer, step: int) -> None:
    trainer.wait_for(lambda status: status.remote.newest == step and not status.remote.waits)


def ended(trainer: FakeTrainer) -> None:
    trainer.end()
    eventually(lambda: keeper_pid(trainer.folder) is None)
    eventually(lambda: not Path(trainer.folder.path).exists())


def of(remote: Path) -> list[int]:
    """What a resume from the remote would see, all of it whole."""
    store = open_store(str(remote))
    assert verify(store).ok
    return [each.step for each in lineage.visible(store)]


def test_each_commit_is_copied_and_the_last_before_the_keeper_leaves(
    tmp_path: Path, runtime: Path, there: Path
) -> None:
    trainer = begun(tmp_path, runtime, Remote(url=str(there), keep=Keep(last=3), compress="zstd"))
    for step in (1, 2, 3, 4):
        saved(trainer, step)
        arrived(trainer, step)
    saved(trainer, 5)
    counts = trainer.client.status().counts
    ended(trainer)
    assert of(there) == [3, 4, 5]
    assert committed(trainer.run) == [4, 5]
    assert lineage.visible(open_store(str(there)))[-2:] == lineage.visible(trainer.store)
    lines = ledger(trainer.run)
    assert [line["step"] for line in lines if line["event"] == "mirror"] == [1, 2, 3, 4, 5]
    assert [line["steps"] for line in lines if line["event"] == "prune" and "remote" in line] == [[1], [2]]
    assert not [line for line in lines if line["event"] == "error"]
    assert counts["mirrored"] >= 4
    shards = [path.name for path in (there / "steps").rglob("shard-*")]
    assert len(shards) == 3
    assert all(name.endswith(".zst") for name in shards)


def test_a_slow_remote_gets_whole_steps_and_holds_up_nothing(
    tmp_path: Path, runtime: Path, faults: Path, there: Path, keeper: int
) -> None:
    trainer = begun(tmp_path, runtime, Remote(url=str(there)))
    (faults / "copy.pause").touch()
    saved(trainer, 1)
    eventually(lambda: (faults / "copy.paused").exists())
    saved(trainer, *range(2, 8))
    eventually(lambda: committed(trainer.run) == [1, 6, 7])
    found = trainer.client.status()
    assert found.remote == RemoteStatus(url=str(there), copying=1, waits=True)
    assert found.counts["mirror_skipped"] == 5, "2 to 6, over which the newest went"
    assert list((there / "steps").glob("*/*/manifest.json")) == []
    (faults / "copy.pause").unlink()
    arrived(trainer, 7)
    assert of(there) == [1, 7]
    eventually(lambda: committed(trainer.run) == [6, 7])
    ended(trainer)


def test_a_keeper_that_is_killed_in_a_copy(
    tmp_path: Path, runtime: Path, faults: Path, there: Path, keeper: int
) -> None:
    trainer = begun(tmp_path, runtime, Remote(url=str(there)))
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
    trainer = begun(tmp_path, runtime, Remote(url="s3://bucket/run", options=options), grace_s=0.5)
    saved(trainer, *range(1, 6))
    assert status_of(trainer).waits
    eventually(lambda: committed(trainer.run) == [4, 5])
    began = time.monotonic()
    trainer.end()
    eventually(lambda: keeper_pid(trainer.folder) is None)
    assert time.monotonic() - began >= 0.5
    [line] = [line for line in told(trainer.run, "error", 1) if line["what"] == "mirror"]
    assert line["step"] == 5
    assert "Step 5, the last, did not reach s3://bucket/run" in line["message"]
    assert not any(b"geheim" in data for data in contents(tmp_path, runtime))


def test_a_remote_that_takes_nothing_and_then_does(tmp_path: Path, runtime: Path, there: Path) -> None:
    there.write_text("a disk that is not mounted")
    trainer = begun(tmp_path, runtime, Remote(url=str(there)))
    saved(trainer, 1, 2)
    trainer.wait_for(lambda status: status.counts.get("mirror_failed", 0) >= 2)
    assert "NotADirectory" in status_of(trainer).error
    saved(trainer, 3)
    there.unlink()
    arrived(trainer, 3)
    assert (status_of(trainer).error, of(there)) == ("", [3])
    assert len([line for line in ledger(trainer.run) if line["event"] == "error"]) == 1, "said once"
    ended(trainer)


def test_a_remote_that_is_full_and_gets_room(tmp_path: Path, runtime: Path, small_disk: Path) -> None:
    there, filler = small_disk / "remote", small_disk / "filler"
    trainer = begun(tmp_path, runtime, Remote(url=str(there), keep=Keep(last=2)), kib=512)
    saved(trainer, 1)
    arrived(trainer, 1)
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    saved(trainer, 2, 3, 4)
    trainer.wait_for(lambda status: status.counts.get("mirror_failed", 0) >= 2)
    assert "No space" in status_of(trainer).error
    assert committed(trainer.run) == [3, 4], "retention here waits for no copy either"
    assert of(there) == [1]
    filler.unlink()
    arrived(trainer, 4)
    assert (status_of(trainer).error, of(there)) == ("", [1, 4])
    assert not [path for path in there.rglob("*.tmp")]
    ended(trainer)


def test_the_next_attempt_goes_on_with_the_remote(tmp_path: Path, runtime: Path, there: Path) -> None:
    remote = {"url": str(there), "keep": {"last": 9}}
    first = Process(tmp_path / "run", runtime, keep=9, remote=remote)
    first.do("start", "", 0, 0)
    first.do("slots")
    for step in (1, 2, 3):
        first.do("snapshot", step, True)
        first.do("committed", step)
    first.kill()
    second = FakeTrainer(tmp_path / "run", runtime, keep=9, remote=Remote(url=str(there), keep=Keep(last=9)))
    second.start(AttemptName.parse(first.attempt), 3)
    second.take_slots()
    saved(second, 4)
    arrived(second, 4)
    ended(second)
    source, target = open_store(str(second.run)), open_store(str(there))
    assert lineage.visible(target)[-1] == lineage.visible(source)[-1] == VisibleStep(4, second.attempt)
    assert attempts.bounds(target) == attempts.bounds(source)


def test_a_number_of_steps(tmp_path: Path, runtime: Path, there: Path) -> None:
    """The first that is committed at each multiple or after it, and the last of all."""
    trainer = begun(tmp_path, runtime, Remote(url=str(there), every=10, keep=Keep(last=9)))
    for step, due in [(4, None), (12, 12), (18, None), (20, 20), (29, None), (45, 45), (47, None)]:
        saved(trainer, step)
        if due is not None:
            arrived(trainer, due)
    ended(trainer)
    assert of(there) == [12, 20, 45, 47]


def test_a_duration(tmp_path: Path, runtime: Path, there: Path) -> None:
    """The first at once, and then none for a day, but the last of all."""
    trainer = begun(tmp_path, runtime, Remote(url=str(there), every="1d"))
    saved(trainer, 1)
    eventually(lambda: status_of(trainer).newest == 1)
    saved(trainer, 2, 3)
    ended(trainer)
    assert of(there) == [1, 3]


def test_a_remote_that_another_job_has_taken(tmp_path: Path, runtime: Path, there: Path) -> None:
    trainer = begun(tmp_path, runtime, Remote(url=str(there)))
    saved(trainer, 1)
    arrived(trainer, 1)
    shutil.rmtree(there)
    other = open_run(open_store(str(there)), create=True)
    saved(trainer, 2)
    trainer.wait_for(lambda status: other.run_id in status.remote.error)
    assert os.listdir(there) == ["run.json"]
    began = time.monotonic()
    ended(trainer)
    assert time.monotonic() - began < 30, "nobody waits for what another try does not mend"
    lines = [line for line in ledger(trainer.run) if line["event"] == "error"]
    assert "holds another run" in lines[0]["message"]
    assert "did not reach" in lines[-1]["message"]


def test_who_names_none_copies_nothing(tmp_path: Path, runtime: Path, there: Path) -> None:
    trainer = begun(tmp_path, runtime, None)
    saved(trainer, 1)
    assert trainer.client.status().remote is None
    ended(trainer)


def test_of_several_nodes_that_of_rank_0_copies_and_deletes(
    tmp_path: Path, runtime: Path, other_node: Path, there: Path
) -> None:
    """One folder, two nodes: the other's keeper leaves a step that is being copied alone."""
    how = {"world": 2, "remote": Remote(url=str(there)), "keep": 2}
    first = FakeTrainer(tmp_path / "run", runtime, **how, rank=0, ranks=[0])
    second = FakeTrainer(tmp_path / "run", other_node, **how, rank=1, ranks=[1], join=str(first.attempt))
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
    eventually(lambda: [each.step for each in lineage.visible(first.store)] == [3, 4])
    ended(first)
    second.end()
    assert of(there)[-1] == 4


def on_own_disks(tmp_path: Path, runtimes: list[Path], remote: Remote, **options: Any) -> list[FakeTrainer]:
    """A rank on each of two nodes, with folders of their own: of one run, and of one attempt."""
    runs = [tmp_path / f"node{node}" for node in range(2)]
    run_id = open_run(open_store(str(runs[0])), create=True).run_id
    open_run(open_store(str(runs[1])), create=True, run_id=run_id)
    joined, trainers = "", list[FakeTrainer]()
    for rank, (run, runtime) in enumerate(zip(runs, runtimes, strict=True)):
        how = {"rank": rank, "ranks": [rank], "world": 2, "remote": remote, "join": joined, **options}
        trainer = FakeTrainer(run, runtime, **how)
        if joined:
            attempts.claim_as(trainer.store, trainer.attempt, holder.here(trainer.folder.path, "lock"))
        attempts.start(trainer.store, trainer.attempt, None, 0, 2, ranks=(range(rank, rank + 1),))
        trainer.start()
        trainer.take_slots()
        trainers.append(trainer)
        joined = str(trainer.attempt)
    return trainers


def saved_by_all(trainers: list[FakeTrainer], *steps: int) -> None:
    for step in steps:
        for trainer in trainers:
            trainer.snapshot(step, persist=True)
        for trainer in trainers:
            trainer.wait_committed(step)
            trainer.ring.set_complete(trainer.attempt.number, step)


def test_nodes_with_folders_of_their_own(
    tmp_path: Path, runtime: Path, other_node: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeper sends its part, also one that was killed in it; who is the last makes it a step. The end's
    step is waited for."""
    monkeypatch.setenv("FLASHCKPT_CRASH_AT", "copy.files:2")  # each keeper's second part
    remote = Remote(url=str(there), keep=Keep(last=2))
    trainers = on_own_disks(tmp_path, [runtime, other_node], remote)
    monkeypatch.delenv("FLASHCKPT_CRASH_AT")
    saved_by_all(trainers, 1)
    for trainer in trainers:
        arrived(trainer, 1)
    dead = [eventually(lambda each=each: keeper_pid(each.folder)) for each in trainers]
    saved_by_all(trainers, 2)
    for trainer, pid in zip(trainers, dead, strict=True):
        eventually(lambda trainer=trainer, pid=pid: keeper_pid(trainer.folder) != pid)
        assert of(there) == [1]
        trainer.client.tend()
    for trainer in trainers:
        arrived(trainer, 2)
    saved_by_all(trainers, 3, 4, 5)
    for trainer in trainers:
        trainer.end()
    for trainer in trainers:
        eventually(lambda trainer=trainer: not Path(trainer.folder.path).exists())
        lines = ledger(trainer.run)
        assert not [line for line in lines if line["event"] == "error"]
        assert {line["outcome"] for line in lines if line["event"] == "mirror"} <= {
            "copied", "waits for the other nodes",
        }  # fmt: skip
    assert of(there)[-1] == 5
    assert not list(there.rglob("*.tmp"))


def test_a_number_of_steps_of_several_nodes(
    tmp_path: Path, runtime: Path, other_node: Path, there: Path
) -> None:
    """By number, also while the other node's part of the last is waited for."""
    first, second = on_own_disks(tmp_path, [runtime, other_node], Remote(url=str(there), every=10))
    for trainer, ready in ((first, lambda status: status.counts.get("mirrored")), (second, None)):
        for step in (4, 12, 13):
            trainer.snapshot(step, persist=True)
            trainer.wait_committed(step)
            trainer.ring.set_complete(trainer.attempt.number, step)
            if ready is not None and step == 12:
                trainer.wait_for(ready)
    for trainer in (first, second):
        arrived(trainer, 12)
    saved_by_all([first, second], 20, 21)
    for trainer in (first, second):
        trainer.end()
    for trainer in (first, second):
        eventually(lambda trainer=trainer: not Path(trainer.folder.path).exists())
    assert of(there) == [12, 20, 21]


def test_the_last_part_of_another_node_is_waited_for_no_longer_than_the_grace(
    tmp_path: Path, runtime: Path, other_node: Path, there: Path
) -> None:
    remote = Remote(url=str(there))
    first, second = on_own_disks(tmp_path, [runtime, other_node], remote, grace_s=1.0)
    second.snapshot(1, persist=True)
    second.wait_committed(1)
    status = second.wait_for(lambda status: status.remote is not None)
    assert status.remote == RemoteStatus(url=str(there)), "rank 0's begins, and has nothing yet"
    began = time.monotonic()
    second.end()
    eventually(lambda: keeper_pid(second.folder) is None)
    assert time.monotonic() - began >= 1.0
    [line] = [line for line in told(second.run, "error", 1) if line["what"] == "mirror"]
    assert "Step 1, the last, did not reach" in line["message"]
    # Its part is there: who comes later completes it.
    first.snapshot(1, persist=True)
    arrived(first, 1)
    ended(first)
    assert of(there) == [1]


@contextmanager
def mirroring_of(
    store: Store, count: Callable[[str, int], None] = lambda what, count: None
) -> Iterator[Mirroring]:
    """A keeper's, without the keeper: each call comes when the test makes it."""
    with closing(Ledger(store)) as lines:
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        mirroring = Mirroring(store, wake, lines, count)
        yield mirroring
        worker = mirroring._worker
        assert worker is not None
        worker.close()
        eventually(lambda: worker.collect() or not worker.busy)
        os.close(wake)


def test_an_older_step_that_is_damaged_keeps_the_last_one_from_nowhere(tmp_path: Path) -> None:
    """Nobody trains. What another node began is followed first; the keeper stays, and sends its last."""
    nodes = Nodes(tmp_path)
    nodes.add(1)
    nodes.bring(0)
    shard = next((nodes.folder / "node1" / "steps").rglob("shard-*"))
    shard.write_bytes(bytes(shard.stat().st_size))
    nodes.add(2)
    with mirroring_of(nodes.stores[1]) as mirroring:
        mirroring.know([Trainer(lock="l", rank=1, world=2, attempt=nodes.attempt, remote=nodes.remote)])
        mirroring.committed(2, nodes.attempt)
        mirroring.know([])

        def has_left() -> bool:
            mirroring.next(time.monotonic())
            nodes.bring(0)
            return not mirroring.holds(time.monotonic())

        eventually(has_left)
    assert nodes.steps() == [2]
    [line] = [line for line in ledger(nodes.folder / "node1") if line["event"] == "error"]
    assert "is damaged" in line["message"]


def test_a_step_that_is_committed_while_the_remote_is_looked_at_is_copied_once(tmp_path: Path) -> None:
    """The look finds it before its commit was told here."""
    tiers = Tiers(tmp_path)
    tiers.add(1)
    with mirroring_of(tiers.source) as mirroring:
        remote = Remote(url=str(tiers.there), keep=Keep(last=3))
        mirroring.know([Trainer(lock="l", rank=0, attempt=tiers.attempt, remote=remote)])
        mirroring.next(time.monotonic())
        mirroring.committed(1, tiers.attempt)

        def is_over() -> bool:
            mirroring.next(time.monotonic())
            found = mirroring.status()
            return found is not None and found.newest == 1 and not found.waits

        eventually(is_over)
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
    with mirroring_of(tiers.source, lambda what, count: counted.append(what)) as mirroring:
        remote = Remote(url=str(tiers.there), keep=Keep(last=3))
        mirroring.know([Trainer(lock="l", rank=0, attempt=tiers.attempt, remote=remote)])
        mirroring.next(time.monotonic())
        eventually(lambda: mirroring.spared is not None)
        for step in (1, 2, 3):
            if step > 1:
                tiers.add(step)
            mirroring.committed(step, tiers.attempt)
        assert counted == ["mirror_skipped"], "step 2 alone"
        may_go_on.set()

        def is_over() -> bool:
            mirroring.next(time.monotonic())
            found = mirroring.status()
            return found is not None and found.newest == 3 and not found.waits

        eventually(is_over)
    assert tiers.steps() == [1, 3]
