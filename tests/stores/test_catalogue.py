"""The contract of a catalogue on S3 and Azure."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from flashckpt.store.base import Store
from flashckpt.store.objects import ObjectStore
from flashckpt.store.obstore_client import ObstoreClient
from tests.contracts.catalogue_contract import CatalogueContract
from tests.stores.azure_server import AzureServer
from tests.stores.proxy import Proxy
from tests.stores.s3_server import S3Server
from tests.stores.test_faults import EachTwice

pytestmark = pytest.mark.process


def opened(url: str, options: dict[str, Any]) -> Store:
    return ObjectStore(ObstoreClient(url, options))


class TestCatalogueOnS3(CatalogueContract):
    """Each creation is sent twice."""

    @pytest.fixture
    def opener(self, s3_server: S3Server, bucket: str) -> Iterator[Callable[[], Store]]:
        with Proxy(s3_server.endpoint, EachTwice()) as proxy:
            options = {**s3_server.options(), "endpoint": proxy.endpoint}
            yield partial(opened, f"s3://{bucket}/runs/one", options)


@pytest.mark.long  # the contract of the store, on which it relies, is not
class TestCatalogueOnAzure(CatalogueContract):
    @pytest.fixture
    def opener(self, azure_server: AzureServer) -> Callable[[], Store]:
        name = f"container-{secrets.token_hex(6)}"
        azure_server.make_container(name)
        return partial(opened, f"az://{name}/runs/one", azure_server.options())
