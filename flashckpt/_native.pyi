"""The native engine. Owns bytes: copies, digests, checksums, files, seals. Knows no torch and no plan.

Addresses and handles are ints. Arrays of u64 are C-contiguous buffers of 8-byte integers (`array("Q")`,
NumPy's uint64, a cast memoryview). Memory behind an address must stay mapped for the call, or, for
`Sealer`, until the seal is decided. Long calls release the interpreter's lock. System errors are OSError
with errno and, where a file has one, its path; arguments that cannot be are ValueError; a driver's refusal
is RuntimeError.
"""

import os
from collections.abc import Sequence, Sized
from typing import Any, overload

from typing_extensions import Buffer

EMPTY_DIGEST: int
"""2**64 - 1: what a digest table is filled with before a capture; a seal refuses one that still holds it."""
BLOCK_BYTES: int
"""What a digest takes at once: leaves may be cut between blocks, counted from the leaf's first byte."""

def address_of(buffer: Buffer) -> int:
    """Address of a contiguous buffer's memory. Does not keep the buffer alive."""

def digest(address: int, num_bytes: int) -> int:
    """The 64-bit digest of the bytes of one leaf."""

def hash_blocks(address: int, num_bytes: int, first_block: int) -> int:
    """The sum, modulo 2**64, of the hashes of a leaf's blocks from number `first_block` on.

    A piece of a leaf begins at a whole number of BLOCK_BYTES and ends at one, or where the leaf does.
    """

def finish_digest(num_bytes: int, hashes: int) -> int:
    """The digest of a leaf whose blocks have hashes of this sum (0 to 2**64 - 1)."""

def digest_many(addresses: Buffer, sizes: Buffer, out_address: int, threads: int) -> None:
    """One digest a leaf (u64 arrays of addresses and bytes), written as u64[n] at `out_address`."""

def copy_digest(
    sources: Buffer, destinations: Buffer, sizes: Buffer, digests_address: int, threads: int
) -> None:
    """Copies leaves and takes their digests in one pass over memory.

    u64 arrays of absolute addresses and bytes; digests, of the bytes that were stored, are written as
    u64[n] at `digests_address`. Any alignment; ranges must not overlap. All stores are ordered before what
    the caller does next.
    """

def xxh3_64(buffer: Buffer) -> int:
    """XXH3, 64 bits, seed 0."""

def xxh3_128(buffer: Buffer) -> bytes:
    """XXH3, 128 bits, seed 0: 16 bytes, canonical (big-endian)."""

def xxh3_128_at(address: int, num_bytes: int) -> bytes:
    """The same of memory at an address."""

def split_planes(source: Buffer, width: int, planes: Buffer) -> None:
    """Numbers of `width` (1, 2, 4 or 8) bytes, little-endian, each turned left by one bit, as planes: the
    highest byte of each, then the next ones; bytes at the end that are no whole number stand there as they
    are. Both have one length and do not overlap."""

def join_planes(planes: Buffer, width: int, destination: Buffer) -> None:
    """The numbers that `split_planes` took apart."""

def load(address: int) -> int:
    """Reads a u64 (acquire). The address must be a multiple of 8, as for all atomics."""

def store(address: int, value: int) -> None:
    """Writes a u64 (release)."""

def compare_exchange(address: int, expected: int, desired: int) -> bool:
    """Sets a u64 to `desired` if it is `expected` (acquire, release). Works between processes."""

def fetch_add(address: int, value: int) -> int:
    """Adds to a u64, modulo 2**64, and returns what it was (acquire, release)."""

def allocate(fd: int, offset: int, num_bytes: int) -> None:
    """Reserves room in a file (fallocate). On tmpfs this takes memory: ask for it in small steps."""

def huge_page() -> int:
    """Bytes of the machine's huge page; 0 where it has none that is small beside a region."""

