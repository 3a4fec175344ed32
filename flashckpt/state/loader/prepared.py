"""The loaders that Accelerate prepares, as of 1.14 and 1.15. They draw a batch of the loader inside before
they give the one before it, so that they know the last one.

Owns how many batches of the inside loader belong to those that were given: the rest was drawn ahead, and a
resume draws it again. The position is that of the inside loader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from flashckpt.errors import BoundaryError
from flashckpt.format.typed import Encoded
from flashckpt.state import rng
from flashckpt.state.loader.base import Source
from flashckpt.state.loader.position import Position
from flashckpt.state.values import StoredTensor

log = logging.getLogger(__name__)

# Set by DataLoaderShard and DataLoaderDispatcher, and read or replaced here.
_ATTRIBUTES = ("base_dataloader", "iteration", "end_of_dataloader", "skip_batches", "_drop_last")


def is_prepared(loader: Any) -> bool:
    """Whether Accelerate has made this loader."""
    # type(), not __class__: its loaders claim to be the DataLoader that they wrap.
    return any(kind.__module__ == "accelerate.data_loader" for kind in type(loader).__mro__)


def prepared_source(loader: Any, source_of: Callable[[Any], Source]) -> PreparedSource:
    """The source of a prepared loader; `source_of` gives that of the loader inside.

    Raises BoundaryError for Accelerate's other loaders, whose draws cannot be counted."""
    names = {kind.__name__ for kind in type(loader).__mro__}
    read = (*_ATTRIBUTES, "slice_fn") if "DataLoaderDispatcher" in names else _ATTRIBUTES
    missing = [name for name in read if not hasattr(loader, name)]
    name = type(loader).__name__
    if not names & {"DataLoaderShard", "DataLoaderDispatcher"} or "base_dataloader" not in vars(loader):
        raise BoundaryError(
            f"{name} of Accelerate takes batches in a way that is not known here, so its position could not "
            "be saved. Nothing was started. Pass the loader that accelerator.prepare() gives for a "
            "DataLoader, or keep the DataLoader out of prepare()."
        )
    if missing:
        raise BoundaryError(
            f"{name} of this release of Accelerate has no {', '.join(missing)}, so its position could not be "
            "saved. Nothing was started. Install accelerate 1.14 or 1.15."
        )
    skipped = loader.skip_batches or _skipped_by_sampler(loader)
    if skipped:
        raise BoundaryError(
            f"This loader skips its first {skipped} batches (skip_first_batches). A resume here "
            "goes to the saved batch by itself, so the skipped ones would be missing twice. Nothing was "
            "started. Pass the prepared loader."
        )
    if "DataLoaderDispatcher" not in names:
        return PreparedSource(loader, source_of(loader.base_dataloader), per_batch=1)
    processes = loader.state.num_processes
    per_batch = 1 if loader.split_batches or loader.submesh_tp else processes
    is_first = loader.state.process_index == 0
    inside = source_of(loader.base_dataloader) if is_first else ReceivedSource(loader)
    return PreparedSource(
        loader, inside, per_batch=per_batch, fills_up=processes > 1 and not loader._drop_last
    )


def _skipped_by_sampler(loader: Any) -> int:
    """Batches that `skip_first_batches` drops from a loader with samplers: a batch sampler drops them."""
    for sampler in (loader.sampler, loader.batch_sampler):
        if type(sampler).__name__ == "SkipBatchSampler":
            return int(sampler.skip_batches)
    return 0


