"""The devices that hold leaves: the interface that a capture needs (`Device`), and its implementation for
CUDA.

A device has a compute stream (the current stream of the training thread) and a separate path for copies to
the host. Each call enqueues a bounded number of operations, independent of the number of leaves. Only
`synchronize`, `StreamMark.wait` and the documented calls of `Copying` wait.

On CUDA, buffers come from torch's pool for the compute stream. Native code copies to the host, with its own
stream and thread, in relaxed capture mode, so that it does not invalidate a graph that is being captured.
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.plan import Addresses, local
from flashckpt.memory.memory_budget import NO_NODE, node_of_pci

log = logging.getLogger(__name__)


# Larger pieces would delay the loop's own small reads (`loss.item()`) behind gigabytes.
PIECE_BYTES = 32 << 20


Copies = Addresses
"""Copies of memory, in order: rows of source, destination and bytes."""


class StreamMark(Protocol):
    """A point in the compute stream, set by `Device.mark`."""

    def wait(self) -> None:
        """Wait on the host; used for leaves in host memory that the device writes."""


class Copying(Protocol):
    """Running copies to the host. A Sealer waits for `handle` until all copies are made or one has failed.
    After that, none of them writes any more."""

    @property
    def handle(self) -> int: ...

    def hold_writers(self) -> None:
        """Let each stream that may write state, not the host, wait for the first copies. The host waits until
        these are enqueued, which is when all but the last 128 MiB of them are made."""

    def wait(self) -> None:
        """Wait on the host for all copies. Raises RuntimeError if one has failed."""


class DigestTable(Protocol):
    """Leaves that are digested, and cloned on the device, together. Made with a plan, used at each
    boundary."""

    def run(self, out: Tensor) -> None:
        """Copy the leaves with a destination, and write the digest of each leaf into `out` (int64, one for
        each leaf). To be called by `Device.launch`."""


class Device(Protocol):
    """One accelerator that holds leaves of the state."""

    name: str
    failure: str
    """The driver's reason if `capturing` found that the device has failed, else "". After such a failure (an
    assert, an illegal address), each further call of this process on the device fails."""

    @property
    def numa_node(self) -> int:
        """The NUMA node to which the device is attached; NO_NODE if there is only one, or if unknown."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is on this device, and the device can digest it. torch copies other tensors of
        the device, and waits for the copies."""

    def writes_to(self, tensor: Tensor) -> bool:
        """Whether the device's streams write a tensor asynchronously that the device does not own: in
        page-locked host memory, or on a device that cannot digest it."""

    def launch(self, work: Callable[[], None]) -> None:
        """Enqueue torch operations. The inputs of `work` must not change until these have run."""

    def make_table(self, leaves: Sequence[Tensor], destinations: Addresses) -> DigestTable:
        """Return a table of row-major tensors. destinations: the device address to which each is copied; 0
        for no copy."""

    def new_mark(self, *, timing: bool = False) -> StreamMark: ...

    def mark(self, mark: StreamMark) -> None: ...

    def join_writers(self) -> None:
        """Let the compute stream wait for each stream that may write state: current, default, named ones."""

    def hold_writers(self, mark: StreamMark) -> None:
        """Let each stream that may write state wait for the mark."""

    def copy_to_host(self, copies: Copies, num_first: int, after: StreamMark) -> Copying:
        """Begin copies after the mark, in pieces that end at multiples of PIECE_BYTES of the host address.
        The first `num_first` copies read live leaves. Both memories must stay valid until the copies have
        ended."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return a uint8 tensor in page-locked host memory."""

    def register(self, mapping: _native.Mapping) -> None:
        """Page-lock host memory until it is unmapped, so that copies into it are asynchronous. If the driver
        refuses, copies are slower; warns once."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a uint8 tensor from the allocator of the loop's own tensors. Raises
        torch.OutOfMemoryError."""

    def capturing(self) -> bool:
        """Whether a graph is being captured on a stream that may write state, or the device has failed. Then
        no other call to the device is allowed. Never raises, since hooks and boundaries call it: PyTorch
        raises the failure at the loop's next call."""

    def elapsed_s(self, start: StreamMark, end: StreamMark) -> float | None:
        """Return the seconds between two marks made with timing; None before both are passed."""

    def synchronize(self) -> None:
        """Wait on the host for all work of the device."""

    def close(self) -> None: ...


