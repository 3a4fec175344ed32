"""The exact resume of torch's DataLoader over a data set with a length: it loads again only the batches of
the open round of workers, and restores all generators, including those inside the workers.

Works on a private shallow copy of the loader, never on the user's. Relies on torch's DataLoader (as of 2.13):
- The creation of an iterator calls `iter()` on the index sampler, draws the workers' base seed from
  `loader.generator` (or the global generator), starts the workers, calls `iter()` on the index sampler once
  more, and draws `prefetch_factor * num_workers` indices; then one index for each batch.
- Worker `i % num_workers` loads batch i, in order; collate_fn runs last.
- Persistent workers are reset for an epoch: one `iter()`, no base seed, and their generators continue.

Also the loaders that Accelerate (versions 1.14 and 1.15) prepares. They draw the next batch of the inner
loader before they return a batch, to recognise the last one. The position is that of the inner loader, and a
resume draws again what was drawn ahead. Never imports Accelerate before a prepared loader is used.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, get_worker_info

from flashckpt.errors import BoundaryError, MismatchError
from flashckpt.format.typed import Encoded
from flashckpt.state import rng
from flashckpt.state.loader.base import Source, iterator_of, keeps_workers, samplers_of
from flashckpt.state.loader.position import LayoutChange, Position, RemainingSampler, is_at_end
from flashckpt.state.values import StoredTensor

log = logging.getLogger(__name__)


class DataLoaderSource(Source):
    """A map-style DataLoader. The kind of its positions is "dataloader"."""

    kind, divides = "dataloader", True
    parts = frozenset({"workers", "states", "seeder", "seeded_before", "skipped"})

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, rng.Generators(_roots(loader)))
        self._workers = int(loader.num_workers)
        self._num_prefetched = self._workers * int(loader.prefetch_factor or 0)
        self._persistent = bool(loader.persistent_workers) and self._workers > 0
        self._rounds = Rounds(self._workers)
        self._unpacks = self._workers > 0
        self._private: Any = None
        self._indices = Indices(())
        # The generator's state before it drew the base seed of persistent workers, and whether that was in
        # an earlier epoch.
        self._seeder: bytes | None = None
        self._seeded_before = False
        self._skipped = 0  # batches before the first one of the epoch's iterator (`skip`)
        self._after_prefetch: dict[str, Any] | None = None

    def close(self) -> None:
        for iterator in (self._iterator, getattr(self._private, "_iterator", None)):
            shutdown = getattr(iterator, "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()
        self._iterator = self._private = self._seeder = None
        self._rounds.reset()

    def _enter(self, epoch: int) -> None:
        super()._enter(epoch)
        self._skipped = 0
        if not self._persistent:
            self._rounds.reset()
        self._rounds.begin_epoch()

    def skip(self, batches: int) -> None:
        """Skip the first batches by drawing only their indices: no item is loaded, and the first worker loads
        the first batch that is returned."""
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

    def _check_generators(self) -> None:
        if not self._workers:
            warn_of_late(self.generators)

    def _in_iterator(self, batches: int) -> int:
        """Return the number counted from the first batch of the epoch's iterator, which starts after the
        batches before the current division and after skipped ones."""
        return batches - self._skipped - (self._share.batches if self._share is not None else 0)

    def _sampler(self) -> Any:
        """Return the sampler of the epoch: the user's, or that of the rest if it was divided again."""
        share, batches = self._share, self._loader.batch_sampler
        if share is None or not share.batches:
            return self._loader.sampler if batches is None else batches
        if batches is None:
            return RemainingSampler(share)
        assert share.batch_size is not None
        return BatchSampler(RemainingSampler(share), share.batch_size, share.whole)

    def _prepare(self, *, skip: int) -> None:
        """Create the private copy, whose iterator starts after `skip` batches of the epoch."""
        private = copy.copy(self._loader)
        # Set by vars(), because DataLoader.__setattr__ refuses some of these names.
        own = vars(private)
        name = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
        self._indices = Indices(self._sampler(), skip=skip, skips_first_iter=self._seeder is not None)
        own[name], own["_iterator"] = self._indices, None
        if self._workers:
            is_first = not self._can_be_saved
            own["collate_fn"] = reporting = Reporting(self._loader.collate_fn, warns=is_first)
            init, states = self._loader.worker_init_fn, self._rounds.whole
            own["worker_init_fn"] = partial(init_worker, init, reporting, states)
        if self._persistent and self._seeder is None:
            self._indices.after_first_iter = self._note_seeder
        elif self._persistent:
            # The workers were seeded in an earlier epoch: draw the same base seed from a separate generator.
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
        self._after_prefetch = None
        self._indices.after_draw = self._note_prefetched
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

    def _note_prefetched(self, drawn: int) -> None:
        # An uninterrupted run draws this many indices at once, before the loop draws anything.
        if drawn == max(1, self._num_prefetched):
            self._after_prefetch = self.generators.capture_all()

    def _report_drift(self, now: dict[str, Any]) -> None:
        if self._after_prefetch is None:
            return
        found = (self.generators.capture_all(), self._after_prefetch, now)
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
        if not self._persistent or self._broken:
            self.close()
        elif self._iterator is not None and not ended:
            self._drain(self._iterator)
        self._iterator = None

    def _drain(self, iterator: Iterator[Any]) -> None:
        """Receive the batches prefetched in an epoch that is left early. torch lets the workers load them and
        drops them at the next reset; received here, they report the states of the workers' generators."""
        self._indices.closed = True
        for _ in range(self._num_prefetched):
            try:
                self._unpack(next(iterator))
            except StopIteration:
                break
            except Exception as error:
                log.debug("A prefetched batch of an epoch that was left failed: %r", error)
            self.batches_taken += 1
        self._indices.closed = False

    def _keeps_workers(self) -> bool:
        return self._persistent

    def _parts(self) -> tuple[bool, dict[str, Any]]:
        # Without workers, only a draw from the sampler would show the end.
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
                "Not exact: the loader has %d workers and had %d when the checkpoint was taken. The order of "
                "batches is the same; random numbers drawn inside the workers differ.",
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
    draw random numbers in that call. So each call is forwarded at once, but the first `skip` batches are
    drawn and dropped only at the first `next()`, after the workers' base seed was drawn.

    sampler: the user's sampler, or its replacement.
    skip: the batches still to be dropped.
    closed: return no more indices.
    skips_first_iter: do not forward the first `iter()`, which an uninterrupted run would not make.
    """

    def __init__(self, sampler: Iterable[Any], *, skip: int = 0, skips_first_iter: bool = False) -> None:
        self.sampler = sampler
        self.skip = skip
        self.closed = False
        self.drawn = 0
        self.after_first_iter: Callable[[], None] | None = None
        self.after_draw: Callable[[int], None] | None = None
        self._skips_first_iter = skips_first_iter
        self._calls = 0
        self._inner: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._calls += 1
        if self._skips_first_iter and self._calls == 1:
            return iter(())
        self._inner, self.drawn = iter(self.sampler), 0
        if self._calls == 1 and self.after_first_iter is not None:
            self.after_first_iter()
        return self._draws(self._inner)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def prime(self) -> None:
        """Draw and drop the skipped batches now: without workers, nothing else draws ahead."""
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


# Reports of the workers' generators


class Reported(NamedTuple):
    """A batch, and the states after it of the worker's generators that changed since its last batch. A named
    tuple, because torch's pin_memory processes it element by element and keeps bytes."""

    batch: Any
    moved: rng.State


