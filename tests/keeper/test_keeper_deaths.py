"""Trainers, keepers and both killed or stopped at the worst moments."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashckpt.format.names import AttemptName
from flashckpt.keeper import client
from flashckpt.keeper.protocol import ELECTION_LOCK, SOCKET_NAME
from flashckpt.keeper.start import Pauses
from flashckpt.memory.region import SlotSize, is_region_name, memfds_of
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.memory.slot import SlotState
from tests.events import ledger
from tests.folders import flip
from tests.keeper.driver import (
    InProcess,
    Process,
    begun,
    begun_process,
    committed,
    ended,
    eventually,
    kill_keeper,
    runtime_of,
    saved,
    the_keeper,
    told,
)
from tests.keeper.fake import FakeTrainer, keeper_pid, open_runtime
from tests.memory.mounts import small_tmpfs


def stop(pid: int) -> None:
    """SIGSTOP, and until each of its threads stands: the signal is sent long before."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")

    def stands() -> bool:
        try:
            told = [each.joinpath("stat").read_text() for each in threads.iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            return False  # a thread has ended meanwhile
        return {each.rpartition(")")[2].split()[0] for each in told} == {"T"}

    eventually(stands)


@pytest.mark.parametrize("command", ["write", "leave unconfirmed"])
def test_killed_before_a_seal_loses_that_snapshot_and_no_other(
    run: Path, runtime: Path, command: str
) -> None:
    trainer = begun_process(run, runtime, slots=2)
    trainer.do("snapshot", 1, False)
    name, generation = trainer.do(command, 2)
    trainer.kill()
    eventually(lambda: committed(run) == [1])
    second = Process(run, runtime)
    assert [step for _, step in second.do("survivors")] == [1]
    second.do("start", trainer.attempt, 1, None)
    # The half-written slot is free again: of two, the newest sealed is kept and this one is written.
    second.do("slots", 2)
    assert second.do("snapshot", 2, True)[:2] == [name, generation + 1]
    second.do("committed", 2)
    assert committed(run) == [1, 2]


def test_what_is_not_confirmed_is_not_persisted_until_it_is(run: Path, runtime: Path) -> None:
    trainer = begun_process(run, runtime)
    trainer.save(1)
    trainer.do("leave unconfirmed", 2)
    until = time.monotonic() + 0.4
    while time.monotonic() < until:
        trainer.do("status")
    assert committed(run) == [1]
    assert trainer.do("confirm")
    eventually(lambda: committed(run) == [1, 2])


def test_what_is_confirmed_after_a_newer_commit_is_given_up(run: Path, runtime: Path) -> None:
    trainer = begun_process(run, runtime)
    trainer.do("leave unconfirmed", 1)
    trainer.save(2)
    assert trainer.do("confirm")
    [line] = told(run, "error", 1)
    assert (line["step"], line["what"]) == (1, "superseded")
    trainer.save(3)
    assert committed(run) == [2, 3]


def test_a_torn_newest_falls_back_to_the_one_before(run: Path, runtime: Path) -> None:
    trainer = begun_process(run, runtime)
    trainer.do("snapshot", 1, False)
    folder = runtime_of(run, runtime)
    # The keeper is stopped so that it does not see the tear before the trainer is dead.
    pid = the_keeper(folder)
    os.kill(pid, signal.SIGSTOP)
    name, _ = trainer.do("snapshot", 2, False)
    flip_image(Path(folder.path) / name)
    trainer.kill()
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: committed(run) == [1])
    torn = [line for line in eventually(lambda: ledger(run)) if line["event"] == "torn"]
    assert [(line["step"], line["leaves"]) for line in torn] == [(2, ["model.weight"])]


