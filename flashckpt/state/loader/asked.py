"""Loaders that keep their own state and are asked for it at every boundary: torchdata's StatefulDataLoader,
an iterable data set with `state_dict`, any iterable with `state_dict` and `load_state_dict`.

Owns the order in which state and random numbers are put back. Never looks into a state, but for its tensors.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from flashckpt.errors import DamagedError, StateError
from flashckpt.state.loader.base import EpochSource
from flashckpt.state.loader.generators import Generators
from flashckpt.state.loader.position import Position

_TAG = "flashckpt.array"


class AskedSource(EpochSource):
    """`kind` of its positions is "asked". `makes_ahead`: the loader's `state_dict` makes its iterator, as
    torchdata's does, and draws random numbers for it."""

    kind = "asked"

    def __init__(self, loader: Any, *, makes_ahead: bool = False) -> None:
        super().__init__(loader, Generators({"loader": loader}))
        self._makes_ahead = makes_ahead
        # The state between two epochs, and whether the earlier one was left before its end.
        self._between: Any = None
        self._left = False
        self._loaded_between = False

    def _open(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._loader)
        if not self._loaded_between:
            return iterator
        # Some loaders take the state of an epoch's end for the next epoch's beginning, and some give the
        # nothing that is left of the old one first.
        self._loaded_between = False
        try:
            first = next(iterator)
        except StopIteration:
            return iter(self._loader)
        return itertools.chain((first,), iterator)

    def _reopen(self, position: Position) -> None:
        assert position.start is not None
        self._restore(position.start)
        self._loader.load_state_dict(from_plain(position.parts["state"]))
        self._iterator = iter(self._loader)
        _draw_skipped(self._iterator)

    def _load(self, position: Position) -> None:
        if position.parts.keys() != {"state", "left"}:
            raise DamagedError(
                "The loader's position in the checkpoint lacks its state. Resume from an older step."
            )
        state = position.parts["state"]
        if state is None or (position.start is not None and not position.over):
            return
        self._loader.load_state_dict(from_plain(state))
        self._between, self._left = state, position.parts["left"]
        self._loaded_between = not self._left
        if self._left:
            # The rest of an epoch that was left: asked for and not taken.
            iter(self._loader)
        elif self._makes_ahead:
            # Draws what it draws now, before the random numbers are put back.
            self._loader.state_dict()

    def _ended(self) -> None:
        self._between, self._left = to_plain(self._loader.state_dict()), False
        self._iterator = None

    def _leave(self) -> None:
        if self._iterator is not None:
            self._between, self._left = to_plain(self._loader.state_dict()), True
        self._iterator = None

    def _is_last(self) -> bool:
        # A state of its own may look the same after the last batch and before the first one.
        if self._iterator is None or self._makes_ahead:
            return False
        if isinstance(self._loader, DatasetState):
            return bool(getattr(getattr(self._iterator, "_dataset_fetcher", None), "ended", False))
        return self._taken == self._length

    def _parts(self, over: bool) -> dict[str, Any]:
        if self._iterator is None:
            return {"state": self._between, "left": self._left}
        return {"state": to_plain(self._loader.state_dict()), "left": False}


class DatasetState:
    """A DataLoader without workers whose iterable data set keeps its own state, as one such loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = copy.copy(loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> Any:
        return self._loader.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._loader.dataset.load_state_dict(state)


def _draw_skipped(iterator: Any) -> None:
    """torchdata skips the batches before the position when it fetches the next one, that is after the
    random numbers were put back. A shuffle would then be another one: skip now."""
    skipping = getattr(iterator, "_sampler_iter", None)
    if isinstance(skipping, itertools.islice):
        draws = iter(iterator._index_sampler)
        for _ in range(iterator._sampler_iter_yielded):
            next(draws, None)
        iterator._sampler_iter = draws


def to_plain(value: Any, location: str = "loader") -> Any:
    """A copy of a state without tensors and arrays. Raises StateError for what cannot be saved."""
    if type(value) in (dict, OrderedDict):
        return {key: to_plain(item, f"{location}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, f"{location}[{index}]") for index, item in enumerate(value))
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.dtype == torch.bfloat16:
            raise _refused(value, location)
        return {_TAG: "torch", **_array_plain(value.detach().cpu().numpy())}
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise _refused(value, location)
        return {_TAG: "numpy", **_array_plain(value)}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise _refused(value, location)


def from_plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(from_plain(item) for item in value)
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: from_plain(item) for key, item in value.items()}
    array = np.frombuffer(value["bytes"], dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return torch.from_numpy(array) if value[_TAG] == "torch" else array


def _array_plain(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": list(array.shape), "bytes": array.tobytes()}


def _refused(value: object, location: str) -> StateError:
    return StateError(
        f"The loader's state holds a {type(value).__name__} at {location}, which cannot be saved exactly. "
        "Nothing was saved. Keep numbers, strings, bytes, lists, dictionaries, arrays and tensors there.",
        location=location,
    )
