"""A step whose files are stored compressed is a step like any other: read, verified, kept, deleted and copied
by code that knows nothing of it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from flashckpt.commit.steps import is_whole, missing_files, read_step
from flashckpt.commit.verification import verify
from flashckpt.commit.view import View, open_run
from flashckpt.errors import DamagedError
from flashckpt.format.layout import Leaf
from flashckpt.format.names import CommitName
from flashckpt.format.records import Contents
from flashckpt.options import Compress
from flashckpt.recovery.recover import recover
from flashckpt.recovery.report import Fate
from flashckpt.replication.run_copy import Outcome, StepCopier, copy_run
from flashckpt.store.base import Store
from flashckpt.store.compressed_store import CompressedStore, compressing
from flashckpt.store.local import LocalStore
from flashckpt.store.read_plan import ReadPlan
from tests.commit.runs import attempt_at, commit, image_of, name_of, write_shard
from tests.contracts.flat_store import FlatStore
from tests.replication.copied import (
    add,
    delete,
    file_of,
    files,
    in_folder_of,
    killed_at,
    made,
    of_step,
    visible,
)
from tests.restore.snapshots import read
from tests.run_view import folder_of


@pytest.fixture
def tmp_path(scratch: str) -> Path:
    return Path(scratch)


@pytest.fixture(params=["local", "flat"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return opened(request.param, tmp_path / "target")


def opened(kind: str, folder: Path) -> Store:
    return CompressedStore(LocalStore(str(folder)) if kind == "local" else FlatStore(f"flat://{folder}"))


@pytest.fixture
def source(tmp_path: Path) -> Store:
    return CompressedStore(LocalStore(str(tmp_path / "source")))


def copied(source: Store, target: Store) -> None:
    assert copy_run(source, target, all_steps=True, compress="zstd").ok


def missing(store: Store, name: CommitName) -> list[str]:
    checkpoint = View.of(store).checkpoint(name.id)
    assert checkpoint is not None
    return missing_files(store, checkpoint)


def files_of(store: Store, name: CommitName) -> set[tuple[str, int]]:
    """The parts and shards of a step, with their lengths."""
    manifest = read_step(store, name).manifest
    return {each[:2] for each in (*manifest.parts, *manifest.shards)}


def compressed(folder: Path) -> list[str]:
    return sorted(name for name in files(folder) if name.endswith(".zst"))


def beside(folder: Path, *, rename: bool) -> list[Path]:
    """Beside each compressed file one of another length: the same bytes renamed, or a whole one of others."""
    made = []
    paths = [path for path in folder.rglob("*") if path.name.endswith(".zst")]
    for path, other in zip(paths, paths[1:] + paths[:1], strict=True):
        name, num_bytes, _ = path.name.rsplit(".", 2)
        length = int(num_bytes) + 7 if rename else 1
        there = path.with_name(f"{name}.{length}.zst")
        there.write_bytes((path if rename else other).read_bytes())
        made.append(there)
    return made


@pytest.mark.parametrize("rename", [True, False], ids=["renamed", "in front"])
def test_a_file_of_another_length_hides_no_whole_one(
    source: Store, tmp_path: Path, target: Store, rename: bool
) -> None:
    attempt = made(source, [10])
    copied(source, target)
    others = beside(tmp_path / "target", rename=rename)
    assert len(others) == 4
    kind = type(target)(target.below)  # type: ignore[attr-defined,call-arg]
    assert missing(kind, name_of(10, attempt)) == []
    assert verify(kind).ok
    assert visible(kind) == [10]
    back = CompressedStore(LocalStore(str(tmp_path / "back")))
    assert copy_run(kind, back).ok
    assert of_step(tmp_path / "back") == of_step(tmp_path / "source")
    path = read_step(kind, name_of(10, attempt)).shard_path(0)
    theirs = read_step(source, name_of(10, attempt)).shard_path(0)
    assert kind.read_bytes(path, 0, 100) == source.read_bytes(theirs, 0, 100)
    kind.remove(path)
    assert not kind.exists(path), "all that stands in its place goes with it"


@pytest.mark.parametrize("data", [b"cut short", bytes(100_000)], ids=["shorter", "longer"])
def test_a_plain_file_of_another_length_hides_no_compressed_one(
    source: Store, target: Store, tmp_path: Path, data: bytes
) -> None:
    attempt = made(source, [10])
    copied(source, target)
    path, contents = read_step(target, name_of(10, attempt)).files(0)[0]
    theirs = read_step(source, name_of(10, attempt)).shard_path(0)
    target.create(path, data)
    assert verify(target).ok
    assert visible(target) == [10]
    assert pieces(target, path, contents) == pieces(source, theirs, contents)


def pieces(store: Store, path: str, contents: Contents) -> list[bytes]:
    """Each leaf of a shard, by who has not seen its folder, and by who has."""
    look = CompressedStore(store.below)  # type: ignore[attr-defined]
    found = [leaf_of(look, path, contents, leaf) for leaf in contents.leaves]
    look.list(path.rpartition("/")[0])
    assert [leaf_of(look, path, contents, leaf) for leaf in contents.leaves] == found
    return found


def leaf_of(store: Store, path: str, contents: Contents, leaf: Leaf) -> bytes:
    plan, into = ReadPlan(), memoryview(bytearray(leaf.num_bytes))
    plan.copy(path, contents, contents.shard.data_start + leaf.offset, leaf.num_bytes, (), into, 0)
    plan.run(store, 1)
    return bytes(into)


def test_a_compressed_file_of_another_length_hides_no_plain_one(source: Store, tmp_path: Path) -> None:
    attempt = made(source, [10])
    path, contents = read_step(source, name_of(10, attempt)).files(0)[0]
    before = pieces(source, path, contents)
    image, layout, _ = image_of({"other": np.arange(100_000, dtype="float32")})
    write_shard(compressing(LocalStore(str(tmp_path / "other")), "zstd"), path, image, layout)
    [longer] = (tmp_path / "other").rglob("*.zst")
    longer.rename(tmp_path / "source" / folder_of(source, name_of(10, attempt).id) / longer.name)
    assert pieces(source, path, contents) == before


@pytest.mark.parametrize("file", ["rank-00001", "frozen-"])
@pytest.mark.parametrize("compress", ["zstd", "none"])
def test_what_is_damaged_there_is_sent_again(
    source: Store, target: Store, tmp_path: Path, file: str, compress: Compress
) -> None:
    """Compressed again, or as it is."""
    attempt = made(source, [10, 20])
    copied(source, target)
    path = file_of(tmp_path / "target", name_of(10, attempt).id, file)
    assert path.name.endswith(".zst")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    assert not verify(target).ok
    done = copy_run(source, target, 10, compress=compress, repairs=True)
    assert [each.copied.outcome for each in done.steps if each.copied] == [Outcome.REPAIRED]
    assert verify(CompressedStore(target.below)).ok  # type: ignore[attr-defined]
    assert visible(target) == [10, 20]
    assert missing(target, name_of(10, attempt)) == []
    assert not [name for name in files(tmp_path / "target") if ".tmp" in name]


def test_of_two_whole_files_none_is_guessed(source: Store, target: Store, tmp_path: Path) -> None:
    """Where the reader says no length, and both are what their names say."""
    attempt = made(source, [10])
    copied(source, target)
    path = read_step(target, name_of(10, attempt)).shard_path(0)
    frozen = read_step(target, name_of(10, attempt)).constants_path(0)
    assert frozen is not None
    names = {unquote(each.name): each for each in (tmp_path / "target").rglob("*.zst")}
    [mine] = (each for name, each in names.items() if path.rpartition("/")[2] in name)
    [other] = (each for name, each in names.items() if frozen.rpartition("/")[2] in name)
    length = other.name.rsplit(".", 2)[1]
    assert length != mine.name.rsplit(".", 2)[1]
    mine.with_name(f"{mine.name.rsplit('.', 2)[0]}.{length}.zst").write_bytes(other.read_bytes())
    with pytest.raises(DamagedError, match="several lengths"):
        CompressedStore(target.below).read_bytes(path, 0, 100)  # type: ignore[attr-defined]


def test_all_that_is_done_with_a_step(source: Store, target: Store, tmp_path: Path) -> None:
    attempt = made(source, [10, 20, 30])
    copied(source, target)
    names = files(tmp_path / "target")
    assert len(compressed(tmp_path / "target")) == 3 * 2 + 2, "shards, and constants of each rank"
    assert not [name for name in names if name.endswith((".safetensors", ".tmp"))]

    assert files_of(target, name_of(20, attempt)) == files_of(source, name_of(20, attempt))
    assert missing(target, name_of(20, attempt)) == []
    assert View.of(target).visible() == View.of(source).visible()
    assert verify(target).ok
    ours, theirs = (
        {
            (each.name, each.num_bytes)
            for each in store.list(folder_of(store, name_of(20, attempt).id))
            if not each.name.startswith("manifest-")
        }
        for store in (source, target)
    )
    assert ours == theirs == files_of(source, name_of(20, attempt))
    assert [row.outcome for row in recover(target).findings] == []

    for rank in (0, 1):
        mine, other = (
            read(read_step(store, name_of(20, attempt), {rank}, with_writers=True), rank)
            for store in (source, target)
        )
        assert mine == other

    delete(target, name_of(10, attempt))
    assert not [name for name in compressed(tmp_path / "target") if f".{10:020d}/" in name]
    assert visible(target) == [20, 30]
    again = copy_run(source, target, 20)
    assert [each.copied.outcome for each in again.steps if each.copied] == [Outcome.THERE]


def test_copied_back_it_is_the_very_run(source: Store, target: Store, tmp_path: Path) -> None:
    made(source, [10, 20])
    copied(source, target)
    back = CompressedStore(LocalStore(str(tmp_path / "back")))
    assert copy_run(target, back, all_steps=True).ok
    assert of_step(tmp_path / "back") == of_step(tmp_path / "source")
    again = CompressedStore(LocalStore(str(tmp_path / "again")))
    copied(target, again)
    assert {name.split("/")[-1] for name in compressed(tmp_path / "again")} == {
        name.split("/")[-1] for name in compressed(tmp_path / "target")
    }
    assert verify(again).ok


def test_fewer_bytes_are_sent(source: Store, target: Store, tmp_path: Path) -> None:
    made(source, [10])
    done = copy_run(source, target, compress="zstd")
    stored = sum(len(data) for name, data in files(tmp_path / "target").items() if name.endswith(".zst"))
    assert done.sent_bytes == stored < sum(each.copied.num_bytes for each in done.steps if each.copied)


def test_damage_is_found_by_name(source: Store, target: Store, tmp_path: Path) -> None:
    attempt = made(source, [10, 20])
    copied(source, target)
    [path] = [
        each
        for each in (tmp_path / "target").rglob("*.zst")
        if in_folder_of(name_of(20, attempt).id, each) and "rank-00001" in each.name
    ]
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    report = verify(target)
    assert [(row.step, row.status) for row in report.damaged] == [(20, "damaged")]
    assert report.damaged[0].file.endswith(".safetensors")
    with pytest.raises(DamagedError):
        read(read_step(target, name_of(20, attempt)), 1)
    back = CompressedStore(LocalStore(str(tmp_path / "back")))
    done = copy_run(target, back, all_steps=True)
    assert [(each.name.step, bool(each.problem)) for each in done.steps] == [(20, True), (10, False)]


def test_a_file_that_was_lost_is_sent_again(source: Store, target: Store, tmp_path: Path) -> None:
    attempt = made(source, [10])
    copied(source, target)
    lost = compressed(tmp_path / "target")[-1]
    for path in (tmp_path / "target").rglob("*"):
        if path.name.endswith(lost.rpartition("/")[2]):
            path.unlink()
    assert len(missing(target, name_of(10, attempt))) == 1
    copied(source, target)
    assert lost in compressed(tmp_path / "target")
    assert verify(target).ok


@pytest.mark.process
@pytest.mark.parametrize(
    "point", ["copy.written", "copy.written:3", "copy.files", "copy.part:2", "manifest.creating"]
)
def test_killed_at_a_point(
    source: Store, target: Store, point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(source, [10])
    killed_at(point, target.below, monkeypatch, lambda: copied(source, target))  # type: ignore[attr-defined]
    assert visible(target) == []
    copied(source, target)
    assert verify(target).ok
    assert not [name for name in files(tmp_path / "target") if name.endswith(".tmp") or ".tmp." in name]


@pytest.mark.process
def test_what_a_killed_copier_left_is_committed_as_it_stands(
    source: Store, target: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run(source, create=True)
    attempt = attempt_at(source)
    assert commit(source, 10, attempt)
    below = target.below  # type: ignore[attr-defined]
    killed_at("manifest.creating", below, monkeypatch, lambda: copied(source, target))
    assert [row.outcome for row in recover(target).findings] == [Fate.COMMITTED]
    assert files_of(target, name_of(10, attempt)) == files_of(source, name_of(10, attempt))
    assert verify(target).ok


def test_beside_a_copier_that_does_not_compress(source: Store, target: Store, tmp_path: Path) -> None:
    """Files of both kinds may stand in one step, and none is sent twice."""
    attempt = made(source, [10, 20])
    copy_run(source, target, 10)
    StepCopier(source, target, compress="zstd").copy(name_of(20, attempt))
    add(source, 30, attempt)
    copy_run(source, target, 30)
    target.remove(read_step(target, name_of(30, attempt)).shard_path(0))
    StepCopier(source, target, compress="zstd").copy(name_of(30, attempt))
    there = target.list(folder_of(target, name_of(30, attempt).id))
    kinds = {each.name: each.is_compressed for each in there if "rank-" in each.name}
    assert sorted(kinds.values()) == [False, True]
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
