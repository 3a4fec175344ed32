"""flashckpt.transformers.train: killed anywhere, a run ends as one that was never stopped, bit for bit."""

import json
import signal
from pathlib import Path

import pytest

from tests.integrations import harness
from tests.integrations.harness import Cases, Run
from tests.integrations.job import BETWEEN, KILLED, PLAIN, STEP, Kill

CASES, REFUSED, EXPORTS = (f"tests.integrations.hf.{name}" for name in ("cases", "refused", "exports"))
OLDER = "5.22"
IMPORTED = (CASES, "transformers.trainer", REFUSED, EXPORTS)
LONG = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    "case",
    [
        "evaluates_and_saves", "accumulates_in_workers", "stream", "own_loader", "steps_in_bf16", "grpo",
        *(pytest.param(each, marks=LONG) for each in ("compiled", "plateau", "dpo")),
    ],
)  # fmt: skip
def test_killed(cases: Cases, case: str) -> None:
    """The detector of what is not saved has nothing to report, but of the batch that `own_loader` keeps."""
    cases.check(f"case_{case}")
    assert case == "own_loader" or "are not saved" not in cases.said(), cases.said()


def test_a_trainer_of_trl_is_killed(cases: Cases) -> None:
    cases.check("case_sft")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_release_before(tmp_path: Path, runtime: Path) -> None:
    release = f"transformers=={OLDER}.*"
    case = f"{CASES}:case_evaluates_and_saves"
    harness.check_older([release], f"{REFUSED}:names", case, tmp_path, runtime, "transformers.trainer")


@pytest.mark.long
def test_snapshots_now_and_then(cases: Cases) -> None:
    """Steps after the last snapshot are trained again, with the same numbers."""
    cases.check("case_accumulates_in_workers", plain=False, again=False, every=3)


@pytest.mark.parametrize("case", ["accumulates_in_workers", pytest.param("own_loader", marks=LONG)])
def test_terminated(cases: Cases, case: str) -> None:
    stopped = cases.check_terminated(f"case_{case}")
    assert {end for ends in stopped.ends for end in ends} == {0, -signal.SIGTERM}


@pytest.mark.long
@pytest.mark.dist
def test_two_ranks(cases: Cases) -> None:
    cases.check("case_two_ranks", ranks=2, again=False)


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_killed_stream_that_rank_0_draws_for_all(cases: Cases) -> None:
    """An epoch has 3 steps: its first batch completes the last one, also where it is resumed after 2."""
    cases.check("case_dispatched", ranks=2)


@pytest.mark.long
@pytest.mark.dist
def test_another_number_of_ranks(cases: Cases) -> None:
    """An epoch of 6 steps is begun on two ranks, continued on one, and ended on two: each item once."""
    run = cases.run("case_on_other_ranks", KILLED)
    # A signal to two ranks stops them at a step on which they agree, which may be any: a kill before step 3.
    assert -signal.SIGKILL in run.attempt(Kill(STEP, 3), ranks=2)
    seen = _items(run, 2)
    run.attempt(Kill(STEP, 4, number=signal.SIGTERM), ranks=1)
    seen += _items(run, 1)
    run.finish(ranks=2)
    seen += _items(run, 2)
    assert run.outcome.ends[1:] == [[-signal.SIGTERM], [0, 0]], run.said()
    assert set(run.outcome.repeated()) <= {3}, "begun, not trained on"
    for epoch in range(2):
        items = [item for place, attempt, each in seen for item in each if place == epoch]
        assert sorted(items) == list(range(48)), f"epoch {epoch}: {sorted(items)}"


def _items(run: Run, ranks: int) -> list[tuple[int, int, list[int]]]:
    """Of the last attempt: the epoch and the items of each batch."""
    last, found = len(run.outcome.ends) - 1, []
    for rank in range(ranks):
        for line in (run.files / f"logged-{rank}").read_text().splitlines():
            attempt, place, text = json.loads(line)
            if attempt == last and place.endswith(" items"):
                found.append((int(place.split()[0]), attempt, json.loads(text)))
    return found


@pytest.mark.long
def test_more_steps_continue_in_the_epoch(cases: Cases) -> None:
    """A run of 7 steps that is started again with 12 ends as one of 12 steps."""
    run = cases.run("case_of_steps", steps=7)
    run.finish()
    run.options["steps"] = 12
    more = run.finish()
    assert more.iterations(1) == [8, 9, 10, 11, 12]
    plain = cases.finished("case_of_steps", PLAIN, steps=12)
    assert not harness.differences(plain.records, more.records)


@pytest.mark.parametrize(
    ("origin", "step", "kills"),
    [("saves_with_workers", 3, 5), pytest.param("saves", 18, 2, marks=LONG)],
    ids=["workers", "second epoch"],
)
def test_a_checkpoint_of_the_trainer_is_loaded_once(cases: Cases, origin: str, step: int, kills: int) -> None:
    """As the trainer's own resume has it, killed or not, with its augmentation from the first step on."""
    saved = cases.run(f"case_{origin}", PLAIN, within="origin")
    saved.finish()
    options = {"origin": origin, "initial": str(saved.folder / "out" / f"checkpoint-{step}")}
    whole, _ = cases.check("case_from_initial", kills=kills, **options)
    assert whole.iterations(0)[0] == step + 1


@pytest.mark.long
def test_a_stop_ends_training_like_the_trainer(cases: Cases) -> None:
    """The notice file ends train(), which returns; the epoch's end is left for the next start."""
    run = cases.run("case_noticed", notice=2)
    first = run.finish()
    assert first.iterations(0) == [1, 2]
    assert BETWEEN not in {name for name, _ in first.moments[0][0]}
    del run.options["notice"]
    whole = run.finish()
    assert whole.iterations(1)[0] == 3
    unstopped = cases.finished("case_noticed", within="other")
    assert not harness.differences(unstopped.records, whole.records)


@pytest.mark.long
def test_changes_that_are_not_saved(cases: Cases) -> None:
    """A counter in the trainer and one in a callback are found; with own= they are saved."""
    run = cases.run("case_with_counters")
    run.finish()
    assert "Seeing.seen (trainer)" in run.said()
    assert "Counts.count" in run.said()
    killed = cases.run("case_with_counters", within="own", own=["seen", "Counts.count"])
    killed.attempt(Kill(STEP, 5))
    found = killed.finish()
    harness.assert_same(run.outcome, found, "unkilled", "killed")
    assert "are not saved" not in killed.said()


def test_refused(cases: Cases) -> None:
    cases.module = REFUSED
    ended = cases.finished("all_of_it")
    assert ended.records == [{}], "each assertion of the case held"


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        "used_afterwards", "without_its_best", "with_means_of_weights", "with_an_invalid_config",
        "ended_by_a_callback",
    ],
)  # fmt: skip
def test_started_again(cases: Cases, case: str) -> None:
    ended = cases.finished(f"case_{case}")
    assert ended.records == [{}], "each assertion of the case held"


@pytest.mark.every_set
@pytest.mark.parametrize("export", ["tied", "sharded", "experts", "lora", "wrapped", "refusals", "untied"])
def test_from_pretrained_gives_the_weights_of_a_run(cases: Cases, export: str) -> None:
    """Bit for bit; or the export is refused."""
    cases.module = EXPORTS
    assert cases.finished("single", export=export).records == [{}], "each assertion of the case held"


@pytest.mark.dist
def test_from_pretrained_gives_the_weights_of_ranks(cases: Cases) -> None:
    cases.module = EXPORTS
    assert cases.run("ranks").finish(ranks=2).records == [{}, {}], "each assertion of the case held"
