"""Two jobs that want one run, and a keeper that comes too late to commit."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashckpt.store import open_store
from tests import run_view
from tests.crash.job import LIMIT_S, Job, none
from tests.processes import end, keepers_of
from tests.waiting import until
from tests.zygote import Zygote


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """The runtime folder of another node."""
    folder = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir="/dev/shm"))
    yield folder
    end(keepers_of(folder))
    shutil.rmtree(folder)


@pytest.mark.parametrize("point", ["write.written", "part.checked", "part.linked", "manifest.checked"])
def test_a_keeper_that_goes_on_after_its_step_was_pruned(
    point: str, tmp_path: Path, runtime: Path, elsewhere: Path, zygote: Zygote, reference: list[int]
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
    job.runtime = elsewhere
    none(job.finish())
    before = run_view.endings(open_store(str(job.run)))

    job.runtime = runtime
    os.kill(late, signal.SIGCONT)
    until(lambda: _ledger_names(job.run, "superseded"), "the late keeper's word", LIMIT_S)
    none(job.faults())
    assert job.visible()[-1] == len(reference) - 1
    after = run_view.endings(open_store(str(job.run)))
    assert {attempt: after[attempt] for attempt in before} == before


def _ledger_names(run: Path, what: str) -> bool:
    return any(f'"what":"{what}"' in path.read_text() for path in (run / "events").glob("*.jsonl"))


@pytest.mark.parametrize("round_", range(4))
def test_two_jobs_race_for_one_claim(
    round_: int, tmp_path: Path, runtime: Path, zygote: Zygote, reference: list[int]
) -> None:
    """One trains as if it were alone, the other is told who has the run."""
    (tmp_path / "other").mkdir()
    one, other = (
        Job(zygote, tmp_path, runtime, reference),
        Job(zygote, tmp_path / "other", runtime, reference),
    )
    other.run = one.run
    for each in (one, other) if round_ % 2 else (other, one):
        each.start(hold=(5, str(tmp_path / "release")))
    until(lambda: not (one.lives_on() and other.lives_on()), "one of the two to be refused", LIMIT_S)
    loser, winner = (one, other) if other.lives_on() else (other, one)
    assert loser.status() == 1
    assert "RunHeldError" in loser.said
    (tmp_path / "release").touch()
    none(winner.finish())
    assert "Error" not in winner.said
