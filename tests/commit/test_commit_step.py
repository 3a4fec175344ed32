"""The order of writes: what is named before what, and what commits when."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashckpt import crashpoints
from flashckpt.commit import collect, commit_step, starting
from flashckpt.commit.attempts import claim, open_run
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.commit_step import Committed, Outcome, publish_part
from flashckpt.commit.starting import start
from flashckpt.commit.steps import heads_at_rest, is_whole, missing_ranks, read_record, read_step
from flashckpt.errors import DamagedError, NoSuchStepError, SupersededError
from flashckpt.format.names import AttemptName, CommitName, start_path
from flashckpt.format.records import CommitRecord
from flashckpt.store.base import Entry, Store
from flashckpt.store.local import LocalStore
from tests.commit import runs
from tests.commit.runs import HOLDER, attempt_at, name_of, new_run, part_of, publish
from tests.contracts.flat_store import FlatStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


@pytest.fixture
def attempt(store: LocalStore) -> AttemptName:
    return attempt_at(store)


def commit(store: Store, step: int, attempt: AttemptName, world: int = 1) -> Outcome:
    return commit_step.commit(store, name_of(step, attempt).id, world)


def commits(store: Store) -> list[CommitName]:
    return list(Catalogue.of(store).commits)


def delete(store: Store, name: CommitName) -> None:
    """Delete a snapshot as the collector does."""
    plan = collect.Plan(snapshots=(name.id,))
    assert collect.execute(store, plan, Catalogue.of(store), name.attempt).snapshots == [name.id]


def test_a_step_is_committed_by_its_record_alone(store: LocalStore, attempt: AttemptName) -> None:
    part, name = part_of(store, 100, attempt), name_of(100, attempt)
    assert publish_part(store, part)
    assert commits(store) == []
    done = commit(store, 100, attempt)
    assert (done.state, done.name) == (Committed.YES, name)
    assert commits(store) == [name]
    assert runs.is_whole(store, 100, attempt)
    assert commit(store, 100, attempt).state is Committed.YES


def test_a_commit_of_which_the_shard_is_lost_is_not_reported(store: LocalStore, attempt: AttemptName) -> None:
    """A keeper that is told of a commit frees what may be its only whole copy."""
    publish(store, 100, attempt)
    assert commit(store, 100, attempt)
    store.remove(read_step(store, name_of(100, attempt)).shard_path(0))
    assert commit(store, 100, attempt).state is Committed.DELETED
    assert not is_whole(store, name_of(100, attempt))
    assert commits(store) == [name_of(100, attempt)], "its record and its part stay"


@pytest.mark.parametrize("kind", ["local", "flat"])
def test_a_commit_after_a_whole_deletion_is_none(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late committer has found all files. Then a collector deletes the snapshot, the tombstone last."""
    store: Store = LocalStore(str(tmp_path / "a")) if kind == "local" else FlatStore(f"flat://{tmp_path}/a")
    open_run(store, create=True)
    attempt = attempt_at(store)
    publish(store, 100, attempt)

    def deleted(point: str) -> None:
        if point == "manifest.checked":
            delete(store, name_of(100, attempt))

    monkeypatch.setattr(crashpoints, "point", deleted)
    assert commit(store, 100, attempt).state is Committed.DELETED
    assert commits(store) == [], "it has removed its record"


