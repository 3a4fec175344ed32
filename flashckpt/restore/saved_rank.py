"""The values of one rank of a step as they are put together with those of others: decoded, by full names.

Reads nothing and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flashckpt.format.typed import Hole, children, decode
from flashckpt.restore.state_names import short_names, state_name
from flashckpt.state.tree import NAMESPACE


class SavedRank:
    """The values of one rank of a step, decoded."""

    def __init__(self, rank: int, values: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        self.rank, self.renamed = rank, renamed
        self.values: dict[str, Any] = decode(dict(values))
        self.entries: dict[str, Any] = self.values["state"]["entries"]

    @cached_property
    def gradients(self) -> dict[str, tuple[str, Any]]:
        """By parameter: the kind of its gradient, and what is noted of it besides."""
        value = self.values["state"][NAMESPACE]
        pairs = zip(value["names"], value["kinds"], strict=True)
        return {name: (kind, value["exceptions"].get(name)) for name, kind in pairs}

    @cached_property
    def flat(self) -> dict[str, Any]:
        """What the parameters are that FSDP1 had laid out in one dimension, by name."""
        values = [value for value in self.entries.values() if value["kind"] == "module"]
        return {name: whole for value in values for name, whole in value.get("flat", {}).items()}

    @cached_property
    def states(self) -> dict[tuple[str, str], SavedState]:
        """By optimizer and full name of the parameter."""
        return {
            (name, full): state
            for name, value in self.entries.items()
            if value["kind"] == "optimizer"
            for full, state in self._states_of(name, value)
        }

    def _states_of(self, name: str, value: Mapping[str, Any]) -> Iterator[tuple[str, SavedState]]:
        short = short_names(name, value["params"], self.entries)
        order, scalars = [full for group in value["params"] for full in group], iter(value["scalars"])
        for index, number in zip(*value["state"], strict=True):
            schema, full = value["schemas"][number], order[index]
            own = [next(scalars) for _ in range(_holes(schema))]
            yield full, SavedState(state_name(name, short[full]), schema, own)


@dataclass(frozen=True, slots=True)
class SavedState:
    """What an optimizer has of one parameter: a schema with references, and what stands in its holes. Names
    of its leaves, in its rank's record, begin with `prefix`."""

    prefix: str
    schema: Any
    scalars: list[Any]


def _holes(schema: Any) -> int:
    return 1 if type(schema) is Hole else sum(_holes(item) for _, item in children(schema))
