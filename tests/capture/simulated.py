"""A simulated accelerator with threads as streams, so that gates, clones and tears are tested without a GPU.
Owns its streams. Adopted tensors count as its memory, wherever they are; the tests enqueue work on them as a
device would run it. A held stream runs nothing until it is stepped or released: tests decide every order, and
never sleep."""

import ctypes
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.devices import PIECE_BYTES, Copies, StreamMark
from flashckpt.capture.plan import Addresses
from flashckpt.memory.memory_budget import NO_NODE

_LONG_S = 60.0


class SimulatedStream:
    """Ordered work on a separate thread. `drain` raises its errors."""

    def __init__(self, name: str) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self.enqueued = 0
        self._changed = threading.Condition()
        self._allowed: int | None = None
        self._busy = self._closed = self._waiting = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._work.append(work)
            self.enqueued += 1
            self._changed.notify_all()

    def hold(self) -> None:
        """Run no more work until `step` or `release`; the running piece is finished first."""
        with self._changed:
            self._allowed = 0
            self._wait_for(lambda: not self._busy)

    def step(self, count: int = 1) -> None:
        """Run the next pieces of work, and wait until they are done."""
        with self._changed:
            assert self._allowed is not None, "hold the stream first"
            self._allowed += count
            self._changed.notify_all()
            self._wait_for(lambda: (self._allowed == 0 or not self._work) and not self._busy)
            self._allowed = 0

    def release(self) -> None:
        with self._changed:
            self._allowed = None
            self._changed.notify_all()

    def pending(self) -> int:
        """The number of pieces of work in the queue."""
        with self._changed:
            return len(self._work)

    def settle(self) -> None:
        """Wait until the queue is empty or the stream waits for a mark of another one."""
        with self._changed:
            self._wait_for(lambda: self._waiting or (not self._work and not self._busy))

    def wait_on_stream(self, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Run a wait for another stream in this one. `wait` gets a function that returns whether the wait is
        given up."""
        with self._changed:
            self._waiting = True
            self._changed.notify_all()
        wait(lambda: self._closed)
        with self._changed:
            self._waiting = False

    def drain(self) -> None:
        """Wait on the host until the queue is empty; raise the errors of the work."""
        with self._changed:
            self._wait_for(lambda: not self._work and not self._busy)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._allowed = None
            self._work.clear()
            self._changed.notify_all()
        self._thread.join(_LONG_S)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        assert self._changed.wait_for(condition, _LONG_S), "the simulated stream is stuck"

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._work and self._allowed != 0))
                if self._closed:
                    return
                work = self._work.popleft()
                self._busy = True
                if self._allowed is not None:
                    self._allowed -= 1
            try:
                with torch.no_grad():
                    work()
            except BaseException as error:
                self._error = error
            with self._changed:
                self._busy = False
                self._changed.notify_all()


class SimulatedMark:
    """A point in a simulated stream."""

    def __init__(self) -> None:
        self._event = _native.HostEvent()
        self._changed = threading.Condition()
        self._set = self._passed = 0
        self.passed_s = 0.0

    @property
    def handle(self) -> int:
        return self._event.handle

    def done(self) -> bool:
        with self._changed:
            return self._passed == self._set

    def wait(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._passed == self._set, _LONG_S), (
                "a mark was never passed"
            )

    def reached(self, number: int) -> bool:
        with self._changed:
            return self._passed >= number

    def _place(self) -> int:
        with self._changed:
            self._set += 1
            self._event.reset()
            return self._set

    def _pass(self, number: int, now_s: float) -> None:
        with self._changed:
            self._passed, self.passed_s = number, now_s
            if number == self._set:
                self._event.set()
            self._changed.notify_all()

    def _wait_until(self, number: int, given_up: Callable[[], bool]) -> None:
        with self._changed:
            while self._passed < number and not given_up():
                self._changed.wait(0.01)


class SimulatedCopying:
    """Copies on the side stream, with a mark after the first ones and a mark after all."""

    def __init__(self, hold_writers: Callable[[StreamMark], None]) -> None:
        self._hold_writers = hold_writers
        self.first, self.last = SimulatedMark(), SimulatedMark()

    @property
    def handle(self) -> int:
        return self.last.handle

    def hold_writers(self) -> None:
        self._hold_writers(self.first)

    def wait(self) -> None:
        self.last.wait()


class SimulatedTable:
    """Leaves that are copied and digested as one piece of work, by native code."""

    def __init__(self, leaves: Sequence[Tensor], destinations: Addresses) -> None:
        self._leaves = list(leaves)
        sources = [leaf.data_ptr() for leaf in leaves]
        sizes = [leaf.numel() * leaf.element_size() for leaf in leaves]
        rows = list(zip(range(len(leaves)), sources, destinations.tolist(), sizes, strict=True))
        self._cloned = [row for row in rows if row[2]]
        self._read = [row for row in rows if not row[2]]

    def __len__(self) -> int:
        return len(self._leaves)

    def run(self, out: Tensor) -> None:
        cloned, read = (array("Q", bytes(8 * len(rows))) for rows in (self._cloned, self._read))
        sources, places, sizes = (array("Q", [row[n] for row in self._cloned]) for n in (1, 2, 3))
        _native.copy_digest(sources, places, sizes, _native.address_of(cloned), 1)
        sources, sizes = (array("Q", [row[n] for row in self._read]) for n in (1, 3))
        _native.digest_many(sources, sizes, _native.address_of(read), 1)
        digests = dict(zip((row[0] for row in self._cloned), cloned, strict=True))
        digests.update(zip((row[0] for row in self._read), read, strict=True))
        signed = [digests[place] - (digests[place] >> 63 << 64) for place in range(len(self))]
        out.copy_(torch.tensor(signed, dtype=torch.int64, device="cpu"))


class SimulatedDevice:
    """A device whose compute stream, side stream and further streams are threads. streams: further streams
    that write state and that the user named (`Options.streams`)."""

    def __init__(self, *, piece_bytes: int = PIECE_BYTES, streams: tuple[SimulatedStream, ...] = ()) -> None:
        self.name = "simulated:0"
        self.compute = SimulatedStream(f"{self.name} compute")
        self.side = SimulatedStream(f"{self.name} side")
        self.graph_capture = False
        self.out_of_memory = False
        self.has_kernel = True
        self.numa_node, self.failure = NO_NODE, ""
        self.registered: dict[int, int] = {}
        self._streams = streams
        self._piece_bytes = piece_bytes
        self._adopted: dict[int, torch.UntypedStorage] = {}
        self._pinned: dict[int, torch.UntypedStorage] = {}

    def adopt(self, *tensors: Tensor) -> None:
        """Treat the memory of these tensors as this device's from now on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._adopted[storage.data_ptr()] = storage

    def pin(self, tensor: Tensor) -> None:
        """Treat a tensor as host memory that the device's streams write."""
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage

    def writes_to(self, tensor: Tensor) -> bool:
        is_pinned = tensor.untyped_storage().data_ptr() in self._pinned
        return is_pinned or (self.holds(tensor) and not self.has_kernel)

    def owns(self, tensor: Tensor) -> bool:
        return self.holds(tensor) and self.has_kernel

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor was adopted."""
        return tensor.untyped_storage().data_ptr() in self._adopted

    def launch(self, work: Callable[[], None]) -> None:
        self._refuse_in_graph()
        self.compute.enqueue(work)

    def make_table(self, leaves: Sequence[Tensor], destinations: Addresses) -> SimulatedTable:
        self._refuse_in_graph()
        return SimulatedTable(leaves, destinations)

    def new_mark(self, *, timing: bool = False) -> SimulatedMark:
        return SimulatedMark()

    def mark(self, mark: StreamMark) -> None:
        self._refuse_in_graph()
        self._mark(self.compute, mark)

    def join_writers(self) -> None:
        for stream in self._streams:
            mark = SimulatedMark()
            self._mark(stream, mark)
            self._hold(self.compute, mark)

    def hold_writers(self, mark: StreamMark) -> None:
        self._refuse_in_graph()
        for stream in (self.compute, *self._streams):
            self._hold(stream, mark)

    def copy_to_host(self, copies: Copies, num_first: int, after: StreamMark) -> SimulatedCopying:
        self._refuse_in_graph()
        self._hold(self.side, after)
        copying = SimulatedCopying(self.hold_writers)
        for place, (source, destination, size) in enumerate(copies.tolist()):
            if place == num_first:
                self._mark(self.side, copying.first)
            for start in range(0, size, self._piece_bytes):
                length = min(self._piece_bytes, size - start)
                self.side.enqueue(_copy(source + start, destination + start, length))
        if num_first == len(copies):
            self._mark(self.side, copying.first)
        self._mark(self.side, copying.last)
        return copying

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def register(self, mapping: _native.Mapping) -> None:
        """Register once for each mapping. A real device forgets it with the mapping, this one does not."""
        with memoryview(mapping) as view:
            self.registered.setdefault(_native.address_of(view), view.nbytes)

    def allocate(self, num_bytes: int) -> Tensor:
        self._refuse_in_graph()
        if self.out_of_memory:
            raise torch.OutOfMemoryError("the simulated device has no memory left")
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def capturing(self) -> bool:
        return self.graph_capture

    def elapsed_s(self, start: StreamMark, end: StreamMark) -> float | None:
        self._refuse_in_graph()
        assert isinstance(start, SimulatedMark)
        assert isinstance(end, SimulatedMark)
        return end.passed_s - start.passed_s if start.done() and end.done() else None

    def synchronize(self) -> None:
        """Wait also for unnamed streams (`others`), as a device does."""
        for stream in (self.compute, self.side, *self._streams, *self.others):
            stream.drain()

    others: tuple[SimulatedStream, ...] = ()

    def close(self) -> None:
        """Let the streams continue, as a device's do; `shutdown` ends them."""

    def shutdown(self) -> None:
        for stream in (self.compute, self.side):
            stream.close()

    def _mark(self, stream: SimulatedStream, mark: StreamMark) -> None:
        assert isinstance(mark, SimulatedMark)
        number = mark._place()
        stream.enqueue(lambda: mark._pass(number, time.perf_counter()))

    def _hold(self, stream: SimulatedStream, mark: StreamMark) -> None:
        assert isinstance(mark, SimulatedMark)
        number = mark._set

        def wait() -> None:
            if not mark.reached(number):
                stream.wait_on_stream(lambda given_up: mark._wait_until(number, given_up))

        stream.enqueue(wait)

    def _refuse_in_graph(self) -> None:
        # A real device would invalidate the graph.
        assert not self.graph_capture, "the device was used while a graph was being captured"


def _copy(source: int, destination: int, num_bytes: int) -> Callable[[], None]:
    def copy() -> None:
        ctypes.memmove(destination, source, num_bytes)

    return copy