# ---- CUDA


class CudaMark:
    """A CUDA event; recorded by `CudaDevice.mark`."""

    def __init__(self, *, timing: bool) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopying:
    """Copies to the host that a native thread enqueues."""

    def __init__(self, copies: _native.CudaCopies, ticket: int, writers: Callable[[], array[int]]) -> None:
        self._copies, self._ticket, self._writers = copies, ticket, writers

    @property
    def handle(self) -> int:
        return self._copies.handle

    def hold_writers(self) -> None:
        self._copies.hold(self._ticket, self._writers())

    def wait(self) -> None:
        self._copies.wait(self._ticket)


def devices_of(tensors: Iterable[Tensor], streams: Sequence[object] = ()) -> list[Device]:
    """Return one Device for each accelerator that holds some of these tensors, by index. streams: further
    streams that write the state. A walk of the state refuses accelerators other than CUDA."""
    indexes = sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
    return [CudaDevice(index, streams) for index in indexes]


class CudaDevice:
    """One CUDA device. streams: further streams (torch.cuda.Stream) that write state."""

    def __init__(self, index: int, streams: Sequence[object] = ()) -> None:
        self.index = index
        self.name, self.failure = f"cuda:{index}", ""
        self._device = torch.device("cuda", index)
        self._streams: list[Any] = [each for each in streams if getattr(each, "device", None) == self._device]
        self._copies = _native.CudaCopies(index, PIECE_BYTES)
        self._has_warned = False
        why_no_kernel(index)  # loads the CUDA module now, not at a boundary

    @functools.cached_property
    def numa_node(self) -> int:
        try:
            return node_of_pci(*_native.cuda_pci_address(self.index))
        except RuntimeError:
            return NO_NODE

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self._device and why_no_kernel(self.index) == ""

    def writes_to(self, tensor: Tensor) -> bool:
        if tensor.device.type == "cpu":
            return tensor.is_pinned()
        return tensor.device == self._device and not self.owns(tensor)

    # ---- on the compute stream

    def launch(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self._device), torch.no_grad():
            work()

    def make_table(self, leaves: Sequence[Tensor], destinations: Addresses) -> CudaTable:
        with torch.cuda.device(self._device), torch.no_grad():
            return CudaTable(self.index, leaves, destinations)

    def new_mark(self, *, timing: bool = False) -> CudaMark:
        return CudaMark(timing=timing)

    def mark(self, mark: StreamMark) -> None:
        _event(mark).record(torch.cuda.current_stream(self._device))

    def join_writers(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        for other in self._writers():
            if other != stream:
                stream.wait_stream(other)

    def hold_writers(self, mark: StreamMark) -> None:
        for stream in self._writers():
            stream.wait_event(_event(mark))

    # ---- to the host

    def copy_to_host(self, copies: Copies, num_first: int, after: StreamMark) -> CudaCopying:
        sources, destinations, sizes = (column.data for column in np.ascontiguousarray(copies.T))
        ticket = self._copies.submit(sources, destinations, sizes, num_first, _event(after).cuda_event)
        return CudaCopying(self._copies, ticket, self._writer_handles)

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def register(self, mapping: _native.Mapping) -> None:
        try:
            mapping.register(self.index)
        except RuntimeError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "Some of the host memory for snapshots stays pageable: %s. Snapshots are as safe; copies "
                    "into that memory are slower (about 15 instead of 50 GB/s). The driver or a virtual "
                    "machine sets the limit, not `ulimit -l`; the kernel's log (dmesg) may show the reason. "
                    "Options(slots=2) needs less memory.", error,
                )  # fmt: skip

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    # ---- queries

    def capturing(self) -> bool:
        try:
            found = _native.cuda_capturing(self._writer_handles(), self.index)
        except RuntimeError as error:
            self.failure = str(error)
            return True
        self.failure = ""
        return found

    def elapsed_s(self, start: StreamMark, end: StreamMark) -> float | None:
        # Not by torch: outside of relaxed mode, a query invalidates a graph that another thread captures.
        return _native.cuda_elapsed_s(_event(start).cuda_event, _event(end).cuda_event, self.index)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._copies.close()

    def _writers(self) -> list[Any]:
        """Return the distinct streams that may write state."""
        current = torch.cuda.current_stream(self._device)
        default = torch.cuda.default_stream(self._device)
        return list(dict.fromkeys([current, default, *self._streams]))

    def _writer_handles(self) -> array[int]:
        return array("Q", [stream.cuda_stream for stream in self._writers()])


