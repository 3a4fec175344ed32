"""What `flashckpt.accelerate` refuses, by name, before anything starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import flashckpt.accelerate
from flashckpt.accelerate import attach
from flashckpt.errors import BoundaryError, MismatchError, OptionError
from flashckpt.state.loader.sources import source_of

accelerate: Any = None


@pytest.fixture(autouse=True, scope="module")
def _accelerate() -> None:
    """Import Accelerate in the tests, and not in each worker that collects them."""
    global accelerate
    accelerate = pytest.importorskip("accelerate")


@pytest.fixture
def accelerator() -> Any:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True)


def _stand_in(**changed: Any) -> Any:
    usual: dict[str, Any] = {
        "_models": [torch.nn.Linear(1, 1)], "_optimizers": [], "_schedulers": [], "_dataloaders": [],
        "_custom_objects": [], "scaler": None, "step": 0, "gradient_state": SimpleNamespace(),
        "project_configuration": SimpleNamespace(iteration=0), "distributed_type": "NO",
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **changed})


def test_refusals_start_nothing(tmp_path: Path) -> None:
    kinds = accelerate.DistributedType
    refused: list[tuple[str, Any, dict[str, Any]]] = [
        ("DeepSpeed", _stand_in(distributed_type=kinds.DEEPSPEED), {}),
        ("Megatron-LM", _stand_in(distributed_type=kinds.MEGATRON_LM), {}),
        ("A dict has no _models", {}, {}),
        ("has prepared no model", _stand_in(_models=[]), {}),
        ("state= has model", _stand_in(), {"state": {"model": torch.nn.Linear(1, 1)}}),
        ("has no option evry", _stand_in(), {"evry": 1}),
    ]
    for message, given, options in refused:
        with pytest.raises(OptionError, match=message):
            attach(given, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("runtime")
def test_only_what_the_accelerator_does_not_hold_is_unnamed(
    accelerator: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer: Any = torch.optim.Adam(model.parameters())
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(list(torch.ones(8, 4)), 4)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    ema = torch.optim.swa_utils.AveragedModel(model)
    with attach(accelerator, tmp_path, every=1) as run:
        for batch in run.batches(loader):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            scheduler.step()
            ema.update_parameters(model)
    (line,) = [each for each in caplog.messages if "not saved" in each]
    assert line.startswith("not saved, because no name covers it: ema (AveragedModel). After")
    assert 'attach(…, state={"ema": ema})' in line


def test_a_loader_that_skips_batches_is_refused(accelerator: Any) -> None:
    loader = accelerator.prepare(DataLoader(list(range(20)), 4))
    skipping = accelerate.data_loader.DataLoaderShard(list(range(20)), batch_size=4, skip_batches=2)
    with pytest.raises(BoundaryError, match="skips its first"):
        source_of(skipping)
    with pytest.raises(BoundaryError, match="draws batches in an unknown way"):
        source_of(accelerate.data_loader.SkipDataLoader(list(range(20)), skip_batches=1, batch_size=4))
    assert len(source_of(loader)) == 5
    for each in (loader, accelerator.prepare(DataLoader(list(range(20)), 4, shuffle=True))):
        with pytest.raises(BoundaryError, match="skips its first 2 batches"):
            source_of(accelerate.skip_first_batches(each, 2))


@pytest.mark.process
def test_a_run_of_another_loop_is_refused(accelerator: Any, tmp_path: Path, runtime: Path) -> None:
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with flashckpt.attach(tmp_path / "run", model=model) as plain:
        plain.step()
    with pytest.raises(MismatchError, match=r"a loop of the program, and flashckpt\.accelerate"):
        attach(accelerator, tmp_path / "run")
