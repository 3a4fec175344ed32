"""Ranks whose gradients DDP compresses by a communication hook with error feedback.

`python -m tests.ranks.rank tests.ranks.compressed RUN STEPS NAMED`. Prints "resumed N" or "began" and "step N
HASH" after each step. NAMED is 1 where the state of the hook is named.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

import flashckpt
from tests.ranks.ddp import state_of


class HookState:
    """As docs/distributed.md has it."""

    fields = ("iter", "error_dict", "p_memory_dict", "q_memory_dict")

    def __init__(self, hook_state: PowerSGDState) -> None:
        self.hook_state = hook_state

    def state_dict(self) -> dict[str, Any]:
        saved = {name: getattr(self.hook_state, name) for name in self.fields}
        return {**saved, "rng": self.hook_state.rng.get_state(legacy=False)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name in self.fields:
            setattr(self.hook_state, name, saved[name])
        self.hook_state.rng.set_state(saved["rng"])


def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, which are strings here
    """Sends a random half of each gradient, and the rest later: error feedback as PowerSGD has it. PowerSGD's
    own hook fails on gloo now and then, without flashckpt as well: its callbacks wait for collectives."""
    gradient, index = bucket.buffer(), bucket.index()
    gradient += state.error_dict.get(index, torch.zeros_like(gradient))
    chosen = torch.from_numpy(state.rng.random_sample(gradient.numel()) < 0.5)
    sent = torch.where(chosen, gradient, 0.0)
    state.error_dict[index] = gradient - sent
    state.iter += bucket.is_last()
    dist.all_reduce(sent)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(sent / dist.get_world_size())
    return done


def train(run: str, steps: int, *, is_named: bool) -> None:
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    hook_state = PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=1
    )
    model.register_comm_hook(hook_state, hook)
    torch.manual_seed(100 + rank)
    named = {"hook": HookState(hook_state)} if is_named else {}
    with flashckpt.attach(run, every=1, model=model, optimizer=optimizer, **named) as checkpointer:
        resumed = checkpointer.resumed
        print(f"resumed {resumed.step}" if resumed is not None else "began", flush=True)
        while checkpointer.completed < steps:
            optimizer.zero_grad()
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            print(f"step {checkpointer.completed + 1} {state_of(net, optimizer)}", flush=True)
            checkpointer.step()
    assert hook_state.iter == steps or not is_named


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(sys.argv[1], int(sys.argv[2]), is_named=sys.argv[3] == "1")


if __name__ == "__main__":
    main()
