"""The contract of a catalogue on S3 and Azure, and the requests of a commit, counted before a real server."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from flashckpt.catalogue.changes import Keep
from flashckpt.catalogue.requests import Stores
from flashckpt.format.catalogue import Folder
from flashckpt.format.manifest import Manifest
from flashckpt.format.names import SnapshotId
from flashckpt.store.base import Store
from flashckpt.store.objects import ObjectStore
from flashckpt.store.obstore_client import ObstoreClient
from tests.catalogue.snapshots import HOME, RUN, Job, write_part
from tests.contracts.catalogue_contract import CatalogueContract
from tests.stores.azure_server import AzureServer
from tests.stores.proxy import Proxy
from tests.stores.s3_server import S3Server
from tests.stores.test_faults import EachTwice
from tests.stores.test_requests import Counted

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


class TestCatalogueOnAzure(CatalogueContract):
    @pytest.fixture
    def opener(self, azure_server: AzureServer) -> Callable[[], Store]:
        name = f"container-{secrets.token_hex(6)}"
        azure_server.make_container(name)
        return partial(opened, f"az://{name}/runs/one", azure_server.options())


@pytest.fixture
def counted(s3_server: S3Server, bucket: str) -> Iterator[Counted]:
    with Proxy(s3_server.endpoint) as proxy:
        yield Counted(proxy, s3_server, bucket)


def taken(counted: Counted) -> Counter[str]:
    return Counter({kind.replace(f"-{RUN}", "version"): count for kind, count in counted.taken().items()})


def test_the_requests_of_a_commit(counted: Counted) -> None:
    """Beside shard and part: five. The leader has its own part."""
    job, run = Job(counted.store), Stores({"home": counted.store}).run
    for boundary in (1, 2, 3):
        folder = Folder(job.name, SnapshotId(job.name, boundary))
        name, head = write_part(counted.store, folder, (0,), 1)
        counted.taken()
        manifest = run(HOME.gather(folder, {name: head}))
        assert isinstance(manifest, Manifest)
        made = run(HOME.publish(job.catalogue, manifest))
        job.catalogue = run(HOME.commit(job.catalogue, job.name, made, Keep(last=4)))
        found = taken(counted)
        assert job.catalogue.has(folder.id)
    assert found == {"list data": 1, "put manifest.json": 1, "list catalogue": 2, "put version": 1}


def test_the_requests_of_a_removal(counted: Counted) -> None:
    job = Job(counted.store)
    for boundary in (1, 2, 3):
        job.write(SnapshotId(job.name, boundary))
        assert job.commit(SnapshotId(job.name, boundary), Keep(last=2)) is not None
    counted.taken()
    job.run(HOME.collect(job.catalogue))
    assert taken(counted) == {"list data": 3, "delete": 1}
