"""A keeper that is stopped, replaced, and goes on afterwards; a keeper that is killed again and again."""

import os
import signal
from pathlib import Path

import flashckpt
from tests.faults.training import training
from tests.processes import end, keepers_of
from tests.waiting import until


def test_a_stopped_keeper_that_goes_on_after_its_replacement_wrote(tmp_path: Path, runtime: Path) -> None:
    run = tmp_path / "run"
    with training(run) as trained:
        # The trainer replaces a keeper that is silent for one second, not for half a minute.
        client = trained.checkpointer._session.keeper
        client._timeout_s = 1.0
        client._peer.settimeout(1.0)
        [old] = keepers_of(runtime)
        os.kill(old, signal.SIGSTOP)
        trained.goes_on()
        step = trained.save()
        trained.checkpointer.wait()
        assert flashckpt.steps(run)[-1] == step
        assert len(keepers_of(runtime)) == 2
        os.kill(old, signal.SIGCONT)
        until(lambda: old not in keepers_of(runtime), "the deposed keeper to end")
        trained.recovers()
    until(lambda: not keepers_of(runtime), "the keeper to leave")
    assert flashckpt.verify(run).ok


def test_a_keeper_killed_again_and_again(tmp_path: Path, runtime: Path) -> None:
    with training(tmp_path / "run") as trained:
        for _ in range(2):
            end(keepers_of(runtime))
            trained.goes_on()
            trained.recovers()
        assert trained.checkpointer.report()["keeper_restarts"] >= 2
