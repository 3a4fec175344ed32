"""`load(path, only=…, strip=True)`: what load_state_dict of a module takes, strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt import NoSuchStepError, OptionError

pytestmark = pytest.mark.usefixtures("runtime")


class Inner(nn.Module):
    """Tied weights, buffers of both kinds, one that is None, and extra state with a tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_buffer("unused", None)
        self.calls: dict[str, Any] = {"n": 0, "sum": torch.zeros(2)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.calls

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = {"n": self.calls["n"] + 1, "sum": self.calls["sum"] + 1}
        y: torch.Tensor = self.out(self.norm(self.embed(x)))
        return y


def build() -> nn.Module:
    return nn.ModuleDict({"first": Inner(), "second": nn.Linear(5, 2)})


def trained(run: Path) -> nn.ModuleDict:
    model = build()
    assert isinstance(model, nn.ModuleDict)
    wrapped = torch.nn.parallel.DataParallel(model)  # its `module.` is in no name
    optimizer = torch.optim.Adam(model.parameters())
    for x in flashckpt.loop([torch.arange(4)] * 3, run, model=wrapped, optimizer=optimizer, own={"lr": 3.0}):
        optimizer.zero_grad()
        model["second"](model["first"](x)).sum().backward()
        optimizer.step()
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    tensors = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in tensors if isinstance(a, torch.Tensor))


def test_a_fresh_module_takes_it_strictly(tmp_path: Path) -> None:
    model, fresh = trained(tmp_path / "run"), build()
    state = flashckpt.load(tmp_path / "run", only="model", strip=True)
    assert not same(model, fresh)
    fresh.load_state_dict(state, strict=True)
    assert same(model, fresh)
    first = fresh["first"]  # type: ignore[index]
    assert first.calls["n"] == 3
    assert torch.equal(first.calls["sum"], torch.full((2,), 3.0))
    assert first.out.weight is first.embed.weight, "as torch has it"
    assert state.keys() == model.state_dict().keys()


def test_a_part_of_a_module(tmp_path: Path) -> None:
    model, fresh = trained(tmp_path / "run"), Inner()
    fresh.load_state_dict(flashckpt.load(tmp_path / "run", 3, only="model.first", strip=True), strict=True)
    assert same(model["first"], fresh)
    plain = flashckpt.load(tmp_path / "run", only="model.second")
    assert set(plain) == {"model.second.weight", "model.second.bias"}


def test_what_no_module_takes_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    with pytest.raises(OptionError, match=r"only=.*optimizer.*attach"):
        flashckpt.load(tmp_path / "run", only="optimizer", strip=True)
    with pytest.raises(OptionError, match="neither a module"):
        flashckpt.load(tmp_path / "run", only="mode", strip=True)
    with pytest.raises(OptionError, match="Name a part"):
        flashckpt.load(tmp_path / "run", strip=True)
    with pytest.raises(NoSuchStepError, match="It has: model, optimizer"):
        flashckpt.load(tmp_path / "run", only="mode")
    with pytest.raises(NoSuchStepError, match="under 'model.third'"):
        flashckpt.load(tmp_path / "run", only="model.third", strip=True)
