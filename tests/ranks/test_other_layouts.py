"""A run goes on with more ranks or fewer, on another mesh, in one process, with the same state to the bit."""

from pathlib import Path

import pytest

from tests.ranks.launch import Ended, Launcher
from tests.ranks.relaid import DATA_PARALLEL, SAMPLES

pytestmark = pytest.mark.dist
PROGRAM = "tests.ranks.relaid"
LAYOUTS = [("fsdp", 3), ("tp", 2), ("one", 1), ("ddp", 2), ("fsdp", 2)]


def said(ended: Ended, word: str) -> str:
    [line] = [line for line in ended.out if line.startswith(f"{word} ")]
    return line.removeprefix(f"{word} ")


def test_a_run_goes_on_with_other_ranks_and_meshes(launcher: Launcher, tmp_path: Path) -> None:
    """One epoch on each layout; what is in memory of the one before is of no use to the next."""
    ends, steps = "", 0
    for epochs, (layout, ranks) in enumerate(LAYOUTS, 1):
        ended = launcher.fork(PROGRAM, tmp_path / "run", layout, epochs, ranks=ranks).finished()
        for rank in ended:
            assert rank.out[0] == (f"resumed {steps} local" if steps else "began")
            if steps:
                assert said(rank, "begins") == ends, (layout, ranks)
            assert epochs != 2 or "own differs from rank to rank in step" in rank.err
        [ends] = {said(rank, "ends") for rank in ended}
        steps += 2
        shares = ended if layout in DATA_PARALLEL else ended[:1]
        seen = [int(number) for rank in shares for number in said(rank, "samples").split("-")]
        assert sorted(seen) == list(range(SAMPLES)), "each sample once in the epoch"
