"""The contract of a catalogue on S3 and Azure."""

import secrets
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from flashckpt.store.base import Store
from tests.contracts.catalogue_contract import CatalogueContract
from tests.stores.azure_server import AzureServer
from tests.stores.proxy import Proxy
from tests.stores.s3_server import S3Server
from tests.stores.test_faults import EachTwice
from tests.stores.test_object_store import opened

pytestmark = pytest.mark.process


class TestCatalogueOnS3(CatalogueContract):
    """Each creation is sent twice."""

    @pytest.fixture
    def opener(self, s3_server: S3Server, bucket: str) -> Iterator[Callable[[], Store]]:
        with Proxy(s3_server.endpoint, EachTwice()) as proxy:
            yield partial(opened, f"s3://{bucket}/runs/one", s3_server.options(endpoint=proxy.endpoint))


@pytest.mark.long  # the contract of the store, on which it relies, is not
class TestCatalogueOnAzure(CatalogueContract):
    @pytest.fixture
    def opener(self, azure_server: AzureServer) -> Callable[[], Store]:
        name = f"container-{secrets.token_hex(6)}"
        azure_server.make_container(name)
        return partial(opened, f"az://{name}/runs/one", azure_server.options())
