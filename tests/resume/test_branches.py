"""Going back to an older step, and being killed before and after: no step of what was left is seen again."""

from pathlib import Path

import flashckpt
from flashckpt.store import open_store
from tests import run_view
from tests.resume.training import Trainer, last_of_each, uninterrupted
from tests.waiting import until


def test_a_branch_is_what_every_later_start_sees(tmp_path: Path, runtime: Path) -> None:
    """Twice over: branch, be killed before the first commit of the branch, go on, be killed after one."""
    expected = uninterrupted(tmp_path, runtime, "plain")
    job = Trainer(tmp_path, runtime, "plain", persist_every=3)
    # On a busy machine nothing is persisted before the first kill: each kill commits one step.
    for killed_in in (5, 11):
        job.kill_in_step(killed_in)
        until(
            lambda step=killed_in: job.run.exists() and flashckpt.steps(job.run)[-1:] == [step],
            "the dead trainer's newest snapshot to be committed",
        )

    for _ in range(2):
        back = flashckpt.steps(job.run)[-2]
        before_commit, after_commit = back + 1, back + 4
        made = flashckpt.branch(job.run, back)
        assert str(run_view.newest_attempt(open_store(job.run))) == made
        assert flashckpt.steps(job.run)[-1] == back, "what the abandoned branch has done is not seen"
        job.log.unlink()
        job.kill_in_step(before_commit)
        assert job.records()[0][0] == back
        job.kill_in_step(after_commit)
        assert back <= job.resumed_steps()[-1] <= before_commit
        until(lambda last=after_commit: flashckpt.steps(job.run)[-1:] == [last], "the branch's newest commit")
        assert last_of_each(job.records()).items() <= expected.items()
    job.finish()
    assert flashckpt.steps(job.run)[-1] == len(expected)
    assert flashckpt.verify(job.run).ok