def _event(mark: StreamMark) -> Any:
    assert isinstance(mark, CudaMark)
    return mark.event


def digest_tensors(tensors: Sequence[Tensor], threads: int) -> list[int]:
    """Return the digest of each tensor's bytes in row-major order. Reads each byte once; waits for devices.
    Makes row-major copies of all other tensors at once, which needs their size in memory."""
    digests = np.full(len(tensors), _native.EMPTY_DIGEST, dtype=np.uint64)
    leaves = [local(tensor.detach()).resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, leaf in enumerate(leaves):
        by_device.setdefault(leaf.device, []).append(index)
    for device, indexes in by_device.items():
        here = [leaves[index] for index in indexes]
        of_device = _digest_host if device.type == "cpu" else _digest_device
        digests[indexes] = of_device(here, threads)
    return [int(digest) for digest in digests]


def _digest_host(leaves: Sequence[Tensor], threads: int) -> Addresses:
    found: Addresses = np.empty(len(leaves), dtype=np.uint64)
    sources = array("Q", [leaf.data_ptr() for leaf in leaves])
    sizes = array("Q", [leaf.nbytes for leaf in leaves])
    _native.digest_many(sources, sizes, _native.address_of(found.data), threads)
    return found


def _digest_device(leaves: Sequence[Tensor], threads: int) -> Sequence[int] | Addresses:
    device = leaves[0].device
    if why_no_kernel(device.index or 0):
        return [int(_digest_host([leaf.cpu()], threads)[0]) for leaf in leaves]
    out = torch.empty(len(leaves), dtype=torch.int64, device=device)
    with torch.cuda.device(device), torch.no_grad():
        CudaTable(device.index or 0, leaves, np.zeros(len(leaves), dtype=np.uint64)).run(out)
    found: Addresses = out.cpu().numpy().view(np.uint64)
    return found


class CudaTable:
    """Row-major tensors of one device and their destinations (0 for no copy), copied and digested in one
    launch. To be made and run on the current stream, one run after another."""

    def __init__(self, index: int, leaves: Sequence[Tensor], destinations: Addresses) -> None:
        self._index, self._count = index, len(leaves)
        self._entries = _uploaded(index, leaves, destinations)

    def run(self, out: Tensor) -> None:
        """Copy the leaves and write their digests to `out`: int64, contiguous, one for each leaf."""
        stream = torch.cuda.current_stream(self._index).cuda_stream
        _native.cuda_digest_launch(stream, self._entries.data_ptr(), self._count, out.data_ptr(), self._index)


@cache
def why_no_kernel(index: int) -> str:
    """Return "" if the kernel can be used on this device, else the reason, which is logged once."""
    reason = _native.cuda_digests_usable(index)
    if reason:
        log.warning(
            "The kernel that copies and digests cannot be used on cuda:%d: %s. Snapshots are as safe without "
            "it: at each snapshot the loop waits while torch copies the state to the host, where it is "
            "digested.", index, reason,
        )  # fmt: skip
    return reason


def _uploaded(index: int, leaves: Sequence[Tensor], destinations: Addresses) -> Tensor:
    """Return the entries of a table in device memory, uploaded on the current stream. The host does not wait:
    torch keeps the page-locked source until it was read."""
    sources = array("Q", [leaf.data_ptr() for leaf in leaves])
    sizes = array("Q", [leaf.numel() * leaf.element_size() for leaf in leaves])
    entries = bytearray(_native.cuda_digest_table(sources, destinations.data, sizes))
    source = torch.frombuffer(entries, dtype=torch.uint8).pin_memory()
    return source.to(torch.device("cuda", index), non_blocking=True)
