"""Loaders that keep their own state and are asked for it at every boundary: torchdata's StatefulDataLoader,
an iterable data set with `state_dict`, any iterable with `state_dict` and `load_state_dict`.

Owns the order in which state and random numbers are put back. Never looks into a state.

What an `iter()` after `load_state_dict` begins with is the loader's own choice. Some go on once from the
state that was loaded, and begin anew at the next `iter()`; some go on and on; and of some (data sets of
Hugging Face) *every* `iter()` begins at the state that was loaded last, so that each epoch after a resume
would be cut short. Which it is, is seen at the first epoch that begins after a load: by what its first batch
does to the state.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from flashckpt.errors import BoundaryError, FlashckptError, StateError
from flashckpt.format.typed import SEQUENCES, Encoded, checked, children, decode_json
from flashckpt.state import rng
from flashckpt.state.leaves import Place, Sink
from flashckpt.state.loader.base import Source, mark_of
from flashckpt.state.loader.position import Position
from flashckpt.state.values import SIMPLE, StoredTensor, rebuild, survey

log = logging.getLogger(__name__)

Mark = str | None


class StatefulSource(Source):
    """`kind` of its positions is "stateful". `makes_ahead`: the loader's `state_dict` makes its iterator, as
    torchdata's does, and draws random numbers for it."""

    kind = "stateful"
    parts = frozenset({"state", "left", "first", "opened", "made_before"})

    def __init__(self, loader: Any, *, makes_ahead: bool = False) -> None:
        super().__init__(loader, rng.Generators({"loader": loader}))
        self._makes_ahead = makes_ahead
        # The state between two epochs, and whether the earlier one was left before its end.
        self._between: Encoded | None = None
        # Whether the epoch's iterator existed when the epoch began: torchdata draws a seed for each.
        self._made_before = False
        self._left = False
        # Of the run: its state before the first `iter()`, and what the first batch of all moved.
        self._first: list[Encoded] = []
        self._opened: Mark = None
        # Since an epoch began without it, a state was loaded: in the "middle" of an epoch, at its "end", or
        # where it was "left". Then: what the first batch has moved, and what the load has set.
        self._loaded = ""
        self._moved_since: Mark = None
        self._batches_since = 0
        self._set_by_load: Changed = {}

    def _open(self) -> Iterator[Any]:
        forget_ahead(self._loader)
        if not self._first and self._may_begin_again:
            self._first = self._before_any()
        loaded, self._loaded = self._loaded, ""
        if not loaded:
            return self._iterate()
        marks = self.generators.capture_all()
        if loaded == "left":
            return self._after_left(marks)
        # After an epoch's end some give the nothing that is left of it first. One of torchdata's nodes would
        # go on into the next epoch at once, when what it passes over has drawn random numbers already.
        with not_restarting(self._loader):
            begun = self._begin_again(marks)
        if begun is None and loaded == "end":
            begun = self._begin_again(marks)
        if begun is None:
            # A loader that gave batches after the load does not begin where it was loaded: it has no more.
            return iter(()) if self._batches_since else self._afresh(marks)
        if loaded == "middle" and begun.mark is not None and begun.mark == self._moved_since:
            return self._afresh(marks)
        return begun

    def _iterate(self) -> Iterator[Any]:
        before = self.generators.capture_all() if self._makes_ahead else None
        iterator = iterate(self._loader)
        # Accelerate asks each loader for its state when it prepares it: the iterator was made there.
        self._made_before = before is not None and before == self.generators.capture_all()
        return iterator

    def _after_left(self, marks: dict[str, Any]) -> Iterator[Any]:
        """An epoch was left before its end: does the loader go on from there, or begin anew?"""
        begun = self._begin_again(marks)
        if begun is not None and begun.mark == self._opened:
            return begun
        if not self._first:
            return self._afresh(marks)
        self._put_first()
        begun, again = self._begin_again(marks), self._begin_again(marks)
        if begun is None or again is None or again.mark in (begun.mark, self._opened):
            return self._afresh(marks)
        assert self._between is not None
        self._put(self._between, asked_for=True)
        self.generators.restore_all(marks)
        return iterate(self._loader)

    def _begin_again(self, marks: dict[str, Any]) -> _Begun | None:
        """A new iterator with its first batch; None if it has none."""
        self.generators.restore_all(marks)
        iterator = self._iterate()
        try:
            first = next(iterator)
        except StopIteration:
            return None
        return _Begun(first, iterator, self._mark())

    def _afresh(self, marks: dict[str, Any]) -> Iterator[Any]:
        """Begin an epoch as if no state had been loaded in this process."""
        log.info(
            "%s begins each epoch at the state that was loaded last: it is put back to its state at the "
            "beginning of the run.",
            type(self._loader).__name__,
        )
        for put in (self._put_first, self._undo_load):
            try:
                put()
            except FlashckptError:
                raise
            except Exception as error:
                log.debug("A loader could not be put back to its beginning: %r", error)
                continue
            begun = self._begin_again(marks)
            if begun is not None and begun.mark == self._opened:
                return begun
        raise BoundaryError(
            f"{type(self._loader).__name__} does not begin another epoch after its state was loaded: it "
            "begins at that state again, or gives nothing, and could not be put back to its beginning. No "
            "batch was lost, and what is saved is whole. Let load_state_dict count for the next iter() alone."
        )

    def _put_first(self) -> None:
        self._loader.load_state_dict(give(self._first[0]))

    def _undo_load(self) -> None:
        if self._makes_ahead:
            self._loader.load_state_dict({})
        for held, name, value in self._set_by_load.values():
            if value is _ABSENT:
                held.pop(name, None)
            else:
                held[name] = value

    def _fetch(self) -> Any:
        batch = super()._fetch()
        self._batches_since += 1
        if self._batches_since == 1:
            self._moved_since = self._mark()
            if self._opened is None:
                self._opened = self._moved_since
        return batch

    @property
    def _may_begin_again(self) -> bool:
        """Whether the loader may be one that begins at a state that was loaded long ago."""
        return not self._makes_ahead or keeps_stream(self._loader)

    def _mark(self) -> Mark:
        """A short mark of what a batch has moved; None where it cannot matter."""
        state = self._state()
        if not self._may_begin_again:
            return None
        where = stream_state(state.value) if self._makes_ahead else state
        return None if where is None else mark_of(where)

    def _reopen(self, position: Position) -> None:
        assert position.start is not None
        self.generators.restore_all(position.start)
        self._put(taken(position.parts["state"]), asked_for=False)
        with not_restarting(self._loader):
            self._iterator = iterate(self._loader)
        self._made_before = position.parts["made_before"]
        if self._made_before:
            self.generators.restore_all(position.start)
        self._before_first(position)
        draw_skipped(self._iterator)
        if self._makes_ahead and not self._loader.num_workers:
            # torchdata counts the batches of a data set without a state a second time as it skips them: the
            # next resume would skip too many.
            self._iterator._num_yielded = position.batches_taken  # type: ignore[attr-defined]
        self._loaded = "middle"

    def _load(self, position: Position, *, carried: bool) -> None:
        parts, state = position.parts, taken(position.parts["state"])
        self._first, self._opened = [taken(state) for state in parts["first"]], parts["opened"]
        in_epoch = position.start is not None and not position.over
        if (in_epoch and not carried) or state.value is None:
            return
        self._between, self._left = state, parts["left"] or in_epoch
        self._put(state, asked_for=self._left)
        self._loaded = "left" if self._left else "end"

    def _leave_out(self, position: Position) -> None:
        if taken(position.parts["state"]).value is not None:
            log.warning(
                "Not exact: the state of %s in the checkpoint is that of another rank, and is left out: the "
                "epoch to come begins as one of a loader that is new.",
                type(self._loader).__name__,
            )

    def _put(self, state: Encoded, *, asked_for: bool) -> None:
        """Load a state. asked_for: what follows it in its epoch is asked for, and not taken."""
        has_data_set = self._makes_ahead or isinstance(self._loader, DatasetState)
        before = attributes(self._loader.dataset if has_data_set else self._loader)
        self._loader.load_state_dict(give(state))
        forget_ahead(self._loader)
        if asked_for:
            iterate(self._loader)
        elif self._makes_ahead:
            # Draws what it draws now, before the random numbers are put back.
            self._loader.state_dict()
        self._set_by_load = {**changed(before), **self._set_by_load}
        self._moved_since, self._batches_since = None, 0

    def check(self) -> None:
        """Raises StateError where the state is known already and cannot be saved."""
        if not self._makes_ahead:
            marks = self.generators.capture_all()
            try:
                self._before_any()
            finally:
                self.generators.restore_all(marks)

    def _before_any(self) -> list[Encoded]:
        """The state before the first `iter()`; empty where there is none yet."""
        try:
            state = self._loader.state_dict()
        except Exception:
            return []
        return [take(state, "loader")]

    def _state(self) -> Encoded:
        try:
            state = self._loader.state_dict()
        except Exception as error:
            raise StateError(
                f"The state of the loader could not be read: {error!r}. Nothing was saved or changed. Mend "
                "its state_dict, or pass a loader without one.",
                location="loader",
            ) from error
        return take(state, "loader")

    def _leave(self, *, ended: bool = False) -> None:
        # Without an iterator, it stands where it stood.
        if self._iterator is not None:
            self._between, self._left = self._state(), not ended
        self._iterator = None

    def _is_last(self) -> bool:
        # A state of its own may look the same after the last batch and before the first one.
        if self._iterator is None or self._makes_ahead:
            return False
        if isinstance(self._loader, DatasetState):
            return bool(getattr(getattr(self._iterator, "_dataset_fetcher", None), "ended", False))
        return self.batches_taken == self._length

    def _parts(self) -> tuple[bool, dict[str, Any]]:
        here = self._iterator is not None
        return self._over or self._is_last(), {
            "state": self._state() if here else self._between,
            "left": False if here else self._left,
            "first": self._first,
            "opened": self._opened,
            "made_before": here and self._made_before,
        }


