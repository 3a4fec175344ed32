"""The order of writes: what is named before what, and what commits when."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from flashckpt import crashpoints
from flashckpt.commit.attempts import claim, open_run, start
from flashckpt.commit.retention import bury
from flashckpt.commit.steps import Committed, commit, is_committed, publish_part, read_manifest, read_step
from flashckpt.errors import DamagedError, NoSuchStepError, SupersededError
from flashckpt.format.checked_json import checksum_in
from flashckpt.format.names import AttemptName, manifest_path, step_attempt_folder
from flashckpt.format.records import FileRecord, Manifest, PartRecord, Tombstone
from flashckpt.store.base import Entry, Store
from flashckpt.store.local import LocalStore
from flashckpt.store.objects import ObjectStore
from tests.commit import runs
from tests.commit.in_turn import ObjectsInTurn, Turns
from tests.commit.runs import HOLDER, attempt_at, is_whole, new_run, part_of, publish
from tests.contracts.flat_store import FlatStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


@pytest.fixture
def attempt(store: LocalStore) -> AttemptName:
    return attempt_at(store)


def test_a_step_is_committed_by_its_manifest_alone(store: LocalStore, attempt: AttemptName) -> None:
    part = part_of(store, 100, attempt)
    assert not is_committed(store, 100, attempt)
    assert publish_part(store, part)
    assert not is_committed(store, 100, attempt)
    assert commit(store, 100, attempt, world=1) is Committed.YES
    assert is_committed(store, 100, attempt)
    assert is_whole(store, 100, attempt)
    assert commit(store, 100, attempt, world=1) is Committed.YES


def test_a_manifest_without_its_shard_is_no_commit(store: LocalStore, attempt: AttemptName) -> None:
    """Who is told that a step is committed lets go of what may be its only whole copy."""
    publish(store, 100, attempt)
    assert commit(store, 100, attempt, world=1)
    folder = step_attempt_folder(100, attempt)
    [shard] = [entry.name for entry in store.list(folder) if entry.name.startswith("shard-")]
    store.remove(f"{folder}/{shard}")
    with pytest.raises(DamagedError, match="missing"):
        commit(store, 100, attempt, world=1)
    assert not is_committed(store, 100, attempt)


def test_a_step_that_comes_whole_while_a_look_is_taken_is_not_called_damaged() -> None:
    """The look has listed the attempts before the step's constants came, and the steps after its manifest."""
    store = ObjectStore(ObjectsInTurn(Turns(), {}))
    open_run(store, create=True)
    attempt = attempt_at(store)
    seen = store.at_once()
    assert len(seen.list("attempts")) == 2
    assert runs.commit(store, 100, attempt, constants=True)
    assert commit(store, 100, attempt, world=1, seen=seen)