@pytest.mark.parametrize("point", ["manifest.checked", "manifest.linked"])
def test_a_late_committer_finds_the_tombstone(
    store: LocalStore, attempt: AttemptName, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    publish(store, 100, attempt)

    def tombstone(passed: str) -> None:
        if passed == point:
            collect._put_tombstone(store, name_of(100, attempt).id)

    monkeypatch.setattr(crashpoints, "point", tombstone)
    assert commit(store, 100, attempt).state is Committed.DELETED
    assert commits(store) == [], "a step with a tombstone is not listed"
    assert Catalogue.of(store).dying == (name_of(100, attempt),)


def test_parts_must_cover_every_rank(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt, ranks=(0, 2), world=4, keeper=0)
    assert commit(store, 100, attempt, 4).state is Committed.WAITING
    assert missing_ranks(store, name_of(100, attempt).id, 4) == [1, 3]
    publish(store, 100, attempt, ranks=(1,), world=4, keeper=1)
    assert commit(store, 100, attempt, 4).state is Committed.WAITING
    assert commits(store) == []
    publish(store, 100, attempt, ranks=(3,), world=4, keeper=2)
    assert commit(store, 100, attempt, 4)
    record = read_step(store, name_of(100, attempt))
    assert [record.rank(rank).values["rank"] for rank in range(4)] == [0, 1, 2, 3]
    assert runs.is_whole(store, 100, attempt)


def test_two_boundaries_of_one_step_number_are_two_steps(store: LocalStore, attempt: AttemptName) -> None:
    """Before and after the code of an epoch's end: parts of one never complete the other."""
    for boundary, rank in ((8, 0), (9, 1)):
        publish(store, 100, attempt, ranks=(rank,), world=2, keeper=rank, boundary=boundary)
    for boundary in (8, 9):
        done = commit_step.commit(store, name_of(100, attempt, boundary).id, 2)
        assert done.state is Committed.WAITING
    publish(store, 100, attempt, ranks=(0,), world=2, keeper=0, boundary=9)
    assert commit_step.commit(store, name_of(100, attempt, 9).id, 2)
    assert commits(store) == [name_of(100, attempt, 9)]


def test_ranks_that_count_a_boundary_as_different_steps_are_refused(
    store: LocalStore, attempt: AttemptName
) -> None:
    for rank in (0, 1):
        publish(store, 100 + rank, attempt, ranks=(rank,), world=2, keeper=rank, boundary=9)
    with pytest.raises(DamagedError, match=r"different steps \(100 in part-00000.json, 101 in part-00001"):
        commit_step.commit(store, name_of(100, attempt, 9).id, 2)
    steps = {head.keeper: head.step for head in heads_at_rest(store, name_of(100, attempt, 9).id)}
    assert steps == {0: 100, 1: 101}


def test_a_rank_in_two_parts_is_refused(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt, ranks=(0,), world=2, keeper=0)
    publish(store, 100, attempt, ranks=(0,), world=2, keeper=1, nonce="aaaa0000")
    with pytest.raises(DamagedError, match="same rank"):
        commit(store, 100, attempt, 2)
    assert commits(store) == []


def test_parts_of_another_world_are_refused(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt)
    with pytest.raises(DamagedError, match="another attempt, boundary, world"):
        commit(store, 100, attempt, 2)


def test_a_part_moved_to_another_snapshot_is_refused(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt)
    part_of(store, 200, attempt)
    folders = [name_of(step, attempt).id.data_folder for step in (100, 200)]
    store.create(f"{folders[1]}/part-00000.json", store.read(f"{folders[0]}/part-00000.json", 1 << 20))
    with pytest.raises(DamagedError, match="another attempt, boundary"):
        commit(store, 200, attempt)
    with pytest.raises(DamagedError, match="another attempt or boundary"):
        missing_ranks(store, name_of(200, attempt).id, 1)


def test_the_first_part_stands(store: LocalStore, attempt: AttemptName) -> None:
    first = part_of(store, 100, attempt, nonce="11110000")
    second = part_of(store, 100, attempt, nonce="22220000")
    assert publish_part(store, first)
    assert publish_part(store, second) is None
    assert commit(store, 100, attempt)
    record = read_step(store, name_of(100, attempt))
    assert record.rank(0).shard.file == first.ranks[0].shard.file


@pytest.mark.parametrize("damage", ["gone", "shorter", "longer"])
def test_a_shard_that_is_not_there_is_never_named(
    store: LocalStore, attempt: AttemptName, damage: str
) -> None:
    part = part_of(store, 100, attempt)
    name = name_of(100, attempt)
    path = Path(store.local_path(f"{name.id.data_folder}/{part.ranks[0].shard.file}"))
    whole = path.read_bytes()

    def harm() -> None:
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(whole[:-1] if damage == "shorter" else whole + b"x")

    harm()
    with pytest.raises(DamagedError, match="missing, has another length"):
        publish_part(store, part)
    path.write_bytes(whole)
    publish_part(store, part)
    harm()
    assert commit(store, 100, attempt).state is Committed.DELETED
    assert not is_whole(store, name)
    path.write_bytes(whole)
    assert commit(store, 100, attempt)
    assert is_whole(store, name)


def test_a_missing_part_is_no_whole_step(store: LocalStore, attempt: AttemptName) -> None:
    runs.commit(store, 100, attempt)
    name = name_of(100, attempt)
    store.remove(f"{name.id.data_folder}/part-00000.json")
    assert not is_whole(store, name)
    with pytest.raises(DamagedError, match="missing"):
        read_step(store, name)


def test_two_that_commit_write_the_same_bytes(tmp_path: Path) -> None:
    class Backwards(LocalStore):
        def list(self, *what: Any) -> list[Entry]:
            return super().list(*what)[::-1]

    stores = [new_run(tmp_path / "a"), new_run(tmp_path / "b")]
    attempt, data = AttemptName(1, "00000001"), []
    for store, kind, keepers in zip(stores, [LocalStore, Backwards], [(0, 1, 2), (2, 0, 1)], strict=True):
        for keeper in keepers:
            publish(store, 100, attempt, ranks=(2 - keeper,), world=3, keeper=keeper, nonce="0000")
        assert commit(kind(store.url), 100, attempt, 3)
        data.append(store.read(name_of(100, attempt).path, 1 << 20))
    assert data[0] == data[1]
    found = CommitRecord.from_bytes(data[0], "file")
    assert [each.file for each in found.parts] == [f"part-{keeper:05d}.json" for keeper in range(3)]
    assert [each.file for each in found.shards] == [f"shard-{rank:05d}-0000.safetensors" for rank in range(3)]


@pytest.mark.process
def test_many_commit_at_once(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()

    def race() -> None:
        barrier.wait(240)
        results.put(commit(store, 100, attempt).state.value)

    racers = [context.Process(target=race) for _ in range(4)]
    for racer in racers:
        racer.start()
    assert {results.get(timeout=240) for _ in racers} == {Committed.YES.value}
    for racer in racers:
        racer.join()
    assert runs.is_whole(store, 100, attempt)


def test_nothing_is_committed_once_a_newer_attempt_started(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 100, attempt)
    publish(store, 200, attempt)
    newer = claim(store, HOLDER)
    # Between a newer claim and its start, what a dead trainer left may be saved: its claimant may not see it.
    assert commit(store, 100, attempt).state is Committed.CLAIMED
    start(store, newer, None, 0, 1, Catalogue.of(store))
    with pytest.raises(SupersededError, match=str(newer)):
        commit(store, 200, attempt)
    assert commits(store) == [name_of(100, attempt)]


@pytest.mark.parametrize("point", ["part.linked", "manifest.linked"])
def test_no_commit_is_reported_if_it_cannot_be_known_where_a_newer_attempt_resumed(
    store: LocalStore, attempt: AttemptName, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def started(passed: str) -> None:
        if passed == point:
            newer = attempt_at(store, name_of(100, attempt))
            path = Path(store.local_path(start_path(newer)))
            path.write_bytes(path.read_bytes()[:-1])

    monkeypatch.setattr(crashpoints, "point", started)
    publish(store, 100, attempt)
    with pytest.raises(DamagedError, match="start.json"):
        commit(store, 100, attempt)


def test_a_snapshot_that_a_newer_attempt_resumed_from_is_still_committed(
    store: LocalStore, attempt: AttemptName
) -> None:
    for step in (100, 200, 300):
        publish(store, step, attempt)
    attempt_at(store, name_of(200, attempt))
    assert commit(store, 100, attempt)
    assert commit(store, 200, attempt)
    with pytest.raises(SupersededError):
        commit(store, 300, attempt)


def test_the_newer_start_is_looked_for_just_before_the_record(
    store: LocalStore, attempt: AttemptName
) -> None:
    other, catalogue = starting.claim(store, HOLDER)
    publish(store, 100, attempt)

    class Late(LocalStore):
        """The other attempt starts when this one reads the parts that it commits."""

        is_late = False

        def read(self, path: str, max_bytes: int) -> bytes:
            if "/part-" in path and not self.is_late:
                self.is_late = bool(starting.start(store, other, None, 0, 1, catalogue))
            return super().read(path, max_bytes)

    with pytest.raises((SupersededError, DamagedError, FileNotFoundError)):
        commit(Late(store.url), 100, attempt)
    assert commits(store) == []


def test_frozen_instances_stand_beside_the_steps_that_share_them(
    store: LocalStore, attempt: AttemptName
) -> None:
    assert runs.commit(store, 100, attempt, constants=True)
    assert runs.commit(store, 200, attempt, constants=True)
    record = read_step(store, name_of(200, attempt))
    path = record.constants_path(0)
    assert path is not None
    assert [f"frozen/{each.file}" for each in record.record.frozen] == [path]
    Path(store.local_path(path)).unlink()
    assert not is_whole(store, name_of(100, attempt))
    assert not is_whole(store, name_of(200, attempt))


def test_a_part_names_no_instance_of_a_newer_attempt(store: LocalStore, attempt: AttemptName) -> None:
    newer = AttemptName(attempt.number + 1, "00000001")
    part = part_of(store, 100, attempt)
    forged = replace(part.ranks[0], constants=runs.constants_of(store, newer, 0))
    part = replace(part, ranks=(forged,))
    assert publish_part(store, part)
    with pytest.raises(DamagedError, match="was not written by"):
        commit(store, 100, attempt)


def test_a_damaged_record_is_none(store: LocalStore, attempt: AttemptName) -> None:
    runs.commit(store, 100, attempt)
    name = name_of(100, attempt)
    path = Path(store.local_path(name.path))
    whole = path.read_bytes()
    for data in (
        b"",
        whole[:-1],
        whole.replace(b"shard-", b"shard_"),
        whole.replace(b'"step":100', b'"step":101'),
    ):
        path.write_bytes(data)
        assert not is_whole(store, name)
        with pytest.raises(DamagedError, match="does not list the parts"):
            commit(store, 100, attempt)
    path.write_bytes(whole)
    assert is_whole(store, name)


def test_a_record_with_the_name_of_another_step_is_damaged(store: LocalStore, attempt: AttemptName) -> None:
    runs.commit(store, 100, attempt)
    other = name_of(200, attempt)
    Path(store.local_path(name_of(100, attempt).path)).rename(store.local_path(other.path))
    with pytest.raises(DamagedError, match=f"the record of 100@{attempt}:100"):
        read_record(store, other)
    with pytest.raises(NoSuchStepError, match="boundary 100"):
        read_step(store, name_of(100, attempt))
