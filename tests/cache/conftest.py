"""A run on an S3 server behind a proxy."""

import pytest

from flashckpt.store import give_options
from tests.cache.home import Home
from tests.stores.conftest import boto, bucket, in_environment, proxy, s3_server
from tests.stores.proxy import Proxy
from tests.stores.s3_server import S3Server

__all__ = ["boto", "bucket", "in_environment", "proxy", "s3_server"]


@pytest.fixture
def home(
    proxy: Proxy, s3_server: S3Server, bucket: str, in_environment: None, monkeypatch: pytest.MonkeyPatch
) -> Home:
    """The run's place, which this process and its children reach through one proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    url = f"s3://{bucket}/run"
    give_options(url, s3_server.options(endpoint=proxy.endpoint))
    return Home(url, proxy)
