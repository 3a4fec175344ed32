"""An object store fails when the run ends: the keeper keeps only what is not committed, for the grace."""

from pathlib import Path

import pytest

import flashckpt
from flashckpt.errors import PersistError
from flashckpt.recovery.recover import recover
from flashckpt.store import open_store
from tests.cache.conftest import home
from tests.cache.home import Home
from tests.cache.loop import Training
from tests.processes import keepers_of
from tests.waiting import until

__all__ = ["home"]

pytestmark = pytest.mark.process

GRACE = flashckpt.Options(grace="2s")


def slots_of(runtime: Path) -> list[str]:
    """The slots in files."""
    return [path.name for path in runtime.rglob("slot-*")]


def test_it_leaves_an_uncommitted_snapshot_in_its_file_for_recover(home: Home, runtime: Path) -> None:
    run = Training(home.url, None, options=GRACE)
    run.train(2, saves=True)
    run.made.wait()
    assert len(slots_of(runtime)) > 1
    home.proxy.fault = lambda request: "refuse"
    run.train(3)
    with pytest.raises(PersistError, match="flashckpt recover"):
        run.made.close()
    until(lambda: len(slots_of(runtime)) == 1, "the end of the slots of committed steps")
    until(lambda: not keepers_of(runtime), "the keeper's end")
    [slot] = slots_of(runtime)
    [log] = runtime.rglob("keeper.log")
    assert "step 3 is not committed: the run has ended, and its storage fails" in log.read_text()
    home.open()
    report = recover(open_store(home.url))
    assert [(each.place, each.step) for each in report.findings] == [(slot, 3)]
    assert home.steps[-1] == 3
    assert slots_of(runtime) == []


@pytest.mark.long
def test_it_stays_with_a_snapshot_that_would_end_with_it(
    home: Home, runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHCKPT_RUNTIME", str(tmp_path))
    run = Training(home.url, None, options=GRACE)
    run.train(2, saves=True)
    run.made.wait()
    assert not slots_of(tmp_path), "memfds"
    home.proxy.fault = lambda request: "refuse"
    run.train(3)
    with pytest.raises(PersistError):
        run.made.close()
    refused = len(home.proxy.requests)
    # Each try of a client comes later than the one before: these take longer than the grace.
    until(lambda: len(home.proxy.requests) > refused + 40, "further tries")
    assert keepers_of(tmp_path)
    home.open()
    until(lambda: not keepers_of(tmp_path), "the keeper's end")
    assert home.steps[-1] == 3
