"""Loaders with their own state, which is saved at each boundary: torchdata's StatefulDataLoader, an iterable
data set with `state_dict`, any iterable with `state_dict` and `load_state_dict`.

The contract: after `load_state_dict`, the next `iter()` continues where the state was taken, and those after
it begin as in the process that was not interrupted. A state of an epoch's end may give an empty rest first.

Owns the order in which state and generators are restored. Never interprets a state, except torchdata's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from flashckpt.errors import BoundaryError, StateError
from flashckpt.format.typed import SEQUENCES, Encoded, checked, children, decode_json
from flashckpt.state import rng
from flashckpt.state.leaves import Place, Sink
from flashckpt.state.loader.complete import keeps_its_place
from flashckpt.state.loader.position import Position
from flashckpt.state.loader.source import Source, draw_again
from flashckpt.state.loader.torchdata import draw_skipped, drop_created_iterator, iterate, not_restarting
from flashckpt.state.values import SIMPLE, StoredTensor, rebuild, survey

log = logging.getLogger(__name__)


class Parts(NamedTuple):
    state: Any
    drawn: int
    left: bool


class StatefulSource(Source):
    """A loader with its own state.

    stream: the data set of a DataLoader, if that has the state.
    creates_iterator: the loader's `state_dict` creates its iterator, as torchdata's does, and so draws random
        numbers.
    """

    kind = "loader with its own state"
    parts = Parts

    def __init__(self, loader: Any, stream: Any = None, *, creates_iterator: bool = False) -> None:
        super().__init__(loader, rng.Generators({"loader": loader}))
        self._creates_iterator = creates_iterator
        self._with_state = loader if stream is None else stream
        self._stream = loader.dataset if creates_iterator else self._with_state
        # The state between two epochs, and whether the earlier epoch was left before its end.
        self._between: Encoded | None = None
        self._left = False
        # The state of an epoch's end was loaded, and no batch was drawn since.
        self._is_at_end = False
        # The batches of the epoch that was resumed, until the next one has ended.
        self._expected: int | None = None
        # In an epoch that was resumed: the state from which it was, and the batches drawn since. Until each
        # worker of torchdata, or a generator function, has given a batch, its own state is that of a new one.
        self._resumed_from: Encoded | None = None
        self._drawn_since: int | None = None

    def _open(self) -> Iterator[Any]:
        drop_created_iterator(self._loader)
        if not self._is_at_end:
            forget_loaded_state(self._stream)
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        self._at_iter = Encoded(self.generators.capture_all())
        iterator = iterate(self._loader)
        # Not always as after another `iter()`: Accelerate calls each loader's state_dict when it prepares it,
        # and torchdata then draws the iterator's seed.
        self._at_draw = Encoded(self.generators.capture_all())
        return iterator

    def _fetch(self) -> Any:
        if not self._can_be_saved and self._creates_iterator and self._loader.num_workers:
            log.warning(
                "StatefulDataLoader does not keep its workers' random numbers in the middle of an epoch: "
                "after a resume, those drawn inside workers differ. torch's DataLoader resumes exactly."
            )
        if self._is_at_end:
            states = self.generators.capture_all()
            # One of torchdata's nodes would continue with the next epoch at once, after the empty rest has
            # already drawn random numbers.
            with contextlib.suppress(StopIteration), not_restarting(self._loader):
                batch = super()._fetch()
                self._is_at_end = False
                return batch
            # That was the empty rest of the epoch before.
            self._iterator, self._is_at_end = None, False
            self.generators.restore_all(states)
        batch = super()._fetch()
        if self._drawn_since is not None:
            self._drawn_since += 1
        return batch

    def _reopen(self, position: Position) -> None:
        stream, self._is_at_end, self._drawn_since = self._stream, False, 0
        is_complete = not hasattr(stream, "load_state_dict") or keeps_its_place(stream)
        self.generators.restore_all(position.at_iter)
        if is_complete:
            self._load_state(position, drops_iterator=False)
        else:
            log.warning(
                "The state of %s leaves out items that it has read and not given, such as those of a shuffle "
                "buffer, so %d batches of epoch %d are drawn again and dropped.",
                type(stream).__name__, position.batches_taken, position.epoch,
            )  # fmt: skip
        with not_restarting(self._loader):
            self._iterator = self._iterate()
        self._at_iter, self._at_draw = Encoded(position.at_iter), Encoded(position.at_draw)
        self.generators.restore_all(position.at_draw)
        if not is_complete:
            return draw_again(self._iterator, position.batches_taken)
        draw_skipped(self._iterator)
        if self._creates_iterator and not self._loader.num_workers:
            # torchdata counts the batches of a data set without state twice when it skips them: the next
            # resume would skip too many.
            self._iterator._num_yielded = position.batches_taken  # type: ignore[attr-defined]
        self._resumed_from, self._drawn_since = as_encoded(position.parts["state"]), position.parts["drawn"]
        return draw_again(self._iterator, position.parts["drawn"])

    def _load(self, position: Position, *, is_own: bool) -> None:
        state = as_encoded(position.parts["state"])
        if state.value is None:
            return
        if not is_own:
            log.warning(
                "Not exact: the state of %s in the checkpoint belongs to another rank and is ignored. The "
                "next epoch begins as that of a new loader.",
                self._name,
            )
            return
        self._left = position.parts["left"] or position.is_open
        self._between, self._is_at_end = state, not self._left
        self._expected = None if self._left else position.batches_taken
        self._load_state(position, drops_iterator=self._left)

    def _load_state(self, position: Position, *, drops_iterator: bool) -> None:
        """Load a state. drops_iterator: call `iter()` and drop the iterator, which would continue an epoch
        that was left."""
        self._with_state.load_state_dict(decoded_state(as_encoded(position.parts["state"])))
        drop_created_iterator(self._loader)
        if drops_iterator:
            iterate(self._loader)
        elif self._creates_iterator:
            # It draws random numbers, so call it before the generators are restored.
            self._loader.state_dict()

    def _state(self) -> Encoded:
        try:
            state = self._with_state.state_dict()
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
            # Nothing has used the loaded state if the epoch was resumed behind its last batch.
            self._is_at_end = ended and self._drawn_since == 0
            self._compare_lengths(ended)
        self._iterator = self._resumed_from = self._drawn_since = None

    def _compare_lengths(self, ended: bool) -> None:
        """Raise or warn if the epoch after a resume is shorter than the one that was resumed: the loader may
        begin each epoch at the state that was loaded."""
        expected, taken = self._expected, self.batches_taken
        self._expected = taken if self._drawn_since is not None and ended else None
        if not ended or expected is None or taken >= expected:
            return
        if not taken:
            self._iterator, self._broken = None, True
            raise BoundaryError(
                f"{self._name} does not begin another epoch after its state was loaded: it returns no batch. "
                "No batch was lost, and the checkpoints are intact. Let load_state_dict affect only the next "
                "iter()."
            )
        log.warning(
            "%s gave %d batches in epoch %d, and %d in the one before, which was resumed. If each epoch has "
            "the same length, its load_state_dict affects more than the next iter(): epochs after a resume "
            "lack their beginning.", self._name, taken, self._epoch, expected,
        )  # fmt: skip

    def _is_last(self) -> bool:
        # A loader's state may be the same after the last batch as before the first one.
        if self._iterator is None or self._creates_iterator:
            return False
        if self._with_state is not self._loader:
            return bool(getattr(getattr(self._iterator, "_dataset_fetcher", None), "ended", False))
        return self.batches_taken == self._length

    def _parts(self) -> tuple[bool, dict[str, Any]]:
        here = self._iterator is not None
        workers = self._loader.num_workers if self._creates_iterator else 0
        waits = here and self._resumed_from is not None and (self._drawn_since or 0) < max(1, workers)
        state = self._resumed_from if waits else self._state() if here else self._between
        return self._over or self._is_last(), {
            "state": state,
            "drawn": self._drawn_since if waits else 0,
            "left": False if here else self._left,
        }


def forget_loaded_state(stream: object) -> None:
    """Let Hugging Face's data sets (as of datasets 5.2) begin an epoch at its beginning: until `set_epoch`,
    each of their `iter()` begins at the state that was loaded last."""
    for _, held in rng.reached({"stream": stream}):
        if getattr(held, "__dict__", {}).get("_starting_state_dict") is not None:
            held._starting_state_dict = None  # type: ignore[attr-defined]


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
