"""A rank reads the manifest and its own part alone. Damage of that part is an error."""

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from flashckpt.commit import steps
from flashckpt.commit.lineage import resolve
from flashckpt.commit.steps import read_checkpoint, read_step, step_of
from flashckpt.commit.verification import verify
from flashckpt.commit.view import View
from flashckpt.errors import DamagedError, NoSuchStepError
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Part
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, commit_published, folder_of, name_of, new_run, part_of, publish
from tests.folders import flip

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
        if "/node-" in path:
            self.in_memory.append(sum(type(each) is Part for each in gc.get_objects()))
            self.read_parts.append(path.rpartition("/")[2][: len("node-00000")])
        return super().read(path, max_bytes)


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    return Watched(new_run(tmp_path / "run").url)


@pytest.fixture
def attempt(store: Watched) -> AttemptName:
    """With step 100 of eight ranks on four nodes."""
    name = attempt_at(store)
    for ranks in NODES:
        publish(store, 100, name, ranks=ranks, world=WORLD, constants=True)
    assert commit_published(store, name_of(100, name).id)
    store.read_parts.clear()
    return name


def place(store: Watched, attempt: AttemptName, name: str) -> Path:
    """The part whose name begins with this."""
    folder = Path(store.url, folder_of(store, name_of(100, attempt).id).path)
    [found] = folder.glob(f"{name}-*")
    return found


def test_one_part_is_read_for_the_ranks_of_a_node(store: Watched, attempt: AttemptName) -> None:
    whole = read_step(store, name_of(100, attempt))
    for ranks in ((0,), (1,), (0, 1), (2, 3), (3,)):
        store.read_parts.clear()
        record = read_step(store, name_of(100, attempt))
        found = {rank: (record.rank(rank), record.files(rank)) for rank in ranks}
        assert store.read_parts == [f"node-{ranks[0] // 2 * 2:05d}"]
        assert found == {rank: (whole.rank(rank), whole.files(rank)) for rank in ranks}
        assert (record.world, record.boundary, record.manifest) == (WORLD, 100, whole.manifest)
    assert [whole.rank(rank).values["rank"] for rank in range(WORLD)] == [*range(WORLD)]


def test_a_rank_that_the_step_has_not_is_told_without_reading_a_part(
    store: Watched, attempt: AttemptName
) -> None:
    with pytest.raises(NoSuchStepError, match="made by 8 ranks and has no rank 8"):
        read_step(store, name_of(100, attempt)).rank(8)
    assert store.read_parts == []
    with pytest.raises(NoSuchStepError, match="not committed"):
        read_step(store, name_of(200, attempt))


def test_damage_of_ones_own_part_is_told_and_that_of_others_is_theirs(
    store: Watched, attempt: AttemptName
) -> None:
    own = place(store, attempt, "node-00002")
    flip(own, -200)
    record = read_step(store, name_of(100, attempt))
    for read in (partial(record.rank, 2), partial(record.rank, 3), record.check):
        with pytest.raises(DamagedError, match="node-00002"):
            read()
    assert record.rank(0).rank == 0
    # Whole by its own checksum, and not the one that was committed.
    own.write_bytes(part_of(store, 100, attempt, (2, 3), world=WORLD, nonce="aaaa0000").to_bytes())
    with pytest.raises(DamagedError, match="not the part that was written"):
        record.rank(2)
    own.unlink()
    with pytest.raises(DamagedError, match=r"node-00002.*missing"):
        record.rank(2)


def test_a_manifest_that_names_other_files_than_ones_part_is_refused(
    store: Watched, attempt: AttemptName
) -> None:
    checkpoint = View.of(store).checkpoint(name_of(100, attempt).id)
    assert checkpoint is not None
    manifest = read_checkpoint(store, checkpoint)
    other = manifest.shards[2]._replace(name="rank-00002-aaaa0000.safetensors")
    forged = replace(manifest, shards=(*manifest.shards[:2], other, *manifest.shards[3:]))
    for changed in (forged, replace(manifest, frozen=(*manifest.frozen[:2], *manifest.frozen[3:]))):
        with pytest.raises(DamagedError, match="other files than its parts"):
            step_of(store, changed).rank(2)
    Path(store.url, checkpoint.manifest_path).write_bytes(forged.to_bytes())
    with pytest.raises(DamagedError, match="the manifest of another checkpoint"):
        read_step(store, name_of(100, attempt))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of these tests are taken for such as thousands of ranks make."""
    monkeypatch.setattr(steps, "_FEW_BYTES", 0)
    monkeypatch.setattr(steps, "_WHOLE_BYTES", 0)


@pytest.mark.usefixtures("large")
def test_damage_in_the_midst_of_a_large_part_is_found_when_it_is_read(store: Watched) -> None:
    """A committer reads the head alone: the parts of thousands of ranks take gigabytes."""
    attempt = attempt_at(store)
    for ranks in NODES:
        publish(store, 100, attempt, ranks=ranks, world=WORLD)
    flip(place(store, attempt, "node-00002"), -200)
    assert commit_published(store, name_of(100, attempt).id)
    with pytest.raises(DamagedError):
        read_step(store, name_of(100, attempt)).check()
    assert not verify(store, 100).ok


@pytest.mark.usefixtures("large")
def test_a_large_step_is_found_without_taking_its_parts_apart(
    store: Watched, attempt: AttemptName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes minutes for the parts of thousands of ranks, and `branch` needs only to know them whole."""
    path = place(store, attempt, "node-00002")
    other = part_of(store, 200, attempt, (2, 3), world=WORLD, constants=True).to_bytes()
    monkeypatch.setattr(Part, "from_bytes", None)
    store.read_parts.clear()
    assert resolve(store, 100).name == name_of(100, attempt)
    assert len(store.read_parts) == len(NODES)
    assert len(other) == path.stat().st_size
    path.write_bytes(other)
    with pytest.raises(DamagedError, match="a part of another step"):
        resolve(store, 100)


@pytest.mark.usefixtures("large")
def test_of_a_large_step_one_part_is_in_memory_at_a_time(store: Watched, attempt: AttemptName) -> None:
    gc.collect()
    before = sum(type(each) is Part for each in gc.get_objects())
    store.in_memory.clear()  # what the fixture has read stood beside the garbage of other tests
    record = read_step(store, name_of(100, attempt))
    assert [record.rank(rank).rank for rank in range(WORLD)] == list(range(WORLD))
    assert [part.node for part in record.parts] == [ranks[0] for ranks in sorted(NODES)]
    del record
    assert verify(store, 100).ok
    assert max(store.in_memory) - before <= 1


def test_a_verification_has_the_parts_of_one_step_in_memory(
    store: Watched, attempt: AttemptName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_WHOLE_BYTES", 0)
    for step in (200, 300):
        for ranks in NODES:
            publish(store, step, attempt, ranks=ranks, world=WORLD)
        assert commit_published(store, name_of(step, attempt).id)
    gc.collect()
    before = sum(type(each) is Part for each in gc.get_objects())
    store.in_memory.clear()
    assert verify(store).ok
    assert max(store.in_memory) - before <= len(NODES)


@pytest.mark.usefixtures("large")
def test_what_becomes_of_a_large_part_while_its_step_is_read_is_told(
    store: Watched, attempt: AttemptName
) -> None:
    record = read_step(store, name_of(100, attempt))
    flip(place(store, attempt, "node-00004"), -200)
    assert record.rank(2).rank == 2
    with pytest.raises(DamagedError, match="node-00004"):
        record.rank(7)
    with pytest.raises(NoSuchStepError):
        record.rank(WORLD)
