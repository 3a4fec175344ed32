"""What a process that is killed in an upload leaves in a bucket is ended, what lives is not."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashckpt.commit.attempts import claim, mark_ended, open_run, start
from flashckpt.format.names import shard_name, step_attempt_folder
from flashckpt.options import Keep
from flashckpt.recovery import uploads
from flashckpt.recovery.pruning import prune
from flashckpt.recovery.recover import recover
from flashckpt.store.objects import ObjectStore
from flashckpt.store.obstore_client import ObstoreClient
from flashckpt.store.unfinished_uploads import unfinished_uploads
from tests.commit.runs import HOLDER, commit
from tests.stores.proxy import Fault, Proxy, Request
from tests.stores.s3_server import CephServer, S3Server

pytestmark = pytest.mark.process

_WRITER = """
import json, sys
from flashckpt.store import open_store
from tests.contracts.store_contract import Shard

shard = Shard(num_rows=8_000)
open_store(sys.argv[1], json.loads(sys.argv[2])).write_shard(sys.argv[3], shard.layout, shard.region)
"""


def killed_in_its_upload(url: str, server: S3Server, path: str) -> None:
    third, over = threading.Event(), threading.Event()

    def fault(request: Request) -> Fault:
        if "partNumber=3" not in request.path:
            return ""
        third.set()
        over.wait(240)
        return "cut"

    with Proxy(server.endpoint, fault) as proxy:
        options = json.dumps({**server.options(), "endpoint": proxy.endpoint})
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, url, options, path])
        try:
            assert third.wait(240)
        finally:
            writer.kill()
            writer.wait()
            over.set()


def under_way(boto: Any, bucket: str) -> list[str]:
    found = boto.list_multipart_uploads(Bucket=bucket).get("Uploads", ())
    return sorted(each["Key"].rpartition("/")[2] for each in found)


def test_dead_uploads_are_ended_and_living_ones_are_not(
    ceph_server: CephServer, boto: Any, bucket: str, runtime: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    url = f"s3://{bucket}/runs/one"
    store = ObjectStore(ObstoreClient(url, ceph_server.options()))
    open_run(store, create=True)
    first = claim(store, HOLDER)
    start(store, first, None, 0, world=1)
    commit(store, 1, first)
    mark_ended(store, first, "dead")
    # Of two ranks: one end that was written down is not that of all keepers.
    second = claim(store, HOLDER)
    start(store, second, first, 1, world=2)
    mark_ended(store, second, "dead")
    dead, living = shard_name(0, "deaddead0001"), shard_name(0, "11fe11fe0001")
    dead_path = f"{step_attempt_folder(2, first)}/{dead}"
    living_key = f"runs/one/{step_attempt_folder(2, second)}/{living}"
    killed_in_its_upload(url, ceph_server, dead_path)
    boto.create_multipart_upload(Bucket=bucket, Key=living_key)
    boto.create_multipart_upload(Bucket=bucket, Key="runs/one-more/elsewhere")
    assert under_way(boto, bucket) == sorted([dead, living, "elsewhere"])

    assert recover(store).findings == (), "a copier may be at work on an attempt that has ended"
    monkeypatch.setattr(uploads, "COPY_AGE_S", -3600.0)
    assert [each.place for each in recover(store, dry_run=True).findings] == [dead_path]
    assert len(under_way(boto, bucket)) == 3
    [found] = recover(store).findings
    assert (found.kind.value, found.outcome.value, found.place) == ("debris", "removed", dead_path)
    assert under_way(boto, bucket) == sorted([living, "elsewhere"])
    assert recover(store).findings == ()

    boto.create_multipart_upload(Bucket=bucket, Key=f"runs/one/{dead_path}.4096.zst")
    assert len(uploads.dead_uploads(store)) == 1
    assert len(uploads.dead_uploads(store, (), {"11fe11fe"})) == 2, "its keeper is known to be dead"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "botocore.session", None)
        assert recover(store).findings == ()
    assert "AbortIncompleteMultipartUpload" in caplog.text
    assert [each.place for each in prune(store, Keep()).uploads] == [dead_path]
    assert under_way(boto, bucket) == sorted([living, "elsewhere"])

    monkeypatch.setattr(uploads, "SAFE_AGE_S", -3600.0)
    assert [each.place for each in prune(store, Keep()).uploads] == [living_key.removeprefix("runs/one/")]
    assert under_way(boto, bucket) == ["elsewhere"]


def test_another_s_upload_is_never_ended(
    s3_server: S3Server, boto: Any, bucket: str, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is the whole bucket."""
    store = ObjectStore(ObstoreClient(f"s3://{bucket}", s3_server.options()))
    open_run(store, create=True)
    attempt = claim(store, HOLDER)
    start(store, attempt, None, 0, world=1)
    commit(store, 1, attempt)
    mark_ended(store, attempt, "dead")
    own = [
        f"{step_attempt_folder(2, attempt)}/{shard_name(0, 'deaddead0001')}",
        f"attempts/{attempt}/constants-00000-1.safetensors",
    ]
    others = [
        "huge.tar",
        "other-team/huge.tar",
        f"other-team/{own[0]}",
        f"other-team/{own[1]}",
        f"steps/2/{attempt}/{shard_name(0, 'deaddead0001')}",
        f"{step_attempt_folder(2, attempt)}/huge.tar",
        f"attempts/{attempt}/huge.tar",
    ]
    for key in own + others:
        boto.create_multipart_upload(Bucket=bucket, Key=key)
    monkeypatch.setattr(uploads, "SAFE_AGE_S", -3600.0)
    monkeypatch.setattr(uploads, "COPY_AGE_S", -3600.0)
    writers = {"deaddead"}
    assert sorted(each.place for each in uploads.dead_uploads(store, [attempt], writers)) == sorted(own)
    assert sorted(each.place for each in prune(store, Keep()).uploads) == sorted(own)
    left = boto.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert sorted(each["Key"] for each in left) == sorted(others)


def test_a_prefix_is_decoded_as_obstore_decodes_it(s3_server: S3Server, boto: Any, bucket: str) -> None:
    store = ObjectStore(ObstoreClient(f"s3://{bucket}/my%20run", s3_server.options()))
    store.create("run.json", b"{}")
    assert boto.list_objects_v2(Bucket=bucket)["Contents"][0]["Key"] == "my run/run.json"
    boto.create_multipart_upload(Bucket=bucket, Key="my run/steps/a")
    boto.create_multipart_upload(Bucket=bucket, Key="my%20run/steps/b")
    asked = unfinished_uploads(store)
    assert asked is not None
    assert [each.path for each in asked.list()] == ["steps/a"]


def test_an_upload_that_somebody_ends_is_told_as_that(s3_server: S3Server, boto: Any, bucket: str) -> None:
    client = ObstoreClient(f"s3://{bucket}/run", s3_server.options())
    part_bytes = 5 << 20

    def parts() -> Iterator[memoryview]:
        for index in range(12):
            if index == 10:
                [upload] = boto.list_multipart_uploads(Bucket=bucket)["Uploads"]
                boto.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
            yield memoryview(bytes(part_bytes))

    with pytest.raises(OSError, match="its upload was ended by .*NoSuchUpload") as told:
        client.upload("shard", parts(), part_bytes)
    assert told.value.errno == errno.EREMOTEIO
