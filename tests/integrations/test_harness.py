"""The harness finds what a broken resume changes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integrations import harness
from tests.integrations.job import AFTER, DRAW, IN_WORKER, START, STEP, Kill
from tests.zygote import Zygote

CASE = "tests.integrations.plain.cases:loop"


@pytest.fixture(scope="module")
def framework() -> Iterator[Zygote]:
    yield from harness.framework("tests.integrations.plain.cases")


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loop(framework: Zygote, tmp_path: Path, runtime: Path, workers: int) -> None:
    _, killed = harness.check(CASE, framework, tmp_path, runtime, workers=workers)
    # Most attempts resume: they do not begin at the first iteration.
    assert sum(killed.iterations(number)[:1] == [1] for number in range(len(killed.ends))) < 4


@pytest.mark.long
def test_a_plain_loop_that_is_terminated(framework: Zygote, tmp_path: Path, runtime: Path) -> None:
    _, stopped = harness.check_terminated(CASE, framework, tmp_path, runtime)
    assert {end for ends in stopped.ends for end in ends} == {0, -signal.SIGTERM}


@pytest.mark.parametrize("forget", ["random numbers", "counter"])
def test_a_broken_resume_is_found(framework: Zygote, tmp_path: Path, runtime: Path, forget: str) -> None:
    # A value that is logged again after the kill is another one.
    with pytest.raises(AssertionError, match=r"is .* in attempt \d+ and .* in attempt \d+"):
        harness.check(CASE, framework, tmp_path, runtime, plain=False, again=False, forget=forget)


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize("victims", [[1], [0, 1]])
def test_two_ranks(framework: Zygote, tmp_path: Path, runtime: Path, victims: list[int]) -> None:
    case = "tests.integrations.plain.cases:ranks"
    _, killed = harness.check(case, framework, tmp_path, runtime, ranks=2, victims=victims, kills=7)
    assert {rank for _, _, rank in killed.hits} == set(victims)
    assert sum(killed.iterations(number)[:1] == [1] for number in range(len(killed.ends))) < 4


def test_the_plan_covers_all_names_in_their_order() -> None:
    moments = [(START, 0), (DRAW, 0)]
    for number in range(1, 21):
        moments += [(STEP, number), (DRAW, number)] + [("rare", number)] * (number == 7)
    moments += [(AFTER, 20)]
    for seed in range(50):
        found = harness.plan(moments, 10, seed)
        assert len(found) >= 10
        assert {each.name for each in found} == {START, DRAW, STEP, "rare", AFTER}
        assert [each.counter for each in found[:-1]] == sorted(each.counter for each in found[:-1])
        assert found[0] == Kill(START, outside=True)
        assert (STEP, 20) in [(each.name, each.counter) for each in found]


def test_a_kill_in_a_worker_depends_on_no_iteration() -> None:
    moments = [(START, 0)] + [(STEP, number) for number in range(1, 21)] + [(DRAW, IN_WORKER)] * 80
    for seed in range(50):
        found = harness.plan([*moments, (AFTER, 20)], 10, seed)
        workers = [each for each in found if each.in_worker]
        assert {each.name for each in workers} == {DRAW}
        assert not any(each.outside or each.until is not None for each in workers)
        assert all(1 <= each.counter <= 10 and each.nth <= 3 for each in workers)
        assert not any(each.in_worker for each in found if each.name != DRAW)


def test_differences_are_named() -> None:
    a = {"x": torch.zeros(3), "y": [1, 2.0, float("nan")], "z": -0.0, "only": 1}
    b = {"x": torch.tensor([0.0, -0.0, 1.0]), "y": [1.0, 2.0, float("nan")], "z": 0.0}
    found = harness.differences(a, b)
    assert [each.split(":")[0] for each in found] == [".only", ".x", ".y[0]", ".z"]
    assert not harness.differences(a, {**a, "x": torch.zeros(3)})
