"""The loaders that Accelerate (versions 1.14 and 1.15) prepares.

They draw the next batch of the inner loader before they return a batch, to recognise the last one. The
position is that of the inner loader, and a resume draws again what was drawn ahead. Never imports Accelerate
before a prepared loader is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from flashckpt.errors import BoundaryError, MismatchError
from flashckpt.format.typed import Encoded
from flashckpt.state import rng
from flashckpt.state.loader.position import Position
from flashckpt.state.loader.source import Source, with_new_workers
from flashckpt.state.values import StoredTensor

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
    dispatches = "DataLoaderDispatcher" in names
    read = (*_ATTRIBUTES, "slice_fn") if dispatches else _ATTRIBUTES
    missing = not all(hasattr(loader, name) for name in read)
    is_known = names & {"DataLoaderShard", "DataLoaderDispatcher"} and "base_dataloader" in vars(loader)
    if missing or not is_known:
        raise BoundaryError(
            f"{type(loader).__name__} of this release of Accelerate draws batches in an unknown way, so its "
            "position could not be saved. Nothing was started. Pass the loader that accelerator.prepare() of "
            "accelerate 1.14 or 1.15 returns for a DataLoader, or keep the DataLoader out of prepare()."
        )
    skipping = [s for s in (loader.sampler, loader.batch_sampler) if type(s).__name__ == "SkipBatchSampler"]
    if skipped := loader.skip_batches or sum(each.skip_batches for each in skipping):
        raise BoundaryError(
            f"This loader skips its first {skipped} batches (skip_first_batches). A resume goes to the saved "
            "batch by itself, so these batches would be skipped twice. Nothing was started. Pass the "
            "prepared loader."
        )
    draws = not dispatches or loader.state.process_index == 0
    inside = source_of(loader.base_dataloader) if draws else ReceivedSource(loader)
    return PreparedSource(loader, inside, dispatches=dispatches)


class PreparedSource(Source):
    """The source of a prepared loader, which draws its batches from the source `inside`.

    batches_taken: the batches of the prepared loader.
    dispatches: one rank draws for all.
    """

    def __init__(self, loader: Any, inside: Source, *, dispatches: bool) -> None:
        super().__init__(loader, inside.generators)
        self._inside, self._dispatches = inside, dispatches
        processes = loader.state.num_processes if dispatches else 1
        # The inner batches for each batch of the prepared loader.
        self._per_batch = 1 if processes == 1 or loader.split_batches or loader.submesh_tp else processes
        # Rows of the epoch's first batch complete a last batch that the ranks cannot divide.
        self._fills_up = processes > 1 and not loader._drop_last
        self._first_rows: Encoded | None = None  # on rank 0: the rows of the epoch's first batch

    def __len__(self) -> int:
        return len(self._inside) if self._per_batch == 1 else len(self._loader)

    def has_lost_workers(self) -> bool:
        return self._inside.has_lost_workers()

    def begin(self, epoch: int, resume: Mapping[str, Any] | None = None, **how: Any) -> None:
        """As `Source.begin`, but the samplers' epoch is the loader's own count of passes."""
        inside, loader = self._inside, self._loader
        self._iterator, self.batches_taken, self.was_over, self._first_rows = None, 0, False, None
        inside.count_trained()
        if resume is None:
            loader.set_epoch(loader.iteration)  # as its `iter()` will
            return inside.begin(epoch)
        if isinstance(inside, ReceivedSource) and resume.get("moved") is not None:
            # It may be that of the drawing rank.
            resume = {**resume, "kind": inside.kind, "length": None, "parts": {}}
        saved = Position.read(resume, inside.kind, inside.parts)
        is_carried = how.get("carry", False) or saved.epoch != epoch
        moved = None if is_carried or saved.is_at_end or not self._dispatches else saved.moved
        if moved is not None and moved.is_resized:
            raise MismatchError(
                f"The checkpoint was taken after {saved.batches_taken} batches of an epoch, drawn by one "
                f"rank for all {moved.ranks}, and now there are {moved.world} ranks. The model and all other "
                "state were restored; no batch was drawn. Train on the former number of ranks until the "
                "epoch has ended.",
                differences=(("ranks", str(moved.ranks), str(moved.world)),),
            )
        # A loader that was not prepared then has saved neither.
        iteration = saved.made_of.get("iteration", saved.epoch)
        drawn = saved.made_of.get("drawn", saved.batches_taken)
        if is_carried:
            # A program that sets the epoch itself sets it before its loop.
            iteration = loader.iteration or iteration
        # Before `begin`, which computes the samplers' order.
        loader.set_epoch(iteration)
        resume = {**resume, "batches_taken": drawn}
        inside.begin(epoch, resume, **how)
        if is_carried:
            return None
        self.was_over, self.batches_taken = inside.was_over, saved.batches_taken
        if "first_rows" in saved.made_of:
            self._first_rows = Encoded(saved.made_of["first_rows"])
        # The loader counts a pass at the draw after its last batch, and a resume does not repeat this draw.
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


class _InnerLoader(Iterator[Any]):
    """The replacement of `base_dataloader` while the prepared loader creates its iterator: iterates over the
    source and has the attributes of the loader."""

    def __init__(self, loader: Any, source: Source) -> None:
        self._loader, self._source = loader, source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._source, ReceivedSource):
            return self._source.unused_iterator(self._loader)
        return self

    def __next__(self) -> Any:
        return self._source.next()


class ReceivedSource(Source):
    """The source of a rank that receives its batches from DataLoaderDispatcher on the first rank: it draws no
    batches and only saves generators."""

    kind = "loader from which the first rank draws for all"

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, rng.Generators({"loader": loader.base_dataloader}))

    def unused_iterator(self, loader: Any) -> Iterator[Any]:
        """Return the iterator that the dispatcher creates and never uses. Undo its draw of the workers' seed
        in a resumed epoch, which had drawn it already."""
        iterator: Iterator[Any] = iter(with_new_workers(loader))
        if self._due:
            self.generators.restore_all(self._due.popleft())
        return iterator

    def count_trained(self, batches: int = 0) -> None:
        self.batches_taken = batches

    def _parts(self) -> tuple[bool, dict[str, Any]]:
        over = self._over or (self.batches_taken > 0 and self._loader.end_of_dataloader)
        return over, {}