_OWN = "own "  # before the path of a generator that a worker's data set or collate function holds


class Reporting:
    """The user's collate function, followed by a report of the generators. One copy in each worker.

    warns: of generators that are made with the first batch, and of a search that was cut.
    """

    def __init__(self, collate: Callable[[Any], Any], *, warns: bool = False) -> None:
        self._collate, self._warns = collate, warns
        self._last: rng.State = {}
        self._own = rng.Generators({})

    def begin(self, state: rng.State | None) -> None:
        """Find the generators of this worker's own copies of data set and collate function. Restore a state
        that was reported."""
        worker = get_worker_info()
        self._warns = self._warns and getattr(worker, "id", 0) == 0  # one worker speaks for all
        roots = {"dataset": getattr(worker, "dataset", None), "collate": self._collate}
        self._own = rng.Generators(roots, reports=self._warns)
        if state is not None:
            rng.restore(state)
            own = {n.removeprefix(_OWN): each for n, each in state.items() if n.startswith(_OWN)}
            self._own.restore(own)

    def __call__(self, samples: Any) -> Reported:
        batch = self._collate(samples)
        if self._warns:
            self._warns = False
            warn_of_late(self._own)
        own = {_OWN + path: state for path, state in self._own.capture().items()}
        state, last = {**rng.capture_cpu(), **own}, self._last
        self._last = state
        return Reported(batch, {name: value for name, value in state.items() if last.get(name) != value})


