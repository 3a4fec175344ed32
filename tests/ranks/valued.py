"""What the ranks train under FSDP2 whose gradients persist, with arrays of their own.

`python -m tests.ranks.rank tests.ranks.valued RUN STEPS`. Each rank prints "resumed N" or "began",
then "begins HASH" before its first step and "ends HASH" after the last, over all parameters and gradients,
whole; and "array N", the number that fills its array.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import flashckpt


def hash_of(net: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in net.parameters():
        digest.update(parameter.detach().full_tensor().numpy().tobytes())
        digest.update(b"none" if parameter.grad is None else parameter.grad.full_tensor().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    run, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    own = {"array": np.full(10_000, float(dist.get_rank()))}
    checkpointer = flashckpt.attach(run, model=net, optimizer=optimizer, own=own)
    resumed = checkpointer.resumed
    print(f"resumed {resumed.step}" if resumed is not None else "began", flush=True)
    print(f"begins {hash_of(net)}", flush=True)
    print(f"array {own['array'].mean():.0f}", flush=True)
    with checkpointer:
        while checkpointer.completed < steps:
            torch.manual_seed(checkpointer.completed)
            net(torch.randn(4, 6)).square().mean().backward()  # without zero_grad: gradients add up
            optimizer.step()
            checkpointer.step()
    print(f"ends {hash_of(net)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
