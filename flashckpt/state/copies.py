"""Many fills at once: plain host tensors are copied by native threads in one pass, not one by one.

One `copy_` a tensor pays for starting and joining torch's threads each time, which on a busy machine
costs ten times the copy. Owns the list of copies that are still to be made.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.state.tensors import fill


class DeferredCopies:
    """Copies from the tensors of a snapshot into live ones: put off until `make`, at once after it."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._puts_off = True

    def add(self, live: Tensor, source: Tensor) -> None:
        """Have `live` filled with `source`. What is not a plain host tensor is filled at once."""
        if (
            self._puts_off
            and _is_plain(live)
            and _is_plain(source)
            and live.numel()
            and live.dtype == source.dtype
        ):
            self._pairs.append((live, source))
        else:
            fill(live, source)

    def make(self) -> None:
        """Make every copy that was put off."""
        pairs, self._pairs, self._puts_off = self._pairs, [], False
        if not pairs:
            return
        digests = array("Q", bytes(8 * len(pairs)))
        _native.copy_digest(
            array("Q", [source.data_ptr() for _, source in pairs]),
            array("Q", [live.data_ptr() for live, _ in pairs]),
            array("Q", [live.numel() * live.element_size() for live, _ in pairs]),
            _native.address_of(digests),
            torch.get_num_threads(),
        )
        for live, _ in pairs:
            torch.autograd.graph.increment_version(live)


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
    )
