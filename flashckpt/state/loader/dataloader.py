"""torch's DataLoader over a data set with a length, taken up exactly: no batch is loaded twice but those of
the open round of workers, and all random numbers, also those inside the workers, are as they were.

Works on a private shallow copy of the loader. What it relies on in torch's DataLoader (as of 2.13):
- Making an iterator calls `iter()` on the index sampler, draws the workers' base seed from
  `loader.generator` (or the global generator), starts the workers, calls `iter()` on the index sampler once
  more, and draws `prefetch_factor * num_workers` indices; then one index for each batch that is taken.
- Batch i is loaded by worker `i % num_workers`, in order, and is collated last.
- Persistent workers are asked to begin anew: one `iter()`, no base seed, their generators as they were left.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler

from flashckpt.state import rng
from flashckpt.state.loader.base import Source, samplers_of
from flashckpt.state.loader.position import Position
from flashckpt.state.loader.share import Rest

log = logging.getLogger(__name__)


class DataLoaderSource(Source):
    """A map-style DataLoader. `kind` of its positions is "dataloader"."""

    kind, divides = "dataloader", True
    parts = frozenset({"workers", "states", "seeder", "seeded_before", "skipped"})

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, rng.Generators(_roots(loader)))
        self._workers = int(loader.num_workers)
        self._ahead = self._workers * int(loader.prefetch_factor or 0)
        self._persistent = bool(loader.persistent_workers) and self._workers > 0
        self._rounds = Rounds(self._workers)
        self._unpacks = self._workers > 0
        self._private: Any = None
        self._indices = Indices(())
        # What persistent workers were seeded from (the generator's state before that draw), and whether
        # they were seeded in an earlier epoch than this one.
        self._seeder: bytes | None = None
        self._seeded_before = False
        self._skipped = 0  # batches before the first one of the epoch's iterator (`skip`)
        self._settled: dict[str, Any] | None = None

    def close(self) -> None:
        for iterator in (self._iterator, getattr(self._private, "_iterator", None)):
            shutdown = getattr(iterator, "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()
        self._iterator = self._private = self._seeder = None
        self._rounds.forget()

    def _enter(self, epoch: int) -> None:
        super()._enter(epoch)
        self._skipped = 0
        if not self._persistent:
            self._rounds.forget()
        self._rounds.begin_epoch()

    def skip(self, batches: int) -> None:
        """Draws their indices alone: no item draws random numbers, and the first worker loads the first batch
        that is given."""
        if self._length is not None and self._length < batches:
            raise self._too_few(self._length, batches)
        self._skipped = self.batches_taken = batches
        self._prepare(skip=batches)

    def _open(self) -> Iterator[Any]:
        self._seeded_before = self._seeder is not None
        if self._private is None:
            self._prepare(skip=0)
        self._indices.sampler = self._sampler()
        return self._made()

    def _made(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._private)
        if not self._persistent:
            self._private = None
        return iterator

    def _unpack(self, item: Any) -> Any:
        return self._rounds.take(self._in_iterator(self.batches_taken), item)

    def _in_iterator(self, batches: int) -> int:
        """The same number counted from the first batch of the epoch's iterator, which begins where ranks have
        divided the rest of an epoch anew, or where the run begins."""
        return batches - self._skipped - (self._share.batches if self._share is not None else 0)

    def _sampler(self) -> Any:
        """What gives the indices of the epoch: the user's, or of an epoch that was divided anew the rest."""
        share, batches = self._share, self._loader.batch_sampler
        if share is None or not share.batches:
            return self._loader.sampler if batches is None else batches
        if batches is None:
            return Rest(share)
        assert share.batch_size is not None
        return BatchSampler(Rest(share), share.batch_size, share.whole)

    def _prepare(self, *, skip: int) -> None:
        """Make the private copy whose iterator begins after `skip` batches of the epoch."""
        private = copy.copy(self._loader)
        # DataLoader guards some of these names; its own methods read them from here.
        own = vars(private)
        name = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
        self._indices = Indices(self._sampler(), skip=skip, hollow_first=self._seeder is not None)
        own[name], own["_iterator"] = self._indices, None
        if self._workers:
            own["collate_fn"] = Reporting(self._loader.collate_fn)
            if any(state is not None for state in self._rounds.whole):
                own["worker_init_fn"] = partial(restored, self._loader.worker_init_fn, self._rounds.whole)
        if self._persistent and self._seeder is None:
            self._indices.after_first_iter = self._note_seeder
        elif self._persistent:
            # These workers were seeded epochs ago: the same base seed again, none of today's numbers used.
            own["generator"] = torch.Generator()
            rng.restore_one(own["generator"], self._seeder)
        self._private = private

    def _note_seeder(self) -> None:
        seeder = self._loader.generator
        self._seeder = rng.capture_one(torch.default_generator if seeder is None else seeder)

    def _reopen(self, position: Position) -> None:
        assert position.start is not None
        total = position.batches_taken
        in_iterator = self._in_iterator(total)
        open_round = in_iterator % self._workers if self._has_states(position) else 0
        self.generators.restore_all(position.start)
        self._prepare(skip=self._skipped + in_iterator - open_round)
        self._settled = None
        self._indices.after_draw = self._note_settled
        self._iterator = self._made()
        if not self._workers:
            self._before_first(position)
            self._indices.prime()
        try:
            for self.batches_taken in range(total - open_round, total):
                self._unpack(next(self._iterator))
        except StopIteration:
            self._over = True
        self.batches_taken = total
        self._indices.after_draw = None
        self._report_drift(position.now)

    def _note_settled(self, drawn: int) -> None:
        # Up to here an uninterrupted run draws its indices in one go, before the loop draws anything.
        if drawn == max(1, self._ahead):
            self._settled = self.generators.capture_all()

    def _report_drift(self, now: dict[str, Any]) -> None:
        if self._settled is None:
            return
        found = (self.generators.capture_all(), self._settled, now)
        drawn, settled, then = ({**marks["global"], **marks["own"]} for marks in found)
        moved = [name for name in drawn if drawn[name] not in (settled.get(name), then.get(name))]
        if moved:
            log.warning(
                "Not exact: the sampler draws random numbers for each batch from generators that others use "
                "too (%s), so its draws were replayed, and the batches to come are not those of a run that "
                "was never stopped. Give the sampler a generator of its own to make it exact.",
                ", ".join(moved),
            )

    def _leave(self, *, ended: bool = False) -> None:
        if not self._persistent or self._broken:
            self.close()
        elif self._iterator is not None and not ended:
            self._drain(self._iterator)
        self._iterator = None

    def _drain(self, iterator: Iterator[Any]) -> None:
        """Receive what was fetched ahead in an epoch that is left early. torch lets the workers load it and
        drops it when they begin anew; taken here, it says where their generators stand after it."""
        self._indices.closed = True
        for _ in range(self._ahead):
            try:
                self._unpack(next(iterator))
            except StopIteration:
                break
            except Exception as error:
                log.debug("A batch fetched ahead of an epoch that was left failed: %r", error)
            self.batches_taken += 1
        self._indices.closed = False

    def _keeps_workers(self) -> bool:
        return self._persistent

    def _parts(self) -> tuple[bool, dict[str, Any]]:
        # Without workers, only the sampler could tell, and asking it is a draw.
        received = getattr(self._iterator, "_rcvd_idx", None)
        sent = getattr(self._iterator, "_send_idx", None)
        over = self._over or (received is not None and sent is not None and received >= sent)
        between = over or self._start is None
        states = self._rounds.newest if between else self._rounds.whole
        return over, {
            "workers": self._workers,
            "states": [] if between and not self._persistent else list(states),
            "seeder": self._seeder,
            "seeded_before": between or self._seeded_before,
            "skipped": self._skipped,
        }

    def _load(self, position: Position, *, carried: bool) -> None:
        parts = position.parts
        self._skipped = parts["skipped"]
        if parts["workers"] != self._workers:
            log.warning(
                "Not exact: the loader has %d workers and had %d when the checkpoint was taken. Batches come "
                "in the same order; random numbers drawn inside the workers differ.",
                self._workers,
                parts["workers"],
            )
        if self._has_states(position):
            if parts["states"]:
                self._rounds.set(parts["states"])
            self._seeded_before = self._persistent and parts["seeded_before"]
            self._seeder = parts["seeder"] if self._seeded_before else None

    def _has_states(self, position: Position) -> bool:
        return self._workers > 0 and position.parts["workers"] == self._workers


