"""A catalogue in a folder: its contract, and starts that die. Power loss: tests/crash/."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.catalogue.snapshots import HOME, Job, boundaries
from tests.contracts.catalogue_contract import CatalogueContract


class TestCatalogueInAFolder(CatalogueContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Callable[[], Store]:
        return partial(LocalStore, str(tmp_path))


def test_starts_that_die_before_their_first_commit_leave_little(scratch: str) -> None:
    store, count = LocalStore(scratch), 100
    Job(store).save(1)
    before = _size(Path(scratch))
    for _ in range(count):
        job = Job(store)
        job.run(HOME.collect(job.catalogue))
        job.run(HOME.trim(job.catalogue))
    assert job.catalogue.failed_starts == count - 1
    assert boundaries(job.catalogue) == [1]
    assert _size(Path(scratch)) - before < 100_000


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*"))
