"""A dry run sees what the real one does, and touches nothing at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recovery.messes import MESSES, everything, left_branch
from tests.recovery.scene import recovered, rows, whole_tree


@pytest.mark.parametrize("mess", MESSES, ids=lambda mess: mess.__name__)
def test_nothing_is_touched_and_the_real_run_does_what_was_said(
    tmp_path: Path, runtime: Path, mess: Callable[[Path, Path], None]
) -> None:
    run = tmp_path / "run"
    mess(run, runtime)
    before = whole_tree(run, runtime)
    said = recovered(run, dry_run=True)
    assert whole_tree(run, runtime) == before
    assert said.dry_run
    done = recovered(run)
    assert sorted(map(str, rows(said))) == sorted(map(str, rows(done)))
    assert said.resume is not None
    assert done.resume is not None
    # A slot that was resumed from is saved as the step of the attempt that it was loaded by.
    assert said.resume.step == done.resume.step


@pytest.mark.parametrize("mess", [everything, left_branch], ids=lambda mess: mess.__name__)
def test_the_same_with_discard(tmp_path: Path, runtime: Path, mess: Callable[[Path, Path], None]) -> None:
    run = tmp_path / "run"
    mess(run, runtime)
    before = whole_tree(run, runtime)
    said = recovered(run, dry_run=True, discard=True)
    assert whole_tree(run, runtime) == before
    assert sorted(map(str, rows(said))) == sorted(map(str, rows(recovered(run, discard=True))))


def test_without_a_runtime_folder_none_is_made(tmp_path: Path, runtime: Path) -> None:
    run = tmp_path / "run"
    everything(run, runtime)
    for path in runtime.iterdir():
        shutil.rmtree(path)
    before = whole_tree(run, runtime)
    report = recovered(run, dry_run=True)
    assert whole_tree(run, runtime) == before
    assert rows(report, "snapshot") == []