def _roots(loader: Any) -> dict[str, object]:
    """Where generators are looked for. A data set's own are in this process only without workers."""
    roots: dict[str, object] = {"generator": loader.generator, **samplers_of(loader)}
    if not loader.num_workers:
        roots.update(dataset=loader.dataset, collate=loader.collate_fn)
    return roots


# The index sampler


class Indices:
    """What `DataLoader` takes its indices from.

    `DataLoader` calls `iter()` on its sampler once without workers and twice with them, and some samplers
    draw random numbers in that call: so each call is passed on at once, but the `skip` first batches are
    drawn and dropped only at the first `next()`, after the workers' base seed was drawn.

    sampler: the user's, or one in its place. skip: batches still to be dropped. closed: give out no more.
    hollow_first: the first `iter()` is one that an uninterrupted run would not make; it does not reach the
    user's sampler.
    """

    def __init__(self, sampler: Iterable[Any], *, skip: int = 0, hollow_first: bool = False) -> None:
        self.sampler = sampler
        self.skip = skip
        self.closed = False
        self.drawn = 0
        self.after_first_iter: Callable[[], None] | None = None
        self.after_draw: Callable[[int], None] | None = None
        self._hollow_first = hollow_first
        self._calls = 0
        self._inner: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._calls += 1
        if self._hollow_first and self._calls == 1:
            return iter(())
        self._inner, self.drawn = iter(self.sampler), 0
        if self._calls == 1 and self.after_first_iter is not None:
            self.after_first_iter()
        return self._draws(self._inner)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def prime(self) -> None:
        """Draw now what is to be skipped (without workers nothing is drawn ahead)."""
        if self._inner is not None:
            self._drop(self._inner)

    def _draws(self, inner: Iterator[Any]) -> Iterator[Any]:
        while not self.closed:
            self._drop(inner)
            try:
                drawn = self._draw(inner)
            except StopIteration:
                return
            yield drawn

    def _drop(self, inner: Iterator[Any]) -> None:
        while self.skip:
            self.skip -= 1
            try:
                self._draw(inner)
            except StopIteration:
                self.skip = 0

    def _draw(self, inner: Iterator[Any]) -> Any:
        drawn = next(inner)
        self.drawn += 1
        if self.after_draw is not None:
            self.after_draw(self.drawn)
        return drawn