def allocate_huge(fd: int, offset: int, num_bytes: int) -> bool:
    """Takes the whole huge pages in a range of a file on tmpfs, as such; False where the kernel has none left
    or gives none. What of the range has no memory then is still to be reserved. The file grows to the end of
    the range before it has memory there: nobody else may touch it meanwhile."""

def prefer_node(fd: int, num_bytes: int, node: int) -> None:
    """Memory that a file on tmpfs does not have yet comes from this NUMA node from now on, while the node has
    some (mbind, MPOL_PREFERRED). OSError where the kernel refuses it."""

def populate(address: int, num_bytes: int, threads: int) -> None:
    """Faults pages in for writing without changing them; others may use the memory meanwhile."""

class Mapping:
    """The first `num_bytes` of a region, shared and writable, not inherited by forks and in no core dump:
    a buffer. Where the region is held in huge pages it is mapped by them. It must not be longer than its
    file. Without a descriptor it is memory of this process's own, zeros, in huge pages where the kernel gives
    them. A forked child has no view of it (ValueError), and unmaps nothing when it drops it."""

    @overload
    def __init__(self, fd: int, num_bytes: int) -> None: ...
    @overload
    def __init__(self, fd: int, offset: int, num_bytes: int) -> None:
        """A part of a region, from a multiple of the page on, to be read only. All of it is faulted in."""

    @overload
    def __init__(self, num_bytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def register(self, device: int) -> None:
        """Page-locks it for every CUDA device, once, until it is unmapped; in runs that end at multiples of
        1 GiB. RuntimeError with the driver's reason where it refused some runs: those stay pageable."""

    def discard(self) -> None:
        """Gives memory of this process's own back at once, whoever still views it: that is zeros then."""

    def prefer_small_pages(self) -> None:
        """What of memory of this process's own is not there yet comes in small pages."""

    def close(self) -> None:
        """Unmaps it. BufferError while there are views; then it goes with the last of them."""

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
    """Writes a range of a region to a new file (mode 0644) and audits it in the same pass.

    `source_offset` is a multiple of the page; `chunk_bytes` too. Leaves are ranges (u64 arrays, offsets from
    `source_offset`) that do not overlap. `threads` is how many compute; three times as many
    requests are in flight. `progress`, an address or 0, is a u64 that grows by the bytes done.

    Returns (digests, checksums, direct): u64 digest of each leaf and 16-byte XXH3-128 of each chunk, of the
    very bytes that were written, and whether the page cache was bypassed all the way (`direct`, where the
    file system allows it). The file's bytes are synced; its folder is not.

    Errors: FileExistsError; OSError with errno and path for whatever the system refuses, up to sync and
    close; EIO where the region is shorter than asked. A file that was begun is removed.
    """

def read_file(
    path: str | os.PathLike[str],
    into: Buffer,
    *,
    file_offset: int = 0,
    num_bytes: int,
    chunk_bytes: int = 4194304,
    checksums: Buffer,
    leaf_offsets: Buffer,
    leaf_sizes: Buffer,
    threads: int = 2,
    direct: bool = True,
    progress: int = 0,
    cancel: int = 0,
) -> tuple[bytes, list[int], bool]:
    """Reads a file into a writable buffer and verifies every chunk in the same pass.

    The file must be a regular one (links are not followed) of exactly `file_offset` + `num_bytes` bytes, else
    ValueError and nothing is read. Chunks and leaves count from `file_offset`, a multiple of 4096;
    `checksums` holds 16 bytes a chunk. The page cache is bypassed only where the buffer lies on whole pages
    and has them to its end; that of the last byte may then be overwritten to its end.

    `cancel`: 0, or the address of a u64: once it is not 0 no chunk is begun, and OSError (ECANCELED)
    comes.

    Returns (digests, bad_chunks, direct): u64 digest of each leaf as read, indexes of the chunks whose
    checksum is not the one given, and whether the page cache was bypassed.
    """

def check_file(
    path: str | os.PathLike[str],
    *,
    num_bytes: int,
    chunk_bytes: int = 4194304,
    checksums: Buffer,
    leaf_offsets: Buffer,
    leaf_sizes: Buffer,
    threads: int = 2,
    direct: bool = True,
    progress: int = 0,
    cancel: int = 0,
) -> tuple[bytes, list[int], bool]:
    """As `read_file`, but the bytes are kept nowhere: a few chunks of memory, whatever the file's size."""

class Audit:
    """Checksums of the chunks and digests of the leaves of a file whose bytes come from elsewhere. Geometry
    as for `write_file`. Chunks come in any order and from any thread, each once."""

    def __init__(
        self, *, num_bytes: int, chunk_bytes: int, leaf_offsets: Buffer, leaf_sizes: Buffer
    ) -> None: ...
    def add(self, offset: int, data: Buffer, into: Buffer | None = None) -> bytes:
        """16 bytes for each of the chunks that stand at `offset` of the file. With `into` they are copied
        there in the same pass, and the sums are those of the copy. ValueError for a part of a chunk."""

    def digests(self) -> bytes:
        """u64 digest of each leaf; EMPTY_DIGEST for one of which a chunk never came."""

class HostEvent:
    """An event set by a thread of this process, which a `Sealer` can wait for."""

    def __init__(self) -> None: ...
    @property
    def handle(self) -> int:
        """What `Sealer.submit` takes in `waits`. A wait that has begun survives this object."""

    def set(self) -> None:
        """Happens now: all waits begun before are over, and so are those begun until `reset`."""

    def reset(self) -> None:
        """Not happened yet, for waits that begin after this."""

    def query(self) -> bool:
        """Whether it is set."""

    def wait(self, timeout_s: float) -> bool:
        """Waits until it is set; False if that takes longer. Ctrl-C is heard."""

class Sealer:
    """The thread that seals slots. It starts with the first `submit`; a forked child has its own."""

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
        moves: Buffer | None = None,
        held: Buffer | None = None,
    ) -> None:
        """Seals a slot as soon as all of `waits` have happened. Never blocks.

        Then: bytes are put in their places (`moves`: u64 triples of source, destination and bytes, flat); the
        digest table (u64[table_count] at `table`) must hold no EMPTY_DIGEST and end with the u64s of `held`;
        XXH3-128 of the metadata goes to record[0:16] and of record[0:240] to record[240:256]; the u64 at
        `word` goes from `expected` to `desired`. Where a wait failed or a digest is empty or another than is
        held the word goes to `expected` with state and owner 0 instead, and `failures` has the reason. The
        u64 at `on_done_word`, unless that is 0, grows by one when the seal is decided either way.

        Errors: ValueError for an unknown handle, or after `close`.
        """

    def drain(self, timeout_s: float) -> bool:
        """Waits until all that was submitted is decided; False if that takes longer."""

    def close(self) -> None:
        """Seals what is ready, gives up the rest (its words stay as they are) and ends the thread."""

    def failures(self) -> list[tuple[int, str, bool]]:
        """(address of the word, reason, whether every wait was over) of the seals refused since the last
        call. Where one was not, digests that it would have brought are empty. Whoever sees that a slot was
        freed by a refusal finds it here."""