def warn_of_late(generators: rng.Generators) -> None:
    # Those of samplers are made again: a resume begins the epoch's order anew.
    late = [path for path in generators.made_since() if path.startswith(("dataset", "collate"))]
    if late:
        log.warning(
            "Not exact: the random generators %s of the loader were made with its first batch, so a resume "
            "in mid-epoch cannot restore them. Make them before the loop begins.", ", ".join(late),
        )  # fmt: skip


def init_worker(
    init: Callable[[int], None] | None,
    reporting: Reporting,
    states: list[rng.State | None],
    worker: int,
) -> None:
    """Run the user's worker_init_fn, then restore the generators of this worker."""
    if init is not None:
        init(worker)
    reporting.begin(states[worker])


class Rounds:
    """The generator states of the workers after the last complete round (`whole`) and after the newest batch
    of each (`newest`). None for a worker that has loaded nothing since it was seeded."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.newest: list[rng.State | None] = [None] * workers
        self.whole: list[rng.State | None] = [None] * workers

    def set(self, states: list[rng.State | None]) -> None:
        self.newest, self.whole = list(states), list(states)

    def reset(self) -> None:
        """Forget the states, because the workers are new."""
        self.set([None] * self._workers)

    def begin_epoch(self) -> None:
        self.whole = list(self.newest)

    def take(self, index: int, reported: Reported) -> Any:
        """Return the batch of a report. `index`: its number in the epoch; worker `index % workers` loaded it,
        since torch assigns indices in turns."""
        worker = index % self._workers
        self.newest[worker] = {**(self.newest[worker] or {}), **reported.moved}
        if worker == self._workers - 1:
            self.whole = list(self.newest)
        return reported.batch


# The loaders that Accelerate prepares


# Attributes of DataLoaderShard and DataLoaderDispatcher that this module reads or replaces.
_ATTRIBUTES = ("base_dataloader", "iteration", "end_of_dataloader", "skip_batches", "_drop_last")


def is_prepared(loader: Any) -> bool:
    """Whether Accelerate has prepared this loader."""
    # type(), not __class__: its loaders report the class of the DataLoader that they wrap.
    return any(kind.__module__ == "accelerate.data_loader" for kind in type(loader).__mro__)


def prepared_source(loader: Any, source_of: Callable[[Any], Source]) -> PreparedSource:
    """Return the source of a prepared loader. `source_of` returns the source of the inner loader.

    Raises BoundaryError for Accelerate's other loaders, whose draws cannot be counted."""
    names = {kind.__name__ for kind in type(loader).__mro__}
    read = (*_ATTRIBUTES, "slice_fn") if "DataLoaderDispatcher" in names else _ATTRIBUTES
    missing = [name for name in read if not hasattr(loader, name)]
    name = type(loader).__name__
    if not names & {"DataLoaderShard", "DataLoaderDispatcher"} or "base_dataloader" not in vars(loader):
        raise BoundaryError(
            f"{name} of Accelerate draws batches in an unknown way, so its position could not be saved. "
            "Nothing was started. Pass the loader that accelerator.prepare() returns for a DataLoader, or "
            "keep the DataLoader out of prepare()."
        )
    if missing:
        raise BoundaryError(
            f"{name} of this release of Accelerate has no {', '.join(missing)}, so its position could not be "
            "saved. Nothing was started. Install accelerate 1.14 or 1.15."
        )
    skipped = loader.skip_batches or _skipped_by_sampler(loader)
    if skipped:
        raise BoundaryError(
            f"This loader skips its first {skipped} batches (skip_first_batches). A resume goes to the saved "
            "batch by itself, so these batches would be skipped twice. Nothing was started. Pass the "
            "prepared loader."
        )
    if "DataLoaderDispatcher" not in names:
        return PreparedSource(loader, source_of(loader.base_dataloader), per_batch=1)
    processes = loader.state.num_processes
    per_batch = 1 if loader.split_batches or loader.submesh_tp else processes
    is_first = loader.state.process_index == 0
    inside = source_of(loader.base_dataloader) if is_first else ReceivedSource(loader)
    fills_up = processes > 1 and not loader._drop_last
    return PreparedSource(loader, inside, per_batch=per_batch, dispatches=True, fills_up=fills_up)


