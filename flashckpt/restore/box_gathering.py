"""Boxes of tensors out of the files of a step, put together in memory: each chunk that is needed is read and
verified once, and no other. A piece of which all is taken is compared with its digest besides. Nothing is
believed of where the bytes come from.

Threads read blocks of a few chunks side by side; beside the result each takes the memory of one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from flashckpt import _native
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Layout, Leaf
from flashckpt.format.records import Contents
from flashckpt.restore.box_copies import BoxCopy, copy_of, cut
from flashckpt.restore.step_image import UnreadableShardError
from flashckpt.restore.step_leaves import BoxRegion, Parts, Piece, StepFile, shape_of
from flashckpt.store.base import LOST_BYTES, LengthError
from flashckpt.store.image_sums import LeafDigest

BLOCK_CHUNKS = 4
# Each has a block in memory; more than these seldom read any faster.
MOST_THREADS = 8


class Source(Protocol):
    """Where chunks come from: a store, or something that reads what it lacks from one."""

    @property
    def url(self) -> str: ...

    def read_bytes(self, path: str, offset: int, num_bytes: int, file_bytes: int | None = None) -> bytes:
        """See `Store.read_bytes`."""


def gather(source: Source, layout: Layout, parts: Sequence[Parts], into: memoryview, threads: int) -> int:
    """Fill an image of `layout`, whose leaves are made up of `parts`, in its order. Returns the bytes read.
    Raises as `Gathering.run` does."""
    into[: layout.data_start] = layout.header
    return Gathering.of(layout, parts).run(source, into, threads)


class Gathering:
    """What is to be done to put leaves together, by file and block of it."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[str, int], _Block] = {}
        self._digests: list[PieceDigest] = []
        self.num_bytes = 0

    @classmethod
    def of(cls, layout: Layout, parts: Sequence[Parts]) -> Gathering:
        """All leaves of an image, which are made up of `parts`, in its order."""
        found = cls()
        for leaf, made_of in zip(layout.leaves, parts, strict=True):
            found.take(leaf, layout.data_start + leaf.offset, made_of)
        return found

    def take(self, leaf: Leaf, target: int, parts: Parts, sliced: SlicedDigests | None = None) -> None:
        """Also this leaf, which begins at `target` of the image. sliced: takes the digests of pieces of which
        this leaf has some rows; the caller checks them after the last row."""
        wanted = BoxRegion.of(leaf)
        self.num_bytes += leaf.num_bytes
        for piece, common in parts:
            shard = piece.file.contents.shard
            begin, block_bytes = shard.data_start + piece.leaf.offset, BLOCK_CHUNKS * shard.chunk_bytes
            if len(common.shape) != len(wanted.shape):
                flat = wanted.flat(shape_of(leaf))
                assert flat is not None, leaf.name
                wanted = flat
            whole = copy_of(piece.leaf, begin, piece.region, wanted, target, common)
            for number, copy in cut(whole, block_bytes, shard.chunk_bytes):
                self._at(piece.file, number).copies.append(copy)
            if sliced is not None:
                low, high = piece.rows(common)
                self._digest(sliced.of(piece, begin), begin + low, begin + high, block_bytes)
            elif common == piece.region:
                digest = PieceDigest(piece, begin)
                self._digests.append(digest)
                self._digest(digest, begin, begin + piece.leaf.num_bytes, block_bytes)

    def needs(self) -> Iterator[tuple[str, Contents, int, int]]:
        """The chunks that are read, in runs, in order: of which file, the first and the one behind the
        last."""
        for block in self._in_order():
            contents = block.file.contents
            for first, last in block.chunks(contents.shard.chunk_bytes):
                yield block.file.path, contents, first, last

    def run(self, source: Source, into: memoryview, threads: int) -> int:
        """Fill the image. Returns the bytes read. It may be run again.

        Raises DamagedError where a chunk or a piece is not what was committed, UnreadableShardError where the
        disk does not give one, OSError.
        """
        for digest in self._digests:
            digest.reset()
        # Whatever fails, nothing writes to the memory any more once this is left.
        pool = ThreadPoolExecutor(max(1, min(threads, MOST_THREADS)), "flashckpt-gather")
        try:
            read = list(pool.map(lambda block: block.run(source, into), self._in_order()))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        for digest in self._digests:
            digest.check(source.url)
        return sum(read)

    def _digest(self, digest: PieceDigest, begin: int, stop: int, block_bytes: int) -> None:
        piece = digest.piece
        for number in range(begin // block_bytes, -(-stop // block_bytes)):
            first, last = max(begin, number * block_bytes), min(stop, (number + 1) * block_bytes)
            self._at(piece.file, number).digests.append((first, last, digest))

    def _at(self, file: StepFile, number: int) -> _Block:
        place = file.path, number
        if place not in self._by_place:
            self._by_place[place] = _Block(file)
        return self._by_place[place]

    def _in_order(self) -> list[_Block]:
        return [block for _, block in sorted(self._by_place.items(), key=lambda item: item[0])]


@dataclass(slots=True)
class _Block:
    """The copies from a few chunks of one file that stand beside each other, and the digests that go over
    bytes of them (first byte, the one behind the last)."""

    file: StepFile
    copies: list[BoxCopy] = field(default_factory=list)
    digests: list[tuple[int, int, PieceDigest]] = field(default_factory=list)

    def run(self, source: Source, into: memoryview) -> int:
        """The number of bytes that were read."""
        total, chunk_bytes = 0, self.file.contents.shard.chunk_bytes
        for first, last in self.chunks(chunk_bytes):
            data, begin = memoryview(self._read(source, first, last)), first * chunk_bytes
            stop = begin + len(data)
            for copy in self.copies:
                if begin <= copy.source < stop:
                    copy.execute(data, begin, into)
            for low, high, digest in self.digests:
                if begin <= low < stop:
                    digest.add(low, data[low - begin : high - begin])
            total += len(data)
        return total

    def chunks(self, chunk_bytes: int) -> Iterator[tuple[int, int]]:
        """Chunks that are needed, in runs: the first and the one behind the last."""
        ranges = [(copy.source, copy.stop) for copy in self.copies]
        ranges += [(low, high) for low, high, _ in self.digests]
        run = (0, 0)
        for start, stop in sorted((low // chunk_bytes, -(-high // chunk_bytes)) for low, high in ranges):
            if start > run[1]:
                if run[1] > run[0]:
                    yield run
                run = (start, stop)
            else:
                run = (run[0] if run[1] else start, max(run[1], stop))
        if run[1] > run[0]:
            yield run

    def _read(self, source: Source, first: int, last: int) -> bytes:
        shard = self.file.contents.shard
        begin = first * shard.chunk_bytes
        try:
            stop = min(last * shard.chunk_bytes, shard.num_bytes)
            data = source.read_bytes(self.file.path, begin, stop - begin, shard.num_bytes)
        except FileNotFoundError:
            raise self._damaged(source, "it is missing") from None
        except LengthError as error:
            raise self._damaged(source, f"it has {error}") from error
        except OSError as error:
            if error.errno in LOST_BYTES:
                where = f"{source.url}/{self.file.path}"
                raise UnreadableShardError(error.errno, error.strerror, where) from error
            raise
        address = _native.address_of(data)
        for index in range(first, last):
            start = (index - first) * shard.chunk_bytes
            num_bytes = min(shard.chunk_bytes, len(data) - start)
            if _native.xxh3_128_at(address + start, num_bytes) != shard.checksums[16 * index :][:16]:
                raise self._damaged(source, f"chunk {index} does not have its checksum")
        return data

    def _damaged(self, source: Source, why: str) -> DamagedError:
        where = f"{source.url}/{self.file.path}"
        return DamagedError(f"{where} is damaged: {why}. Nothing of it was loaded.", path=where)


class PieceDigest:
    """The digest of one piece, of bytes that come in any order and from several threads. `begin`: where it
    begins in its file."""

    def __init__(self, piece: Piece, begin: int) -> None:
        self.piece, self._begin = piece, begin
        self.reset()

    def reset(self) -> None:
        """Nothing has come yet."""
        self._digest = LeafDigest(self.piece.leaf.num_bytes)

    def add(self, offset: int, data: memoryview) -> None:
        """Bytes that stand at `offset` of the file."""
        self._digest.add(offset - self._begin, data)

    def check(self, url: str) -> None:
        """DamagedError where it is not that of the boundary."""
        if self._digest.value() != self.piece.digest:
            where = f"{url}/{self.piece.file.path}"
            raise DamagedError(
                f"{where} is damaged: {self.piece.leaf.name} is not what was captured. Nothing of it was "
                "loaded.",
                path=where,
            )


class SlicedDigests:
    """The digests of pieces whose bytes come in several gatherings, each byte once."""

    def __init__(self) -> None:
        self._by_piece: dict[tuple[str, str], PieceDigest] = {}

    def of(self, piece: Piece, begin: int) -> PieceDigest:
        key = piece.file.path, piece.leaf.name
        if key not in self._by_piece:
            self._by_piece[key] = PieceDigest(piece, begin)
        return self._by_piece[key]

    def check(self, url: str) -> None:
        """DamagedError where one is not that of the boundary, once all bytes have come."""
        for digest in self._by_piece.values():
            digest.check(url)
