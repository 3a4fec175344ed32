"""Every flipped byte of a committed step is in the report, under the file that has it."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flashckpt.commit.lineage import resolve
from flashckpt.commit.verification import verify, verify_file
from flashckpt.format.catalogue import Folder
from flashckpt.format.records import Contents, Part, RankRecord
from flashckpt.store.local import LocalStore
from tests.commit import runs
from tests.commit.runs import (
    attempt_at,
    commit,
    commit_published,
    contents_of,
    folder_of,
    name_of,
    new_run,
    put,
)
from tests.folders import flip
from tests.run_view import manifest_of

SHARD = "rank-00000-5f2c0a1b.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = new_run(tmp_path / "run")
    attempt = attempt_at(store)
    for step in (100, 200):
        commit(store, step, attempt, constants=True)
    return store


def committed(store: LocalStore, says: Callable[[RankRecord], RankRecord]) -> None:
    """Commit step 300 with a shard whose part says something else."""
    attempt = attempt_at(store, resolve(store).name)
    image, contents = contents_of(SHARD, {"a": np.arange(4.0), "b": np.arange(3.0)})
    id = name_of(300, attempt).id
    folder = folder_of(store, id)
    runs.write_shard(store, f"{folder.path}/{SHARD}", image, contents.layout())
    rank = RankRecord(rank=0, shard=contents, values={})
    put(store, Part(id=id, step=300, world=1, node=0, ranks=(says(rank),)))
    assert commit_published(store, id)


def other_digest(rank: RankRecord) -> RankRecord:
    first, second = rank.shard.digests
    return replace(rank, shard=replace(rank.shard, digests=(first, second ^ 1)))


def other_names(rank: RankRecord) -> RankRecord:
    _, other = contents_of(SHARD, {"a": np.arange(4.0), "c": np.arange(3.0)})
    return replace(rank, shard=replace(rank.shard, leaves=other.leaves))


def test_a_whole_run(store: LocalStore) -> None:
    report = verify(store)
    assert report.ok
    assert report.damaged == ()
    assert [row.step for row in report.rows] == [200] * 4 + [100] * 3
    kinds = [row.file.split("/")[-1].split("-")[0] for row in report.rows]
    assert kinds == ["manifest", "node", "rank", "frozen", "manifest", "node", "rank"]
    assert report.num_bytes == sum(
        Path(store.url, row.file).stat().st_size for row in report.rows if row.num_bytes
    )


def test_every_flipped_byte_is_found(store: LocalStore) -> None:
    record = resolve(store, 200)
    path, leaf = os.path.join(store.url, record.shard_path(0)), record.rank(0).shard.leaves[1]
    size = Path(path).stat().st_size
    for byte in [0, 7, 8, 100, 2000, 4095, *range(4096, size, 23), size - 1]:
        flip(path, byte)
        (row,) = verify(store, 200).damaged
        assert (row.status, os.path.join(store.url, row.file)) == ("damaged", path), byte
        flip(path, byte)
    assert verify(store, 200).ok
    flip(path, record.rank(0).shard.data_start + leaf.offset)
    (row,) = verify(store).damaged
    assert "chunk 0" in row.detail
    assert leaf.name in row.detail


def test_a_frozen_instance_with_other_bytes_is_not_taken_for_whole(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was lost, and another that was written under its name: steps disagree about its bytes."""
    path = os.path.join(store.url, resolve(store, 200).files(0)[1][0])
    of_before = runs.constants_of

    def replaced(store: LocalStore, folder: Folder, rank: int) -> tuple[Folder, Contents]:
        base, found = of_before(store, folder, 7)
        Path(store.url, f"{base.path}/{found.file}").replace(path)
        first = Folder.parse(folder.writer, Path(path).parent.name)
        assert first is not None
        return first, replace(found, file=Path(path).name)

    monkeypatch.setattr(runs, "constants_of", replaced)
    commit(store, 300, resolve(store, 200).attempt, constants=True)
    report = verify(store)
    assert [(row.step, row.status) for row in report.damaged] == [(200, "damaged"), (100, "damaged")]
    assert [row.num_bytes > 0 for row in report.damaged] == [True, False], "read once"
    assert verify(store, 300).ok


@pytest.mark.parametrize(
    ("harm", "status"),
    [
        ("unlink", "missing"),
        ("cut", "truncated"),
        ("link", "damaged"),
    ],
)
def test_files_that_are_gone_or_of_another_length(
    store: LocalStore, tmp_path: Path, harm: str, status: str
) -> None:
    path = Path(store.url, resolve(store, 200).shard_path(0))
    data = path.read_bytes()
    path.unlink()
    if harm == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif harm == "cut":
        path.write_bytes(data[:-1])
    for report in (verify(store), verify(store, 200)):
        assert [row.status for row in report.damaged] == [status]
        assert not report.ok


def test_records_that_are_damaged(store: LocalStore) -> None:
    record = resolve(store, 200)
    for path in (record.part_path(0), manifest_of(store, record.name.id)):
        flip(os.path.join(store.url, path), 50)
        (row,) = verify(store).damaged
        assert (row.step, row.file) == (200, path)
        flip(os.path.join(store.url, path), 50)


@pytest.mark.parametrize(
    ("says", "detail"),
    [
        (other_digest, "not the bytes that were captured: b"),
        (other_names, "not the one that its part describes"),
    ],
)
def test_a_part_that_says_something_else(
    store: LocalStore, says: Callable[[RankRecord], RankRecord], detail: str
) -> None:
    """Checksums agree with the file."""
    committed(store, says)
    (row,) = verify(store).damaged
    assert detail in row.detail


def test_a_checksum_that_the_bytes_do_not_have(store: LocalStore) -> None:
    """Digests and header agree with the file; the chunk's checksum does not."""
    record = resolve(store, 200)
    contents = record.rank(0).shard
    wrong = replace(contents, checksums=bytes(len(contents.checksums)))
    status, detail = verify_file(store, record.shard_path(0), wrong)
    assert (status, detail) == ("damaged", "chunk 0 does not have its checksum")
