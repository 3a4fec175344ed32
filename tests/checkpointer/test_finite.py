"""Parameters that are no longer finite: one warning names the leaf and the step."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import flashckpt
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("runtime")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in list(caplog.records) if "not finite" in each.getMessage()]


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "cannot be checked" in each or "keeper link met" in each]


def train(run: Path, caplog: pytest.LogCaptureFixture, model: nn.Module, *, bad_at: int, waits: bool) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    batches = flashckpt.loop([torch.ones(2, 4)] * 6, run, every=1, model=model, optimizer=optimizer)
    for batch in batches:
        loss = model(batch).square().mean()
        (loss * (float("nan") if batches.completed >= bad_at else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if waits and batches.completed > bad_at:
            until(lambda: bool(told(caplog)), "the warning while the loop runs")


@pytest.mark.parametrize(("dtype", "waits"), [(torch.bfloat16, True), (torch.float32, False)], ids=str)
def test_one_warning_names_leaf_and_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, waits: bool
) -> None:
    torch.set_default_dtype(dtype)
    try:
        train(tmp_path, caplog, nn.Linear(4, 4), bad_at=1, waits=waits)
    finally:
        torch.set_default_dtype(torch.float32)
    (line,) = told(caplog)
    assert line.startswith(("model.weight has elements", "model.bias has elements"))
    assert f"flashckpt branch {tmp_path} STEP" in line
    assert any(f"in the snapshot of step {step}," in line for step in range(2, 7))


def test_a_single_element_of_a_large_leaf_is_found_in_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    wide = nn.Parameter(torch.ones(5000))
    with torch.no_grad():
        wide[4500] = float("inf")
    checkpointer = flashckpt.attach(tmp_path, every=1, model=nn.ParameterList([wide]), other=model)

    def found() -> bool:
        model(torch.ones(2, 4))
        checkpointer.step()
        return bool(told(caplog))

    until(found, "the warning")
    checkpointer.close()
    (line,) = told(caplog)
    assert line.startswith("model.0 has elements")


def test_what_is_finite_or_frozen_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flashckpt")
    model = nn.Linear(4, 4)
    model.register_parameter("mask", nn.Parameter(torch.full((4,), float("-inf")), requires_grad=False))
    model.register_parameter("large", nn.Parameter(torch.full((4,), 1e300, dtype=torch.float64)))
    model.register_buffer("lowest", torch.full((4,), float("-inf")))
    train(tmp_path, caplog, model, bad_at=100, waits=False)
    assert told(caplog) == []
    assert failures(caplog) == []
