"""flashckpt.transformers.train: killed anywhere, a run ends as one that was never stopped, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations import harness
from tests.zygote import Zygote

CASES = "tests.integrations.hf.cases"


@pytest.fixture(scope="module")
def framework() -> Iterator[Zygote]:
    """transformers, trl and peft are imported once."""
    yield from harness.framework("transformers.trainer", CASES)


@pytest.mark.parametrize(
    "case",
    [
        "evaluates_and_saves", "stops_early", "accumulates_in_workers", "persistent_workers", "stream",
        "stream_of_steps", "steps_in_bf16", "compiled", "plateau", "adapter", "sft", "dpo", "grpo",
    ],
)  # fmt: skip
def test_killed(framework: Zygote, tmp_path: Path, runtime: Path, case: str) -> None:
    harness.check(f"{CASES}:case_{case}", framework, tmp_path, runtime)
