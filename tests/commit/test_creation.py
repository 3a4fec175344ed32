"""Exclusive creation where the system answers strangely, and links where files should be."""

import errno
import os
from pathlib import Path
from typing import ClassVar

import pytest

from flashckpt.errors import DamagedError, OptionError, RunError
from flashckpt.store import open_store
from flashckpt.store.local import LocalStore, System
from tests.commit.runs import image_of, leaves_of, write_shard


class Strange(System):
    """`link` does its work or not, and answers with an error."""

    def __init__(self, code: int, *, works: bool, theirs: bytes | None = None) -> None:
        self.code, self.works, self.theirs = code, works, theirs

    def link(self, source: str, target: str, source_folder: int, target_folder: int) -> None:
        if self.works:
            super().link(source, target, source_folder, target_folder)
        if self.theirs is not None:
            file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=target_folder)
            os.write(file, self.theirs)
            os.close(file)
        raise OSError(self.code, os.strerror(self.code), target)


class NothingExclusive(Strange):
    def __init__(self) -> None:
        super().__init__(errno.EPERM, works=False)

    def rename_new(self, source: str, target: str, folder: int) -> None:
        raise OSError(errno.EINVAL, "no", target)


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path, code: int) -> None:
    assert LocalStore(str(tmp_path), Strange(code, works=True)).create("name", b"data")
    assert (tmp_path / "name").read_bytes() == b"data"
    assert os.listdir(tmp_path) == ["name"]


def test_a_link_that_fails_is_an_error(tmp_path: Path) -> None:
    """Whatever has the name: the caller tries again, and then reads what it finds there."""

    def created(code: int, theirs: bytes | None) -> bool:
        (tmp_path / "name").unlink(missing_ok=True)
        return LocalStore(str(tmp_path), Strange(code, works=False, theirs=theirs)).create("name", b"data")

    assert not created(errno.EEXIST, b"theirs")
    assert (tmp_path / "name").read_bytes() == b"theirs"
    for theirs in (None, b"theirs", b"data"):
        with pytest.raises(OSError, match="Input/output"):
            created(errno.EIO, theirs)
    assert os.listdir(tmp_path) == ["name"]


def test_neither_links_nor_exclusive_renames(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="another file system"):
        LocalStore(str(tmp_path), NothingExclusive()).create("name", b"data")
    assert os.listdir(tmp_path) == []


def test_links_in_the_run_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    run = tmp_path / "run"
    run.mkdir()
    (run / "folder").symlink_to(outside)
    (run / "file").symlink_to(outside / "secret")
    store = LocalStore(str(run))
    for act in (
        lambda: store.read("file", 100),
        lambda: store.read("folder/secret", 100),
        lambda: store.create("folder/new", b""),
        lambda: store.list("folder"),
        lambda: store.remove("folder/secret"),
    ):
        with pytest.raises((RunError, DamagedError), match="not followed|neither followed nor read"):
            act()
    store.remove("folder")
    assert [entry.name for entry in store.list("")] == []
    assert (outside / "secret").read_bytes() == b"secret"


def test_a_run_that_is_not_there_any_more_is_not_begun_anew(tmp_path: Path) -> None:
    """Moved, or a disk that is away: what is written in its place would count as safe, and be found by
    nobody."""
    run = tmp_path / "run"
    store = LocalStore(str(run))
    store.create("assets.json", b"{}")
    run.rename(tmp_path / "moved")
    image, layout, _ = image_of(leaves_of(1))
    for act in (
        lambda: store.create("steps/1/manifest.json", b"{}"),
        lambda: store.append("events/log", b"line", 100),
        lambda: write_shard(store, "steps/1/shard", image, layout),
    ):
        with pytest.raises(FileNotFoundError):
            act()
    assert os.listdir(tmp_path) == ["moved"]
    store.move_to(str(tmp_path / "moved"))
    assert store.create("steps/1/manifest.json", b"{}")


def test_a_folder_is_durable_whoever_made_it_again(tmp_path: Path) -> None:
    class Noted(System):
        synced: ClassVar[list[str]] = []

        def sync_folder(self, folder: int) -> None:
            self.synced.append(os.readlink(f"/proc/self/fd/{folder}"))

    store = LocalStore(str(tmp_path), Noted())
    store.create("steps/1/shard", b"1")
    store.remove("steps/1/shard")
    store.remove("steps/1")
    # By another process, which has not come to sync it. File systems give it the inode that has gone.
    (tmp_path / "steps/1").mkdir()
    Noted.synced.clear()
    store.create("steps/1/manifest.json", b"{}")
    assert Noted.synced[:2] == [str(tmp_path), str(tmp_path / "steps")]


def test_urls(tmp_path: Path) -> None:
    odd = tmp_path / "?a#b%20"
    assert open_store(odd.as_uri()).url == str(odd)
    for character in "?#\n\t":
        with pytest.raises(OptionError, match="as_uri"):
            open_store(f"file://{tmp_path}/a{character}b")
    with pytest.raises(OptionError, match="gopher://"):
        open_store("gopher://bucket/run")
    with pytest.raises(OptionError, match="another machine"):
        open_store("file://host/run")
    with pytest.raises(OptionError, match="empty"):
        open_store("")
