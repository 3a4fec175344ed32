"""A run is copied to a real S3 server, gone on from there, and copied back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt.commit import lineage
from flashckpt.store import open_store
from flashckpt.store.objects import PART_BYTES
from flashckpt.tiers.run_copy import copy_run
from tests.stores.s3_server import S3Server

pytestmark = pytest.mark.process


def trained(url: str | Path, options: flashckpt.Options, steps: int) -> torch.Tensor:
    """Train so many steps more, of a state of more than a part of an upload."""
    state = torch.zeros(PART_BYTES // 4 + 1000)
    with flashckpt.attach(url, options=options, w=state) as checkpointer:
        for _ in range(steps):
            state += 1
            checkpointer.step()
    return state


def test_a_run_goes_on_from_its_copy(s3_server: S3Server, bucket: str, tmp_path: Path, runtime: Path) -> None:
    url, options = f"s3://{bucket}/run", s3_server.options()
    trained(tmp_path / "run", flashckpt.Options(), 2)
    local, remote = open_store(tmp_path / "run"), open_store(url, options)
    done = copy_run(local, remote)
    assert [(each.step, each.is_visible) for each in done.steps] == [(2, True)]
    assert flashckpt.verify(url).ok

    state = trained(url, flashckpt.Options(storage_options=options), 3)
    assert state.unique().tolist() == [5]
    back = copy_run(remote, local)
    assert [(each.step, each.is_visible) for each in back.steps] == [(5, True)]
    assert flashckpt.verify(tmp_path / "run").ok
    assert lineage.visible(local)[-1] == lineage.visible(remote)[-1]
    assert trained(tmp_path / "run", flashckpt.Options(), 1).unique().tolist() == [6]
