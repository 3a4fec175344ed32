"""What the ranks of the tests of the pace train: a tiny model whose gradients all ranks share in each step.

`python -m tests.ranks.rank tests.ranks.paced RUN ORDERS-JSON`. Prints "resumed N" or "began", "step N HASH"
after each step, "ended N REASON" and "committed [...]" at the end. Orders, all optional: `steps`; `step_s`,
by rank; `options` of the loop, `more` of Options; `stop_at`: [rank, step] that calls stop(); `save_at`,
`wait_at`: {rank: steps}, save() or wait() in the iteration after; `epochs`: as many, and `save_after`: {rank:
epochs}, save() in the own code of these; `apart`: they share nothing; `save_outside`: ranks that call it
before the loop; `skips`: {rank: share} of the boundaries that find no slot there; `late`: {rank: step} until
which it hears of no schedule; `call_timeout_s`: of save() outside; `die_at`: [rank, step], in the iteration
after which it dies.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import flashckpt
from flashckpt.memory.slot import Slot, SlotRing
from flashckpt.ranks import joint_coordination
from flashckpt.ranks.coordination import SnapshotSlots
from tests.ranks.ddp import state_of


def arrange(rank: int, orders: dict[str, Any]) -> None:
    """What goes wrong on this rank."""
    skips = orders.get("skips", {}).get(str(rank), 0.0)
    if skips:
        chance, take = random.Random(rank), SlotRing.take

        def taken(ring: SlotRing) -> Slot | None:
            return None if chance.random() < skips else take(ring)

        SlotRing.take = taken  # type: ignore[method-assign]


def deaf_until(checkpointer: flashckpt.Checkpointer, step: int) -> None:
    own = checkpointer._coordination
    poll = own.poll

    def polls(slots: SnapshotSlots) -> None:
        if checkpointer.completed >= step:
            poll(slots)

    own.poll = polls  # type: ignore[method-assign]


def train(run: str, orders: dict[str, Any]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    arrange(rank, orders)
    joint_coordination.CALL_TIMEOUT_S = orders.get("call_timeout_s", joint_coordination.CALL_TIMEOUT_S)
    torch.manual_seed(3)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    options = {"every": 1, "persist_every": None} | orders.get("options", {})
    more = {"options": flashckpt.Options(**orders["more"])} if "more" in orders else {}
    checkpointer = flashckpt.attach(run, model=net, optimizer=optimizer, **options, **more)
    if str(rank) in orders.get("late", {}):
        deaf_until(checkpointer, orders["late"][str(rank)])
    resumed = checkpointer.resumed
    print(f"resumed {resumed.step} {resumed.tier}" if resumed is not None else "began", flush=True)
    if orders.get("save_outside"):
        outside(checkpointer, rank, orders)
    step_s = orders.get("step_s", [0.02] * world)[rank]
    epochs = checkpointer.epochs(orders["epochs"]) if "epochs" in orders else [0]

    def batches() -> Iterator[torch.Tensor]:
        data = [torch.tensor([float(each)]) for each in range(orders.get("steps", 200))]
        for epoch in epochs:
            x = None
            for x in checkpointer.batches(data):
                yield x
            if "epochs" in orders and not checkpointer.stopping:
                assert x is not None, "the code after the batches has none of them"
                if [rank, epoch] == orders.get("die_after"):
                    os.kill(os.getpid(), signal.SIGKILL)
                print(f"epoch {epoch} {float(x)}", flush=True)
            if epoch in orders.get("save_after", {}).get(str(rank), ()):
                checkpointer.save()

    for x in batches():
        time.sleep(step_s)
        if [rank, checkpointer.completed] == orders.get("stop_at"):
            checkpointer.stop()
        if [rank, checkpointer.completed] == orders.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if checkpointer.completed in orders.get("save_at", {}).get(str(rank), ()):
            checkpointer.save()
        if checkpointer.completed in orders.get("wait_at", {}).get(str(rank), ()):
            wait(checkpointer)
        loss = (net(torch.randn(4, 8)) * x).sum()
        optimizer.zero_grad()
        loss.backward()
        for parameter in () if "apart" in orders else net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        print(f"step {checkpointer.completed + 1} {state_of(net, optimizer)}", flush=True)
    print(f"ended {checkpointer.completed} {checkpointer.stop_reason}", flush=True)
    wait(checkpointer)
    if "apart" not in orders:
        dist.barrier()
    checkpointer.close()
    print(f"committed {flashckpt.steps(run)}", flush=True)


def wait(checkpointer: flashckpt.Checkpointer) -> None:
    try:
        checkpointer.wait()
    except flashckpt.FlashckptError as error:
        print(f"waited {type(error).__name__} {error}", flush=True)


def outside(checkpointer: flashckpt.Checkpointer, rank: int, orders: dict[str, Any]) -> None:
    if rank in orders["save_outside"]:
        try:
            checkpointer.save()
            print(f"saved {checkpointer.completed}", flush=True)
        except flashckpt.FlashckptError as error:
            print(f"not saved {type(error).__name__} {error}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    orders = json.loads(sys.argv[2])
    train(sys.argv[1], orders)
    if "apart" not in orders:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
