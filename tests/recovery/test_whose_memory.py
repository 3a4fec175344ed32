"""Memory belongs to one run: a recovery of a copy takes nothing that is another's."""

import os
import shutil
from pathlib import Path

import pytest

from flashckpt.commit.attempts import local_owner
from flashckpt.commit.view import View
from flashckpt.errors import RunHeldError
from flashckpt.format.catalogue import CATALOGUE
from flashckpt.format.names import AttemptName
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
from flashckpt.recovery import node
from flashckpt.recovery import recover as recover_module
from flashckpt.store import open_store
from flashckpt.store.base import Store
from tests import run_view
from tests.keeper.driver import committed
from tests.recovery.scene import Crash, recovered, regions_of, resume, rows, whole_tree


def test_a_copy_of_hard_links_is_another_run(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `cp -al` and `rsync --link-dest` make it: a backup shares each of its files with the run."""
    run_view.watch_for(0.0, monkeypatch.setattr)
    run, backup = tmp_path / "run", tmp_path / "backup"
    Crash(run, runtime, kib=64).slots().commit(1).both_killed()
    shutil.copytree(run, backup, copy_function=lambda source, target: Path(target).hardlink_to(source))
    version = View.of(open_store(str(run))).catalogue.path
    assert (backup / version).samefile(run / version)
    second = Crash(run, runtime, kib=64).slots()
    second.seal(4)
    second.both_killed()
    names = regions_of(second.folder)

    report = recovered(backup)

    assert rows(report, "snapshot") == []
    assert committed(backup) == [1]
    assert regions_of(second.folder) == names
    assert resume(recovered(run)) == (4, second.attempt, "local")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees another user's memory")
def test_another_users_memory_is_told_and_nothing_done(run: Path, runtime: Path) -> None:
    """Root would see nothing in memory, say so, and leave files that the owner perhaps cannot read."""
    crash = Crash(run, runtime, kib=64).slots().commit(1)
    crash.seal(4)
    crash.both_killed()
    theirs = runtime / "flashckpt-12345"
    (runtime / "flashckpt-0").rename(theirs)
    for path in [theirs, *theirs.rglob("*")]:
        os.chown(path, 12345, 12345, follow_symlinks=False)
    for path in (run / CATALOGUE).iterdir():
        os.chown(path, 12345, 12345)
    before = whole_tree(run, runtime)
    for dry_run in (True, False):
        with pytest.raises(RunHeldError, match="user 12345"):
            recovered(run, dry_run=dry_run)
    assert whole_tree(run, runtime) == before


def test_an_attempt_that_begins_meanwhile_is_not_called_dead(
    run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash = Crash(run, runtime, kib=64).slots().commit(1).both_killed()
    store, lock = open_store(str(run)), "trainer-00000-1-deadbeef.lock"
    began: list[LifeLock | None] = []

    def begins(store: Store, folder: RuntimeFolder) -> AttemptName | None:
        began.append(LifeLock.acquire(folder, lock))
        run_view.begin(store, owner=local_owner(folder.path, lock))
        return node.died_here(store, folder)

    monkeypatch.setattr(recover_module, "died_here", begins)
    with pytest.raises(RunHeldError, match="has begun"):
        recovered(run)
    new = View.of(store).attempt
    assert new is not None
    assert new > crash.name
    assert run_view.ending(store, new) == ""
    assert began[0] is not None
    began[0].release(crash.folder)
