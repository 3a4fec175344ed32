"""Runs behind a URL of fsspec: every reading command works, every writing one is refused by name."""

import re
import sys
import warnings
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from fsspec.registry import _registry
from torch.distributed.checkpoint.api import CheckpointException

import flashckpt
import flashckpt.dcp as dcp
from flashckpt import _native
from flashckpt.commit.attempts import mark_ended
from flashckpt.errors import DamagedError, OptionError, RunError
from flashckpt.export.step import export
from flashckpt.importing.run import import_checkpoint
from flashckpt.options import Keep
from flashckpt.recovery.recover import recover
from flashckpt.recovery.storage import prune
from flashckpt.replication.run_copy import copy_run
from flashckpt.store import fsspec_client, give_options, open_store
from flashckpt.store.base import Entry, LengthError
from flashckpt.store.fsspec_client import FsspecClient
from flashckpt.store.local import LocalStore
from flashckpt.store.objects import ObjectStore
from flashckpt.store.read_plan import read_shard
from tests import run_view
from tests.commit.runs import attempt_at, commit, new_run
from tests.contracts.store_contract import Shard
from tests.recovery.scene import whole_tree
from tests.stores.ssh_server import SshServer


@pytest.fixture(params=["local", pytest.param("sftp", marks=pytest.mark.process)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of the folder `run`."""
    if request.param == "local":
        return f"local://{tmp_path}/run"
    server: SshServer = request.getfixturevalue("ssh_server")
    found = server.url(tmp_path / "run")
    give_options(found, server.options())
    return found


@pytest.fixture
def run(tmp_path: Path) -> LocalStore:
    store = new_run(tmp_path / "run")
    attempt = attempt_at(store)
    for step in (1, 2):
        assert commit(store, step, attempt)
    mark_ended(store, attempt, "closed")
    return store


# ---- reading


def test_a_run_is_read(run: LocalStore, url: str, tmp_path: Path) -> None:
    before = whole_tree(tmp_path / "run")
    assert flashckpt.steps(url) == [1, 2]
    assert flashckpt.verify(url).ok
    expected, found = flashckpt.load(tmp_path / "run"), flashckpt.load(url)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert run_view.visible(open_store(url)) == run_view.visible(run)
    assert copy_run(open_store(url), LocalStore(str(tmp_path / "copy")), all_steps=True).ok
    assert flashckpt.verify(tmp_path / "copy").ok
    assert export(open_store(url), str(tmp_path / "weights.safetensors")).step == 2
    prune(open_store(url), Keep(last=1), dry_run=True)
    recover(open_store(url), dry_run=True)
    assert whole_tree(tmp_path / "run") == before


def test_files_are_read(url: str, tmp_path: Path, shard: Shard) -> None:
    local, store = LocalStore(str(tmp_path / "run")), open_store(url)
    assert local.create("a/deep/file", b"12345")
    local.write_shard("a/shard", shard.layout, shard.region)
    (tmp_path / "run/a/link").symlink_to("deep")
    assert store.list("a") == [Entry("deep", True, 0), Entry("shard", False, len(shard.image))]
    assert [each.modified_s > 0 for each in store.list("a")] == [False, True]
    assert store.list("none") == store.list("a/deep/file") == []
    assert [store.exists(path) for path in ("a/deep/file", "a/deep", "none")] == [True, False, False]
    assert store.read("a/deep/file", 5) == b"12345"
    assert store.read_bytes("a/deep/file", 1, 3) == b"234"
    with pytest.raises(DamagedError, match="at most 4"):
        store.read("a/deep/file", 4)
    with pytest.raises(LengthError):
        store.read_bytes("a/deep/file", 3, 3)
    for read in (lambda: store.read("none", 9), lambda: store.read_bytes("a/none", 0, 1)):
        with pytest.raises(FileNotFoundError):
            read()
    progress, into = array("Q", [0]), memoryview(bytearray(len(shard.image)))
    read = read_shard(store, "a/shard", shard.contents, into, progress=_native.address_of(progress))
    assert (read.bad_chunks, read.wrong_leaves(shard.contents)) == ([], [])
    assert into == shard.image
    assert progress[0] == len(shard.image)
    with pytest.raises(LengthError, match="5 bytes, where"):
        read_shard(store, "a/deep/file", shard.contents, None)


@pytest.mark.process
def test_a_lost_connection_is_opened_again(ssh_server: SshServer, tmp_path: Path) -> None:
    LocalStore(str(tmp_path)).create("a/file", b"1")
    store = ObjectStore(FsspecClient(ssh_server.url(tmp_path), ssh_server.options()))
    for read in (lambda: store.read("a/file", 9), lambda: store.list("a"), lambda: store.exists("a/file")):
        assert read()
        ssh_server.kill_connections()
        assert read()


@pytest.mark.process
def test_a_server_that_is_away_is_an_error(
    ssh_server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_client, "_DEADLINE_S", 0.2)
    store = ObjectStore(FsspecClient("sftp://127.0.0.1:9/run", ssh_server.options()))
    with pytest.raises(OSError, match="sftp://127.0.0.1:9/run"):
        store.read("file", 9)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="supports nowhere://"):
        open_store("nowhere://host/run")
    monkeypatch.delitem(_registry, "sftp", raising=False)
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    with pytest.raises(OptionError, match="package for sftp://.*paramiko"):
        open_store("sftp://host/run")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(OptionError, match=r"pip install 'flashckpt\[fsspec\]'"):
        open_store("sftp://host/run")


# ---- writing


def dcp_save(url: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            torch_dcp.save(
                {"w": torch.zeros(3)}, storage_writer=dcp.Writer(url), planner=dcp.SavePlanner(), no_dist=True
            )
        except CheckpointException as error:
            [(raised, _)] = error.failures.values()
            raise raised from error


Act = Callable[[str, Path], object]
WRITES: dict[str, Act] = {
    "attach": lambda url, folder: flashckpt.attach(url, w=torch.zeros(3)),
    "remote": lambda url, folder: flashckpt.attach(folder / "new", remote=url, w=torch.zeros(3)),
    "copy": lambda url, folder: copy_run(LocalStore(str(folder / "run")), open_store(url)),
    "import": lambda url, folder: import_checkpoint(folder / "state.pt", url),
    "recover": lambda url, folder: recover(open_store(url)),
    "prune": lambda url, folder: prune(open_store(url), Keep(last=1)),
    "branch": lambda url, folder: flashckpt.branch(url, 1),
    "dcp": lambda url, folder: dcp_save(url),
    "remove": lambda url, folder: open_store(url).remove("catalogue/000000001"),
}


@pytest.mark.parametrize("scheme", ["local", "sftp"])
def test_every_writing_command_is_refused_by_name(
    scheme: str, run: LocalStore, tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server is asked."""
    monkeypatch.setattr(fsspec_client, "_DEADLINE_S", 0.2)
    torch.save({"w": torch.zeros(3)}, tmp_path / "state.pt")
    url = f"local://{tmp_path}/run" if scheme == "local" else f"sftp://127.0.0.1:9{tmp_path}/run"
    before = whole_tree(tmp_path / "run")
    message = f"{url}: runs are only read here.*Nothing was changed.*mount it.*scp"
    for name, write in WRITES.items():
        with pytest.raises(RunError) as caught:
            write(url, tmp_path)
        assert re.match(message, str(caught.value)), name
        assert whole_tree(tmp_path / "run") == before, name
        assert not (tmp_path / "new").exists(), name
