"""A job that dies again and again before it commits anything: what it leaves on disk stays little."""

import os
from pathlib import Path

import pytest

from tests.crash import tiny
from tests.crash.job import LIMIT_S, Job, none
from tests.waiting import until
from tests.zygote import Zygote

LIVES = 12


@pytest.mark.parametrize("point", ["write.written", "capture.begun", "start.written", "attempt.reserved"])
def test_files_do_not_grow_with_lives(
    point: str, tmp_path: Path, runtime: Path, zygote: Zygote, reference: list[int]
) -> None:
    """Trainer and keeper are killed at the point or just after; every other time memory goes."""
    job, sizes, attempts = Job(zygote, tmp_path, runtime, reference), [], set[str]()
    for life in range(LIVES):
        job.start(armed=point)
        if point == "write.written":
            until(lambda: job.boundaries() > 1 or job.ended(), "a boundary", LIMIT_S)
            job.kill_trainer()
        else:
            until(job.ended, "the death of the trainer", LIMIT_S)
            assert job.status() < 0
        job.kill_keepers()
        if life % 2:
            job.forget_memory()
        files = [name for folder, _, names in os.walk(job.run) if "events" not in folder for name in names]
        sizes.append(len(files))
        alive = {path.name for path in (job.run / "alive").glob("[0-9]*")}
        attempts |= alive
    assert max(sizes[LIVES - 3 :]) <= 24, sizes
    if point in ("write.written", "capture.begun"):  # where there was a keeper, which deletes
        assert len(alive) <= 10, alive
    assert len(attempts) == LIVES, "no name comes again"
    none(job.faults())
    job.expect_exactly(0)
    job.forget_memory()
    none(job.finish())


@pytest.mark.long
def test_a_keeper_that_dies_before_each_manifest_fills_no_storage(
    tmp_path: Path, runtime: Path, zygote: Zygote, reference: list[int]
) -> None:
    """In each life a snapshot gets all its parts, and no manifest; then memory goes, too."""
    job, sizes = Job(zygote, tmp_path, runtime, reference), []
    for _ in range((len(reference) - 1) // tiny.PERSIST_EVERY - 1):
        before = set(job.resumable())
        job.start(armed="part.linked")
        job.await_(lambda before=before: set(job.resumable()) - before)  # type: ignore[misc]
        none(job.faults())
        job.kill_trainer()
        job.kill_keepers()
        job.forget_memory()
        job.expect(memory=False)
        sizes.append(sum(len(names) for _, _, names in os.walk(job.run / "data")))
    # A manifest, a part and a shard of each: the step in flight, those that retention keeps, and what the
    # keeper had not deleted yet when it died.
    assert max(sizes) <= 3 * (tiny.KEPT + 3) < 3 * len(sizes), sizes
    none(job.finish())
