"""A dry run reports what a recovery would do, and changes no file."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import run_view
from tests.recovery.messes import MESSES, everything
from tests.recovery.scene import recovered, rows, whole_tree


@pytest.mark.parametrize("mess", MESSES, ids=lambda mess: mess.__name__)
def test_nothing_is_touched_and_the_real_run_finds_what_was_said(
    run: Path,
    runtime: Path,
    mess: Callable[[Path, Path], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    mess(run, runtime)
    before = whole_tree(run, runtime)
    said = recovered(run, dry_run=True)
    assert whole_tree(run, runtime) == before
    assert said.dry_run
    assert not [each for each in caplog.messages if "discarded" in each or "is not persisted" in each]
    done = recovered(run)
    became = {each.place: each.outcome.value for each in done.findings}
    assert became.keys() == {each.place for each in said.findings}
    # What is kept until a newer one is committed is dropped then.
    later = {"sound": {"committed"}, "kept": {"kept", "dropped"}}
    for each in said.findings:
        assert became[each.place] in later.get(each.outcome.value, {each.outcome.value}), each
    assert said.resume.step == done.resume.step


def test_no_runtime_folder_is_made(run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_view.watch_for(0.0, monkeypatch.setattr)
    everything(run, runtime)
    for path in runtime.iterdir():
        shutil.rmtree(path)
    before = whole_tree(run, runtime)
    report = recovered(run, dry_run=True)
    assert whole_tree(run, runtime) == before
    assert rows(report, "snapshot") == []
