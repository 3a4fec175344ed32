"""The native engine: copies, digests, checksums, files, seals. Does not use torch and knows no plan.

Addresses and handles are ints. Arrays of u64 are C-contiguous buffers of 8-byte integers (`array("Q")`,
NumPy's uint64, a cast memoryview). Memory at an address must stay mapped during the call or, for `Sealer`,
until the seal is decided. Long calls release the GIL. Raises OSError, with errno and path, for system errors,
ValueError for invalid arguments, and RuntimeError for errors of a driver.
"""

import os
from collections.abc import Sequence, Sized
from typing import Any, overload

from typing_extensions import Buffer

EMPTY_DIGEST: int
"""2**64 - 1: the value of each entry of a digest table before a capture. A seal refuses a table that has
it."""
BLOCK_BYTES: int
"""Bytes of a block of a digest. A leaf may be split between blocks, counted from its first byte."""

def address_of(buffer: Buffer) -> int:
    """Return the address of a contiguous buffer's memory. Does not keep the buffer alive."""

def digest(address: int, num_bytes: int) -> int:
    """Return the 64-bit digest of the bytes of one leaf."""

def hash_blocks(address: int, num_bytes: int, first_block: int) -> int:
    """Return the sum, modulo 2**64, of the hashes of a leaf's blocks from number `first_block` on. The piece
    must end at a multiple of BLOCK_BYTES or at the leaf's end."""

def finish_digest(num_bytes: int, hashes: int) -> int:
    """Return the digest of a leaf from the sum of its blocks' hashes (0 to 2**64 - 1)."""

def digest_many(addresses: Buffer, sizes: Buffer, out_address: int, threads: int) -> None:
    """Write the digest of each leaf (u64 arrays of addresses and bytes) as u64[n] to `out_address`."""

def copy_digest(
    sources: Buffer, destinations: Buffer, sizes: Buffer, digests_address: int, threads: int
) -> None:
    """Copy leaves and compute their digests in one pass over memory.

    Takes u64 arrays of absolute addresses and bytes. Writes the digests of the stored bytes as u64[n] to
    `digests_address`. Any alignment; ranges must not overlap. All stores are visible before the call returns.
    """

def xxh3_64(buffer: Buffer) -> int:
    """Return XXH3, 64 bits, seed 0."""

def xxh3_128(buffer: Buffer) -> bytes:
    """Return XXH3, 128 bits, seed 0: 16 bytes, canonical (big-endian)."""

def xxh3_128_at(address: int, num_bytes: int) -> bytes:
    """Like `xxh3_128`, for memory at an address."""

def split_planes(source: Buffer, width: int, planes: Buffer) -> None:
    """Rotate each little-endian number of `width` (1, 2, 4 or 8) bytes left by one bit, and write the highest
    byte of all numbers, then the next ones. Copies an incomplete number at the end unchanged. Both buffers
    have the same length and do not overlap."""

def join_planes(planes: Buffer, width: int, destination: Buffer) -> None:
    """Reverse `split_planes`."""

def load(address: int) -> int:
    """Read a u64 (acquire). The address must be a multiple of 8, as for all atomics."""

def store(address: int, value: int) -> None:
    """Write a u64 (release)."""

def compare_exchange(address: int, expected: int, desired: int) -> bool:
    """Set a u64 to `desired` if it is `expected` (acquire, release). Works between processes."""

def fetch_add(address: int, value: int) -> int:
    """Add to a u64, modulo 2**64, and return its previous value (acquire, release)."""

def allocate(fd: int, offset: int, num_bytes: int) -> None:
    """Reserve space in a file (fallocate). On tmpfs this allocates memory: call it in small steps."""

def huge_page() -> int:
    """Return the bytes of the machine's huge page; 0 if there is none that is small compared with a
    region."""

def allocate_huge(fd: int, offset: int, num_bytes: int) -> bool:
    """Allocate the whole huge pages in a range of a file on tmpfs. Return False if the kernel gives none;
    `allocate` must then reserve the rest of the range. The file grows to the end of the range before memory
    is allocated, so no other process may use it during the call."""