def flip_image(path: Path) -> None:
    """Flip one bit in the largest leaf of a slot's image."""
    flip(path, path.stat().st_size // 2)


def test_keepers_that_die_over_and_over_are_started_after_pauses() -> None:
    now = 1000.0
    pauses = Pauses(lambda: now)
    assert pauses.left_s() <= 0
    waited = []
    for _ in range(16):
        pauses.started()
        waited.append(max(pauses.left_s(), 0.0))
        now += waited[-1]
    assert waited == [0] * 7 + [1, 2, 4, 8, 16, 20, 20, 20, 20]
    for _ in range(5000):  # a weekend of them
        pauses.started()
        assert pauses.left_s() == 20
        assert pauses.left_s(longest_s=1.0) == 1, "somebody waits"
        now += 20
    now += 60
    pauses.started()
    assert pauses.left_s() <= 0, "that one had its time to live"


@pytest.mark.parametrize("stopped", [False, True], ids=["runs", "stopped"])
def test_a_keeper_without_a_socket_is_found_again_or_replaced(
    run: Path, runtime: Path, stopped: bool
) -> None:
    trainer = begun(run, runtime, timeout_s=5.0)
    pid = the_keeper(trainer.folder)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    trainer.folder.remove(SOCKET_NAME)
    trainer.client.close()
    saved(trainer, 1)
    assert (keeper_pid(trainer.folder) != pid) == stopped


def test_a_keeper_that_was_deposed_while_it_left_removes_nothing(run: Path, runtime: Path) -> None:
    _, identity = open_runtime(run, runtime)
    folder = RuntimeFolder.open(str(runtime), identity)
    keeper = InProcess(run, folder).keeper
    [region] = keeper.regions.make(0, [0], SlotSize(4096, 4096)).regions
    keeper.regions.put(region)
    folder.remove(ELECTION_LOCK)
    keeper._leave()
    assert {region.name, SOCKET_NAME} <= set(folder.names())


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_keeper_whose_starter_ended_before_it_came_waits_for_nobody(
    has_ended: bool, run: Path, runtime: Path
) -> None:
    """It was started early, and the attach failed. A region without a snapshot is of no use to the next."""
    _, identity = open_runtime(run, runtime)
    folder = RuntimeFolder.open(str(runtime), identity)
    starter = subprocess.Popen([sys.executable, "-c", ""])
    starter.wait()
    keeper = InProcess(run, folder, starter.pid if has_ended else os.getpid()).keeper
    assert keeper.exit.is_due(time.monotonic()) == has_ended
    keeper.regions.put(keeper.regions.make(0, [0], SlotSize(4096, 4096)).regions[0])
    assert keeper.exit.is_due(time.monotonic()) == has_ended
    keeper._leave()


def test_a_death_before_the_first_snapshot_leaves_no_keeper(run: Path, runtime: Path) -> None:
    """It would linger for an hour, with nothing to resume from."""
    trainer = begun_process(run, runtime, linger_s=3600.0)
    folder = runtime_of(run, runtime)
    assert keeper_pid(folder) is not None
    trainer.kill()
    eventually(lambda: not Path(folder.path).exists())


def test_memfds_survive_the_keeper_and_fall_with_both(run: Path, runtime: Path) -> None:
    with small_tmpfs(1 << 20) as base:
        trainer = begun(run, base, kib=2048)
        assert {grant.kind for grant in trainer.grants} == {"memfd"}
        assert not any(grant.outlives_both for grant in trainer.grants)
        trainer.snapshot(1)
        kill_keeper(trainer.folder)
        # Only the trainer holds the slot now; it hands it to the next keeper.
        slot, generation = trainer.snapshot(2, persist=True)
        trainer.wait_committed(2)
        assert slot.persisted == generation
        assert trainer.client.restarts == 1
        assert [step for _, step in sorted(trainer.survivors(), key=lambda row: row[1])] == [1, 2]
        for grant in trainer.client.slots(3, SlotSize(4096, trainer.layout.num_bytes)):
            os.close(grant.descriptor)
        assert set(trainer.client._held.held) == {slot.name for slot in trainer.slots}
        kill_keeper(trainer.folder)
        trainer.client.close()
        for each in trainer.slots:
            each.close()
        trainer.life.release(trainer.folder)
        next_one = FakeTrainer(run, base)
        assert next_one.survivors() == []
        assert committed(run) == [2]
        next_one.end()
        eventually(lambda: keeper_pid(trainer.folder) is None)


def test_memfds_of_a_keeper_that_is_silent_are_taken_over_by_the_next_start(run: Path, runtime: Path) -> None:
    with small_tmpfs(1 << 20) as base:
        first = begun_process(run, base, kib=2048)
        pid = the_keeper(runtime_of(run, base))
        stop(pid)
        first.do("snapshot", 7, False)
        first.kill()
        second = FakeTrainer(run, base, kib=2048, timeout_s=2.0)
        assert keeper_pid(second.folder) != pid
        [(name, step)] = second.survivors()
        assert step == 7, "sealed, committed nowhere"
        second.start(AttemptName.parse(first.attempt), 7, name)
        eventually(lambda: committed(run) == [7])  # before the start, or after it
        os.kill(pid, signal.SIGCONT)
        eventually(lambda: not Path(f"/proc/{pid}").exists())
        assert committed(run) == [7]
        ended(second)


def test_memfds_of_a_dead_rank_are_taken_over_by_a_rank_that_trains(run: Path, runtime: Path) -> None:
    job = {"kib": 2048, "world": 2, "ranks": [0, 1]}
    with small_tmpfs(1 << 20) as base:
        stays = FakeTrainer(run, base, rank=0, timeout_s=2.0, **job)  # type: ignore[arg-type]
        stays.start()
        stays.take_slots()
        dies = Process(run, base, rank=1, join=str(stays.attempt), **job)
        dies.do("slots", 3)
        pid = the_keeper(stays.folder)
        stop(pid)
        dies.do("snapshot", 7, False)
        dies.kill()
        assert stays.client.tend()
        assert keeper_pid(stays.folder) not in (None, pid)
        assert set(stays.client._held.held) == {slot.name for slot in stays.slots}, (
            "the keeper has the others"
        )
        os.kill(pid, signal.SIGCONT)
        eventually(lambda: not Path(f"/proc/{pid}").exists())
        again = Process(run, base, rank=1, join=str(stays.attempt), **job)
        assert [step for _, step in again.do("survivors")] == [7], "sealed, committed nowhere"
        again.kill()
        stays.end()


def test_memfds_of_a_living_rank_are_not_saved_as_those_of_a_dead_one(run: Path, runtime: Path) -> None:
    job = {"kib": 2048, "world": 2, "ranks": [0, 1], "timeout_s": 2.0}
    with small_tmpfs(1 << 20) as base:
        first = FakeTrainer(run, base, rank=0, **job)  # type: ignore[arg-type]
        first.start()
        second = FakeTrainer(run, base, rank=1, join=str(first.attempt), **job)  # type: ignore[arg-type]
        held = []
        for each in (first, second):
            each.take_slots()
            held.append(each.snapshot(7)[0])
        stop(the_keeper(first.folder))
        assert first.client.tend(), "its successor has the second one's slots before that has spoken to it"
        assert [slot.asked for slot in held] == [0, 0]
        assert second.client.tend()
        held[0].request_persist(held[0].state().generation)
        held[1].request_persist(held[1].state().generation)
        second.wait_committed(7)
        second.end()
        first.end()


def test_a_keeper_that_another_trainer_started_meanwhile_is_not_replaced(
    run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"world": 2, "ranks": [0, 1], "timeout_s": 2.0}
    first = FakeTrainer(run, runtime, rank=0, **job)  # type: ignore[arg-type]
    second = FakeTrainer(run, runtime, rank=1, join=str(first.attempt), **job)  # type: ignore[arg-type]
    stop(the_keeper(first.folder))
    started = []

    def overtaken(pid: int) -> dict[str, int]:
        monkeypatch.setattr(client, "memfds_of", memfds_of)
        found = memfds_of(pid)
        assert second.client.tend()
        started.append(the_keeper(first.folder))
        return found

    monkeypatch.setattr(client, "memfds_of", overtaken)
    assert first.client.tend()
    assert [keeper_pid(first.folder)] == started


def test_what_a_superseded_attempt_left_is_never_committed_and_goes(
    run: Path, runtime: Path, other_node: Path
) -> None:
    """Its keeper was stopped when it died; the next attempt began afresh elsewhere meanwhile."""
    first = begun_process(run, runtime, linger_s=0.5)
    folder = runtime_of(run, runtime)
    pid = the_keeper(folder)
    os.kill(pid, signal.SIGSTOP)
    first.do("snapshot", 50, True)
    first.kill()
    second = begun(run, other_node)
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: keeper_pid(folder) is None)
    assert committed(run) == []
    assert "superseded" in [line.get("what") for line in ledger(run)]
    # Nothing of the newer attempt is committed: what the older one left may yet be wanted.
    assert any(is_region_name(name) for name in folder.names())
    saved(second, 1)
    third = FakeTrainer(run, runtime, linger_s=0.5)
    third.start(second.attempt, 1)
    assert [step for _, step in third.survivors()] == [50]
    third.take_slots()
    saved(third, 51)
    assert [step for _, step in third.survivors()] == [51]


