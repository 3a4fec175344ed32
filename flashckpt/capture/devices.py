"""The devices that hold leaves: what a capture needs of one (`Device`), and CUDA behind it.

A device has a compute side (whatever stream the training thread computes on) and a way to copy to the host
that is the capture's own. Every call here enqueues a bounded number of operations, whatever the number of
leaves, and waits for nothing, but for `synchronize`, `StreamMark.wait` and what `Copying` says.

On CUDA buffers come from torch's own pool for the compute stream. Copies to the host go through native code:
a stream and a thread of their own, in relaxed capture mode, so that a graph that is being captured is not
broken by them.
"""

from __future__ import annotations

import functools
import logging
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.digests import CudaTable, why_not_in_one_launch
from flashckpt.capture.plan import Addresses
from flashckpt.memory.numa import NO_NODE, node_of_pci

log = logging.getLogger(__name__)

# Copies in larger pieces would queue the loop's own small reads (`loss.item()`) behind gigabytes.
PIECE_BYTES = 32 << 20
# Left to the loop beside what torch has been seen to need: cuBLAS workspaces, NCCL, fragmentation.
_MARGIN_BYTES = 256 << 20


Copies = Addresses
"""Copies of memory, in order: rows of source, destination and bytes."""


class StreamMark(Protocol):
    """A point in the compute stream, set by `Device.mark`."""

    def wait(self) -> None:
        """The host waits: for leaves in host memory that the device writes."""


class Copying(Protocol):
    """Copies to the host that were begun. `handle` is what a Sealer can wait for: all of them have been
    made, or one has failed. After either, nothing of them is still written."""

    @property
    def handle(self) -> int: ...

    def hold_writers(self) -> None:
        """Every stream that may write state, not the host, waits for the first copies. The host waits until
        these are enqueued: until all but the last 128 MiB of them are made."""

    def wait(self) -> None:
        """The host waits for all of them. RuntimeError where one failed."""


class Table(Protocol):
    """Leaves that are digested, and copied on the device, together: made with a plan, used at every
    boundary."""

    def __len__(self) -> int: ...

    def run(self, out: Tensor) -> None:
        """To be launched: copy what is to be copied, and the digest of what was read into `out`, int64 of
        one a leaf."""


class Device(Protocol):
    """One accelerator that holds leaves of the state."""

    name: str
    failure: str
    """The driver's reason where `capturing` found that the device has failed, else empty. After such a
    failure (an assert, an illegal address) each further call of this process on the device fails."""

    @property
    def numa_node(self) -> int:
        """The NUMA node of the host that the device is attached to; NO_NODE where there is only one, or where
        it is not known."""

    @property
    def in_one_launch(self) -> bool:
        """Whether a table is one launch. Where it is some operations a leaf, nothing is cloned for its
        size, and leaves go by the way `wait`."""

    def owns(self, tensor: Tensor) -> bool: ...

    def feeds(self, tensor: Tensor) -> bool:
        """Whether the tensor is in host memory that the device's streams write without the host waiting."""

    def launch(self, work: Callable[[], None]) -> None:
        """Enqueue torch operations. What `work` reads must stay as it is until they have run."""

    def make_table(self, leaves: Sequence[Tensor], destinations: Addresses) -> Table:
        """A table of row-major tensors. destinations: where each is copied to on the device, 0 for
        nowhere."""

    def new_mark(self, *, timing: bool = False) -> StreamMark: ...

    def mark(self, mark: StreamMark) -> None: ...

    def gather(self) -> None:
        """Compute waits for every stream that may write state: current, default and the named ones."""

    def hold_writers(self, mark: StreamMark) -> None:
        """Every stream that may write state waits for the mark."""

    def copy_to_host(self, copies: Copies, num_first: int, after: StreamMark) -> Copying:
        """Begin copies, in pieces that end at multiples of PIECE_BYTES of the host address, once the mark has
        been passed. The first `num_first` read live leaves. Memory of both sides must stay until they have
        ended."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """A uint8 tensor in host memory that copies reach without a detour."""

    def register(self, mapping: _native.Mapping) -> None:
        """Make host memory known to the device until it is unmapped, so that copies into it are
        asynchronous. Copies into memory for which that is refused are slower; one warning says so."""

    def allocate(self, num_bytes: int) -> Tensor:
        """A uint8 tensor, from where the loop's own tensors come: the loop may have the memory back as soon
        as the tensor is gone. Raises torch.OutOfMemoryError where there is no room."""

    def room_bytes(self) -> int:
        """What may still be taken without standing in the way of the loop; negative where too much is."""

    def capturing(self) -> bool:
        """Whether a graph is being captured on any stream that may write state, or the device has failed.
        Then nothing may be enqueued, registered, allocated or asked. Never raises: hooks and boundaries ask,
        and PyTorch raises a failure at the loop's next call."""

    def elapsed_s(self, start: StreamMark, end: StreamMark) -> float | None:
        """Seconds between two marks that were made with timing; None until both are passed."""

    def synchronize(self) -> None:
        """The host waits for everything on the device."""

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
    """One Device for each accelerator that holds some of these tensors, in the order of their indexes.
    `streams` are further ones that write the state. State on any other than CUDA is refused by its walk."""
    indexes = sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
    return [CudaDevice(index, streams) for index in indexes]


