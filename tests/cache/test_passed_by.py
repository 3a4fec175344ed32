"""A cache that cannot be used is no error of the run: one line says why, and snapshots are persisted from
memory as without one. tests/keeper/test_keeper_cache.py has more reasons."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import flashckpt
from tests.cache.home import cached_steps, files_in
from tests.cache.loop import Training
from tests.events import ledger
from tests.waiting import until

pytestmark = pytest.mark.process


def errors(run: Path) -> list[str]:
    return [each["message"] for each in ledger(run) if each["event"] == "error" and each["what"] == "cache"]


def check_passed_by(run: Path, cache: Path, why: str, **options: object) -> None:
    """Train with this cache: all is committed, and the ledger has the reason."""
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


def readable_by_all(cache: Path) -> Path:
    own = cache / f"flashckpt-{os.geteuid()}"
    own.mkdir()
    own.chmod(0o777)
    return cache


def not_there(cache: Path) -> Path:
    """As below the mount point of a disk that is not mounted."""
    return cache / "cache"


@pytest.mark.every_set
@pytest.mark.parametrize(
    ("made", "why"), [(not_there, "No such file"), (readable_by_all, "is not this user's alone")]
)
def test_a_folder_that_cannot_be_a_cache(
    made: Callable[[Path], Path], why: str, tmp_path: Path, cache: Path, runtime: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    check_passed_by(tmp_path / "run", made(cache), why)
    said = [each.message for each in caplog.records if "bypass the cache" in each.message]
    assert len(said) == 1


@pytest.mark.parametrize("is_full", [True, False])
def test_a_disk_that_is_full_or_read_only(
    tmp_path: Path, small_disk: Path, runtime: Path, is_full: bool
) -> None:
    (small_disk / "cache").mkdir()
    if is_full:  # 8 MiB in all: one snapshot of 8 MiB does not fit
        check_passed_by(tmp_path / "run", small_disk / "cache", "does not fit", numbers=2 << 20)
        assert files_in(small_disk) == []
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        check_passed_by(tmp_path / "run", small_disk / "cache", "Read-only file system")


def test_a_limit_for_one_snapshot_holds_the_newest(tmp_path: Path, cache: Path, runtime: Path) -> None:
    run = Training(tmp_path / "run", cache, options=flashckpt.Options(cache_limit="4MiB"))
    for step in range(1, 5):
        run.train(step, saves=True)
        run.made.wait()
        until(lambda step=step: cached_steps(cache) == [step], "the newest step alone in the cache")  # type: ignore[misc]
        assert sum(path.stat().st_blocks * 512 for path in files_in(cache)) <= 4 << 20
    run.made.close()
    assert errors(tmp_path / "run") == []
