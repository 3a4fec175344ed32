"""Servers of object storage, one for all tests of a process, and a bucket for each test.

`s3_server` is Ceph's gateway where Ceph is installed, and moto's server elsewhere. `FLASHCKPT_TEST_S3=moto`
takes moto's in any case. `ceph_server` is for tests of what moto lacks: access keys, signatures, quotas, ages
of uploads.
"""

import importlib.util
import os
import secrets
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.store_contract import shard
from tests.stores import azure_server as azure
from tests.stores import s3_server as s3
from tests.stores import ssh_server as ssh
from tests.stores.azure_server import AzureServer
from tests.stores.moto_server import MotoServer
from tests.stores.proxy import Proxy
from tests.stores.s3_server import ACCESS_KEY, REGION, SECRET_KEY, CephServer, S3Server
from tests.stores.ssh_server import SshServer

__all__ = ["shard"]


def s3_program() -> tuple[str, list[str]]:
    """Return which S3 server the tests use, "ceph" or "moto", and which programs or packages it lacks."""
    if os.environ.get("FLASHCKPT_TEST_S3") != "moto" and not s3.missing():
        return "ceph", []
    return "moto", [
        name for name in ("moto", "flask", "flask_cors") if importlib.util.find_spec(name) is None
    ]


def servers_used() -> str:
    """Return the line of the test summary that names the servers of object storage."""
    name, lacking = s3_program()
    s3_used = {"ceph": "Ceph's gateway", "moto": "moto's server (Ceph is not installed)"}[name]
    lines = {
        "s3": (s3_used, lacking), "az": ("Azurite", azure.missing()), "sftp": ("OpenSSH", ssh.missing())
    }  # fmt: skip
    return "; ".join(
        f"{scheme}:// NOT TESTED, {', '.join(lacking)} missing" if lacking else f"{scheme}:// on {used}"
        for scheme, (used, lacking) in lines.items()
    )


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    name, lacking = s3_program()
    _skip_without("no S3 server here, so NOTHING of object storage is tested", lacking)
    with tempfile.TemporaryDirectory(prefix="flashckpt-s3-", ignore_cleanup_errors=True) as folder:
        server = CephServer(Path(folder)) if name == "ceph" else MotoServer(Path(folder))
        yield server
        server.close()


@pytest.fixture
def ceph_server(s3_server: S3Server) -> CephServer:
    if not isinstance(s3_server, CephServer):
        pytest.skip("needs Ceph: moto has no access keys, signatures, quotas and ages of uploads")
    return s3_server


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    with Proxy(s3_server.endpoint) as made:
        yield made


@pytest.fixture(scope="session")
def azure_server() -> Iterator[AzureServer]:
    _skip_without("no Azurite here, so NOTHING of az:// is tested", azure.missing())
    with tempfile.TemporaryDirectory(prefix="flashckpt-azurite-") as folder:
        server = AzureServer(Path(folder))
        yield server
        server.close()


@pytest.fixture(scope="session")
def ssh_server() -> Iterator[SshServer]:
    _skip_without("no SSH server here, so NOTHING of sftp:// is tested", ssh.missing())
    with tempfile.TemporaryDirectory(prefix="flashckpt-ssh-") as folder:
        server = SshServer(Path(folder))
        yield server
        server.close()


def _skip_without(why: str, lacking: list[str]) -> None:
    if lacking:
        reason = f"{why}: {', '.join(lacking)} missing"
        with warnings.catch_warnings():
            # Print it, and do not fail for it as for other warnings.
            warnings.simplefilter("always")
            warnings.warn(pytest.PytestWarning(reason), stacklevel=1)
        pytest.skip(reason)


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
