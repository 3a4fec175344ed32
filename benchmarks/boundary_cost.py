"""What an iteration costs the training thread beside the copies: a recorded position of a loader, and the
values of a log that grows by one entry.

Prints microseconds, the minimum of many calls: on a machine that does other work too, the minimum is the
figure that repeats. `python -m benchmarks.boundary_cost`
"""

from __future__ import annotations

import random
import time
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from flashckpt.format.typed import encode_json
from flashckpt.state.growing import GrowingList
from flashckpt.state.loader.sources import source_of
from flashckpt.state.tree import Tree

_REPEATS = 5_000
_CALLS = 3


def fastest_us(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=_CALLS, repeat=_REPEATS)) / _CALLS * 1e6


def main() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4096)), batch_size=8, shuffle=True)
    source = source_of(loader)
    source.count_trained()
    source.begin(0)
    source.next()
    source.count_trained(1)
    rows: dict[str, Callable[[], object]] = {
        "Python's generator": random.getstate,
        "NumPy's generator": lambda: np.random.get_state(legacy=False),
        "torch's generator": torch.default_generator.get_state,
        "all three, packed": source.generators.capture_all,
        "a position": source.position,
    }
    for name, call in rows.items():
        print(f"{name:48}{fastest_us(call):8.1f} us")
    for length in (0, 10_000, 100_000):
        newest, whole = log_us(length)
        name = f"a log of {length:,} entries, and one more"
        print(f"{name:48}{newest:8.1f} us (encoded anew: {whole:,.0f} us)")


def log_us(length: int) -> tuple[float, float]:
    """Microseconds for the values of a state that is a log, one entry longer each time: with the entries
    encoded once, and with all of them encoded anew. The fastest of many, and of a few."""
    entries = [entry(step) for step in range(length)]
    once, anew = Tree({"log": GrowingList(lambda: entries)}), Tree({"log": list(entries)})
    return _fastest_values(once, entries, 200), _fastest_values(anew, entries, 3)


def _fastest_values(tree: Tree, entries: list[Any], repeats: int) -> float:
    tree.walk(lambda parameter, gradient: True)
    found = []
    for step in range(repeats):
        entries.append(entry(step))
        began = time.perf_counter()
        encode_json(tree.values())
        found.append(time.perf_counter() - began)
    return min(found) * 1e6


def entry(step: int) -> dict[str, Any]:
    return {
        "loss": random.random(), "grad_norm": random.random(), "learning_rate": random.random() / 1e4,
        "epoch": step / 1000, "step": step,
    }  # fmt: skip


if __name__ == "__main__":
    main()
