"""Two ranks resume from imported runs: `python -m tests.ranks.rank tests.importing.ranks RUN SOURCE`.

FSDP2 resumes RUN, and DDP a copy of it, RUN-ddp. Each rank prints differences to SOURCE.
"""

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import flashckpt


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """With two groups, and rows that two ranks do not share equally."""
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    return model, optimizer_of(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, foreach=False)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def differences(model: nn.Module, optimizer: torch.optim.Optimizer, source: dict[str, Any]) -> list[str]:
    found = [
        name.removeprefix("module.")
        for name, tensor in model.state_dict().items()
        if not torch.equal(whole(tensor), source["model"][name.removeprefix("module.")])
    ]
    states = optimizer.state_dict()["state"]
    for number, state in source["optimizer"]["state"].items():
        found += [f"{number}.{k}" for k, t in state.items() if not torch.equal(whole(states[number][k]), t)]
    return found


def take_up(run: str, model: nn.Module, optimizer: torch.optim.Optimizer, source: dict[str, Any]) -> None:
    with flashckpt.attach(run, every=None, model=model, optimizer=optimizer) as checkpointer:
        random = torch.get_rng_state()
        print(f"at {checkpointer.completed}: {differences(model, optimizer, source)}", flush=True)
        for _ in checkpointer.batches([0]):
            loss = model(torch.ones(4, 5)).square().mean()
            loss.backward()
            optimizer.step()
    print(f"after {checkpointer.completed}, seeded {torch.equal(random, torch.get_rng_state())}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run, path = sys.argv[1:]
    source = torch.load(path, weights_only=True)
    dist.init_process_group("gloo")
    try:
        model, _ = made()
        for layer in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(layer)
        take_up(run, model, optimizer_of(model), source)
        plain, optimizer = made()
        take_up(f"{run}-ddp", nn.parallel.DistributedDataParallel(plain), optimizer, source)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
