"""What the user copies, pickles or sends to another process while a run is attached: as without us, and with
nothing of ours in it."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import flashckpt

pytestmark = pytest.mark.usefixtures("runtime")

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_state_dict_hooks")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class OpenOptimizer(torch.optim.SGD):
    """Copies and pickles everything that it has, its hooks too."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def made() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model, "optimizer": optimizer, "scheduler": StepLR(optimizer, 2)}


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2, shuffle=True)


def looped(run: Path, state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The state before the loop, and in each iteration before its forward, after it and after the step."""
    model = state["model"]
    with flashckpt.attach(run, every=1, **state) as checkpointer:
        yield state
        for (x,) in checkpointer.batches(data()):
            yield state
            loss = model(x).square().sum()
            yield state
            loss.backward()
            state["optimizer"].step()
            if "scheduler" in state:
                state["scheduler"].step()
            state["optimizer"].zero_grad()
            yield state


def hooks_of(state: dict[str, Any]) -> int:
    modules = state["model"].modules()
    found = sum(len(getattr(module, name)) for module in modules for name in _HOOKS)
    return found + sum(len(getattr(state["optimizer"], name)) for name in _STEP_HOOKS)


def pickled(state: dict[str, Any]) -> dict[str, Any]:
    data = pickle.dumps(state)
    assert b"flashckpt" not in data
    found: dict[str, Any] = pickle.loads(data)
    return found


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_a_copy_of_what_is_attached_carries_nothing(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    keys = {name: set(vars(each)) for name, each in way(made()).items()}
    count = 0
    for state in looped(tmp_path / "run", made()):
        copied = way(state)
        if count % 3 == 1:
            assert hooks_of(copied) <= 1  # the model's own, which the first call takes off
            copied["model"](torch.ones(2, 4))
            copied["model"].load_state_dict(state["model"].state_dict())
        assert hooks_of(copied) == 0
        assert {name: set(vars(each)) - {"_opt_called"} for name, each in copied.items()} == keys
        assert str(copied["model"].state_dict()) == str(state["model"].state_dict())
        copied["model"](torch.ones(2, 4)).sum().backward()
        copied["optimizer"].step()
        count += 1
    assert count == 19


def test_a_saved_model_loads_where_flashckpt_is_not(tmp_path: Path) -> None:
    for state in looped(tmp_path / "run", made()):
        torch.save(state, tmp_path / "whole.pt")
    script = """
import sys
sys.modules["flashckpt"] = None
import torch
state = torch.load(sys.argv[1], weights_only=False)
state["model"](torch.ones(2, 4)).sum().backward()
state["optimizer"].step()
"""
    command = [sys.executable, "-c", script, str(tmp_path / "whole.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_optimizer_that_copies_its_hooks_can_be_copied(tmp_path: Path) -> None:
    """A copy's hooks do nothing, and none is ours."""
    model = nn.Linear(4, 4)
    state = {"model": model, "optimizer": OpenOptimizer(model.parameters(), lr=0.1)}
    for each in looped(tmp_path / "run", state):
        for copied in (copy.deepcopy(each), pickled(each)):
            hooks = [hook for name in _STEP_HOOKS for hook in getattr(copied["optimizer"], name).values()]
            assert len(hooks) == hooks_of(each) - len(each["model"]._forward_pre_hooks)
            assert {type(getattr(hook, "__self__", hook)) for hook in hooks} <= {contextlib.nullcontext}
            copied["model"](torch.ones(2, 4)).sum().backward()
            copied["optimizer"].step()


def received(state: dict[str, Any], answer: Any) -> None:
    answer.send((hooks_of(state), float(state["model"](torch.ones(2, 4)).sum().detach())))


@pytest.mark.long
def test_what_is_attached_can_be_sent_to_a_spawned_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    for count, state in enumerate(looped(tmp_path / "run", made())):
        if count == 5:
            process = context.Process(target=received, args=(state, theirs))
            process.start()
            assert ours.poll(120)
            assert ours.recv()[0] == 0
            process.join()
            assert process.exitcode == 0
