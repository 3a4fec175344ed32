"""A run on an SFTP server, and the refusal where none may be trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt.errors import RunError
from tests.stores.ssh_server import SshServer


@pytest.mark.process
def test_a_run_is_trained_there(ssh_server: SshServer, tmp_path: Path, runtime: Path) -> None:
    url = ssh_server.url(tmp_path / "run")
    options = flashckpt.Options(storage_options=ssh_server.options())
    with flashckpt.attach(url, options=options, w=torch.arange(1000)) as checkpointer:
        for _ in checkpointer.epochs(1):
            checkpointer.step()
    assert flashckpt.steps(url) == [1]
    assert flashckpt.verify(str(tmp_path / "run")).ok, "in a folder it is the same run"
    assert (flashckpt.load(url)["w"] == torch.arange(1000)).all()


@pytest.mark.parametrize(
    ("url", "message"), [("memory://run", "memory of one process"), ("data://run", "does not promise")]
)
def test_where_no_run_is_trained(url: str, message: str, runtime: Path) -> None:
    with pytest.raises(RunError, match=f"{url}: no run is trained there.*{message}"):
        flashckpt.attach(url, w=torch.zeros(3))
