"""CUDA behind the device protocol.

Owns the side stream and the pool that arenas live in. Compute is whatever stream the training thread is on.
Registration and copies go through native code, which enters relaxed capture mode: on another thread they
would otherwise break a graph that is being captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.device.base import PIECE_BYTES, Mark, On
from flashckpt.capture.plan import Addresses

# Left to the loop beside what torch has been seen to need: cuBLAS workspaces, NCCL, fragmentation.
_MARGIN_BYTES = 256 << 20


class CudaMark:
    """A CUDA event; recorded by `CudaDevice.mark`."""

    def __init__(self, device: int, *, timing: bool) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
        self._device = device
        self._handle: int | None = None

    @property
    def handle(self) -> int:
        # One handle an event: it is asked for after the event was recorded, as native code requires.
        if self._handle is None:
            self._handle = _native.cuda_event_handle(self.event.cuda_event, self._device)
        return self._handle

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice:
    """One CUDA device. streams: further streams that write state, as torch.cuda.Stream."""

    def __init__(self, index: int, streams: Sequence[object] = ()) -> None:
        self.index = index
        self.name = f"cuda:{index}"
        self._device = torch.device("cuda", index)
        self._side: Any = torch.cuda.Stream(device=self._device)  # type: ignore[no-untyped-call]
        self._streams: list[Any] = [each for each in streams if getattr(each, "device", None) == self._device]
        with torch.cuda.device(self._device):
            self._pool = _make_pool()
        self._registered: set[int] = set()

    def owns(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def feeds(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.is_pinned()

    def launch(self, on: On, work: Callable[[], None]) -> None:
        with torch.cuda.device(self._device), self._on(on), torch.no_grad():
            work()

    def new_mark(self, *, timing: bool = False) -> CudaMark:
        return CudaMark(self.index, timing=timing)

    def mark(self, on: On, mark: Mark) -> None:
        self._event(mark).record(self._stream(on))

    def hold(self, on: On, mark: Mark) -> None:
        self._stream(on).wait_event(self._event(mark))

    def gather(self, on: On) -> None:
        stream = self._stream(on)
        for other in self._writers():
            if other != stream:
                stream.wait_stream(other)

    def hold_writers(self, mark: Mark) -> None:
        for stream in self._writers():
            stream.wait_event(self._event(mark))

    def copy_to_host(self, sources: Addresses, destinations: Addresses, sizes: Addresses) -> None:
        if len(sizes):
            _native.cuda_copy_to_host(
                self._side.cuda_stream, sources.data, destinations.data, sizes.data, PIECE_BYTES, self.index
            )

    def register(self, address: int, num_bytes: int) -> None:
        # Page-locked for every device of the process: a second device must not do it again.
        if address not in _registered:
            _native.cuda_register(address, num_bytes, self.index)
            _registered.add(address)
            self._registered.add(address)

    def unregister(self, address: int) -> None:
        if address in self._registered:
            self._registered.discard(address)
            _registered.discard(address)
            _native.cuda_unregister(address)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        # On the side stream, which is idle then: tables go up without the host waiting for the loop's
        # kernels, and all is in place before another stream is told to use it.
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            yield
            self._side.synchronize()

    def allocate(self, num_bytes: int) -> Tensor:
        with self._in_pool():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def give_back(self) -> None:
        # A pool returns its memory when it goes; its tensors are gone already.
        if self._pool is not None:
            self._pool = None
            with torch.cuda.device(self._device):
                self._pool = _make_pool()

    def room_bytes(self) -> int:
        """Free memory, less what torch has held at its peak and gave back, less a margin."""
        free, _ = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device)
        growth = max(0, torch.cuda.max_memory_reserved(self._device) - held)
        return int(free - growth - _MARGIN_BYTES)

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def elapsed_s(self, start: Mark, end: Mark) -> float | None:
        first, last = self._event(start), self._event(end)
        if not (first.query() and last.query()):
            return None
        return float(first.elapsed_time(last)) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        for address in list(self._registered):
            self.unregister(address)

    def _writers(self) -> list[Any]:
        """Every stream that may write state, once each."""
        current = torch.cuda.current_stream(self._device)
        default = torch.cuda.default_stream(self._device)
        return list(dict.fromkeys([current, default, *self._streams]))

    def _stream(self, on: On) -> Any:
        return self._side if on is On.SIDE else torch.cuda.current_stream(self._device)

    def _on(self, on: On) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._side) if on is On.SIDE else contextlib.nullcontext()

    def _event(self, mark: Mark) -> Any:
        assert isinstance(mark, CudaMark)
        return mark.event

    @contextlib.contextmanager
    def _in_pool(self) -> Iterator[None]:
        if self._pool is None:
            yield
            return
        with torch.cuda.use_mem_pool(self._pool, device=self._device):
            yield


# Host memory that is page-locked already, in this process.
_registered: set[int] = set()


def _make_pool() -> Any:
    """A pool that torch may take from when memory runs out, where torch has one."""
    try:
        return torch.cuda.MemPool(use_on_oom=True)
    except (AttributeError, TypeError):
        return None
