"""Trains the tiny GPT: an ordinary loop with one changed line, so that it survives a kill.

    python examples/tiny_gpt/train.py runs/tiny --steps 300      # kill it, and run the same line again

Writes into its folder: run/ (the checkpoints), losses.csv (a line per step), starts.jsonl (a line per
process), and at the end weights.safetensors and report.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
from hold import commit_before, hold_in_backward
from model import GPT
from plain import PlainLoop
from safetensors.torch import save_model
from text import Windows, library_sources
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import flashckpt

CONTEXT = 128
TEXT_BYTES = 256 * 1024


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    loader = DataLoader(Windows(library_sources(TEXT_BYTES), CONTEXT), batch_size=8, shuffle=True)
    model = GPT(context=CONTEXT)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.steps)

    path = args.folder / "run"
    if args.plain:
        batches = PlainLoop(loader, steps=args.steps)
    else:  # the changed line
        batches = flashckpt.loop(
            loader, path, model=model, optimizer=optimizer, scheduler=scheduler, steps=args.steps
        )

    if args.hold is not None:
        hold_in_backward(model.blocks[1], args.hold, after=batches.completed, report_fd=args.report_fd)
    losses = (args.folder / "losses.csv").open("a", buffering=1)
    noted = args.plain
    for text, following in batches:
        if not noted:
            note_start(args.folder / "starts.jsonl", batches.checkpointer)
            noted = True
        loss = cross_entropy(model(text).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if args.hold is not None:
            commit_before(args.hold, batches.checkpointer)
        losses.write(f"{batches.completed + 1},{loss.item()!r}\n")
    losses.close()

    save_model(model, str(args.folder / "weights.safetensors"))
    if not args.plain:
        (args.folder / "report.json").write_text(json.dumps(batches.checkpointer.report()))


def note_start(path: Path, checkpointer: flashckpt.Checkpointer) -> None:
    """Write a line for this process at its first batch: the time, and the snapshot from which it resumed."""
    resumed = checkpointer.resumed
    line = {"first_batch_monotonic_s": time.monotonic(), "resumed": resumed and dataclasses.asdict(resumed)}
    with path.open("a") as starts:
        starts.write(json.dumps(line) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the tiny GPT on Python's own sources.")
    parser.add_argument("folder", type=Path, help="folder of the run, its losses and its weights")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plain", action="store_true", help="train without flashckpt, as the reference")
    parser.add_argument("--hold", type=int, help="pause in the backward pass of this step")
    parser.add_argument("--report-fd", type=int, help="descriptor for the number of the paused step")
    return parser.parse_args()


if __name__ == "__main__":
    args = arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    train(args)
