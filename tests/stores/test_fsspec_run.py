"""A run on an SFTP server: read, copied and mirrored there, and not trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt.errors import RunError
from flashckpt.replication.run_copy import copy_run
from flashckpt.store import open_store
from tests.stores.ssh_server import SshServer
from tests.waiting import until


def train(run: Path, steps: int, **how: object) -> None:
    with flashckpt.attach(run, w=torch.arange(1000), **how) as made:  # type: ignore[arg-type]
        for _ in made.epochs(steps):
            made.step()


@pytest.mark.process
def test_a_run_is_copied_there_and_read(ssh_server: SshServer, tmp_path: Path, runtime: Path) -> None:
    url = ssh_server.url(tmp_path / "copy")
    train(tmp_path / "run", 1)
    copy_run(open_store(str(tmp_path / "run")), open_store(url, ssh_server.options()))
    assert flashckpt.steps(url) == [1]
    assert flashckpt.verify(str(tmp_path / "copy")).ok, "in a folder it is the same run"
    assert (flashckpt.load(url)["w"] == torch.arange(1000)).all()


@pytest.mark.process
def test_a_run_is_mirrored_there(ssh_server: SshServer, tmp_path: Path, runtime: Path) -> None:
    url = ssh_server.url(tmp_path / "mirror")
    options = flashckpt.Options(remote_storage_options=ssh_server.options())
    train(tmp_path / "run", 1, remote=url, options=options)
    until(lambda: flashckpt.steps(str(tmp_path / "mirror")) == [1], "the step in the mirror")
    assert flashckpt.verify(str(tmp_path / "mirror")).ok


@pytest.mark.process
def test_no_run_is_trained_on_sftp(ssh_server: SshServer, tmp_path: Path, runtime: Path) -> None:
    url = ssh_server.url(tmp_path / "run")
    options = flashckpt.Options(storage_options=ssh_server.options())
    with pytest.raises(RunError, match=r"not trained on sftp://.*remote="):
        flashckpt.attach(url, options=options, w=torch.zeros(3))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("url", ["memory://run", "data://run", "local:///tmp/run"])
def test_no_run_is_trained_on_other_file_systems_of_fsspec(url: str, runtime: Path) -> None:
    with pytest.raises(RunError, match=f"{url}: runs are not trained on"):
        flashckpt.attach(url, w=torch.zeros(3))


@pytest.mark.parametrize(
    ("url", "message"), [("memory://run", "memory of this process"), ("data://run", "does not promise")]
)
def test_storages_where_nothing_can_be_written(url: str, message: str) -> None:
    with pytest.raises(RunError, match=f"{url}: no run can be written there.*{message}"):
        open_store(url).check()
