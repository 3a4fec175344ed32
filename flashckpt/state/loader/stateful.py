"""Loaders with their own state, which is saved at each boundary: torchdata's StatefulDataLoader, an iterable
data set with `state_dict`, any iterable with `state_dict` and `load_state_dict`.

Owns the order in which state and generators are restored. Never interprets a state, except torchdata's.

Loaders differ in where an `iter()` after `load_state_dict` starts. Some continue once from the loaded state
and start from the beginning at the next `iter()`; some never start from the beginning; and for some (data
sets of Hugging Face) *each* `iter()` starts at the state that was loaded last, which would shorten each epoch
after a resume. The first epoch that begins after a load shows which it is, by the state after its first
batch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from flashckpt.errors import BoundaryError, FlashckptError, StateError
from flashckpt.format.typed import SEQUENCES, Encoded, checked, children, decode_json
from flashckpt.state import rng
from flashckpt.state.leaves import Place, Sink
from flashckpt.state.loader.base import Source, digest_of, draw_again
from flashckpt.state.loader.complete import keeps_its_place
from flashckpt.state.loader.position import Position
from flashckpt.state.loader.torchdata import (
    draw_skipped,
    drop_created_iterator,
    iterate,
    keeps_stream,
    not_restarting,
    stream_state,
)
from flashckpt.state.values import SIMPLE, StoredTensor, rebuild, survey

log = logging.getLogger(__name__)

Digest = str | None


class StatefulSource(Source):
    """A loader with its own state. The kind of its positions is "stateful". `creates_iterator`: the loader's
    `state_dict` creates its iterator, as torchdata's does, and so draws random numbers."""

    kind = "stateful"
    parts = frozenset({"state", "drawn", "left", "first", "opened", "made_before"})

    def __init__(self, loader: Any, *, creates_iterator: bool = False) -> None:
        super().__init__(loader, rng.Generators({"loader": loader}))
        self._creates_iterator = creates_iterator
        # The state between two epochs, and whether the earlier epoch was left before its end.
        self._between: Encoded | None = None
        # Whether the epoch's iterator existed when the epoch began: torchdata draws a seed for each iterator.
        self._made_before = False
        self._left = False
        # The run's state before the first `iter()`, and the digest after its very first batch.
        self._initial: list[Encoded] = []
        self._first_change: Digest = None
        # Where the loaded state was taken, until an epoch begins: in the "middle" of an epoch, at its "end",
        # or where it was "left"; "" if none was loaded. Then the digest after the first batch since the
        # load, the number of those batches, and the attributes that the load has set.
        self._loaded = ""
        self._change_since_load: Digest = None
        self._batches_since = 0
        self._set_by_load: Changed = {}
        # The state from which this epoch was resumed, and the batches drawn since then. Until each worker of
        # torchdata has given a batch, its own state is that of a new one.
        self._resumed_from: Encoded | None = None
        self._drawn_since = 0

    def _open(self) -> Iterator[Any]:
        drop_created_iterator(self._loader)
        if not self._initial and self._may_restart_at_loaded:
            self._initial = self._before_any()
        loaded, self._loaded = self._loaded, ""
        if not loaded:
            return self._iterate()
        states = self.generators.capture_all()
        if loaded == "left":
            return self._after_left(states)
        # After an epoch's end, some loaders first return an empty iterator. One of torchdata's nodes would
        # continue with the next epoch at once, after the empty rest has already drawn random numbers.
        with not_restarting(self._loader):
            begun = self._begin_again(states)
        if begun is None and loaded == "end":
            begun = self._begin_again(states)
        if begun is None:
            # A loader that returned batches after the load does not start at the loaded state: it is empty.
            return iter(()) if self._batches_since else self._start_over(states)
        if loaded == "middle" and begun.digest is not None and begun.digest == self._change_since_load:
            return self._start_over(states)
        return begun

    def _iterate(self) -> Iterator[Any]:
        before = self.generators.capture_all() if self._creates_iterator else None
        iterator = iterate(self._loader)
        # Accelerate calls each loader's state_dict when it prepares it, which creates the iterator.
        self._made_before = before is not None and before == self.generators.capture_all()
        return iterator

    def _after_left(self, states: dict[str, Any]) -> Iterator[Any]:
        """Begin an epoch after one that was left before its end: the loader may continue or start again."""
        begun = self._begin_again(states)
        if begun is not None and begun.digest == self._first_change:
            return begun
        if not self._initial:
            return self._start_over(states)
        self._load_initial()
        begun, again = self._begin_again(states), self._begin_again(states)
        if begun is None or again is None or again.digest in (begun.digest, self._first_change):
            return self._start_over(states)
        assert self._between is not None
        self._load_state(self._between, drops_iterator=True)
        self.generators.restore_all(states)
        return iterate(self._loader)

    def _begin_again(self, states: dict[str, Any]) -> _StartedIterator | None:
        """Return a new iterator with its first batch already drawn; None if it is empty."""
        self.generators.restore_all(states)
        iterator = self._iterate()
        try:
            first = next(iterator)
        except StopIteration:
            return None
        return _StartedIterator(first, iterator, self._change())

    def _start_over(self, states: dict[str, Any]) -> Iterator[Any]:
        """Begin an epoch as if no state had been loaded in this process."""
        log.info(
            "%s starts each epoch at the state that was loaded last: its state at the beginning of the run "
            "is restored.",
            type(self._loader).__name__,
        )
        for put in (self._load_initial, self._undo_load):
            try:
                put()
            except FlashckptError:
                raise
            except Exception as error:
                log.debug("The initial state of a loader could not be restored: %r", error)
                continue
            begun = self._begin_again(states)
            if begun is not None and begun.digest == self._first_change:
                return begun
        raise BoundaryError(
            f"{type(self._loader).__name__} does not begin another epoch after its state was loaded: it "
            "starts at that state again or returns no batch, and its initial state could not be restored. No "
            "batch was lost, and the checkpoints are intact. Let load_state_dict affect only the next iter()."
        )

    def _load_initial(self) -> None:
        self._loader.load_state_dict(decoded_state(self._initial[0]))

    def _undo_load(self) -> None:
        if self._creates_iterator:
            self._loader.load_state_dict({})
        for held, name, value in self._set_by_load.values():
            if value is _ABSENT:
                held.pop(name, None)
            else:
                held[name] = value

    def _fetch(self) -> Any:
        batch = super()._fetch()
        self._batches_since += 1
        self._drawn_since += 1
        if self._batches_since == 1:
            self._change_since_load = self._change()
            if self._first_change is None:
                self._first_change = self._change_since_load
        return batch

    @property
    def _may_restart_at_loaded(self) -> bool:
        """Whether the loader may start a later epoch at the loaded state."""
        return not self._creates_iterator or keeps_stream(self._loader)

    def _change(self) -> Digest:
        """Return the digest of the state that a batch changes; None if it is not needed."""
        state = self._state()
        if not self._may_restart_at_loaded:
            return None
        where = stream_state(state.value) if self._creates_iterator else state
        return None if where is None else digest_of(where)

    def _reopen(self, position: Position) -> None:
        assert position.start is not None
        stream = self._stream()
        if stream is None or keeps_its_place(stream):
            self._load_place(position)
        else:
            self._draw_again(position, type(stream).__name__)

    def _load_place(self, position: Position) -> None:
        assert position.start is not None
        self.generators.restore_all(position.start)
        self._load_state(as_encoded(position.parts["state"]), drops_iterator=False)
        with not_restarting(self._loader):
            self._iterator = iterate(self._loader)
        self._made_before = position.parts["made_before"]
        if self._made_before:
            self.generators.restore_all(position.start)
        self._before_first(position)
        draw_skipped(self._iterator)
        if self._creates_iterator and not self._loader.num_workers:
            # torchdata counts the batches of a data set without state twice when it skips them: the next
            # resume would skip too many.
            self._iterator._num_yielded = position.batches_taken  # type: ignore[attr-defined]
        self._resumed_from, self._drawn_since = as_encoded(position.parts["state"]), position.parts["drawn"]
        draw_again(self._iterator, self._drawn_since)
        self._loaded = "middle"

    def _stream(self) -> Any:
        """Return what has the state, the data set of a DataLoader or the loader itself, or None."""
        has_data_set = self._creates_iterator or isinstance(self._loader, DatasetState)
        stream = self._loader.dataset if has_data_set else self._loader
        return stream if hasattr(stream, "load_state_dict") else None

    def _draw_again(self, position: Position, name: str) -> None:
        """Draw the epoch's batches again: the state leaves out what was read and not given."""
        log.warning(
            "The state of %s leaves out items that it has read and not given, such as those of a shuffle "
            "buffer, so %d batches of epoch %d are drawn again and dropped.",
            name, position.batches_taken, position.epoch,
        )  # fmt: skip
        assert position.start is not None
        self.generators.restore_all(position.start)
        self._iterator = iterate(self._loader)
        self._made_before = position.parts["made_before"]
        if self._made_before:
            self.generators.restore_all(position.start)
        self._before_first(position)
        draw_again(self._iterator, position.batches_taken)

    def _load(self, position: Position, *, carried: bool) -> None:
        parts, state = position.parts, as_encoded(position.parts["state"])
        self._initial, self._first_change = [as_encoded(state) for state in parts["first"]], parts["opened"]
        in_epoch = position.start is not None and not position.over
        if (in_epoch and not carried) or state.value is None:
            return
        self._between, self._left = state, parts["left"] or in_epoch
        self._load_state(state, drops_iterator=self._left)
        self._loaded = "left" if self._left else "end"

    def _ignore_state(self, position: Position) -> None:
        if as_encoded(position.parts["state"]).value is not None:
            log.warning(
                "Not exact: the state of %s in the checkpoint belongs to another rank and is ignored. The "
                "next epoch begins as that of a new loader.",
                type(self._loader).__name__,
            )

    def _load_state(self, state: Encoded, *, drops_iterator: bool) -> None:
        """Load a state. drops_iterator: call `iter()` and drop the iterator, which would continue that
        epoch."""
        has_data_set = self._creates_iterator or isinstance(self._loader, DatasetState)
        before = attributes(self._loader.dataset if has_data_set else self._loader)
        self._loader.load_state_dict(decoded_state(state))
        drop_created_iterator(self._loader)
        if drops_iterator:
            iterate(self._loader)
        elif self._creates_iterator:
            # It draws random numbers, so call it before the generators are restored.
            self._loader.state_dict()
        self._set_by_load = {**changed(before), **self._set_by_load}
        self._change_since_load, self._batches_since = None, 0

    def check(self) -> None:
        """Raise StateError if the state is known already and cannot be saved."""
        if not self._creates_iterator:
            states = self.generators.capture_all()
            try:
                self._before_any()
            finally:
                self.generators.restore_all(states)

    def _before_any(self) -> list[Encoded]:
        """Return [the state before the first `iter()`], or [] before that call."""
        try:
            state = self._loader.state_dict()
        except Exception:
            return []
        return [encoded_state(state, "loader")]

    def _state(self) -> Encoded:
        try:
            state = self._loader.state_dict()
        except Exception as error:
            raise StateError(
                f"The state of the loader could not be read: {error!r}. Nothing was saved or changed. Fix "
                "its state_dict, or pass a loader without one.",
                location="loader",
            ) from error
        return encoded_state(state, "loader")

    def _leave(self, *, ended: bool = False) -> None:
        # Without an iterator, the state is unchanged.
        if self._iterator is not None:
            self._between, self._left = self._state(), not ended
        self._iterator = self._resumed_from = None

    def _is_last(self) -> bool:
        # A loader's state may be the same after the last batch as before the first one.
        if self._iterator is None or self._creates_iterator:
            return False
        if isinstance(self._loader, DatasetState):
            return bool(getattr(getattr(self._iterator, "_dataset_fetcher", None), "ended", False))
        return self.batches_taken == self._length

    def _parts(self) -> tuple[bool, dict[str, Any]]:
        here = self._iterator is not None
        workers = self._loader.num_workers if self._creates_iterator else 0
        waits = here and self._resumed_from is not None and self._drawn_since < workers
        state = self._resumed_from if waits else self._state() if here else self._between
        return self._over or self._is_last(), {
            "state": state,
            "drawn": self._drawn_since if waits else 0,
            "left": False if here else self._left,
            "first": self._initial,
            "opened": self._first_change,
            "made_before": here and self._made_before,
        }


