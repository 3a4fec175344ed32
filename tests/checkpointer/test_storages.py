"""Tensors whose storage is resized under them, as offloaders and FSDP do: refused with their path, at attach
or at the boundary, and never read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt import StateError

ROOT = Path(__file__).parents[2]

# A trainer of its own: what is not refused is a SIGSEGV, or bytes of somebody else under a good digest.
_SCRIPT = """
import sys, torch, flashckpt
from torch import nn
from tests.waiting import until_slots

kind, how, run = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
model.register_buffer("table", torch.zeros(1 << 18))
model.register_buffer("view", torch.zeros(1 << 18)[1 << 17 :])
optimizer = torch.optim.Adam(model.parameters())

def resized():
    weight = model[0].weight
    found = {
        "model.0.weight": weight,
        "model.table": model.table,
        "model.view": model.view,
        "optimizer.state.0.weight.exp_avg": optimizer.state[weight]["exp_avg"],
        "model.0.weight.grad": weight.grad,
    }[kind]
    storage = found.untyped_storage()
    if how == "gone":
        storage.resize_(0)
    elif how == "swapped":
        other = torch.zeros(found.numel() + found.storage_offset(), dtype=found.dtype)
        found.data = other.as_strided(found.shape, found.stride(), found.storage_offset())
        other.untyped_storage().resize_(found.element_size() * 4)
    elif how == "grown again":
        # Most likely the memory that it had before: nothing but its size tells it.
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size - 64)
    else:
        storage.resize_(storage.nbytes() - 64)

with flashckpt.attach(run, every=1, model=model, optimizer=optimizer) as checkpointer:
    try:
        for x in checkpointer.batches([torch.randn(2, 256)] * 6):
            if checkpointer.completed == 4:
                break  # torch would read it, too
            until_slots(checkpointer)
            optimizer.zero_grad()
            model[1](model[0](x)).sum().backward()
            optimizer.step()
            if kind.endswith("grad"):
                model[1](model[0](x)).sum().backward()  # not used up: it is a leaf
            if checkpointer.completed == 3:
                sealed = checkpointer.report()["newest_sealed_step"]
                resized()
        checkpointer.wait()
    except flashckpt.StateError as error:
        print(error)
    print(sealed, checkpointer.report()["newest_sealed_step"], checkpointer.completed)
    sys.stdout.flush()
    import os
    os._exit(0)  # the state stays as it is: closing could say it only once more
"""


@pytest.mark.parametrize("how", ["gone", "cut", "grown again", "swapped"])
@pytest.mark.parametrize(
    "kind", ["model.0.weight", "model.table", "model.view", "optimizer.state.0.weight.exp_avg"]
)
def test_a_leaf_without_its_memory_is_not_captured(
    tmp_path: Path, runtime: Path, kind: str, how: str
) -> None:
    command = [sys.executable, "-c", _SCRIPT, kind, how, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert kind in done.stdout, done.stdout
    assert "in a storage that is smaller" in done.stdout
    before, after, _ = map(int, map(float, done.stdout.split()[-3:]))
    assert after == before == 3, "nothing was sealed after it"


@pytest.mark.usefixtures("runtime")
def test_a_storage_that_is_too_small_is_refused_at_attach(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.untyped_storage().resize_(60)
    with pytest.raises(StateError, match=r"model\.1\.weight.*storage that is smaller"):
        flashckpt.attach(tmp_path / "run", model=model)


class Labelled(torch.Tensor):
    """A subclass with its own say on every function, as quantizers' are."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "storage" in getattr(func, "__name__", ""):
            raise RuntimeError("not for you")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.usefixtures("runtime")
def test_a_subclass_without_memory_is_refused_at_attach(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(64).as_subclass(Labelled))
    with torch._C.DisableTorchFunctionSubclass():
        model.table.untyped_storage().resize_(0)
    with pytest.raises(StateError, match=r"model\.table.*storage that is smaller"):
        flashckpt.attach(tmp_path / "run", model=model)


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
