"""Whether the state of a stream says all that decides what it gives next.

A shuffle buffer of Hugging Face's data sets is not in their state: after `load_state_dict` the buffer is
filled with other rows, and those that it held are never given. No class name tells such a stream, so copies
of it are asked.
"""

from __future__ import annotations

import io
import logging
import pickle
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from flashckpt.format.typed import SEQUENCES, children
from flashckpt.state import rng
from flashckpt.state.loader.torchdata import drop_created_iterator, iterate, not_restarting

log = logging.getLogger(__name__)

# Items that are drawn before the state is taken, and those that are compared after it: another buffer of two
# items gives the same item as the first one half of the time.
_BEFORE, _COMPARED = 3, 12
_MOST_BYTES = 256 << 20
_END = object()


def keeps_its_place(stream: Any) -> bool:
    """Whether a copy of the stream into which a state is loaded gives the items that follow that state.

    stream: an iterable with `state_dict` and `load_state_dict`, at the beginning of an epoch. It is not
    touched: two copies draw a few items. True if it cannot be copied, or if a copy fails: then the state is
    trusted. So it is if it holds more than 256 MiB of arrays and tensors that may be written.
    """
    states = rng.capture()
    try:
        return _continues(_copied(stream), _copied(stream))
    except Exception as error:
        log.debug("whether the state of %s is complete is unknown: %r", type(stream).__name__, error)
        return True
    finally:
        rng.restore(states)


def _continues(loaded: Any, original: Any) -> bool:
    # The copies get the random numbers as a resume sets them: those of the epoch's start for `iter()`, then
    # those of the boundary.
    here, there = (rng.Generators({"stream": each}) for each in (original, loaded))
    start = here.capture_all()
    expected = iterate(original)
    for _ in range(_BEFORE):
        if next(expected, _END) is _END:
            return True
    state, before = _copied(original.state_dict()), here.capture_all()
    there.restore_all(start)
    loaded.load_state_dict(state)
    drop_created_iterator(loaded)
    with not_restarting(loaded):
        found = iterate(loaded)
    here.restore_all(before)
    for _ in range(_COMPARED):
        before = here.capture_all()
        item = next(expected, _END)
        after = here.capture_all()
        there.restore_all(before)
        if not is_same(item, next(found, _END)):
            return False
        here.restore_all(after)
        if item is _END:
            break
    return True


def is_same(one: Any, other: Any) -> bool:
    """Whether two items are of the same types and equal, to the bit where they hold numbers."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return is_alike and _bytes_of(one) == _bytes_of(other)
    if isinstance(one, np.ndarray) and one.dtype != object:
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if isinstance(one, (dict, *SEQUENCES)):
        pairs = [list(children(each)) for each in (one, other)]
        if len(pairs[0]) != len(pairs[1]):
            return False
        return all(a == b and is_same(x, y) for (a, x), (b, y) in zip(*pairs, strict=True))
    if "__eq__" not in {name for kind in type(one).__mro__[:-1] for name in vars(kind)}:  # by identity
        return is_same(getattr(one, "__dict__", {}), getattr(other, "__dict__", {}))
    return bool(one == other) or repr(one) == repr(other)  # NaN equals nothing


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class _Sharing(pickle.Pickler):
    """Copies objects in memory. What cannot be changed is shared with the copy: code, tables, and arrays that
    are read only. Raises OverflowError for more than `_MOST_BYTES` of other arrays and tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.shared: list[object] = []
        self._num_bytes = 0

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.flags.writeable):
            self._num_bytes += value.nbytes
            if self._num_bytes > _MOST_BYTES:
                raise OverflowError("its arrays and tensors are too large to be copied")
            return None
        is_fixed = isinstance(value, np.ndarray | FunctionType | ModuleType | type)
        if not is_fixed and not type(value).__module__.startswith("pyarrow"):
            return None
        self.shared.append(value)
        return len(self.shared) - 1


class _Shared(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, index: int) -> object:
        return self._shared[index]


def _copied(value: object) -> Any:
    """Return a copy. Raises whatever the value's own methods raise."""
    file = io.BytesIO()
    pickler = _Sharing(file)
    pickler.dump(value)
    file.seek(0)
    return _Shared(file, pickler.shared).load()
