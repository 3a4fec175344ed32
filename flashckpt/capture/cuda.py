"""CUDA behind the device protocol.

Compute is whatever stream the training thread is on; buffers come from torch's own pool for it. Copies to
the host go through native code: a stream and a thread of their own, in relaxed capture mode, so that a
graph that is being captured is not broken by them.
"""

from __future__ import annotations

import functools
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.devices import PIECE_BYTES, Copies, Device, StreamMark, Table
from flashckpt.capture.plan import Addresses
from flashckpt.capture.torch_digests import bytes_of, torch_digests
from flashckpt.events import log

# Left to the loop beside what torch has been seen to need: cuBLAS workspaces, NCCL, fragmentation.
_MARGIN_BYTES = 256 << 20


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


class CudaTable:
    """Row-major tensors of one device, with where each is copied to (0 for nowhere): copied and digested in
    one launch where the kernel can be used, else with torch's operations. Made, and run, on the current
    stream; one run ends before the next."""

    def __init__(self, index: int, leaves: Sequence[Tensor], destinations: Addresses) -> None:
        self._index, self._count = index, len(leaves)
        self._in_one_launch = why_not_in_one_launch(index) == ""
        if self._in_one_launch:
            self._entries = _uploaded(index, leaves, destinations)
            self._leaves: list[Tensor] = []
        else:
            self._leaves = [bytes_of(leaf) for leaf in leaves]
            self._digests = torch_digests(self._leaves)
            self._pairs = [
                (_memory_at(index, address, leaf.numel()), leaf)
                for address, leaf in zip(destinations.tolist(), self._leaves, strict=True)
                if address
            ]

    def __len__(self) -> int:
        return self._count

    def run(self, out: Tensor) -> None:
        """Digests go to `out`: int64, contiguous, one a leaf."""
        if self._in_one_launch:
            stream = torch.cuda.current_stream(self._index).cuda_stream
            _native.cuda_digest_launch(
                stream, self._entries.data_ptr(), self._count, out.data_ptr(), self._index
            )
            return
        if self._pairs:
            torch._foreach_copy_([target for target, _ in self._pairs], [leaf for _, leaf in self._pairs])
        self._digests.into(self._leaves, out)


def devices_of(tensors: Iterable[Tensor], streams: Sequence[object] = ()) -> list[Device]:
    """One Device for each accelerator that holds some of these tensors, in the order of their indexes.
    `streams` are further ones that write the state. State on any other than CUDA is refused by its walk."""
    indexes = sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
    return [CudaDevice(index, streams) for index in indexes]


class CudaDevice:
    """One CUDA device. streams: further streams that write state, as torch.cuda.Stream."""

    def __init__(self, index: int, streams: Sequence[object] = ()) -> None:
        self.index = index
        self.name = f"cuda:{index}"
        self._device = torch.device("cuda", index)
        self._streams: list[Any] = [each for each in streams if getattr(each, "device", None) == self._device]
        self._copies = _native.CudaCopies(index, PIECE_BYTES)
        self._taken: list[weakref.ref[Tensor]] = []
        self._most_taken = 0
        why_not_in_one_launch(index)  # the module is loaded here, never at a boundary

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

    def digest(self, table: Table, out: Tensor) -> None:
        assert isinstance(table, CudaTable)
        self.launch(lambda: table.run(out))

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
        ticket = self._copies.submit(
            np.ascontiguousarray(copies.sources).data,
            np.ascontiguousarray(copies.destinations).data,
            np.ascontiguousarray(copies.sizes).data,
            num_first,
            _event(after).cuda_event,
        )
        return CudaCopying(self._copies, ticket, self._writer_handles)

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def register(self, mapping: _native.Mapping) -> None:
        try:
            mapping.register(self.index)
        except RuntimeError as error:
            _say_unregistered(str(error))

    # ---- memory

    def allocate(self, num_bytes: int) -> Tensor:
        made = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._taken.append(weakref.ref(made))
        self._most_taken = max(self._most_taken, self._taken_bytes())
        return made

    def room_bytes(self) -> int:
        """Free memory, and what of arenas that were let go of torch still keeps, less what torch has held
        at its peak and gave back, less a margin."""
        free, _ = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device)
        growth = max(0, torch.cuda.max_memory_reserved(self._device) - held)
        kept = held - torch.cuda.memory_allocated(self._device)
        return int(free - growth - _MARGIN_BYTES + min(kept, self._most_taken - self._taken_bytes()))

    def _taken_bytes(self) -> int:
        alive = [(ref, made) for ref in self._taken if (made := ref()) is not None]
        self._taken = [ref for ref, _ in alive]
        return sum(made.numel() for _, made in alive)

    # ---- what is asked

    def capturing(self) -> bool:
        return _native.cuda_capturing(self._writer_handles(), self.index)

    def elapsed_s(self, start: StreamMark, end: StreamMark) -> float | None:
        first, last = _event(start), _event(end)
        if self.capturing() or not (first.query() and last.query()):
            return None
        return float(first.elapsed_time(last)) / 1e3

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


@functools.cache
def why_not_in_one_launch(index: int) -> str:
    """ "" where a table is one launch on this device, else the reason, which is said once."""
    reason = _native.cuda_digests_usable(index)
    if reason:
        log.warning(
            "The kernel that copies and digests cannot be used on cuda:%d: %s. Snapshots are as safe without "
            "it; they are digested with torch's operations, some for each tensor, and at each of them the "
            "loop waits for the copy to the host.", index, reason,
        )  # fmt: skip
    return reason


@functools.cache
def _say_unregistered(reason: str) -> None:
    log.warning(
        "Host memory for snapshots could not be page-locked: %s. Snapshots are as safe without it; copies to "
        "it are slower. Raise the limit of locked memory (ulimit -l) if it is low.", reason,
    )  # fmt: skip


def _event(mark: StreamMark) -> Any:
    assert isinstance(mark, CudaMark)
    return mark.event


def _uploaded(index: int, leaves: Sequence[Tensor], destinations: Addresses) -> Tensor:
    """The entries of a table in device memory, there before what the current stream gets next. The host
    does not wait: torch keeps the page-locked source until it has been read."""
    sources = array("Q", [leaf.data_ptr() for leaf in leaves])
    sizes = array("Q", [leaf.numel() * leaf.element_size() for leaf in leaves])
    entries = bytearray(_native.cuda_digest_table(sources, destinations.data, sizes))
    source = torch.frombuffer(entries, dtype=torch.uint8).pin_memory()
    return source.to(torch.device("cuda", index), non_blocking=True)


def _memory_at(index: int, address: int, num_bytes: int) -> Tensor:
    """Device memory that somebody else keeps."""
    described = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    class ForeignMemory:
        __cuda_array_interface__ = described

    return torch.as_tensor(ForeignMemory(), device=torch.device("cuda", index))
