"""Servers of object storage, one for all tests of a process, and a bucket for each test."""

import secrets
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.store_contract import shard
from tests.stores import azure_server as azure
from tests.stores import s3_server as s3
from tests.stores import ssh_server as ssh
from tests.stores.azure_server import AzureServer
from tests.stores.proxy import Proxy
from tests.stores.s3_server import ACCESS_KEY, REGION, SECRET_KEY, S3Server
from tests.stores.ssh_server import SshServer

__all__ = ["shard"]


def servers_used() -> str:
    """Return the line of the test summary that names the servers of object storage."""
    servers = ("s3", "Ceph's gateway", s3), ("az", "Azurite", azure), ("sftp", "OpenSSH", ssh)
    return "; ".join(
        f"{scheme}:// NOT TESTED, {', '.join(lacking)} missing"
        if (lacking := of.missing())
        else f"{scheme}:// on {name}"
        for scheme, name, of in servers
    )


def _running(scheme: str, needs: Any, start: Callable[[Path], Any]) -> Iterator[Any]:
    """A server of all tests of a process. `needs`: the module that says what the machine lacks."""
    if lacking := needs.missing():
        reason = f"no server here, so NOTHING of {scheme}:// is tested: {', '.join(lacking)} missing"
        with warnings.catch_warnings():
            # Print it, and do not fail for it as for other warnings.
            warnings.simplefilter("always")
            warnings.warn(pytest.PytestWarning(reason), stacklevel=1)
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix=f"flashckpt-{scheme}-", ignore_cleanup_errors=True) as folder:
        server = start(Path(folder))
        yield server
        server.close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    yield from _running("s3", s3, S3Server)


@pytest.fixture(scope="session")
def azure_server() -> Iterator[AzureServer]:
    yield from _running("az", azure, AzureServer)


@pytest.fixture(scope="session")
def ssh_server() -> Iterator[SshServer]:
    yield from _running("sftp", ssh, SshServer)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    with Proxy(s3_server.endpoint) as made:
        yield made


@pytest.fixture
def in_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoint and credentials under the names that other tools know."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", REGION)


@pytest.fixture
def boto(s3_server: S3Server) -> Any:
    """Another client of the server."""
    import boto3

    return boto3.client(
        "s3", endpoint_url=s3_server.endpoint, region_name=REGION,
        aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
    )  # fmt: skip


@pytest.fixture
def bucket(boto: Any) -> str:
    """The name of a new bucket."""
    name = f"bucket-{secrets.token_hex(6)}"
    boto.create_bucket(Bucket=name)
    return name
