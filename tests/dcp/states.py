"""State dicts that tests save, and others of the same form to load into."""

from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from flashckpt.format.typed import same

_ODD = [torch.float8_e4m3fnuz, torch.complex64, torch.complex128, torch.uint16, torch.bool, torch.float8_e5m2]


def state(seed: int) -> dict[str, Any]:
    """A state dict with dtypes, shapes and values of many kinds."""
    drawn = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        count = int(torch.Size(shape).numel()) * dtype.itemsize
        raw = torch.randint(0, 2, (count,), generator=drawn, dtype=torch.uint8)
        return raw.view(dtype).reshape(shape)

    return {
        "model": OrderedDict(
            weight=torch.randn(4, 6, generator=drawn).t(),
            bias=torch.nn.Parameter(torch.randn(3, generator=drawn)),
            empty=torch.zeros(0, 3),
            count=torch.tensor(seed),
            bf16=torch.randn(5, generator=drawn).bfloat16(),
        ),
        "odd": [tensor(2, 3, dtype=dtype) for dtype in _ODD],
        "steps": {0: {"at": seed}, 1: {"at": -seed}},
        "values": {
            "é": "ö" * seed,
            "set": {seed, "x"},
            "nan": float("nan"),
            "pair": (seed, (2,)),
            "list": [seed, {"deep": [None, True]}],
            "array": np.full(3, seed),
            "none": None,
        },
        "__metadata__": torch.tensor([seed]),
    }


def equal(one: Any, other: Any) -> bool:
    """Whether two state dicts hold the same names, bytes and values."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        raw = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)
    return same(one, other)
