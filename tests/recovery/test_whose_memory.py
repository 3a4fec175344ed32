"""Memory belongs to one run: a recovery of a copy takes nothing that is another's."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.keeper.driver import committed
from tests.recovery.scene import Crash, recovered, regions_of, rows


def test_a_copy_of_hard_links_is_another_run(tmp_path: Path, runtime: Path) -> None:
    """As `cp -al` and `rsync --link-dest` make it: a backup shares each of its files with the run."""
    run, backup = tmp_path / "run", tmp_path / "backup"
    Crash(run, runtime, kib=64).slots().commit(1).both_killed()
    shutil.copytree(run, backup, copy_function=lambda source, target: Path(target).hardlink_to(source))
    assert (backup / "run.json").samefile(run / "run.json")
    second = Crash(run, runtime, kib=64).slots()
    second.seal(4)
    second.both_killed()
    names = second.regions()

    report = recovered(backup)

    assert rows(report, "snapshot") == []
    assert committed(backup) == [1]
    assert regions_of(second.folder) == names
    found = recovered(run).resume
    assert found is not None
    assert found.step == 4
