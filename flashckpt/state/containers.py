"""Named dicts, lists, tensors and random generators: kept where they are, their contents put back.

Owns nothing that is in them beyond tensors and plain values.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flashckpt.format.typed import LeafRef
from flashckpt.state import rng
from flashckpt.state.entry import Row
from flashckpt.state.filling import Filling, Saved, Settling
from flashckpt.state.leaves import Leaves, Place, Refresh, Sink
from flashckpt.state.naming import Owners
from flashckpt.state.references import references
from flashckpt.state.subclasses import can_make
from flashckpt.state.survey import survey
from flashckpt.state.tensors import described, fits

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque)


def is_container(target: object) -> bool:
    """Whether an object can be put back in place by its contents alone."""
    return type(target) in _CONTAINERS or isinstance(target, Tensor) or rng.is_generator(target)


class ContainerEntry:
    """One named dict, list, tensor or generator."""

    kind = "container"

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target = name, target
        self._root = {name: target}

    def walk(self, leaves: Leaves, owners: Owners) -> dict[str, Any]:
        return leaves.asking(self._values)

    def values(self, refresh: Refresh) -> dict[str, Any]:
        return self._values(refresh)

    def _values(self, sink: Sink) -> dict[str, Any]:
        place = Place("other", self.target, self._root, self.name)
        return {"kind": self.kind, "content": survey(self.target, self.name, place, sink)}

    def parameters(self) -> list[tuple[str, Tensor]]:
        return [(self.name, self.target)] if isinstance(self.target, Tensor) and self.target.is_leaf else []

    def references(self, value: dict[str, Any]) -> Iterator[tuple[str, LeafRef]]:
        return references(value["content"], self.name)

    def differences(self, value: dict[str, Any], saved: Saved, live: Leaves) -> list[Row]:
        content = value["content"]
        recorded = "tensor" if type(content) is LeafRef else type(content).__name__
        here = "tensor" if isinstance(self.target, Tensor) else type(self.target).__name__
        if recorded != here:
            return [(self.name, recorded, here)]
        rows: list[Row] = []
        if isinstance(self.target, Tensor) and self.name in saved.leaves:
            leaf = saved.leaves[self.name]
            if not fits(leaf, self.target):
                rows.append((self.name, described(leaf), described(self.target)))
        for name, ref in references(content, self.name):
            if not can_make(ref.about, None) and name not in live.refs:
                rows.append((name, str(ref.about["class"]), "a class that is not known here"))
        return rows

    def restore(self, value: dict[str, Any], filling: Filling, live: Leaves) -> None:
        if isinstance(self.target, Tensor):
            for name, leaf in live.named.items():
                if leaf.owner is self.target and leaf.kind == "other" and filling.holds(name):
                    filling.fill(name, leaf.tensor)
        else:
            Settling(filling, torch.device("cpu")).settle(value["content"], self.target, self.name)

    def finish(self, value: dict[str, Any], filling: Filling) -> None:
        """Nothing here is the user's own code."""
