"""The core's tests of crashes and of exact resume, with the run on a real S3 server: the same code, another
place. All of them: `make test-s3`; a few of each with all other tests."""

from __future__ import annotations

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

pytestmark = pytest.mark.process

# What a commit has left at its two ends, and the death of a trainer before its keeper hears of it.
_FEW = {("part.linked", "both"), ("manifest.linked", "who is there"), ("start.written", "both")}


def _marked(few: bool, *values: str) -> object:
    return pytest.param(*values, marks=() if few else pytest.mark.long)


@pytest.mark.parametrize(("point", "victim"), [_marked(case in _FEW, *case) for case in CASES])
def test_killed_at_a_point(
    point: str, victim: str, bucket: str, in_environment: None, tmp_path: Path, runtime: Path, zygote: Zygote,
    reference: list[int],
) -> None:  # fmt: skip
    job = Job(zygote, tmp_path, runtime, reference, f"s3://{bucket}/run")
    faults = faults_of_a_kill(job, point, victim, tmp_path / "release")
    assert not faults, "\n".join(faults)
    assert not job.run.exists(), "nothing of the run is here"


@pytest.mark.parametrize("recipe", [_marked(recipe == "epochs", recipe) for recipe in sorted(RECIPES)])
def test_killed_run_equals_uninterrupted_run(
    recipe: str, bucket: str, in_environment: None, tmp_path: Path, runtime: Path, references: References
) -> None:
    reference = references(recipe)
    assert after_a_kill(UrlTrainer(f"s3://{bucket}/run", tmp_path, runtime, recipe)) == reference


@pytest.mark.long  # the contract has it, too
@pytest.mark.parametrize("recipe", ["workers", "epochs", "accumulation"])
def test_resume_from_storage_equals_uninterrupted_run(
    recipe: str, bucket: str, in_environment: None, tmp_path: Path, runtime: Path, references: References,
    kill_keepers: Callable[..., None],
) -> None:  # fmt: skip
    reference = references(recipe)
    trainer = UrlTrainer(f"s3://{bucket}/run", tmp_path, runtime, recipe)
    assert after_memory_is_lost(trainer, kill_keepers) == reference
