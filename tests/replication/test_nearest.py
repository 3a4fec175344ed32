"""What a start asks a mirror before it begins. Which of the two stores leads: tests/commit/test_choice.py."""

from pathlib import Path

import pytest

from flashckpt.commit.view import open_run
from flashckpt.errors import UnusableRunError
from flashckpt.format.catalogue import CATALOGUE, Folder
from flashckpt.format.names import AttemptName
from flashckpt.replication.mirror import prepare
from flashckpt.replication.run_copy import copy_run
from flashckpt.store.base import Store
from tests.commit.runs import name_of
from tests.replication.copied import files, made
from tests.replication.copied import near as near
from tests.replication.copied import tmp_path as tmp_path


def test_a_first_start_makes_the_run_in_the_mirror_alone(near: tuple[Store, Store], tmp_path: Path) -> None:
    local, remote = near
    found = prepare(local, remote, "")[0].run_id
    assert open_run(remote, create=False).run_id == found
    assert not (tmp_path / "source").exists()


def test_what_is_there_counts_and_without_its_catalogue_is_not_believed(
    near: tuple[Store, Store], tmp_path: Path
) -> None:
    """An attempt that has only files counts for the number of the next one."""
    local, remote = near
    attempt = made(local, [10])
    copy_run(local, remote)
    folder = Folder(AttemptName(7, "0badcafe"), name_of(20, attempt).id)
    remote.create(f"{folder.path}/rank-00000-5f2c0a1b.safetensors", b"cut off")
    run_id, before = open_run(local, create=False).run_id, files(tmp_path / "source")
    assert prepare(local, remote, run_id)[1] == folder.writer.number
    remote.remove_files(f"{CATALOGUE}/{each.name}" for each in remote.list(CATALOGUE))
    for known in (run_id, ""):
        with pytest.raises(UnusableRunError, match="no catalogue"):
            prepare(local, remote, known)
    assert files(tmp_path / "source") == before
