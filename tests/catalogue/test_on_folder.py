"""A catalogue in a folder: its contract, and a full disk. Power loss: tests/crash/."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from flashckpt.format.catalogue import Folder
from flashckpt.format.manifest import Manifest
from flashckpt.format.names import SnapshotId
from flashckpt.options import Keep
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.catalogue.snapshots import HOME, Job, faults, files_of
from tests.contracts.catalogue_contract import CatalogueContract
from tests.memory.mounts import fill, small_tmpfs


class TestCatalogueInAFolder(CatalogueContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Callable[[], Store]:
        return partial(LocalStore, str(tmp_path))


@pytest.mark.process
def test_a_full_disk_gives_up_its_old_versions() -> None:
    """Not a byte is free: the version of a commit takes the room of older versions and of garbage."""
    with small_tmpfs(1 << 20) as disk:
        job = Job(LocalStore(str(disk / "run")))
        for boundary in range(1, 20):
            job.save(boundary)
        id = SnapshotId(job.name, 20)
        job.write(id)
        manifest = job.run(HOME.gather(Folder(job.name, id)))
        assert isinstance(manifest, Manifest)
        made = job.run(HOME.publish(job.catalogue, manifest))
        fill(disk)
        assert os.statvfs(disk).f_bavail == 0
        before = len(files_of(job.store, "catalogue"))
        job.catalogue = job.run(HOME.commit(job.catalogue, job.name, made, Keep(last=2)))
        assert job.catalogue.has(id)
        assert before > 10
        assert len(files_of(job.store, "catalogue")) <= 3
        assert faults(job.store, is_collected=False) == []