def cuda_available() -> bool:
    """Whether there is a CUDA driver with at least one device. Starts the driver, makes no context."""

def cuda_pci_address(device: int) -> tuple[int, int, int]:
    """Domain, bus and device of a CUDA device's PCI address. Makes no context."""

def cuda_capturing(streams: Buffer, device: int) -> bool:
    """Whether a graph is being captured on one of these streams (u64: handles). Breaks none."""

def cuda_elapsed_s(start: int, end: int, device: int) -> float | None:
    """Seconds between two recorded events (handles); None until both have been passed, or where the driver
    refuses to answer. Breaks no graph that is being captured."""

class CudaCopies:
    """Copies from a device to host memory, on a stream of their own, enqueued by a native thread in waves.

    `handle` is for `Sealer.submit`: all that was submitted before that has been copied, or the newest of it
    has failed. Nothing of a job that is done or has failed is still written. ValueError in a forked child.
    """

    handle: int

    def __init__(self, device: int, piece_bytes: int) -> None: ...
    def submit(
        self, sources: Buffer, destinations: Buffer, sizes: Buffer, num_first: int, after: int = 0
    ) -> int:
        """u64 arrays of absolute addresses and bytes, copied in order, in pieces, once the event `after`, as
        it is recorded now, has happened. Returns at once, with a ticket. Memory must stay until then."""

    def hold(self, ticket: int, streams: Buffer) -> None:
        """What these streams get from now on waits for the ticket's `num_first` first copies. Returns when
        these are enqueued."""

    def wait(self, ticket: int, *, first: bool = False) -> None:
        """The host waits for a ticket's copies, or its first ones. RuntimeError where one of them failed."""

    def close(self) -> None:
        """Waits for what was submitted, then ends the thread."""

