"""Which kind of source serves a loader. Looks and refuses; draws nothing and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from flashckpt.errors import BoundaryError, OptionError
from flashckpt.events import log
from flashckpt.state.loader.asked import AskedSource, DatasetState
from flashckpt.state.loader.base import OnReplay, Source
from flashckpt.state.loader.plain import PlainSource
from flashckpt.state.loader.replayed import ReplayedSource


def check_loader(loader: Any) -> None:
    """Refuse now what would be refused at the first batch, as far as it can be known. Draws nothing.

    Raises what `source_of` raises, and StateError for a loader whose own state cannot be saved exactly.
    """
    source = _chosen(loader, None)
    if isinstance(source, AskedSource):
        source.check()


def source_of(loader: Any, *, on_replay: OnReplay | None = None) -> Source:
    """The source for a loader: exact for torch's DataLoader over a data set with a length, asked where the
    loader keeps a state, replayed otherwise.

    on_replay: called with (batches drawn again, batches in all) while an iterable is replayed.
    Raises BoundaryError for loaders whose position is not what they gave (they fetch ahead or out of order),
    OptionError for what is no iterable.
    """
    source = _chosen(loader, on_replay)
    if _is_torchdata(loader) and loader.num_workers:
        log.warning(
            "StatefulDataLoader does not keep its workers' random numbers in the middle of an epoch: "
            "after a resume, those drawn inside workers differ. torch's DataLoader is taken up exactly."
        )
    return source


def _chosen(loader: Any, on_replay: OnReplay | None) -> Source:
    if _is_accelerate(loader):
        raise BoundaryError(
            f"{type(loader).__name__} of Accelerate takes one batch more than it has given, so at a boundary "
            "its position is not the loop's, and a resumed run would lose a batch. Nothing was started. Keep "
            "the loader out of accelerator.prepare(): pass the DataLoader itself (with a DistributedSampler "
            "for several ranks) and move the batches to the device in the loop."
        )
    if isinstance(loader, DataLoader):
        return _of_dataloader(loader, on_replay)
    if _keeps_state(loader):
        return AskedSource(loader)
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise OptionError(
            f"The loader is a {type(loader).__name__}, which cannot be iterated over. Nothing was started. "
            "Pass a DataLoader or any iterable of batches."
        )
    return ReplayedSource(loader, on_replay)


def _of_dataloader(loader: Any, on_replay: OnReplay | None) -> Source:
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise BoundaryError(
            "DataLoader(in_order=False) gives batches in the order in which workers happen to finish, so no "
            "position in it can be taken up again. Nothing was started. Use in_order=True."
        )
    if _is_torchdata(loader):
        streams = isinstance(loader.dataset, IterableDataset) and _keeps_state(loader.dataset)
        if loader.num_workers and loader.persistent_workers and streams:
            raise BoundaryError(
                "StatefulDataLoader keeps, of a data set that lives on in its workers, the state of the "
                "epoch before until each worker has given a batch: a resumed run would lose some. Nothing "
                "was started. Use persistent_workers=False."
            )
        return AskedSource(loader, makes_ahead=True)
    changed = [name for name in ("__iter__", "_get_iterator") if _overrides(loader, name)]
    if changed and _keeps_state(loader):
        return AskedSource(loader)
    if changed:
        return ReplayedSource(loader, on_replay)
    if not isinstance(loader.dataset, IterableDataset):
        return PlainSource(loader)
    if not loader.num_workers and _keeps_state(loader.dataset):
        return AskedSource(DatasetState(loader))
    return ReplayedSource(loader, on_replay)


def _overrides(loader: Any, name: str) -> bool:
    return getattr(type(loader), name) is not getattr(DataLoader, name)


def _keeps_state(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_accelerate(loader: Any) -> bool:
    # type(), not __class__: Accelerate's loaders claim to be the DataLoader that they wrap.
    return any(kind.__module__ == "accelerate.data_loader" for kind in type(loader).__mro__)


def _is_torchdata(loader: Any) -> bool:
    return any(
        kind.__name__ == "StatefulDataLoader" and kind.__module__.startswith("torchdata.")
        for kind in type(loader).__mro__
    )
