"""A run's whole life on a real S3 server."""

from pathlib import Path
from typing import Any

import pytest
import torch

import flashckpt
from flashckpt.store.obstore_client import ObstoreClient
from tests.contracts.run_contract import RunContract, UrlTrainer
from tests.folders import contents
from tests.processes import keepers_of
from tests.stores.s3_server import SECRET_KEY, S3Server
from tests.waiting import abandon, until

pytestmark = pytest.mark.process


class TestS3Run(RunContract):
    @pytest.fixture
    def trainer(self, bucket: str, in_environment: None, tmp_path: Path, runtime: Path) -> UrlTrainer:
        return UrlTrainer(f"s3://{bucket}/runs/one", tmp_path, runtime)


def test_options_reach_the_keeper_and_are_written_nowhere(
    s3_server: S3Server, bucket: str, boto: Any, runtime: Path
) -> None:
    url = f"s3://{bucket}/run"
    options = flashckpt.Options(storage_options=s3_server.options())
    weights = {"w": torch.zeros(1000)}
    with flashckpt.attach(url, options=options, **weights) as checkpointer:
        for _ in checkpointer.epochs(1):
            checkpointer.step()
    assert flashckpt.steps(url) == [1]
    for entry in boto.list_objects_v2(Bucket=bucket)["Contents"]:
        data = boto.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
        assert SECRET_KEY.encode() not in data
    assert not any(SECRET_KEY.encode() in data for data in contents(runtime))
    assert SECRET_KEY not in repr(options)


def test_a_living_keeper_uses_new_credentials(s3_server: S3Server, bucket: str, runtime: Path) -> None:
    url, weights = f"s3://{bucket}/run", torch.zeros(1000)

    def options(key: str) -> dict[str, Any]:
        return s3_server.options(access_key_id=key, secret_access_key=key)

    def attached(key: str) -> flashckpt.Checkpointer:
        given = flashckpt.Options(storage_options=options(key))
        return flashckpt.attach(url, every=None, options=given, w=weights)

    def save(run: flashckpt.Checkpointer) -> None:
        run.step()
        run.save()
        run.wait()

    def is_refused() -> bool:
        try:
            ObstoreClient(url, options("before")).list("")
        except PermissionError:
            return True
        return False

    key = ("--uid=test", "--key-type=s3")
    for name in ("before", "after"):
        s3_server.admin("key", "create", *key, f"--access-key={name}", f"--secret={name}")
    first = attached("before")
    save(first)
    abandon(first)
    [keeper] = keepers_of(runtime)
    s3_server.admin("key", "rm", *key, "--access-key=before")
    until(is_refused, "the old key to be refused")
    with attached("after") as second:
        save(second)
        assert keepers_of(runtime) == [keeper]
    assert flashckpt.steps(url) == [1, 2]
