"""The sources of a run across its epochs: one for each name, since a source holds persistent workers.

Owns the assignment of saved positions to loaders, by name, and the end of unused workers. Never draws.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from flashckpt.errors import BoundaryError, OptionError
from flashckpt.format.typed import encode_json
from flashckpt.state.loader.dataloader import DataLoaderSource
from flashckpt.state.loader.order import checked_fields
from flashckpt.state.loader.position import Position
from flashckpt.state.loader.prepared import is_prepared, prepared_source
from flashckpt.state.loader.source import ReplayedSource, Source, with_new_workers
from flashckpt.state.loader.stateful import StatefulSource

log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """What is saved of a loader.

    is_open: an epoch of it has begun and has not ended.
    first: the digests of its own generators when the run first used it.
    renewed: the epoch before had another loader of this name, so workers do not persist.
    """

    name: str
    is_open: bool
    position: dict[str, Any]
    first: dict[str, str]
    renewed: bool

    def seeded_by_program(self, now: dict[str, str]) -> frozenset[str]:
        """Return the paths of generators that a resume between two epochs leaves alone: those that are not as
        at the run's first start, so that the program has seeded them for this epoch."""
        seeded = frozenset(path for path, digest in now.items() if self.first.get(path, digest) != digest)
        if seeded:
            log.info(
                "The loader's generators %s differ from those at the start of the run: the program is "
                "assumed to seed them for each epoch, so they are not restored. If they are seeded at "
                "random, give them a seed.", sorted(seeded),
            )  # fmt: skip
        return seeded


