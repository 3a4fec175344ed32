"""Ranks that do not come to attach are named to those that have, before any collective."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, PrefixStore, TCPStore

from flashckpt.errors import RunError
from flashckpt.ranks import job
from flashckpt.ranks.job import arrive_at
from tests.ranks.together import HOST, LIMIT_S, on_threads

WORLD = 3
Stores = Callable[[], Any]


@pytest.fixture(params=["tcp", "file"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    """Each rank's own, of one place."""
    if request.param == "file":
        return lambda: PrefixStore("default_pg", FileStore(str(tmp_path / "store"), WORLD))
    served = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    return lambda: PrefixStore("default_pg", TCPStore(HOST, served.port, is_master=False) if served else None)


def arrived(stores: Stores, *ranks: int, timeout_s: float = LIMIT_S) -> list[Exception | None]:
    """What each of these ranks has raised."""
    found: dict[int, Exception | None] = {}

    def run(rank: int) -> None:
        try:
            arrive_at(stores(), 0, rank, WORLD, timeout_s)
            found[rank] = None
        except Exception as error:
            found[rank] = error

    on_threads(run, ranks)
    return [found[rank] for rank in ranks]


def test_all_that_come_go_on(stores: Stores) -> None:
    assert arrived(stores, 0, 1, 2) == [None] * WORLD


def test_who_does_not_come_is_named_and_another_call_may_follow(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(job, "WORD_AFTER_S", 0.1)
    monkeypatch.setattr(job, "_ARRIVAL_WAIT_S", 0.1)
    with caplog.at_level(logging.WARNING):
        found = arrived(stores, 0, 2, timeout_s=2.0)
    said = "rank 1 of the default process group did not call it"
    assert said in caplog.text, "it is said early"
    for error in found:
        assert type(error) is RunError
        assert said in str(error)
        assert "Every rank must call it" in str(error)
    # What was left in the store by them is no answer to those that come then.
    assert arrived(stores, 0, 1, 2) == [None] * WORLD


def test_rank_0_that_does_not_come_is_named(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_ARRIVAL_WAIT_S", 0.1)
    for error in arrived(stores, 1, 2, timeout_s=0.5):
        assert type(error) is RunError
        assert "rank 0 of the default process group did not call it" in str(error)


def test_of_a_call_that_others_gave_up_who_comes_later_waits_for_the_next(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_ARRIVAL_WAIT_S", 0.1)
    [error] = arrived(stores, 0, timeout_s=0.3)
    assert type(error) is RunError
    later = threading.Thread(target=lambda: arrived(stores, 1, 2), daemon=True)
    later.start()
    store = stores()
    store.wait(["flashckpt/attach/0/1", "flashckpt/attach/0/2"])
    time.sleep(0.3)
    assert later.is_alive(), "the answer was to an earlier call"
    assert arrived(stores, 0) == [None]
    later.join(LIMIT_S)
    assert not later.is_alive()
