"""The examples of several ranks: killed in the middle and started again, they end with the bits of a run that
nobody disturbed."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file

import flashckpt
from flashckpt.export.step import export
from flashckpt.store import open_store
from tests.ranks.launch import Launch, Launcher
from tests.waiting import until

pytestmark = pytest.mark.dist
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "ranks"
HELD, SAVED = 9, 7


def losses(launch: Launch, rank: int) -> list[str]:
    return [line for line in launch.said(rank) if line.startswith(f"rank {rank} step ")]


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel"])
def test_an_example_goes_on_after_a_kill_bit_for_bit(launcher: Launcher, tmp_path: Path, name: str) -> None:
    script, program = EXAMPLES / f"{name}.py", "tests.ranks.held"
    whole = launcher.fork(program, script, 0, tmp_path / "whole", "--epochs", 1)
    whole.finished()
    run = tmp_path / "run"
    killed = launcher.fork(program, script, HELD, run, "--epochs", 1)
    killed.until_said(f"held {HELD}")
    until(lambda: flashckpt.steps(run), "a step that all ranks have written")
    killed.kill()
    again = launcher.fork(program, script, 0, run, "--epochs", 1)
    again.finished()
    for rank in range(2):
        before, after = losses(killed, rank), losses(again, rank)
        assert len(before) == HELD
        first = int(after[0].split()[3])
        assert SAVED <= first - 1 <= HELD
        assert before[: first - 1] + after == losses(whole, rank)
    names = [tmp_path / f"{folder}.safetensors" for folder in ("whole", "run")]
    for out in names:
        export(open_store(out.with_suffix("")), str(out))
    [expected, found] = map(load_file, names)
    assert expected.keys() == found.keys()
    assert all(expected[name].tobytes() == found[name].tobytes() for name in expected)
