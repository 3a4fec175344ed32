"""Runs and a real S3 server: a copy there and back, a remote that is absent for a while, and a lost node."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt.replication.run_copy import copy_run
from flashckpt.store import give_options, obstore_client, open_store
from flashckpt.store.objects import PART_BYTES
from tests import run_view
from tests.commit.runs import attempt_at, commit, new_run
from tests.folders import data_of
from tests.resume.training import Trainer, last_of_each, uninterrupted
from tests.stores.proxy import Fault, Proxy, Request
from tests.stores.s3_server import S3Server
from tests.waiting import until

pytestmark = pytest.mark.process


def trained(url: str | Path, options: flashckpt.Options, steps: int) -> torch.Tensor:
    """Train further steps with a state larger than a part of an upload."""
    state = torch.zeros(PART_BYTES // 4 + 1000)
    with flashckpt.attach(url, options=options, w=state) as checkpointer:
        for _ in range(steps):
            state += 1
            checkpointer.step()
    return state


def test_a_run_resumes_from_its_copy(s3_server: S3Server, bucket: str, tmp_path: Path, runtime: Path) -> None:
    url, options = f"s3://{bucket}/run", s3_server.options()
    trained(tmp_path / "run", flashckpt.Options(), 2)
    local, remote = open_store(tmp_path / "run"), open_store(url, options)
    done = copy_run(local, remote, compress="zstd")
    assert [(each.name.step, each.is_visible) for each in done.steps] == [(2, True)]
    assert done.sent_bytes < PART_BYTES // 16, "most of it is one number"
    assert flashckpt.verify(url).ok

    state = trained(url, flashckpt.Options(storage_options=options), 3)
    assert state.unique().tolist() == [5]
    back = copy_run(remote, local)
    assert [(each.name.step, each.is_visible) for each in back.steps] == [(5, True)]
    assert flashckpt.verify(tmp_path / "run").ok
    assert run_view.visible(local)[-1] == run_view.visible(remote)[-1]
    assert trained(tmp_path / "run", flashckpt.Options(), 1).unique().tolist() == [6]


def test_a_copy_through_a_server_that_loses_answers(
    s3_server: S3Server, proxy: Proxy, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each object, the first request of each kind is refused, or its answer is lost."""
    monkeypatch.setattr(obstore_client, "_FIRST_PAUSE_S", 0.001)
    source = new_run(tmp_path / "run")
    attempt = attempt_at(source)
    for step in (10, 20):
        assert commit(source, step, attempt, constants=True)
    seen: set[tuple[str, str]] = set()

    def fault(request: Request) -> Fault:
        name = request.method, request.path.partition("?")[0]
        if name in seen:
            return ""
        seen.add(name)
        return "lose answer" if request.method == "PUT" else "refuse"

    proxy.fault = fault
    options = s3_server.options(endpoint=proxy.endpoint)
    done = copy_run(source, open_store(f"s3://{bucket}/run", options), all_steps=True)
    assert [each.name.step for each in done.steps if each.is_visible] == [20, 10]
    remote = open_store(f"s3://{bucket}/run", s3_server.options())
    assert run_view.verify(remote).ok
    back = open_store(tmp_path / "back")
    assert copy_run(remote, back, all_steps=True).ok
    assert run_view.visible(back) == run_view.visible(source)
    for path in (tmp_path / "run").rglob("*.safetensors"):
        # Frozen leaves lie with the step that was copied first.
        [copied] = (tmp_path / "back").rglob(path.name)
        assert copied.read_bytes() == path.read_bytes()


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