class DatasetState:
    """Adapter of a DataLoader without workers: state_dict and load_state_dict of its iterable data set."""

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


class _StartedIterator(Iterator[Any]):
    """An iterator whose first batch was already drawn. `digest`: the digest of the state after it."""

    def __init__(self, first: Any, rest: Iterator[Any], digest: Digest) -> None:
        self._first, self._rest, self.digest = [first], rest, digest

    def __next__(self) -> Any:
        return self._first.pop() if self._first else next(self._rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_rest"], name)


# Encoding of loader states


class _Stored(Sink):
    def add(self, name: str, tensor: Tensor, place: Place) -> StoredTensor:
        return StoredTensor.of(tensor, name)


def encoded_state(state: object, location: str) -> Encoded:
    """Return a separate copy of a loader's state, as a restore will return it, with its encoding, which is
    written as it is: a state may be large. Raises StateError, with the path, for a state that a restore would
    not return exactly."""
    return checked(survey(state, location, Place("other", None), _Stored()), location)


def as_encoded(saved: Any) -> Encoded:
    """Return a state as `Encoded`, also after it was read from a snapshot."""
    return saved if type(saved) is Encoded else Encoded(saved)


def decoded_state(encoded: Encoded) -> Any:
    """Return a new copy of an encoded state, which the loader may keep."""
    return _with_tensors(decode_json(encoded.data))


def _with_tensors(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return value.tensor()
    if not isinstance(value, (dict, *SEQUENCES)) or all(type(item) in SIMPLE for _, item in children(value)):
        return value
    return rebuild(value, [(key, _with_tensors(item)) for key, item in children(value)])


# Attributes that a load has set


Held = dict[str, Any]
Changed = dict[tuple[int, str], tuple[Held, str, Any]]
_ABSENT = object()


def attributes(root: object) -> list[tuple[Held, Held]]:
    """Return the attribute dicts of an object and of the objects that it holds, each with a copy."""
    held = (getattr(value, "__dict__", None) for _, value in rng.reached({"": root}))
    return [(each, dict(each)) for each in held if isinstance(each, dict)]


def changed(attributes: list[tuple[Held, Held]]) -> Changed:
    """Return the attributes that have changed since, with their old values: with them the load is undone."""
    return {
        (id(held), name): (held, name, before.get(name, _ABSENT))
        for held, before in attributes
        for name in held.keys() | before.keys()
        if held.get(name, _ABSENT) is not before.get(name, _ABSENT)
    }
