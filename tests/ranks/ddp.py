"""What the ranks of these tests train: DDP on gloo, with dropout, BatchNorm and a DistributedSampler.

`python -m tests.ranks.rank tests.ranks.ddp RUN ORDERS-JSON`. Each step prints "step N LOSS BATCH", the end
"state HASH". Orders, all optional: `options` of the loop, `keep_last`, `epochs`, `width` of the model,
`workers` of the loader, `save_at`: a step that is persisted, several, or "each": then none is left out,
`freeze_at`: in that iteration the node's keeper is stopped, `harm_at`: [rank, step], in which that rank
changes a parameter for itself, `hold_at`: in that iteration a rank prints "held N" and stands still, to be
killed, `holds`: of worlds of so many ranks (as text) that iteration and the nodes, null for all, whose ranks
do so, `cache`: a folder in which each node has its cache, `begins_on`: how many ranks begin a run, fewer
stand still; and `deaths`: of each incarnation of the group the rank that dies in it, and at which of the
package's crash points.
"""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

import flashckpt
from flashckpt import crashpoints
from tests.processes import keepers_of
from tests.waiting import until_room, until_slots

SAMPLES, BATCH, EPOCHS = 48, 4, 3


def model(width: int = 16) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 3)
    )


def noisy(samples: list[Any]) -> list[Any]:
    """A batch with noise that is drawn where it is made: in a worker, if there are any."""
    x, y, which = default_collate(samples)
    return [x + 0.1 * torch.randn_like(x), y, which]


def loader(rank: int, world: int, workers: int = 0) -> DataLoader[Any]:
    """Samples that say which they are. Workers live from epoch to epoch."""
    torch.manual_seed(11)
    numbers = torch.arange(SAMPLES, dtype=torch.float32)
    data = TensorDataset(torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,)), numbers)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True)
    return DataLoader(
        data, BATCH, sampler=sampler, num_workers=workers, persistent_workers=workers > 0, collate_fn=noisy
    )


def state_of(*objects: Any) -> str:
    """A hash over all that the objects hold."""
    whole = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, torch.Tensor):
            whole.update(str((value.dtype, tuple(value.shape))).encode())
            whole.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                whole.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            whole.update(repr(value).encode())

    for each in objects:
        add(each.state_dict())
    add(torch.get_rng_state())
    return whole.hexdigest()


def train(run: str, orders: dict[str, Any]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    # Without it DDP orders its buckets anew after the first backward of a process, so that what several ranks
    # add up there is added in another order than in a process that had gone on: exact for two ranks alone.
    net = DistributedDataParallel(model(orders.get("width", 16)), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data = loader(rank, world, orders.get("workers", 0))
    torch.manual_seed(100 + rank)  # each drops others
    if world < orders.get("begins_on", 1) and not Path(run).exists():
        signal.pause()  # until the launcher has heard of the other node, and starts its ranks again
    options = {"every": 1, "persist_every": None} | orders.get("options", {})
    if "cache" in orders:
        node = os.path.basename(os.environ["FLASHCKPT_RUNTIME"])
        options["cache"] = os.path.join(orders["cache"], node)
        os.makedirs(options["cache"], exist_ok=True)
    if "keep_last" in orders:
        options["keep"] = flashckpt.Keep(last=orders["keep_last"])
    save_at = orders.get("save_at", [])
    saved = save_at if isinstance(save_at, list) else [save_at]
    held, nodes = orders.get("holds", {}).get(str(world), (orders.get("hold_at"), None))
    held = held if nodes is None or os.environ["FLASHCKPT_RUNTIME"] in nodes else None
    looped = flashckpt.loop(
        data, run, epochs=orders.get("epochs", EPOCHS), model=net, optimizer=optimizer, **options
    )
    resumed = looped.checkpointer.resumed
    print(f"resumed {resumed.step} {resumed.tier}" if resumed is not None else "began", flush=True)
    for x, y, which in looped:
        if options.get("enabled", True):
            until_slots(looped.checkpointer)
            until_room(looped.checkpointer)
        if looped.completed == orders.get("freeze_at"):
            for pid in keepers_of(Path(os.environ["FLASHCKPT_RUNTIME"])):
                os.kill(pid, signal.SIGSTOP)
        if looped.completed == held:
            print(f"held {looped.completed}", flush=True)
            signal.pause()
        if save_at == "each" or looped.completed + 1 in saved:
            looped.checkpointer.save()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        if [rank, looped.completed + 1] == orders.get("harm_at"):
            with torch.no_grad():
                net.module[0].bias[0] += 1
        numbers = "-".join(str(int(each)) for each in which)
        print(f"step {looped.completed + 1} {loss.item().hex()} {numbers}", flush=True)
    print(f"state {state_of(net, optimizer)}", flush=True)


def die(deaths: Sequence[tuple[int, str]]) -> None:
    """Arm what kills this rank, if it is its turn."""
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restart < len(deaths) and deaths[restart][0] == int(os.environ["RANK"]):
        crashpoints.arm(deaths[restart][1])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    orders = json.loads(sys.argv[2])
    die(orders.get("deaths", []))
    try:
        train(sys.argv[1], orders)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
