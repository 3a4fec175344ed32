"""What the ranks train whose layout changes from one start to the next: FSDP, tensor parallel, DDP, none.

`python -m tests.ranks.rank tests.ranks.relaid RUN LAYOUT EPOCHS`. Each rank prints "begins HASH" before its
first batch and "ends HASH" after the last, over all that the state holds, whole; and "samples N-N-…".
"""

import hashlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flashckpt
from tests.waiting import until_room, until_slots

SAMPLES = 24
DATA_PARALLEL = ("fsdp", "ddp")


def model(layout: str, world: int) -> nn.Module:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    if layout == "fsdp":
        fully_shard(net)
    elif layout == "tp":
        mesh = init_device_mesh("cpu", (world,))
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif layout == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    return net


def loader(layout: str, rank: int, world: int) -> DataLoader[Any]:
    torch.manual_seed(11)
    data = TensorDataset(torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,)), torch.arange(SAMPLES))
    # Ranks that share one model's tensors are given the same.
    replicas, mine = (world, rank) if layout in DATA_PARALLEL else (1, 0)
    sampler = DistributedSampler(data, num_replicas=replicas, rank=mine, shuffle=True)
    return DataLoader(data, batch_size=SAMPLES // replicas // 2, sampler=sampler)


def whole(value: object) -> object:
    return value.full_tensor() if isinstance(value, DTensor) else value


def hash_of(net: nn.Module, optimizer: torch.optim.Optimizer, counters: dict[str, int]) -> str:
    """Over every tensor, whole; all ranks call it."""
    digest = hashlib.sha256(repr(counters).encode())
    for name, parameter in net.named_parameters():
        held = {"": parameter, **optimizer.state.get(parameter, {})}
        name = name.removeprefix("module.")
        for key in held:
            tensor = whole(held[key])
            assert isinstance(tensor, torch.Tensor)
            digest.update(f"{name}.{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    run, layout, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = model(layout, world)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    counters = {"batches": 0}
    looped = flashckpt.loop(
        loader(layout, rank, world), run, epochs=epochs, every=1, persist_every=100, model=net,
        optimizer=optimizer, counters=counters, own={"rank": rank},
    )  # fmt: skip
    resumed = looped.checkpointer.resumed
    print(f"resumed {resumed.step} {resumed.tier}" if resumed is not None else "began", flush=True)
    print(f"begins {hash_of(net, optimizer, counters)}", flush=True)
    seen: list[int] = []
    for x, y, which in looped:
        until_slots(looped.checkpointer)
        until_room(looped.checkpointer)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        counters["batches"] += 1
        seen += which.tolist()
    print("samples " + "-".join(map(str, seen)), flush=True)
    print(f"ends {hash_of(net, optimizer, counters)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