class Sources:
    """All sources of a run, by name."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}  # without the positions of loaders that were used here
        self._used: dict[str, tuple[object, Source]] = {}  # the loader and its source

    def value(self) -> list[dict[str, Any]]:
        """Return plain values: the position of the source of each name."""
        found = []
        for name, entry in sorted(self._entries.items()):
            if name in self._used:
                entry = entry._replace(position=self._used[name][1].position())
            found.append(entry._asdict())
        return found

    def restore(self, saved: list[Any]) -> None:
        """Restore the result of `value`. Raises ValueError for anything else."""
        entries = [checked_fields(Entry, each) for each in saved]
        for entry in entries:
            checked_fields(Position, entry.position)
        self.close()
        self._entries = {entry.name: entry for entry in entries}

    def opened(self) -> dict[str, Source]:
        """Return name -> source of the loaders that are open and were used here."""
        return {name: source for name, (_, source) in self._used.items() if self._entries[name].is_open}

    def waiting(self, name: str, epoch: int) -> dict[str, Any]:
        """Return the saved position of a loader that was open in this epoch and was not used here; or {}."""
        entry = self._entries.get(name)
        saved = entry.position if entry is not None and entry.is_open and name not in self._used else {}
        return saved if saved and saved["epoch"] == epoch else {}

    def open(
        self,
        loader: object,
        epoch: int,
        name: str,
        *,
        sets_epoch: bool = False,
        counts_trained: bool = False,
        in_lockstep: bool = False,
    ) -> Source:
        """Begin an epoch of a loader, or continue the one that was open when the run was saved. sets_epoch:
        call `set_epoch` of its samplers and data set. counts_trained: batches may be drawn ahead.
        in_lockstep: as in `Source.begin`."""
        entry, (last, source) = self._entries.get(name), self._used.get(name, (None, None))
        is_renewed = source is not None and last is not loader
        new = source_of(loader) if source is None or is_renewed else source
        new.sets_epoch = new.sets_epoch or sets_epoch
        if counts_trained:
            new.count_trained()
        before = new.generators.capture()
        now = {
            path: hashlib.blake2b(encode_json(state), digest_size=8).hexdigest()
            for path, state in before.items()
        }
        try:
            if entry is None or source is not None:
                new.begin(epoch)
            elif self.waiting(name, epoch):
                new.begin(epoch, entry.position, in_lockstep=in_lockstep)
            else:
                saved = entry.position
                if entry.renewed:
                    new.begin(epoch)
                    boundary = [saved["now"], *saved["ahead"]][-1]
                    new.generators.restore(boundary["own"])
                else:
                    new.begin(epoch, saved, carry=True)
                new.generators.restore({path: before[path] for path in entry.seeded_by_program(now)})
        except BaseException:
            if new is not source:
                new.close()
            raise
        if source is not None and is_renewed:
            source.close()
        entry = entry or Entry(name, True, {}, now, False)
        renewed = entry.renewed if source is None else is_renewed
        self._entries[name] = Entry(name, True, {}, entry.first or now, renewed)
        self._used[name] = loader, new
        return new

    def end(self, *names: str) -> None:
        """End the epoch of these loaders: it is over or was left."""
        for name in names:
            self._entries[name] = self._entries[name]._replace(is_open=False)
            if name in self._used:
                self._used[name][1].leave_ahead()

    def end_epoch(self) -> None:
        """End the epoch of all loaders."""
        self.end(*self._entries)

    def close(self) -> None:
        """End the workers of all sources."""
        for _, source in self._used.values():
            source.close()
        self._entries, self._used = {}, {}


def epoch_length(loader: Any, position: Mapping[str, Any]) -> int:
    """Return the batches of the epoch of a saved position with this loader, including those before the
    position. Other epochs have another number if the rest is divided among other ranks. Raises TypeError if
    the loader has no length."""
    length = len(loader)
    then = checked_fields(Position, position).share if position else None
    now = None if then is None else source_of(loader)._share
    if then is None or now is None or not now.can_follow(then):
        return length
    if then.ranks == now.ranks == 1 and not then.batches:
        return length
    taken, before = position["batches_taken"], position["length"]
    return taken if before is not None and taken >= before else now.remaining_after(then, taken).all_batches


# The kind of source for a loader


def source_of(loader: Any) -> Source:
    """Return the source for a loader: DataLoaderSource for torch's DataLoader over a data set with a length,
    StatefulSource for a loader with its own state, ReplayedSource for other iterables. Draws nothing.

    Raises BoundaryError for a loader whose position is not that of its last batch (it fetches ahead or out of
    order), OptionError for an object that is not iterable.
    """
    if is_prepared(loader):
        return prepared_source(loader, source_of)
    if _is_fabric(loader):
        return _of_fabric(loader)
    if isinstance(loader, DataLoader) and (found := _of_dataloader(loader)) is not None:
        return found
    if _keeps_state(loader):
        return StatefulSource(loader)
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise OptionError(
            f"The loader is a {type(loader).__name__}, which cannot be iterated over. Nothing was started. "
            "Pass a DataLoader or any iterable of batches."
        )
    return ReplayedSource(loader)


def _of_dataloader(loader: Any) -> Source | None:
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise BoundaryError(
            "DataLoader(in_order=False) returns batches in the order in which workers finish, so no position "
            "can be resumed. Nothing was started. Use in_order=True."
        )
    if _is_torchdata(loader):
        streams = isinstance(loader.dataset, IterableDataset) and _keeps_state(loader.dataset)
        if loader.num_workers and loader.persistent_workers and streams:
            raise BoundaryError(
                "StatefulDataLoader with persistent workers reports the data set's state of the epoch before "
                "until each worker has returned a batch, so a resumed run would lose batches. Nothing was "
                "started. Use persistent_workers=False."
            )
        return StatefulSource(loader, creates_iterator=True)
    own = ("__iter__", "_get_iterator")
    if any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in own):
        return None
    if not isinstance(loader.dataset, IterableDataset):
        return DataLoaderSource(loader)
    if not loader.num_workers and _keeps_state(loader.dataset):
        return StatefulSource(with_new_workers(loader), loader.dataset)
    return ReplayedSource(loader)


def _of_fabric(loader: Any) -> Source:
    """Return the source of the loader inside Fabric's wrapper. The wrapper counts its own `iter()` calls for
    `DistributedSampler.set_epoch`, from 0 in each process; a source sets the run's epoch instead."""
    source, device = source_of(loader._dataloader), loader._device
    source.sets_epoch = True
    if device is not None:
        move = vars(sys.modules[type(loader).__module__])["move_data_to_device"]
        source.convert = partial(move, device=device)
    return source


def _keeps_state(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_fabric(loader: Any) -> bool:
    # The attributes are those of lightning 2.0 to 2.6.
    known = type(loader).__name__ == "_FabricDataLoader" and {"_dataloader", "_device"} <= vars(loader).keys()
    return known and type(loader).__module__ in ("lightning_fabric.wrappers", "lightning.fabric.wrappers")


def _is_torchdata(loader: Any) -> bool:
    return any(
        kind.__name__ == "StatefulDataLoader" and kind.__module__.startswith("torchdata.")
        for kind in type(loader).__mro__
    )
