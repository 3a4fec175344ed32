"""Retention by hand: the rules of the run's own, and nothing while somebody trains."""

import shutil
from pathlib import Path

import pytest

from flashckpt.commit.lineage import branch
from flashckpt.errors import UnusableRunError
from flashckpt.format.catalogue import CATALOGUE
from flashckpt.options import Keep
from flashckpt.recovery.storage import prune
from flashckpt.store.local import LocalStore
from tests.commit.runs import is_whole, new_run
from tests.memory.mounts import fill
from tests.recovery.scene import trained, whole_tree
from tests.replication.copied import visible


def test_the_newest_stay_and_the_others_go(store: LocalStore, runtime: Path) -> None:
    attempt = trained(store, *range(1, 8))
    before = whole_tree(Path(store.url), runtime)
    said = prune(store, Keep(last=3, every_steps=4), dry_run=True)
    assert whole_tree(Path(store.url), runtime) == before
    done = prune(store, Keep(last=3, every_steps=4))
    assert said.gone == done.gone
    assert [each.name.step for each in done.gone] == [1, 2, 3]
    assert all(each.num_bytes > 0 for each in done.gone)
    assert list(done.kept) == list(said.kept) == visible(store) == [4, 5, 6, 7]
    assert all(is_whole(store, step, attempt) for step in (4, 5, 6, 7))
    assert not list(runtime.glob("flashckpt-*/*/"))


def test_a_branch_that_has_committed_nothing_keeps_two_of_its_history(store: LocalStore) -> None:
    attempt = trained(store, *range(1, 7))
    branch(store, 5)
    said = prune(store, Keep(last=2), dry_run=True)
    done = prune(store, Keep(last=2))
    assert [each.name.step for each in done.gone] == [1, 2, 3]
    assert said.gone == done.gone
    assert visible(store) == [4, 5]
    assert all(is_whole(store, step, attempt) for step in (4, 5, 6)), "branch can get it back"
    assert prune(store, Keep(last=1)).gone == (), "the newest two never go"


def test_a_run_without_steps_has_none_to_delete(store: LocalStore) -> None:
    for dry_run in (True, False):
        done = prune(store, Keep(last=2), dry_run=dry_run)
        assert (done.gone, done.kept) == ((), ())


def test_where_the_catalogue_is_lost_nothing_goes(store: LocalStore) -> None:
    trained(store, *range(1, 5))
    shutil.rmtree(Path(store.url) / CATALOGUE)
    before = whole_tree(Path(store.url))
    for dry_run in (True, False):
        with pytest.raises(UnusableRunError, match="no catalogue"):
            prune(store, Keep(last=1), dry_run=dry_run)
    assert whole_tree(Path(store.url)) == before


def test_a_disk_that_is_full_to_the_last_byte_is_made_room_on(small_disk: Path, runtime: Path) -> None:
    store = new_run(small_disk / "run")
    attempt = trained(store, *range(1, 6))
    fill(small_disk)
    with pytest.raises(OSError, match="No space"):
        store.create("events/nothing", b"more")
    done = prune(store, Keep(last=2))
    assert [each.name.step for each in done.gone] == [1, 2, 3]
    assert visible(store) == [4, 5]
    assert all(is_whole(store, step, attempt) for step in (4, 5))
