"""Ranks that mark their boundaries by `step()`: a tiny model whose gradients all ranks share in each step.

`python -m tests.ranks.rank tests.ranks.stepping RUN ORDERS-JSON`. Prints "resumed N" or "began", "step N
HASH" after each step, "ended N REASON" after the loop and "closed N" after `close()`. Orders, all optional
but `steps`: `options` of `attach`; `misses_last`: a rank that finds no slot at a boundary from step 20 on,
after which the loop ends.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import flashckpt
from flashckpt.memory.slot import Slot, SlotRing
from tests.ranks.ddp import state_of


def train(run: str, orders: dict[str, Any]) -> None:
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    checkpointer = flashckpt.attach(run, model=net, optimizer=optimizer, **orders.get("options", {}))
    take, has_missed = SlotRing.take, torch.zeros(1)

    def taken(ring: SlotRing) -> Slot | None:
        if rank != orders.get("misses_last") or checkpointer.completed < 20 or has_missed:
            return take(ring)
        has_missed[0] = 1.0
        return None

    SlotRing.take = taken  # type: ignore[method-assign]
    resumed = checkpointer.resumed
    print(f"resumed {resumed.step}" if resumed is not None else "began", flush=True)
    with checkpointer:
        while checkpointer.completed < orders["steps"] and not checkpointer.stopping:
            time.sleep(0.01)
            loss = net(torch.randn(4, 8)).sum() * checkpointer.completed
            optimizer.zero_grad()
            loss.backward()
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            print(f"step {checkpointer.completed + 1} {state_of(net, optimizer)}", flush=True)
            checkpointer.step()
            if "misses_last" in orders:
                dist.all_reduce(has_missed)
                if has_missed:
                    break
        print(f"ended {checkpointer.completed} {checkpointer.stop_reason}", flush=True)
    print(f"closed {checkpointer.completed}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group("gloo")
    train(sys.argv[1], json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
