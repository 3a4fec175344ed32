"""The samplers of a loader, and their epoch. Never imports torch, as a loop that is switched off."""

from __future__ import annotations

from typing import Any


def samplers_of(loader: Any) -> dict[str, object]:
    """Return path -> sampler of a loader's distinct samplers; empty for other objects than DataLoaders."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = {
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
    }
    first = {id(sampler): path for path, sampler in reversed(found.items())}
    return {path: found[path] for path in first.values() if found[path] is not None}


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the samplers that shuffle by epoch (DistributedSampler and similar ones), and of
    the data set (those of Hugging Face)."""
    for part in (*samplers_of(loader).values(), getattr(loader, "dataset", None)):
        method = getattr(part, "set_epoch", None)
        if callable(method):
            method(epoch)