def prefer_node(fd: int, num_bytes: int, node: int) -> None:
    """Prefer this NUMA node for later allocations of a file on tmpfs (mbind, MPOL_PREFERRED). Raises
    OSError."""

def populate(address: int, num_bytes: int, threads: int) -> None:
    """Fault pages in for writing without changing them. Other threads may use the memory during the call."""

class Mapping:
    """A buffer over the first `num_bytes` of a region: shared, writable, not inherited by forks, and in no
    core dump. Uses huge pages if the region has them. The file must be at least this long. Without a
    descriptor, the memory is private and zero. In a forked child, views raise ValueError, and dropping the
    object unmaps nothing."""

    @overload
    def __init__(self, fd: int, num_bytes: int) -> None: ...
    @overload
    def __init__(self, fd: int, offset: int, num_bytes: int) -> None:
        """A read-only part of a region, from a multiple of the page on. Faults in all pages."""

    @overload
    def __init__(self, num_bytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def register(self, device: int) -> None:
        """Page-lock the memory for every CUDA device until it is unmapped, in runs that end at multiples of
        1 GiB. Raises RuntimeError with the driver's reason if it refuses some runs, which stay pageable."""

    def close(self) -> None:
        """Unmap the memory. Raises BufferError if there are views; the last view then unmaps it."""

def write_file(
    path: str | os.PathLike[str],
    source_fd: int,
    source_offset: int,
    num_bytes: int,
    *,
    chunk_bytes: int = 4194304,
    leaf_offsets: Buffer,
    leaf_sizes: Buffer,
    threads: int = 2,
    direct: bool = True,
    progress: int = 0,
) -> tuple[bytes, bytes, bool]:
    """Write a range of a region to a new file (mode 0644), and compute digests and checksums in the same
    pass.

    `source_offset` and `chunk_bytes` are multiples of the page. Leaves are ranges (u64 arrays, offsets from
    `source_offset`) that do not overlap. threads: those that compute; three times as many requests are in
    flight. progress: 0, or the address of a u64 to which the written bytes are added.

    Returns (digests, checksums, direct): the u64 digest of each leaf and the 16-byte XXH3-128 of each chunk,
    of the written bytes, and whether all writes bypassed the page cache (with `direct`, if the file system
    allows it). Syncs the file, not its folder.

    Raises FileExistsError; OSError with errno and path, also of sync and close; EIO if the region is too
    short. Removes an incomplete file.
    """

class LeafDigests:
    """The digests of leaves of these sizes. Several plans may add to them."""

    def __init__(self, sizes: Buffer) -> None: ...
    def digests(self) -> bytes:
        """Return the u64 digest of each leaf; EMPTY_DIGEST for a leaf with missing bytes."""

class FilePlan:
    """The needed chunks of one file and the destinations of their bytes. Compares each chunk with its
    checksum, digests it, and copies it to its destinations, which must stay mapped until the plan is closed
    or no thread reads. A bad chunk is not copied.

    checksums: 16 bytes for each chunk. The other arrays are u64. copies: for each copy the first byte in the
    file, the address in memory, the bytes of a run, the number of dimensions, and for each dimension,
    outermost first, the count and the strides in the file and in memory. parts: for each part the first byte
    in the file, the end, the index of its leaf in `digests`, and its first byte in the leaf. ranges: further
    bytes to read, first and end. direct: read past the page cache, if the file system allows it. progress: 0,
    or the address of a u64 to which the bytes done are added until the plan is closed."""

    def __init__(
        self,
        *,
        num_bytes: int,
        chunk_bytes: int,
        checksums: Buffer,
        copies: Buffer,
        parts: Buffer,
        ranges: Buffer,
        digests: LeafDigests,
        direct: bool = True,
        progress: int = 0,
    ) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    def left(self) -> list[tuple[int, int]]:
        """Return the needed chunks that were not added yet, as runs (first, end)."""

    def bad_chunks(self) -> list[int]:
        """Return the chunks with a wrong checksum, in order."""

    @property
    def is_closed(self) -> bool: ...
    @staticmethod
    def close(plans: list[FilePlan]) -> None:
        """Begin no further chunk of these plans. Afterwards no thread writes to a destination, also one whose
        read ends later. No signal's handler runs before all are closed."""

    def read(self, path: str | os.PathLike[str], *, threads: int = 2) -> None:
        """Read the remaining chunks. Raises ValueError, and reads nothing, for a file of another length;
        OSError (ECANCELED) if the plan was closed."""

    def add(self, offset: int, data: Buffer) -> None:
        """Add the chunks at `offset` of the file, from any thread. Skips chunks that are not needed or were
        added. Raises ValueError for a part of a chunk."""

class Audit:
    """Checksums of the chunks and digests of the leaves of a file that other code writes. The geometry is
    that of `write_file`. Add each chunk once, in any order and from any thread."""

    def __init__(
        self, *, num_bytes: int, chunk_bytes: int, leaf_offsets: Buffer, leaf_sizes: Buffer
    ) -> None: ...
    def add(self, offset: int, data: Buffer) -> bytes:
        """Return 16 bytes for each of the chunks at `offset` of the file. Raises ValueError for a part of a
        chunk."""

    def digests(self) -> bytes:
        """Return the u64 digest of each leaf; EMPTY_DIGEST for a leaf with a missing chunk."""

class HostEvent:
    """An event set by a thread of this process, which a `Sealer` can wait for."""

    def __init__(self) -> None: ...
    @property
    def handle(self) -> int:
        """The handle for `waits` of `Sealer.submit`. A wait that has begun outlives this object."""

    def set(self) -> None:
        """Set the event: ends all waits, and those that begin before `reset`."""

    def reset(self) -> None:
        """Clear the event for later waits."""

    def query(self) -> bool:
        """Whether it is set."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until the event is set; return False after the timeout. Ctrl-C interrupts it."""

class Sealer:
    """The thread that seals slots. The first `submit` starts it; a forked child has a thread of its own."""

    def __init__(self) -> None: ...
    def submit(
        self,
        *,
        waits: Sequence[int],
        word: int,
        expected: int,
        desired: int,
        record: int,
        metadata: int,
        metadata_bytes: int,
        table: int,
        table_count: int,
        on_done_word: int = 0,
        landed: Buffer | None = None,
        held: Buffer | None = None,
    ) -> None:
        """Seal a slot once all events in `waits` are set. Never blocks.

        Then puts EMPTY_DIGEST in place of each digest that differs from its bytes (`landed`: u64 triples of
        address, bytes and entry, flat); checks that the digest table (u64[table_count] at `table`) has no
        EMPTY_DIGEST and ends with the u64s of `held`; writes
        XXH3-128 of the metadata to record[0:16] and of record[0:240] to record[240:256]; and changes the u64
        at `word` from `expected` to `desired`. If a wait fails, or a digest is empty or differs from `held`,
        sets the word to `expected` with state and owner 0 instead, and `failures` has the reason. In both
        cases, adds one to the u64 at `on_done_word` unless that is 0.

        Raises ValueError for an unknown handle and after `close`.
        """

    def confirm(self, *, word: int, writing: int, unconfirmed: int, sealed: int) -> bool:
        """Change the u64 at `word` from `unconfirmed` to `sealed`. If it is `writing`, the seal that was
        submitted with `unconfirmed` as its desired word changes it when it is done. False otherwise."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until all submitted seals are decided; return False after the timeout."""

    def close(self) -> None:
        """Decide the seals that are ready, drop the others (their words stay unchanged), and end the
        thread."""

    def failures(self) -> list[tuple[int, str, bool]]:
        """Return (address of the word, reason, whether all waits were over) of each seal that was refused
        since the last call. If a wait was not over, the digests that it would have written are empty. A
        refusal is listed before its slot is freed."""

def cuda_available() -> bool:
    """Whether there is a CUDA driver with at least one device. Initializes the driver, creates no context."""

def cuda_pci_address(device: int) -> tuple[int, int, int]:
    """Return domain, bus and device of a CUDA device's PCI address. Creates no context."""

def cuda_capturing(streams: Buffer, device: int) -> bool:
    """Whether a graph is being captured on one of these streams (u64 handles). Does not invalidate it."""

def cuda_elapsed_s(start: int, end: int, device: int) -> float | None:
    """Return the seconds between two recorded events (handles); None until both have completed, or if the
    driver refuses to answer. Does not invalidate a graph that is being captured."""

class CudaCopies:
    """Copies from a device to host memory, on a separate stream, enqueued by a native thread in waves.

    handle: for `Sealer.submit`: set once all earlier jobs are copied, or the newest of them has failed. A job
    that is done or has failed writes no memory any more. Raises ValueError in a forked child.
    """

    handle: int

    def __init__(self, device: int, piece_bytes: int) -> None: ...
    def submit(
        self, sources: Buffer, destinations: Buffer, sizes: Buffer, num_first: int, after: int = 0
    ) -> int:
        """Copy ranges (u64 arrays of absolute addresses and bytes) in order, in pieces, after the event
        `after` as it is recorded now. Returns a ticket at once. The memory must stay mapped until the copies
        are done."""

    def hold(self, ticket: int, streams: Buffer) -> None:
        """Let later work on these streams wait for the ticket's first `num_first` copies. Returns once these
        are enqueued."""

    def wait(self, ticket: int, *, first: bool = False) -> None:
        """Wait on the host for a ticket's copies, or its first ones. Raises RuntimeError if a copy failed."""

    def close(self) -> None:
        """Wait for all submitted copies, then end the thread."""

def cuda_digest_table(sources: Buffer, destinations: Buffer | None, sizes: Buffer) -> bytes:
    """Return the table of one `cuda_digest_launch`, to be copied to device memory at a multiple of 16.

    Takes u64 arrays of n device addresses and bytes. Leaves are contiguous bytes of any alignment and length,
    including 0. A leaf is also copied to its destination unless that is 0. Sources may overlap each other.
    Raises ValueError, with the leaf's index, for an invalid address or a destination that overlaps other
    memory. The caller must ensure that the memory exists on the device: a read past an allocation breaks the
    process's context.
    """

def cuda_digest_launch(
    stream: int, table_device_address: int, num_entries: int, digests_device_address: int, device: int
) -> None:
    """Enqueue one pass over all leaves of a table on a stream (two fills and one kernel), and return.

    `digests_device_address` is u64[num_entries]. Each entry is EMPTY_DIGEST until all blocks of its leaf are
    done, then the `digest` of the bytes that were read (and copied). A launch must be complete, in stream
    order, before the next launch of the same table. Must not be called while a graph is being captured.
    Raises RuntimeError with the driver's message.
    """

def cuda_digests_usable(device: int) -> str:
    """Load the digest kernel on a device and test it once. Return "", or the reason why it cannot be used.

    May take a second, and two megabytes of device memory during the call. Must not be called while a graph is
    being captured.
    """

class Watch:
    """Detects tensors that were replaced or moved since this object was created.

    items: (container, key) of each tensor: a dict and its key, a list and its index, an object and the name
    of an attribute, or (None, any value) for the tensor alone. Holds strong references to containers and
    tensors until `release`; the garbage collector traverses them.
    """

    def __init__(self, items: Sequence[tuple[Any, Any]], tensors: Sequence[Any]) -> None: ...
    def changed(self, addresses_out: Buffer) -> list[int]:
        """Return the indexes of tensors that were replaced, whose pointer, shape, strides or dtype differ, or
        whose storage has become smaller, compared with the creation of this object.

        Writes the data pointers of the current tensors as u64[n] to `addresses_out` (0 for a place without a
        tensor and for a tensor without memory of its own).
        """

    def release(self) -> None:
        """Drop the references to all tensors and containers."""

    def __len__(self) -> int: ...

class Standing:
    """Detects whether the containers of a state still hold the same objects.

    guards: (container, length). anchors: (container, key, object): the object must be `container[key]`, or
    the attribute of that name if the key is a str and the container is not a dict. The check creates no
    entries (of a defaultdict). Holds strong references to all of them; the garbage collector traverses them.
    """

    def __init__(
        self, guards: Sequence[tuple[Sized, int]], anchors: Sequence[tuple[Any, Any, Any]]
    ) -> None: ...
    def stands(self) -> bool:
        """Whether each container has its length and each place holds its object. LookupError and
        AttributeError of a place count as no; other errors propagate."""
