"""What a folder of some ranks alone was written as in format 3: that of ranks 1 and 2 of 3, of two nodes that
shared it. Made by tests/ranks/test_own_disks.py, and never changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import flashckpt
from flashckpt.commit.attempts import read_start
from flashckpt.commit.lineage import resolve
from flashckpt.errors import NoSuchStepError
from flashckpt.format.names import manifest_path, start_path
from flashckpt.store.local import LocalStore

KEPT, STEPS = Path(__file__).parent / "own-disk-v3" / "run", [2, 4]


def test_it_is_read_as_it_was_written_and_not_taken_for_all(tmp_path: Path) -> None:
    run = shutil.copytree(KEPT, tmp_path / "run")
    assert flashckpt.steps(run) == STEPS
    assert flashckpt.verify(run).ok
    store = LocalStore(str(run))
    record = resolve(store)
    start = read_start(store, record.attempt)
    assert start is not None
    assert start.ranks == record.manifest.ranks == (range(1, 3),)
    assert store.read(start_path(record.attempt), 1 << 20) == start.to_bytes()
    assert store.read(manifest_path(4, record.attempt), 1 << 20) == record.manifest.to_bytes()
    with pytest.raises(NoSuchStepError, match="it has ranks 1-2; on the disks of other nodes: rank 0"):
        flashckpt.load(run)
