"""`wait()` of a job that another one has taken the run from."""

import os
import signal
from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt.store import open_store
from tests import run_view
from tests.checkpointer.test_loop import Job
from tests.processes import is_stopped, keepers_of
from tests.waiting import abandon, until


def stopped(runtime: Path) -> list[int]:
    return [pid for pid in keepers_of(runtime) if is_stopped(pid)]


def test_it_does_not_say_that_a_step_is_safe_which_the_next_attempt_may_not_see(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper stands still before its part, while a job elsewhere takes the run over."""
    run, job = str(tmp_path / "run"), Job()
    monkeypatch.setenv("FLASHCKPT_CRASH_AT", "part.checked:1:stop")
    checkpointer = flashckpt.attach(run, every=None, persist_every=None, **job.named)
    monkeypatch.delenv("FLASHCKPT_CRASH_AT")
    job.train(torch.ones(2, 4))
    checkpointer.step()
    checkpointer.save()
    until(lambda: stopped(runtime), "a keeper before its part")
    newer = run_view.supersede(open_store(run))
    [keeper] = stopped(runtime)
    os.kill(keeper, signal.SIGCONT)
    with pytest.raises(flashckpt.SupersededError, match=str(newer)):
        checkpointer.wait()
    abandon(checkpointer)


@pytest.mark.usefixtures("runtime")
def test_what_was_resumed_from_is_not_called_safe_either(tmp_path: Path) -> None:
    """It was in memory, and may be visible to the next attempt under another attempt's name, or not."""
    run, job = str(tmp_path / "run"), Job()
    for number in range(2):
        checkpointer = flashckpt.attach(run, every=None, persist_every=None, **job.named)
        if number == 0:
            job.train(torch.ones(2, 4))
            checkpointer.step()
            checkpointer.save()
            abandon(checkpointer)
    assert checkpointer.resumed.tier == "memory"
    checkpointer.wait()
    newer = run_view.supersede(open_store(run))
    with pytest.raises(flashckpt.SupersededError, match=str(newer)):
        checkpointer.wait()
    abandon(checkpointer)
