"""A cache that cannot be used is no error of the run: one line says why, and snapshots are persisted from
memory as without one."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import flashckpt
from flashckpt.commit.view import open_run
from flashckpt.memory.cache_folder import LOCK_NAME
from flashckpt.memory.runtime import identity_of
from flashckpt.store import open_store
from tests.cache.home import cached_steps, files_in
from tests.cache.loop import Training
from tests.events import ledger
from tests.waiting import until

pytestmark = pytest.mark.process


def folder_of(run: Path, cache: Path) -> Path:
    """The run's folder in a cache. Makes the run."""
    store = open_store(run)
    identity = identity_of(open_run(store, create=True).run_id, store.place())
    return cache / f"flashckpt-{os.geteuid()}" / identity


def errors(run: Path) -> list[str]:
    return [each["message"] for each in ledger(run) if each["event"] == "error" and each["what"] == "cache"]


def check_passed_by(run: Path, cache: Path, why: str, **options: object) -> None:
    """Train with this cache: all is committed, the trainer warns once and the ledger has the reason."""
    trained = Training(run, cache, **options)
    trained.train(2)
    for _ in range(2):
        trained.made.save()
        trained.made.wait()
        trained.train(trained.made.completed + 1)
    trained.made.close()
    assert flashckpt.steps(run)[-1] == 4
    assert flashckpt.verify(run).ok
    assert any(why in each for each in errors(run)), errors(run)


def a_file(run: Path, cache: Path) -> Path:
    cache.rmdir()
    cache.write_text("")
    return cache


def a_link(run: Path, cache: Path) -> Path:
    (cache / "elsewhere").mkdir()
    (cache / f"flashckpt-{os.geteuid()}").symlink_to("elsewhere")
    return cache


def of_another_user(run: Path, cache: Path) -> Path:
    own = cache / f"flashckpt-{os.geteuid()}"
    own.mkdir(0o700)
    try:
        os.chown(own, 65534, 65534)
    except PermissionError:
        pytest.skip("only root can give a folder away")
    return cache


def readable_by_all(run: Path, cache: Path) -> Path:
    own = cache / f"flashckpt-{os.geteuid()}"
    own.mkdir()
    own.chmod(0o777)
    return cache


def not_there(run: Path, cache: Path) -> Path:
    """As below the mount point of a disk that is not mounted."""
    return cache / "cache"


def on_the_runs_disk(run: Path, cache: Path) -> Path:
    (run.parent / "cache").mkdir()
    return run.parent / "cache"


BAD: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "a file": (a_file, "it is not a folder"),
    "a link": (a_link, "is not this user's alone"),
    "another user's": (of_another_user, "is not this user's alone"),
    "open to all": (readable_by_all, "is not this user's alone"),
    "not there": (not_there, "No such file"),
    "the same disk": (on_the_runs_disk, "is on the same disk"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_folder_that_cannot_be_a_cache(
    what: str, tmp_path: Path, cache: Path, runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, why = BAD[what]
    check_passed_by(tmp_path / "run", made(tmp_path / "run", cache), why)
    said = [each.message for each in caplog.records if "bypass the cache" in each.message]
    assert len(said) == 1
    if cache.is_file():
        cache.unlink()


def test_a_disk_that_is_full(tmp_path: Path, small_disk: Path, runtime: Path) -> None:
    # 8 MiB in all: one snapshot of 8 MiB does not fit.
    (small_disk / "cache").mkdir()
    check_passed_by(tmp_path / "run", small_disk / "cache", "does not fit", numbers=2 << 20)
    assert files_in(small_disk) == []


def test_a_disk_that_cannot_be_written(tmp_path: Path, small_disk: Path, runtime: Path) -> None:
    (small_disk / "cache").mkdir()
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True)
    check_passed_by(tmp_path / "run", small_disk / "cache", "Read-only file system")


@pytest.mark.parametrize("limit", [100_000, "1MiB"])
def test_a_limit_that_is_less_than_a_snapshot(
    tmp_path: Path, cache: Path, runtime: Path, limit: int | str
) -> None:
    options = flashckpt.Options(cache_limit=limit)
    check_passed_by(tmp_path / "run", cache, "cache_limit", options=options)
    assert files_in(cache) == []


def test_a_limit_for_one_snapshot_holds_the_newest(tmp_path: Path, cache: Path, runtime: Path) -> None:
    run = Training(tmp_path / "run", cache, options=flashckpt.Options(cache_limit="4MiB"))
    for step in range(1, 6):
        run.train(step, saves=True)
        run.made.wait()
        until(lambda step=step: cached_steps(cache) == [step], "the newest step alone in the cache")  # type: ignore[misc]
        assert sum(path.stat().st_blocks * 512 for path in files_in(cache)) <= 4 << 20
    run.made.close()
    assert errors(tmp_path / "run") == []


@pytest.mark.long
def test_another_keeper_that_holds_the_folder(tmp_path: Path, cache: Path, runtime: Path) -> None:
    folder = folder_of(tmp_path / "run", cache)
    folder.parent.mkdir(mode=0o700)
    folder.mkdir(mode=0o700)
    with open(folder / LOCK_NAME, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check_passed_by(tmp_path / "run", cache, "Another keeper of this run uses")


def test_a_cache_that_is_removed_in_a_run(tmp_path: Path, cache: Path, runtime: Path) -> None:
    run = Training(tmp_path / "run", cache)
    run.train(3, saves=True)
    until(lambda: cached_steps(cache)[-1:] == [3], "step 3 in the cache")
    subprocess.run(["rm", "-rf", str(folder_of(tmp_path / "run", cache).parent)], check=True)
    run.train(5, saves=True)
    run.made.close()
    assert flashckpt.steps(tmp_path / "run")[-1] == 5
    assert flashckpt.verify(tmp_path / "run").ok


def test_two_runs_have_one_cache(tmp_path: Path, cache: Path, runtime: Path) -> None:
    runs = [Training(tmp_path / name, cache) for name in ("one", "two")]
    for run in runs:
        run.train(3, saves=True)
    folders = [folder_of(tmp_path / name, cache) for name in ("one", "two")]
    for folder in folders:
        until(lambda folder=folder: cached_steps(folder)[-1:] == [3], "step 3")  # type: ignore[misc]
    runs[0].made.close()
    until(lambda: not folders[0].exists(), "the end of the first run's folder")
    assert cached_steps(folders[1])[-1:] == [3]
    runs[1].made.close()
    for name in ("one", "two"):
        assert errors(tmp_path / name) == []
