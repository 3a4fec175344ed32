"""`flashckpt.accelerate.attach`, and prepared loaders in a plain loop: killed and resumed bit for bit."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import harness
from tests.integrations.harness import Cases
from tests.integrations.job import KILLED, STEP, Kill

MODULE = "tests.integrations.accelerate.cases"
IMPORTED, OLDER = (MODULE,), "1.14"
CASES: dict[str, dict[str, Any]] = {
    "dispatched": {"accumulated": 2, "stream": True},
    "seeded": {"seedable": True},
    "workers": {"accumulated": 3, "workers": 2},
    "stream": {"accumulated": 2, "stream": True, "dispatch": False},
    "stateful": {"accumulated": 2, "stateful": True},
    "stateful stream": {"accumulated": 2, "stateful": True, "stream": True},
    # Random numbers that are drawn inside of its workers are lost, as in a plain loop; the order of a shuffle
    # is drawn in prepare().
    "stateful workers": {"accumulated": 2, "stateful": True, "workers": 2, "augment": False, "ordered": True},
    "left early": {"accumulated": 2, "leave_after": 4, "seedable": True},
    "plain loop": {"accumulated": 1, "plain_loop": True, "seedable": True},
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_continues_after_kills(cases: Cases, name: str) -> None:
    _, killed = cases.check("train", **CASES[name])
    assert sum(killed.iterations(number)[:1] == [1] for number in range(len(killed.ends))) < 4


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_release_before(tmp_path: Path, runtime: Path) -> None:
    releases = [f"accelerate=={OLDER}.*"]
    harness.check_older(releases, f"{MODULE}:names", f"{MODULE}:train", tmp_path, runtime)


@pytest.mark.long
def test_several_models_and_loaders(cases: Cases) -> None:
    cases.check("several")


@pytest.mark.long
def test_a_terminated_run_repeats_nothing(cases: Cases) -> None:
    stopped = cases.check_terminated("train", accumulated=2, seedable=True)
    assert {end for ends in stopped.ends for end in ends} == {0, -signal.SIGTERM}


@pytest.mark.dist
@pytest.mark.parametrize(
    "options",
    [
        {"accumulated": 2, "rows": 40},
        # The last batch of an epoch has three rows for two ranks.
        {"accumulated": 2, "rows": 43, "stream": True},
        {"rows": 40, "stream": True, "dispatch": False},
        # A rank that only receives draws seeds for new workers in each epoch; plain Accelerate does so once.
        {"rows": 43, "dispatch": True, "workers": 2, "persistent": True, "plain": False},
    ],
    ids=["shard", "dispatched", "stream", "persistent workers"],
)
def test_two_ranks(cases: Cases, options: dict[str, Any]) -> None:
    cases.check("train", ranks=2, **options)


def test_random_numbers_in_the_workers_of_a_stateful_loader_are_warned_of(cases: Cases) -> None:
    run = cases.run("train", stateful=True, workers=1, epochs=1)
    run.finish()
    assert "does not keep its workers' random numbers" in run.said()


@pytest.mark.dist
@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_an_epoch_continues_on_another_number_of_ranks(cases: Cases, before: int, after: int) -> None:
    run = cases.run("rows", KILLED)
    assert -signal.SIGKILL in run.attempt(Kill(STEP, 3), ranks=before)
    outcome = run.finish(ranks=after)
    first = outcome.iterations(1)[0]
    assert first == 3
    assert_each_row_once(run.folder, first)


def assert_each_row_once(folder: Path, first: int) -> None:
    """In each epoch of `rows`, whose second attempt has begun with iteration `first`."""
    given: dict[int, list[float]] = {0: [], 1: []}
    for path in folder.glob("rows-*"):
        for line in path.read_text().splitlines():
            epoch, iteration, rows = json.loads(line)
            # What was trained on after the snapshot is trained on again.
            if path.name.startswith("rows-1") or iteration < first:
                given[epoch] += rows
    assert {epoch: sorted(rows) for epoch, rows in given.items()} == dict.fromkeys(given, list(range(40)))


@pytest.mark.long
@pytest.mark.dist
def test_batches_drawn_by_one_rank_continue_on_more_ranks_after_an_epoch(cases: Cases) -> None:
    run = cases.run("rows", KILLED, dispatch=True)
    assert -signal.SIGKILL in run.attempt(Kill(STEP, 11))
    assert run.finish(ranks=2).iterations(1)[0] == 11
    assert "Not exact" not in run.said()
    assert_each_row_once(run.folder, 11)


@pytest.mark.dist
def test_batches_drawn_by_one_rank_are_refused_on_more_ranks_within_an_epoch(cases: Cases) -> None:
    run = cases.run("rows", KILLED, dispatch=True)
    assert -signal.SIGKILL in run.attempt(Kill(STEP, 3))
    run.attempt(ranks=2)
    assert run.outcome.iterations(1) == []
    assert run.said().count("drawn by one rank for all") == 2
