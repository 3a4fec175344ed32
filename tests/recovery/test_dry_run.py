"""A dry run sees what the real one does, and touches nothing at all. It predicts no writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flashckpt.memory.held_regions import Regions
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
from flashckpt.recovery.report import Kind, RecoveryReport, RemoteFate
from flashckpt.store.local import LocalStore
from tests.descriptors import closed_after
from tests.recovery.messes import MESSES, everything, left_branch
from tests.recovery.scene import Crash, recovered, rows, whole_tree


def assert_found(said: RecoveryReport, done: RecoveryReport) -> None:
    """What is whole and not at rest is written, or overtaken by what is; all else is as it was said."""
    assert "committed" not in [each.outcome.value for each in said.findings]
    became = {each.place: each.outcome.value for each in done.findings if each.kind is not Kind.ORPHANS}
    later = {"sound": {"committed", "dropped"}, "kept": {"kept", "dropped"}}
    for each in said.findings:
        if each.kind is not Kind.ORPHANS:
            assert became[each.place] in later.get(each.outcome.value, {each.outcome.value}), each
    assert sorted(map(str, rows(said, "orphans"))) == sorted(map(str, rows(done, "orphans")))
    assert len(said.findings) == len(done.findings)


@pytest.mark.parametrize("mess", MESSES, ids=lambda mess: mess.__name__)
def test_nothing_is_touched_and_the_real_run_finds_what_was_said(
    tmp_path: Path, runtime: Path, mess: Callable[[Path, Path], object]
) -> None:
    run = tmp_path / "run"
    mess(run, runtime)
    before = whole_tree(run, runtime)
    said = recovered(run, dry_run=True)
    assert whole_tree(run, runtime) == before
    assert said.dry_run
    done = recovered(run)
    assert_found(said, done)
    assert said.resume is not None
    assert done.resume is not None
    # A slot that was resumed from is saved as the step of the attempt that it was loaded by.
    assert said.resume.step == done.resume.step


@pytest.mark.parametrize("mess", [everything, left_branch], ids=lambda mess: mess.__name__)
def test_the_same_with_discard(tmp_path: Path, runtime: Path, mess: Callable[[Path, Path], object]) -> None:
    run = tmp_path / "run"
    mess(run, runtime)
    before = whole_tree(run, runtime)
    said = recovered(run, dry_run=True, discard=True)
    assert whole_tree(run, runtime) == before
    assert_found(said, recovered(run, discard=True))


def test_without_a_runtime_folder_none_is_made(tmp_path: Path, runtime: Path) -> None:
    run = tmp_path / "run"
    everything(run, runtime)
    for path in runtime.iterdir():
        shutil.rmtree(path)
    before = whole_tree(run, runtime)
    report = recovered(run, dry_run=True)
    assert whole_tree(run, runtime) == before
    assert rows(report, "snapshot") == []


def test_it_names_the_step_that_would_be_copied_to_the_remote(tmp_path: Path, runtime: Path) -> None:
    """That is the step that a recovery commits from memory."""
    crash = Crash(tmp_path / "run", runtime, kib=64).slots().commit(1)
    crash.seal(2)
    crash.both_killed()
    remote = LocalStore(str(tmp_path / "remote"))
    said = recovered(tmp_path / "run", dry_run=True, remote=remote).remote
    assert not (tmp_path / "remote").exists()
    done = recovered(tmp_path / "run", remote=remote).remote
    assert said is not None
    assert done is not None
    assert (done.outcome, done.step) == (RemoteFate.COPIED, 2)
    assert (said.outcome, said.step, said.attempt) == (RemoteFate.MISSING, 2, done.attempt)


def test_words_of_a_view_stay_in_this_process(tmp_path: Path, runtime: Path) -> None:
    """A dry run pins slots and marks them: no other process sees a word of it."""
    crash = Crash(tmp_path / "run", runtime, kib=64).slots()
    [name] = crash.seal(1)
    crash.both_killed()
    folder = closed_after(RuntimeFolder.at(crash.folder.path))
    path = Path(folder.path) / name
    before = path.read_bytes()
    regions = Regions(folder, LifeLock("keeper-00000000.lock", (0, 0), -1), is_view=True)
    [held] = [each for each in regions.adopt_named() if each.slot.name == name]
    slot, sealed = held.slot, held.sealed()
    assert sealed is not None
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if name in line]
    assert [line[1] for line in mapped] == ["rw-p"]
    flags = Path(f"/proc/self/fdinfo/{slot.descriptor}").read_text().split("flags:")[1].split()[0]
    assert int(flags, 8) & os.O_ACCMODE == os.O_RDONLY
    pinned = slot.pin(regions.own_index(slot), sealed.word)
    assert pinned is not None
    slot.set_persisted(sealed.generation)
    assert slot.unpin(pinned)
    regions.remove(held)
    assert path.read_bytes() == before
    for each in regions.everything():
        each.slot.close()
    folder.close()
