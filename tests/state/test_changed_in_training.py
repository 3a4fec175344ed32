"""State that changes its form during training: a persistent buffer is restored as it was saved, and so is the
state that an optimizer keeps in new containers; parameters and groups that the same script would not build
are logged when they are captured."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt import MismatchError

pytestmark = pytest.mark.usefixtures("runtime")


class Observed(nn.Module):
    """A layer with an observer of its outputs, like torch.ao's: ranges that start empty and get a shape."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.register_buffer("min_val", torch.tensor([]))
        self.register_buffer("kept", torch.zeros(2))
        self.in_place = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        lowest = y.detach().amin(dim=0)
        if self.in_place and self.min_val.shape != lowest.shape:
            self.min_val.resize_(lowest.shape)
            self.min_val.copy_(lowest)
        elif self.min_val.shape != lowest.shape:
            self.min_val = lowest
        else:
            self.min_val.copy_(torch.minimum(self.min_val, lowest))
        return y


def train(run: Path, model: nn.Module, steps: int, **named: object) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.ones(2, 4) * number for number in range(steps)]
    for x in flashckpt.loop(batches, run, every=1, model=model, optimizer=optimizer, **named):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("in_place", [False, True])
def test_a_buffer_whose_shape_changed_is_restored(in_place: bool, tmp_path: Path) -> None:
    first = Observed()
    first.in_place = in_place
    train(tmp_path / "run", first, 3)
    for _ in range(2):  # and the restored buffer is known to change
        again = Observed()
        flashckpt.attach(tmp_path / "run", model=again, optimizer=torch.optim.SGD(again.parameters())).close()
        assert again.min_val.shape == (3,)
        assert torch.equal(again.min_val, first.min_val)
        assert "min_val" in again.state_dict(), "it is as persistent as before"
    train(tmp_path / "run", Observed(), 5)
    again = Observed()
    flashckpt.attach(tmp_path / "run", model=again, optimizer=torch.optim.SGD(again.parameters())).close()
    assert again.min_val.shape == (3,)


def test_observers_of_torch_are_restored(tmp_path: Path) -> None:
    from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), PerChannelMinMaxObserver(ch_axis=1), MinMaxObserver())

    first = build()
    train(tmp_path / "run", first, 3)
    again = build()
    flashckpt.attach(tmp_path / "run", model=again, optimizer=torch.optim.SGD(again.parameters())).close()
    saved, found = first.state_dict(), again.state_dict()
    assert saved.keys() == found.keys()
    assert all(torch.equal(saved[name], found[name]) for name in saved)


class Preconditioned(torch.optim.Optimizer):
    """Keeps tensors in a container that each step creates again, as SOAP does with its bases."""

    def __init__(self, parameters: Iterable[nn.Parameter], kept_in: type) -> None:
        super().__init__(parameters, {})
        self._kept_in = kept_in

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            before = (
                list(state["bases"].values() if self._kept_in is dict else state["bases"]) if state else [0]
            )
            now = 0.5 * before[0] + parameter.grad
            state["bases"] = {"left": now} if self._kept_in is dict else self._kept_in([now])
            parameter.sub_(now, alpha=0.01)


@pytest.mark.parametrize("kept_in", [list, tuple, deque, dict])
def test_tensors_in_a_container_created_by_each_step_are_restored(kept_in: type, tmp_path: Path) -> None:
    def trained(run: Path, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = Preconditioned(model.parameters(), kept_in)
        batches = [torch.full((2, 4), float(number)) for number in range(8)]
        for x in flashckpt.loop(batches, run, every=1, steps=steps, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return model, optimizer

    trained(tmp_path / "ended", 5)
    model, optimizer = trained(tmp_path / "ended", 8)
    undisturbed, expected = trained(tmp_path / "whole", 8)
    assert torch.equal(model.weight, undisturbed.weight)
    (found,), (whole,) = (
        each.values() if kept_in is dict else each
        for each in (optimizer.state[model.weight]["bases"], expected.state[undisturbed.weight]["bases"])
    )
    assert torch.equal(found, whole)


def test_other_changes_of_shape_are_differences(tmp_path: Path) -> None:
    """Another layer is another model, and so is a buffer that never changed its shape."""
    train(tmp_path / "run", Observed(), 3)
    other = Observed(width=5)
    before = other.layer.weight.detach().clone()
    with pytest.raises(MismatchError, match=r"model\.layer\.weight"):
        train(tmp_path / "run", other, 5)
    assert torch.equal(other.layer.weight, before)
    assert other.min_val.numel() == 0
    wider = Observed()
    wider.kept = torch.zeros(7)
    with pytest.raises(MismatchError, match=r"model\.kept"):
        train(tmp_path / "run", wider, 5)
    double = Observed()
    double.min_val = torch.tensor([], dtype=torch.float64)
    with pytest.raises(MismatchError, match=r"model\.min_val"):
        train(tmp_path / "run", double, 5)


def test_a_group_added_in_training_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, more = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = flashckpt.loop(
        [torch.ones(2, 4)] * 6, tmp_path / "run", every=1, model=model, more=more, optimizer=optimizer
    )
    for x in batches:
        if batches.completed == 3:
            assert "have changed since attach" not in caplog.text
            optimizer.add_param_group({"params": list(more.parameters())})
        optimizer.zero_grad()
        more(model(x)).sum().backward()
        optimizer.step()
    [message] = [r.getMessage() for r in caplog.records if "have changed since attach" in r.getMessage()]
    assert "optimizer.groups.1" in message
    assert "MismatchError" in message


def test_parameters_added_in_training_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.columns = nn.ParameterList([nn.Parameter(torch.ones(4))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([(x * column).sum() for column in self.columns])

    model = Growing()
    batches = flashckpt.loop([torch.ones(2, 4)] * 4, tmp_path / "run", every=1, model=model)
    for x in batches:
        model(x).sum().backward()
        if batches.completed == 2:
            model.columns.append(nn.Parameter(torch.ones(4)))
    assert caplog.text.count("have changed since attach (model.columns.1)") == 1
    with pytest.raises(MismatchError, match=r"model\.columns\.1"):
        flashckpt.attach(tmp_path / "run", model=Growing())
