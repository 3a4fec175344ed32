"""The sources of a run across its epochs: one for each loader, since a source holds persistent workers.

Owns the assignment of saved positions to loaders, by name, and the closing of unused sources. Never draws.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from flashckpt.errors import BoundaryError, OptionError
from flashckpt.state.loader.base import ReplayedSource, Source, digest_of, reference_to
from flashckpt.state.loader.dataloader import DataLoaderSource, is_prepared, prepared_source
from flashckpt.state.loader.position import Share, checked_fields, share_of
from flashckpt.state.loader.stateful import DatasetState, StatefulSource

log = logging.getLogger(__name__)

_KEYS = {"name", "position", "seeding", "renewed"}


Digests = dict[str, str]


def digests_of(source: Source) -> Digests:
    """Return path -> digest of the state of each generator of a source."""
    return {path: digest_of(state) for path, state in source.generators.capture().items()}


@dataclass
class Seeding:
    """Whether a loader's own generators continue from one epoch to the next, or the program seeds them again.
    A resume between two epochs restores a generator that continues, and must not change one that the program
    has just seeded for the epoch.

    first: the digests of the generators at the loader's first epoch.
    goes_on: path -> whether the generator, at the newest start of an epoch, had the state at the end of the
        epoch before; without the path as long as only one start was observed.
    """

    first: Digests = field(default_factory=dict)
    goes_on: dict[str, bool] = field(default_factory=dict)

    def observe(self, left: Digests | None, now: Digests) -> None:
        """Record the start of an epoch. left: the digests at the end of the epoch before; None if unknown.
        now: the current ones."""
        if not self.first:
            self.first = dict(now)
        if left is not None:
            self.goes_on.update((path, left[path] == digest) for path, digest in now.items() if path in left)

    def not_restored(self, now: Digests) -> frozenset[str]:
        """Return the paths that a resume must not restore. now: the current digests.

        After a single epoch, the start of the program decides: the same state as at its first start means
        that it seeds the generators once; another state means that it has seeded them for this epoch.
        """
        guessed = [p for p, digest in now.items() if p not in self.goes_on and self.first.get(p) != digest]
        if guessed:
            log.info(
                "The loader's generators %s differ from those at the start of the run: the program is "
                "assumed to seed them for each epoch, so they are not restored. If they are seeded at "
                "random, give them a seed.",
                guessed,
            )
        self.goes_on.update(dict.fromkeys(guessed, False))
        return frozenset(path for path in now if not self.goes_on.get(path, True))

    def copy(self) -> Seeding:
        return Seeding(dict(self.first), dict(self.goes_on))

    @classmethod
    def read(cls, saved: Any) -> Seeding:
        """Return the Seeding with these attributes. Raises ValueError for anything else."""
        seeding = checked_fields(cls, saved)
        if not all(type(value) is bool for value in seeding.goes_on.values()):
            raise ValueError("its seeding cannot be read")
        return seeding


def _no_loader() -> None:
    """The placeholder for a loader that this process has not used yet."""


@dataclass(eq=False)
class _Tracked:
    """A loader, its source and its position.

    source: None if the loader was not used since the resume, or is retired; it continues from `position`.
    placed: a source that has not begun, and whose generators were already restored.
    retired: the source was closed because it was unused.
    renewed: the epoch before had another loader of this name, so workers do not persist.
    left: the digests of the generators at the end of its newest epoch in this process.
    """

    loader: Callable[[], Any] = _no_loader
    source: Source | None = None
    position: dict[str, Any] | None = None
    placed: Source | None = None
    retired: bool = False
    renewed: bool = False
    seeding: Seeding = field(default_factory=Seeding)
    left: Digests | None = None
    epoch: int = 0


class Sources:
    """All sources of a run. `_by_name`: the loader that each name had last."""

    def __init__(self) -> None:
        self._all: list[_Tracked] = []
        self._by_name: dict[str, _Tracked] = {}

    def value(self) -> list[dict[str, Any]]:
        """Return plain values: the position of the source of each name."""
        return [
            {
                "name": name,
                "position": tracked.position if tracked.source is None else tracked.source.position(),
                "seeding": vars(tracked.seeding.copy()),
                "renewed": tracked.renewed,
            }
            for name, tracked in sorted(self._by_name.items())
        ]

    def restore(self, saved: Any) -> None:
        """Restore the result of `value`. Raises ValueError for anything else."""
        by_name: dict[str, _Tracked] = {}
        entries: list[Any] = saved if isinstance(saved, list) else [None]
        for entry in entries:
            good = isinstance(entry, dict) and entry.keys() == _KEYS
            if not good or type(entry["position"]) is not dict or type(entry["name"]) is not str:
                raise ValueError("a loader's entry cannot be read")
            seeding, renewed = Seeding.read(entry["seeding"]), entry["renewed"] is True
            by_name[entry["name"]] = _Tracked(position=entry["position"], seeding=seeding, renewed=renewed)
        self.close()
        self._by_name, self._all = by_name, [*by_name.values()]

    def saved_position(self, name: str) -> dict[str, Any]:
        """Return the position from which a loader has not resumed yet; or {}."""
        tracked = self._by_name.get(name)
        return tracked.position or {} if tracked is not None and tracked.source is None else {}

    def skip(self, loader: object, name: str) -> None:
        """Skip the batches of an epoch that had all been given: assign the position to the loader, and
        restore the loader's generators, because later code draws from them."""
        tracked = self._by_name.get(name)
        known = self._find(loader) is not None
        if known or tracked is None or tracked.position is None or tracked.loader is not _no_loader:
            return
        source = source_of(loader)
        source.generators.restore(tracked.position.get("now", {}).get("own", {}))
        tracked.loader, tracked.placed = reference_to(loader), source

    def open(
        self,
        loader: object,
        epoch: int,
        name: str,
        *,
        in_place: bool,
        sets_epoch: bool,
        counts_trained: bool = False,
        in_lockstep: bool = False,
    ) -> Source:
        """Begin an epoch of a loader. in_place: it was open when the run was saved. counts_trained: batches
        may be drawn ahead. in_lockstep: as in `Source.begin`."""
        # Several taps may be open over one loader, each with a position of its own.
        known = self._by_name.get(name) if counts_trained else self._find(loader)
        if known is not None and known.loader() is not loader:
            known = None
        tracked = self._choose(known, name, in_place=in_place)
        # Compare with None: the truth value of a source without a length raises.
        source = tracked.placed if tracked.source is None else tracked.source
        source = source_of(loader) if source is None else source
        if counts_trained:
            source.count_trained()
        try:
            _begin(source, tracked, epoch, in_place=in_place, sets_epoch=sets_epoch, in_lockstep=in_lockstep)
        except BaseException:
            if tracked.source is None:
                source.close()
            raise
        tracked.source, tracked.position, tracked.placed, tracked.retired = source, None, None, False
        tracked.loader, tracked.epoch = lambda: loader, epoch
        self._assign(name, tracked)
        return source

    def ended(self, name: str) -> None:
        """Record that the epoch of a loader is over or was left."""
        tracked = self._by_name.get(name)
        if tracked is not None and tracked.source is not None:
            tracked.source.leave_ahead()
            tracked.left = digests_of(tracked.source)

    def retire(self, epoch: int) -> None:
        """Close the sources that neither this epoch nor the one before has used. A loader that is used again
        continues from its position. Forget a loader that was deleted and whose name another has."""
        for tracked in list(self._all):
            if tracked.source is not None and tracked.epoch < epoch - 1:
                tracked.position, tracked.retired = tracked.source.position(), True
                tracked.source.close()
                tracked.source = None
                tracked.loader = reference_to(tracked.loader())
            gone = tracked.retired and (
                not isinstance(tracked.loader, weakref.ref) or tracked.loader() is None
            )
            if gone and tracked not in self._by_name.values():
                self._forget(tracked)

    def close(self) -> None:
        """End the workers of all sources."""
        for tracked in self._all:
            if tracked.source is not None:
                tracked.source.close()
        self._all.clear()
        self._by_name.clear()

    def _choose(self, known: _Tracked | None, name: str, *, in_place: bool) -> _Tracked:
        before = self._by_name.get(name)
        if in_place and before is not None:
            return before
        if known is not None:
            return known
        if before is None:
            return _Tracked()
        if before.source is None and not before.retired and before.loader() is None:
            return before
        # The epoch before had another loader, which may draw from the same generators.
        return _Tracked(seeding=before.seeding.copy(), left=before.left, renewed=True)

    def _find(self, loader: object) -> _Tracked | None:
        return next((tracked for tracked in self._all if tracked.loader() is loader), None)

    def _assign(self, name: str, tracked: _Tracked) -> None:
        if tracked not in self._all:
            self._all.append(tracked)
        replaced = self._by_name.get(name)
        self._by_name[name] = tracked
        is_used = replaced not in self._all or replaced is tracked
        if replaced is not None and not is_used and replaced.source is None and not replaced.retired:
            self._forget(replaced)

    def _forget(self, tracked: _Tracked) -> None:
        self._all.remove(tracked)
        for name in [n for n, used in self._by_name.items() if used is tracked]:
            del self._by_name[name]


