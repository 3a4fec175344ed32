"""The catalogue of a run, and what the collector decides from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashckpt.commit import attempts, collect, commit_step, starting
from flashckpt.commit.catalogue import Catalogue, snapshots_with_data
from flashckpt.commit.collect import Knowledge, kept_steps
from flashckpt.commit.lineage import next_start
from flashckpt.commit.steps import is_whole
from flashckpt.errors import NoSuchStepError, UnusableRunError
from flashckpt.format.names import (
    AttemptName,
    CommitName,
    SnapshotId,
    frozen_name,
    frozen_path,
    frozen_writer,
    shard_name,
)
from flashckpt.format.records import CommitRecord, Quarantine, Start
from flashckpt.options import Keep
from flashckpt.store.base import Store
from tests.commit.runs import HOLDER, image_of, leaves_of, newest_of, part_of
from tests.protocol.memory_store import FolderStore, LiveServer, Request, object_store
from tests.protocol.roles import (
    FIRST,
    at,
    claim_and_start,
    commit_all,
    frozen_contents,
    image_at,
    run_with,
    write_frozen,
    write_part,
)

pytestmark = pytest.mark.fast


def store_with(last_step: int, *more: object) -> Store:
    return object_store(LiveServer(run_with(object_store, last_step, *more)), "home")  # type: ignore[arg-type]


def test_names_are_read_back_as_they_are_written() -> None:
    name = CommitName(1200, AttemptName(2, "7fa3c1d2"), 1234)
    file = name.path.removeprefix("commits/")
    assert file == "000000001200-000002-7fa3c1d2-0000001234.json"
    assert CommitName.parse(file) == (name, True)
    assert CommitName.parse(name.quarantine_path("1f2e3d4c").removeprefix("commits/")) == (name, False)
    assert SnapshotId.of_tombstone(name.id.tombstone_path.removeprefix("commits/")) == name.id
    assert name.id.data_folder == "data/000002-7fa3c1d2/0000001234"
    assert SnapshotId.of_folders(*name.id.data_folder.split("/")[1:]) == name.id
    assert frozen_writer(frozen_name(name.attempt, 3, "5f2c0a1b0001")) == (name.attempt, "5f2c0a1b")


@pytest.mark.parametrize(
    "file",
    ["1200-000002-7fa3c1d2-0000001234.json", "000000001200-02-7fa3c1d2-0000001234.json", "run.json",
     "000000001200-000002-7fa3c1d2-1234.json", "000000001200-000002-7fa3c1d2-00000001234.json",
     "000000001200-000002-7fa3c1d2-0000001234.tombstone", ".000000001200-000002-7fa3c1d2-0000001234.json"],
)  # fmt: skip
def test_other_spellings_name_no_commit(file: str) -> None:
    assert CommitName.parse(file) is None


def test_records_are_read_back() -> None:
    start = Start(parent=SnapshotId(FIRST, 7), step=5, world=2, before=())
    assert Start.from_bytes(start.to_bytes(), "start") == start
    mark = Quarantine(name=at(3), host="h", reason="a checksum")
    assert Quarantine.from_bytes(mark.to_bytes(), "mark") == mark
    store = store_with(1)
    data = store.read(at(1).path, CommitRecord.MAX_BYTES)
    assert CommitRecord.from_bytes(data, "commit").to_bytes() == data


def test_two_boundaries_of_one_step_number_count_as_one_kept_step() -> None:
    end = at(2, boundary=3)
    store = store_with(2, lambda store: [commit_all(store, each) for each in (end, at(4))])
    catalogue = Catalogue.of(store)
    assert newest_of(store, 2) == end
    assert kept_steps(catalogue, Keep(last=2)) == {at(2), end, at(4)}
    plan, done = collect.prune(store, FIRST, Keep(last=2))
    assert plan.expired == (at(1),)
    assert not done.errors
    assert list(snapshots_with_data(store)) == [at(2).id, end.id, at(4).id]


def test_a_quarantined_step_keeps_two_others() -> None:
    store = store_with(4)
    for step in (3, 4):
        mark = Quarantine(name=at(step), host="h", reason="r")
        store.create(at(step).quarantine_path("1f2e3d4c"), mark.to_bytes())
    catalogue = Catalogue.of(store)
    assert kept_steps(catalogue, Keep(last=2)) == {at(1), at(2), at(3), at(4)}
    assert catalogue.newest_first(catalogue.quarantined) == [at(2), at(1), at(4), at(3)]


def test_every_nth_step_and_a_pinned_one_stay() -> None:
    store = store_with(6)
    catalogue = Catalogue.of(store)
    plan = collect.collect(catalogue, Keep(last=2, every_steps=3), Knowledge(pinned=[at(2).id]))
    assert plan.expired == (at(1), at(4))


def test_a_branch_hides_later_steps_and_its_collector_keeps_them() -> None:
    store = store_with(4)
    name = starting.branch(store, at(2), HOLDER)
    catalogue = Catalogue.of(store)
    assert catalogue.visible() == (at(1), at(2))
    assert catalogue.commits == (at(1), at(2), at(3), at(4))
    for step in (3, 4):
        commit_all(store, at(step, name))
    assert collect.prune(store, name, Keep(last=2))[0].expired == (at(1), at(2))
    assert is_whole(store, at(4))
    with pytest.raises(NoSuchStepError):
        starting.branch(store, at(2), HOLDER)


def test_a_start_clears_what_older_attempts_never_committed() -> None:
    store = store_with(2, lambda store: write_part(store, 0, at(3)))
    for lock in ("one", "two"):
        claim_and_start(store, lock, living="none")
        assert at(3).id in snapshots_with_data(store)  # the parent's: its keeper may still commit
    third = claim_and_start(store, "three", living="none")
    for step in (3, 4):
        commit_all(store, at(step, third))
    assert collect.prune(store, third, Keep(last=2))[1].snapshots == [at(1).id, at(2).id, at(3).id]


def test_a_full_disk_does_not_keep_a_deletion() -> None:
    store = FolderStore(LiveServer(run_with(FolderStore, 3)), "home")
    store.create = lambda path, data: pytest.fail(f"{path} takes room")  # type: ignore[method-assign]
    assert collect.prune(store, FIRST, Keep(last=2))[1].snapshots == [at(1).id]
    assert Catalogue.of(store).tombstones == frozenset()


@pytest.mark.parametrize("frozen", [0, 3], ids=["plain", "frozen"])
def test_a_step_of_one_rank_costs_six_requests_and_ten_with_a_deletion(frozen: int) -> None:
    """Frozen leaves cost three listings: before the part; tombstones, then instances before the record."""
    server = _Counting()
    store = object_store(server, "home")
    attempts.open_run(store, create=True)
    assert attempts.claim_as(store, FIRST, HOLDER)
    starting.start(store, FIRST, None, 0, 1, Catalogue.of(store))
    whole = set[CommitName]()
    scratch = FolderStore(LiveServer({"run": None}), "run")
    for step in (1, 2, 3):
        part = part_of(scratch, step, FIRST, boundary=step)
        if frozen:
            file = frozen_name(FIRST, 0, "5f2c0a1b")
            data, contents = frozen_contents(file)
            if step == 1:
                store.write_parts(frozen_path(file), [data], len(data))
            part = replace(part, ranks=(replace(part.ranks[0], constants=contents),))
        image = image_of(leaves_of(step))[0]
        store.write_parts(f"{at(step).id.data_folder}/{shard_name(0, '5f2c0a1b')}", [image], len(image))
        server.asked.clear()
        row = commit_step.publish_part(store, part, is_written=True)
        assert row is not None
        found = commit_step.commit(store, at(step).id, 1, own=(row, part.head()))
        assert found
        assert len(server.asked) == 6 + frozen, server.asked
        whole.add(at(step))
        collect.prune(
            store, FIRST, Keep(last=2), catalogue=found.catalogue, whole=whole, with_uncommitted=False
        )
        # A batch is one request to a server, and one for each file here.
        batches = [request for request in server.asked if request.kind == "delete"]
        assert len(server.asked) - len(batches) == frozen + (6 if step < 3 else 8), server.asked
    assert Catalogue.of(store).visible() == (at(2), at(3))
    assert [each.path.split("/")[1] for each in batches] == ["data", "data", "commits", "commits"]


def test_a_start_lists_the_files_of_its_step_once_and_of_no_other() -> None:
    server = _Counting()
    server.files.update(run_with(object_store, 4))
    store = object_store(server, "home")
    name, catalogue = starting.claim(store, HOLDER)
    first = next_start(store).candidates[0]
    starting.start(store, name, first.id, first.step, 2, catalogue)
    starting.check_started(store, name, first.name)
    folders = [each.path for each in server.asked if each.kind == "page" and "/data/" in each.path]
    listed = [step for path in folders for step in (1, 2, 3, 4) if at(step).id.data_folder in path]
    assert listed == [4], folders


class _Counting(LiveServer):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Request] = []

    def ask(self, request: Request) -> object:
        if not (request.kind == "page" and request.other):
            self.asked.append(request)
        return super().ask(request)


def test_a_run_whose_commit_records_are_lost_loses_nothing_else() -> None:
    second: list[AttemptName] = []

    def train_on(store: Store) -> None:
        second.append(claim_and_start(store))
        commit_all(store, at(4, second[0]))

    store = store_with(3, train_on)
    claim_and_start(store, "two", living="none")  # the second is the parent of the newest started attempt
    before = list(snapshots_with_data(store))
    records = {
        each.path: store.read(each.path, CommitRecord.MAX_BYTES) for each in Catalogue.of(store).commits
    }
    store.remove_files(records)
    third, _ = starting.claim(store, HOLDER)
    refusal = next_start(store).refusal
    assert isinstance(refusal, UnusableRunError)
    assert "lost its commit records" in str(refusal)
    assert not collect.prune(store, third, Keep(last=2))[0]
    assert list(snapshots_with_data(store)) == before
    for path, data in records.items():
        store.create(path, data)
    assert next_start(store).candidates[0].name == at(4, second[0])
    assert Catalogue.of(store).visible() == (at(1), at(2), at(3), at(4, second[0]))


@pytest.mark.parametrize(
    ("last_step", "lost"),
    [
        (1, ("commits/", "attempts/")),
        (1, ("commits/", "attempts/000001-aaaaaaaa/start.json")),
        (3, ("commits/", "attempts/")),
        (2, ("commits/", "/part-")),
        (1, ("commits/", "/part-", "attempts/")),
    ],
)
def test_no_fresh_run_begins_beside_shards_whose_records_are_lost(
    last_step: int, lost: tuple[str, ...]
) -> None:
    frozen = frozen_name(FIRST, 0, "5f2c0a1b")

    def save(store: Store) -> None:
        write_frozen(store, FIRST)
        for step in range(1, last_step + 1):
            commit_all(store, at(step), frozen=frozen)

    files = run_with(object_store, 0, save)
    shards = {path for path in files if path.endswith(".safetensors")}
    assert len(shards) == 2 * last_step + 1
    kept = {path: data for path, data in files.items() if not any(each in path for each in lost)}
    server = LiveServer(kept)
    store = object_store(server, "home")
    for _ in range(3):
        starting.claim(store, HOLDER)
        refusal = next_start(store).refusal
        assert isinstance(refusal, UnusableRunError)
        assert "flashckpt recover" in str(refusal)
        assert shards <= server.files.keys()


def test_a_crash_before_the_first_record_leaves_a_fresh_run() -> None:
    def crash(store: Store) -> None:
        for rank in (0, 1):
            write_part(store, rank, at(1))
        # Each keeper was killed before its part.
        for step, nonce in ((2, "0000000a"), (3, "0000000b")):
            image = image_at(0, step)
            store.write_parts(f"{at(step).id.data_folder}/{shard_name(0, nonce)}", [image], len(image))

    choice = next_start(store_with(0, crash))
    assert (choice.refusal, choice.candidates) == (None, ())


def test_a_folder_with_snapshots_and_no_run_json_is_no_place_for_a_fresh_run() -> None:
    files = run_with(object_store, 1)
    store = object_store(LiveServer({path: data for path, data in files.items() if "/data/" in path}), "home")
    with pytest.raises(UnusableRunError, match="flashckpt recover"):
        attempts.open_run(store, create=True)
    store = object_store(LiveServer({"home/data/of/another/program": b"x"}), "home")
    assert attempts.open_run(store, create=True)
