"""Several ranks are killed in a step and started again: each goes on with its own bits, all from one step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import flashckpt
from flashckpt.store import open_store
from tests import run_view
from tests.ranks.launch import Ended, Launch, Launcher
from tests.waiting import until

pytestmark = pytest.mark.dist
PROGRAM = "tests.ranks.ddp"


def steps_of(out: Sequence[str]) -> dict[int, str]:
    """What each step of a rank was, by its number."""
    return {int(line.split()[1]): line for line in out if line.startswith("step ")}


def start(launcher: Launcher, run: Path, ranks: int, **orders: object) -> Launch:
    return launcher.fork(PROGRAM, run, json.dumps(orders), ranks=ranks)


def undisturbed(launcher: Launcher, run: Path, ranks: int, **orders: object) -> list[Ended]:
    """A run that nobody kills and nothing saves."""
    return start(launcher, run, ranks, options={"enabled": False}, **orders).finished()


def assert_went_on(whole: Ended, before: Sequence[str], after: Sequence[str], step: int) -> None:
    """Every step of a rank, before and after the kill, is that of an undisturbed one, bit for bit."""
    expected = steps_of(whole.out)
    done = steps_of(after)
    assert min(done) == step + 1, "it goes on after the step that it was resumed from"
    assert {**steps_of(before), **done} == expected
    assert after[-1] == whole.out[-1], "the state at the end"


SAVED, HELD = 8, 10


@pytest.mark.parametrize(("ranks", "tier", "workers"), [(2, "memory", 2), (2, "local", 0), (4, "memory", 0)])
def test_killed_ranks_go_on_bit_for_bit(
    launcher: Launcher, tmp_path: Path, ranks: int, tier: str, workers: int
) -> None:
    whole = undisturbed(launcher, tmp_path / "whole", ranks, workers=workers)
    run, held = tmp_path / "run", HELD if ranks == 2 else HELD // 2
    save_at = "each" if tier == "memory" else SAVED
    killed = start(launcher, run, ranks, hold_at=held, save_at=save_at, workers=workers)
    killed.until_said(f"held {held}")
    if tier == "local":
        until(lambda: SAVED in flashckpt.steps(run), "a commit")
        launcher.freeze_keepers(0)
    killed.kill()
    before = [killed.said(rank) for rank in range(ranks)]
    if tier == "local":
        launcher.kill_keepers(remove_regions=True)
    ended = start(launcher, run, ranks, workers=workers, log=tier == "local").finished()
    step = held if tier == "memory" else SAVED
    for rank in range(ranks):
        assert ended[rank].out[0] == f"resumed {step} {tier}"
        assert_went_on(whole[rank], before[rank], ended[rank].out, step)
    assert flashckpt.steps(run)[-1] == max(steps_of(whole[0].out))


@pytest.mark.long
def test_a_rank_dies_while_they_read_together_and_a_bit_on_disk_is_flipped(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The first leaves nobody waiting, the second sends all of them to the step before."""
    run, older = tmp_path / "run", SAVED // 2
    killed = start(launcher, run, 2, hold_at=HELD, save_at=[older, SAVED])
    killed.until_said(f"held {HELD}")
    until(lambda: {older, SAVED} <= set(flashckpt.steps(run)), "two commits")
    launcher.freeze_keepers(0)
    killed.kill()
    before = [killed.said(rank) for rank in range(2)]
    launcher.kill_keepers(remove_regions=True)

    alone, dead = start(launcher, run, 2, deaths=[[1, "resume.read"]]).ended()
    assert dead.status is None
    assert alone.status == 1
    assert "rank 1 of 2: its process has ended during attach" in alone.err

    # Both need this file: rank 0 wrote it, with what they hold alike.
    record = run_view.read(open_store(run), run_view.resumed(open_store(run)))
    path = run / record.shard_path(0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for rank, ended in enumerate(start(launcher, run, 2).finished()):
        assert ended.out[0] == f"resumed {older} local"
        expected, done = steps_of(before[rank]), steps_of(ended.out)
        assert {step: done[step] for step in expected if step > older} == {
            step: line for step, line in expected.items() if step > older
        }


def test_a_node_that_lost_its_memory_goes_on_from_storage_and_the_other_from_memory(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Both from one step, each with its own bits of it."""
    whole = undisturbed(launcher, tmp_path / "whole", 2)
    run = tmp_path / "run"
    orders = {"hold_at": SAVED, "save_at": SAVED}
    killed = launcher.fork(PROGRAM, run, json.dumps(orders), ranks=1, nodes=2)
    killed.until_said(f"held {SAVED}")
    until(lambda: SAVED in flashckpt.steps(run), "a commit")
    launcher.freeze_keepers(0, 1)
    killed.kill()
    launcher.kill_keepers(1, remove_regions=True)
    launcher.kill_keepers(0)
    ended = launcher.fork(PROGRAM, run, "{}", ranks=1, nodes=2, restart=1).finished()
    for rank, tier in enumerate(("memory", "local")):
        assert ended[rank].out[0] == f"resumed {SAVED} {tier}"
        assert_went_on(whole[rank], killed.said(rank), ended[rank].out, SAVED)


def held_in_memory(launcher: Launcher, run: Path, step: int, **places: Any) -> Launch:
    """Ranks that are killed at a step that is nowhere but in memory: their keepers were stopped before."""
    orders = {"options": {"every": None}, "freeze_at": step - 1, "save_at": step, "hold_at": step}
    killed = launcher.fork(PROGRAM, run, json.dumps(orders), **places)
    killed.until_said(f"held {step}")
    killed.kill()
    assert flashckpt.steps(run) == []
    return killed


@pytest.mark.long
def test_a_smaller_group_goes_on_from_what_only_memory_had(launcher: Launcher, tmp_path: Path) -> None:
    """One of two nodes has no trainers any more. Its keeper saves what they had, as that of the other
    does."""
    run, held = tmp_path / "run", 5
    held_in_memory(launcher, run, held, ranks=2, nodes=2)
    launcher.thaw_keepers(1)
    job = launcher.fork(PROGRAM, run, "{}", ranks=2, restart=1)
    launcher.until_arrived(job, 0, node=0)
    launcher.thaw_keepers(0)
    for each in job.finished():
        assert each.out[0] == f"resumed {held} local"


@pytest.mark.long
def test_ranks_that_were_started_on_other_nodes_go_on_from_the_same_step(
    launcher: Launcher, tmp_path: Path
) -> None:
    whole = undisturbed(launcher, tmp_path / "whole", 2)
    run, held = tmp_path / "run", 7
    killed = held_in_memory(launcher, run, held, ranks=1, nodes=[0, 1])
    job = launcher.fork(PROGRAM, run, "{}", ranks=1, nodes=[1, 0], restart=1)
    launcher.until_arrived(job, 0, node=1)
    launcher.thaw_keepers(0, 1)
    ended = job.finished()
    for rank in range(2):
        assert_went_on(whole[rank], killed.said(rank), ended[rank].out, held)


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
