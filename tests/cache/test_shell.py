"""What the shell shows of a cache, and brings home from it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import flashckpt
from flashckpt.keeper import node_keepers as keepers
from flashckpt.memory.cache_folder import open_cached
from flashckpt.memory.slot import Slot
from flashckpt.recovery.recover import recover
from flashckpt.recovery.report import Fate
from flashckpt.store import open_store
from tests.cache.home import Home, cached_steps, files_in, slots_in
from tests.cache.loop import Training
from tests.cache.test_damage import image_of
from tests.folders import flip
from tests.waiting import abandon, until

pytestmark = pytest.mark.process


@pytest.fixture
def run(home: Home, cache: Path, runtime: Path) -> Training:
    """A run with step 2 at home, and steps 3 and 4 in the cache and in memory alone."""
    made = Training(home.url, cache, persist_every=None)
    made.train(2, saves=True)
    made.made.wait()
    home.shut()
    made.train(4, saves=True)
    until(lambda: cached_steps(cache)[-1:] == [4], "step 4 in the cache")
    return made


@pytest.fixture
def left(run: Training, home: Home, kill_keepers: Callable[..., None]) -> None:
    """The same, of which the cache alone is left; the home can be written."""
    abandon(run.made)
    kill_keepers(remove_regions=True)
    home.open()


def test_keepers_show_the_cache_and_recover_brings_it_home(
    run: Training, home: Home, cache: Path, kill_keepers: Callable[..., None]
) -> None:
    [found] = keepers.keepers()
    assert found.cache.startswith(str(cache))
    assert (found.newest_cached, found.not_at_home) == (4, (3, 4))
    assert found.cached_bytes > 1 << 20
    assert keepers.caches(str(cache)) == [], "its keeper lives"
    abandon(run.made)
    kill_keepers(remove_regions=True)
    [left] = keepers.caches(str(cache))
    assert (left.state, left.pid, left.folder) == ("cached", None, found.cache)
    assert (left.newest_cached, left.not_at_home) == (4, (3, 4))
    home.open()
    store, files = open_store(home.url), files_in(cache)
    seen = recover(store, cache=str(cache), dry_run=True)
    assert (seen.resume.step, seen.resume.tier) == (4, "cache")
    assert files_in(cache) == files
    assert home.steps == [1, 2]
    done = recover(store, cache=str(cache))
    assert not done.failed
    assert home.steps[-1] == 4
    assert flashckpt.verify(home.url).ok
    assert files_in(cache) == []
    again = Training(home.url, cache)
    assert again.resumed == (4, "local")
    again.made.close()


def test_recover_with_the_same_snapshot_in_memory_and_cache(
    run: Training, home: Home, cache: Path, runtime: Path, kill_keepers: Callable[..., None]
) -> None:
    abandon(run.made)
    kill_keepers()
    home.open()
    done = recover(open_store(home.url), cache=str(cache))
    assert not done.failed
    outcomes = {(each.step, each.outcome) for each in done.findings if each.step == 4}
    assert outcomes == {(4, Fate.COMMITTED)}
    assert home.steps[-1] == 4
    assert files_in(cache) == []
    assert not list(runtime.rglob("slot-*"))


def test_recover_lets_a_damaged_cached_snapshot_and_a_file_that_is_no_slot_go(
    left: None, home: Home, cache: Path
) -> None:
    oldest, *_, newest = slots_in(cache)
    flip(oldest, 0)
    flip(newest, image_of(newest))
    files = files_in(cache)
    seen = recover(open_store(home.url), cache=str(cache), dry_run=True)
    assert files_in(cache) == files
    assert seen.resume.step == 3
    done = recover(open_store(home.url), cache=str(cache))
    for report in (seen, done):
        fates = [(each.step, each.outcome) for each in report.findings if each.step in (None, 4)]
        assert sorted(fates, key=str) == [(4, Fate.TORN), (None, Fate.TORN)]
    assert home.steps == [1, 2, 3]
    assert flashckpt.verify(home.url).ok
    assert files_in(cache) == []


def test_recover_leaves_a_cached_file_that_cannot_be_read(
    left: None, home: Home, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = slots_in(cache)[-1]

    def failing(path: str, identity: bytes | None = None) -> Slot:
        if path == str(newest):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return open_cached(path, identity)

    with monkeypatch.context() as patch:
        patch.setattr("flashckpt.recovery.recover.open_cached", failing)
        done = recover(open_store(home.url), cache=str(cache))
    assert [each.outcome for each in done.findings if each.step is None] == [Fate.FAILED]
    assert newest in files_in(cache)
    recover(open_store(home.url), cache=str(cache))
    assert home.steps[-1] == 4
