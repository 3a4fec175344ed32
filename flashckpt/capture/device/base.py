"""What a capture needs of a device. Owns the protocol only.

A device has a compute side (whatever stream the training thread computes on) and a side stream of the
capture's own. Nothing here waits on the host but `synchronize` and `Mark.wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Protocol

from torch import Tensor

from flashckpt.capture.plan import Addresses

# Copies in larger pieces would queue the loop's own small reads (`loss.item()`) behind gigabytes.
PIECE_BYTES = 32 << 20


class On(Enum):
    """Which of the two streams work goes to."""

    COMPUTE = "compute"
    SIDE = "side"


class Mark(Protocol):
    """A point in a stream, set by `Device.mark`. `handle` is what a Sealer can wait for."""

    @property
    def handle(self) -> int: ...

    def done(self) -> bool:
        """Whether the stream has passed the last point that was marked. Never blocks."""

    def wait(self) -> None:
        """The host waits: at the end of a run, and for a leaf that another stream writes."""


class Device(Protocol):
    """One accelerator that holds leaves of the state."""

    name: str

    def owns(self, tensor: Tensor) -> bool: ...

    def feeds(self, tensor: Tensor) -> bool:
        """Whether the tensor is in host memory that the device's streams write without the host waiting."""

    def launch(self, on: On, work: Callable[[], None]) -> None:
        """Enqueue torch operations. What `work` reads must stay as it is until they have run."""

    def new_mark(self, *, timing: bool = False) -> Mark: ...

    def mark(self, on: On, mark: Mark) -> None: ...

    def hold(self, on: On, mark: Mark) -> None:
        """The stream, not the host, waits for the mark."""

    def gather(self, on: On) -> None:
        """The stream waits for every stream that may write state: current, default and the named ones."""

    def hold_writers(self, mark: Mark) -> None:
        """Every stream that may write state waits for the mark."""

    def copy_to_host(self, sources: Addresses, destinations: Addresses, sizes: Addresses) -> None:
        """Enqueue copies on the side stream, in pieces of at most PIECE_BYTES. Addresses are absolute."""

    def register(self, address: int, num_bytes: int) -> None:
        """Make host memory known to the device, so that copies into it are asynchronous."""

    def unregister(self, address: int) -> None: ...

    def preparing(self) -> AbstractContextManager[None]:
        """Around the making of buffers and tables: when it is left they may be used by every stream."""

    def allocate(self, num_bytes: int) -> Tensor:
        """A uint8 tensor. Raises torch.OutOfMemoryError where there is no room."""

    def give_back(self) -> None:
        """Return to the device what was allocated here and is no longer used."""

    def room_bytes(self) -> int:
        """What may still be taken without standing in the way of the loop; negative where too much is."""

    def capturing(self) -> bool:
        """Whether a graph is being captured: then nothing may be enqueued, registered or allocated."""

    def elapsed_s(self, start: Mark, end: Mark) -> float | None:
        """Seconds between two marks that were made with timing; None until both are passed."""

    def synchronize(self) -> None:
        """The host waits for everything on the device."""

    def close(self) -> None: ...
