"""The samplers of a torch DataLoader: where they are found, and the epoch that they are told.

Never draws from them.
"""

from __future__ import annotations

from typing import Any


def samplers_of(loader: Any) -> dict[str, object]:
    """The distinct samplers under their paths; empty for what is not built like a DataLoader."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = {
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
    }
    first = {id(sampler): path for path, sampler in reversed(found.items())}
    return {path: found[path] for path in first.values() if found[path] is not None}


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers that shuffle by epoch (DistributedSampler and the like) which one it is."""
    for sampler in samplers_of(loader).values():
        told = getattr(sampler, "set_epoch", None)
        if callable(told):
            told(epoch)
