"""`save`, `async_save` and `load` of flashckpt.dcp, in one process."""

from concurrent.futures import Future
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import flashckpt
import flashckpt.dcp as dcp
from flashckpt.errors import MismatchError, NoSuchStepError, OptionError, StateError
from tests.dcp.states import equal, state
from tests.dcp.test_writer import Custom, sliced
from tests.folders import flip
from tests.zygote import Zygote

pytestmark = [
    pytest.mark.process,
    pytest.mark.usefixtures("let_go"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def let_go(runtime: Path) -> Any:
    yield
    dcp.close()


def loaded(run: Path, **how: Any) -> dict[str, Any]:
    found = state(9)
    dcp.load(found, checkpoint_id=run, **how)
    return found


def test_each_save_is_a_step_and_a_load_takes_the_newest(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        assert dcp.save(state(seed), checkpoint_id=tmp_path) == seed
    assert equal(loaded(tmp_path), state(3))
    assert equal(loaded(tmp_path, step=2), state(2))
    assert flashckpt.verify(tmp_path).ok
    torch.manual_seed(0)
    given, found = nn.Linear(3, 2), nn.Linear(3, 2)
    other = tmp_path / "a folder for each save"
    assert dcp.save({"model": given}, checkpoint_id=other) == 1
    dcp.load({"model": found}, checkpoint_id=other)
    assert equal(found.state_dict(), given.state_dict()), "objects are saved by their state_dict"
    assert equal(loaded(tmp_path), state(3))


def test_changes_after_async_save_are_not_saved(tmp_path: Path) -> None:
    given = state(1)
    before = deepcopy(given)
    first = dcp.async_save(given, checkpoint_id=tmp_path)
    given["model"]["weight"].zero_()
    given["values"]["set"].add("more")
    second = dcp.async_save(given, checkpoint_id=tmp_path)
    assert isinstance(first, Future)
    assert equal(loaded(tmp_path), given), "of the save that is still written"
    assert (first.result(), second.result()) == (1, 2)
    assert equal(loaded(tmp_path, step=1), before)


def test_dcp_reads_a_run_of_attach(tmp_path: Path) -> None:
    def built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model.register_buffer("left_out", torch.ones(1), persistent=False)
        model.add_module("tied", model[0])
        return model, torch.optim.AdamW(model.parameters(), 0.1 / (seed + 1), betas=(0.5, 0.6))

    def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        taken = get_state_dict(model, optimizer)
        return {"model": taken[0], "optimizer": taken[1]}

    model, optimizer = built(0)
    own = {"n": 3, "held": [torch.ones(2), {"deep": (1, 2)}], 5: bytes(70_000)}
    with flashckpt.attach(tmp_path, every=None, model=model, optimizer=optimizer, own=own) as checkpointer:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        checkpointer.step()
    found = {**states(*built(1)), "own": {"n": 0, "held": [torch.zeros(2), {"deep": ()}], 5: b""}}
    torch_dcp.load(found, storage_reader=dcp.Reader(tmp_path), planner=dcp.LoadPlanner(), no_dist=True)
    assert equal(found, {**states(model, optimizer), "own": own})
    names = dcp.Reader(tmp_path).read_metadata().state_dict_metadata
    assert "model.0.weight" in names
    assert not any("left_out" in name or name.startswith(("gradients", "rng")) for name in names)


# Refused


def test_foreign_arguments_are_refused_by_name(tmp_path: Path) -> None:
    planner: Any = torch_dcp.DefaultSavePlanner()
    with pytest.raises(OptionError, match="planner=DefaultSavePlanner"):
        dcp.save(state(1), checkpoint_id=tmp_path, planner=planner)
    writer: Any = torch_dcp.FileSystemWriter(tmp_path)
    with pytest.raises(OptionError, match="storage_writer=FileSystemWriter"):
        dcp.async_save(state(1), checkpoint_id=tmp_path, storage_writer=writer)
    reader: Any = torch_dcp.FileSystemReader(tmp_path)
    with pytest.raises(OptionError, match="storage_reader=FileSystemReader"):
        dcp.load(state(1), checkpoint_id=tmp_path, storage_reader=reader)
    assert not (tmp_path / "catalogue").exists()


def test_a_run_and_a_folder_of_a_writer_are_not_mixed(tmp_path: Path) -> None:
    def write(folder: str) -> None:
        made = dcp.Writer(tmp_path / folder)
        torch_dcp.save(state(1), storage_writer=made, planner=dcp.SavePlanner(), no_dist=True)

    dcp.save(state(2), checkpoint_id=tmp_path / "run")
    with pytest.raises(torch_dcp.CheckpointException, match="is a run"):
        write("run")
    write("folder")
    with pytest.raises(OptionError, match=r"flashckpt\.dcp\.Writer"):
        dcp.save(state(2), checkpoint_id=tmp_path / "folder")
    assert equal(loaded(tmp_path / "run"), state(2))
    assert equal(loaded(tmp_path / "folder"), state(1))


def test_a_run_of_a_training_keeps_its_steps(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with flashckpt.attach(tmp_path, every=None, model=model) as checkpointer:
        checkpointer.save()
    before = flashckpt.steps(tmp_path)
    with pytest.raises(OptionError, match="has steps of model: it is the run of a training"):
        dcp.save(state(1), checkpoint_id=tmp_path)
    assert flashckpt.steps(tmp_path) == before
    with flashckpt.attach(tmp_path, every=None, model=model) as checkpointer:
        assert checkpointer.resumed is not None


def test_unsupported_values_are_refused_and_the_next_save_works(tmp_path: Path) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path)
    with pytest.raises(StateError, match=r"mine\.odd.*Custom"):
        dcp.save({**state(2), "mine": {"odd": Custom()}}, checkpoint_id=tmp_path)
    with pytest.raises(StateError, match=r"mine\.w has slices"):
        dcp.save({"mine": {"w": sliced()}}, checkpoint_id=tmp_path)
    assert equal(loaded(tmp_path), state(1))
    dcp.save(state(3), checkpoint_id=tmp_path)
    assert equal(loaded(tmp_path), state(3))


def test_a_failed_load_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoSuchStepError):
        loaded(tmp_path / "none")
    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=tmp_path)
    found = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    with pytest.raises(MismatchError, match=r"model\.b: missing in the checkpoint"):
        dcp.load(found, checkpoint_id=tmp_path)
    assert int(found["model"]["a"].sum()) == 0
    flip(next(tmp_path.rglob("*.safetensors")), -1)
    found = {"model": {"a": torch.zeros(2)}}
    with pytest.raises(flashckpt.DamagedError):
        dcp.load(found, checkpoint_id=tmp_path)
    assert int(found["model"]["a"].sum()) == 0


def test_switched_off_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHCKPT", "off")
    assert dcp.save(state(1), checkpoint_id=tmp_path / "run") == 0
    assert not (tmp_path / "run").exists()


def test_another_process_may_save_after_close(tmp_path: Path, zygote: Zygote) -> None:
    dcp.save(state(1), checkpoint_id=tmp_path)
    held = zygote.run(["tests.dcp.mortal", "functions", str(tmp_path)])
    assert "RunHeldError" in held.stderr
    dcp.close()
    assert zygote.run(["tests.dcp.mortal", "functions", str(tmp_path)]).returncode == 0
    # Another structure than that of the run's steps, which is neither restored nor compared.
    other = {"mine": torch.arange(3)}
    assert dcp.save(other, checkpoint_id=tmp_path) == 4
    found = {"mine": torch.zeros(3, dtype=torch.int64)}
    dcp.load(found, checkpoint_id=tmp_path)
    assert equal(found, other)
    assert flashckpt.steps(tmp_path) == [2, 3, 4]
    assert equal(loaded(tmp_path, step=3), state(2))