class PreparedSource(Source):
    """Gives what the prepared loader makes of the batches of `inside`, of which it takes `per_batch` for each
    of its own. `batches_taken` counts its own. fills_up: rows of the epoch's first batch complete a last one
    that the ranks cannot divide."""

    def __init__(self, loader: Any, inside: Source, *, per_batch: int, fills_up: bool = False) -> None:
        super().__init__(loader, inside.generators)
        self._inside, self._per_batch, self._fills_up = inside, per_batch, fills_up
        self._first_rows: Encoded | None = None  # on rank 0: the tensors of those rows

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
        tell_epoch: bool = True,
        beside: bool = False,
    ) -> None:
        """As the base class has it; the samplers' epoch is the loader's own count of passes."""
        inside, loader = self._inside, self._loader
        self._iterator, self.batches_taken, self.was_over, self._first_rows = None, 0, False, None
        inside.count_trained()
        if resume is None:
            return inside.begin(epoch, tell_epoch=False)
        saved = Position.read(resume, inside.kind, inside.parts)
        set_by_program = loader.iteration
        iteration = _count(saved.made_of.get("iteration"), saved.epoch)
        drawn = _count(saved.made_of.get("drawn"), saved.batches_taken)
        # `begin` makes the samplers' order again, before the loader sets their epoch.
        loader.set_epoch(iteration)
        resume = {**resume, "batches_taken": drawn}
        inside.begin(epoch, resume, carry=carry, leave=leave, tell_epoch=False, beside=beside)
        if carry or saved.epoch != epoch:
            # A program that sets the epoch itself has done so before its loop.
            loader.iteration = set_by_program or iteration
            return None
        self.was_over, self.batches_taken = inside.was_over, saved.batches_taken
        if "first_rows" in saved.made_of:
            self._first_rows = Encoded(saved.made_of["first_rows"])
        # The loader counts a pass when it is asked for a batch after the last one, which is not done again.
        loader.iteration = iteration + self.was_over
        return None

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
        """The first batch. The loader makes the iterator that it draws from out of `base_dataloader`, and
        takes the rows for its last batch by the first call of `slice_fn`."""
        own, inside = vars(self._loader), self._inside
        theirs: dict[str, Any] = {n: own[n] for n in ("base_dataloader", "slice_fn") if n in own}
        own["base_dataloader"] = _Inside(own["base_dataloader"], inside)

        def first_rows(*arguments: Any, **named: Any) -> Any:
            own["slice_fn"] = theirs["slice_fn"]
            return self._kept(theirs["slice_fn"](*arguments, **named))

        if self._fills_up:
            own["slice_fn"] = first_rows
        try:
            return next(iterator)
        finally:
            own.update(theirs)

    def _kept(self, rows: Any) -> Any:
        """Keep `rows`, of the epoch's first batch. Where the epoch is resumed they are of a later one: return
        those that were saved, on rank 0."""
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
    """A count that only positions of prepared loaders have."""
    return saved if type(saved) is int else otherwise or 0


class _Inside:
    """In the place of `base_dataloader` while the prepared loader makes its iterator: gives the batches of
    the source; its attributes are the loader's."""

    def __init__(self, loader: Any, source: Source) -> None:
        self._loader, self._source = loader, source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._source, ReceivedSource):
            return self._source.pass_by(self._loader)
        return _Batches(self._source)


class _Batches(Iterator[Any]):
    def __init__(self, source: Source) -> None:
        self._source = source

    def __next__(self) -> Any:
        return self._source.next()


class ReceivedSource(Source):
    """What a rank has of DataLoaderDispatcher where the first process draws for all: no batch of its own,
    only random numbers."""

    kind = "received"

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, rng.Generators({"loader": loader.base_dataloader}))

    def pass_by(self, loader: Any) -> Iterator[Any]:
        """The iterator that the dispatcher makes and never draws from. It draws the workers' seed, which a
        resumed epoch has drawn already."""
        iterator: Iterator[Any] = iter(loader)
        due, self._due = self._due, None
        if due is not None:
            self.generators.restore_all(due)
        return iterator

    def count_trained(self, batches: int = 0) -> None:
        self.batches_taken = batches

    def _parts(self) -> tuple[bool, dict[str, Any]]:
        return self._over or (self.batches_taken > 0 and self._loader.end_of_dataloader), {}
