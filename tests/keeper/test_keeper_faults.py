"""What the keeper cannot do, or finds damaged: counted, told, tried again, and harmless to training."""

import errno
import os
from pathlib import Path

import pytest

from flashckpt.commit import attempts
from flashckpt.errors import OutOfSpaceError
from flashckpt.format.catalogue import Folder
from flashckpt.format.layout import SlotImage
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.keeper.protocol import ELECTION_LOCK
from flashckpt.memory.held_regions import Regions
from flashckpt.memory.region import SlotSize
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.memory.slot import SlotState
from tests.descriptors import closed_after
from tests.events import ledger
from tests.keeper.driver import (
    begun,
    begun_process,
    committed,
    ended,
    eventually,
    kill_keeper,
    runtime_of,
    saved,
    told,
)
from tests.keeper.fake import FakeTrainer, keeper_pid, layout_for
from tests.keeper.faulty import faulty_keeper
from tests.memory.mounts import fill, small_tmpfs


@pytest.fixture
def trainer(run: Path, runtime: Path) -> FakeTrainer:
    return begun(run, runtime)


def shards(run: Path) -> list[Path]:
    return sorted((run / "data").glob("*/*/rank-*"))


@pytest.mark.parametrize("offset", ["header", "first", "last"])
def test_a_flipped_bit_is_never_persisted(trainer: FakeTrainer, offset: str) -> None:
    layout = trainer.layout
    place = {"header": 20, "first": layout.data_start, "last": layout.num_bytes - 1}[offset]
    written = trainer.write(5)
    slot, generation = written
    slot.image_view[place] ^= 0x40
    slot.request_persist(generation)
    trainer.seal(slot, generation)
    status = trainer.wait_for(lambda status: status.torn)
    assert (status.torn[0].step, status.torn[0].slot) == (5, slot.name)
    names = {"header": (), "first": ("model.weight",), "last": ("model.mask",)}[offset]
    assert status.torn[0].leaves == names
    assert slot.state().state is SlotState.FREE
    assert slot.torn[0] == generation
    assert [layout.leaves[index].name for index in slot.torn[1]] == list(names)
    assert committed(trainer.run) == []
    assert shards(trainer.run) == []
    saved(trainer, 6)
    assert committed(trainer.run) == [6]


def test_an_idle_keeper_audits_the_newest_sealed_snapshot(trainer: FakeTrainer) -> None:
    slot, generation = trainer.snapshot(1)
    trainer.wait_for(lambda status: status.counts.get("audited") == 1)
    written = trainer.write(2)
    written[0].image_view[trainer.layout.data_start + 1000] ^= 1
    trainer.seal(*written)
    status = trainer.wait_for(lambda status: status.torn)
    assert [(torn.step, torn.leaves) for torn in status.torn] == [(2, ("model.weight",))]
    assert slot.state().state is SlotState.SEALED
    assert slot.state().generation == generation


def test_a_damaged_record_discards_the_snapshot(trainer: FakeTrainer) -> None:
    from flashckpt.memory import region as page

    slot, generation = trainer.snapshot(1)
    byte = os.pread(slot.descriptor, 1, page.RECORD_OFFSET + 33)[0]
    os.pwrite(slot.descriptor, bytes([byte ^ 1]), page.RECORD_OFFSET + 33)
    slot.request_persist(generation)
    eventually(lambda: slot.state().state is SlotState.FREE)
    assert slot.torn == (generation, ())


def test_a_full_disk_is_reported_once_and_the_next_try_works(tmp_path: Path, runtime: Path) -> None:
    with small_tmpfs(4 << 20) as disk:
        trainer = begun(disk / "run", runtime, kib=1024, slots=2)
        filler = fill(disk, left=512 << 10)
        slot, generation = trainer.snapshot(1, persist=True)
        status = trainer.wait_for(lambda status: status.failures)
        assert [(each.step, each.errno) for each in status.failures] == [(1, errno.ENOSPC)]
        assert (status.failing, status.waiting, slot.failed) == ((1,), (1,), generation)
        # The trainer overwrites one of its two slots although no snapshot is persisted.
        for step in range(2, 12):
            trainer.snapshot(step, persist=step % 3 == 0)
        filler.unlink()
        saved(trainer, 12)
        status = trainer.wait_for(lambda status: not status.waiting)
        assert status.failures == status.failing == ()
        assert status.counts["failed"] >= 1
        first = [line for line in ledger(trainer.run) if line["event"] == "error" and line["step"] == 1]
        assert len(first) <= 1
        ended(trainer)


