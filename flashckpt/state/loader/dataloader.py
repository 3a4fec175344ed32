"""The exact resume of torch's DataLoader over a data set with a length: it loads again only the batches of
the open round of workers, and restores all generators, including those inside the workers.

A position is the number of batches taken (k); the generator states when the sampler's last `iter()` was
called and when its first index was drawn; with workers, the state of the generator before it drew their base
seed, and the states inside the workers after the last whole round.

Works on a private shallow copy of the loader, never on the user's. Relies on torch's DataLoader (as of 2.13):
- The creation of an iterator calls `iter()` on the index sampler, draws the workers' base seed from
  `loader.generator` (or the global generator), starts the workers, calls `iter()` on the index sampler once
  more, and draws `prefetch_factor * num_workers` indices; then one index for each batch.
- Worker `i % num_workers` loads batch i, in order; collate_fn runs last.
- Persistent workers are reset for an epoch: one `iter()`, no base seed, and their generators continue.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, get_worker_info

from flashckpt.format.typed import Encoded
from flashckpt.state import rng
from flashckpt.state.loader.order import RemainingSampler
from flashckpt.state.loader.position import Position
from flashckpt.state.loader.samplers import samplers_of
from flashckpt.state.loader.source import Source, too_few, warn_of_late

log = logging.getLogger(__name__)

States = dict[str, Any]
Replay = tuple[States, States] | None


class Parts(NamedTuple):
    states: list[Any]
    seeder: bytes | None
    skipped: int


class DataLoaderSource(Source):
    """A map-style DataLoader."""

    kind, divides = "torch DataLoader", True
    parts = Parts

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, rng.Generators(_roots(loader)))
        self._workers = int(loader.num_workers)
        self._persistent = bool(loader.persistent_workers)
        self._set_states([None] * self._workers)
        self._private: Any = None
        self._indices: Indices
        # The generator's state before it drew the base seed of the workers that run.
        self._seeder: bytes | None = None
        self._skipped = 0  # batches of this epoch that `skip` has left out

    def close(self) -> None:
        for iterator in (self._iterator, getattr(self._private, "_iterator", None)):
            end_workers = getattr(iterator, "_shutdown_workers", None)
            if end_workers is not None:
                end_workers()
        self._iterator = self._private = self._seeder = None
        self._set_states([None] * self._workers)

    def _enter(self, epoch: int) -> None:
        super()._enter(epoch)
        self._skipped = 0
        self._set_states(self._newest)

    def _set_states(self, states: list[States | None]) -> None:
        """Set the generator states of the workers after the newest batch of each, and after the last whole
        round. None for a worker that has loaded nothing since it was seeded."""
        self._newest, self._whole = list(states), list(states)

    def skip(self, batches: int) -> None:
        """As `Source.skip`, but no item is loaded, and the first worker loads the first batch that is
        returned."""
        if self._length is not None and self._length < batches:
            raise too_few(self._name, self._length, batches)
        self._skipped = batches
        self._continue_at(batches, None)
        if self._indices.num_dropped < batches:
            raise too_few(self._name, self._indices.num_dropped, batches)

    def _open(self, skip: int = 0, replay: Replay = None) -> Iterator[Any]:
        """As `Source._open`. The options are those of `Indices`."""
        try:
            if self._private is None:
                self._private = self._copied(skip, replay)
            iterator: Iterator[Any] = iter(self._private)
        except BaseException:
            self.close()  # the workers' seed may be drawn
            raise
        if not self._persistent:
            self._private = None
        return iterator

    def _copied(self, skip: int, replay: Replay) -> Any:
        """Return a private copy of the loader."""
        private = copy.copy(self._loader)
        # Set by vars(), because DataLoader.__setattr__ refuses some of these names.
        own = vars(private)
        name = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
        # Workers that continue those of an earlier epoch are started by an `iter()` of that epoch.
        self._indices = Indices(self, skip, replay, drops_iter=self._seeder is not None)
        own[name], own["_iterator"] = self._indices, None
        if self._workers:
            reporting = Reporting(self._loader, self._whole, warns=not self._can_be_saved)
            own["collate_fn"], own["worker_init_fn"] = reporting, reporting.begin
            if self._seeder is not None:
                own["generator"] = torch.Generator()
                rng.restore_one(own["generator"], self._seeder)
        return private

    def note_seeder(self) -> None:
        """Note the generator from which the workers' base seed is about to be drawn."""
        if self._workers and self._seeder is None:
            seeder = self._loader.generator
            self._seeder = rng.capture_one(torch.default_generator if seeder is None else seeder)

    def note_order(self, at_iter: States, at_draw: States) -> None:
        """Note the generator states of the epoch's order, before its first index is drawn."""
        self._at_iter, self._at_draw = Encoded(at_iter), Encoded(at_draw)

    def _unpack(self, item: Any) -> Any:
        if not self._workers:
            return item
        # torch assigns indices to workers in turns.
        worker = (self.batches_taken - self._first) % self._workers
        self._newest[worker] = item.state
        if worker == self._workers - 1:
            self._whole = list(self._newest)
        return item.batch

    @property
    def _first(self) -> int:
        """The batch of the epoch with which the rounds of workers begin."""
        return self._skipped + (0 if self._share is None else self._share.batches)

    def sampler(self) -> Any:
        """Return the sampler of the epoch: the user's, or that of the rest if it was divided again."""
        share, batches = self._share, self._loader.batch_sampler
        if share is None or not share.batches:
            return self._loader.sampler if batches is None else batches
        if batches is None:
            return RemainingSampler(share)
        assert share.batch_size is not None
        return BatchSampler(RemainingSampler(share), share.batch_size, share.whole)

    def _reopen(self, position: Position) -> None:
        self._load_workers(position, persist=True)
        self._skipped = position.parts["skipped"]
        self._continue_at(position.batches_taken, (position.at_iter, position.at_draw))
        if self._indices.drawn_once is not None:
            self._report_drift(self._indices.drawn_once, position.now)

    def _continue_at(self, batches: int, replay: Replay) -> None:
        """Begin the epoch's iterator with the open round of workers, and load that round's batches again up
        to `batches`."""
        open_round = (batches - self._first) % self._workers if self._workers else 0
        self._iterator = self._open(batches - self._first + self._skipped - open_round, replay)
        if not self._workers:
            self._indices.prime()
        try:
            for self.batches_taken in range(batches - open_round, batches):
                self._unpack(next(self._iterator))
        except StopIteration:
            self._over = True
        self.batches_taken = batches

    def _report_drift(self, drawn_once: States, now: States) -> None:
        """Warn if the sampler draws with each index from a generator that other code has used since."""
        found = (self.generators.capture_all(), drawn_once, now)
        drawn, settled, then = ({**each["global"], **each["own"]} for each in found)
        moved = [name for name in drawn if drawn[name] not in (settled.get(name), then.get(name))]
        if moved:
            log.warning(
                "Not exact: the sampler draws random numbers for each batch from generators that other code "
                "uses too (%s). Its draws were replayed, and the next batches differ from those of an "
                "uninterrupted run. Give the sampler a generator of its own for an exact resume.",
                ", ".join(moved),
            )

    def _leave(self, *, ended: bool = False) -> None:
        if self._iterator is not None and not (ended and self._persistent):
            self.close()
        self._iterator = None

    def _parts(self) -> tuple[bool, dict[str, Any]]:
        between = self._over or self._at_iter is None
        states = list(self._newest if between else self._whole)
        return self._over, {"states": states, "seeder": self._seeder, "skipped": self._skipped}

    def _load(self, position: Position, *, is_own: bool) -> None:
        # The next epoch starts new workers if they do not persist, or if this epoch was left.
        if is_own:
            self._load_workers(position, persist=self._persistent and not position.is_open)

    def _load_workers(self, position: Position, *, persist: bool) -> None:
        parts = position.parts
        if len(parts["states"]) != self._workers:
            log.warning(
                "Not exact: the loader has %d workers and had %d when the checkpoint was taken. The order of "
                "batches is the same; random numbers drawn inside the workers differ.",
                self._workers, len(parts["states"]),
            )  # fmt: skip
        elif persist:
            self._set_states(parts["states"])
            self._seeder = parts["seeder"]


