"""The training of the kill tests: a tiny model that steps in a millisecond and uses every random source.

What it did is written as records of fixed size, one system call each, so that a kill leaves no half
record and a watcher can count boundaries by the file's length.
"""

import functools
import os
import random
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flashckpt
from tests.waiting import until, until_slots

KEPT = 2
PERSIST_EVERY = 3
_RECORD = struct.Struct("<qqqqQ")
RECORD_BYTES = _RECORD.size
RESUMED, STEP = 1, 2
TIERS = ("none", "memory", "local", "cache")


class Record(NamedTuple):
    """kind RESUMED: step is where this life went on from, sealed the tier's number, skipped 1 if it had to
    begin afresh. kind STEP: step bodies are done, their weights have the digest; sealed is the newest
    sealed step (-1: none of this life), skipped how many boundaries passed without a snapshot."""

    kind: int
    step: int
    sealed: int
    skipped: int
    digest: int


def records(path: str) -> list[Record]:
    if not os.path.exists(path):
        return []
    with open(path, "rb") as file:
        data = file.read()
    assert len(data) % RECORD_BYTES == 0, "a record was written by half"
    return [Record(*fields) for fields in _RECORD.iter_unpack(data)]


class Noisy(Dataset[torch.Tensor]):
    """Items that draw from all three random sources."""

    def __init__(self) -> None:
        self._data = torch.randn(24, 32, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> torch.Tensor:
        jitter = torch.rand(()) + random.random() + float(np.random.rand())
        return self._data[index] + 0.01 * jitter


class Frozen(nn.Module):
    """What never changes, large enough to be shared by all slots: a MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1 << 18), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.weight[: x.shape[-1]]


def made() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[torch.Tensor]]:
    """About 100 KB of state that changes, weights and both moments of AdamW, and a frozen MiB."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    layers = nn.Linear(32, 120), nn.BatchNorm1d(120), nn.Dropout(0.2), nn.Linear(120, 32)
    model = nn.Sequential(Frozen(), *layers)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return model, optimizer, DataLoader(Noisy(), batch_size=4, shuffle=True)


def body(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digest_of(leaves: Mapping[str, Any]) -> int:
    """One number for the model's leaves, given as arrays by their names in a checkpoint."""
    found = xxhash.xxh3_64()
    for name in sorted(leaves):
        if name.startswith("model."):
            found.update(name.encode())
            found.update(np.ascontiguousarray(leaves[name]))
    return found.intdigest()


def _digest(model: nn.Module) -> int:
    return digest_of({f"model.{name}": value.numpy() for name, value in model.state_dict().items()})


def reference(steps: int) -> list[int]:
    """Digests after 0, 1, … steps of a plain loop, that nothing of this library has touched."""
    model, optimizer, loader = made()
    digests = [_digest(model)]
    while len(digests) <= steps:
        for batch in loader:
            body(model, optimizer, batch)
            digests.append(_digest(model))
    return digests[: steps + 1]


def train(
    run: str,
    log: str,
    *,
    steps: int,
    wait_slots: bool = True,
    hold: tuple[int, str] | None = None,
    persist_every: int = PERSIST_EVERY,
    cache: str | None = None,
) -> None:
    """Train to `steps`. wait_slots: stand still in the first iteration until snapshots can be taken. hold:
    stand still in the iteration of a step until a file is there."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    model, optimizer, loader = made()
    batches = flashckpt.loop(
        loader,
        run,
        steps=steps,
        every=1,
        persist_every=persist_every,
        keep=flashckpt.Keep(last=KEPT),
        cache=cache,
        model=model,
        optimizer=optimizer,
    )
    resumed = batches.checkpointer.resumed
    step, tier = (resumed.step, TIERS.index(resumed.tier)) if resumed else (0, 0)
    os.write(file, _RECORD.pack(RESUMED, step, tier, 0, _digest(model)))
    checkpointer = batches.checkpointer
    for batch in batches:
        body(model, optimizer, batch)
        if wait_slots:
            until_slots(checkpointer)
        if hold is not None and batches.completed == hold[0]:
            until(functools.partial(os.path.exists, hold[1]), "being let go")
        report = checkpointer.report()
        sealed, skipped = int(report["newest_sealed_step"]), int(report["snapshots_skipped"])
        row = (STEP, batches.completed + 1, sealed, skipped, _digest(model))
        os.write(file, _RECORD.pack(*row))
