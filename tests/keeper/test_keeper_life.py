"""A keeper from its start to its leaving, with real processes and real kills."""

from __future__ import annotations

import os
from pathlib import Path

from flashckpt.memory.region import is_region_name
from tests.events import ledger
from tests.keeper.driver import Process, committed, eventually, kill_keeper, runtime_of
from tests.keeper.fake import FakeTrainer, keeper_pid


def test_a_requested_snapshot_is_committed_and_the_keeper_leaves_nothing(
    tmp_path: Path, runtime: Path
) -> None:
    run = tmp_path / "run"
    trainer = FakeTrainer(run, runtime)
    trainer.start()
    trainer.take_slots()
    assert {grant.kind for grant in trainer.grants} == {"named"}
    trainer.snapshot(1)
    trainer.snapshot(2, persist=True)
    trainer.wait_committed(2)
    folder = runtime_of(run, runtime)
    pid = keeper_pid(folder)
    trainer.end()
    assert committed(run) == [2]
    eventually(lambda: keeper_pid(folder) is None)
    eventually(lambda: not Path(folder.path).exists())
    assert pid is not None
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert {"persist", "commit", "close"} <= {line["event"] for line in ledger(run)}


def test_a_killed_trainer_leaves_its_newest_sealed_snapshot(tmp_path: Path, runtime: Path) -> None:
    run = tmp_path / "run"
    trainer = Process(run, runtime)
    trainer.do("start", None, 0, None)
    trainer.do("slots", 3)
    trainer.do("snapshot", 1, False)
    trainer.do("snapshot", 2, False)
    trainer.do("write", 3)
    trainer.kill()
    eventually(lambda: committed(run) == [2])
    events = [line["event"] for line in eventually(lambda: ledger(run))]
    assert "death" in events


def test_both_killed_a_new_keeper_adopts_and_persists(tmp_path: Path, runtime: Path) -> None:
    run = tmp_path / "run"
    first = Process(run, runtime)
    first.do("start", None, 0, None)
    first.do("slots", 3)
    first.do("snapshot", 7, False)
    folder = runtime_of(run, runtime)
    os.kill(keeper_pid(folder), 19)
    first.kill()
    kill_keeper(folder)
    assert committed(run) == []
    assert any(is_region_name(name) for name in folder.names())
    second = Process(run, runtime)
    assert [step for _, step in second.do("survivors")] == [7]
    eventually(lambda: committed(run) == [7])
    second.kill()
