"""The samplers of a torch DataLoader: where they are found, the epoch that they are told, what a loader is
made of.

Never draws from them.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from flashckpt.events import log
from flashckpt.state.loader.identity import Notes

# By sampler, not by loader: loaders that are made anew for each epoch may share one.
_told = Notes()
_BY_PROGRAM = object()


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
    """Tell the samplers that shuffle by epoch (DistributedSampler and the like) which one it is.

    One whose `epoch` is neither the 0 it was made with nor what it was told here is told by the program
    itself, and left alone.
    """
    for sampler in samplers_of(loader).values():
        tell = getattr(sampler, "set_epoch", None)
        told = _told.get(sampler, 0)
        if not callable(tell) or told is _BY_PROGRAM:
            continue
        if getattr(sampler, "epoch", None) not in (None, told):
            log.info("%s.set_epoch is called by the program, and left to it.", type(sampler).__name__)
            _told.set(sampler, _BY_PROGRAM)
            continue
        tell(epoch)
        _told.set(sampler, getattr(sampler, "epoch", None))


def made_of(loader: Any) -> dict[str, Any]:
    """What decides, beside random numbers, which items a DataLoader's batches hold; empty for others."""
    if not isinstance(loader, DataLoader):
        return {}
    size: Any = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    return {
        "batch_size": size if isinstance(size, int) else None,
        "drop_last": bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last)),
        "sampler": type(loader.sampler).__name__,
        "batch_sampler": type(loader.batch_sampler).__name__,
        "dataset_length": length_of(loader.dataset),
    }


def length_of(sized: Any) -> int | None:
    """None for what does not know its length."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
