"""A node is lost with its disk and memory: the run resumes exactly from its remote on a real S3 server."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt.replication.run_copy import copy_run
from flashckpt.store import open_store
from tests.folders import data_of
from tests.resume.training import Trainer, last_of_each, uninterrupted
from tests.stores.proxy import Fault, Proxy, Request
from tests.stores.s3_server import S3Server
from tests.waiting import until

pytestmark = pytest.mark.process


@pytest.mark.long
@pytest.mark.usefixtures("in_environment")
def test_a_lost_node(bucket: str, tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]) -> None:
    url = f"s3://{bucket}/run"
    trainer = Trainer(tmp_path, runtime, "workers", remote=url)
    # An object store's client must not be used in forked processes.
    trainer.kill_in_step(6, fresh=True)
    trainer.wait_committed()
    newest = flashckpt.steps(trainer.run)[-1]

    def there() -> int:
        try:
            return max(flashckpt.steps(url), default=-1)
        except flashckpt.NoSuchStepError:
            return -1

    # A newer snapshot of the dead trainer may replace this one, which is then never sent.
    until(lambda: there() >= newest, "the copy")
    kill_keepers(remove_regions=True)
    shutil.rmtree(trainer.run)
    trainer.finish(fresh=True)
    [resumed] = trainer.events("resume")
    assert resumed["tier"] == "remote"
    assert resumed["step"] >= newest
    assert last_of_each(trainer.records()) == uninterrupted(tmp_path, runtime, "workers")
    assert flashckpt.verify(trainer.run).ok
    until(lambda: flashckpt.steps(url)[-1] == flashckpt.steps(trainer.run)[-1], "the newest step")


@pytest.mark.parametrize("file", ["rank-", "node-"])
def test_transfer_errors_do_not_count_as_damage(
    s3_server: S3Server, proxy: Proxy, bucket: str, tmp_path: Path, runtime: Path, file: str
) -> None:
    """Otherwise one flipped bit of an answer would hide the newest step."""
    url, weights = f"s3://{bucket}/run", torch.zeros(3000)
    with flashckpt.attach(tmp_path / "run", w=weights) as made:
        for _ in range(2):
            weights.add_(1)
            made.step()
            made.save()
            made.wait()
    copy_run(open_store(tmp_path / "run"), open_store(url, s3_server.options()), all_steps=True)
    spoiled: list[str] = []
    newest = data_of(tmp_path / "run", 2).name

    def fault(request: Request) -> Fault:
        is_one = request.method == "GET" and newest in request.path and file in request.path
        if not is_one or spoiled:
            return ""
        spoiled.append(request.path)
        return "spoil"

    proxy.fault = fault
    given = s3_server.options(endpoint=proxy.endpoint)
    options = flashckpt.Options(remote_storage_options=given)
    weights.zero_()
    with flashckpt.attach(tmp_path / "new", remote=url, options=options, w=weights) as made:
        assert made.completed == 2
        assert weights.unique().tolist() == [2.0]
    assert len(spoiled) == 1
