"""Two jobs that want one run, and a keeper that comes too late to commit."""

import os
import signal
from pathlib import Path

import pytest

from flashckpt.store import open_store
from tests import run_view
from tests.crash.job import LIMIT_S, Job, none
from tests.events import ledger
from tests.waiting import until
from tests.zygote import Zygote


@pytest.mark.parametrize("point", ["write.written", "part.checked", "part.linked", "manifest.checked"])
def test_a_keeper_that_goes_on_after_its_step_was_pruned(
    point: str, tmp_path: Path, runtime: Path, other_node: Path, zygote: Zygote, reference: list[int]
) -> None:
    """It stands still in the middle of a commit; the job goes on on another node, commits, and prunes."""
    job = Job(zygote, tmp_path, runtime, reference)
    job.start(armed=f"{point}:1:stop")
    until(job.stopped, "the keeper at the point", LIMIT_S)
    late = job.stopped()
    assert late is not None
    assert late != job.trainer
    job.kill_trainer()
    job.expect(memory=True)
    job.expect_exactly(max(job.resumable(), default=0))
    job.runtime = other_node
    none(job.finish())
    before = run_view.endings(open_store(str(job.run)))

    job.runtime = runtime
    os.kill(late, signal.SIGCONT)
    until(lambda: "superseded" in [each.get("what") for each in ledger(job.run)], "its last word", LIMIT_S)
    none(job.faults())
    assert job.visible()[-1] == len(reference) - 1
    after = run_view.endings(open_store(str(job.run)))
    assert {attempt: after[attempt] for attempt in before} == before


@pytest.mark.parametrize("first", ["one", "other"])
def test_two_jobs_race_for_one_claim(
    first: str, tmp_path: Path, runtime: Path, zygote: Zygote, reference: list[int]
) -> None:
    """One trains as if it were alone, the other is told who has the run."""
    (tmp_path / "other").mkdir()
    one, other = (Job(zygote, each, runtime, reference) for each in (tmp_path, tmp_path / "other"))
    other.run, other.url = one.run, one.url
    for each in (one, other) if first == "one" else (other, one):
        each.start(hold=(5, str(tmp_path / "release")))
    until(lambda: not (one.lives_on() and other.lives_on()), "one of the two to be refused", LIMIT_S)
    loser, winner = (one, other) if other.lives_on() else (other, one)
    assert loser.status() == 1
    assert "RunHeldError" in loser.said
    (tmp_path / "release").touch()
    none(winner.finish())
    assert "Error" not in winner.said
