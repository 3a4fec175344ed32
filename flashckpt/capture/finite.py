"""The search for parameters that are no longer finite, in sealed snapshots.

Reads host memory, a sample of some leaves for each call, from a background thread: the training thread and
the devices never wait for it. Never changes or refuses a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import torch

from flashckpt.capture.plan import Plan
from flashckpt.capture.slot_writer import SlotWriter
from flashckpt.errors import DamagedError
from flashckpt.memory.slot import Sealed, Slot

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_LEAVES = 32
_ELEMENTS = 1024


class FiniteCheck:
    """writers: slot name -> writer. Each call continues where the last one has ended: the leaves in turn, and
    in each turn other elements of a leaf."""

    def __init__(self, writers: Mapping[str, SlotWriter]) -> None:
        self._writers = writers
        self._next = self._left = 0
        self._checked: Sealed | None = None
        self._plan_id, self._leaves = -1, list[int]()

    def poll(self, slot: Slot, sealed: Sealed, *, all_leaves: bool = False) -> str | None:
        """Return a trainable parameter of this snapshot with an element that is not finite, or None.
        all_leaves: sample all, and not only the next few. The caller keeps the slot mapped."""
        writer = self._writers.get(slot.name)
        plan = writer.plan if writer is not None else None
        if writer is None or plan is None or writer.generation != sealed.generation:
            return None
        if plan.plan_id != self._plan_id:
            self._plan_id = plan.plan_id
            self._leaves = [index for index in range(plan.first_left) if _is_trained(plan, index)]
        leaves = self._leaves
        if sealed != self._checked:
            self._checked, self._left = sealed, len(leaves)
        count = len(leaves) if all_leaves else min(self._left, _LEAVES)
        first, self._next, self._left = self._next, self._next + count, self._left - count
        # Not torch.frombuffer: it copies the image to a default device that the user has set.
        image = torch.from_numpy(np.frombuffer(slot.image_view, dtype=np.uint8))
        for turn in range(first, first + count):
            index = leaves[turn % len(leaves)]
            if not _is_finite(image, plan, index, turn // len(leaves)):
                with suppress(DamagedError):
                    # Else the slot has been written meanwhile, and these bytes may be of another leaf.
                    return plan.leaves[index].name if slot.sealed() == sealed else None
        return None


def _is_trained(plan: Plan, index: int) -> bool:
    live, dtype = plan.lives[index], plan.tensors[index].dtype
    is_trained = live.kind == "parameter" and live.tensor.requires_grad
    return is_trained and dtype in _DTYPES and bool(plan.sizes[index])


def _is_finite(image: torch.Tensor, plan: Plan, index: int, turn: int) -> bool:
    start, dtype = int(plan.offsets[index]), plan.tensors[index].dtype
    elements = image[start : start + int(plan.sizes[index])].view(dtype)
    first = turn * _ELEMENTS % len(elements)
    return bool(elements[first : first + _ELEMENTS].isfinite().all())
