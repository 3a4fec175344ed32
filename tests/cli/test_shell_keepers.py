"""`flashckpt keepers`: what it says of keepers in each state, and how it ends one."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from made_runs import Ended, Shell

from flashckpt.keeper import node_keepers as node
from flashckpt.memory.region import is_region_name
from flashckpt.recovery.recover import recover
from flashckpt.recovery.report import Fate, Kind
from flashckpt.store import open_store
from tests.keeper.driver import Process, committed, eventually, runtime_of
from tests.keeper.fake import keeper_pid
from tests.memory.mounts import fill
from tests.processes import keepers_of


class Keepers:
    """The command, in a process of its own."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def __call__(self, *arguments: object) -> Ended:
        return self._shell("keepers", *arguments)

    def listed(self) -> list[dict[str, Any]]:
        done = self("--json")
        assert done.code == 0, done.err
        found: list[dict[str, Any]] = done.json["keepers"]
        return found


@pytest.fixture
def keepers(shell: Shell, runtime: Path) -> Keepers:
    return Keepers(shell)


def trains(run: Path, runtime: Path, linger_s: float = 3600) -> Process:
    """A trainer with three slots, whose keeper would linger for an hour."""
    trainer = Process(run, runtime, linger_s=linger_s)
    trainer.do("start", None, 0, None)
    trainer.do("slots", 3)
    return trainer


def regions(runtime: Path) -> list[Path]:
    return [path for path in runtime.rglob("slot-*") if is_region_name(path.name)]


def test_one_of_a_living_trainer_is_listed_and_not_ended(
    tmp_path: Path, runtime: Path, keepers: Keepers
) -> None:
    trainer = trains(tmp_path / "run", runtime)
    trainer.do("snapshot", 3, True)
    eventually(lambda: committed(tmp_path / "run") == [3])
    trainer.do("snapshot", 4, False)
    (row,) = keepers.listed()
    assert (row["state"], row["trainers"], row["slots"]) == ("training", [trainer.pid], 3)
    assert row["run"] == str(tmp_path / "run")
    assert row["pid"] == keeper_pid(runtime_of(tmp_path / "run", runtime))
    assert (row["newest_sealed"], row["newest_committed"]) == (4, 3)
    assert row["num_bytes"] == sum(path.stat().st_size for path in regions(runtime))
    assert str(tmp_path / "run") in keepers().out
    for target in (tmp_path / "run", row["pid"]):
        for flags in ([], ["--discard"]):
            done = keepers("--end", target, *flags)
            assert done.code == 3
            assert f"process {trainer.pid}" in done.err
    assert keepers.listed()[0]["newest_sealed"] == 4
    trainer.do("end")
    trainer.gone()


def test_one_that_lingers_saves_what_it_has_and_ends(tmp_path: Path, runtime: Path, keepers: Keepers) -> None:
    trainer = trains(tmp_path / "run", runtime)
    trainer.do("snapshot", 3, False)
    (pid,) = keepers_of(runtime)
    os.kill(pid, signal.SIGSTOP)  # it has not begun to save when it is told to end
    trainer.kill()
    os.kill(pid, signal.SIGCONT)
    done = keepers("--end", tmp_path / "run")
    assert done.code == 0, done.err
    assert committed(tmp_path / "run") == [3]
    assert keepers_of(runtime) == []
    assert regions(runtime) == []
    assert keepers.listed() == []


def test_memory_is_given_up_where_the_disk_is_full(small_disk: Path, runtime: Path, keepers: Keepers) -> None:
    """Not even the trainer's end can be written down there."""
    trainer = Process(small_disk / "run", runtime, linger_s=3600, kib=4096)
    trainer.do("start", None, 0, None)
    trainer.do("slots", 3)
    fill(small_disk)
    trainer.do("snapshot", 3, False)
    trainer.kill()
    (pid,) = keepers_of(runtime)
    done = keepers("--end", pid)
    assert done.code == 4
    assert "No space left" in done.err
    done = keepers("--end", pid, "--discard")
    assert done.code == 0, done.err
    assert keepers_of(runtime) == []
    assert regions(runtime) == []


