"""Frozen instances that no step names: a recovery removes them, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashckpt.commit.verification import verify
from flashckpt.format.names import AttemptName, frozen_name, frozen_path
from flashckpt.store import open_store
from tests.commit.runs import name_of
from tests.keeper.driver import committed, eventually
from tests.keeper.fake import FakeTrainer, keeper_pid
from tests.keeper.test_keeper_constants import saved
from tests.recovery.scene import Crash, recovered, rows, whole_tree


def constants_files(run: Path) -> list[Path]:
    return sorted(run.glob("frozen/*.safetensors"))


def killed_before_its_part(run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, **how: int) -> Crash:
    """Trainer, keeper and memory are gone, the constants are whole, and no part names them."""
    with monkeypatch.context() as armed:
        armed.setenv("FLASHCKPT_CRASH_AT", "write.begun:1:kill")
        crash = Crash(run, runtime, **how).slots()
    crash.trainer.do("snapshot", 1, True)
    eventually(lambda: keeper_pid(crash.folder) is None)
    crash.trainer.kill()
    for name in crash.regions():
        crash.folder.remove(name)
    return crash


def test_they_take_the_room_of_no_later_attempt(
    small_disk: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_disk / "run"
    killed_before_its_part(run, runtime, monkeypatch, kib=16, constants_kib=5 << 10)
    [left] = constants_files(run)
    before = whole_tree(run)
    said = recovered(run, dry_run=True)
    assert whole_tree(run) == before
    done = recovered(run)
    assert rows(said) == rows(done)
    assert str(left.relative_to(run)) in [each.place for each in done.findings]
    assert constants_files(run) == []
    second = FakeTrainer(run, runtime, kib=16, constants_kib=5 << 10)
    second.start()
    second.take_slots()
    saved(second, 1)
    assert committed(run) == [1]
    second.end()


def over(run: Path, runtime: Path) -> tuple[AttemptName, Path]:
    """An attempt with a step, from which another has resumed, and an instance of it that nothing names."""
    first = Crash(run, runtime, constants_kib=64, keep=20).slots().commit(1)
    first.both_killed()
    recovered(run)
    second = FakeTrainer(run, runtime, constants_kib=64, keep=20)
    second.start(first.name, 1)
    second.take_slots()
    saved(second, 2)
    second.end()
    eventually(lambda: keeper_pid(second.folder) is None)
    left = run / frozen_path(frozen_name(first.name, 0, "0badcafe"))
    left.write_bytes(b"half")
    return first.name, left


def test_what_a_step_names_stays(tmp_path: Path, runtime: Path) -> None:
    run = tmp_path / "run"
    _, left = over(run, runtime)
    named = [each for each in constants_files(run) if each != left]
    report = recovered(run)
    assert rows(report, "orphans") == [("orphans", "removed", None)]
    assert constants_files(run) == named
    assert committed(run) == [1, 2]
    assert verify(open_store(str(run))).ok


@pytest.mark.parametrize("how", ["damaged", "lost"])
def test_what_a_step_may_name_stays(tmp_path: Path, runtime: Path, how: str) -> None:
    """A record that cannot be read may name any instance."""
    run = tmp_path / "run"
    attempt, left = over(run, runtime)
    named = [each for each in constants_files(run) if each != left]
    file = run / name_of(1, attempt).path
    data = file.read_bytes()
    file.unlink() if how == "lost" else file.write_bytes(data[:-9])
    recovered(run)
    assert left.exists() is (how == "damaged")
    assert set(named) <= set(constants_files(run))
    assert file.read_bytes() == data or how == "damaged", "its parts are there: it is committed again"
    file.write_bytes(data)
    assert verify(open_store(str(run))).ok
    assert committed(run) == [1, 2]
