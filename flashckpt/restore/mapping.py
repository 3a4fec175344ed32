"""`load`: a committed step as tensors, verified, then mapped copy-on-write. Needs no live model."""

from __future__ import annotations

import mmap
import os

import torch

from flashckpt.commit.reading import resolve
from flashckpt.commit.verification import verify_file
from flashckpt.errors import DamagedError
from flashckpt.format.records import Contents
from flashckpt.restore.snapshot import leaf_view
from flashckpt.store.base import Store


def mapped_leaves(store: Store, step: int | None, rank: int) -> dict[str, torch.Tensor]:
    """Every leaf of one rank under each of its names. Tied names give the same tensor. What is written
    to a tensor stays in this process.

    Raises NoSuchStepError; DamagedError before anything is returned.
    """
    record = resolve(store, step)
    mine = record.rank(rank)
    leaves = _mapped(record.shard_path(rank), mine.contents, record.step)
    constants = record.constants_path(rank)
    if constants is not None and mine.constants is not None:
        leaves.update(_mapped(constants, mine.constants, record.step))
    return leaves


def _mapped(path: str, contents: Contents, step: int) -> dict[str, torch.Tensor]:
    status, detail = verify_file(path, contents)
    if status != "ok":
        raise DamagedError(
            f"{path} is {status}: {detail}. Nothing was loaded. Load an older step: "
            "`flashckpt ls` lists them.",
            step=step,
            path=path,
        )
    layout = contents.layout()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # Private and writable: a user may change what was loaded, and the file never.
        image = mmap.mmap(descriptor, layout.num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    view = memoryview(image)
    leaves: dict[str, torch.Tensor] = {}
    for leaf in layout.leaves:
        tensor = leaf_view(view, leaf, layout.data_start + leaf.offset)
        leaves.update(dict.fromkeys((leaf.name, *leaf.aliases), tensor))
    return leaves
