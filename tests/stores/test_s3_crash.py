"""The core tests of crashes and exact resume, with the run on a real S3 server: `make test-s3`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.run_contract import UrlTrainer
from tests.crash.conftest import reference
from tests.crash.job import Job
from tests.crash.test_points import CASES, faults_of_a_kill
from tests.resume.recipes import RECIPES
from tests.resume.test_resume_exact import References, after_a_kill, after_memory_is_lost, references
from tests.zygote import Zygote

__all__ = ["reference", "references"]

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


# `make test` runs the first alone.
FIRST = ("part.linked", "both", False)
# With a cache, a start reads its step from there.
ALL = {(*case, False) for case in CASES} | {(*case, True) for case in CASES if case[0] != "resume.read"}


@pytest.mark.parametrize(("point", "victim", "is_cached"), [FIRST, *sorted(ALL - {FIRST})])
def test_killed_at_a_point(
    point: str, victim: str, is_cached: bool, bucket: str, in_environment: None, tmp_path: Path,
    runtime: Path, zygote: Zygote, reference: list[int], cache: Path,
) -> None:  # fmt: skip
    url = f"s3://{bucket}/run"
    job = Job(zygote, tmp_path, runtime, reference, url, cache if is_cached else None)
    faults = faults_of_a_kill(job, point, victim, tmp_path / "release")
    assert not faults, "\n".join(faults)
    assert not job.run.exists(), "nothing of the run is here"


@pytest.mark.long  # RunContract in test_s3_run.py kills one recipe
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_killed_run_equals_uninterrupted_run(
    recipe: str, bucket: str, in_environment: None, tmp_path: Path, runtime: Path, references: References
) -> None:
    reference = references(recipe)
    assert after_a_kill(UrlTrainer(f"s3://{bucket}/run", tmp_path, runtime, recipe)) == reference


@pytest.mark.long
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_resume_from_a_cache_equals_uninterrupted_run(
    recipe: str, bucket: str, in_environment: None, tmp_path: Path, runtime: Path, references: References,
    kill_keepers: Callable[..., None], cache: Path,
) -> None:  # fmt: skip
    reference = references(recipe)
    trainer = UrlTrainer(f"s3://{bucket}/run", tmp_path, runtime, recipe)
    trainer.options["cache"] = str(cache)
    assert after_memory_is_lost(trainer, kill_keepers, "cache") == reference
