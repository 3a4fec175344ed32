"""Internals of torchdata (as of 0.11): what its loaders and nodes do with a state that was loaded."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any


def draw_skipped(iterator: Any) -> None:
    """Skip the batches before the position now. torchdata would skip them at the next fetch, after the
    generators were restored, and so draw another shuffle."""
    skipping = getattr(iterator, "_sampler_iter", None)
    if isinstance(skipping, itertools.islice):
        draws = iter(iterator._index_sampler)
        for _ in range(iterator._sampler_iter_yielded):
            next(draws, None)
        iterator._sampler_iter = draws


@contextlib.contextmanager
def not_restarting(loader: Any) -> Iterator[None]:
    """A context in which an `iter()` of torchdata's nodes does not begin the next epoch if the loaded epoch
    has no batches left: these batches would be taken for the rest of the loaded epoch."""
    restarts = getattr(loader, "restart_on_stop_iteration", False)
    if restarts:
        loader.restart_on_stop_iteration = False
    try:
        yield
    finally:
        if restarts:
            loader.restart_on_stop_iteration = restarts


def drop_created_iterator(loader: Any) -> None:
    """Drop the iterator that an earlier `state_dict()` of torchdata's nodes created. Their `iter()` would
    return it and ignore a state loaded since, and the current generator states."""
    if getattr(loader, "_iter_for_state_dict", False):
        loader._iter_for_state_dict = False


def iterate(loader: Any) -> Iterator[Any]:
    """Return `iter(loader)`, without the cached state of one of torchdata's nodes: after a batch that it
    prefetched in vain, that node would return the cached state for ever."""
    iterator: Any = iter(loader)
    if getattr(iterator, "_cached_state_dict", None) is not None and iterator._cached_item is None:
        iterator._cached_state_dict = None
    given: Iterator[Any] = iterator
    return given
