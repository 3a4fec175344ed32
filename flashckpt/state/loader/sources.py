"""The sources of a run, from phase to phase: one a loader, since persistent workers live in them.

Owns which loader a saved position belongs to, and which sources are closed because nothing has used them
for long. Positions are kept by source: two phases over one loader have one position. Never draws.
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
from flashckpt.state.loader.base import ReplayedSource, Source, mark_of, reference_to
from flashckpt.state.loader.dataloader import DataLoaderSource
from flashckpt.state.loader.position import Share
from flashckpt.state.loader.prepared import is_prepared, prepared_source
from flashckpt.state.loader.share import share_of
from flashckpt.state.loader.stateful import DatasetState, StatefulSource

log = logging.getLogger(__name__)

_IDLE_PHASES = 8
_KEYS = {"phases", "position", "seeding", "renewed"}


Marks = dict[str, str]


def marks_of(source: Source) -> Marks:
    """A short mark for the state of each of its generators, by path."""
    return {path: mark_of(state) for path, state in source.generators.capture().items()}


@dataclass
class Seeding:
    """Whether a loader's own generators go on from one phase to the next, or are seeded anew by the program.
    One that goes on is put back when a run is taken up between two epochs; one that the program has just
    seeded for the epoch must be left alone.

    first: the generators' marks when the run began its first phase. goes_on: whether each was, at the
    newest beginning, as the phase before had left it; absent while only one beginning was seen."""

    first: Marks = field(default_factory=dict)
    goes_on: dict[str, bool] = field(default_factory=dict)

    def see(self, left: Marks | None, now: Marks) -> None:
        """A phase begins: how the one before left the generators (None: not known), and how they are."""
        if not self.first:
            self.first = dict(now)
        if left is not None:
            self.goes_on.update((path, left[path] == mark) for path, mark in now.items() if path in left)

    def left_alone(self, now: Marks) -> frozenset[str]:
        """Those not to be put back, where a run is taken up with generators that stand at `now`.

        After a single epoch there is no evidence but how the program begins: the same as at its first start
        means that it seeds them once, and anything else that it has seeded them for this epoch.
        """
        guessed = [p for p, mark in now.items() if p not in self.goes_on and self.first.get(p) != mark]
        if guessed:
            log.info(
                "The loader's generators %s do not begin as at the start of the run: taken as seeded for "
                "this epoch by the program, and left alone. If they are seeded at random, give them a seed.",
                guessed,
            )
        self.goes_on.update(dict.fromkeys(guessed, False))
        return frozenset(path for path in now if not self.goes_on.get(path, True))

    def copy(self) -> Seeding:
        return Seeding(dict(self.first), dict(self.goes_on))

    @classmethod
    def read(cls, saved: Any) -> Seeding:
        """Raises ValueError for anything but the attributes of one."""
        good = isinstance(saved, dict) and saved.keys() == {"first", "goes_on"}
        good = good and all(isinstance(each, dict) for each in saved.values())
        if not good or not all(type(value) is bool for value in saved["goes_on"].values()):
            raise ValueError("its seeding cannot be read")
        return cls(**saved)


def _unknown() -> None:
    """In the place of a loader that was not seen in this process yet."""


@dataclass(eq=False)
class _Kept:
    """source: None while the loader was not used since the run was taken up, or is not used any more; it
    then goes on from `position`. left: its generators at the end of its newest phase in this process.
    placed: its source, not begun, whose generators were put back already.
    renewed: the phase had another loader in the epoch before, so workers do not live on."""

    loader: Callable[[], Any] = _unknown
    source: Source | None = None
    position: dict[str, Any] | None = None
    placed: Source | None = None
    retired: bool = False
    renewed: bool = False
    seeding: Seeding = field(default_factory=Seeding)
    left: Marks | None = None
    epoch: int = 0
    phase: int = 0


class Sources:
    """All sources of a run. `_by_phase` has the one that each phase used when it was last open."""

    def __init__(self) -> None:
        self._all: list[_Kept] = []
        self._by_phase: dict[int, _Kept] = {}

    def value(self) -> list[dict[str, Any]]:
        """Plain values: each source that a phase may go on with, and the phases it belongs to."""
        phases: dict[_Kept, list[int]] = {}
        for phase, kept in sorted(self._by_phase.items(), key=lambda item: item[0]):
            phases.setdefault(kept, []).append(phase)
        return [
            {
                "phases": numbers,
                "position": kept.position if kept.source is None else kept.source.position(),
                "seeding": vars(kept.seeding.copy()),
                "renewed": kept.renewed,
            }
            for kept, numbers in phases.items()
        ]

    def restore(self, saved: Any) -> None:
        """Take up what `value` gave. Raises ValueError if it is none."""
        by_phase: dict[int, _Kept] = {}
        entries: list[Any] = saved if isinstance(saved, list) else [None]
        for entry in entries:
            good = isinstance(entry, dict) and entry.keys() == _KEYS
            if not good or type(entry["position"]) is not dict or type(entry["phases"]) is not list:
                raise ValueError("a loader's entry cannot be read")
            if not all(type(number) is int and number >= 0 for number in entry["phases"]):
                raise ValueError("a loader's phases are no numbers")
            seeding, renewed = Seeding.read(entry["seeding"]), entry["renewed"] is True
            kept = _Kept(position=entry["position"], seeding=seeding, renewed=renewed)
            by_phase.update(dict.fromkeys(entry["phases"], kept))
        self.close()
        self._by_phase = by_phase
        self._all = list(dict.fromkeys(by_phase.values()))

    def saved_position(self, phase: int) -> dict[str, Any]:
        """The position that a phase has not yet taken up; empty if there is none."""
        kept = self._by_phase.get(phase)
        return kept.position or {} if kept is not None and kept.source is None else {}

    def skip(self, loader: object, phase: int) -> None:
        """A phase that had ended was asked for again: says which loader its position belongs to. The loader's
        generators are put back here, where the code after the phase and other loaders draw from them."""
        kept = self._by_phase.get(phase)
        known = self._of(loader) is not None
        if known or kept is None or kept.position is None or kept.loader is not _unknown:
            return
        source = source_of(loader)
        source.generators.restore(kept.position.get("now", {}).get("own", {}))
        kept.loader, kept.placed = reference_to(loader), source

    def open(
        self,
        loader: object,
        epoch: int,
        phase: int,
        *,
        in_place: bool,
        tell_epoch: bool,
        counts_trained: bool = False,
        beside: bool = False,
    ) -> Source:
        """Begin a phase. in_place: it is the one that was open when the run was saved. counts_trained:
        batches may be drawn ahead. beside: as in `Source.begin`."""
        # Several taps may be open over one loader, each with a place of its own in it.
        known = self._by_phase.get(phase) if counts_trained else self._of(loader)
        if known is not None and known.loader() is not loader:
            known = None
        kept = self._chosen(known, phase, in_place=in_place)
        # A source may not know its length: it is neither true nor false.
        source = kept.placed if kept.source is None else kept.source
        source = source_of(loader) if source is None else source
        if counts_trained:
            source.count_trained()
        try:
            _begin(source, kept, epoch, in_place=in_place, tell_epoch=tell_epoch, beside=beside)
        except BaseException:
            if kept.source is None:
                source.close()
            raise
        kept.source, kept.position, kept.placed, kept.retired = source, None, None, False
        kept.loader, kept.epoch, kept.phase = lambda: loader, epoch, phase
        self._take(phase, kept, merges=not counts_trained)
        return source

    def ended(self, phase: int) -> None:
        """A phase is over, or was left."""
        kept = self._by_phase.get(phase)
        if kept is not None and kept.source is not None:
            kept.source.leave_ahead()
            kept.left = marks_of(kept.source)

    def retire(self, epoch: int, phase: int | None = None) -> None:
        """Close sources that neither this epoch nor the one before has used. phase: epochs are not known,
        and those are meant that the newest phases have not used. A loader that is used again after all goes
        on from its position; one that is gone, and no phase will come back to, is forgotten."""
        for kept in list(self._all):
            idle = kept.epoch < epoch - 1 if phase is None else phase - kept.phase > _IDLE_PHASES
            if kept.source is not None and idle:
                kept.position, kept.retired = kept.source.position(), True
                kept.source.close()
                kept.source = None
                kept.loader = reference_to(kept.loader())
            gone = kept.retired and (not isinstance(kept.loader, weakref.ref) or kept.loader() is None)
            if gone and (phase is not None or kept not in self._by_phase.values()):
                self._forget(kept)

    def close(self) -> None:
        """End the workers of all sources."""
        for kept in self._all:
            if kept.source is not None:
                kept.source.close()
        self._all.clear()
        self._by_phase.clear()

    def _chosen(self, known: _Kept | None, phase: int, *, in_place: bool) -> _Kept:
        before = self._by_phase.get(phase)
        if in_place and before is not None:
            return before
        if known is not None:
            return known
        if before is None:
            return _Kept()
        if before.source is None and not before.retired and before.loader() is None:
            return before
        # Another loader than this phase had in the epoch before: it may draw from the same generators.
        return _Kept(seeding=before.seeding.copy(), left=before.left, renewed=True)

    def _of(self, loader: object) -> _Kept | None:
        return next((kept for kept in self._all if kept.loader() is loader), None)

    def _take(self, phase: int, kept: _Kept, *, merges: bool) -> None:
        for other in list(self._all) if merges else ():
            if other is not kept and other.loader() is kept.loader():
                # Older than what this loader was taken up from.
                for number in [n for n, used in self._by_phase.items() if used is other]:
                    self._by_phase[number] = kept
                self._forget(other)
        if kept not in self._all:
            self._all.append(kept)
        replaced = self._by_phase.get(phase)
        self._by_phase[phase] = kept
        is_used = replaced not in self._all or replaced in self._by_phase.values()
        if replaced is not None and not is_used and replaced.source is None and not replaced.retired:
            self._forget(replaced)

    def _forget(self, kept: _Kept) -> None:
        self._all.remove(kept)
        for number in [n for n, used in self._by_phase.items() if used is kept]:
            del self._by_phase[number]


def _begin(
    source: Source, kept: _Kept, epoch: int, *, in_place: bool, tell_epoch: bool, beside: bool
) -> None:
    position = None if kept.source is not None else kept.position
    if in_place and position is not None:
        return source.begin(epoch, position, tell_epoch=tell_epoch, beside=beside)
    now = marks_of(source)
    if position is None or kept.retired:
        kept.seeding.see(kept.left, now)
    if position is None or (kept.retired and position["kind"] != "dataloader"):
        return source.begin(epoch, tell_epoch=tell_epoch)
    # Of a source that was retired nothing was lost but the workers.
    done = kept.retired or kept.placed is not None
    leave = frozenset(now) if done else kept.seeding.left_alone(now)
    if not kept.renewed or kept.retired:
        return source.begin(epoch, position, carry=True, leave=leave, tell_epoch=tell_epoch)
    source.begin(epoch, tell_epoch=tell_epoch)
    own = position.get("now", {}).get("own", {})
    return source.generators.restore({path: state for path, state in own.items() if path not in leave})


def epoch_length(loader: Any, position: Mapping[str, Any]) -> int:
    """Batches that the epoch of a saved position has with this loader, those before the position included:
    not as many as other epochs have where ranks divide the rest anew. TypeError where it does not know."""
    length = len(loader)
    made_of = position.get("made_of", {})
    then, now = Share.read(made_of.get("share")), share_of(loader)
    if then is None or now is None or (then.ranks == now.ranks == 1 and not then.batches):
        return length
    if not (then.can_be_divided and now.can_be_divided):
        return length
    taken, before = position["batches_taken"], position["length"]
    return taken if before is not None and taken >= before else now.go_on(then, taken).all_batches


# Which kind of source serves a loader


def check_loader(loader: Any) -> None:
    """Refuse now what would be refused at the first batch, as far as it can be known. Draws nothing.

    Raises what `source_of` raises, and StateError for a loader whose own state cannot be saved exactly.
    """
    _source_of(loader).check()


def source_of(loader: Any) -> Source:
    """The source for a loader: exact for torch's DataLoader over a data set with a length, asked where the
    loader keeps a state, replayed otherwise.

    Raises BoundaryError for loaders whose position is not what they gave (they fetch ahead or out of order),
    OptionError for what is no iterable.
    """
    source = _source_of(loader)
    inside = loader.base_dataloader if is_prepared(loader) else loader
    if _is_torchdata(inside) and inside.num_workers:
        log.warning(
            "StatefulDataLoader does not keep its workers' random numbers in the middle of an epoch: "
            "after a resume, those drawn inside workers differ. torch's DataLoader is taken up exactly."
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
        return StatefulSource(loader, makes_ahead=True)
    own = ("__iter__", "_get_iterator")
    if any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in own):
        return None
    if not isinstance(loader.dataset, IterableDataset):
        return DataLoaderSource(loader)
    if not loader.num_workers and _keeps_state(loader.dataset):
        return StatefulSource(DatasetState(loader))
    return ReplayedSource(loader)


def _of_fabric(loader: Any) -> Source:
    """The source of the loader that Fabric has wrapped. The wrapper counts its own `iter()` calls for
    `DistributedSampler.set_epoch`, and a new process counts from 0: here the run's epoch is set instead."""
    source, device = _source_of(loader._dataloader), loader._device
    if device is not None:
        move = vars(sys.modules[type(loader).__module__])["move_data_to_device"]
        source.convert = partial(move, device=device)
    return source


def _keeps_state(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_fabric(loader: Any) -> bool:
    # Of lightning 2.0 to 2.6; one that holds its parts under other names is no such loader.
    known = type(loader).__name__ == "_FabricDataLoader" and {"_dataloader", "_device"} <= vars(loader).keys()
    return known and type(loader).__module__ in ("lightning_fabric.wrappers", "lightning.fabric.wrappers")


def _is_torchdata(loader: Any) -> bool:
    return any(
        kind.__name__ == "StatefulDataLoader" and kind.__module__.startswith("torchdata.")
        for kind in type(loader).__mro__
    )
