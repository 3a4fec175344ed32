"""A state of 10,000 small tensors: what the call takes beyond copying so many bytes in one piece."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flashckpt
from benchmarks.ending import reporting
from benchmarks.settings import Job

# Each has a weight, exp_avg, exp_avg_sq and step: four leaves.
_PARAMETERS = 2500
_EVERY = 2
_LIMIT = 300


def small(job: Job) -> dict[str, Any]:
    torch.set_num_threads(job.settings.threads)
    device = torch.device(job.settings.device)
    model = nn.ParameterList(torch.randn(256 + index % 512, device=device) for index in range(_PARAMETERS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    calls: list[float] = []
    quiet: list[float] = []
    copies: list[float] = []
    with flashckpt.attach(
        Path(job.folder, "run"), every=_EVERY, persist_every=None, model=model, optimizer=optimizer
    ) as checkpointer:
        for step in range(1, _LIMIT):
            _train(model, optimizer)
            _sync(device)
            began = time.perf_counter()
            checkpointer.step()
            seconds = time.perf_counter() - began
            if checkpointer.report()["snapshots"] < 3:
                continue
            (calls if step % _EVERY == 0 else quiet).append(seconds)
            if len(calls) > max(10, job.settings.repetitions):
                break
        leaves = [tensor for state in optimizer.state.values() for tensor in state.values()]
        leaves += list(model.parameters())
        num_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        source, target = torch.randn(2, num_bytes // 4, device=device)
        for _ in calls:
            copies.append(_copy_s(source, target, device))
    return {
        "leaves": len(leaves),
        "num_bytes": num_bytes,
        "call_s": calls,
        "quiet_call_s": quiet,
        "copy_s": copies,
    }


def _train(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _copy_s(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> float:
    _sync(device)
    began = time.perf_counter()
    target.copy_(source)
    _sync(device)
    return time.perf_counter() - began


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    job = Job.read(sys.argv[1])
    with reporting(job):
        job.report(small(job))


if __name__ == "__main__":
    main()