def test_a_snapshot_that_failed_and_is_superseded_then_is_said_to_be_given_up(
    runtime: Path, other_node: Path
) -> None:
    """The failure was said before: it does not stand for the last word."""
    with small_tmpfs(4 << 20) as disk:
        trainer = begun(disk / "run", runtime, kib=1024)
        filler = fill(disk, left=512 << 10)
        trainer.snapshot(1, persist=True)
        trainer.wait_for(lambda status: status.failures)
        other = FakeTrainer(trainer.run, other_node)
        other.start()
        filler.unlink()
        eventually(lambda: "superseded" in [line.get("what") for line in ledger(trainer.run)])
        assert [line.get("what") for line in ledger(trainer.run)].count("persist") == 1
        assert committed(trainer.run) == []
        for each in (trainer, other):
            each.end()
            eventually(lambda each=each: keeper_pid(each.folder) is None)


def test_a_superseded_attempt_commits_nothing(trainer: FakeTrainer, other_node: Path) -> None:
    saved(trainer, 1)
    other = FakeTrainer(trainer.run, other_node)
    # It has a name and has not begun.
    saved(trainer, 2)
    assert trainer.client.status().superseded_by is None
    other.start(trainer.attempt, 2)
    status = trainer.wait_for(lambda status: status.superseded_by)
    assert status.superseded_by == str(other.attempt)
    slot, generation = trainer.snapshot(3, persist=True)
    trainer.wait_for(lambda status: any(each.step == 3 for each in status.failures))
    assert slot.failed == generation
    assert committed(trainer.run) == [1, 2]
    folder = Folder(trainer.attempt, SnapshotId(trainer.attempt, 3))
    assert not (trainer.run / folder.path).exists()


def test_too_little_memory_says_how_much_and_leaves_nothing(trainer: FakeTrainer) -> None:
    before = trainer.folder.names()
    with pytest.raises(OutOfSpaceError, match="slots=2") as raised:
        trainer.client.slots(3, SlotSize(4096, 1 << 45))
    assert raised.value.needed > 2 << 45
    assert 0 < raised.value.available < 1 << 45
    assert trainer.folder.names() == before, "the slots it had are still its own"
    saved(trainer, 1)


def test_fewer_slots_where_there_is_room_for_fewer(runtime: Path) -> None:
    folder = closed_after(RuntimeFolder.open(str(runtime), "ab" * 16))
    left = [40 << 20]

    def available() -> int:
        # As a cgroup would count it: what lies allocated in the folder is gone.
        used = sum(os.stat(Path(folder.path) / name).st_blocks * 512 for name in folder.names())
        return left[0] - used

    made = Regions(folder, "0" * 8).make(0, range(3), SlotSize(4096, 16 << 20), available=available)
    assert len(made.regions) == 2
    assert isinstance(made.error, OutOfSpaceError)
    assert len([name for name in folder.names() if name.startswith("slot-")]) == 2
    for found in made.regions:
        os.close(found.descriptor)


def test_a_ledger_that_cannot_be_written_harms_nothing(run: Path, runtime: Path) -> None:
    run.mkdir()
    (run / "events").write_text("in the way")
    trainer = begun(run, runtime)
    trainer.client.event({"event": "plan", "leaves": 3, "nested": {"attempt": "x", "self": 1}})
    saved(trainer, 1)
    ended(trainer)
    assert (run / "events").read_text() == "in the way"


def test_events_of_the_trainer_stand_in_the_ledger(trainer: FakeTrainer) -> None:
    trainer.client.event({"event": "plan", "leaves": 3, "self": 1, "step": 2})
    trainer.client.event({"event": "skip", "blob": "x" * 40_000})
    [skip], [plan] = told(trainer.run, "skip", 1), told(trainer.run, "plan", 1)
    assert (plan["leaves"], plan["self"], plan["step"]) == (3, 1, 2)
    assert plan["time"] > 1.6e9
    assert skip["cut_bytes"] > 40_000
    assert (trainer.run / "events" / f"{trainer.attempt}.jsonl").exists()


def test_no_commit_comes_twice_and_what_is_done_is_found_done(run: Path, runtime: Path) -> None:
    """A keeper that dies between the version and its report: the next one finds the step committed."""
    trainer = begun(run, runtime)
    slot, generation = trainer.snapshot(1, persist=True)
    trainer.wait_committed(1)
    eventually(lambda: slot.state().state is SlotState.SEALED)
    kill_keeper(trainer.folder)
    slot.set_persisted(0)
    trainer.wait_for(lambda status: 1 in status.committed)
    assert slot.persisted == generation
    assert len(shards(trainer.run)) == 1


def test_the_counter_moves_while_a_trainer_lives_and_says_closed(run: Path, runtime: Path) -> None:
    trainer = FakeTrainer(run, runtime)
    trainer.start()

    def count() -> int:
        found = attempts.alive(trainer.store, trainer.attempt)
        return found.count if found else 0

    first = eventually(count)
    eventually(lambda: count() > first + 1)
    kill_keeper(trainer.folder)
    last = count()
    trainer.client.tend()
    # A new keeper counts on: a watcher that saw the old number must see it move.
    assert eventually(lambda: count() != last and count()) > last
    trainer.end()
    eventually(lambda: attempts.alive(trainer.store, trainer.attempt).ended == "closed")  # type: ignore[union-attr]


