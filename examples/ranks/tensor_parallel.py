"""Tensor parallel: the ranks divide each matrix and read the same batches.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # restarted ranks can hang without it
torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/ranks/tensor_parallel.py runs/tp
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import flashckpt


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(32, width), nn.Linear(width, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.down(torch.relu(self.up(x))))


def main(path: str, epochs: int) -> None:
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(128, 32), torch.randint(0, 10, (128,)))
    # The same seed on all ranks, since they must read the same batches.
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = parallelize_module(Net(64), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    batches = flashckpt.loop(loader, path, epochs=epochs, model=model, optimizer=optimizer)
    for inputs, labels in batches:
        loss = cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {batches.completed + 1} loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path", help="the folder of the run")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    main(arguments.path, arguments.epochs)
