"""Slots as files of a cache: whole or absent, and never mapped."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashckpt.errors import DamagedError, KeeperError
from flashckpt.format.names import AttemptName
from flashckpt.memory import cache_folder
from flashckpt.memory.cache_folder import CacheFolder, open_cached
from flashckpt.memory.slot import Sealed, Slot
from tests.descriptors import closed_after
from tests.folders import flip
from tests.keeper.fake import content, layout_for
from tests.keeper.region import write_constants
from tests.memory.test_slot import make

pytestmark = pytest.mark.fast

IDENTITY = "ab" * 16
STEP = 7


@pytest.fixture
def sealed() -> Sealed:
    """A slot in memory with a snapshot that is asked for."""
    room = {"metadata_capacity": 1 << 16, "image_capacity": 1 << 20}
    slot = closed_after(make(2, identity=bytes.fromhex(IDENTITY), **room))
    slot.enroll(os.getpid(), "trainer-00000-1-00000000.lock", lambda lock: True)
    layout = layout_for(256)
    data = [content(leaf, STEP) for leaf in layout.leaves]
    write_constants(slot, 1, AttemptName(3, "0" * 8), layout, data)
    slot.set_complete(3, 5)
    found = slot.sealed()
    slot.request_persist(found.generation)
    return found


@pytest.fixture
def base(tmp_path: Path) -> str:
    (tmp_path / "cache").mkdir()
    return str(tmp_path / "cache")


@pytest.fixture
def cache(base: str) -> Iterator[CacheFolder]:
    folder = CacheFolder.open(base, IDENTITY)
    with contextlib.closing(folder):
        yield folder


def file_of(cache: CacheFolder) -> Path:
    (name,) = cache.names()
    return Path(cache.path) / name


def check_image(slot: Slot) -> None:
    layout = layout_for(256)
    assert os.pread(slot.image_descriptor, layout.data_start, slot.image_offset) == layout.header
    for leaf in layout.leaves:
        start = slot.image_offset + layout.data_start + leaf.offset
        assert os.pread(slot.image_descriptor, leaf.num_bytes, start) == content(leaf, STEP)


def test_a_copy_holds_what_the_slot_held(sealed: Sealed, cache: CacheFolder) -> None:
    slot = closed_after(cache.copy(sealed, lambda: True))
    found = slot.sealed()
    assert found is not None
    assert slot.is_cached
    assert slot.name != sealed.slot.name
    assert (found.record, found.capture) == (sealed.record, sealed.capture)
    assert slot.wants_persist(sealed.generation)
    assert slot.complete == (3, 5)
    assert slot.owner(1) is None
    assert slot.metadata(found).digests == sealed.slot.metadata(sealed).digests
    check_image(slot)
    again = closed_after(open_cached(str(file_of(cache)), bytes.fromhex(IDENTITY)))
    check_image(again)
    assert oct(os.stat(file_of(cache)).st_mode & 0o777) == "0o600"


def test_words_are_this_process_s_own_and_a_mark_stays(sealed: Sealed, cache: CacheFolder) -> None:
    slot = closed_after(cache.copy(sealed, lambda: True))
    slot.set_failed(sealed.generation)
    again = closed_after(cache.slot(slot.name))
    assert again.failed == 0
    assert again.persisted == 0
    cache.mark_persisted(slot.name, sealed.generation)
    assert closed_after(cache.slot(slot.name)).persisted == sealed.generation


def test_a_lost_pin_leaves_no_file(sealed: Sealed, cache: CacheFolder) -> None:
    with pytest.raises(KeeperError):
        cache.copy(sealed, lambda: False)
    assert os.listdir(cache.path) == [cache_folder.LOCK_NAME]


def test_what_was_half_written_goes(cache: CacheFolder) -> None:
    half = Path(cache.path) / "new-0123456789abcdef"
    half.touch(0o600)
    assert cache.names() == []
    assert not half.exists()


def test_a_flipped_bit_in_the_head_and_a_short_file_are_found(sealed: Sealed, cache: CacheFolder) -> None:
    cache.copy(sealed, lambda: True).close()
    path = file_of(cache)
    for offset in (0, 60, 260, 780, 4096 + 70):
        flip(path, offset, 64)
        with pytest.raises(DamagedError):
            cache.slot(path.name)
        flip(path, offset, 64)
    cache.slot(path.name).close()
    for num_bytes in (path.stat().st_size - 4096, 8192, 4096, 100, 0):
        os.truncate(path, num_bytes)
        with pytest.raises(DamagedError):
            cache.slot(path.name)


def test_another_run_s_slot_is_refused(sealed: Sealed, cache: CacheFolder, tmp_path: Path) -> None:
    cache.copy(sealed, lambda: True).close()
    with contextlib.closing(CacheFolder.open(cache.base, "cd" * 16)) as other:
        name = file_of(cache).name
        os.link(file_of(cache), Path(other.path) / name)
        with pytest.raises(KeeperError):  # it has two names
            other.slot(name)
        file_of(cache).unlink()
        with pytest.raises(KeeperError, match="another run"):
            other.slot(name)


def test_one_keeper_holds_the_folder(cache: CacheFolder) -> None:
    with pytest.raises(KeeperError, match="Another keeper"):
        CacheFolder.open(cache.base, IDENTITY)
    os.unlink(Path(cache.path) / cache_folder.LOCK_NAME)
    assert not cache.stands()
    CacheFolder.open(cache.base, IDENTITY).close()


@pytest.mark.parametrize("call", ["fsync", "memfd_create"])
def test_an_error_after_the_rename_leaves_no_file(
    sealed: Sealed, cache: CacheFolder, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, call)

    def failing(what: int | str, *rest: int) -> int:
        if isinstance(what, str) or stat.S_ISDIR(os.fstat(what).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        found: int = real(what, *rest)
        return found

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(OSError, match="error"):
        cache.copy(sealed, lambda: True)
    monkeypatch.undo()
    assert os.listdir(cache.path) == [cache_folder.LOCK_NAME]


def test_a_folder_that_cannot_be_synced_is_not_locked_for_ever(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Invalid"):
        CacheFolder.open(base, IDENTITY)
    monkeypatch.undo()
    CacheFolder.open(base, IDENTITY).close()


def test_the_folder_is_ours_alone(tmp_path: Path, base: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "cache" / f"flashckpt-{os.geteuid()}").symlink_to(tmp_path / "real")
    with pytest.raises(KeeperError):
        CacheFolder.open(base, IDENTITY)
    (tmp_path / "file").touch()
    with pytest.raises(KeeperError):
        CacheFolder.open(str(tmp_path / "file"), IDENTITY)
    with pytest.raises(FileNotFoundError):
        CacheFolder.open(str(tmp_path / "not there"), IDENTITY)


def test_a_folder_that_is_discarded_is_gone(sealed: Sealed, base: str) -> None:
    cache = CacheFolder.open(base, IDENTITY)
    slot = cache.copy(sealed, lambda: True)
    slot.close()
    cache.discard()
    assert os.listdir(cache.path) == [slot.name]  # what nobody names stays
    cache.discard([slot.name])
    cache.close()
    assert not os.path.exists(cache.path)
    assert cache_folder.caches_in(base) == []
