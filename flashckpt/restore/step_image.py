"""One rank's files of a committed step, read into memory of this process, every byte verified.

Owns that memory (`StepMemory`: private, or a memfd that the other ranks of the node map) and the read that
begins with the process (`EarlyRead`), beside imports, claim and the start of the keeper: so this module
imports neither torch nor much else. Changes nothing in the store."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TypeVar

from flashckpt import _native
from flashckpt.commit.choice import RankOffers, choose
from flashckpt.commit.lineage import history, this_host
from flashckpt.commit.steps import FileLeaf, StepRecord, read_step
from flashckpt.errors import OutOfSpaceError
from flashckpt.format.layout import ALIGNED, Layout, SlotImage
from flashckpt.format.records import CommitRecord
from flashckpt.memory import memory_budget
from flashckpt.memory.forks import OwnDescriptor
from flashckpt.store.base import Store
from flashckpt.store.read_plan import ReadPlan
from flashckpt.threads import start_thread

log = logging.getLogger(__name__)

Place = tuple[memoryview, int]
"""The start of a leaf: a buffer, and a byte of it."""
NOT_SHARED = -1
_Taken = TypeVar("_Taken")


def pages(num_bytes: int) -> int:
    """Round up to whole pages of this machine."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class StepMemory:
    """The memory of one rank for one step. file: the memfd with what it shares; None if it shares nothing.
    The memfd has no name, the keeper does not know it, and it is released with the last process that has it
    open. It cannot shrink, so no access to a mapping raises SIGBUS."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._mappings: list[_native.Mapping] = []
        self.file: OwnDescriptor | None = None

    def take(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return a private buffer of zeros for each size, rounded up to pages. Raises OutOfSpaceError."""
        return self._checked(sizes, self._private)

    def share(self, sizes: Sequence[int]) -> list[Place]:
        """Return the same in the memfd, with the byte at which each begins there. If no memfd can be created,
        they are private, with NOT_SHARED."""
        if self.file is None:
            self.file = _memfd()
        if self.file is None:
            return [(each, NOT_SHARED) for each in self.take(sizes)]
        return self._checked(sizes, self._shared)

    def mapped(self, parts: Sequence[tuple[int, int, int]]) -> memoryview:
        """Map parts of memfds next to each other: (descriptor, first byte, bytes in whole pages) each. A
        descriptor of -1 makes a hole, which must not be touched. Raises OSError."""
        rows = array("q", [number for part in parts for number in part])
        self._mappings.append(_native.Mapping(parts=rows))
        return memoryview(self._mappings[-1])

    def discard(self) -> None:
        """Release all memory now. Views that remain show zeros."""
        for each in self._mappings:
            each.discard()
        if self.file is not None:
            self.file.close()

    def _private(self, size: int) -> memoryview:
        self._mappings.append(memory_budget.huge_pages.tried(_native.Mapping(num_bytes=size), size))
        return memoryview(self._mappings[-1])

    def _shared(self, size: int) -> Place:
        assert self.file is not None
        unit = max(mmap.PAGESIZE, _native.huge_page())
        start = -(-os.fstat(self.file.descriptor).st_size // unit) * unit
        # A failure raises here; at the first access it would be SIGBUS.
        memory_budget.take(
            self.file.descriptor, size, start=start, available=lambda: memory_budget.available_bytes()
        )
        return self.mapped([(self.file.descriptor, start, size)]), start

    def _checked(self, sizes: Sequence[int], take: Callable[[int], _Taken]) -> list[_Taken]:
        rounded = [pages(size) for size in sizes]
        needed, available = sum(rounded), memory_budget.available_bytes()
        error: Exception | None = None
        if needed <= available:
            try:
                return [take(size) for size in rounded]
            except OSError as refused:
                error, available = refused, 0
            except OutOfSpaceError as refused:
                error, available = refused, refused.available
        raise OutOfSpaceError(
            f"Step {self._step} needs {needed:,} bytes of host memory to be verified before it is loaded, "
            f"and {available:,} may be taken here (the least of what the machine and every cgroup above this "
            "process leave, less a margin). Nothing was loaded or changed. Give the job more memory, use "
            "fewer loader workers, or spread the state over more ranks.",
            needed=needed,
            available=available,
        ) from error


def _memfd() -> OwnDescriptor | None:
    try:
        file = OwnDescriptor(os.memfd_create("chunks-0", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        log.info("no memory of a step is shared on this node: %s", error)
        return None
    fcntl.fcntl(file.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return file


@dataclass(frozen=True)
class StepImage:
    """One rank's leaves of a committed step. held: its own files, verified: its shard, and its constants if
    there are any, each with its first byte in the shared part of `memory`. places: of leaves that other ranks
    wrote for it, by name."""

    record: StepRecord
    rank: int
    memory: StepMemory = field(repr=False)
    held: Sequence[Place] = field(repr=False)
    places: dict[str, Place] = field(default_factory=dict, repr=False)

    def borrowed(self) -> dict[str, FileLeaf]:
        """Return the leaves that other ranks wrote for this one, by name. Raises DamagedError if they did
        not."""
        own = {path for path, _ in self.record.files(self.rank)}
        return {each.leaf.name: each for each in self.record.leaves(self.rank) if each.path not in own}

    def places_of(self, left: Layout | None) -> Sequence[Place]:
        """Return the places of a layout's leaves, which are among `places`."""
        return [self.places[leaf.name] for leaf in left.leaves] if left is not None else ()

    def discard(self) -> None:
        """Release the memory now."""
        self.memory.discard()


def read_image(
    record: StepRecord, rank: int, threads: int, cancel: int = 0, *, shared: bool = False
) -> StepImage:
    """Read one rank's files of a committed step, and what other ranks wrote for it; the latter not with
    `shared`: then the ranks of this node read it together. cancel: see `Store.read_chunks`.

    Raises what `ReadPlan.run` does, and OutOfSpaceError. Keeps nothing then.
    """
    files = record.files(rank)
    memory, plan = StepMemory(record.step), ReadPlan()
    sizes = [contents.shard.num_bytes for _, contents in files]
    try:
        held = memory.share(sizes) if shared else [(each, NOT_SHARED) for each in memory.take(sizes)]
        image = StepImage(record, rank, memory, held)
        for (into, _), (path, contents) in zip(image.held, files, strict=True):
            plan.whole_file(path, contents, into)
        if not shared:
            add_leaves(plan, image, image.borrowed())
        plan.run(record.store, threads, cancel=cancel)
    except BaseException:
        memory.discard()  # the error's traceback keeps the buffers
        raise
    return image


def layout_of(record: StepRecord, rank: int) -> tuple[SlotImage, tuple[int, ...]]:
    """Return the layout of a rank's leaves in its `StepImage`, and their digests."""
    mine = record.rank(rank)
    others = {leaf.name: digest for _, leaf, digest in mine.elsewhere()}
    left = Layout.of(leaf for _, leaf, _ in mine.elsewhere()) if others else None
    constants = mine.constants
    layout = SlotImage(
        mine.layout(), constants.layout() if constants is not None else None, kept=None, left=left
    )
    digests = mine.digests + tuple(others[leaf.name] for leaf in (left.leaves if left is not None else ()))
    return layout, digests + (constants.digests if constants is not None else ())


def add_leaves(plan: ReadPlan, image: StepImage, leaves: Mapping[str, FileLeaf]) -> None:
    """Add leaves, by their names here, to a plan, into private memory. Raises OutOfSpaceError."""
    ends = list(accumulate(-(-each.leaf.num_bytes // ALIGNED) * ALIGNED for each in leaves.values()))
    into = image.memory.take(ends[-1:])[0] if any(ends) else memoryview(b"")
    for (name, (path, contents, leaf, digest)), start in zip(leaves.items(), [0, *ends], strict=False):
        plan.copy(path, contents, contents.shard.data_start + leaf.offset, leaf.num_bytes, (), into, start)
        plan.digest(path, contents, leaf, digest)
        image.places[name] = into, start


class EarlyRead:
    """Reads in a thread the step that a resume takes if the memory of the node has nothing of the run. Raises
    and logs no errors: the resume meets them again. Whether the step is the one to resume from is decided
    later. shared: see `read_image`."""

    def __init__(
        self, store: Store, rank: int, threads: int, world: int = 1, *, shared: bool = False
    ) -> None:
        self._cancel = array("Q", [0])
        self._is_known = threading.Event()
        self._record: StepRecord | None = None
        self._image: StepImage | None = None
        self._thread = start_thread("flashckpt-read", partial(self._run, store, rank, threads, world, shared))

    def known(self, record: CommitRecord) -> StepRecord | None:
        """Return the parts of this commit that were read: of its rank, and of those that wrote for it."""
        self._is_known.wait()
        return self._record if self._record is not None and self._record.record == record else None

    def take(self, record: StepRecord) -> StepImage | None:
        """Wait for the image and hand it over to the caller, if it is of this step."""
        if self._record is not None and self._record.record != record.record:
            self.close()
        self._thread.join()
        if self._image is None or self._image.record.record != record.record:
            return None
        image, self._image = self._image, None
        return image

    def close(self) -> None:
        """Cancel the read. Returns after it has ended and its memory is released."""
        _native.store(_native.address_of(self._cancel), 1)
        self._thread.join()
        image, self._image = self._image, None
        if image is not None:
            image.discard()

    def _run(self, store: Store, rank: int, threads: int, world: int, shared: bool) -> None:
        try:
            choice = choose([RankOffers(rank, this_host())], history(store))
            for name in [each.name for each in choice.candidates[:1]]:
                record = read_step(store, name, {rank}, with_writers=True)
                if record.world != world:
                    return  # this rank needs other leaves than that rank's own files have
                self._record = record
                self._is_known.set()
                cancel = _native.address_of(self._cancel)
                self._image = read_image(record, rank, threads, cancel, shared=shared)
        except Exception as error:
            log.debug("no step was read early: %s", error)
        finally:
            self._is_known.set()
