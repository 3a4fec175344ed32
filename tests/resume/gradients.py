"""Loops that read the gradients of one iteration in the next one, each a recipe that records every weight;
and one that drops them.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import flashckpt
from tests.resume.recipes import Hold, Record, held_loss

STEPS = 9
Prepare = Callable[[torch.optim.Optimizer, list[nn.Parameter], int], None]


def never_zeroed(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], step: int) -> None:
    """Gradients add up over the whole run."""


def zeroed_every_third(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], step: int) -> None:
    if step % 3 == 1:
        optimizer.zero_grad()


def set_to_zeros(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], step: int) -> None:
    optimizer.zero_grad(set_to_none=False)


def dropped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], step: int) -> None:
    optimizer.zero_grad()


def _train(prepare: Prepare, record: Record, hold: Hold, path: str, options: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 2))
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.5)
    batches = flashckpt.loop(range(STEPS), path, model=net, optimizer=optimizer, **options)
    for number in batches:
        prepare(optimizer, parameters, number)
        x = torch.randn(4, 6) + number
        loss = held_loss(net, x, hold, batches.completed)
        loss = loss.square().mean()
        loss.backward()
        optimizer.step()
        weights = [value.hex() for p in parameters for value in p.detach().double().flatten().tolist()]
        record(batches, weights)
    print("gradient bytes", int(batches.checkpointer.report()["gradient_bytes"]), file=sys.stderr)


READ = (never_zeroed, zeroed_every_third, set_to_zeros)
RECIPES = {each.__name__: functools.partial(_train, each) for each in (*READ, dropped)}