def _roots(loader: Any) -> dict[str, object]:
    """Return the objects in which to search generators. The data set is in this process only without
    workers."""
    roots: dict[str, object] = {"generator": loader.generator, **samplers_of(loader)}
    if not loader.num_workers:
        roots.update(dataset=loader.dataset, collate=loader.collate_fn)
    return roots


# The index sampler


class Indices:
    """The sampler of the private DataLoader.

    `DataLoader` calls `iter()` on its sampler once without workers and twice with workers, and some samplers
    draw random numbers in that call. So each call is forwarded at once, and only the last one counts.

    skip: the batches that are drawn and dropped before the first one.
    replay: the generator states at the sampler's last `iter()` and at its first draw, of the epoch that is
        continued: no call is forwarded before the first index is needed.
    drops_iter: do not forward the first `iter()`, which is made only because workers are started again.

    num_dropped: the batches that were dropped. drawn_once: the generator states after the first of them.
    """

    def __init__(self, source: DataLoaderSource, skip: int, replay: Replay, *, drops_iter: bool) -> None:
        self._source, self._generators = source, source.generators
        self._skip, self._replay, self._drops_iter = skip, replay, drops_iter
        self._inner: Iterator[Any] = iter(())
        self._at_iter: States = {}
        self._is_primed = False
        self.num_dropped = 0
        self.drawn_once: States | None = None

    def __len__(self) -> int:
        return len(self._source.sampler())

    def __iter__(self) -> Iterator[Any]:
        if self._drops_iter:
            self._drops_iter = False
            return iter(())
        if self._replay is None:
            self._at_iter = self._generators.capture_all()
            self._inner = iter(self._source.sampler())
        self._source.note_seeder()
        self._is_primed = False
        return self._draws()

    def _draws(self) -> Iterator[Any]:
        self.prime()
        yield from self._inner

    def prime(self) -> None:
        """Drop the skipped batches, after a replay. Without workers nothing else draws an index before the
        generator states of the boundary are restored."""
        if self._is_primed:
            return
        self._is_primed = True
        if self._replay is None:
            at_iter, at_draw = self._at_iter, self._generators.capture_all()
        else:
            (at_iter, at_draw), self._replay = self._replay, None
            self._generators.restore_all(at_iter)
            self._inner = iter(self._source.sampler())
            self._generators.restore_all(at_draw)
        self._source.note_order(at_iter, at_draw)
        for _ in range(self._skip):
            if next(self._inner, _END) is _END:
                break
            self.num_dropped += 1
            if self.drawn_once is None:
                self.drawn_once = self._generators.capture_all()
        self._skip = 0


