"""Each way of bringing one large object to an S3 server, and of getting it into memory.

Owns how each client is set up: parts and ranges of 16 MiB, eight at once, payloads unsigned and no sums but
flashckpt's own, so that all send the same bytes. Imports nothing but the standard library until one is asked
for: each runs in a process of its own, one of them perhaps in another environment.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from flashckpt.format.layout import Layout

PART_BYTES = 16 << 20
AT_ONCE = 8
LEAVES = 300
"""Of the image that flashckpt digests, leaf by leaf."""


@dataclass(frozen=True)
class Place:
    """Where an object goes: the server, with what it takes to get in, a bucket and a key."""

    endpoint: str
    access_key: str
    secret_key: str
    region: str
    bucket: str
    key: str


class Memory:
    """A file in memory, mapped and faulted in already, and as much room of this process's own, which it has
    had before. `sums`: a file with what flashckpt found of the bytes."""

    def __init__(self, file: str, leaf_bytes: int, sums: str) -> None:
        self.leaf_bytes, self.sums = leaf_bytes, Path(sums)
        self.descriptor = os.open(file, os.O_RDONLY)
        self.num_bytes = os.fstat(self.descriptor).st_size
        how = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.view = memoryview(mmap.mmap(self.descriptor, self.num_bytes, how, mmap.PROT_READ))
        self.room = mmap.mmap(-1, -(-self.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.room.madvise(mmap.MADV_HUGEPAGE)
        self.new_memory_s = _faulted_in(self.room)


class Client(Protocol):
    """Made before the clock runs: what is imported and connected is not measured."""

    def upload(self, memory: Memory) -> None: ...
    def download(self, memory: Memory) -> None:
        """All of it, into the room where the client can, else into buffers of its own."""


class Flashckpt:
    def __init__(self, place: Place) -> None:
        from flashckpt.store import open_store

        self._path = place.key
        options = {
            "endpoint": place.endpoint, "access_key_id": place.access_key,
            "secret_access_key": place.secret_key, "region": place.region,
        }  # fmt: skip
        self._store = open_store(f"s3://{place.bucket}", options)
        self._store.exists("warm/up")

    def upload(self, memory: Memory) -> None:
        from flashckpt.store.base import MemoryRange

        region = MemoryRange(memory.descriptor, 0)
        written = self._store.write_shard(self._path, layout_of(memory.leaf_bytes), region)
        found = {"checksums": written.checksums.hex(), "digests": written.digests.tolist()}
        memory.sums.write_text(json.dumps(found))

    def download(self, memory: Memory) -> None:
        from flashckpt.format.records import Contents
        from flashckpt.store.read_plan import read_shard

        found, layout = json.loads(memory.sums.read_text()), layout_of(memory.leaf_bytes)
        checksums = bytes.fromhex(found["checksums"])
        contents = Contents.of(self._path, layout, checksums, found["digests"])
        read = read_shard(self._store, self._path, contents, memoryview(memory.room))
        if read.bad_chunks or read.wrong_leaves(contents):
            raise RuntimeError("what came back is not what was sent")


class Obstore:
    """As a program that knows it would use it; what is downloaded stays in the buffers that it gives."""

    def __init__(self, place: Place) -> None:
        import obstore
        from obstore.store import S3Store

        self._obstore, self._key = obstore, place.key
        self._store = S3Store(
            place.bucket, endpoint=place.endpoint, access_key_id=place.access_key, region=place.region,
            secret_access_key=place.secret_key, unsigned_payload=True, client_options={"allow_http": True},
        )  # fmt: skip
        list(obstore.list(self._store, "warm/up"))

    def put(self, key: str, data: bytes) -> None:
        self._obstore.put(self._store, key, data, use_multipart=False)

    def upload(self, memory: Memory) -> None:
        self._send(_parts(memory))

    def _send(self, parts: Iterator[memoryview]) -> None:
        how: dict[str, Any] = {"chunk_size": PART_BYTES, "max_concurrency": AT_ONCE}
        self._obstore.put(self._store, self._key, parts, use_multipart=True, **how)

    def download(self, memory: Memory) -> None:
        def one(start: int, stop: int) -> Any:
            return self._obstore.get_range(self._store, self._key, start=start, end=stop)

        found = _each(one, memory.num_bytes)
        assert sum(map(len, found)) == memory.num_bytes


class ObstoreWindows(Obstore):
    """With each part mapped alone, as flashckpt maps them: what that takes of its upload."""

    def __init__(self, place: Place) -> None:
        from flashckpt import _native

        super().__init__(place)
        self._mapping = _native.Mapping

    def upload(self, memory: Memory) -> None:
        self._send(self._windows(memory))

    def _windows(self, memory: Memory) -> Iterator[memoryview]:
        for start in range(0, memory.num_bytes, PART_BYTES):
            size = min(PART_BYTES, memory.num_bytes - start)
            yield memoryview(self._mapping(memory.descriptor, start, size))


class ObstoreSums(Obstore):
    """With flashckpt's checksums and digests of each part: what these take of its upload."""

    def __init__(self, place: Place) -> None:
        from flashckpt.format.records import CHUNK_BYTES
        from flashckpt.store.read_plan import ImageSums

        super().__init__(place)
        self._sums_of, self._chunk_bytes = ImageSums, CHUNK_BYTES

    def upload(self, memory: Memory) -> None:
        sums = self._sums_of(layout_of(memory.leaf_bytes), self._chunk_bytes)

        def parts() -> Iterator[memoryview]:
            for number, part in enumerate(_parts(memory)):
                sums.add(number * PART_BYTES, part)
                yield part

        self._send(parts())


