"""What an iteration costs the training thread beside the copies: a recorded position of a loader.

Prints microseconds, the minimum of many calls: on a machine that does other work too, the minimum is the
figure that repeats. `python -m benchmarks.boundary_cost`
"""

from __future__ import annotations

import random
import timeit
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from flashckpt.state.loader.sources import source_of

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
        "all three, recorded": source.generators.record_all,
        "a position, recorded": source.record,
        "a position, recorded, NumPy drawn in between": lambda: (np.random.rand(), source.record()),
        "a position, recorded and encoded": source.position,
    }
    for name, call in rows.items():
        print(f"{name:48}{fastest_us(call):8.1f} us")


if __name__ == "__main__":
    main()