_END = object()


# Reports of the workers' generators


class Reported(NamedTuple):
    """A batch, and the states of the worker's generators after it. A named tuple, because torch's pin_memory
    processes it element by element and keeps bytes."""

    batch: Any
    state: States


class Reporting:
    """The user's collate function, followed by a report of the generators. One copy in each worker.

    states: those with which the workers begin, of each worker, as they were reported.
    warns: of generators that are made with the first batch, and of a search that was cut.
    """

    def __init__(self, loader: Any, states: list[States | None], *, warns: bool) -> None:
        self._collate, self._init = loader.collate_fn, loader.worker_init_fn
        self._states, self._warns = states, warns
        self._own = rng.Generators({})

    def begin(self, worker: int) -> None:
        """Run the user's worker_init_fn. Then find the generators of this worker's own copies of data set and
        collate function, and restore the worker's state."""
        if self._init is not None:
            self._init(worker)
        self._warns = self._warns and worker == 0  # one worker speaks for all
        roots = {"dataset": getattr(get_worker_info(), "dataset", None), "collate": self._collate}
        self._own = rng.Generators(roots, reports=self._warns)
        state = self._states[worker]
        if state is not None:
            self._own.restore_all(state)

    def __call__(self, samples: Any) -> Reported:
        batch = self._collate(samples)
        if self._warns:
            self._warns = False
            warn_of_late(self._own)
        return Reported(batch, self._own.capture_all())
