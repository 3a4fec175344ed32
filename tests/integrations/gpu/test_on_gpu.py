"""FSDP2 inside trainers, a GradScaler, and torchtitan's trainer: a run ends with the same bits plain,
unkilled and killed."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integrations import harness
from tests.integrations.harness import Cases
from tests.zygote import Zygote

pytestmark = pytest.mark.process
IMPORTED = ("tests.integrations.gpu.fsdp2", "transformers.trainer")
_ON_GPU = [
    pytest.mark.gpu,
    # `make gpu` gives each test 60 s; these start a dozen processes one after another.
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = [
    pytest.param("cuda", 1, marks=_ON_GPU),
    pytest.param("cpu", 2, marks=[pytest.mark.long, pytest.mark.dist, pytest.mark.timeout(900)]),
]


def skip_without(*modules: str) -> None:
    """`make gpu` builds without a network too, and then has only those packages that the machine has."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, not installed here")


@pytest.fixture(scope="module")
def framework() -> Iterator[Zygote]:
    skip_without("transformers", "accelerate", "trl", "peft", "datasets", "lightning", "torchmetrics")
    # Processes are forked from this one: it may count devices, and must not initialize CUDA.
    counts_by_nvml = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    yield from harness.framework(*IMPORTED, environment=counts_by_nvml)


@pytest.mark.parametrize("case", ["transformers", "lightning"])
@pytest.mark.parametrize(("device", "ranks"), DEVICES)
def test_shards(cases: Cases, case: str, device: str, ranks: int) -> None:
    cases.check(case, ranks=ranks, kills=7, device=device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=_ON_GPU)])
def test_a_scaler(cases: Cases, device: str) -> None:
    cases.check("scaled", kills=7, device=device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=_ON_GPU)])
def test_the_trainer_of_torchtitan(tmp_path: Path, runtime: Path, device: str) -> None:
    skip_without("torchtitan", "torchdata", "tokenizers", "triton")
    module = "tests.integrations.gpu.titan"
    for made in harness.framework(module, environment={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        Cases(module, made, tmp_path, runtime).check("trainer", kills=7, device=device)