class CudaDevice:
    """One CUDA device. streams: further streams that write state, as torch.cuda.Stream."""

    def __init__(self, index: int, streams: Sequence[object] = ()) -> None:
        self.index = index
        self.name, self.failure = f"cuda:{index}", ""
        self._device = torch.device("cuda", index)
        self._streams: list[Any] = [each for each in streams if getattr(each, "device", None) == self._device]
        self._copies = _native.CudaCopies(index, PIECE_BYTES)
        self._taken: list[weakref.ref[Tensor]] = []
        self._most_taken = 0
        self._is_unregistered_said = False
        why_not_in_one_launch(index)  # the module is loaded here, never at a boundary

    @functools.cached_property
    def numa_node(self) -> int:
        try:
            return node_of_pci(*_native.cuda_pci_address(self.index))
        except RuntimeError:
            return NO_NODE

    @property
    def in_one_launch(self) -> bool:
        return why_not_in_one_launch(self.index) == ""

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def feeds(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.is_pinned()

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

    def gather(self) -> None:
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
            if not self._is_unregistered_said:
                self._is_unregistered_said = True
                log.warning(
                    "Some of the host memory for snapshots stays pageable: %s. Snapshots are as safe; copies "
                    "into that memory are slower (some 15 instead of 50 GB/s). The driver sets the limit, or "
                    "a virtual machine, and not `ulimit -l`; the kernel's log (dmesg) may have more. "
                    "Options(slots=2) needs less memory.", error,
                )  # fmt: skip

    # ---- memory

    def allocate(self, num_bytes: int) -> Tensor:
        made = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._taken.append(weakref.ref(made))
        self._most_taken = max(self._most_taken, self._taken_bytes())
        return made

    def room_bytes(self) -> int:
        """Free memory, as far as the process may take it, and what torch keeps of released arenas; less what
        torch has held at its peak and gave back, less a margin. 0 under an allocator without statistics: a
        pluggable one raises, and nothing then tells how much the loop still needs."""
        free, total = torch.cuda.mem_get_info(self._device)
        try:
            held = torch.cuda.memory_reserved(self._device)
            peak = torch.cuda.max_memory_reserved(self._device)
            allocated = torch.cuda.memory_allocated(self._device)
            allowed = int(total * _memory_fraction(self._device))
        except RuntimeError:
            return 0
        growth, kept = max(0, peak - held), held - allocated
        free = min(free, allowed - held)
        return int(free - growth - _MARGIN_BYTES + min(kept, self._most_taken - self._taken_bytes()))

    def _taken_bytes(self) -> int:
        alive = [(ref, made) for ref in self._taken if (made := ref()) is not None]
        self._taken = [ref for ref, _ in alive]
        return sum(made.numel() for _, made in alive)

    # ---- what is asked

    def capturing(self) -> bool:
        try:
            found = _native.cuda_capturing(self._writer_handles(), self.index)
        except RuntimeError as error:
            self.failure = str(error)
            return True
        self.failure = ""
        return found

    def elapsed_s(self, start: StreamMark, end: StreamMark) -> float | None:
        # Not by torch: outside of relaxed mode a query makes a graph that another thread captures invalid.
        return _native.cuda_elapsed_s(_event(start).cuda_event, _event(end).cuda_event, self.index)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._copies.close()

    def _writers(self) -> list[Any]:
        """Every stream that may write state, once each."""
        current = torch.cuda.current_stream(self._device)
        default = torch.cuda.default_stream(self._device)
        return list(dict.fromkeys([current, default, *self._streams]))

    def _writer_handles(self) -> array[int]:
        return array("Q", [stream.cuda_stream for stream in self._writers()])


def _memory_fraction(device: torch.device) -> float:
    """The share of the device's memory that torch may take. 1.0 where this version of torch can be given a
    limit (set_per_process_memory_fraction) and cannot be asked for it."""
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if ask is None else float(ask(device))


def _event(mark: StreamMark) -> Any:
    assert isinstance(mark, CudaMark)
    return mark.event
