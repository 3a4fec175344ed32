"""What is known of torchdata's StatefulDataLoader and of the Loader of its nodes beside their two methods (as
of 0.11).

Reads their state and their iterator. Never changes either but to draw what it would skip later.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset


def draw_skipped(iterator: Any) -> None:
    """torchdata skips the batches before the position when it fetches the next one, that is after the
    random numbers were put back. A shuffle would then be another one: skip now."""
    skipping = getattr(iterator, "_sampler_iter", None)
    if isinstance(skipping, itertools.islice):
        draws = iter(iterator._index_sampler)
        for _ in range(iterator._sampler_iter_yielded):
            next(draws, None)
        iterator._sampler_iter = draws


@contextlib.contextmanager
def not_restarting(loader: Any) -> Iterator[None]:
    """An `iter()` in here begins no other epoch where nothing is left of the one whose state was loaded, as
    that of torchdata's nodes does: what it gives would be taken for the rest of that epoch."""
    restarts = getattr(loader, "restart_on_stop_iteration", False)
    if restarts:
        loader.restart_on_stop_iteration = False
    try:
        yield
    finally:
        if restarts:
            loader.restart_on_stop_iteration = restarts


def forget_ahead(loader: Any) -> None:
    """The `iter()` of torchdata's nodes gives what an earlier `state_dict()` made, and passes over a state
    that was loaded since, and over where the random numbers stand now."""
    if getattr(loader, "_iter_for_state_dict", False):
        loader._iter_for_state_dict = False


def iterate(loader: Any) -> Iterator[Any]:
    """`iter(loader)`. One of torchdata's nodes keeps the state from which it looked one batch ahead, and
    gives it as its own for ever after where that batch was not there or is not given any more: not here."""
    iterator: Any = iter(loader)
    if getattr(iterator, "_cached_state_dict", None) is not None and iterator._cached_item is None:
        iterator._cached_state_dict = None
    given: Iterator[Any] = iterator
    return given


def keeps_stream(loader: Any) -> bool:
    """Whether its data set, in this process, keeps the state of where it is. (One in workers is a copy that
    was never loaded, in each epoch.)"""
    return not loader.num_workers and isinstance(loader.dataset, IterableDataset)


def stream_state(state: Any) -> Any:
    """The data set's part of such a loader's state: what a batch moves, and nothing that counts batches. None
    where the data set keeps none."""
    of_iterator = (state.get("fetcher_state") or {}).get("dataset_iter_state")
    of_data_set = state.get("dataset_state")
    return None if of_iterator is None and of_data_set is None else [of_data_set, of_iterator]