def _skipped_by_sampler(loader: Any) -> int:
    """Return the batches that `skip_first_batches` drops by a batch sampler, in a loader with samplers."""
    for sampler in (loader.sampler, loader.batch_sampler):
        if type(sampler).__name__ == "SkipBatchSampler":
            return int(sampler.skip_batches)
    return 0


class PreparedSource(Source):
    """The source of a prepared loader, which draws its batches from the source `inside`.

    batches_taken: the batches of the prepared loader.
    per_batch: the inner batches for each batch of the prepared loader.
    dispatches: one rank draws for all.
    fills_up: rows of the epoch's first batch complete a last batch that the ranks cannot divide.
    """

    def __init__(
        self, loader: Any, inside: Source, *, per_batch: int, dispatches: bool = False, fills_up: bool = False
    ) -> None:
        super().__init__(loader, inside.generators)
        self._inside, self._per_batch = inside, per_batch
        self._dispatches, self._fills_up = dispatches, fills_up
        self._first_rows: Encoded | None = None  # on rank 0: the rows of the epoch's first batch

    def __len__(self) -> int:
        return len(self._inside) if self._per_batch == 1 else len(self._loader)

    def has_lost_workers(self) -> bool:
        return self._inside.has_lost_workers()

    def check(self) -> None:
        self._inside.check()

    def begin(
        self,
        epoch: int,
        resume: Mapping[str, Any] | None = None,
        *,
        carry: bool = False,
        leave: frozenset[str] = frozenset(),
        sets_epoch: bool = True,
        in_lockstep: bool = False,
    ) -> None:
        """As `Source.begin`, but the samplers' epoch is the loader's own count of passes."""
        inside, loader = self._inside, self._loader
        self._iterator, self.batches_taken, self.was_over, self._first_rows = None, 0, False, None
        inside.count_trained()
        if resume is None:
            return inside.begin(epoch, sets_epoch=False)
        if isinstance(inside, ReceivedSource):
            resume = inside.converted(resume)
        saved = Position.read(resume, inside.kind, inside.parts)
        if saved.epoch == epoch and not carry and not is_at_end(saved):
            self._check_ranks(saved)
        set_by_program = loader.iteration
        iteration = _count(saved.made_of.get("iteration"), saved.epoch)
        drawn = _count(saved.made_of.get("drawn"), saved.batches_taken)
        # Before `begin`, which computes the samplers' order.
        loader.set_epoch(iteration)
        resume = {**resume, "batches_taken": drawn}
        inside.begin(epoch, resume, carry=carry, leave=leave, sets_epoch=False, in_lockstep=in_lockstep)
        if carry or saved.epoch != epoch:
            # A program that sets the epoch itself sets it before its loop.
            loader.iteration = set_by_program or iteration
            return None
        self.was_over, self.batches_taken = inside.was_over, saved.batches_taken
        if "first_rows" in saved.made_of:
            self._first_rows = Encoded(saved.made_of["first_rows"])
        # The loader counts a pass at the draw after its last batch, and a resume does not repeat this draw.
        loader.iteration = iteration + self.was_over
        return None

    def _check_ranks(self, saved: Position) -> None:
        moved = LayoutChange.read(saved.made_of.get("moved"))
        if self._dispatches and moved is not None and moved.is_resized:
            raise MismatchError(
                f"The checkpoint was taken after {saved.batches_taken} batches of an epoch, drawn by one "
                f"rank for all {moved.ranks}, and now there are {moved.world} ranks. The model and all other "
                "state were restored; no batch was drawn. Train on the former number of ranks until the "
                "epoch has ended.",
                differences=(("ranks", str(moved.ranks), str(moved.world)),),
            )

    def next(self) -> Any:
        if self.was_over:
            raise StopIteration
        if self._iterator is None:
            self._iterator = iter(self._loader)
            batch = self._first(self._iterator)
        else:
            batch = next(self._iterator)
        self.batches_taken += 1
        self._inside.count_trained(self.batches_taken * self._per_batch)
        return batch

    def _first(self, iterator: Iterator[Any]) -> Any:
        """Return the first batch. For this call, replace `base_dataloader`, from which the loader creates its
        inner iterator, and `slice_fn`, whose first call returns the rows that complete its last batch."""
        own, inside = vars(self._loader), self._inside
        originals: dict[str, Any] = {n: own[n] for n in ("base_dataloader", "slice_fn") if n in own}
        own["base_dataloader"] = _InnerLoader(own["base_dataloader"], inside)

        def first_rows(*arguments: Any, **named: Any) -> Any:
            own["slice_fn"] = originals["slice_fn"]
            return self._keep_rows(originals["slice_fn"](*arguments, **named))

        if self._fills_up:
            own["slice_fn"] = first_rows
        try:
            return next(iterator)
        finally:
            own.update(originals)

    def _keep_rows(self, rows: Any) -> Any:
        """Keep and return the rows of the epoch's first batch. After a resume, `rows` are those of a later
        batch: return the saved ones of rank 0 instead."""
        from accelerate.utils import broadcast_object_list, recursively_apply

        tensors: list[torch.Tensor] = []
        recursively_apply(tensors.append, rows)
        if self.batches_taken:
            saved: list[Any] = [None if self._first_rows is None else self._first_rows.value]
            broadcast_object_list(saved)
            if saved[0] is not None:
                kept = iter(saved[0])
                return recursively_apply(lambda tensor: next(kept).tensor().to(tensor.device), rows)
        elif self._loader.state.process_index == 0:
            self._first_rows = Encoded([StoredTensor.of(each.clone(), "loader") for each in tensors])
        return rows

    def leave_ahead(self) -> None:
        self._inside.leave_ahead()

    def position(self) -> dict[str, Any]:
        inside = self._inside.position()
        own = {"iteration": self._loader.iteration, "drawn": inside["batches_taken"]}
        if self._first_rows is not None:
            own["first_rows"] = self._first_rows
        return {**inside, "batches_taken": self.batches_taken, "made_of": {**inside["made_of"], **own}}

    def close(self) -> None:
        self._iterator = None
        self._inside.close()


