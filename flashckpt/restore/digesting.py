"""Digests of live tensors, where they are: the same numbers that stand in a snapshot."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.arena import words_of
from flashckpt.capture.digests import LeafDigests
from flashckpt.capture.plan import local


def digest_tensors(tensors: Sequence[Tensor], threads: int) -> list[int]:
    """The digest of each tensor's bytes in row-major order. Reads every byte once; on a device with
    torch's own operations, waiting for them at the end."""
    digests = array("Q", [_native.EMPTY_DIGEST]) * len(tensors)
    on_host: list[tuple[int, Tensor]] = []
    on_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        here = local(tensor.detach())
        if here.device.type == "cpu":
            on_host.append((index, here.resolve_conj().resolve_neg().contiguous()))
        else:
            on_device.setdefault(here.device, []).append((index, here))
    _digest_host(on_host, digests, threads)
    for device, leaves in on_device.items():
        _digest_device(device, leaves, digests, threads)
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


def _digest_device(
    device: torch.device, leaves: list[tuple[int, Tensor]], digests: array[int], threads: int
) -> None:
    largest = max(tensor.numel() * tensor.element_size() for _, tensor in leaves)
    kernels = LeafDigests(lambda size: torch.empty(size, dtype=torch.uint8, device=device), largest)
    out = torch.empty(len(leaves), dtype=torch.int64, device=device)
    through_host = []
    for place, (index, tensor) in enumerate(leaves):
        words = words_of(tensor.contiguous())
        if words is None:  # its bytes are no whole words: small, and digested on the host
            through_host.append((index, tensor.cpu().contiguous()))
        else:
            kernels.into(words, out[place])
    found = out.cpu().tolist()
    for place, (index, _) in enumerate(leaves):
        digests[index] = found[place] & (2**64 - 1)
    _digest_host(through_host, digests, threads)