@pytest.mark.parametrize("kind", ["local", "flat"])
def test_a_commit_after_the_tombstone_has_gone_too_is_none(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late committer saw all files. Then the step was buried, and its folder swept with the tombstone."""
    store: Store = LocalStore(str(tmp_path / "a")) if kind == "local" else FlatStore(f"flat://{tmp_path}/a")
    open_run(store, create=True)
    attempt = attempt_at(store)
    publish(store, 100, attempt)

    def swept(point: str) -> None:
        if point == "manifest.checked":
            assert bury(store, 100, attempt)
            store.remove_tree(step_attempt_folder(100, attempt))

    monkeypatch.setattr(crashpoints, "point", swept)
    with pytest.raises(DamagedError, match="missing"):
        commit(store, 100, attempt, world=1)
    assert not is_committed(store, 100, attempt)


def test_parts_must_cover_every_rank(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt, ranks=(0, 2), world=4, keeper=0)
    assert commit(store, 100, attempt, world=4) is Committed.WAITING
    publish(store, 100, attempt, ranks=(1,), world=4, keeper=1)
    assert commit(store, 100, attempt, world=4) is Committed.WAITING
    assert not read_manifest(store, 100, attempt)
    publish(store, 100, attempt, ranks=(3,), world=4, keeper=2)
    assert commit(store, 100, attempt, world=4)
    record = read_step(store, 100, attempt)
    assert [record.rank(rank).values["rank"] for rank in range(4)] == [0, 1, 2, 3]
    assert is_whole(store, 100, attempt)


def test_parts_of_different_boundaries_are_no_step(store: LocalStore, attempt: AttemptName) -> None:
    """Two snapshots may have one step: before and after the code of an epoch's end."""
    first = publish(store, 100, attempt, ranks=(0,), world=2, keeper=0, boundary=8)
    other = publish(store, 100, attempt, ranks=(1,), world=2, keeper=1, boundary=9)
    with pytest.raises(SupersededError, match="different snapshots"):
        commit(store, 100, attempt, world=2)
    assert read_manifest(store, 100, attempt) is None
    rows = [
        PartRecord(file=each.file, num_bytes=len(data), checksum=checksum_in(data, what="part"))
        for each in (first, other)
        for data in [each.to_bytes()]
    ]
    shards = tuple(
        FileRecord(file=each.ranks[0].shard.file, num_bytes=each.ranks[0].shard.num_bytes)
        for each in (first, other)
    )
    forged = Manifest(step=100, attempt=attempt, world=2, parts=tuple(rows), shards=shards)
    assert store.create(manifest_path(100, attempt), forged.to_bytes())
    with pytest.raises(DamagedError, match="different boundaries"):
        read_step(store, 100, attempt)


def test_a_rank_in_two_parts_is_refused(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt, ranks=(0,), world=2, keeper=0)
    publish(store, 100, attempt, ranks=(0,), world=2, keeper=1, nonce="aaaa0000")
    with pytest.raises(DamagedError, match="same rank"):
        commit(store, 100, attempt, world=2)
    assert not is_committed(store, 100, attempt)


def test_parts_of_another_world_are_refused(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt, world=1)
    with pytest.raises(DamagedError, match="another step, attempt, world"):
        commit(store, 100, attempt, world=2)


def test_a_part_moved_to_another_step_is_refused(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt)
    part_of(store, 200, attempt)
    data = store.read(f"{step_attempt_folder(100, attempt)}/part-00000.json", 1 << 20)
    store.create(f"{step_attempt_folder(200, attempt)}/part-00000.json", data)
    with pytest.raises(DamagedError, match="another step"):
        commit(store, 200, attempt, world=1)


def test_the_first_part_stands(store: LocalStore, attempt: AttemptName) -> None:
    first = part_of(store, 100, attempt, nonce="11110000")
    second = part_of(store, 100, attempt, nonce="22220000")
    assert publish_part(store, first)
    assert not publish_part(store, second)
    assert commit(store, 100, attempt, world=1)
    assert read_step(store, 100, attempt).rank(0).shard.file == first.ranks[0].shard.file


@pytest.mark.parametrize("damage", ["gone", "shorter", "longer"])
def test_a_shard_that_is_not_there_is_never_named(
    store: LocalStore, attempt: AttemptName, damage: str
) -> None:
    part = part_of(store, 100, attempt)
    path = Path(store.local_path(f"{step_attempt_folder(100, attempt)}/{part.ranks[0].shard.file}"))
    whole = path.read_bytes()

    def harm() -> None:
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(whole[:-1] if damage == "shorter" else whole + b"x")

    harm()
    with pytest.raises(DamagedError, match="missing or has another length"):
        publish_part(store, part)
    path.write_bytes(whole)
    publish_part(store, part)
    harm()
    with pytest.raises(DamagedError, match="missing or has another length"):
        commit(store, 100, attempt, world=1)
    path.write_bytes(whole)
    assert commit(store, 100, attempt, world=1)
    harm()
    assert not is_committed(store, 100, attempt)


def test_a_missing_part_is_no_commit(store: LocalStore, attempt: AttemptName) -> None:
    runs.commit(store, 100, attempt)
    store.remove(f"{step_attempt_folder(100, attempt)}/part-00000.json")
    assert not is_committed(store, 100, attempt)
    with pytest.raises(DamagedError, match="missing"):
        read_step(store, 100, attempt)


def test_two_who_commit_write_the_same_bytes(tmp_path: Path) -> None:
    class Backwards(LocalStore):
        def list(self, *what: Any) -> list[Entry]:
            return super().list(*what)[::-1]

    stores = [new_run(tmp_path / "a"), new_run(tmp_path / "b")]
    name, data = AttemptName(1, "00000001"), []
    for store, kind, keepers in zip(stores, [LocalStore, Backwards], [(0, 1, 2), (2, 0, 1)], strict=True):
        for keeper in keepers:
            publish(store, 100, name, ranks=(2 - keeper,), world=3, keeper=keeper, nonce="0000")
        assert commit(kind(store.url), 100, name, world=3)
        data.append(store.read(manifest_path(100, name), 1 << 20))
    assert data[0] == data[1]
    found = Manifest.from_bytes(data[0], "file")
    assert [each.file for each in found.parts] == [f"part-{keeper:05d}.json" for keeper in range(3)]
    assert [each.file for each in found.shards] == [f"shard-{rank:05d}-0000.safetensors" for rank in range(3)]


@pytest.mark.process
def test_many_commit_at_once(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()

    def race() -> None:
        barrier.wait(240)
        results.put(commit(store, 100, attempt, world=1).value)

    racers = [context.Process(target=race) for _ in range(4)]
    for racer in racers:
        racer.start()
    assert {results.get(timeout=240) for _ in racers} == {Committed.YES.value}
    for racer in racers:
        racer.join()
    assert is_whole(store, 100, attempt)


def test_a_late_committer_finds_the_tombstone(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt)

    class Buried(LocalStore):
        """Another process buries the step when all that is left to do is the manifest."""

        def create(self, path: str, data: bytes) -> bool:
            if path.endswith("manifest.json"):
                assert bury(store, 100, attempt)
            return super().create(path, data)

    assert commit(Buried(store.url), 100, attempt, world=1) is Committed.BURIED
    assert isinstance(read_manifest(store, 100, attempt), Tombstone)
    assert commit(store, 100, attempt, world=1) is Committed.BURIED
    assert not is_committed(store, 100, attempt)
    with pytest.raises(NoSuchStepError):
        read_step(store, 100, attempt)


def test_a_manifest_that_comes_before_the_tombstone_stays(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt)

    class Raced(LocalStore):
        def create(self, path: str, data: bytes) -> bool:
            assert commit(store, 100, attempt, world=1)
            return super().create(path, data)

    assert not bury(Raced(store.url), 100, attempt)
    assert is_whole(store, 100, attempt)


def test_nothing_is_committed_once_a_newer_attempt_started(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt)
    publish(store, 200, attempt)
    newer = claim(store, HOLDER)
    # Between a newer claim and its start, what a dead trainer left may still be saved.
    assert commit(store, 100, attempt, world=1)
    start(store, newer, None, 0, 1)
    with pytest.raises(SupersededError, match=str(newer)):
        commit(store, 200, attempt, world=1)
    assert not is_committed(store, 200, attempt)


def test_the_newer_start_is_looked_for_just_before_the_manifest(
    store: LocalStore, attempt: AttemptName
) -> None:
    publish(store, 100, attempt)

    class Late(LocalStore):
        """The other attempt starts when this one looks at what it commits."""

        is_late = False

        def list(self, *what: Any) -> list[Entry]:
            found = super().list(*what)
            if any(entry.name.startswith("shard-") for entry in found) and not self.is_late:
                self.is_late = bool(attempt_at(store))
            return found

    with pytest.raises(SupersededError):
        commit(Late(store.url), 100, attempt, world=1)
    assert not is_committed(store, 100, attempt)


def test_constants_are_named_by_their_attempt(store: LocalStore, attempt: AttemptName) -> None:
    assert runs.commit(store, 100, attempt, constants=True)
    assert runs.commit(store, 200, attempt, constants=True)
    record = read_step(store, 200, attempt)
    path = record.constants_path(0)
    assert path is not None
    assert path.startswith("attempts/")
    manifest = read_manifest(store, 200, attempt)
    assert isinstance(manifest, Manifest)
    assert [each.file for each in manifest.constants] == ["constants-00000-1.safetensors"]
    Path(store.local_path(path)).unlink()
    assert not is_committed(store, 100, attempt)
    assert not is_committed(store, 200, attempt)


def test_a_damaged_manifest_is_none(store: LocalStore, attempt: AttemptName) -> None:
    runs.commit(store, 100, attempt)
    path = Path(store.local_path(manifest_path(100, attempt)))
    whole = path.read_bytes()
    for data in (
        b"",
        whole[:-1],
        whole.replace(b"shard-", b"shard_"),
        whole.replace(b'"step":100', b'"step":101'),
    ):
        path.write_bytes(data)
        assert not is_committed(store, 100, attempt)
    path.write_bytes(whole)
    assert is_committed(store, 100, attempt)


def test_a_manifest_of_another_step_is_none(store: LocalStore, attempt: AttemptName) -> None:
    runs.commit(store, 100, attempt)
    folder = Path(store.local_path(step_attempt_folder(100, attempt)))
    other = Path(store.local_path(step_attempt_folder(200, attempt)))
    other.parent.mkdir()
    folder.rename(other)
    assert not is_committed(store, 200, attempt)