def _count(saved: Any, otherwise: int | None) -> int:
    """Return a count that only positions of prepared loaders have, or the default."""
    return saved if type(saved) is int else otherwise or 0


class _InnerLoader:
    """The replacement of `base_dataloader` while the prepared loader creates its iterator: iterates over the
    source and has the attributes of the loader."""

    def __init__(self, loader: Any, source: Source) -> None:
        self._loader, self._source = loader, source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._source, ReceivedSource):
            return self._source.unused_iterator(self._loader)
        return _Batches(self._source)


class _Batches(Iterator[Any]):
    def __init__(self, source: Source) -> None:
        self._source = source

    def __next__(self) -> Any:
        return self._source.next()


class ReceivedSource(Source):
    """The source of a rank that receives its batches from DataLoaderDispatcher on the first rank: it draws no
    batches and only saves generators."""

    kind = "received"
    parts = frozenset({"keeps_workers"})

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, rng.Generators({"loader": loader.base_dataloader}))
        self._has_workers = False

    def converted(self, resume: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a position from another number of ranks to this kind: it may be that of the drawing rank,
        whose parts are dropped."""
        made_of = resume.get("made_of")
        if resume.get("kind") == self.kind or not isinstance(made_of, dict) or "moved" not in made_of:
            return resume
        return {**resume, "kind": self.kind, "length": None, "parts": {"keeps_workers": False}}

    def unused_iterator(self, loader: Any) -> Iterator[Any]:
        """Return the iterator that the dispatcher creates and never uses. Undo its draw of the workers' seed
        in a resumed epoch, which had drawn it already."""
        iterator = iterator_of(loader, self.generators, had_workers=self._has_workers)
        self._has_workers = keeps_workers(loader)
        due, self._restore_at_fetch = self._restore_at_fetch, None
        if due is not None:
            self.generators.restore_all(due)
        return iterator

    def count_trained(self, batches: int = 0) -> None:
        self.batches_taken = batches

    def _load(self, position: Position, *, carried: bool) -> None:
        self._has_workers = position.parts["keeps_workers"] is True

    def _parts(self) -> tuple[bool, dict[str, Any]]:
        over = self._over or (self.batches_taken > 0 and self._loader.end_of_dataloader)
        return over, {"keeps_workers": self._has_workers}
