"""One rank's files of a committed step, read into memory of this process, every byte verified.

Owns that memory (`StepMemory`: private, or a memfd that the other ranks of the node map). Changes nothing
in the store."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

from flashckpt import _native
from flashckpt.commit.steps import FileLeaf, StepRecord
from flashckpt.errors import OutOfSpaceError
from flashckpt.format.layout import ALIGNED, Layout, SlotImage
from flashckpt.memory import memory_budget
from flashckpt.memory.forks import OwnDescriptor
from flashckpt.store.read_plan import ReadPlan

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


def read_image(record: StepRecord, rank: int, threads: int, *, shared: bool = False) -> StepImage:
    """Read one rank's files of a committed step, and what other ranks wrote for it; the latter not with
    `shared`: then the ranks of this node read it together.

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
        plan.run(record.store, threads)
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
