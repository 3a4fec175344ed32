"""Lightning's Trainer ends with the same bits plain, with flashckpt, and with flashckpt killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations import harness
from tests.zygote import Zygote

pytestmark = pytest.mark.process
CASES = "tests.integrations.lightning.cases"


@pytest.fixture(scope="module")
def framework() -> Iterator[Zygote]:
    yield from harness.framework(CASES)


@pytest.mark.parametrize(
    "case",
    [
        "accumulated",
        "plateau",
        "manual",
        "stream",
        "max_steps",
        "average",
        "metrics",
        pytest.param("map_style", marks=pytest.mark.long),
        pytest.param("workers", marks=pytest.mark.long),
        pytest.param("persistent_workers", marks=pytest.mark.long),
        pytest.param("plain_stream", marks=pytest.mark.long),
    ],
)
def test_a_killed_fit_ends_as_a_plain_one(
    framework: Zygote, tmp_path: Path, runtime: Path, case: str
) -> None:
    harness.check(f"{CASES}:{case}", framework, tmp_path, runtime)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_several_loaders(framework: Zygote, tmp_path: Path, runtime: Path, mode: str, stream: bool) -> None:
    harness.check(f"{CASES}:several_loaders", framework, tmp_path, runtime, mode=mode, stream=stream)
