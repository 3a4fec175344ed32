"""State that an object can put in place only later than `load_state_dict`: the counters of a trainer, which
its own set-up would overwrite.

Owns that such state is compared, once it is in place, with what was saved. Calls nothing but `read` and
`put`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flashckpt.errors import StateError
from flashckpt.format.typed import SEQUENCES, children, encode_json

_SHOWN = 3


class Deferred(ABC):
    """What of a program changes and is neither a module nor an optimizer; restored in two steps.

    `load_state_dict` keeps what it is given in `pending`, and `state_dict` gives that back, until `apply`
    puts it in place. `pending` is None where nothing waits: on a fresh run, and after `apply`.
    """

    pending: dict[str, Any] | None = None

    @abstractmethod
    def read(self) -> dict[str, Any]:
        """The state now: nested plain values, tensors and generators' states, no objects of the program."""

    @abstractmethod
    def put(self, state: dict[str, Any]) -> None:
        """Put in place what `read` gave."""

    def state_dict(self) -> dict[str, Any]:
        return self.read() if self.pending is None else self.pending

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pending = state

    def apply(self) -> None:
        """Put in place what a resume has loaded, if it still waits. Raises StateError, with the names, where
        the state is not the saved one afterwards."""
        if self.pending is None:
            return
        state, self.pending = self.pending, None
        saved = {path: _mark(value) for path, value in _parts(state, "")}
        self.put(state)
        now = {path: _mark(value) for path, value in _parts(self.read(), "")}
        wrong = sorted(path for path in saved.keys() | now.keys() if saved.get(path) != now.get(path))
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise StateError(
                f"{type(self).__name__}: {', '.join(wrong[:_SHOWN])}{more} differ from the checkpoint "
                "after they were restored. Training from here would not continue the run, and nothing was "
                "captured; what is saved is whole. Report this with the versions of the packages."
            )


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Each value that holds no others, and each container's type and length, with its path."""
    if isinstance(value, (Mapping, *SEQUENCES)):
        yield path, f"{type(value).__name__} of {len(value)}"
        for key, item in children(value):
            yield from _parts(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _mark(value: Any) -> object:
    """Equal for values that are bit for bit the same."""
    if isinstance(value, Tensor):
        held = value.detach()
        held = held.to_local() if hasattr(held, "to_local") else held
        content = held.cpu().contiguous().view(torch.uint8).numpy().tobytes() if held.dim() else held.item()
        return str(value.dtype), tuple(value.shape), content if held.dim() else repr(content)
    return encode_json(value)
