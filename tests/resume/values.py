"""A replay buffer among plain values, as reinforcement learning has it: 210 MB that grow."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import nn

import flashckpt
from tests.resume.recipes import Hold, Record, held_loss

STEPS = 5
FLOATS, BYTES = 45_000_000, 30_000_000  # 210 MB


def replay(record: Record, hold: Hold, path: str, options: dict[str, Any]) -> None:
    net = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    generator = np.random.default_rng(5)
    own: dict[str, Any] = {
        "observations": generator.random(FLOATS, dtype=np.float32),
        "log": bytearray(BYTES),
        "episodes": 0,
    }
    batches = flashckpt.loop(
        range(STEPS), path, model=net, optimizer=optimizer, own=own, generator=generator, **options
    )
    for _ in batches:
        x = torch.from_numpy(own["observations"][-24:].reshape(4, 6))
        loss = held_loss(net, x, hold, batches.completed)
        loss.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        new = generator.random(100_000, dtype=np.float32)
        own["observations"][own["episodes"]] = 0.5
        own["observations"] = np.append(own["observations"], new)
        own["log"] += new[:1000].tobytes()
        own["episodes"] += 1
        digest = hashlib.blake2b(own["observations"])
        digest.update(own["log"])
        weights = [value.hex() for value in net.weight.detach().double().flatten().tolist()]
        record(batches, [digest.hexdigest(), own["observations"].dtype.str, *weights])


RECIPES = {"replay": replay}
