"""What every kind of named object gives to the tree. Owns the seam and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from flashckpt.format.typed import LeafRef
from flashckpt.state.filling import Filling, Saved
from flashckpt.state.leaves import Leaves, Refresh
from flashckpt.state.naming import Owners

Row = tuple[str, str, str]
MISSING = "missing"


class StateEntry(Protocol):
    """One named object of the state."""

    name: str
    kind: str

    @property
    def target(self) -> object:
        """The object that was named."""

    def walk(self, leaves: Leaves, owners: Owners) -> dict[str, Any]:
        """Hand over all tensors; the values that go with them. Raises StateError."""

    def values(self, refresh: Refresh) -> dict[str, Any]:
        """The values alone, now. Raises Restructured if the tensors are others than at the walk."""

    def parameters(self) -> list[tuple[str, Tensor]]:
        """The parameters as of the last walk, with their full names: those that may have gradients."""

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        """The tensors that a saved value names, beside parameters and buffers, each by its place."""

    def differences(self, value: dict[str, Any], saved: Saved, live: Leaves) -> list[Row]:
        """What does not fit, `live` being a walk made just now; changes nothing."""

    def restore(self, value: dict[str, Any], filling: Filling, live: Leaves) -> None:
        """Fill what exists and make what does not."""

    def finish(self, value: dict[str, Any], filling: Filling) -> None:
        """Call what is the user's own (`load_state_dict`, `set_extra_state`), after all else is filled."""
