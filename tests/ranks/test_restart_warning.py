"""`attach` warns on rank 0 while torchrun has restarts left that can hang before flashckpt is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashckpt.options import Environment
from tests.ranks.launch import Launcher

pytestmark = pytest.mark.dist
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ranks" / "ddp.py"
VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


@pytest.mark.parametrize(("restart", "warnings"), [(0, [1, 0]), (3, [0, 0])])
def test_rank_0_warns_once_while_restarts_are_left(
    launcher: Launcher, tmp_path: Path, restart: int, warnings: list[int]
) -> None:
    job = launcher.fork(
        "tests.ranks.held", EXAMPLE, 0, tmp_path / "run", "--epochs", 1,
        restart=restart, environment={"TORCHELASTIC_MAX_RESTARTS": "3"},
    )  # fmt: skip
    ended = job.finished()
    assert [each.err.count(VARIABLE) for each in ended] == warnings


def test_no_warning_where_ranks_have_a_store_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert Environment.read().shares_rendezvous_store
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert not Environment.read().shares_rendezvous_store
