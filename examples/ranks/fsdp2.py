"""Fully sharded (FSDP2): each rank writes its own rows of every tensor, without gathering them.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # restarted ranks can hang without it
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/ranks/fsdp2.py runs/fsdp2

Export the whole weights: `flashckpt export runs/fsdp2 model.safetensors --only model`.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flashckpt


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main(path: str, epochs: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(256, 32), torch.randint(0, 10, (256,)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    blocks = [Block(32) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(32, 10))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after `fully_shard`, as always

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
