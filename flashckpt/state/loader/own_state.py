"""A loader's own state (`state_dict`) on its way into a snapshot and back: the typed encoding of all state,
and tensors, which are small here and stand among the values instead of being leaves.

Owns the comparison of what is kept with what the loader gave. Never changes what it is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flashckpt.state.adapters  # noqa: F401  what torch and NumPy add to the encoding
from flashckpt.format.typed import Encoded, checked, decode_json, register
from flashckpt.state.leaves import Place
from flashckpt.state.survey import rebuild, resequence, survey
from flashckpt.state.tensors import DTYPE_NAMES, TORCH_DTYPES, bits, check, refuse


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's dtype, shape, device and bytes, row-major. Equal if all of them are."""

    dtype: str
    shape: tuple[int, ...]
    device: str
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor, location: str) -> StoredTensor:
        """Raises StateError, with its path, for a tensor that is more than these four."""
        check(tensor, location)
        if type(tensor) is not Tensor or tensor.requires_grad:
            refuse(location, f"is a {type(tensor).__name__} with a gradient's history", "Detach it.")
        raw = bits(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
        device = str(tensor.device)
        return cls(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), device, raw.numpy().tobytes())

    def tensor(self) -> Tensor:
        """A tensor of its own; on the CPU where its device is none that is there."""
        made = torch.empty(self.shape, dtype=TORCH_DTYPES[self.dtype], device="cpu")
        if self.data:
            raw = np.frombuffer(self.data, dtype=np.uint8).copy()
            # Not torch.frombuffer: a default device that the user set would move it there.
            made = torch.from_numpy(raw).view(made.dtype).reshape(self.shape)
        device = torch.device(self.device)
        there = device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())
        return made.to(device) if there else made


def _plain(stored: StoredTensor) -> list[object]:
    return [stored.dtype, list(stored.shape), stored.device, stored.data]


def _back(plain: Any) -> StoredTensor:
    dtype, shape, device, data = plain
    stored = StoredTensor(dtype, tuple(shape), device, data)
    expected = torch.Size(shape).numel() * TORCH_DTYPES[dtype].itemsize
    if type(data) is not bytes or len(data) != expected or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a tensor of another size")
    torch.device(device)
    return stored


register(StoredTensor, "torch.Tensor", _plain, _back)


class _Stored:
    """Where the walk over a loader's state hands its tensors to."""

    def add(self, name: str, tensor: Tensor, place: Place) -> Any:
        return StoredTensor.of(tensor, name)

    def guard(self, container: Sized) -> None: ...


def take(state: object, location: str) -> Encoded:
    """A copy of a loader's state that shares nothing with it, as it will come back, and its text: a state may
    be large, and is written as it was compared. Raises StateError, with the path, for what would come back as
    anything else."""
    return checked(survey(state, location, Place("other", None), _Stored()), location)


def taken(saved: Any) -> Encoded:
    """What `take` gave, also where it has been in a snapshot since."""
    return saved if type(saved) is Encoded else Encoded(saved)


def give(taken: Encoded) -> Any:
    """What `take` took, for the loader to keep: another copy each time."""
    return _with_tensors(decode_json(taken.data))


def _with_tensors(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return value.tensor()
    if isinstance(value, dict):
        if not any(map(_may_hold, value.values())):
            return value
        return rebuild(value, [(key, _with_tensors(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple, deque)):
        if not any(map(_may_hold, value)):
            return value
        return resequence(value, [_with_tensors(item) for item in value])
    return value


def _may_hold(value: object) -> bool:
    return value is not None and type(value) not in (bool, int, float, str, bytes)
