"""Object storage against the contract, on a real server; for Azure on Microsoft's emulator. GCS is not
tested: no emulator honours its conditions."""

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from flashckpt.format.manifest import MAX_FILE_BYTES
from flashckpt.format.records import CHUNK_BYTES
from flashckpt.store import objects
from flashckpt.store.base import Entry, Store
from flashckpt.store.compressed_file import Codec, write_compressed
from flashckpt.store.objects import COMPRESSED_PART_BYTES, PART_BYTES, ObjectStore, _part_bytes
from flashckpt.store.obstore_client import ObstoreClient
from flashckpt.store.read_plan import read_shard
from tests.contracts.store_contract import SHARD, OneProcessContract, Shard, StoreContract
from tests.stores.azure_server import AzureServer
from tests.stores.s3_server import S3Server

pytestmark = pytest.mark.process


def test_no_upload_has_more_parts_than_a_server_takes() -> None:
    """Also of the longest file that a run has; and no part is larger than it need be."""
    most = 10_000
    for usual in (PART_BYTES, COMPRESSED_PART_BYTES):
        for num_bytes in (1, usual, most * usual, most * usual + 1, 5 << 40, (5 << 40) - 1, MAX_FILE_BYTES):
            part_bytes = _part_bytes(num_bytes, usual)
            assert part_bytes % CHUNK_BYTES == 0, "each chunk is summed in one piece"
            assert -(-num_bytes // part_bytes) <= most
            assert part_bytes == usual or -(-num_bytes // (part_bytes - CHUNK_BYTES)) > most
        assert _part_bytes(50 * 10**12, usual) <= 5 << 30, "the largest part of the largest object of S3"


def opened(url: str, options: dict[str, Any]) -> ObjectStore:
    return ObjectStore(ObstoreClient(url, options))


class TestS3Store(StoreContract):
    @pytest.fixture
    def opener(self, s3_server: S3Server, bucket: str) -> Callable[[], Store]:
        return partial(opened, f"s3://{bucket}/runs/one", s3_server.options())

    def test_parts_of_a_shard_grow_where_they_would_be_too_many(
        self, opener: Callable[[], Store], boto: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(objects, "_MOST_PARTS", 3)
        store, large = opener(), Shard(num_rows=8_000)
        assert large.layout.num_bytes > 3 * PART_BYTES
        written = store.write_shard(SHARD, large.layout, large.region)
        assert written.checksums == large.contents.checksums
        assert not read_shard(store, SHARD, large.contents, None).bad_chunks
        assert boto.head_object(Bucket=bucket, Key=f"runs/one/{SHARD}")["ETag"].endswith('-3"')

    def test_a_compressed_shard_is_uploaded_in_parts(
        self, opener: Callable[[], Store], boto: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, large, name = opener(), Shard(num_rows=8_000), f"{SHARD}.zst"
        written, stored_bytes = write_compressed(store, name, large.layout, large.region)
        assert written.checksums == large.contents.checksums
        assert stored_bytes > 3 * COMPRESSED_PART_BYTES
        assert not read_shard(store, name, large.contents, None).bad_chunks
        [entry] = store.list("")
        assert entry == Entry(name, False, stored_bytes)
        with pytest.raises(FileExistsError):
            write_compressed(store, name, large.layout, large.region)

        pack, left = Codec.pack, iter(range(7))

        def refusing(*how: Any) -> bytes:
            if next(left, None) is None:
                raise OSError("no more")
            return pack(*how)

        monkeypatch.setattr(Codec, "pack", refusing)
        with pytest.raises(OSError, match="no more"):
            write_compressed(store, f"other.{name}", large.layout, large.region)
        assert store.list("") == [entry]
        assert not boto.list_multipart_uploads(Bucket=bucket).get("Uploads"), "its parts are paid for"


class TestAzureStore(OneProcessContract):
    @pytest.fixture
    def opener(self, azure_server: AzureServer) -> Callable[[], Store]:
        name = f"container-{secrets.token_hex(6)}"
        azure_server.make_container(name)
        return partial(opened, f"az://{name}/runs/one", azure_server.options())

    def test_a_new_name_is_created_once_and_a_shard_in_parts(self, opener: Callable[[], Store]) -> None:
        store, large = opener(), Shard(num_rows=8_000)
        store.check()
        written = store.write_shard("shard", large.layout, large.region)
        assert written.checksums == large.contents.checksums
        assert not read_shard(store, "shard", large.contents, None).bad_chunks
        assert [entry.name for entry in store.list("")] == ["shard"]