def test_a_half_made_region_is_removed_and_a_foreign_one_left(
    run: Path, tmp_path: Path, runtime: Path
) -> None:
    trainer = begun(run, runtime)
    trainer.snapshot(1)
    folder: RuntimeFolder = trainer.folder
    half = "slot-00000-7-00000000000000aa"
    foreign = "slot-00000-8-00000000000000bb"
    (Path(folder.path) / half).write_bytes(bytes(8192))
    (Path(folder.path) / half).chmod(0o600)
    (Path(folder.path) / foreign).symlink_to(tmp_path)
    kill_keeper(folder)
    trainer.wait_for(lambda status: True)
    assert half not in folder.names()
    assert foreign in folder.names()
    states = sorted(slot.state().state for slot in trainer.slots)
    assert states == [SlotState.FREE, SlotState.FREE, SlotState.SEALED]


@pytest.mark.parametrize("pinned_by", ["keeper-dead.lock", "trainer-00000-1-dead.lock"])
def test_a_pin_of_the_dead_is_taken_away(run: Path, runtime: Path, pinned_by: str) -> None:
    trainer = begun(run, runtime)
    slot, generation = trainer.snapshot(1)
    index = slot.enroll(1, pinned_by, lambda name: True)
    assert slot.pin(index, slot.state()) is not None
    eventually(lambda: slot.state().state is SlotState.SEALED)
    assert slot.state().generation == generation
