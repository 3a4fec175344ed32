"""A committed step in memory of this process's own: a rank's files, every byte verified as it arrives.

No slot: a step at rest is lost by nobody's death, and without one reading needs no keeper. So it begins with
the process (`EarlyRead`), beside imports, claim and the keeper's start, and its memory is gone before slots
are asked for. Changes nothing in the store; imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flashckpt import _native
from flashckpt.commit.lineage import sources
from flashckpt.commit.steps import StepRecord, read_step
from flashckpt.errors import DamagedError, OutOfRoomError
from flashckpt.format.layout import Layout, Leaf, SlotImage
from flashckpt.format.records import Contents
from flashckpt.memory import room
from flashckpt.memory.control_page import round_up
from flashckpt.restore.box_reading import BoxReader
from flashckpt.store.base import LOST_BYTES, Read, Store

log = logging.getLogger(__name__)


class UnreadableShardError(OSError):
    """The bytes of one shard cannot be had, as its file system says: of the disk, or of this host."""


@dataclass(frozen=True)
class StepImage:
    """What one rank has of a step, verified: `images` holds its shard, with what other ranks wrote for it
    behind, unless only its own files were read (`is_whole`), and its constants, where it has any."""

    record: StepRecord
    rank: int
    images: Sequence[memoryview] = field(repr=False)
    _memory: Sequence[_native.Mapping] = field(repr=False)
    is_whole: bool = True

    def discard(self) -> None:
        """Give the memory back now, whoever still has a view of it: that shows zeros."""
        for each in self._memory:
            each.discard()


def read_image(
    record: StepRecord, rank: int, threads: int, cancel: int = 0, *, own_alone: bool = False
) -> StepImage:
    """Read one rank's files of a committed step, and of those of others what they wrote for it; with
    `own_alone` there is memory for that, and it is not read. `cancel`: see `Store.read_ranges`.

    Raises DamagedError where a byte is not what was committed, UnreadableShardError where the disk does not
    give it, OSError where it cannot be read for another reason, OutOfRoomError where there is no memory for
    it. Nothing is kept then.
    """
    files = [_ShardFile(record, path, contents) for path, contents in record.files(rank)]
    borrowed = _borrowed(record, rank)
    layout, _ = image_of(record, rank)
    sizes = [round_up(layout.num_bytes), *(each.room for each in files[1:])]
    read_now = [] if own_alone else borrowed
    more = max((each.file.room for each in read_now if each.is_most), default=0)
    memory = private_memory(record.step, sizes, more)
    is_whole = len(read_now) == len(borrowed)
    image = StepImage(record, rank, [memoryview(each) for each in memory], memory, is_whole)
    try:
        for into, file in zip(image.images, files, strict=True):
            file.read(into[: file.room], threads, cancel)
        starts = {leaf.name: start for leaf, start in zip(layout.leaves, layout.starts(), strict=True)}
        for each in read_now:
            each.read(image.images[0], starts, threads, cancel)
    except BaseException:
        image.discard()  # whoever keeps the error keeps what was read into, too
        raise
    return image


def image_of(record: StepRecord, rank: int) -> tuple[SlotImage, tuple[int, ...]]:
    """Where `read_image` puts the leaves of a rank, and their digests."""
    mine = record.rank(rank)
    others = {leaf.name: digest for _, leaf, digest in mine.elsewhere()}
    kept = Layout.of(leaf for _, leaf, _ in mine.elsewhere()) if others else None
    constants = mine.constants
    layout = SlotImage(mine.layout(), constants.layout() if constants is not None else None, kept)
    digests = mine.digests + tuple(others[leaf.name] for leaf in (kept.leaves if kept is not None else ()))
    return layout, digests + (constants.digests if constants is not None else ())


def _borrowed(record: StepRecord, rank: int) -> list[_Borrowed]:
    """The files of other ranks that have leaves of this one."""
    own = {path for path, _ in record.files(rank)}
    found: dict[str, _Borrowed] = {}
    for path, contents, leaf, _ in record.leaves(rank):
        if path not in own:
            found.setdefault(path, _Borrowed(_ShardFile(record, path, contents), [])).leaves.append(leaf)
    return list(found.values())


def private_memory(step: int, sizes: Sequence[int], more: int = 0) -> list[_native.Mapping]:
    """Memory for images of these bytes, of this process's own. OutOfRoomError where there is none, or not so
    many bytes `more`."""
    needed, available = sum(sizes) + more, room.available_bytes()
    error = None
    if needed <= available:
        try:
            return [room.huge_pages.tried(_native.Mapping(num_bytes=each), each) for each in sizes]
        except OSError as refused:
            error, available = refused, 0
    raise OutOfRoomError(
        f"Step {step} needs {needed:,} bytes of host memory to be verified before it is loaded, and "
        f"{available:,} may be taken here (the least of what the machine and every cgroup above this process "
        "leave, less a margin). Nothing was loaded or changed. Give the job more memory, use fewer loader "
        "workers, or spread the state over more ranks.",
        needed=needed,
        available=available,
    ) from error


class _ShardFile:
    """One file of a step."""

    def __init__(self, record: StepRecord, path: str, contents: Contents) -> None:
        self._step, self._store = record.step, record.store
        self._path, self._contents = path, contents

    @property
    def room(self) -> int:
        """Bytes of memory that it is read into."""
        return round_up(self._contents.shard.num_bytes)

    @property
    def data_start(self) -> int:
        return self._contents.shard.data_start

    def read(self, into: memoryview, threads: int, cancel: int) -> None:
        """Read it whole and verified; raises as `read_image` does."""
        with self._told():
            found = self._store.read_ranges(self._path, self._contents, into, threads=threads, cancel=cancel)
        self._check(found, into)

    def read_leaves(
        self, leaves: Sequence[Leaf], put: Callable[[Leaf, bytearray], None], cancel: int
    ) -> None:
        """Read a few of its leaves, in the order of their places in it; raises as `read_image` does."""
        reader = BoxReader(self._store, self._path, self._contents)
        for leaf in sorted(leaves, key=lambda each: each.offset):
            if cancel and _native.load(cancel):
                raise OSError(errno.ECANCELED, "nobody wants it any more")
            with self._told():
                put(leaf, reader.leaf(leaf))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except DamagedError as error:
            raise self._damaged(f"{error}. Nothing of it was loaded.") from error
        except OSError as error:
            if error.errno in LOST_BYTES:
                raise UnreadableShardError(error.errno, error.strerror, self._named) from error
            raise

    def _check(self, found: Read, image: memoryview) -> None:
        layout, wrong = self._contents.layout(), found.wrong_leaves(self._contents)
        if found.bad_chunks or wrong:
            where = f"chunks {found.bad_chunks[:5]}" if found.bad_chunks else f"leaves {', '.join(wrong[:5])}"
            raise self._damaged(
                f"it is not what was committed ({where}; chunks of {self._contents.shard.chunk_bytes} "
                "bytes). "
                "Nothing of it was loaded; an older step is taken. Keep the file if the disk's fault is to "
                "be found.",
            )
        if bytes(image[: layout.data_start]) != layout.header:
            raise self._damaged(
                "its header is not that of its leaves. Nothing of it was loaded; an older step is taken."
            )

    def _damaged(self, message: str) -> DamagedError:
        return DamagedError(f"{self._named}: {message}", step=self._step, path=self._named)

    @property
    def _named(self) -> str:
        return f"{self._store.url}/{self._path}"


@dataclass(frozen=True)
class _Borrowed:
    """Leaves in a file of another rank, with their places in that file."""

    file: _ShardFile
    leaves: list[Leaf]

    @property
    def is_most(self) -> bool:
        """Whether they are most of the file: then it is read in one pass."""
        return 2 * sum(leaf.num_bytes for leaf in self.leaves) > self.file.room

    def read(self, image: memoryview, starts: Mapping[str, int], threads: int, cancel: int) -> None:
        """Put them where they stand in the image. Raises as `read_image` does."""

        def put(leaf: Leaf, data: memoryview | bytearray) -> None:
            start = starts[leaf.name]
            image[start : start + leaf.num_bytes] = memoryview(data)[: leaf.num_bytes]

        if not self.is_most:
            self.file.read_leaves(self.leaves, put, cancel)
            return
        memory = _native.Mapping(num_bytes=self.file.room)
        try:
            whole = memoryview(memory)
            self.file.read(whole, threads, cancel)
            for leaf in self.leaves:
                put(leaf, whole[self.file.data_start + leaf.offset :])
        finally:
            memory.discard()


class EarlyRead:
    """Reads, in a thread, the step that a resume would take if nothing of the run is in memory. Says and
    raises nothing: whatever is wrong, the resume comes to it by itself. What is read is a copy of a step that
    was whole; whether it is the one to go on from is decided later, by who takes it. `own_alone`: see
    `read_image`."""

    def __init__(
        self, store: Store, rank: int, threads: int, world: int = 1, *, own_alone: bool = False
    ) -> None:
        self._cancel = array("Q", [0])
        self._record: StepRecord | None = None
        self._image: StepImage | None = None
        self._thread = threading.Thread(
            target=self._run,
            args=(store, rank, threads, world, own_alone),
            name="flashckpt-read",
            daemon=True,
        )
        self._thread.start()

    def take(self, record: StepRecord) -> StepImage | None:
        """What was read, waited for, where it is of this very step. It is the caller's from here on."""
        if self._record is not None and not _is_same(self._record, record):
            self.close()
        self._thread.join()
        if self._image is None or not _is_same(self._image.record, record):
            return None
        image, self._image = self._image, None
        return image

    def close(self) -> None:
        """Nobody wants it. Returns when nothing is read any more and its memory has gone."""
        _native.store(_native.address_of(self._cancel), 1)
        self._thread.join()
        image, self._image = self._image, None
        if image is not None:
            image.discard()

    def _run(self, store: Store, rank: int, threads: int, world: int, own_alone: bool) -> None:
        try:
            for each in sources(store, {}, says=False)[:1]:
                record = read_step(store, each.step, each.attempt, {rank}, with_writers=True)
                if record.world != world:
                    return  # a rank's own files are not what this one takes of it
                self._record = record
                cancel = _native.address_of(self._cancel)
                self._image = read_image(record, rank, threads, cancel, own_alone=own_alone)
        except Exception as error:
            log.debug("no step was read early: %s", error)


def _is_same(one: StepRecord, other: StepRecord) -> bool:
    """The manifest has the checksums of its parts, and they have those of all bytes."""
    return (one.step, one.attempt, one.manifest) == (other.step, other.attempt, other.manifest)
