"""Object storage against the contract, on a real server; for Azure on Microsoft's emulator. GCS is not
tested: no emulator honours its conditions."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from flashckpt.store.base import Entry, Store
from flashckpt.store.compressed_file import Codec, write_compressed
from flashckpt.store.objects import COMPRESSED_PART_BYTES, ObjectStore
from flashckpt.store.obstore_client import ObstoreClient
from flashckpt.store.read_plan import read_shard
from tests.contracts.store_contract import SHARD, OneProcessContract, Shard, StoreContract, shard
from tests.stores.azure_server import AzureServer
from tests.stores.s3_server import S3Server

__all__ = ["shard"]

pytestmark = pytest.mark.process


def opened(url: str, options: dict[str, Any]) -> ObjectStore:
    return ObjectStore(ObstoreClient(url, options))


class TestS3Store(StoreContract):
    @pytest.fixture
    def opener(self, s3_server: S3Server, bucket: str) -> Callable[[], Store]:
        return partial(opened, f"s3://{bucket}/runs/one", s3_server.options())

    def test_a_compressed_shard_is_uploaded_in_parts(
        self, opener: Callable[[], Store], boto: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, large, name = opener(), Shard(num_rows=8_000), f"{SHARD}.zst"
        written, stored_bytes = write_compressed(store, name, large.layout, large.region)
        assert written.checksums == large.contents.shard.checksums
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
        assert written.checksums == large.contents.shard.checksums
        assert not read_shard(store, "shard", large.contents, None).bad_chunks
        assert [entry.name for entry in store.list("")] == ["shard"]
