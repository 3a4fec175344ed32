"""Data parallel, with one line that makes it survive a kill:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # restarted ranks can hang without it
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/ranks/ddp.py runs/ddp

Kill a rank (torchrun restarts all) or everything (run the line again): training resumes bit for bit.
flashckpt restores the loader's place, the epoch and each rank's random numbers, so the script needs no
`set_epoch`.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flashckpt


def main(path: str, epochs: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(256, 32), torch.randint(0, 10, (256,)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(2 + rank)  # each rank has its own dropout

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
