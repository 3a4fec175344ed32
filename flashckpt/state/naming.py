"""Names: of what is in a module, without the layers that wrappers put around it, and of parameters.

Owns the rule by which a parameter is called in an optimizer's state: by the key under which the module
that owns it holds it, else by its group and index.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_WRAPPED = {
    "_orig_mod": "OptimizedModule",  # torch.compile
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "CheckpointWrapper",
}


def step_name(parent: nn.Module, child: str) -> str:
    """The part of a name that a child adds: nothing where the parent only wraps it."""
    if child in _WRAPPED and any(kind.__name__ == _WRAPPED[child] for kind in type(parent).__mro__):
        return ""
    if child == "module" and isinstance(parent, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return ""
    return child


class Owners:
    """Which attached module owns a parameter, and under which key."""

    def __init__(self) -> None:
        self._owned: dict[int, tuple[str, str]] = {}
        self._held: list[Tensor] = []

    def own(self, parameter: Tensor, entry: str, key: str) -> None:
        """The first key under which a parameter was found counts."""
        if id(parameter) not in self._owned:
            self._owned[id(parameter)] = (entry, key)
            self._held.append(parameter)

    def of(self, parameter: Tensor) -> tuple[str, str] | None:
        """(entry, key) of a parameter, None where no attached module owns it."""
        return self._owned.get(id(parameter))

    def full_name(self, parameter: Tensor, optimizer: str, group: int, index: int) -> str:
        """The name of a parameter in the whole state."""
        owner = self.of(parameter)
        return f"{optimizer}.params.{unowned(group, index)}" if owner is None else f"{owner[0]}.{owner[1]}"

    def short_names(self, groups: list[dict[str, object]]) -> list[list[str]]:
        """Names of an optimizer's parameters inside its own state, by group. The entry's name is left
        out where one module owns all that are owned."""
        parameters = [list(_parameters(group)) for group in groups]
        found = {owner[0] for group in parameters for p in group if (owner := self.of(p)) is not None}
        names = []
        for number, group in enumerate(parameters):
            names.append([self._short(p, number, i, len(found) > 1) for i, p in enumerate(group)])
        return names

    def _short(self, parameter: Tensor, group: int, index: int, with_entry: bool) -> str:
        owner = self.of(parameter)
        if owner is None:
            return unowned(group, index)
        return f"{owner[0]}.{owner[1]}" if with_entry else owner[1]


def unowned(group: int, index: int) -> str:
    """A parameter that no attached module owns."""
    return f"group{group}[{index}]"


def _parameters(group: dict[str, object]) -> list[torch.Tensor]:
    return group["params"]  # type: ignore[return-value]
