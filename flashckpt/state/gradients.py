"""Gradients between two iterations: those still to be used are leaves, of the others only the kind is kept.

Owns the mask of kinds, one character a parameter, and the namespace `gradients`. A used-up gradient comes
back as zeros of its kind: with zero_grad(set_to_none=False) an idle parameter still decays, one without
a gradient does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashckpt.errors import DamagedError
from flashckpt.format.layout import Leaf
from flashckpt.format.typed import Encoded, LeafRef
from flashckpt.state.filling import Filling
from flashckpt.state.leaves import Leaves, Place, Refresh, Restructured, Sink
from flashckpt.state.objects import MISSING, Row
from flashckpt.state.tensors import DTYPE_NAMES, make, strides

NAMESPACE = "gradients"
UsedUp = Callable[[Any, Tensor], bool]

# none · used up: dense, or sparse with 1-9 sparse dimensions · still to be used: dense, sparse, coalesced
NONE, ZEROS, LEAF, SPARSE, COALESCED = "-", "d", "L", "S", "C"
_LEAVES = frozenset((LEAF, SPARSE, COALESCED))


def kind_of(parameter: Tensor, gradient: Tensor | None, used_up: UsedUp) -> str:
    """The character that stands for a gradient."""
    if gradient is None:
        return NONE
    used = used_up(parameter, gradient)
    if gradient.layout is torch.strided:
        return ZEROS if used else LEAF
    if gradient.layout is not torch.sparse_coo:
        return LEAF  # refused, with its name, when it is taken
    if used:
        return str(gradient.sparse_dim())
    return COALESCED if gradient.is_coalesced() else SPARSE


class Gradients:
    """The gradients of all parameters that one walk found."""

    def __init__(self, parameters: list[tuple[str, Tensor]]) -> None:
        unique = {id(parameter): (name, parameter) for name, parameter in reversed(parameters)}
        found = list(reversed(unique.values()))
        self._names = [name for name, _ in found]
        self._parameters = [parameter for _, parameter in found]
        self._record = Encoded(self._names)
        self._exceptions: dict[str, Any] = {}
        self.kinds = ""

    def walk(self, leaves: Leaves, used_up: UsedUp) -> dict[str, Any]:
        """Hand over the gradients still to be used; the mask of all."""
        self.kinds, self._exceptions = self._kinds_now(used_up), {}
        for name, parameter, kind in zip(self._names, self._parameters, self.kinds, strict=True):
            if kind in _LEAVES:
                self._take(leaves, name, parameter, kind)
            elif kind == ZEROS and (layout := _unusual_layout(parameter)) is not None:
                self._exceptions[name] = layout
        return self._value(self.kinds)

    def values(self, refresh: Refresh, used_up: UsedUp | None) -> dict[str, Any]:
        """The mask, read again with `used_up`. Raises Restructured if other gradients are leaves now."""
        kinds = self.kinds if used_up is None else self._kinds_now(used_up)
        if kinds != self.kinds and _leaves_in(kinds) != _leaves_in(self.kinds):
            raise Restructured(NAMESPACE)
        for index, kind in _leaves_in(kinds):
            if self._parameters[index].grad is None:
                raise Restructured(self._names[index])
            self._take(refresh, self._names[index], self._parameters[index], kind)
        return self._value(kinds)

    def _value(self, kinds: str) -> dict[str, Any]:
        return {"names": self._record, "kinds": kinds, "exceptions": self._exceptions}

    def _take(self, sink: Sink, name: str, parameter: Tensor, kind: str) -> None:
        gradient = parameter.grad
        assert gradient is not None
        full = f"{NAMESPACE}.{name}"
        if kind == LEAF:
            ref = sink.add(full, gradient, Place("gradient", parameter, parameter, "grad", parameter.device))
            if ref.about:
                self._exceptions[name] = ref
            return
        # A sparse tensor hands out its parts anew each time: there is no place to watch.
        sink.add(f"{full}.indices", gradient._indices(), Place("gradient", parameter, home=parameter.device))
        sink.add(f"{full}.values", gradient._values(), Place("gradient", parameter, home=parameter.device))

    def _kinds_now(self, used_up: UsedUp) -> str:
        return "".join(
            [
                NONE if (gradient := parameter.grad) is None else kind_of(parameter, gradient, used_up)
                for parameter in self._parameters
            ]
        )

    def differences(self, value: dict[str, Any]) -> list[Row]:
        """Parameters whose gradient the snapshot holds and that are not here."""
        known = set(self._names)
        pairs = zip(value["names"], value["kinds"], strict=True)
        return [(name, "gradient", MISSING) for name, kind in pairs if kind != NONE and name not in known]

    def restore(self, value: dict[str, Any], filling: Filling) -> None:
        """Give every parameter the gradient it had, or zeros of its kind, or none."""
        by_name = dict(zip(self._names, self._parameters, strict=True))
        for name, kind in zip(value["names"], value["kinds"], strict=True):
            if name in by_name:
                parameter = by_name.pop(name)
                parameter.grad = _gradient(name, kind, parameter, value["exceptions"].get(name), filling)
        for parameter in by_name.values():
            parameter.grad = None


def _gradient(name: str, kind: str, parameter: Tensor, exception: Any, filling: Filling) -> Tensor | None:
    if kind == NONE:
        return None
    if kind == ZEROS:
        return _zeros(parameter, exception)
    full = f"{NAMESPACE}.{name}"
    if kind == LEAF:
        ref = exception if isinstance(exception, LeafRef) else LeafRef(full)
        return filling.place(ref, full, parameter.grad, parameter.device, parameter)
    if kind in (SPARSE, COALESCED):
        indices = filling.place(LeafRef(full), f"{full}.indices", None, parameter.device)
        values = filling.place(LeafRef(full), f"{full}.values", None, parameter.device)
        coalesced = kind == COALESCED
        return torch.sparse_coo_tensor(
            indices, values, parameter.shape, is_coalesced=coalesced, check_invariants=True
        )
    if not kind.isdigit() or not 0 < int(kind) <= parameter.dim():
        raise DamagedError(f"The snapshot holds a gradient of an unknown kind for {name}. It cannot be used.")
    indices = torch.empty((int(kind), 0), dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty((0, *parameter.shape[int(kind) :]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)


def _zeros(parameter: Tensor, exception: Any) -> Tensor:
    if exception is not None:
        dtype, stride = exception
        leaf = Leaf(name="", dtype=dtype, shape=tuple(parameter.shape), stride=stride)
        return make(leaf, parameter.device).zero_()
    return torch.zeros_like(parameter, requires_grad=False)


def _leaves_in(kinds: str) -> list[tuple[int, str]]:
    return [(index, kind) for index, kind in enumerate(kinds) if kind in _LEAVES]


def _unusual_layout(parameter: Tensor) -> tuple[str, tuple[int, ...] | None] | None:
    """Dtype and strides of a gradient that zeros_like of its parameter would not give."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
        return None
    return DTYPE_NAMES[gradient.dtype], strides(gradient)
