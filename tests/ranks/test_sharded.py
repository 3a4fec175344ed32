"""Ranks that each train a part of a model are killed, and go on with their own parts, bit for bit."""

import json
from pathlib import Path

import pytest

import flashckpt
from tests.ranks.launch import Launch, Launcher
from tests.ranks.test_ddp import assert_went_on
from tests.waiting import until

pytestmark = [pytest.mark.dist, pytest.mark.process]
PROGRAM = "tests.ranks.sharded"
SAVED, HELD = 3, 5


@pytest.mark.parametrize(
    ("case", "ranks", "tier"),
    [
        ("fsdp2_evaluated", 2, "memory"),
        ("fsdp2_never_zeroed", 2, "memory"),
        ("ddp_never_zeroed", 2, "local"),
        ("pipeline", 2, "local"),
        ("fsdp2_and_tp", 4, "local"),
    ],
)
def test_killed_ranks_go_on_with_their_own_parts(
    launcher: Launcher, tmp_path: Path, case: str, ranks: int, tier: str
) -> None:
    def start(run: str, **orders: object) -> Launch:
        return launcher.fork(PROGRAM, tmp_path / run, json.dumps({"case": case, **orders}), ranks=ranks)

    run = tmp_path / "run"
    whole = start("whole", options={"enabled": False}).finished()
    killed = start("run", hold_at=HELD, save_at=SAVED)
    killed.until_said(f"held {HELD}")
    if tier == "local":
        until(lambda: SAVED in flashckpt.steps(run), "a commit")
        launcher.freeze_keepers(0)
    killed.kill()
    before = [killed.said(rank) for rank in range(ranks)]
    if tier == "local":
        launcher.kill_keepers(remove_regions=True)
    ended = start("run", seed=1).finished()
    # In memory there may be a newer one that all ranks have, as the schedule goes.
    step = int(ended[0].out[0].split()[1])
    assert SAVED <= step <= (HELD if tier == "memory" else SAVED)
    for rank in range(ranks):
        assert ended[rank].out[0] == f"resumed {step} {tier}"
        assert_went_on(whole[rank], before[rank], ended[rank].out, step)
