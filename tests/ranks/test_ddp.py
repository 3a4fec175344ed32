"""Several ranks are killed in a step and started again: each goes on with its own bits, all from one step."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import flashckpt
from flashckpt.store import open_store
from tests import run_view
from tests.ranks.launch import Ended, Launch, Launcher
from tests.waiting import until

pytestmark = pytest.mark.dist
PROGRAM = "tests.ranks.ddp"
SAVED, HELD, WORKERS = 8, 10, 2


def steps_of(out: Sequence[str]) -> dict[int, str]:
    """What each step of a rank was, by its number."""
    return {int(line.split()[1]): line for line in out if line.startswith("step ")}


def start(launcher: Launcher, run: Path, ranks: int, **orders: object) -> Launch:
    return launcher.fork(PROGRAM, run, json.dumps(orders), ranks=ranks)


def undisturbed(launcher: Launcher, run: Path, ranks: int, **orders: object) -> list[Ended]:
    """An undisturbed run without checkpoints."""
    return start(launcher, run, ranks, options={"enabled": False}, **orders).finished()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """The end of an undisturbed run on two ranks, whose loaders have workers."""
    launcher = Launcher(tmp_path_factory.mktemp("output"))
    try:
        return undisturbed(launcher, tmp_path_factory.mktemp("whole"), 2, workers=WORKERS)
    finally:
        launcher.close()


def assert_went_on(whole: Ended, before: Sequence[str], after: Sequence[str], step: int) -> None:
    """Every step of a rank, before and after the kill, is that of an undisturbed one, bit for bit."""
    expected = steps_of(whole.out)
    done = steps_of(after)
    assert min(done) == step + 1, "it goes on after the step that it was resumed from"
    assert {**steps_of(before), **done} == expected
    assert after[-1] == whole.out[-1], "the state at the end"


@pytest.mark.parametrize("tier", ["memory", "local"])
def test_killed_ranks_go_on_bit_for_bit(
    launcher: Launcher, tmp_path: Path, whole: list[Ended], tier: str
) -> None:
    run, save_at = tmp_path / "run", "each" if tier == "memory" else SAVED
    killed = start(launcher, run, 2, hold_at=HELD, save_at=save_at, workers=WORKERS)
    killed.until_said(f"held {HELD}")
    if tier == "local":
        until(lambda: SAVED in flashckpt.steps(run), "a commit")
        launcher.freeze_keepers(0)
    killed.kill()
    if tier == "local":
        launcher.kill_keepers(remove_regions=True)
    ended = start(launcher, run, 2, workers=WORKERS).finished()
    step = HELD if tier == "memory" else SAVED
    for rank in range(2):
        assert ended[rank].out[0] == f"resumed {step} {tier}"
        assert_went_on(whole[rank], killed.said(rank), ended[rank].out, step)
    assert flashckpt.steps(run)[-1] == max(steps_of(whole[0].out))


def test_a_node_that_lost_its_memory_goes_on_from_storage_and_the_other_from_memory(
    launcher: Launcher, tmp_path: Path, whole: list[Ended]
) -> None:
    """Both from one step, each with its own bits of it."""
    run = tmp_path / "run"
    orders = {"hold_at": SAVED, "save_at": SAVED, "workers": WORKERS}
    killed = launcher.fork(PROGRAM, run, json.dumps(orders), ranks=1, nodes=2)
    killed.until_said(f"held {SAVED}")
    until(lambda: SAVED in flashckpt.steps(run), "a commit")
    launcher.freeze_keepers(0, 1)
    killed.kill()
    launcher.kill_keepers(1, remove_regions=True)
    launcher.kill_keepers(0)
    orders = {"workers": WORKERS}
    ended = launcher.fork(PROGRAM, run, json.dumps(orders), ranks=1, nodes=2, restart=1).finished()
    for rank, tier in enumerate(("memory", "local")):
        assert ended[rank].out[0] == f"resumed {SAVED} {tier}"
        assert_went_on(whole[rank], killed.said(rank), ended[rank].out, SAVED)


@pytest.mark.long
def test_a_smaller_group_goes_on_from_what_only_memory_had(launcher: Launcher, tmp_path: Path) -> None:
    """One of two nodes has no trainers any more. Its keeper saves what they had, as that of the other
    does: until the trainers were killed both were stopped."""
    run, held = tmp_path / "run", 5
    orders = {"options": {"every": None}, "freeze_at": held - 1, "save_at": held, "hold_at": held}
    killed = launcher.fork(PROGRAM, run, json.dumps(orders), ranks=2, nodes=2)
    killed.until_said(f"held {held}")
    killed.kill()
    assert flashckpt.steps(run) == []
    launcher.thaw_keepers(1)
    job = launcher.fork(PROGRAM, run, "{}", ranks=2, restart=1)
    launcher.until_arrived(job, 0, node=0)
    launcher.thaw_keepers(0)
    for each in job.finished():
        assert each.out[0] == f"resumed {held} local"


def test_what_diverges_in_the_last_step_is_saved_at_the_end_by_rank(
    launcher: Launcher, tmp_path: Path
) -> None:
    """No step would follow that has it: the run would end with nothing of its end on storage."""
    run, last = tmp_path / "run", 6
    ended = start(launcher, run, 2, epochs=1, harm_at=[1, last]).finished()
    assert all(f"step {last} is not committed: replicas have diverged" in each.err.lower() for each in ended)
    assert flashckpt.steps(run) == [last + 1]
    store = open_store(str(run))
    record = run_view.read(store, run_view.resumed(store))
    names = [{each.leaf.name: each.digest for each in record.leaves(rank)} for rank in range(2)]
    assert names[0]["model.0.bias"] != names[1]["model.0.bias"]
    assert names[0]["model.0.weight"] == names[1]["model.0.weight"]
    assert run_view.verify(store).ok
