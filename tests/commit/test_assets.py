"""The assets of a run: written once, verified when read, and the same in every copy of the run."""

import errno
from pathlib import Path

import pytest

from flashckpt.commit.assets import copy_assets, read_assets, write_assets
from flashckpt.commit.lineage import resolve
from flashckpt.commit.view import View
from flashckpt.errors import DamagedError, OptionError
from flashckpt.format.checked_json import dump
from flashckpt.format.names import ASSETS
from flashckpt.options import Remote
from flashckpt.replication.mirror import Mirror
from flashckpt.replication.run_copy import copy_run
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, commit, new_run
from tests.folders import flip

FILES = {"config.json": b'{"model_type": "gpt2"}', "tokenizer.model": bytes(range(256)), "other/a.json": b""}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A run with a committed step."""
    store = new_run(tmp_path / "run")
    name = attempt_at(store)
    assert commit(store, 5, name)
    return store


def test_written_once_and_read_back(store: LocalStore) -> None:
    assert read_assets(store) == {}
    assert not write_assets(store, {}), "a run keeps its first files, and these are none"
    assert write_assets(store, FILES)
    assert not write_assets(store, {"config.json": b"another"})
    assert read_assets(store) == FILES


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../run.json", "a/../b", ".hidden", "a//b", "", "a\0b", "x" * 300]
)
def test_a_name_that_leads_elsewhere_is_refused(store: LocalStore, name: str) -> None:
    with pytest.raises(OptionError, match="No asset was written"):
        write_assets(store, {"config.json": b"", name: b""})
    assert read_assets(store) == {}


def test_more_than_a_run_keeps_is_refused(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashckpt.commit.assets.MAX_FILES", 2)
    with pytest.raises(OptionError, match="at most 2 files"):
        write_assets(store, FILES)
    monkeypatch.setattr("flashckpt.commit.assets.MAX_FILES", 3)
    monkeypatch.setattr("flashckpt.commit.assets.MAX_BYTES", 10)
    with pytest.raises(OptionError, match="of 10 bytes"):
        write_assets(store, FILES)


def test_data_that_is_no_base64_is_damage(store: LocalStore, tmp_path: Path) -> None:
    for data in ("e30", "\u00e9"):
        obj = {"kind": "assets", "files": [["config.json", data]]}
        (tmp_path / "run" / ASSETS).write_bytes(dump(obj))
        with pytest.raises(DamagedError, match="is not base64"):
            read_assets(store)


def test_a_copy_has_them(store: LocalStore, tmp_path: Path) -> None:
    write_assets(store, FILES)
    target = LocalStore(str(tmp_path / "copy"))
    copy_run(store, target)
    assert read_assets(target) == FILES
    flip(tmp_path / "copy" / ASSETS, 40)
    copy_run(store, target)
    with pytest.raises(DamagedError):
        read_assets(target)
    copy_run(store, target, repairs=True)
    assert read_assets(target) == FILES


def test_damaged_ones_are_not_copied_and_steps_are(store: LocalStore, tmp_path: Path) -> None:
    write_assets(store, FILES)
    flip(tmp_path / "run" / ASSETS, 40)
    target = LocalStore(str(tmp_path / "copy"))
    with pytest.raises(DamagedError, match=ASSETS):
        copy_run(store, target)
    assert View.of(target).visible()
    assert not (tmp_path / "copy" / ASSETS).exists()
    assert not copy_assets(target, LocalStore(str(tmp_path / "other")))


def refuse(source: Store, target: Store) -> bool:
    raise PermissionError(errno.EACCES, "the remote takes no such name")


@pytest.mark.parametrize("why", ["", "damaged", "refused"])
def test_a_remote_has_them_also_where_they_come_after_the_start(
    store: LocalStore, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(store, Remote(url=str(tmp_path / "remote")))
    mirror.bring(lambda newest, step: newest != step)
    remote = LocalStore(str(tmp_path / "remote"))
    assert read_assets(remote) == {}
    write_assets(store, FILES)
    if why == "damaged":
        flip(tmp_path / "run" / ASSETS, 40)
    elif why == "refused":
        monkeypatch.setattr("flashckpt.replication.mirror.copy_assets", refuse)
    parent = resolve(store).name
    assert commit(store, 6, attempt_at(store, parent))
    mirror.bring(lambda newest, step: newest != step)
    assert mirror.newest.step == 6, "steps are worth more than a config"
    assert read_assets(remote) == ({} if why else FILES)
