"""What the ranks of the tests of an abort train: a tiny model that counts as living on an accelerator.

`python -m tests.ranks.rank tests.ranks.aborted RUN ORDERS-JSON`. Prints "resumed N TIER" or "began", "step N
HASH" after each step, and "committed [...]" at the end. Orders, all optional: `steps`; `abort_at`: in that
iteration the gradients of the ranks are not added up, as after an abort of the collective, and the update,
the boundary and the copies succeed; `end_at`, `end_by`: in the iteration after that step, once the copies of
its snapshot have ended and the step before is committed, both ranks end by "SIGKILL", by "SIGTERM" to rank 0,
or by an "exception"; `wait_at`: the iteration after that step begins with wait(), after which "safe N" is
printed; `failed_at`: from that iteration on a process group reports an error.
"""

import json
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import flashckpt
from flashckpt.checkpointer import resume
from tests.capture.simulated import SimulatedDevice
from tests.ranks.ddp import state_of
from tests.waiting import until, until_room, until_slots


class FailedGroup:
    """A process group whose watchdog has found a collective that timed out."""

    _device_types = (torch.device("cuda"),)

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(get_error=lambda: SimpleNamespace(name="TIMEOUT"))


def train(run: str, orders: dict[str, Any], device: SimulatedDevice) -> None:
    torch.manual_seed(3)
    net = nn.Linear(64, 64)
    device.adopt(*net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    with flashckpt.attach(run, model=net, optimizer=optimizer, every=1, persist_every=None) as checkpointer:
        resumed = checkpointer.resumed
        print(f"resumed {resumed.step} {resumed.tier}" if resumed is not None else "began", flush=True)
        for x in checkpointer.batches([torch.tensor(float(each)) for each in range(orders.get("steps", 12))]):
            until_slots(checkpointer)
            until_room(checkpointer)
            step = checkpointer.completed + 1
            if step - 1 == orders.get("end_at"):
                end(run, checkpointer, orders)
            if step - 1 == orders.get("wait_at"):
                checkpointer.wait()
                print(f"safe {flashckpt.steps(run)[-1]}", flush=True)
            if step == orders.get("failed_at"):
                dist.distributed_c10d._world.pg_map[FailedGroup()] = ("failed", None)
            checkpointer.save()
            optimizer.zero_grad()
            (net(torch.randn(4, 64)) * x).square().mean().backward()
            for parameter in net.parameters() if step != orders.get("abort_at") else ():
                dist.all_reduce(parameter.grad)
            device.compute.drain()  # in the order of the stream: after the clone of the last boundary
            optimizer.step()
            print(f"step {step} {state_of(net)}", flush=True)
    print(f"committed {flashckpt.steps(run)}", flush=True)


def end(run: str, checkpointer: flashckpt.Checkpointer, orders: dict[str, Any]) -> None:
    """End this rank once the newest snapshot is complete in its slot and the one before is on disk."""
    assert checkpointer._capture._sealer.drain(240)
    until(lambda: checkpointer.completed - 1 in flashckpt.steps(run), "the step before, on disk")
    dist.barrier()
    match orders["end_by"]:
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGTERM" if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        case "exception":
            raise RuntimeError("NCCL communicator was aborted")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    device = SimulatedDevice()
    resume.devices_of = lambda tensors, streams=(): [device]  # type: ignore[assignment, list-item]
    train(sys.argv[1], json.loads(sys.argv[2]), device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
