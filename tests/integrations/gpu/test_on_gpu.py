"""FSDP2 inside trainers, a GradScaler, and torchtitan's trainer: a run ends with the same bits plain,
unkilled and killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integrations import harness
from tests.zygote import Zygote

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
CASES = "tests.integrations.gpu.fsdp2"
_ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = [
    pytest.param("cuda", 1, marks=_ON_GPU),
    pytest.param("cpu", 2, marks=[pytest.mark.long, pytest.mark.dist]),
]


@pytest.fixture(scope="module")
def framework() -> Iterator[Zygote]:
    # Processes are forked from this one: it may count devices, and must not initialize CUDA.
    counts_by_nvml = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    yield from harness.framework("transformers.trainer", CASES, environment=counts_by_nvml)


@pytest.mark.parametrize("case", ["transformers", "lightning"])
@pytest.mark.parametrize(("device", "ranks"), DEVICES)
def test_shards(framework: Zygote, tmp_path: Path, runtime: Path, case: str, device: str, ranks: int) -> None:
    harness.check(f"{CASES}:{case}", framework, tmp_path, runtime, ranks=ranks, kills=7, device=device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=_ON_GPU)])
def test_a_scaler(framework: Zygote, tmp_path: Path, runtime: Path, device: str) -> None:
    harness.check(f"{CASES}:scaled", framework, tmp_path, runtime, kills=7, device=device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=_ON_GPU)])
def test_the_trainer_of_torchtitan(tmp_path: Path, runtime: Path, device: str) -> None:
    case = "tests.integrations.gpu.titan"
    for made in harness.framework(case, environment={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        harness.check(f"{case}:trainer", made, tmp_path, runtime, kills=7, device=device)