def _begin(
    source: Source, tracked: _Tracked, epoch: int, *, in_place: bool, sets_epoch: bool, in_lockstep: bool
) -> None:
    position = None if tracked.source is not None else tracked.position
    if in_place and position is not None:
        return source.begin(epoch, position, sets_epoch=sets_epoch, in_lockstep=in_lockstep)
    now = digests_of(source)
    if position is None or tracked.retired:
        tracked.seeding.observe(tracked.left, now)
    if position is None or (tracked.retired and position["kind"] != "dataloader"):
        return source.begin(epoch, sets_epoch=sets_epoch)
    # A retired source has lost only its workers; its generators are current.
    done = tracked.retired or tracked.placed is not None
    leave = frozenset(now) if done else tracked.seeding.not_restored(now)
    if not tracked.renewed or tracked.retired:
        return source.begin(epoch, position, carry=True, leave=leave, sets_epoch=sets_epoch)
    source.begin(epoch, sets_epoch=sets_epoch)
    own = position.get("now", {}).get("own", {})
    return source.generators.restore({path: state for path, state in own.items() if path not in leave})


def epoch_length(loader: Any, position: Mapping[str, Any]) -> int:
    """Return the batches of the epoch of a saved position with this loader, including those before the
    position. Other epochs have another number if the rest is divided among other ranks. Raises TypeError if
    the loader has no length."""
    length = len(loader)
    made_of = position.get("made_of", {})
    then, now = Share.read(made_of.get("share")), share_of(loader)
    if then is None or now is None or (then.ranks == now.ranks == 1 and not then.batches):
        return length
    if not (then.can_be_divided and now.can_be_divided):
        return length
    taken, before = position["batches_taken"], position["length"]
    return taken if before is not None and taken >= before else now.remaining_after(then, taken).all_batches


