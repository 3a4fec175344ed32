"""Object storage against the contract, on a real server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from flashckpt.store.base import Store
from flashckpt.store.objects import ObjectStore
from flashckpt.store.obstore_client import ObstoreClient
from tests.contracts.store_contract import StoreContract, shard
from tests.stores.s3_server import S3Server

__all__ = ["shard"]

pytestmark = pytest.mark.process


def opened(url: str, options: dict[str, Any]) -> ObjectStore:
    return ObjectStore(ObstoreClient(url, options))


class TestS3Store(StoreContract):
    @pytest.fixture
    def opener(self, s3_server: S3Server, bucket: str) -> Callable[[], Store]:
        return partial(opened, f"s3://{bucket}/runs/one", s3_server.options())
