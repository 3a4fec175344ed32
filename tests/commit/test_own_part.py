"""A rank reads the commit record and its own part, however many others there are. Damage is told as ever."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest

from flashckpt.commit import steps
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.commit_step import commit, publish_part
from flashckpt.commit.steps import read_record, read_step
from flashckpt.commit.verification import verify
from flashckpt.errors import DamagedError, NoSuchStepError
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Part
from flashckpt.persist.job import Completeness, refusal, stored_step
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, name_of, new_run, part_of

# Two nodes in the order of ranks, two that are not; a part is named by the lowest of its ranks.
NODES = ((0, 1), (2, 3), (4, 7), (5, 6))
WORLD = 8


class Watched(LocalStore):
    """Notes which parts are read."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.read_parts: list[str] = []
        self.in_memory: list[int] = []

    def read(self, path: str, max_bytes: int) -> bytes:
        if "/part-" in path:
            self.in_memory.append(sum(type(each) is Part for each in gc.get_objects()))
            self.read_parts.append(path.rpartition("/")[2])
        return super().read(path, max_bytes)


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    return Watched(new_run(tmp_path / "run").url)


@pytest.fixture
def attempt(store: Watched) -> AttemptName:
    """With step 100 of eight ranks on four nodes."""
    name = attempt_at(store)
    for ranks in NODES:
        publish_part(store, part_of(store, 100, name, ranks, world=WORLD, keeper=ranks[0], constants=True))
    assert commit(store, name_of(100, name).id, WORLD)
    store.read_parts.clear()
    return name