def cuda_digest_table(sources: Buffer, destinations: Buffer | None, sizes: Buffer) -> bytes:
    """The table of one `cuda_digest_launch`, to be put into device memory as it is (at a multiple of 16).

    u64 arrays of n device addresses and bytes. Leaves are contiguous bytes of any alignment and length, none
    included; with a destination that is not 0 what is read there is written here too. Sources may overlap
    each other. ValueError, naming the leaf's index, for an address that cannot be, or a destination that
    overlaps anything. That the memory is there, and the device's, is the caller's to know: a kernel that
    reads past an allocation ends the process's use of the device.
    """

def cuda_digest_launch(
    stream: int, table_device_address: int, num_entries: int, digests_device_address: int, device: int
) -> None:
    """Queues one pass over all leaves of a table on a stream, and returns: two fills and one kernel.

    `digests_device_address` is u64[num_entries]. All of it is EMPTY_DIGEST first; a leaf's digest, of the
    bytes that were read (and written, where there is a destination), is there when all its blocks were
    counted, and equals `digest` of the same bytes. One launch of a table must be over, in stream order,
    before the next of the same table. Not while a graph is being captured. RuntimeError with what the
    driver says.
    """

def cuda_digests_usable(device: int) -> str:
    """Loads the kernel of digests on a device and tries it there, once; "" or why it cannot be used there.

    May take a second, and two megabytes of the device meanwhile. Not while a graph is being captured.
    """

class Watch:
    """Tells which tensors are no longer where they were when it was made.

    `items` holds (container, key) for each tensor: a dict and its key, a list and its index, any object and
    an attribute's name, or (None, anything) to watch the tensor alone. Holds strong references to
    containers and tensors until `release` (the garbage collector sees through it).
    """

    def __init__(self, items: Sequence[tuple[Any, Any]], tensors: Sequence[Any]) -> None: ...
    def changed(self, addresses_out: Buffer) -> list[int]:
        """Indexes where another object stands, whose pointer, shape, strides or dtype differ, or whose
        storage has become smaller.

        Writes the data pointer of what stands there now as u64[n] to `addresses_out` (0 where nothing does,
        or where it has no memory of its own). Compared with the moment this was made, at every call.
        """

    def release(self) -> None:
        """Lets go of all tensors and containers."""

    def __len__(self) -> int: ...

class Standing:
    """Tells whether the containers of a state hold what they held when it was made.

    `guards` are (container, length); `anchors` are (container, key, object): the object must be
    `container[key]`, or the attribute of that name where the key is a str and the container no dict. Nothing
    is made by asking: of a dict whose item access is dict's own, an absent key is absent. Holds strong
    references to all of it (the garbage collector sees through it).
    """

    def __init__(
        self, guards: Sequence[tuple[Sized, int]], anchors: Sequence[tuple[Any, Any, Any]]
    ) -> None: ...
    def stands(self) -> bool:
        """Whether every container has its length and every place holds its very object.

        LookupError and AttributeError of a place mean no; what else is raised there is raised.
        """
