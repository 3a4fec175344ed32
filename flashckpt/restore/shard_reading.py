"""A file of a rank on its way into memory: every chunk and every leaf is verified as it arrives.

Begins while the slot's region is still being made, where it can: taking memory is otherwise a third of
the time that a load from a fast disk takes. Owns the thread that reads; seals nothing.
"""

from __future__ import annotations

import errno
import os
import threading
from array import array

from flashckpt import _native
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import DamagedError
from flashckpt.format.records import Contents
from flashckpt.restore.memory_tier import Held
from flashckpt.store.base import MemoryRange, Read

# What a file system answers for a sector, a block or a tree of a file that it cannot give any more. A server
# that is away, a permission, a time-out are others: those say nothing of the file.
_LOST_BYTES = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EILSEQ})


class UnreadableShardError(OSError):
    """The bytes of one shard cannot be had, as its file system says: of the disk, or of this host."""


class ShardReading:
    """`begin` may be called once, with a region that is still growing; `into` gives the whole file in the
    slot that was granted in the end; `close` ends what was begun in vain."""

    def __init__(self, record: StepRecord, path: str, contents: Contents, threads: int) -> None:
        self._step, self._store, self._threads = record.step, record.store, threads
        self._path, self._contents = path, contents
        self._given_up = array("Q", [0])
        self._descriptor = -1
        self._image_offset = 0
        self._thread: threading.Thread | None = None
        self._found: Read | None = None
        self._error: Exception | None = None

    def begin(self, descriptor: int, image_offset: int) -> None:
        """Read into a region that grows. The descriptor is ours from here on."""
        self._descriptor, self._image_offset = descriptor, image_offset
        self._thread = threading.Thread(target=self._early, name="flashckpt-read", daemon=True)
        self._thread.start()

    def into(self, held: Held) -> None:
        """The file, whole and verified, in the image of a slot.

        Raises DamagedError where a byte is not what was committed, UnreadableShardError where the disk does
        not give it, OSError where it cannot be read for another reason.
        """
        found = self._begun_in(held)
        if found is None:
            self.close()
            found = self._read(held.slot.descriptor, held.slot.image_offset)
        self._check(found, held)

    def close(self) -> None:
        """Stop waiting for a region that will not be whole. Returns when nothing is read any more."""
        _native.store(_native.address_of(self._given_up), 1)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _begun_in(self, held: Held) -> Read | None:
        """What was read early, if it was read into this very slot."""
        if self._thread is None or self._image_offset != held.slot.image_offset:
            return None
        if not os.path.samestat(os.fstat(self._descriptor), os.fstat(held.slot.descriptor)):
            return None
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def _early(self) -> None:
        try:
            self._found = self._read(
                self._descriptor, self._image_offset, growing=_native.address_of(self._given_up)
            )
        except Exception as error:  # raised to whoever asks for the shard
            self._error = error

    def _read(self, descriptor: int, offset: int, growing: int = 0) -> Read:
        region = MemoryRange(descriptor, offset)
        try:
            return self._store.read_ranges(
                self._path, self._contents, region, threads=self._threads, growing=growing
            )
        except DamagedError as error:
            raise self._damaged(f"{error}. Nothing of it was loaded.") from error
        except OSError as error:
            if error.errno in _LOST_BYTES:
                raise UnreadableShardError(error.errno, error.strerror, self._named) from error
            raise

    def _check(self, found: Read, held: Held) -> None:
        layout, wrong = self._contents.layout(), found.wrong_leaves(self._contents)
        if found.bad_chunks or wrong:
            where = f"chunks {found.bad_chunks[:5]}" if found.bad_chunks else f"leaves {', '.join(wrong[:5])}"
            raise self._damaged(
                f"it is not what was committed ({where}; chunks of {self._contents.shard.chunk_bytes} "
                "bytes). "
                "Nothing of it was loaded; an older step is taken. Keep the file if the disk's fault is to "
                "be found.",
            )
        if bytes(held.slot.image_view[: layout.data_start]) != layout.header:
            raise self._damaged(
                "its header is not that of its leaves. Nothing of it was loaded; an older step is taken."
            )

    def _damaged(self, message: str) -> DamagedError:
        return DamagedError(f"{self._named}: {message}", step=self._step, path=self._named)

    @property
    def _named(self) -> str:
        return f"{self._store.url}/{self._path}"
