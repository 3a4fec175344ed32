"""`flashckpt.accelerate.attach`, and prepared loaders in a plain loop: killed and resumed bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import harness
from tests.integrations.job import WHOLE
from tests.zygote import Zygote

TRAIN = "tests.integrations.accelerate.cases:train"
CASES: dict[str, dict[str, Any]] = {
    "seeded": {"seedable": True},
    "workers": {"accumulated": 3, "workers": 2},
    "accumulated": {"accumulated": 2},
    "dispatched": {"accumulated": 2, "stream": True},
    "stream": {"accumulated": 2, "stream": True, "dispatch": False},
    "stateful": {"accumulated": 2, "stateful": True},
    "stateful stream": {"accumulated": 2, "stateful": True, "stream": True},
    # Random numbers that are drawn inside of its workers are lost, as in a plain loop.
    "stateful workers": {"accumulated": 2, "stateful": True, "workers": 2, "augment": False},
    "left early": {"accumulated": 2, "leave_after": 4, "seedable": True},
    "plain loop": {"accumulated": 1, "plain_loop": True, "seedable": True},
}
IN_SHORT = ("workers", "dispatched", "plain loop")


def _marks(name: str) -> Any:
    return pytest.param(name, marks=[] if name in IN_SHORT else [pytest.mark.long])


@pytest.fixture(scope="module")
def framework() -> Iterator[Zygote]:
    yield from harness.framework("tests.integrations.accelerate.cases")


@pytest.mark.parametrize("name", [_marks(name) for name in CASES])
def test_a_run_continues_after_kills(framework: Zygote, tmp_path: Path, runtime: Path, name: str) -> None:
    _, killed = harness.check(TRAIN, framework, tmp_path, runtime, **CASES[name])
    assert sum(killed.iterations(number)[:1] == [1] for number in range(len(killed.ends))) < 4


@pytest.mark.long
def test_several_models_and_loaders(framework: Zygote, tmp_path: Path, runtime: Path) -> None:
    harness.check("tests.integrations.accelerate.cases:several", framework, tmp_path, runtime)


def test_a_run_that_is_terminated_repeats_nothing(framework: Zygote, tmp_path: Path, runtime: Path) -> None:
    _, stopped = harness.check_terminated(TRAIN, framework, tmp_path, runtime, accumulated=2, seedable=True)
    assert {end for ends in stopped.ends for end in ends} == {0, -signal.SIGTERM}


@pytest.mark.dist
@pytest.mark.parametrize(
    "options",
    [
        {"accumulated": 2, "rows": 40},
        pytest.param({"accumulated": 2, "rows": 40, "seedable": True, "workers": 1}, marks=pytest.mark.long),
        pytest.param({"accumulated": 2, "rows": 40, "stream": True}, marks=pytest.mark.long),
        pytest.param({"rows": 40, "stream": True, "dispatch": False}, marks=pytest.mark.long),
    ],
    ids=["shard", "seeded shard", "dispatched", "stream"],
)
def test_two_ranks(framework: Zygote, tmp_path: Path, runtime: Path, options: dict[str, Any]) -> None:
    harness.check(TRAIN, framework, tmp_path, runtime, ranks=2, kills=7, **options)


def test_random_numbers_in_the_workers_of_a_stateful_loader_are_warned_of(
    framework: Zygote, tmp_path: Path, runtime: Path
) -> None:
    run = harness.Run(TRAIN, framework, tmp_path, runtime, WHOLE, stateful=True, workers=1, epochs=1)
    run.finish()
    assert "does not keep its workers' random numbers" in run.said()
