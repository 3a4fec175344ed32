"""A job of DDP goes on, in the middle of an epoch, on another number of ranks: each sample of it once."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.ranks.ddp import BATCH, SAMPLES
from tests.ranks.launch import Launcher
from tests.ranks.test_ddp import HELD, PROGRAM

pytestmark = pytest.mark.dist


def samples(line: str) -> list[int]:
    """Those of a line "step N LOSS A-B-C"."""
    return [int(each) for each in line.split()[3].split("-")]


def test_an_epoch_goes_on_on_three_ranks_where_two_began(launcher: Launcher, tmp_path: Path) -> None:
    run, per_epoch = tmp_path / "run", SAMPLES // (2 * BATCH)
    killed = launcher.fork(PROGRAM, run, json.dumps({"hold_at": HELD, "save_at": "each"}), ranks=2)
    killed.until_said(f"held {HELD}")
    killed.kill()
    before = [killed.said(rank) for rank in range(2)]
    ended = launcher.fork(
        PROGRAM, run, json.dumps({"epochs": 2, "workers": 1, "save_at": "each"}), ranks=3
    ).finished()
    [step] = {int(each.out[0].split()[1]) for each in ended}
    assert per_epoch < step <= HELD < 2 * per_epoch
    # The second epoch, which the ranks of before had begun.
    old = [line for lines in before for line in lines if line.startswith("step ")]
    seen = [i for line in old if per_epoch < int(line.split()[1]) <= step for i in samples(line)]
    assert len(seen) == (step - per_epoch) * 2 * BATCH
    new = [[line for line in each.out if line.startswith("step ")] for each in ended]
    assert len({len(lines) for lines in new}) == 1, "all ranks have as many batches"
    assert [int(line.split()[1]) for line in new[0]] == list(range(step + 1, step + 1 + len(new[0])))
    given = Counter(seen + [i for lines in new for line in lines for i in samples(line)])
    assert given.keys() == set(range(SAMPLES))
    assert given.total() - SAMPLES < 3, "no more is given twice than fills the last round"
