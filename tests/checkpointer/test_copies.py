"""What the user copies, pickles or sends to another process while a run is attached: as without us, and with
nothing of ours in it."""

import contextlib
import copy
import pickle
from collections.abc import Iterator
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
    """It can be read where flashckpt is not installed."""
    data = pickle.dumps(state)
    assert b"flashckpt" not in data
    found: dict[str, Any] = pickle.loads(data)
    return found


def test_a_copy_of_what_is_attached_carries_nothing(tmp_path: Path) -> None:
    ways = (copy.deepcopy, pickled)
    keys = [{name: set(vars(each)) for name, each in way(made()).items()} for way in ways]
    count = 0
    for state in looped(tmp_path / "run", made()):
        for way, expected in zip(ways, keys, strict=True):
            copied = way(state)
            if count % 3 == 1:
                assert hooks_of(copied) <= 1  # the model's own, which the first call takes off
                copied["model"](torch.ones(2, 4))
                copied["model"].load_state_dict(state["model"].state_dict())
            assert hooks_of(copied) == 0
            assert {name: set(vars(each)) - {"_opt_called"} for name, each in copied.items()} == expected
            assert str(copied["model"].state_dict()) == str(state["model"].state_dict())
            copied["model"](torch.ones(2, 4)).sum().backward()
            copied["optimizer"].step()
        count += 1
    assert count == 19


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
