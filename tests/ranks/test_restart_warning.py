"""`attach` warns on rank 0 while torchrun has restarts left that can hang before flashckpt is called."""

from pathlib import Path

import pytest
import torch

import flashckpt
from tests.ranks.launch import Launcher

VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


@pytest.mark.dist
def test_rank_0_warns_once_while_restarts_are_left(launcher: Launcher, tmp_path: Path) -> None:
    job = launcher.fork(
        "tests.ranks.paced", tmp_path / "run", '{"steps": 1}',
        environment={"TORCHELASTIC_MAX_RESTARTS": "3"},
    )  # fmt: skip
    assert [each.err.count(VARIABLE) for each in job.finished()] == [1, 0]


@pytest.mark.parametrize(
    ("restart", "shares_store", "warnings"), [("2", "True", 1), ("3", "True", 0), ("2", "False", 0)]
)
@pytest.mark.every_set
def test_no_warning_without_restarts_or_where_ranks_have_a_store_of_their_own(
    restart: str,
    shares_store: str,
    warnings: int,
    tmp_path: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shares_store)
    flashckpt.attach(tmp_path / "run", w=torch.zeros(1)).close()
    assert caplog.text.count(VARIABLE) == warnings
