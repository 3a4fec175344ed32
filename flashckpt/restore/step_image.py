"""A committed step in memory of this process's own: a rank's files, every byte verified as it arrives.

No slot: a step at rest is lost by nobody's death, and without one reading needs no keeper. So it begins with
the process (`EarlyRead`), beside imports, claim and the keeper's start, and its memory is gone before slots
are asked for. Changes nothing in the store; imports no torch.
"""

from __future__ import annotations

import errno
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from flashckpt import _native
from flashckpt.commit.lineage import sources
from flashckpt.commit.steps import StepRecord, read_step
from flashckpt.errors import DamagedError, OutOfRoomError
from flashckpt.events import log
from flashckpt.format.records import Contents
from flashckpt.memory import room
from flashckpt.memory.control_page import round_up
from flashckpt.store.base import Read, Store

# What a file system answers for a sector, a block or a tree of a file that it cannot give any more. A server
# that is away, a permission, a time-out are others: those say nothing of the file.
LOST_BYTES = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EILSEQ})


class UnreadableShardError(OSError):
    """The bytes of one shard cannot be had, as its file system says: of the disk, or of this host."""


@dataclass(frozen=True)
class StepImage:
    """The files of one rank, verified: `images` holds its shard and, where it has any, its constants."""

    record: StepRecord
    rank: int
    images: Sequence[memoryview] = field(repr=False)
    _memory: Sequence[_native.Mapping] = field(repr=False)

    def discard(self) -> None:
        """Give the memory back now, whoever still has a view of it: that shows zeros."""
        for each in self._memory:
            each.discard()


def read_image(record: StepRecord, rank: int, threads: int, cancel: int = 0) -> StepImage:
    """Read one rank's files of a committed step. `cancel`: see `Store.read_ranges`.

    Raises DamagedError where a byte is not what was committed, UnreadableShardError where the disk does not
    give it, OSError where it cannot be read for another reason, OutOfRoomError where there is no memory for
    it. Nothing is kept then.
    """
    files = record.files(rank)
    memory = private_memory(record.step, [round_up(contents.shard.num_bytes) for _, contents in files])
    image = StepImage(record, rank, [memoryview(each) for each in memory], memory)
    try:
        for into, (path, contents) in zip(image.images, files, strict=True):
            _ShardFile(record, path, contents).read(into, threads, cancel)
    except BaseException:
        image.discard()  # whoever keeps the error keeps what was read into, too
        raise
    return image


def private_memory(step: int, sizes: Sequence[int]) -> list[_native.Mapping]:
    """Memory for images of these bytes, of this process's own. OutOfRoomError where there is none."""
    needed, available = sum(sizes), room.available_bytes()
    error = None
    if needed <= available:
        try:
            return [_native.Mapping(num_bytes=each) for each in sizes]
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

    def read(self, into: memoryview, threads: int, cancel: int) -> None:
        """Read it whole and verified; raises as `read_image` does."""
        try:
            found = self._store.read_ranges(self._path, self._contents, into, threads=threads, cancel=cancel)
        except DamagedError as error:
            raise self._damaged(f"{error}. Nothing of it was loaded.") from error
        except OSError as error:
            if error.errno in LOST_BYTES:
                raise UnreadableShardError(error.errno, error.strerror, self._named) from error
            raise
        self._check(found, into)

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


class EarlyRead:
    """Reads, in a thread, the step that a resume would take if nothing of the run is in memory. Says and
    raises nothing: whatever is wrong, the resume comes to it by itself. What is read is a copy of a step that
    was whole; whether it is the one to go on from is decided later, by who takes it."""

    def __init__(self, store: Store, rank: int, threads: int, world: int = 1) -> None:
        self._cancel = array("Q", [0])
        self._record: StepRecord | None = None
        self._image: StepImage | None = None
        self._thread = threading.Thread(
            target=self._run, args=(store, rank, threads, world), name="flashckpt-read", daemon=True
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

    def _run(self, store: Store, rank: int, threads: int, world: int) -> None:
        try:
            for each in sources(store, {}, says=False)[:1]:
                record = read_step(store, each.step, each.attempt, {rank})
                if record.world != world:
                    return  # a rank's own files are not what this one takes of it
                self._record = record
                self._image = read_image(self._record, rank, threads, _native.address_of(self._cancel))
        except Exception as error:
            log.debug("no step was read early: %s", error)


def _is_same(one: StepRecord, other: StepRecord) -> bool:
    """The manifest has the checksums of its parts, and they have those of all bytes."""
    return (one.step, one.attempt, one.manifest) == (other.step, other.attempt, other.manifest)
