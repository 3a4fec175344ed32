"""`load(path, only=…, strip=True)`: what load_state_dict of a module takes, strictly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt import NoSuchStepError, OptionError


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


@pytest.mark.usefixtures("runtime")
def test_load_state_dict_takes_what_was_loaded(tmp_path: Path) -> None:
    run, model = tmp_path / "run", build()
    assert isinstance(model, nn.ModuleDict)
    wrapped = torch.nn.parallel.DataParallel(model)  # its `module.` is in no name
    optimizer = torch.optim.Adam(model.parameters())
    for x in flashckpt.loop([torch.arange(4)] * 3, run, model=wrapped, optimizer=optimizer, own={"lr": 3.0}):
        optimizer.zero_grad()
        model["second"](model["first"](x)).sum().backward()
        optimizer.step()
    a_fresh_module_takes_it_strictly(run, model)
    a_part_of_a_module(run, model)
    what_no_module_takes_is_refused(run)


def same(one: nn.Module, other: nn.Module) -> bool:
    tensors = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in tensors if isinstance(a, torch.Tensor))


def a_fresh_module_takes_it_strictly(run: Path, model: nn.Module) -> None:
    fresh = build()
    state = flashckpt.load(run, only="model", strip=True)
    assert not same(model, fresh)
    fresh.load_state_dict(state, strict=True)
    assert same(model, fresh)
    first = fresh["first"]  # type: ignore[index]
    assert first.calls["n"] == 3
    assert torch.equal(first.calls["sum"], torch.full((2,), 3.0))
    assert first.out.weight is first.embed.weight, "as torch has it"
    assert state.keys() == model.state_dict().keys()


def a_part_of_a_module(run: Path, model: nn.ModuleDict) -> None:
    fresh = Inner()
    fresh.load_state_dict(flashckpt.load(run, 3, only="model.first", strip=True), strict=True)
    assert same(model["first"], fresh)
    plain = flashckpt.load(run, only="model.second")
    assert set(plain) == {"model.second.weight", "model.second.bias"}


def what_no_module_takes_is_refused(run: Path) -> None:
    with pytest.raises(OptionError, match=r"only=.*optimizer.*attach"):
        flashckpt.load(run, only="optimizer", strip=True)
    with pytest.raises(OptionError, match="neither a module"):
        flashckpt.load(run, only="mode", strip=True)
    with pytest.raises(OptionError, match="Name a part"):
        flashckpt.load(run, strip=True)
    with pytest.raises(NoSuchStepError, match="It has: model, optimizer"):
        flashckpt.load(run, only="mode")
    with pytest.raises(NoSuchStepError, match="under 'model.third'"):
        flashckpt.load(run, only="model.third", strip=True)