class BotoParts:
    """boto3, with threads of the program's own."""

    def __init__(self, place: Place) -> None:
        self._client, self._at = boto(place), {"Bucket": place.bucket, "Key": place.key}

    def upload(self, memory: Memory) -> None:
        parts = list(_parts(memory))
        upload = self._client.create_multipart_upload(**self._at)["UploadId"]

        def one(start: int, stop: int) -> dict[str, Any]:
            number = start // PART_BYTES + 1
            made = self._client.upload_part(
                **self._at, UploadId=upload, PartNumber=number, Body=io.BytesIO(parts[number - 1])
            )
            return {"PartNumber": number, "ETag": made["ETag"]}

        done = {"Parts": _each(one, memory.num_bytes)}
        self._client.complete_multipart_upload(**self._at, UploadId=upload, MultipartUpload=done)

    def download(self, memory: Memory) -> None:
        into = memoryview(memory.room)

        def one(start: int, stop: int) -> None:
            body = self._client.get_object(**self._at, Range=f"bytes={start}-{stop - 1}")["Body"]
            while start < stop:
                start += body.readinto(into[start:stop])

        _each(one, memory.num_bytes)


class BotoTransfer:
    """boto3's own manager of transfers, as `upload_file` uses it."""

    def __init__(self, place: Place) -> None:
        from boto3.s3.transfer import TransferConfig

        self._client, self._at = boto(place), (place.bucket, place.key)
        sizes = {"multipart_threshold": PART_BYTES, "multipart_chunksize": PART_BYTES}
        self._how = TransferConfig(**sizes, max_concurrency=AT_ONCE)

    def upload(self, memory: Memory) -> None:
        self._client.upload_fileobj(_File(memory.view), *self._at, Config=self._how)

    def download(self, memory: Memory) -> None:
        self._client.download_fileobj(*self._at, memory.room, Config=self._how)


class S3fs:
    def __init__(self, place: Place) -> None:
        import s3fs

        self._path = f"{place.bucket}/{place.key}"
        self._files = s3fs.S3FileSystem(
            key=place.access_key, secret=place.secret_key, endpoint_url=place.endpoint,
            client_kwargs={"region_name": place.region}, config_kwargs=_plain(), max_concurrency=AT_ONCE,
        )  # fmt: skip
        self._files.exists(f"{place.bucket}/warm/up")

    def upload(self, memory: Memory) -> None:
        self._files.pipe_file(self._path, bytes(memory.view), chunksize=PART_BYTES, max_concurrency=AT_ONCE)

    def download(self, memory: Memory) -> None:
        starts = range(0, memory.num_bytes, PART_BYTES)
        stops = [min(start + PART_BYTES, memory.num_bytes) for start in starts]
        found = self._files.cat_ranges([self._path] * len(stops), list(starts), stops, batch_size=AT_ONCE)
        assert sum(map(len, found)) == memory.num_bytes


CLIENTS: dict[str, Callable[[Place], Client]] = {
    "obstore": Obstore,
    "flashckpt": Flashckpt,
    "obstore, parts mapped": ObstoreWindows,
    "obstore, parts digested": ObstoreSums,
    "boto3, parts on threads": BotoParts,
    "boto3, transfer manager": BotoTransfer,
    "s3fs": S3fs,
}
UPLOADS_ONLY = frozenset({"obstore, parts mapped", "obstore, parts digested"})
"""What flashckpt's upload consists of, one by one."""


class _File(io.RawIOBase):
    """Memory as a file that is read once."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        size = len(self._view) if size < 0 else size
        data, self._view = bytes(self._view[:size]), self._view[size:]
        return data


def layout_of(leaf_bytes: int) -> Layout:
    """The image that is sent."""
    from flashckpt.format.layout import Layout, Leaf

    return Layout.of(Leaf(name=f"{i:04d}", dtype="uint8", shape=(leaf_bytes,)) for i in range(LEAVES))


def _plain() -> dict[str, Any]:
    return {
        "s3": {"payload_signing_enabled": False, "addressing_style": "path"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "max_pool_connections": AT_ONCE,
    }


def boto(place: Place) -> Any:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3", endpoint_url=place.endpoint, aws_access_key_id=place.access_key, region_name=place.region,
        aws_secret_access_key=place.secret_key, config=Config(**_plain()),
    )  # fmt: skip
    client.list_buckets()
    return client


def _parts(memory: Memory) -> Iterator[memoryview]:
    for start in range(0, memory.num_bytes, PART_BYTES):
        yield memory.view[start : start + PART_BYTES]


def _faulted_in(room: mmap.mmap) -> float:
    """Seconds of CPU that it took."""
    began = time.process_time()
    for start in range(0, len(room), mmap.PAGESIZE):
        room[start] = 0
    return time.process_time() - began


def _each(one: Callable[[int, int], Any], num_bytes: int) -> list[Any]:
    starts = range(0, num_bytes, PART_BYTES)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda start: one(start, min(start + PART_BYTES, num_bytes)), starts))
