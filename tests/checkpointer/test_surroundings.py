"""`attach` does not initialise CUDA, which no child that is forked later could use then; snapshots name the
devices that are in use."""

from pathlib import Path
from typing import Any

import pytest
import torch

import flashckpt
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.checkpointer.test_loop import Job, loader

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch as it is built for CUDA, on a machine with a GPU and no NVML: which calls start the driver
    (after it no forked child can use CUDA) or make a context."""
    Job()  # torch imports its compiler with the first optimizer, which needs torch as it really is
    found: list[str] = []

    def count() -> int:
        found.append("driver")
        return 1

    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", count, raising=False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: found.append("context"))
    return found


def environment_of(run: Path) -> Any:
    store = LocalStore(str(run))
    return run_view.read(store, run_view.visible(store)[-1]).parts[0].environment


def train(run: Path, job: Job, epochs: int) -> None:
    for x in flashckpt.loop(loader(2), run, every=1, epochs=epochs, **job.named):
        job.train(x)


def test_a_run_in_host_memory_never_starts_cuda(tmp_path: Path, asked: list[str]) -> None:
    """At its start and at a resume, with random numbers put back in both."""
    train(tmp_path / "run", Job(), 1)
    train(tmp_path / "run", Job(), 2)
    assert flashckpt.steps(tmp_path / "run")[-1] == 4
    assert asked == []
    assert environment_of(tmp_path / "run")["devices"] == 0


def test_a_snapshot_names_the_device_that_is_in_use_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    with flashckpt.attach(tmp_path / "run", every=1, **job.named) as checkpointer:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        job.train(torch.ones(2, 4))
        checkpointer.step()
    found = environment_of(tmp_path / "run")
    assert (found["device"], found["devices"]) == ("NVIDIA H100", 8)
