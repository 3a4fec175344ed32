"""Tensors whose storage is resized under them, as offloaders and FSDP do: refused with their path, at attach
or at the boundary, and never read."""

from pathlib import Path

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt import StateError
from tests.zygote import Zygote


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("model.0.weight", "gone"),
        ("model.table", "grown again"),
        ("model.view", "swapped"),
        ("optimizer.state.model.0.weight.exp_avg", "cut"),
    ],
)
def test_a_leaf_without_its_memory_is_not_captured(
    tmp_path: Path, runtime: Path, zygote: Zygote, kind: str, how: str
) -> None:
    """In a process of its own: what is not refused is a SIGSEGV, or another's bytes under a good digest."""
    done = zygote.run(["tests.checkpointer.resized", kind, how, str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr
    assert kind in done.stdout, done.stdout
    assert "in a storage that is smaller" in done.stdout
    before, after, _ = map(int, map(float, done.stdout.split()[-3:]))
    assert after == before == 3, "nothing was sealed after it"


class Labelled(torch.Tensor):
    """A subclass with its own say on every function, as quantizers' are."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "storage" in getattr(func, "__name__", ""):
            raise RuntimeError("not for you")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.usefixtures("runtime")
def test_a_storage_that_is_too_small_is_refused_at_attach(tmp_path: Path) -> None:
    model, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Module()
    model[1].weight.untyped_storage().resize_(60)
    other.register_buffer("table", torch.zeros(64).as_subclass(Labelled))
    with torch._C.DisableTorchFunctionSubclass():
        other.table.untyped_storage().resize_(0)
    for each, place in ((model, r"model\.1\.weight"), (other, r"model\.table")):
        with pytest.raises(StateError, match=f"{place}.*storage that is smaller"):
            flashckpt.attach(tmp_path / "run", model=each)


@pytest.mark.usefixtures("runtime")
def test_memory_that_came_back_is_captured(tmp_path: Path) -> None:
    """Offloaded in the iteration and back before the boundary, at another address."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keep = []
    with flashckpt.attach(tmp_path / "run", every=1, model=model, optimizer=optimizer) as checkpointer:
        for x in checkpointer.batches([torch.randn(2, 64)] * 5):
            model(x).sum().backward()
            optimizer.step()
            storage, values = model.weight.untyped_storage(), model.weight.detach().clone()
            storage.resize_(0)
            keep.append(torch.zeros(64, 64))
            storage.resize_(values.nbytes)
            model.weight.data.copy_(values)
    found = flashckpt.load(tmp_path / "run")
    assert torch.equal(torch.as_tensor(found["model.weight"]), model.weight)
