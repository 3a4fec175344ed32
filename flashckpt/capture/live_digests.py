"""Digests of live tensors, where they are: the same numbers that stand in a snapshot."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.plan import local
from flashckpt.capture.torch_digests import bytes_of, torch_digests


def digest_tensors(tensors: Sequence[Tensor], threads: int) -> list[int]:
    """The digest of each tensor's bytes in row-major order. Reads every byte once; on a device it is waited
    for. Tensors there that are not row-major are made so, all at once: that takes their size in memory."""
    digests = array("Q", [_native.EMPTY_DIGEST]) * len(tensors)
    on_host: list[tuple[int, Tensor]] = []
    on_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        here = local(tensor.detach()).resolve_conj().resolve_neg().contiguous()
        if here.device.type == "cpu":
            on_host.append((index, here))
        else:
            on_device.setdefault(here.device, []).append((index, here))
    _digest_host(on_host, digests, threads)
    for device, leaves in on_device.items():
        found = _digest_device(device, [tensor for _, tensor in leaves])
        for (index, _), digest in zip(leaves, found, strict=True):
            digests[index] = digest
    return digests.tolist()


def _digest_host(leaves: list[tuple[int, Tensor]], digests: array[int], threads: int) -> None:
    found = array("Q", bytes(8 * len(leaves)))
    _native.digest_many(
        array("Q", [tensor.data_ptr() for _, tensor in leaves]),
        array("Q", [tensor.numel() * tensor.element_size() for _, tensor in leaves]),
        _native.address_of(found),
        threads,
    )
    for (index, _), digest in zip(leaves, found, strict=True):
        digests[index] = digest


def _digest_device(device: torch.device, leaves: list[Tensor]) -> list[int]:
    out = torch.empty(len(leaves), dtype=torch.int64, device=device)
    if device.type == "cuda":
        from flashckpt.capture.cuda import CudaTable

        with torch.cuda.device(device), torch.no_grad():
            CudaTable(device.index or 0, leaves, np.zeros(len(leaves), dtype=np.uint64)).run(out)
    else:
        sources = [bytes_of(leaf) for leaf in leaves]
        torch_digests(sources).into(sources, out)
    return [digest & (2**64 - 1) for digest in out.cpu().tolist()]
