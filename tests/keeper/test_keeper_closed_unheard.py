"""A run that ends in order while its keeper cannot be told: the keeper learns it all the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from torch import nn

import flashckpt
from tests.events import ledger
from tests.keeper.driver import eventually
from tests.keeper.fake import keeper_pid
from tests.processes import keepers_of
from tests.waiting import until, until_slots


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