class DatasetState:
    """A DataLoader without workers whose iterable data set keeps its own state, as one such loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = copy.copy(loader)
        self.dataset = loader.dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> Any:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)


class _Begun(Iterator[Any]):
    """An iterator whose first batch was drawn already. `mark`: what that moved."""

    def __init__(self, first: Any, rest: Iterator[Any], mark: Mark) -> None:
        self._first, self._rest, self.mark = [first], rest, mark

    def __next__(self) -> Any:
        return self._first.pop() if self._first else next(self._rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_rest"], name)


# Its state on its way into a snapshot and back


class _Stored(Sink):
    def add(self, name: str, tensor: Tensor, place: Place) -> StoredTensor:
        return StoredTensor.of(tensor, name)


def take(state: object, location: str) -> Encoded:
    """A copy of a loader's state that shares nothing with it, as it will come back, and its text: a state may
    be large, and is written as it was compared. Raises StateError, with the path, for what would come back as
    anything else."""
    return checked(survey(state, location, Place("other", None), _Stored()), location)


def taken(saved: Any) -> Encoded:
    """What `take` gave, also where it has been in a snapshot since."""
    return saved if type(saved) is Encoded else Encoded(saved)


def give(taken: Encoded) -> Any:
    """What `take` took, for the loader to keep: another copy each time."""
    return _with_tensors(decode_json(taken.data))


def _with_tensors(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return value.tensor()
    if not isinstance(value, (dict, *SEQUENCES)) or all(type(item) in SIMPLE for _, item in children(value)):
        return value
    return rebuild(value, [(key, _with_tensors(item)) for key, item in children(value)])


# What is known of torchdata (as of 0.11) beside its loaders' two methods


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


# What loading a state has set


Held = dict[str, Any]
Changed = dict[tuple[int, str], tuple[Held, str, Any]]
_ABSENT = object()


def attributes(root: object) -> list[tuple[Held, Held]]:
    """The attributes of an object, and of what it holds: as they are, and a copy as they are now."""
    held = (getattr(value, "__dict__", None) for _, value in rng.reached({"": root}))
    return [(each, dict(each)) for each in held if isinstance(each, dict)]


def changed(attributes: list[tuple[Held, Held]]) -> Changed:
    """Those that are others now, as they were: so it can be made one that never loaded any state."""
    return {
        (id(held), name): (held, name, before.get(name, _ABSENT))
        for held, before in attributes
        for name in held.keys() | before.keys()
        if held.get(name, _ABSENT) is not before.get(name, _ABSENT)
    }