# What travels between a loader and its workers


class Reported(NamedTuple):
    """A batch, and those of its worker's generators that have moved since the last one, as they are after it.
    A named tuple, because torch's pin_memory goes through it element by element and leaves bytes alone."""

    batch: Any
    moved: rng.State


class Reporting:
    """The user's collate function, and after it a report of the generators. One copy in each worker."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._last: rng.State = {}

    def __call__(self, samples: Any) -> Reported:
        batch = self._collate(samples)
        state, last = rng.capture_cpu(), self._last
        self._last = state
        return Reported(batch, {name: value for name, value in state.items() if last.get(name) != value})


def restored(init: Callable[[int], None] | None, states: list[rng.State | None], worker: int) -> None:
    """The user's worker_init_fn, and after it the generators of this worker put back."""
    if init is not None:
        init(worker)
    state = states[worker]
    if state is not None:
        rng.restore(state)


class Rounds:
    """The states of the workers as of the last whole round (`whole`) and as of the newest batch of each. None
    stands for a worker that has loaded nothing since it was seeded."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.newest: list[rng.State | None] = [None] * workers
        self.whole: list[rng.State | None] = [None] * workers

    def set(self, states: list[rng.State | None]) -> None:
        self.newest, self.whole = list(states), list(states)

    def forget(self) -> None:
        """The workers are new."""
        self.set([None] * self._workers)

    def begin_epoch(self) -> None:
        self.whole = list(self.newest)

    def take(self, index: int, reported: Reported) -> Any:
        """The batch out of a report. `index` counts the epoch's batches; worker `index % workers` loaded it,
        since torch hands indices out in turns."""
        worker = index % self._workers
        self.newest[worker] = {**(self.newest[worker] or {}), **reported.moved}
        if worker == self._workers - 1:
            self.whole = list(self.newest)
        return reported.batch
