"""What the ranks of these tests train: a tiny model whose gradients all ranks share in each step.

`python -m tests.ranks.rank tests.ranks.paced RUN ORDERS-JSON`. Prints "resumed N" or "began", "step N HASH"
after each step, "ended N REASON", "closed N" and "committed [...]" at the end. Orders, all optional: `steps`;
`options` of `attach`; `by_hand`: boundaries are marked by step(); `stop_at`: [rank, step] that calls stop();
`save_at`, `wait_at`: {rank: steps}, save() or wait() in the iteration after; `epochs`: as many, and
`save_after`: {rank: epochs}, save() in the own code of these; `save_outside`: ranks that call it before the
loop; `call_timeout_s`: of that call; `misses_last`: a rank that finds no slot at a boundary from step 20 on,
after which the loop ends; `misses_stop`: a rank that fails at the boundary at which all ranks stop.
"""

import json
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
from tests.ranks.ddp import state_of

HAS_MISSED = torch.zeros(1)


def miss_one(checkpointer: flashckpt.Checkpointer) -> None:
    """One boundary finds no slot on this rank."""
    take = SlotRing.take

    def taken(ring: SlotRing) -> Slot | None:
        if checkpointer.completed < 20 or HAS_MISSED:
            return take(ring)
        HAS_MISSED[0] = 1.0
        return None

    SlotRing.take = taken  # type: ignore[method-assign]


def miss_the_stop(checkpointer: flashckpt.Checkpointer) -> None:
    take = SlotRing.take

    def taken(ring: SlotRing) -> Slot | None:
        if checkpointer._stops_here() and not HAS_MISSED:
            HAS_MISSED[0] = 1.0
            print("missed", flush=True)
            raise flashckpt.StateError("this boundary cannot be captured")
        return take(ring)

    SlotRing.take = taken  # type: ignore[method-assign]


def steps_by_hand(checkpointer: flashckpt.Checkpointer, orders: dict[str, Any]) -> Iterator[float]:
    while checkpointer.completed < orders["steps"] and not checkpointer.stopping:
        yield float(checkpointer.completed)
        checkpointer.step()
        if "misses_last" in orders:
            dist.all_reduce(HAS_MISSED)
            if HAS_MISSED:
                break


def batches(checkpointer: flashckpt.Checkpointer, orders: dict[str, Any]) -> Iterator[float]:
    saves = orders.get("save_after", {}).get(str(dist.get_rank()), ())
    for epoch in checkpointer.epochs(orders["epochs"]) if "epochs" in orders else [0]:
        x = None
        for x in checkpointer.batches([float(each) for each in range(orders["steps"])]):
            yield x
        if "epochs" in orders and not checkpointer.stopping:
            assert x is not None, "the code after the batches has none of them"
            print(f"epoch {epoch} {x}", flush=True)
        if epoch in saves:
            checkpointer.save()


def train(run: str, orders: dict[str, Any]) -> None:
    rank = dist.get_rank()
    joint_coordination.CALL_TIMEOUT_S = orders.get("call_timeout_s", joint_coordination.CALL_TIMEOUT_S)
    torch.manual_seed(3)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    options = {"every": 1, "persist_every": None} | orders.get("options", {})
    checkpointer = flashckpt.attach(run, model=net, optimizer=optimizer, **options)
    if rank == orders.get("misses_last"):
        miss_one(checkpointer)
    if rank == orders.get("misses_stop"):
        miss_the_stop(checkpointer)
    resumed = checkpointer.resumed
    print(f"resumed {resumed.step}" if resumed is not None else "began", flush=True)
    if rank in orders.get("save_outside", ()):
        try:
            checkpointer.save()
        except flashckpt.FlashckptError as error:
            print(f"not saved {type(error).__name__} {error}", flush=True)
    looped = steps_by_hand if "by_hand" in orders else batches
    for x in looped(checkpointer, orders):
        time.sleep(0.02)
        if [rank, checkpointer.completed] == orders.get("stop_at"):
            checkpointer.stop()
        if checkpointer.completed in orders.get("save_at", {}).get(str(rank), ()):
            checkpointer.save()
        if checkpointer.completed in orders.get("wait_at", {}).get(str(rank), ()):
            wait(checkpointer)
        loss = net(torch.randn(4, 8)).sum() * x
        optimizer.zero_grad()
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        print(f"step {checkpointer.completed + 1} {state_of(net, optimizer)}", flush=True)
    print(f"ended {checkpointer.completed} {checkpointer.stop_reason}", flush=True)
    if "by_hand" not in orders:
        wait(checkpointer)
        dist.barrier()
    checkpointer.close()
    print(f"closed {checkpointer.completed}", flush=True)
    print(f"committed {flashckpt.steps(run)}", flush=True)


def wait(checkpointer: flashckpt.Checkpointer) -> None:
    try:
        checkpointer.wait()
    except flashckpt.FlashckptError as error:
        print(f"waited {type(error).__name__} {error}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group("gloo")
    orders = json.loads(sys.argv[2])
    train(sys.argv[1], orders)
    if "by_hand" not in orders:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
