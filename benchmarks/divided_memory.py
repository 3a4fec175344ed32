"""What data-parallel ranks of one node hold in shared memory, and what a snapshot's call costs them.

DDP over gloo with `--mib` MiB of parameters and AdamW's moments: once with whole copies on each rank, once
divided. Prints a row for each: GiB that the keeper's regions have, MiB of the largest snapshot of a rank, and
the median over ranks of the seconds that a snapshot's call takes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flashckpt
from flashckpt.memory.region import is_region_name

_STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=64, help="of parameters; the state is three times that")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--whole", type=int, nargs="+", default=[1, 0], help="whole copies (1) or divided (0)"
    )
    arguments = parser.parse_args()
    print("ranks  copies   GiB held  MiB a snapshot  s a call")
    for ranks in arguments.ranks:
        for is_whole in arguments.whole:
            rows = _measured(ranks, bool(is_whole), arguments.mib << 20)
            held = max(row["held"] for row in rows) / 2**30
            image = max(row["image"] for row in rows) / 2**20
            call_s = statistics.median(row["call_s"] for row in rows)
            kind = "whole" if is_whole else "divided"
            print(f"{ranks:5}  {kind:7}  {held:8.2f}  {image:14.0f}  {call_s:8.3f}", flush=True)


def _measured(ranks: int, is_whole: bool, num_bytes: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as runtime, tempfile.TemporaryDirectory() as run:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        results: Any = context.SimpleQueue()
        own = (ranks, port, Path(run) / "run", Path(runtime), is_whole, num_bytes, results)
        started = [context.Process(target=_train, args=(rank, *own)) for rank in range(ranks)]
        for each in started:
            each.start()
        rows = [results.get() for _ in started]
        for each in started:
            each.join()
        return rows


def _train(
    rank: int, ranks: int, port: int, run: Path, runtime: Path, is_whole: bool, num_bytes: int, results: Any
) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        "FLASHCKPT_RUNTIME": str(runtime),
    }  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    side = 1024
    layers = [nn.Linear(side, side, bias=False) for _ in range(max(1, num_bytes // (4 * side * side)))]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, side)
    with flashckpt.attach(run, every=1, persist_every=None, model=model, optimizer=optimizer) as checkpointer:
        if is_whole:
            checkpointer._capture.hold_whole()
        for _ in range(_STEPS):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.save()
            checkpointer.step()
            checkpointer.wait()
        report = checkpointer.report()
        image = checkpointer._keeper_link.slots.newest_own()
        assert image is not None
        held = [each.stat().st_blocks * 512 for each in runtime.rglob("*-*") if is_region_name(each.name)]
        results.put(
            {
                "held": float(sum(held)),
                "image": float(image.record.image_bytes),
                "call_s": report["capture_call_seconds"] / report["snapshots"],
            }
        )
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
