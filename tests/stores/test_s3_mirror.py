"""A run in a folder with a remote on a real S3 server that is absent for a while; refusals of remotes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flashckpt
from flashckpt.store import give_options
from tests.folders import contents
from tests.stores.proxy import Proxy
from tests.stores.s3_server import SECRET_KEY, S3Server
from tests.waiting import until

pytestmark = pytest.mark.process


def test_commits_do_not_wait_for_an_absent_server_and_are_copied_later(
    s3_server: S3Server, bucket: str, boto: Any, tmp_path: Path, runtime: Path
) -> None:
    run, url = tmp_path / "run", f"s3://{bucket}/runs/one"
    weights = torch.zeros(1 << 16)
    with Proxy(s3_server.endpoint) as proxy:
        given = {**s3_server.options(), "endpoint": proxy.endpoint}
        options = flashckpt.Options(remote_storage_options=given)
        keep = flashckpt.Keep(last=2)
        with flashckpt.attach(run, remote=url, remote_keep=keep, options=options, w=weights) as made:

            def save() -> int:
                weights.add_(1)
                made.step()
                made.save()
                made.wait()
                return made.completed

            for _ in range(3):
                step = save()
                until(lambda step=step: made.report()["newest_remote_step"] == step, "it in the remote")  # type: ignore[misc]
            proxy.fault = lambda request: "refuse" if request.method == "PUT" else "cut"
            asked = len(proxy.requests)
            for _ in range(4):
                save()
            until(lambda: len(proxy.requests) > asked, "a request in vain")
            assert flashckpt.steps(run)[-1] == 7
            assert made.report()["newest_remote_step"] == 3
            proxy.fault = lambda request: ""
        until(lambda: not list(runtime.rglob("keeper.socket")), "the keeper's end")

    give_options(url, s3_server.options())
    assert flashckpt.verify(url).ok
    found = flashckpt.steps(url)
    assert (found[-1], len(found)) == (7, 2)
    assert torch.equal(flashckpt.load(url)["w"], weights)
    kept = contents(run)
    for entry in boto.list_objects_v2(Bucket=bucket)["Contents"]:
        kept.append(boto.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read())
    assert not any(SECRET_KEY.encode() in data for data in kept)


def test_a_server_killed_during_a_copy_gets_the_rest_later(
    s3_server: S3Server, bucket: str, boto: Any, tmp_path: Path, runtime: Path
) -> None:
    run, url = tmp_path / "run", f"s3://{bucket}/run"
    given = {**s3_server.options(), "max_upload_bytes_per_s": 16 << 20}
    weights = torch.zeros(12 << 20)
    with flashckpt.attach(
        run, remote=url, options=flashckpt.Options(remote_storage_options=given), w=weights
    ) as made:

        def save() -> None:
            weights.add_(1)
            made.step()
            made.save()
            made.wait()

        save()
        until(lambda: "Uploads" in boto.list_multipart_uploads(Bucket=bucket), "an upload under way")
        s3_server.kill()
        try:
            save()
            save()
            assert flashckpt.steps(run) == [1, 2, 3], "nothing here waits for the server"
            assert made.report()["newest_remote_step"] == -1
        finally:
            s3_server.start()
        until(lambda: made.report()["newest_remote_step"] == 3, "the newest in the remote")
    give_options(url, s3_server.options())
    assert flashckpt.verify(url).ok
    assert flashckpt.steps(url)[-1] == 3
    assert torch.equal(flashckpt.load(url)["w"], weights)


@pytest.mark.parametrize(
    ("bucket_name", "options", "message"),
    [
        ("no-such-bucket", {}, "the bucket of s3://no-such-bucket/run does not exist"),
        ("", {"secret_access_key": "geheim"}, "the secret key does not belong to this access key"),
        ("", {"access_key_id": "unknown"}, "the server does not know this access key"),
        ("", {"nonsense": "1"}, "nonsense"),
    ],
)
def test_errors_of_a_remote_are_reported_at_attach(
    s3_server: S3Server, bucket: str, tmp_path: Path, runtime: Path, bucket_name: str,
    options: dict[str, Any], message: str, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if "key" in message:
        request.getfixturevalue("ceph_server")
    given = flashckpt.Options(remote_storage_options={**s3_server.options(), **options})
    remote = f"s3://{bucket_name or bucket}/run"
    with pytest.raises((flashckpt.RunError, flashckpt.OptionError), match=message) as caught:
        flashckpt.attach(tmp_path / "run", remote=remote, options=given, w=torch.zeros(3))
    assert "geheim" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_remote_that_overwrites_is_refused(
    s3_server: S3Server, bucket: str, tmp_path: Path, runtime: Path
) -> None:
    with Proxy(s3_server.endpoint, lambda request: "overwrite") as proxy:
        given = {**s3_server.options(), "endpoint": proxy.endpoint}
        options = flashckpt.Options(remote_storage_options=given)
        with pytest.raises(flashckpt.RunError, match="overwrites"):
            flashckpt.attach(tmp_path / "run", remote=f"s3://{bucket}/run", options=options, w=torch.zeros(3))
    assert not (tmp_path / "run").exists()
