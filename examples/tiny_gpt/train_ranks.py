"""Trains a smaller GPT data parallel under torchrun, also with one changed line.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # restarted ranks can hang without it
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/tiny_gpt/train_ranks.py runs/two

Each rank writes losses-RANK.csv (a line per step) into the folder; rank 0 writes starts.jsonl and, at the
end, weights.safetensors.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from hold import commit_before, hold_in_backward
from model import GPT
from plain import PlainLoop
from safetensors.torch import save_model
from text import Windows, library_sources
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler
from train import note_start

import flashckpt

CONTEXT = 64
TEXT_BYTES = 128 * 1024
HELD_RANK = 1


def train(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    data = Windows(library_sources(TEXT_BYTES), CONTEXT)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = DistributedDataParallel(GPT(width=80, depth=2, context=CONTEXT))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(2 + rank)  # each rank has its own dropout

    path = args.folder / "run"
    if args.plain:
        batches = PlainLoop(loader, steps=args.steps)
    else:  # the changed line
        batches = flashckpt.loop(loader, path, every=1, model=model, optimizer=optimizer, steps=args.steps)

    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if args.hold is not None and rank == HELD_RANK and is_first:
        report_fd = os.open(args.report, os.O_WRONLY)
        os.write(report_fd, f"{os.getpid()}\n".encode())
        hold_in_backward(model.module.blocks[1], args.hold, after=batches.completed, report_fd=report_fd)
    if rank == 0 and not args.plain:
        note_start(args.folder / "starts.jsonl", batches.checkpointer)
    # Without flashckpt, a restarted process trains from the first step.
    losses = (args.folder / f"losses-{rank}.csv").open("w" if args.plain else "a", buffering=1)
    for text, following in batches:
        loss = cross_entropy(model(text).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.hold is not None:
            commit_before(args.hold, batches.checkpointer)
        losses.write(f"{batches.completed + 1},{loss.item()!r}\n")
    losses.close()
    if rank == 0:
        save_model(model.module, str(args.folder / "weights.safetensors"))
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a smaller GPT on several ranks.")
    parser.add_argument("folder", type=Path, help="folder of the run, its losses and its weights")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plain", action="store_true", help="train without flashckpt, as the reference")
    parser.add_argument("--hold", type=int, help=f"rank {HELD_RANK} pauses in the backward pass of this step")
    parser.add_argument("--report", help="a FIFO for the process id and the number of the paused step")
    return parser.parse_args()


if __name__ == "__main__":
    args = arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    train(args)
