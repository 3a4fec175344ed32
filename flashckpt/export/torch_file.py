"""A file for `torch.load(weights_only=True)`: a dict of names to tensors.

The one place where this library writes a pickle: torch's own format is one, and this file is for others.
Nothing here ever reads one back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from flashckpt.export.selection import SelectedLeaf
from flashckpt.restore.snapshot import leaf_view


def write(path: str, sources: Sequence[SelectedLeaf]) -> int:
    """Write the file. Tied names give one tensor, stored once. Returns its bytes. DamagedError where a leaf
    is not what was captured."""
    tensors: dict[str, torch.Tensor] = {}
    for each in sources:
        leaf = each.leaf
        tensor = leaf_view(memoryview(each.read()), leaf, 0)
        tensors.update(dict.fromkeys((leaf.name, *leaf.aliases), tensor))
    torch.save(tensors, path)
    return os.path.getsize(path)
