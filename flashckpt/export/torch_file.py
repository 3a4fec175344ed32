"""A file for `torch.load(weights_only=True)`: a dict of names to tensors.

The one place where this library writes a pickle: torch's own format is one, and this file is for others.
Nothing here ever reads one back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.export.selection import SelectedLeaf


def write(path: str, sources: Sequence[SelectedLeaf], step: int) -> int:
    """Write the file. Tied names give one tensor, stored once. Returns its bytes. DamagedError where a leaf
    is not what was captured."""
    tensors: dict[str, torch.Tensor] = {}
    for each in sources:
        tensor = _read(each, step)
        tensors.update(dict.fromkeys((each.leaf.name, *each.leaf.aliases), tensor))
    torch.save(tensors, path)
    return os.path.getsize(path)


def _read(source: SelectedLeaf, step: int) -> torch.Tensor:
    """A leaf in memory of its own, digested there."""
    leaf = source.leaf
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    if leaf.num_bytes == 0:
        return torch.empty(leaf.shape, dtype=dtype, device="cpu")
    data = bytearray()
    for piece in source.pieces():
        data += piece
    if _native.digest(_native.address_of(data), leaf.num_bytes) != source.digest:
        raise DamagedError(
            f"{leaf.name} in {source.path} is not what was captured. Nothing was written. Verify the step.",
            step=step,
            path=source.path,
        )
    return torch.frombuffer(data, dtype=dtype).view(leaf.shape)
