"""Runs one recipe of docs/recipes.md in a process of its own, as it stands there.

`python -m tests.documents.recipe_program TITLE FOLDER KILL_AT`: in FOLDER, whose `runs` it uses. The process
kills itself with SIGKILL in forward pass KILL_AT (-1: never), and prints what it has come to. Every step is
captured, so that a kill among the first ones has something before it.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import flashckpt

RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"
KEPT = ("own", "carried", "history")


def recipes() -> dict[str, str]:
    """The code under each heading."""
    found = re.findall(r"^## (.*?)\n.*?```python\n(.*?)```", RECIPES.read_text(), re.DOTALL | re.MULTILINE)
    return dict(found)


class Environment:
    """A walk, with random numbers of its own."""

    def __init__(self, seed: int) -> None:
        self.rng, self.position = np.random.default_rng(seed), 0.0

    def observe(self, steps: int) -> torch.Tensor:
        rows = []
        for _ in range(steps):
            self.position += float(self.rng.normal())
            rows.append([self.position] * 4)
        return torch.tensor(rows) / 10


def surroundings(kill_at: int) -> dict[str, Any]:
    """What a script has before its loop."""
    torch.manual_seed(1)
    data = torch.randn(12, 4)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 4))
    rnn = nn.RNN(4, 6)
    optimizer = torch.optim.Adam([*model.parameters()], lr=0.01)
    calls = 0

    def die(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    model.register_forward_pre_hook(die)
    rnn.register_forward_pre_hook(die)

    def train(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def evaluate() -> float:
        with torch.no_grad():
            return float(model(data).square().mean() + torch.rand(()))

    return {
        "flashckpt": flashckpt,
        "torch": torch,
        "DataLoader": DataLoader,
        "Environment": Environment,
        "device": "cpu",
        "data": data,
        "loader": DataLoader(data, batch_size=3, shuffle=True),  # type: ignore[arg-type]
        "model": model,
        "rnn": rnn,
        "optimizer": optimizer,
        "train": train,
        "evaluate": evaluate,
    }


def main() -> None:
    torch.set_num_threads(1)
    title, folder, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
    os.chdir(folder)
    for call in (flashckpt.attach, flashckpt.loop):
        call.__kwdefaults__["every"] = 1
    names = surroundings(kill_at)
    code = recipes()[title]
    if "rnn=rnn" in code:
        names["optimizer"] = torch.optim.Adam(names["rnn"].parameters(), lr=0.01)
    if "scheduler" in code:
        names["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(names["optimizer"], 0.5)
    exec(compile(code, title, "exec"), names)
    weights = [p.double().sum().item().hex() for m in ("model", "rnn") for p in names[m].parameters()]
    kept = {name: repr(names[name]) for name in KEPT if name in names}
    print(json.dumps([weights, kept]), flush=True)


if __name__ == "__main__":
    main()
