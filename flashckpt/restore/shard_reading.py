"""One rank's shard on its way into a slot: every chunk and every leaf is verified as it arrives.

Begins while the slot's region is still being made, where it can: taking memory is otherwise a third of
the time that a load from a fast disk takes. Owns the thread that reads; seals nothing.
"""

from __future__ import annotations

import os
import threading
from array import array

from flashckpt import _native
from flashckpt.commit.steps import StepRecord
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Layout
from flashckpt.format.records import RankRecord
from flashckpt.restore.memory_tier import Held

Read = tuple[bytes, list[int]]
"""The digest of each leaf as it was read, and the chunks whose checksum is not the committed one."""


class ShardReading:
    """`begin` may be called once, with a region that is still growing; `into` gives the whole shard in the
    slot that was granted in the end; `close` ends what was begun in vain."""

    def __init__(self, record: StepRecord, mine: RankRecord, layout: Layout, threads: int) -> None:
        self._record, self._mine, self._layout, self._threads = record, mine, layout, threads
        self._path = record.shard_path(mine.rank)
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
        """The shard, whole and verified, in the image of a slot.

        Raises DamagedError where a byte is not what was committed, OSError where it cannot be read.
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

    def _read(self, descriptor: int, image_offset: int, growing: int = 0) -> Read:
        shard, leaves = self._mine.shard, self._layout.leaves
        try:
            digests, bad_chunks, _ = _native.read_file(
                self._path,
                descriptor,
                image_offset,
                num_bytes=shard.num_bytes,
                chunk_bytes=shard.chunk_bytes,
                checksums=shard.checksums,
                leaf_offsets=array("Q", [self._layout.data_start + leaf.offset for leaf in leaves]),
                leaf_sizes=array("Q", [leaf.num_bytes for leaf in leaves]),
                threads=self._threads,
                growing=growing,
            )
        except ValueError as error:
            # The native reader's word for a file of another length, which it had when the step was listed.
            raise self._damaged(f"{self._path}: {error}. Nothing of it was loaded.") from error
        return digests, bad_chunks

    def _check(self, found: Read, held: Held) -> None:
        digests, bad_chunks = array("Q", found[0]), found[1]
        wrong = [
            leaf.name
            for leaf, seen, expected in zip(self._layout.leaves, digests, self._mine.digests, strict=True)
            if seen != expected
        ]
        if bad_chunks or wrong:
            where = f"chunks {bad_chunks[:5]}" if bad_chunks else f"leaves {', '.join(wrong[:5])}"
            raise self._damaged(
                f"{self._path} is not what was committed ({where}; a chunk is {self._mine.shard.chunk_bytes} "
                "bytes). Nothing of it was loaded; an older step is taken. Keep the file if the disk's fault "
                "is to be found."
            )
        if bytes(held.slot.image_view[: self._layout.data_start]) != self._layout.header:
            raise self._damaged(
                f"{self._path}'s header is not that of its leaves. Nothing of it was loaded; an older "
                "step is taken."
            )

    def _damaged(self, message: str) -> DamagedError:
        return DamagedError(message, step=self._record.step, path=self._path)
