"""A run in a folder with a remote on a real S3 server that is absent for a while; refusals of remotes."""

from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt.store import give_options
from tests.stores.proxy import Proxy
from tests.stores.s3_server import S3Server
from tests.waiting import until

pytestmark = pytest.mark.process


def test_commits_do_not_wait_for_an_absent_server_and_are_copied_later(
    s3_server: S3Server, proxy: Proxy, bucket: str, tmp_path: Path, runtime: Path
) -> None:
    run, url = tmp_path / "run", f"s3://{bucket}/runs/one"
    weights = torch.zeros(1 << 16)
    given = s3_server.options(endpoint=proxy.endpoint)
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


def test_a_remote_that_overwrites_is_refused(
    s3_server: S3Server, proxy: Proxy, bucket: str, tmp_path: Path, runtime: Path
) -> None:
    proxy.fault = lambda request: "overwrite"
    given = s3_server.options(endpoint=proxy.endpoint)
    options = flashckpt.Options(remote_storage_options=given)
    with pytest.raises(flashckpt.RunError, match="overwrites"):
        flashckpt.attach(tmp_path / "run", remote=f"s3://{bucket}/run", options=options, w=torch.zeros(3))
    assert not (tmp_path / "run").exists()
