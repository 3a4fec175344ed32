"""A run on an S3 server behind a proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashckpt.store import give_options
from tests.cache.home import Home
from tests.stores.conftest import boto, bucket, s3_server
from tests.stores.proxy import Proxy
from tests.stores.s3_server import ACCESS_KEY, REGION, SECRET_KEY, S3Server

__all__ = ["boto", "bucket", "s3_server"]


@pytest.fixture
def home(s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """The run's place, which this process and its children reach through one proxy."""
    with Proxy(s3_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        monkeypatch.setenv("AWS_REGION", REGION)
        url = f"s3://{bucket}/run"
        give_options(url, {**s3_server.options(), "endpoint": proxy.endpoint})
        yield Home(url, proxy)
