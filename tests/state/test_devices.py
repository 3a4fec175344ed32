"""State on an unsupported device is refused at attach, with the name of its leaf."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashckpt
from flashckpt.errors import StateError
from flashckpt.state.tree import Tree


class Elsewhere(Tensor):
    """A tensor that reports a device that this machine need not have."""

    @staticmethod
    def __new__(cls, device: str, *_: object) -> "Elsewhere":
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32, device=device)  # type: ignore[no-any-return,attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise AssertionError(f"{func} would read memory that is not there")


def model_on(device: str) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("table", Elsewhere(device))
    return nn.Sequential(module)


@pytest.mark.parametrize("device", ["xpu", "privateuseone"])
def test_state_on_another_accelerator_is_refused_with_its_place(device: str, tmp_path: Path) -> None:
    """Before anything is created."""
    with pytest.raises(StateError, match=f"is on {device}, .*cannot be saved exactly") as caught:
        flashckpt.attach(tmp_path / "run", model=model_on(device))
    assert caught.value.location == "model.0.table"
    assert not (tmp_path / "run").exists()


def test_rocm_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    with pytest.raises(StateError, match="ROCm") as caught:
        Tree({"model": model_on("cuda")})
    assert caught.value.location == "model.0.table"
