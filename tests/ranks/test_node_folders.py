"""Ranks whose path is not one folder on all nodes are refused by name, and a later start is not blocked."""

import socket
from pathlib import Path

import pytest

import flashckpt
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.ranks.launch import Launch, Launcher
from tests.ranks.node_folders import PACKAGES, SCHEME, folder_of, installed

pytestmark = pytest.mark.dist


def launched(launcher: Launcher, url: str, packages: str, **places: int) -> Launch:
    return launcher.fork("tests.ranks.node_folders", url, environment={PACKAGES: packages}, **places)


def test_another_folder_on_each_node_is_refused_on_all_ranks(launcher: Launcher, tmp_path: Path) -> None:
    url, packages = f"{SCHEME}{tmp_path}/run", installed(tmp_path / "packages")
    job = launched(launcher, url, packages, ranks=2, nodes=2)
    for rank in job.ended():
        assert rank.status == 1, job.told()
        said = rank.err[rank.err.rindex("OptionError: ") :]
        assert "rank 2 of 4: The run's path is not one folder on all nodes" in said
        for place in (f"{url} on {socket.gethostname()} (rank {number})" for number in (0, 2)):
            assert place in said
        assert "Name a folder that all nodes see, or object storage with a disk of each node" in said
        assert 'attach("s3://bucket/run", cache="/nvme")' in said
    first, second = (Path(folder_of(url, launcher.runtime(node))) for node in range(2))
    assert [path for path in second.rglob("*")] == [], "nothing is claimed there"
    assert run_view.newest_attempt(LocalStore(str(first))) is None
    # The first folder is a run's for who starts where all ranks see it.
    launched(launcher, str(first), packages, ranks=1, nodes=2).finished()
    assert flashckpt.verify(first).ok
    assert flashckpt.steps(first)