def place(store: Watched, attempt: AttemptName, name: str) -> Path:
    return Path(store.local_path(f"{name_of(100, attempt).id.data_folder}/{name}"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_one_part_is_read_for_the_ranks_of_a_node(store: Watched, attempt: AttemptName) -> None:
    whole = read_step(store, name_of(100, attempt))
    for ranks in ((0,), (1,), (0, 1), (2, 3), (3,)):
        store.read_parts.clear()
        record = read_step(store, name_of(100, attempt), ranks)
        assert store.read_parts == [f"part-{ranks[0] // 2 * 2:05d}.json"]
        for rank in ranks:
            assert record.rank(rank) == whole.rank(rank)
            assert record.files(rank) == whole.files(rank)
        assert (record.world, record.boundary, record.record) == (WORLD, 100, whole.record)


def test_a_rank_is_found_in_whatever_part_it_stands(store: Watched, attempt: AttemptName) -> None:
    for rank in range(WORLD):
        assert read_step(store, name_of(100, attempt), {rank}).rank(rank).values == {
            "step": 100,
            "rank": rank,
        }
    assert {len(read_step(store, name_of(100, attempt), {rank}).parts) for rank in range(WORLD)} == {1}
    assert len(read_step(store, name_of(100, attempt), {3, 7}).parts) == 2


def test_a_rank_that_the_step_has_not_is_told_without_reading_a_part(
    store: Watched, attempt: AttemptName
) -> None:
    with pytest.raises(NoSuchStepError, match="made by 8 ranks and has no rank 8"):
        read_step(store, name_of(100, attempt), {8})
    assert store.read_parts == []
    with pytest.raises(NoSuchStepError, match="not committed"):
        read_step(store, name_of(200, attempt), {0})


def test_damage_of_ones_own_part_is_told_and_that_of_others_is_theirs(
    store: Watched, attempt: AttemptName
) -> None:
    flip(place(store, attempt, "part-00002.json"))
    for rank in (2, 3):
        with pytest.raises(DamagedError, match="part-00002"):
            read_step(store, name_of(100, attempt), {rank})
    with pytest.raises(DamagedError, match="part-00002"):
        read_step(store, name_of(100, attempt))
    assert read_step(store, name_of(100, attempt), {0}).rank(0).rank == 0
    place(store, attempt, "part-00000.json").unlink()
    with pytest.raises(DamagedError, match=r"part-00000.*missing"):
        read_step(store, name_of(100, attempt), {1})


def test_a_part_that_came_from_elsewhere_is_refused(store: Watched, attempt: AttemptName) -> None:
    """Whole by its own checksum, and not the one that was committed."""
    other = part_of(store, 100, attempt, (2, 3), world=WORLD, keeper=2, nonce="aaaa0000")
    place(store, attempt, "part-00002.json").write_bytes(other.to_bytes())
    with pytest.raises(DamagedError, match="not the part that was written"):
        read_step(store, name_of(100, attempt), {2})


@pytest.mark.parametrize("forged", ["shard", "length", "order", "frozen"])
def test_a_record_that_names_other_files_than_ones_part_is_refused(
    store: Watched, attempt: AttemptName, forged: str
) -> None:
    name = name_of(100, attempt)
    record = read_record(store, name)
    assert record is not None
    shards, frozen = list(record.shards), record.frozen
    if forged == "shard":
        shards[2] = shards[2]._replace(file="shard-00002-aaaa0000.safetensors")
    elif forged == "length":
        shards[2] = shards[2]._replace(num_bytes=shards[2].num_bytes + 1)
    elif forged == "order":
        shards[2], shards[3] = shards[3], shards[2]
    else:
        frozen = (*frozen[:2], *frozen[3:])
    data = replace(record, shards=tuple(shards), frozen=frozen).to_bytes()
    Path(store.local_path(name.path)).write_bytes(data)
    with pytest.raises(DamagedError, match="other shards than its parts"):
        read_step(store, name, {2})
    # A record of which the shards are not those of all ranks is none.
    Path(store.local_path(name.path)).write_bytes(replace(record, shards=record.shards[1:]).to_bytes())
    with pytest.raises(DamagedError, match="one shard for each rank"):
        read_step(store, name, {2})


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of these tests are taken for such as thousands of ranks make."""
    monkeypatch.setattr(steps, "_FEW_BYTES", 0)


@pytest.mark.usefixtures("large")
def test_damage_in_the_midst_of_a_large_part_is_never_committed(store: Watched) -> None:
    """Whoever commits has its head alone to look at, and would let retention delete older steps."""
    attempt = attempt_at(store)
    for ranks in NODES:
        publish_part(store, part_of(store, 100, attempt, ranks, world=WORLD, keeper=ranks[0]))
    path = place(store, attempt, "part-00002.json")
    whole = path.read_bytes()
    flip(path)
    with pytest.raises(DamagedError, match="checksum does not match"):
        commit(store, name_of(100, attempt).id, WORLD)
    assert Catalogue.of(store).commits == ()
    path.write_bytes(whole)
    assert commit(store, name_of(100, attempt).id, WORLD)


@pytest.mark.usefixtures("large")
def test_of_a_large_step_one_part_is_in_memory_at_a_time(store: Watched, attempt: AttemptName) -> None:
    gc.collect()
    before = sum(type(each) is Part for each in gc.get_objects())
    store.in_memory.clear()  # what the fixture has read stood beside the garbage of other tests
    record = read_step(store, name_of(100, attempt))
    assert [record.rank(rank).rank for rank in range(WORLD)] == list(range(WORLD))
    assert [part.keeper for part in record.parts] == [ranks[0] for ranks in sorted(NODES)]
    del record
    assert verify(store, 100).ok
    store.remove(name_of(100, attempt).path)
    stored = stored_step(store, name_of(100, attempt).id)
    assert stored.completeness is Completeness.COMPLETE
    assert refusal(store, stored, read=True)[0] == ""
    assert max(store.in_memory) - before <= 1


@pytest.mark.usefixtures("large")
def test_what_becomes_of_a_large_part_while_its_step_is_read_is_told(
    store: Watched, attempt: AttemptName
) -> None:
    record = read_step(store, name_of(100, attempt))
    flip(place(store, attempt, "part-00004.json"))
    assert record.rank(2).rank == 2
    with pytest.raises(DamagedError, match="part-00004"):
        record.rank(7)
    with pytest.raises(NoSuchStepError):
        record.rank(WORLD)
