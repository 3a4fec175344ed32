"""Lightning's Trainer ends with the same bits plain, with flashckpt, and with flashckpt killed."""

import signal
from pathlib import Path

import pytest

from tests.integrations import harness
from tests.integrations.harness import Cases
from tests.integrations.job import KILLED, PLAIN, STEP, WHOLE, Kill

pytestmark = pytest.mark.process
CASES = "tests.integrations.lightning.cases"
IMPORTED = (CASES,)
TERMINATED = 7  # as in cases.py, which imports Lightning
OLDER = "2.6.5"
CHANGED = "Attributes change while training"


@pytest.mark.parametrize(
    "case",
    [
        "accumulated", "plateau", "manual", "stream", "average", "hooks", "metrics", "rate_searched",
        "size_searched",
        pytest.param("max_steps", marks=pytest.mark.long), pytest.param("workers", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_killed_fit_ends_like_a_plain_fit(cases: Cases, case: str) -> None:
    # Hooks that draw random numbers before the first batch: a fit without flashckpt has drawn the loader's
    # seed by then (docs/lightning.md).
    cases.check(case, plain=case != "hooks")
    assert CHANGED not in cases.said()


@pytest.mark.long
def test_a_fit_that_searches_its_rate_first(cases: Cases) -> None:
    """The search repeats at each start and changes no number of the run."""
    whole = cases.finished("rate_searched_in_fit")
    run = cases.run("rate_searched_in_fit", KILLED)
    harness.assert_same(whole, run.finish_killed([Kill(STEP, whole.iterations(0)[10])]))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_release_before(tmp_path: Path, runtime: Path) -> None:
    releases = [f"lightning=={OLDER}", f"pytorch-lightning=={OLDER}"]
    harness.check_older(releases, f"{CASES}:names", f"{CASES}:accumulated", tmp_path, runtime)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "stream"), [("max_size_cycle", True), ("max_size", False), ("min_size", True)]
)
def test_several_loaders(cases: Cases, mode: str, stream: bool) -> None:
    """Each loader draws its seed with its first batch, so the numbers of a plain fit are others."""
    cases.check("several_loaders", plain=False, mode=mode, stream=stream)


def test_a_terminated_fit_repeats_no_iteration(cases: Cases) -> None:
    stopped = cases.check_terminated("accumulated")
    # Lightning's own handler is called at the boundary: fit ends by its SIGTERMException.
    assert [end for ends in stopped.ends for end in ends][:-1] == [TERMINATED] * len(stopped.hits)


@pytest.mark.long
@pytest.mark.parametrize("case", ["max_steps", "plateau"])
def test_a_signal_in_the_last_iteration_ends_a_fit_that_is_finished(cases: Cases, case: str) -> None:
    """The limit of steps or EarlyStopping ends it there, too: another attempt trains nothing."""
    whole = cases.finished(case)
    run = cases.run(case, KILLED)
    stopped = run.finish_killed([Kill(STEP, whole.iterations(0)[-1], number=signal.SIGTERM)])
    assert stopped.ends == [[TERMINATED], [0]]
    assert stopped.iterations(1) == []
    harness.assert_same(whole, stopped)


@pytest.mark.long
@pytest.mark.dist
def test_ranks(cases: Cases) -> None:
    cases.check("ranks", ranks=2, victims=[1])


@pytest.mark.long
@pytest.mark.dist
def test_ranks_of_lightnings_launcher(cases: Cases) -> None:
    plain, found = (cases.run("own_launcher", kind).finish(ranks=2) for kind in (PLAIN, WHOLE))
    harness.assert_same(plain, found)


@pytest.mark.long
def test_fit_can_be_called_again_after_an_exception(cases: Cases) -> None:
    plain, found = cases.finished("map_style", PLAIN), cases.finished("failed")
    assert found.records[0].pop("overridden") == []
    del found.logged[:], plain.logged[:]
    harness.assert_same(plain, found)


def test_the_checkpointer_of_a_callback_that_is_switched_off(cases: Cases) -> None:
    run = cases.run("switched_off")
    assert run.finish().records == [{"found": [[False, None]], "made": False}]
    assert "nothing is saved" in run.said()


@pytest.mark.long
def test_fit_continues_a_stopped_and_a_finished_run(cases: Cases) -> None:
    plain, run = cases.finished("map_style", PLAIN), cases.run("continued")
    found = run.finish()
    assert run.said().count("has the state of Stop, which this trainer does not have") == 1
    [record] = found.records
    assert (record.pop("stopped"), record.pop("ended")) == ([9, "finished", "stop"], 14)
    assert (record.pop("overridden"), record.pop("loader")) == ([], "DataLoader")
    del found.logged[:], plain.logged[:]
    harness.assert_same(plain, found)


@pytest.mark.long
def test_callbacks_of_one_class_keep_their_states_in_another_order_or_fewer(cases: Cases) -> None:
    def found(*monitored: str) -> dict[str, str]:
        run.options["monitored"] = monitored
        [record] = run.finish().records
        assert isinstance(record, dict)
        return record

    run = cases.run("several_checkpoints")
    assert found("largest", "val") == {"largest": "", "val": ""}
    assert found("val", "largest") == {"largest": "largest", "val": "val"}
    assert "which this trainer does not have" not in run.said()
    assert found("largest") == {"largest": "largest"}
    assert run.said().count("has the state of ModelCheckpoint, which this trainer does not have") == 1


def test_attributes_that_nothing_saves_are_named(cases: Cases) -> None:
    cases.finished("hooks", forget=True)
    [line] = [each for each in cases.said().splitlines() if CHANGED in each]
    for name in ("Counts.plain", "Counts.recent", "Hooked.seen"):
        assert name in line
    for name in ("metric", "added"):
        assert f'"{name}"' not in line


def test_refusals(cases: Cases) -> None:
    assert cases.finished("refused").records == [{}], "each assertion of the case held"