def test_a_killed_trainer_on_a_full_disk_keeps_its_keeper_and_its_snapshot(
    tmp_path: Path, runtime: Path
) -> None:
    with small_tmpfs(3 << 20) as disk:
        run = disk / "run"
        trainer = begun_process(run, runtime, linger_s=0.1, slots=2)
        filler = fill(disk, left=200 << 10)
        trainer.do("snapshot", 3, False)
        folder = runtime_of(run, runtime)
        trainer.kill()
        eventually(lambda: any(line.get("what") == "persist" for line in ledger(run)))
        assert keeper_pid(folder) is not None, "it does not go while the newest snapshot is saved nowhere"
        assert ELECTION_LOCK in folder.names()
        filler.unlink()
        eventually(lambda: keeper_pid(folder) is None)
        assert committed(run) == [3]
        eventually(lambda: not Path(folder.path).exists())


def test_a_trainer_is_told_of_its_own_attempts_commits_only(run: Path, runtime: Path) -> None:
    """A branch trains on from an older step: the old attempt's later steps are not what it waits for."""
    first = begun_process(run, runtime)
    first.do("snapshot", 5, True)
    first.save(90)
    first.kill()
    second = begun(run, runtime, parent=AttemptName.parse(first.attempt), step=5)
    assert second.client.status().newest_committed is None
    saved(second, 6)
    assert second.client.status().newest_committed == 6
    # The next keeper has committed nothing itself, and still says what is.
    kill_keeper(second.folder)
    assert second.client.status().committed == (6,)


def test_a_keeper_that_ends_between_two_removals_leaves_nothing_for_ever(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = closed_after(RuntimeFolder.open(str(runtime), "cd" * 16))
    for name in ("trainer-00000-1-aabbccdd.lock", "stacks-00000-1-aabbccdd"):
        (Path(folder.path) / name).touch()
    remove, ended = RuntimeFolder.remove, []

    def once(folder: RuntimeFolder, name: str) -> None:
        remove(folder, name)
        ended.append(name)
        raise KeyboardInterrupt

    regions = Regions(folder, "0" * 8)
    with monkeypatch.context() as killed:
        killed.setattr(RuntimeFolder, "remove", once)
        with pytest.raises(KeyboardInterrupt):
            regions.remove_dead_locks()
    assert len(ended) == 1
    Regions(folder, "0" * 8).remove_dead_locks()
    assert folder.names() == []


# Audits are for idle time: what is to be persisted does not wait for their end


def test_an_audit_ends_where_something_is_to_be_persisted(run: Path, tmp_path: Path, runtime: Path) -> None:
    faults = tmp_path / "faults"
    with faulty_keeper(run, runtime, faults):
        trainer = begun(run, runtime, kib=4096)
        (faults / "audit.pause").touch()
        trainer.snapshot(1)
        eventually(lambda: (faults / "audit.paused").exists())
        trainer.snapshot(2, persist=True)
        # Answered twice: between the two the keeper has looked for what is to be done.
        for _ in range(2):
            assert trainer.client.status().waiting == (2,)
        (faults / "audit.pause").unlink()
        trainer.wait_committed(2)
        looked_at = (faults / "audit.windows").stat().st_size
        assert looked_at < 8, "windows of the 64 there are"
        # An idle keeper audits the snapshot to its end.
        trainer.snapshot(3)
        trainer.wait_for(lambda status: status.counts.get("audited"))
        assert (faults / "audit.windows").stat().st_size > 64
        assert committed(run) == [2]


def test_a_slot_that_is_let_go_while_it_is_audited(run: Path, tmp_path: Path, runtime: Path) -> None:
    """Its memory goes: an audit that looks at it afterwards is the keeper's death."""
    faults = tmp_path / "faults"
    with faulty_keeper(run, runtime, faults) as keeper:
        trainer = begun(run, runtime, kib=16)
        before, names = trainer.slots, [grant.name for grant in trainer.grants]

        def left() -> list[str]:
            return [name for name in names if list(runtime.glob(f"*/*/{name}"))]

        (faults / "audit.pause").touch()
        trainer.snapshot(1)
        eventually(lambda: (faults / "audit.paused").exists())
        trainer.layout = layout_for(6000)
        trainer.image = SlotImage(trainer.layout)
        trainer.take_slots()
        trainer.client.release(names)
        trainer.snapshot(2)
        eventually(lambda: not left())
        (faults / "audit.pause").unlink()
        trainer.wait_for(lambda status: status.counts.get("audited"))
        assert keeper.poll() is None
        assert trainer.client.restarts == 0
        for slot in before:
            slot.close()
