"""Keepers that die over and over, stand still, or cannot be told, and writes that fail: nothing is lost."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import flashckpt
from flashckpt.commit import attempts
from flashckpt.keeper import start
from flashckpt.memory.region import is_region_name
from flashckpt.persist.job import pause_s
from flashckpt.store import open_store
from tests import run_view
from tests.events import ledger
from tests.keeper.driver import eventually, kill_keeper, the_keeper
from tests.keeper.fake import keeper_pid
from tests.memory.mounts import small_tmpfs
from tests.processes import end, keepers_of
from tests.waiting import abandon, newest_sealed, until, until_slots

STARTS = 20


def attached(run: Path, **options: object) -> flashckpt.Checkpointer:
    given = flashckpt.Options(**options)  # type: ignore[arg-type]
    return flashckpt.attach(run, every=1, persist_every=None, options=given, model=nn.Linear(600, 600))


def in_a_pause(checkpointer: flashckpt.Checkpointer) -> None:
    """The keeper is dead, and the next one would have to wait, as after many that died."""
    client = checkpointer._session.keeper
    for _ in range(STARTS):
        client._pauses.started()
    kill_keeper(client._runtime)
    warned = checkpointer._keeper_link._warned
    until(lambda: any("the keeper cannot be asked" in each for each in warned), "a round without a keeper")
    assert keeper_pid(client._runtime) is None


def captured(checkpointer: flashckpt.Checkpointer) -> None:
    """A step that is sealed, and that nobody has asked to persist."""
    checkpointer.step()
    until_slots(checkpointer)
    checkpointer.step()
    until(lambda: newest_sealed(checkpointer) == 2, "a sealed snapshot")


def test_a_write_that_failed_for_days_is_still_tried_again() -> None:
    assert [pause_s(tries) for tries in (1, 2, 3, 9, 10)] == [1, 2, 4, 256, 300]
    assert all(pause_s(tries) == 300 for tries in range(10, 5000))


def test_who_waits_does_not_sit_out_a_pause(
    run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(run, grace="240s") as checkpointer:
        captured(checkpointer)
        # Longer than any wait: on a busy machine a grace that is shorter than a real pause may be over before
        # a keeper has come.
        monkeypatch.setattr(start, "LONGEST_PAUSE_S", 2.0**10)
        in_a_pause(checkpointer)
        checkpointer.wait()
        assert flashckpt.steps(run) == [2]


def test_a_run_that_ends_in_a_pause_leaves_a_keeper(run: Path, runtime: Path) -> None:
    """After its end nobody would start one; and in memory without a name only a keeper keeps anything."""
    with small_tmpfs(2 << 20) as base:
        os.environ["FLASHCKPT_RUNTIME"] = str(base)  # the fixture puts it back
        try:
            checkpointer = attached(run)
            captured(checkpointer)
            assert not any(map(is_region_name, checkpointer._session.runtime.names()))
            in_a_pause(checkpointer)
            abandon(checkpointer)
            eventually(lambda: flashckpt.steps(run) == [2])
        finally:
            end(keepers_of(base))


def test_a_job_elsewhere_is_refused_while_the_keeper_stands_still(
    run: Path, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper that is stopped, or swapped out, is no dead trainer: the next one moves the counter."""
    run_view.watch_for(60.0, monkeypatch.setattr)
    store = open_store(str(run))
    elsewhere = replace(attempts.local_owner(str(tmp_path), "trainer-1"), boot_id="other", host="other")
    with attached(run) as checkpointer:
        client = checkpointer._session.keeper
        client._timeout_s = 1.0
        until(lambda: client._peer is not None, "a connection")
        client._peer.settimeout(1.0)  # type: ignore[union-attr]
        pid = the_keeper(client._runtime)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(flashckpt.RunHeldError, match=str(checkpointer._session.attempt)):
            attempts.check_not_held(store, elsewhere)
        assert keeper_pid(client._runtime) != pid


@pytest.mark.parametrize("in_order", [True, False])
def test_a_run_that_ends_while_its_keeper_is_stopped(in_order: bool, run: Path, runtime: Path) -> None:
    checkpointer = flashckpt.attach(run, every=1, persist_every=None, model=nn.Linear(60, 60))
    checkpointer.step()
    until_slots(checkpointer)
    checkpointer.step()
    checkpointer.wait()
    pid = keeper_pid(checkpointer._session.runtime)
    assert pid is not None
    keeper_link, line = checkpointer._keeper_link, checkpointer._session.keeper
    os.kill(pid, signal.SIGSTOP)
    try:

        def is_asking() -> bool:
            keeper_link.wake()
            if line._lock.acquire(blocking=False):
                line._lock.release()
                return False
            return True

        asked = keeper_link._rounds
        until(lambda: is_asking() and keeper_link._rounds == asked, "a question to the keeper")
        keeper_link.timeout_s = 1.0
        checkpointer._release(closed=in_order)
    finally:
        os.kill(pid, signal.SIGCONT)
    # What the end of the process closes otherwise.
    until(lambda: not keeper_link._thread.is_alive(), "the end of the keeper_link")
    keeper_link.slots.close()
    checkpointer._session.keeper.close()
    end = "close" if in_order else "death"
    eventually(lambda: [each for each in ledger(run) if each["event"] == end and each.get("pid")])
    if in_order:
        eventually(lambda: keepers_of(runtime) == [])
        assert not list(runtime.glob("*/*/*"))
    else:
        assert keepers_of(runtime) == [pid]
