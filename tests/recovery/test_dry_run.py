"""A dry run sees what the real one does, and touches nothing at all. It predicts no writes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flashckpt.recovery.report import Kind, RecoveryReport
from tests import run_view
from tests.recovery.messes import MESSES, everything
from tests.recovery.scene import recovered, rows, whole_tree


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
    run: Path, runtime: Path, mess: Callable[[Path, Path], object]
) -> None:
    mess(run, runtime)
    before = whole_tree(run, runtime)
    said = recovered(run, dry_run=True)
    assert whole_tree(run, runtime) == before
    assert said.dry_run
    done = recovered(run)
    assert_found(said, done)
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
