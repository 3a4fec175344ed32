"""A script that changes an optimizer's options between two starts: one line names the values that count."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import flashckpt

pytestmark = pytest.mark.usefixtures("runtime")

Make = Callable[[nn.Module], Optimizer]


def start(
    run: Path,
    make: Make,
    schedule: Callable[[Optimizer], LRScheduler] | None = None,
    *,
    steps: int,
    after: dict[str, Any] | None = None,
    rate: Callable[[int], float] | None = None,
) -> Optimizer:
    """One life of a script. after: options that it sets after `loop`. rate: its own schedule."""
    model = nn.Linear(4, 4)
    optimizer = make(model)
    named: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if schedule is not None:
        named["scheduler"] = schedule(optimizer)
    batches = flashckpt.loop([torch.ones(2, 4)] * 2, run, every=1, steps=steps, **named)
    optimizer.param_groups[0].update(after or {})
    for batch in batches:
        if rate is not None:
            optimizer.param_groups[0]["lr"] = rate(batches.completed)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            named["scheduler"].step()
    return optimizer


def adamw(**options: Any) -> Make:
    return lambda model: AdamW(model.parameters(), **options)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [each for each in caplog.messages if "options of optimizers" in each]
    caplog.clear()
    return found


def test_one_line_has_both_values_at_each_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, adamw(lr=0.1, weight_decay=0.0), steps=2)
    assert told(caplog) == []
    changed = adamw(lr=0.001, weight_decay=0.3)
    for steps in (4, 6):  # also at the second start after the change
        optimizer = start(tmp_path, changed, steps=steps)
        (line,) = told(caplog)
        assert "optimizer: lr is 0.1 as in the checkpoint, and not 0.001 as in the script" in line
        assert "optimizer: weight_decay is 0.0 as in the checkpoint, and not 0.3" in line
        assert "set it in optimizer.param_groups after attach or loop" in line
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_what_the_remedy_sets_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, adamw(lr=0.1), steps=2)
    assert start(tmp_path, adamw(lr=0.01), steps=4, after={"lr": 0.01}).param_groups[0]["lr"] == 0.01
    assert len(told(caplog)) == 1
    assert start(tmp_path, adamw(lr=0.01), steps=6).param_groups[0]["lr"] == 0.01
    assert told(caplog) == []


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, step / 4)),
        lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=20),  # changes the betas too
    ],
    ids=["warmup", "OneCycleLR"],
)
def test_a_scheduler_is_no_change(tmp_path: Path, caplog: pytest.LogCaptureFixture, schedule: Any) -> None:
    for steps in (2, 4):
        start(tmp_path, adamw(lr=0.1), schedule, steps=steps)
        assert told(caplog) == []


def test_a_changed_base_rate_of_a_scheduler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warmup(optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: min(1.0, step / 4))  # the first rate is 0.0 in both starts

    start(tmp_path, adamw(lr=0.1), warmup, steps=2)
    start(tmp_path, adamw(lr=0.2), warmup, steps=4)
    (line,) = told(caplog)
    assert "lr is 0.1 as in the checkpoint, and not 0.2" in line


def test_a_loop_that_sets_the_rate_is_no_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for steps in (2, 4):
        start(tmp_path, adamw(lr=0.1), steps=steps, rate=lambda step: 0.1 / (step + 1))
        assert told(caplog) == []
