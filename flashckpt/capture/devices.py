"""What a capture needs of a device. Owns the protocol only.

A device has a compute side (whatever stream the training thread computes on) and a way to copy to the host
that is the capture's own. Every call here enqueues a bounded number of operations, whatever the number of
leaves, and waits for nothing, but for `synchronize`, `StreamMark.wait` and what `Copying` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from flashckpt import _native
from flashckpt.capture.plan import Addresses

# Copies in larger pieces would queue the loop's own small reads (`loss.item()`) behind gigabytes.
PIECE_BYTES = 32 << 20


@dataclass(frozen=True)
class Copies:
    """Copies of memory, in order: absolute addresses, and bytes."""

    sources: Addresses
    destinations: Addresses
    sizes: Addresses

    @staticmethod
    def joined(parts: Sequence[Copies]) -> Copies:
        return Copies(
            np.concatenate([part.sources for part in parts]),
            np.concatenate([part.destinations for part in parts]),
            np.concatenate([part.sizes for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.sizes)


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
        these are enqueued, which takes until most of them are made where they are more than a few
        hundred."""

    def wait(self) -> None:
        """The host waits for all of them. RuntimeError where one failed."""


class Table(Protocol):
    """Leaves that are digested, and copied on the device, together: made with a plan, used at every
    boundary."""

    def __len__(self) -> int: ...


class Device(Protocol):
    """One accelerator that holds leaves of the state."""

    name: str

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

    def digest(self, table: Table, out: Tensor) -> None:
        """Enqueue: copy what is to be copied, and the digest of what was read into `out`, int64 of one a
        leaf."""

    def new_mark(self, *, timing: bool = False) -> StreamMark: ...

    def mark(self, mark: StreamMark) -> None: ...

    def gather(self) -> None:
        """Compute waits for every stream that may write state: current, default and the named ones."""

    def hold_writers(self, mark: StreamMark) -> None:
        """Every stream that may write state waits for the mark."""

    def copy_to_host(self, copies: Copies, num_first: int, after: StreamMark) -> Copying:
        """Begin copies, in pieces of at most PIECE_BYTES, once the mark has been passed. The first
        `num_first` read live leaves. Memory of both sides must stay until they have ended."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """A uint8 tensor in host memory that copies reach without a detour."""

    def register(self, mapping: _native.Mapping) -> None:
        """Make host memory known to the device until it is unmapped, so that copies into it are
        asynchronous. Where that is refused they are slower, and that is said once."""

    def allocate(self, num_bytes: int) -> Tensor:
        """A uint8 tensor, from where the loop's own tensors come: the loop may have the memory back as soon
        as the tensor is gone. Raises torch.OutOfMemoryError where there is no room."""

    def room_bytes(self) -> int:
        """What may still be taken without standing in the way of the loop; negative where too much is."""

    def capturing(self) -> bool:
        """Whether a graph is being captured on any stream that may write state: then nothing may be enqueued,
        registered, allocated or asked."""

    def elapsed_s(self, start: StreamMark, end: StreamMark) -> float | None:
        """Seconds between two marks that were made with timing; None until both are passed."""

    def synchronize(self) -> None:
        """The host waits for everything on the device."""

    def close(self) -> None: ...
