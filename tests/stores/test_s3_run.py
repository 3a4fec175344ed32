"""A run's whole life on a real S3 server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flashckpt
from flashckpt.checkpointer import attendant
from flashckpt.commit import attempts
from flashckpt.commit.holder import here
from flashckpt.store import open_store
from tests.contracts.run_contract import RunContract, UrlTrainer
from tests.stores.s3_server import ACCESS_KEY, REGION, SECRET_KEY, S3Server

pytestmark = pytest.mark.process


@pytest.fixture
def in_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoint and credentials under the names that other tools know."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", REGION)


class TestS3Run(RunContract):
    @pytest.fixture
    def trainer(self, bucket: str, in_environment: None, tmp_path: Path, runtime: Path) -> UrlTrainer:
        return UrlTrainer(f"s3://{bucket}/runs/one", tmp_path, runtime)


def test_options_reach_the_keeper_and_are_written_nowhere(
    s3_server: S3Server, bucket: str, boto: Any, runtime: Path
) -> None:
    url = f"s3://{bucket}/run"
    options = flashckpt.Options(storage_options=s3_server.options())
    weights = {"w": __import__("torch").zeros(1000)}
    with flashckpt.attach(url, options=options, **weights) as checkpointer:
        for _ in checkpointer.epochs(1):
            checkpointer.step()
    assert flashckpt.steps(url) == [1]
    for entry in boto.list_objects_v2(Bucket=bucket)["Contents"]:
        data = boto.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
        assert SECRET_KEY.encode() not in data
    logs = [path.read_bytes() for path in runtime.rglob("*") if path.is_file()]
    assert not any(SECRET_KEY.encode() in data for data in logs)
    assert SECRET_KEY not in repr(options)


def test_a_newer_attempt_is_heard_of_from_the_keeper(
    s3_server: S3Server, bucket: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each look costs a request, not each rank looks for itself."""
    monkeypatch.setattr(attendant, "_CLAIM_LOOK_BESIDE_S", 1e9)
    url, options = f"s3://{bucket}/run", flashckpt.Options(storage_options=s3_server.options())
    weights = {"w": __import__("torch").zeros(1000)}

    def train() -> None:
        with flashckpt.attach(url, options=options, **weights) as run:
            for _ in run.epochs(1):
                run.step()
                attempts.claim(open_store(url), here())
                while True:
                    run.step()

    with pytest.raises(flashckpt.SupersededError):
        train()
