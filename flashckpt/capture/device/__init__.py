"""Devices behind one small protocol: today CUDA. State on any other is refused by its walk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from flashckpt.capture.device.base import Device


def devices_of(tensors: Iterable[Tensor], streams: Sequence[object] = ()) -> list[Device]:
    """One Device for each accelerator that holds some of these tensors, in the order of their indexes.
    `streams` are further ones that write the state."""
    indexes = sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
    if not indexes:
        return []
    from flashckpt.capture.device.cuda import CudaDevice

    return [CudaDevice(index, streams) for index in indexes]