# The kind of source for a loader


def check_loader(loader: Any) -> None:
    """Raise now the errors that the first batch would raise, as far as they are known. Draws nothing.

    Raises the errors of `source_of`, and StateError for a loader whose own state cannot be saved exactly.
    """
    _source_of(loader).check()


def source_of(loader: Any) -> Source:
    """Return the source for a loader: DataLoaderSource for torch's DataLoader over a data set with a length,
    StatefulSource for a loader with its own state, ReplayedSource for other iterables.

    Raises BoundaryError for a loader whose position is not that of its last batch (it fetches ahead or out of
    order), OptionError for an object that is not iterable.
    """
    source = _source_of(loader)
    inside = loader.base_dataloader if is_prepared(loader) else loader
    if _is_torchdata(inside) and inside.num_workers:
        log.warning(
            "StatefulDataLoader does not keep its workers' random numbers in the middle of an epoch: after a "
            "resume, those drawn inside workers differ. torch's DataLoader resumes exactly."
        )
    return source


def _source_of(loader: Any) -> Source:
    if is_prepared(loader):
        return prepared_source(loader, _source_of)
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
        return StatefulSource(DatasetState(loader))
    return ReplayedSource(loader)


def _of_fabric(loader: Any) -> Source:
    """Return the source of the loader inside Fabric's wrapper. The wrapper counts its own `iter()` calls for
    `DistributedSampler.set_epoch`, from 0 in each process; a source sets the run's epoch instead."""
    source, device = _source_of(loader._dataloader), loader._device
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