@pytest.mark.long
def test_one_that_waits_for_another_node_has_nothing_left_to_do(
    tmp_path: Path, runtime: Path, keepers: Keepers
) -> None:
    """Its own part is on disk, that of the other node never comes. Its memory stays, the keeper need not."""
    run = tmp_path / "run"
    trainer = Process(run, runtime, linger_s=3600, world=2)
    trainer.do("start", None, 0, None)
    trainer.do("slots", 3)
    trainer.do("snapshot", 3, True)
    trainer.kill()
    report = recover(open_store(str(run)))
    (found,) = [each for each in report.findings if each.kind is Kind.SNAPSHOT]
    assert (found.step, found.outcome) == (3, Fate.KEPT)
    assert "other nodes are missing" in found.detail
    assert not report.failed
    # The queue may still try the step that `recover` let go of.
    eventually(lambda: [row["state"] for row in keepers.listed()] == ["lingering"])
    (row,) = keepers.listed()
    assert (row["newest_sealed"], row["newest_committed"]) == (3, None)
    node.end(node.find(str(run)))
    assert keepers_of(runtime) == []
    assert len(regions(runtime)) == 1


@pytest.mark.long
def test_one_that_does_not_answer_is_listed(tmp_path: Path, runtime: Path, keepers: Keepers) -> None:
    trainer = trains(tmp_path / "run", runtime)
    (pid,) = keepers_of(runtime)
    os.kill(pid, signal.SIGSTOP)
    (row,) = keepers.listed()
    assert (row["pid"], row["state"], row["run"]) == (pid, "silent", None)
    trainer.kill()
    done = keepers("--end", pid)
    assert done.code == 4
    assert "does not answer" in done.err
    os.kill(pid, signal.SIGCONT)


def test_what_is_left_of_a_run_that_was_deleted_is_freed(
    tmp_path: Path, runtime: Path, keepers: Keepers
) -> None:
    run = tmp_path / "run"
    trainer = trains(run, runtime, linger_s=0.1)
    trainer.do("snapshot", 3, False)
    shutil.rmtree(run)
    trainer.kill()
    eventually(lambda: keepers_of(runtime) == [], timeout_s=120)
    (row,) = keepers.listed()
    assert (row["state"], row["run"], row["pid"]) == ("left", None, None)
    assert row["num_bytes"] == sum(path.stat().st_size for path in regions(runtime)) > 0
    assert row["folder"] in keepers().out
    done = keepers("--end", row["folder"])
    assert done.code == 4
    assert "steps 3" in done.err
    assert "--discard" in done.err
    assert keepers.listed() == [row], "nothing was changed"
    done = keepers("--end", row["folder"], "--discard")
    assert done.code == 0, done.err
    assert keepers.listed() == []
    assert list(runtime.rglob("*-*.lock")) == list(runtime.rglob("slot-*")) == []


def test_what_is_left_is_listed_and_not_freed_under_who_trains_again(
    tmp_path: Path, runtime: Path, keepers: Keepers
) -> None:
    trainer = trains(tmp_path / "run", runtime)
    trainer.do("snapshot", 3, False)
    (pid,) = keepers_of(runtime)
    os.kill(pid, signal.SIGKILL)
    trainer.kill()
    eventually(lambda: keepers_of(runtime) == [])
    (row,) = keepers.listed()
    assert (row["state"], row["pid"], row["slots"]) == ("left", None, 3)
    again = Process(tmp_path / "run", runtime)
    done = keepers("--end", row["folder"], "--discard")
    assert done.code == 3
    assert f"process {again.pid}" in done.err
    assert regions(runtime)
    again.do("end")
    again.gone()


def test_none_and_wrong_usage(tmp_path: Path, keepers: Keepers) -> None:
    assert keepers.listed() == []
    assert "No keeper" in keepers().err
    assert keepers("--discard").code == 2
    assert keepers("--end", tmp_path / "nothing").code == 4
