"""A step whose files are stored compressed is a step like any other: read, verified, kept, deleted and copied
by code that knows nothing of it."""

import errno
from pathlib import Path
from typing import Any

import pytest
import zstandard

from flashckpt.commit.steps import is_whole, read_step
from flashckpt.commit.verification import verify
from flashckpt.commit.view import HOME, View, ask
from flashckpt.errors import RunError
from flashckpt.format.names import CommitName
from flashckpt.recovery.recover import recover
from flashckpt.replication.run_copy import Outcome, StepCopier, copy_run
from flashckpt.store.base import Store
from flashckpt.store.compressed_file import Codec
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, name_of
from tests.contracts.flat_store import FlatStore
from tests.folders import flip
from tests.replication.copied import (
    add,
    delete,
    files,
    made,
    named,
    of_step,
    visible,
)
from tests.replication.copied import tmp_path as tmp_path
from tests.restore.snapshots import read


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return FlatStore(f"flat://{tmp_path / 'target'}")


@pytest.fixture
def source(tmp_path: Path) -> Store:
    return LocalStore(str(tmp_path / "source"))


def copied(source: Store, target: Store) -> None:
    assert copy_run(source, target, all_steps=True, compress="zstd").ok


def missing(store: Store, name: CommitName) -> list[str]:
    return ask(store, HOME.missing(read_step(store, name).manifest))


def compressed(folder: Path) -> list[str]:
    return sorted(name for name in files(folder) if name.endswith(".zst"))


def test_all_that_is_done_with_a_step(source: Store, target: Store, tmp_path: Path) -> None:
    attempt = made(source, [10, 20, 30])
    copied(source, target)
    names = files(tmp_path / "target")
    assert len(compressed(tmp_path / "target")) == 3 * 2 + 2, "shards, and constants of each rank"
    assert not [name for name in names if name.endswith((".safetensors", ".tmp"))]

    assert missing(target, name_of(20, attempt)) == []
    assert View.of(target).visible() == View.of(source).visible()
    assert verify(target).ok
    assert [row.outcome for row in recover(target).findings] == []

    for rank in (0, 1):
        mine, other = (read(read_step(store, name_of(20, attempt)), rank) for store in (source, target))
        assert mine == other

    delete(target, name_of(10, attempt))
    assert not [name for name in compressed(tmp_path / "target") if f".{10:020d}/" in name]
    assert visible(target) == [20, 30]
    again = copy_run(source, target, 20)
    assert [each.outcome for each in again.steps] == [Outcome.THERE]


def test_copied_back_it_is_the_very_run(source: Store, target: Store, tmp_path: Path) -> None:
    made(source, [10, 20])
    copied(source, target)
    back = LocalStore(str(tmp_path / "back"))
    assert copy_run(target, back, all_steps=True).ok
    assert of_step(tmp_path / "back") == of_step(tmp_path / "source")


def test_beside_a_copier_that_does_not_compress(source: Store, target: Store, tmp_path: Path) -> None:
    """A file that was lost is sent as its manifest says."""
    attempt = made(source, [10, 20])
    copy_run(source, target, 10)
    StepCopier(source, target, compress="zstd").copy(name_of(20, attempt))
    add(source, 30, attempt)
    copy_run(source, target, 30)
    target.remove(read_step(target, name_of(30, attempt)).shard_path(0))
    StepCopier(source, target, compress="zstd", repairs=True).copy(name_of(30, attempt))
    shards = read_step(target, name_of(20, attempt)).manifest.shards
    assert all(each.name.endswith(".zst") for each in shards)
    shards = read_step(target, name_of(30, attempt)).manifest.shards
    assert not any(each.name.endswith(".zst") for each in shards), "it is as it was"
    assert verify(target).ok


def test_trained_on(source: Store, target: Store) -> None:
    """A run resumes from compressed steps, and names their frozen instances."""
    attempt = made(source, [10])
    copied(source, target)
    second = attempt_at(target, name_of(10, attempt), world=2)
    add(target, 20, second)
    assert visible(target) == [10, 20]
    assert verify(target).ok
    assert is_whole(View.of(target), name_of(20, second))


def test_a_manifest_at_home_is_made_again_from_a_compressed_copy(source: Store, target: Store) -> None:
    attempt = made(source, [10])
    copied(source, target)
    checkpoint = View.of(source).checkpoint(name_of(10, attempt).id)
    data = source.read(checkpoint.manifest_path, 1 << 20)
    source.replace(checkpoint.manifest_path, data.replace(b"rank-", b"rank_"))
    done = copy_run(target, source, 10, repairs=True)
    assert [each.outcome for each in done.steps] == [Outcome.REPAIRED]
    assert source.read(checkpoint.manifest_path, 1 << 20) == data


def test_another_zstandard_is_told_at_each_repair(
    source: Store, target: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes other bytes, which the manifest does not name."""
    attempt = made(source, [10])
    copied(source, target)
    path = named(tmp_path / "target", "rank-00001", name_of(10, attempt).id)[0]
    flip(path, path.stat().st_size // 2)
    pack = Codec.pack

    def packed(codec: Any, *what: Any) -> bytes:
        codec._compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
        return pack(codec, *what)

    monkeypatch.setattr(Codec, "pack", packed)
    for _ in range(2):
        with pytest.raises(RunError, match="another version of the package zstandard"):
            copy_run(source, target, 10, repairs=True)
    shard = read_step(target, name_of(10, attempt)).shard_path(1)
    assert missing(target, name_of(10, attempt)) == [shard]
    # A start passes over the step, although the bytes are right: the report names the file.
    assert [row.file for row in verify(target).damaged] == [shard]


def test_a_repair_that_failed_halfway_is_done_again(
    source: Store, target: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest was damaged, too: only what is there tells the lengths of compressed files."""
    attempt = made(source, [10])
    copied(source, target)
    for file in ("rank-00001", "manifest-"):
        path = named(tmp_path / "target", file, name_of(10, attempt).id)[0]
        flip(path, path.stat().st_size // 2)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "the line is cut")

    with monkeypatch.context() as patched:
        patched.setattr(target, "write_parts", fails)
        with pytest.raises(OSError, match="line is cut"):
            copy_run(source, target, 10, repairs=True)
    assert not is_whole(View.of(target), name_of(10, attempt))
    done = copy_run(source, target, 10, repairs=True)
    assert [each.outcome for each in done.steps] == [Outcome.REPAIRED]
    assert verify(target).ok


def test_what_was_lost_is_sent_again_without_the_right_to_delete(
    source: Store, target: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = made(source, [10])
    copied(source, target)
    target.remove(read_step(target, name_of(10, attempt)).shard_path(1))

    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "no right to delete")

    monkeypatch.setattr(target, "remove", refused)
    assert [each.outcome for each in copy_run(source, target, 10, repairs=True).steps] == [Outcome.REPAIRED]
    assert verify(target).ok


def test_a_frozen_file_that_was_cut_is_sent_again(source: Store, target: Store, tmp_path: Path) -> None:
    attempt = made(source, [10])
    copied(source, target)
    path = named(tmp_path / "target", "frozen-", name_of(10, attempt).id)[0]
    path.write_bytes(path.read_bytes()[:-7])
    add(source, 20, attempt)
    copied_one = copy_run(source, target, 20, compress="zstd")
    assert copied_one.ok
    assert is_whole(View.of(target), name_of(20, attempt))
    assert verify(target, 20).ok
