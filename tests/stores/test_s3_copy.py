"""A run is copied to a real S3 server, resumed there, and copied back."""

from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt.replication.run_copy import copy_run
from flashckpt.store import obstore_client, open_store
from flashckpt.store.objects import PART_BYTES
from tests import run_view
from tests.commit.runs import attempt_at, commit, new_run
from tests.stores.proxy import Fault, Proxy, Request
from tests.stores.s3_server import S3Server

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
