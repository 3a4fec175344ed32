"""`FlashCheckpointManager` with torchtitan's own parts: killed and resumed bit for bit."""

import signal
from typing import Any

import pytest

from tests.integrations import harness
from tests.integrations.harness import Cases
from tests.integrations.job import PLAIN
from tests.integrations.torchtitan import STEPS

IMPORTED = ("tests.integrations.torchtitan.cases",)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulated": 3},
        # Random numbers that are drawn inside of torchdata's workers are lost, as in a plain loop.
        pytest.param({"accumulated": 2, "workers": 2, "noise": False}, marks=pytest.mark.long),
    ],
    ids=["accumulated", "workers"],
)
def test_a_run_continues_after_kills(cases: Cases, options: dict[str, Any]) -> None:
    _, killed = cases.check("train", **options)
    assert sum(killed.iterations(number)[:1] == [1] for number in range(len(killed.ends))) < 4


@pytest.mark.long
def test_a_terminated_run_repeats_nothing(cases: Cases) -> None:
    stopped = cases.check_terminated("train", accumulated=2)
    assert {end for ends in stopped.ends for end in ends} == {0, -signal.SIGTERM}


def test_a_run_that_is_stopped_ends_as_at_the_end_of_its_data(cases: Cases) -> None:
    plain, run = cases.finished("train", PLAIN), cases.run("train", stop_at=6)
    stopped = run.finish()
    # The trainer counted a step before its draw, which is taken back.
    assert stopped.records[0]["trainer"]["step"] == 6
    assert stopped.iterations(0) == [1, 2, 3, 4, 5, 6]
    resumed = run.finish()
    assert resumed.iterations(1)[0] == 7
    harness.assert_same(plain, resumed)


@pytest.mark.long
@pytest.mark.parametrize("documents", [118, 126], ids=["after an iteration", "within an iteration"])
def test_data_that_end_between_two_snapshots(cases: Cases, documents: int) -> None:
    """The last iteration is canceled, and the one before it is committed though no snapshot was due."""
    options = {"documents": documents, "accumulated": 2, "every": 1000}
    plain, run = cases.finished("train", PLAIN, **options), cases.run("train", **options)
    whole = run.finish()
    harness.assert_same(plain, whole)
    trained = whole.iterations(0)
    assert 5 < len(trained) < STEPS
    # Another attempt finds the end of its data, and trains nothing.
    again = run.finish()
    assert again.iterations(1) == []
    harness.assert_same(plain, again)
