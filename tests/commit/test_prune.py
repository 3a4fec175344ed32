"""What is deleted, and what never is, on a real folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from flashckpt import crashpoints
from flashckpt.commit import collect, commit_step, starting
from flashckpt.commit.attempts import attempts, claim, mark_ended
from flashckpt.commit.catalogue import Catalogue, snapshots_with_data
from flashckpt.commit.collect import Knowledge, Survivor, needed_slots
from flashckpt.commit.commit_step import Committed
from flashckpt.commit.lineage import branch, check_records, next_start, quarantine, resolve, steps
from flashckpt.commit.starting import claim as claim_and_sweep
from flashckpt.commit.steps import read_step
from flashckpt.format.names import (
    AttemptName,
    attempt_folder,
    claim_path,
    frozen_name,
    frozen_path,
    start_path,
)
from flashckpt.options import Keep
from flashckpt.recovery.storage import prune as prune_by_hand
from flashckpt.store import local
from flashckpt.store.base import Entry
from flashckpt.store.local import LocalStore, System
from tests.commit.runs import HOLDER, attempt_at, commit, is_whole, name_of, new_run, part_of, publish


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


def train(store: LocalStore, attempt: AttemptName, *at: int, **how: object) -> None:
    for step in at:
        assert commit(store, step, attempt, **how)


def pruned(store: LocalStore, attempt: AttemptName, keep: Keep, **known: Any) -> list[int]:
    """The numbers of the steps that went."""
    plan, done = collect.prune(store, attempt, keep, Knowledge(**known))
    assert not done.errors
    return [each.step for each in plan.expired if each.id in done.snapshots]


def at_rest(store: LocalStore) -> list[int]:
    """The boundaries that have data, which in these runs are the steps."""
    return sorted(each.boundary for each in snapshots_with_data(store))


def all_whole(store: LocalStore) -> bool:
    return all(is_whole(store, each.step, each.attempt) for each in Catalogue.of(store).visible())


def left(store: LocalStore) -> list[AttemptName]:
    return [info.name for info in attempts(store)]


# ---- committed steps


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Keep(last=3), [400, 500, 600]),
        (Keep(last=2), [500, 600]),
        (Keep(last=1), [500, 600]),
        (Keep(last=9), [100, 200, 300, 400, 500, 600]),
        (Keep(last=2, every_steps=200), [200, 400, 500, 600]),
    ],
)
def test_keep(store: LocalStore, keep: Keep, kept: list[int]) -> None:
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300, 400, 500, 600)
    assert sorted([*pruned(store, attempt, keep), *kept]) == [100, 200, 300, 400, 500, 600]
    assert steps(store) == at_rest(store) == kept
    assert all_whole(store)
    assert len(store.list("commits")) == len(kept), "no tombstone stays"
    assert pruned(store, attempt, keep) == []


def test_steps_that_have_lost_files_do_not_count(store: LocalStore) -> None:
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 500)
    Path(store.local_path(f"{name_of(500, attempt).id.data_folder}/part-00000.json")).unlink()
    assert pruned(store, attempt, Keep(last=2)) == []
    assert resolve(store).step == 200
    train(store, attempt, 600, 700)
    assert pruned(store, attempt, Keep(last=2)) == [100, 200, 500]


def test_uncommitted_snapshots_that_newer_steps_have_overtaken_go(store: LocalStore) -> None:
    attempt = attempt_at(store)
    publish(store, 50, attempt)
    part_of(store, 60, attempt)
    train(store, attempt, 100, 200)
    publish(store, 250, attempt)
    assert pruned(store, attempt, Keep(last=2)) == []
    assert at_rest(store) == [100, 200, 250]
    assert commit_step.commit(store, name_of(50, attempt).id, 1).state is Committed.WAITING


def test_only_the_newest_attempt_prunes(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300, 400)
    claim(store, HOLDER)
    assert pruned(store, first, Keep(last=2)) == []
    assert steps(store) == [100, 200, 300, 400]


@pytest.mark.parametrize("claims", ["before", "after"])
def test_a_claim_in_the_middle_stops_it(
    store: LocalStore, claims: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that has claimed may have chosen a step already: nothing of it may go."""
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300, 400)
    if claims == "before":
        branch(store, 100, watch_s=0)
    else:

        def claimed(point: str) -> None:
            if point == "prune.buried":
                claim(store, HOLDER)

        monkeypatch.setattr(crashpoints, "point", claimed)
    plan, done = collect.prune(store, attempt, Keep(last=2))
    assert (bool(plan), done.snapshots) == (claims == "after", [])
    assert all(is_whole(store, step, attempt) for step in (100, 200, 300, 400))
    # The tombstones stay, and the next collector ends the deletion.
    assert steps(store) == ([100] if claims == "before" else [300, 400])


def test_the_step_that_an_attempt_resumed_from_stays_until_two_newer_are_committed(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300)
    second = attempt_at(store, name_of(200, first))
    train(store, second, 210)
    assert pruned(store, second, Keep(last=1)) == [100]
    assert steps(store) == [200, 210]
    train(store, second, 220)
    assert pruned(store, second, Keep(last=1)) == [200]
    assert steps(store) == [210, 220]
    assert is_whole(store, 300, first), "another branch"


def test_two_steps_without_a_quarantine_stay(store: LocalStore) -> None:
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300, 400)
    for step in (300, 400):
        quarantine(store, name_of(step, attempt), "host", "why")
    assert pruned(store, attempt, Keep(last=2)) == []
    train(store, attempt, 500, 600)
    assert pruned(store, attempt, Keep(last=2)) == [100, 200, 300, 400]
    assert len(store.list("commits")) == 2, "quarantines go with their steps"


def test_other_branches_stay(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300)
    branch(store, 100, watch_s=0)
    third = attempt_at(store, name_of(100, first))
    train(store, third, 110, 120, 130)
    assert pruned(store, third, Keep(last=2)) == [100, 110]
    assert steps(store) == [120, 130]
    assert is_whole(store, 300, first)
    branch(store, 300, first, watch_s=0)
    assert steps(store) == [200, 300]


def test_what_a_crash_left_of_a_deletion_goes_next_time(store: LocalStore) -> None:
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300)

    class Dying(LocalStore):
        def remove_files(self, paths: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect.prune(Dying(store.url), attempt, Keep(last=2))
    assert steps(store) == [200, 300]
    assert at_rest(store) == [100, 200, 300]
    assert pruned(store, attempt, Keep(last=2)) == []
    assert at_rest(store) == [200, 300]
    assert len(store.list("commits")) == 2


def test_the_tombstone_comes_before_any_deletion_and_goes_last(store: LocalStore) -> None:
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300)
    publish(store, 50, attempt)
    removed: list[str] = []

    class Watched(LocalStore):
        def remove_files(self, paths: Any) -> None:
            for path in list(paths):
                if path.startswith("data/"):
                    boundary = int(path.split("/")[2])
                    assert name_of(boundary, attempt).id in Catalogue.of(store).tombstones
                removed.append(path)
                super().remove(path)

    collect.prune(Watched(store.url), attempt, Keep(last=2))
    kinds = [path.rpartition("/")[2].partition("-")[0] for path in removed if path.startswith("data/")]
    assert sorted(kinds) == ["part", "part", "shard", "shard"]
    beside = [path.rpartition(".")[2] for path in removed if path.startswith("commits/")]
    assert sorted(beside) == ["json", "tombstone", "tombstone"]
    assert [path.rpartition(".")[2] for path in removed if "0000000100" in path][-1] == "tombstone"
    assert steps(store) == [200, 300]


class Immovable(System):
    """Files of one name cannot be removed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def remove(self, name: str, folder: int) -> None:
        if name.startswith(self.name):
            raise PermissionError(errno.EPERM, "Operation not permitted", name)
        super().remove(name, folder)


def test_a_file_that_cannot_be_removed_keeps_no_other(store: LocalStore) -> None:
    """The storage must not fill up for one file that a user has protected."""
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300, 400)
    _, done = collect.prune(LocalStore(store.url, Immovable("part")), attempt, Keep(last=2))
    assert len(done.errors) == 2
    assert steps(store) == [300, 400]
    for step in (100, 200):
        folder = name_of(step, attempt).id.data_folder
        assert [entry.name for entry in store.list(folder)] == ["part-00000.json"]
    assert pruned(store, attempt, Keep(last=2)) == []
    assert at_rest(store) == [300, 400]


class Counting(LocalStore):
    asked = 0

    def list(self, *what: Any) -> list[Entry]:
        self.asked += 1
        return super().list(*what)

    def read(self, path: str, max_bytes: int) -> bytes:
        self.asked += 1
        return super().read(path, max_bytes)


def test_what_a_prune_costs_does_not_grow_with_the_commits_before_it(store: LocalStore) -> None:
    attempt, costs = attempt_at(store), []
    for step in range(1, 31):
        commit(store, step, attempt)
        counting = Counting(store.url)
        collect.prune(counting, attempt, Keep(last=3))
        costs.append(counting.asked)
    assert max(costs[10:]) == costs[9]
    assert len(store.list("commits")) == 3


def test_nothing_goes_if_the_newest_start_is_damaged(store: LocalStore) -> None:
    """It alone says what its attempt resumed from, and may still need."""
    first = attempt_at(store)
    publish(store, 50, first, constants=True)
    train(store, first, 100, 200, 300, 400)
    second = attempt_at(store, name_of(400, first))
    path = Path(store.local_path(start_path(second)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert collect.prune(store, second, Keep(last=2)) == (collect.Plan(), collect.Done())
    claim_and_sweep(store, HOLDER)
    assert at_rest(store) == [50, 100, 200, 300, 400]
    assert len(frozen(store)) == 1
    path.write_bytes(whole)
    assert pruned(store, left(store)[-1], Keep(last=2)) == [100, 200]
    assert at_rest(store) == [300, 400]


# ---- snapshots that have all their files and no record


def lose(store: LocalStore, *lost: int) -> None:
    """As a restore of commits/ that was cut short."""
    store.remove_files([each.path for each in Catalogue.of(store).commits if each.step in lost])


def test_a_claim_commits_what_lacks_only_its_record(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300, 400, constants=True)
    before = {each.path: store.read(each.path, 1 << 20) for each in Catalogue.of(store).commits}
    lose(store, 300, 400)
    publish(store, 500, first, world=2)  # a write that was cut off
    claim_and_sweep(store, HOLDER)
    assert steps(store) == [100, 200, 300, 400]
    assert {path: store.read(path, 1 << 20) for path in before} == before
    assert at_rest(store) == [100, 200, 300, 400, 500]
    assert all_whole(store)


def test_a_lost_record_costs_no_step_but_as_retention_would(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Some records of older attempts of the lineage, and of another branch, are lost."""
    first = attempt_at(store)
    train(store, first, 100, 200, 300, 350, constants=True)
    branch(store, 300, watch_s=0)
    third = attempt_at(store, name_of(300, first))
    train(store, third, 400, 500, 600)
    lose(store, 100, 200, 350, 400)
    publish(store, 550, third, world=2)
    fourth = attempt_at(store, name_of(600, third))
    assert at_rest(store) == [100, 200, 300, 350, 400, 500, 550, 600]
    assert [each.name.step for each in collect.without_record(store)] == [100, 200, 350, 400]
    train(store, fourth, 700)
    for _ in range(2):
        assert pruned(store, fourth, Keep(last=9)) == []
    assert at_rest(store) == [100, 200, 300, 350, 400, 500, 550, 600, 700]
    train(store, fourth, 800)
    assert pruned(store, fourth, Keep(last=2, every_steps=200)) == [300, 500]
    assert at_rest(store) == [200, 350, 400, 600, 700, 800]
    fifth = attempt_at(store, name_of(800, fourth))
    train(store, fifth, 900)
    assert f"have all their files and stay: steps 200@{first}:200, 350@{first}:350." in caplog.text
    found = collect.prune(store, fifth, Keep(last=2, every_steps=200))[0]
    assert [each.step for each in found.without_record] == [200, 350, 400]
    assert found.later is None, "nothing is looked for again"
    mark_ended(store, fifth, "closed")
    prune_by_hand(store, Keep(last=2, every_steps=200), without_record=True)
    assert at_rest(store) == [600, 800, 900]
    assert all_whole(store)


@pytest.mark.parametrize("harm", ["shard", "part", "frozen", "length"])
def test_what_has_not_all_its_files_is_not_committed(store: LocalStore, harm: str) -> None:
    first = attempt_at(store)
    train(store, first, 100)
    publish(store, 200, first, constants=True)
    shard, part = sorted(Path(store.url).glob("data/*/0000000200/*"), reverse=True)
    path = {"part": part, "frozen": next(Path(store.url).glob("frozen/*"))}.get(harm, shard)
    data = path.read_bytes()
    path.unlink()
    if harm in ("length", "part"):
        path.write_bytes(data[:-1])
    claim_and_sweep(store, HOLDER)
    assert steps(store) == [100]
    assert collect.without_record(store) == []


def test_what_cannot_be_read_stays_and_hinders_nobody(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector in a part of which the record is not there."""
    first = attempt_at(store)
    train(store, first, 100)
    publish(store, 200, first)
    branch(store, 100, watch_s=0)
    third = attempt_at(store, name_of(100, first))
    publish(store, 250, third)
    bad, read = (
        {each.id.data_folder for each in (name_of(200, first), name_of(250, third))},
        LocalStore.read_bytes,
    )

    def failing(store: LocalStore, path: str, *where: int) -> bytes:
        if path.rpartition("/")[0] in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return read(store, path, *where)

    monkeypatch.setattr(LocalStore, "read_bytes", failing)
    name, catalogue = claim_and_sweep(store, HOLDER, keep=Keep(last=2))
    assert steps(store) == [100]
    starting.start(store, name, name_of(100, first).id, 100, 1, catalogue)
    train(store, name, 300, 400, 500)
    assert pruned(store, name, Keep(last=2)) == [100, 300]
    assert at_rest(store) == [200, 250, 400, 500]


@pytest.mark.parametrize("cut_off", [1, 2])
def test_parts_that_cannot_be_read_before_the_first_commit(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, cut_off: int
) -> None:
    """One is what a crash before the first record leaves; several may be steps whose records are lost."""
    first = attempt_at(store)
    for step in range(cut_off):
        publish(store, 100 * (step + 1), first)

    def failing(store: LocalStore, path: str, *where: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(LocalStore, "read_bytes", failing)
    choice = next_start(store)
    assert choice.candidates == ()
    assert (choice.refusal is not None) is (cut_off > 1)
    claim_and_sweep(store, HOLDER)
    assert at_rest(store) == [100 * (step + 1) for step in range(cut_off)]


@pytest.mark.parametrize("keep", [Keep(last=3), Keep(last=3, every_steps=10)], ids=str)
def test_a_job_that_dies_before_each_record_fills_no_storage(store: LocalStore, keep: Keep) -> None:
    """Each life resumes from storage, writes all files of one step, and is killed before the record."""
    train(store, attempt_at(store), 1)
    for step in range(2, 40):
        name, catalogue = claim_and_sweep(store, HOLDER, keep=keep)
        newest = catalogue.newest_first()[0]
        assert newest.step == step - 1, "each life makes progress"
        starting.start(store, name, newest.id, newest.step, 1, catalogue)
        publish(store, step, name)
    kept = [10, 20, 30] if keep.every_steps else []
    assert steps(store) == [*kept, 36, 37, 38]
    assert at_rest(store) == [*kept, 36, 37, 38, 39]
    assert all_whole(store)


def test_a_wrong_keep_costs_one_step_for_each_that_a_claim_commits(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300, 400)
    claim_and_sweep(store, HOLDER, keep=Keep(last=1))
    assert steps(store) == [100, 200, 300, 400]
    publish(store, 500, first)
    claim_and_sweep(store, HOLDER, keep=Keep(last=1))
    assert steps(store) == [200, 300, 400, 500]


# ---- attempts


def test_what_attempts_without_a_step_left_goes(store: LocalStore) -> None:
    lost = attempt_at(store)
    publish(store, 50, lost, constants=True, world=2)
    unstarted = claim(store, HOLDER)
    third = attempt_at(store)
    train(store, third, 60)
    for _ in range(2):  # their files, then their records
        assert pruned(store, third, Keep(last=2)) == []
    assert left(store) == [third]
    for name in (lost, unstarted):
        assert not os.path.exists(store.local_path(attempt_folder(name)))
        assert not store.exists(claim_path(name.number))
    assert at_rest(store) == [60]
    assert store.list("frozen") == []


def num_files(store: LocalStore) -> int:
    return sum(len(names) for _, _, names in os.walk(store.url))


@pytest.mark.long
@pytest.mark.parametrize("progress", [0, 1])
def test_a_job_that_dies_before_it_commits_leaves_no_more_and_more_behind(
    store: LocalStore, progress: int
) -> None:
    """Each life resumes from memory: from the first's last snapshot, or from one that the last life made."""
    first = attempt_at(store)
    train(store, first, 100, 200, constants=True)
    parent, most = name_of(200, first), 0
    for _ in range(100):
        attempt = attempt_at(store, parent)
        most = max(most, num_files(store))
        assert steps(store) == [100, 200]
        # Its keeper is killed while it writes.
        step = parent.step + progress
        part_of(store, step + 1, attempt, nonce=f"{attempt.number:08x}", constants=True)
        parent = name_of(step, attempt) if progress else parent
    assert most <= 25, "files of the last two lives, and of the steps"
    third = attempt_at(store, parent)
    assert Catalogue.of(store).is_in_lineage(parent.id)
    train(store, third, parent.step + 1)
    for _ in range(2):
        collect.prune(store, third, Keep(last=9))
    assert steps(store) == [100, 200, parent.step + 1]
    assert left(store) == [first, *([parent.attempt] if progress else []), third]
    assert all_whole(store)


def test_a_job_that_fails_at_each_start_leaves_no_more_and_more_behind(store: LocalStore) -> None:
    train(store, attempt_at(store), 100)
    for number in range(2, 102):
        name, _ = claim_and_sweep(store, HOLDER)
        assert name.number == number, "no number comes again"
        assert num_files(store) <= 30
    check_records(store)
    numbers = [each.number for each in left(store)]
    assert numbers == [1, *range(94, 102)], "one that is slow, and not dead, is one of the last"
    assert steps(store) == [100]


def test_attempts_do_not_pile_up_where_a_run_is_restarted_for_ever(store: LocalStore) -> None:
    """An attempt goes once neither it nor one that resumed from it has a step left."""
    attempt = attempt_at(store)
    train(store, attempt, 1)
    for step in range(2, 12):
        attempt = attempt_at(store, name_of(step - 1, attempt))
        train(store, attempt, step)
        collect.prune(store, attempt, Keep(last=2))
        assert steps(store) == [step - 1, step]
        assert {step - 1, step} <= {each.number for each in left(store)} <= {step - 2, step - 1, step}
    assert all_whole(store)


def test_a_lineage_leads_through_an_attempt_without_a_step(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200)
    # It committed nothing and left a snapshot of 250 in memory, from which the third resumed.
    second = attempt_at(store, name_of(200, first))
    publish(store, 220, second, world=2)
    third = attempt_at(store, name_of(250, second))
    train(store, third, 300)
    collect.prune(store, third, Keep(last=9))
    assert at_rest(store) == [100, 200, 220, 300], "its keeper may be committing 220"
    fourth = attempt_at(store, name_of(300, third))
    train(store, fourth, 400)
    for _ in range(2):
        collect.prune(store, fourth, Keep(last=9))
    assert steps(store) == at_rest(store) == [100, 200, 300, 400]
    assert left(store) == [first, third, fourth]
    assert [each.attempt for each in Catalogue.of(store).lineage] == [fourth, third, second, first]


def test_a_branch_behind_attempts_that_are_gone_comes_back(store: LocalStore) -> None:
    """A -> B -> C with steps of A and C only: C's own lineage leads to A without B's files."""
    first = attempt_at(store)
    train(store, first, 100, 200)
    second = attempt_at(store, name_of(200, first))
    third = attempt_at(store, name_of(250, second))
    train(store, third, 300)
    branch(store, 100, watch_s=0)
    fifth = attempt_at(store, name_of(100, first))
    train(store, fifth, 110)
    collect.prune(store, fifth, Keep(last=9))
    assert steps(store) == [100, 110]
    assert left(store) == [first, third, fifth]
    branch(store, 300, third, watch_s=0)
    assert steps(store) == [100, 200, 300]


def test_a_claim_goes_with_its_own_attempt_alone(store: LocalStore) -> None:
    """Two copies of a run in one folder: the second attempt of one of them never committed."""
    first = attempt_at(store)
    train(store, first, 100)
    second = attempt_at(store, name_of(100, first))
    train(store, second, 200)
    other = AttemptName(second.number, "0badcafe")
    publish(store, 150, other, world=2)
    third = attempt_at(store, name_of(200, second))
    assert left(store) == [first, second, third]
    fourth = attempt_at(store, name_of(200, second))
    assert at_rest(store) == [100, 200]
    fifth = attempt_at(store, name_of(200, second))
    assert left(store) == [first, second, fourth, fifth]


def test_a_number_that_was_taken_during_the_check_does_not_come_again(store: LocalStore) -> None:
    """Watching another machine's counter takes a while: jobs come and die meanwhile."""
    first = attempt_at(store)
    train(store, first, 100)
    others: list[AttemptName] = []

    def check() -> None:
        if not others:
            others.extend([claim(store, HOLDER), attempt_at(store, name_of(100, first))])

    assert claim(store, HOLDER, check).number == others[-1].number + 1


# ---- frozen instances


def frozen(store: LocalStore) -> list[str]:
    return [entry.name for entry in store.list("frozen")]


def test_an_instance_stays_as_long_as_a_step_names_it_and_no_longer(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, constants=True)
    second = attempt_at(store, name_of(100, first))
    train(store, second, 200, 300, constants=True)
    assert pruned(store, second, Keep(last=2)) == [100]
    third = attempt_at(store, name_of(300, second))
    train(store, third, 400, constants=True)
    assert pruned(store, third, Keep(last=2)) == [200]
    [file] = frozen(store)
    assert read_step(store, name_of(400, third)).constants_path(0) == frozen_path(file)
    assert all_whole(store)
    train(store, third, 500)
    assert pruned(store, third, Keep(last=2)) == [300]
    assert frozen(store) == [file], "of 400"
    train(store, third, 600)
    assert pruned(store, third, Keep(last=2)) == [400]
    # The plan was made while 400 named it.
    train(store, third, 700)
    assert pruned(store, third, Keep(last=2)) == [500]
    assert frozen(store) == []
    assert left(store) == [second, third], "the newest and its parent"


def test_an_instance_that_nothing_names_goes_once_its_writer_can_name_it_no_more(store: LocalStore) -> None:
    attempt = attempt_at(store)
    train(store, attempt, 100, constants=True)
    [named] = frozen(store)
    files = {nonce: frozen_name(attempt, 0, f"{nonce}0001") for nonce in ("aaaaaaaa", "bbbbbbbb", "cccccccc")}
    in_hand = frozen_name(attempt, 1, "aaaaaaaa0002")
    for file in (*files.values(), in_hand):
        store.create(frozen_path(file), b"leaves")
    collect.prune(store, attempt, Keep(last=2))
    assert len(frozen(store)) == 5, "of nothing is it known that its writer is dead"
    collect.prune(
        store,
        attempt,
        Keep(last=2),
        Knowledge(own="aaaaaaaa", in_hand=lambda: [in_hand], dead_writers=["bbbbbbbb"]),
    )
    assert sorted(frozen(store)) == sorted([named, in_hand, files["cccccccc"]])
    attempt_at(store, name_of(100, attempt))
    claim_and_sweep(store, HOLDER)
    assert frozen(store) == [named]
    assert is_whole(store, 100, attempt)


def test_no_instance_goes_if_a_part_or_record_cannot_be_read(store: LocalStore) -> None:
    attempt = attempt_at(store)
    train(store, attempt, 100, 200)
    store.create(frozen_path(frozen_name(attempt, 0, "bbbbbbbb0001")), b"leaves")
    publish(store, 300, attempt)
    for path in (f"{name_of(300, attempt).id.data_folder}/part-00000.json", name_of(100, attempt).path):
        file = Path(store.local_path(path))
        whole = file.read_bytes()
        file.write_bytes(whole[:-9])
        collect.prune(store, attempt, Keep(last=2), Knowledge(dead_writers=["bbbbbbbb"]))
        assert len(frozen(store)) == 1
        file.write_bytes(whole)
    collect.prune(store, attempt, Keep(last=2), Knowledge(dead_writers=["bbbbbbbb"]))
    assert frozen(store) == []


# ---- a full disk


def filled(disk: Path) -> None:
    """To its last byte."""
    with open(disk / "filler", "wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))


def test_a_disk_that_is_full_to_the_last_byte_is_made_room_on(small_disk: Path) -> None:
    store = new_run(small_disk / "run")
    attempt = attempt_at(store)
    publish(store, 50, attempt)
    train(store, attempt, 100, 200, 300)
    filled(small_disk)
    with pytest.raises(OSError, match="No space"):
        store.create("commits/nothing", b"more")
    assert pruned(store, attempt, Keep(last=2)) == [100]
    assert steps(store) == at_rest(store) == [200, 300]
    assert all_whole(store)


def test_without_links_a_full_disk_says_so_and_loses_nothing(small_disk: Path) -> None:
    class Linkless(System):
        def link(self, *args: object) -> None:
            raise OSError(errno.EPERM, "no links")

    store = new_run(small_disk / "run")
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300)
    filled(small_disk)
    _, done = collect.prune(LocalStore(store.url, Linkless()), attempt, Keep(last=2))
    assert [error.errno for error in done.errors] == [errno.ENOSPC]
    assert steps(store) == [100, 200, 300]
    assert all_whole(store)
    (small_disk / "filler").unlink()
    assert pruned(store, attempt, Keep(last=2)) == [100]


# ---- foreign files


class _Counted:
    """An entry of a real listing; what is asked of it beyond its name is noted."""

    def __init__(self, entry: os.DirEntry[str], asked: list[str]) -> None:
        self.name, self._entry, self._asked = entry.name, entry, asked

    def stat(self, **how: Any) -> os.stat_result:
        self._asked.append(self.name)
        return self._entry.stat(**how)


def test_foreign_files_among_the_attempts_and_data_are_listed_and_no_more(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand of them made a start take minutes: each was asked for its length, a dozen times."""
    first = attempt_at(store)
    train(store, first, 100)
    for number in range(50):
        for folder in ("attempts", "data"):
            Path(store.url, folder, f"foreign-{number}").touch()
            Path(store.url, folder, f"foreign-folder-{number}").mkdir()
    asked: list[str] = []
    scandir = os.scandir

    @contextmanager
    def counting(folder: int) -> Iterator[Iterator[_Counted]]:
        with scandir(folder) as found:
            yield (_Counted(each, asked) for each in found)

    monkeypatch.setattr(local.os, "scandir", counting)
    name, catalogue = claim_and_sweep(store, HOLDER)
    collect.tidy(store, name, catalogue)
    newest = attempt_at(store, name_of(100, first))
    train(store, newest, 200)
    collect.prune(store, newest, Keep(last=2))
    assert str(first) in asked
    assert not [each for each in asked if each.startswith("foreign")]


# ---- snapshots in memory


def survivors(attempt: AttemptName, contents: dict[str, tuple[int, int, int]]) -> list[Survivor]:
    return [
        Survivor(slot=slot, rank=rank, attempt=attempt, step=step, boundary=boundary)
        for slot, (rank, step, boundary) in contents.items()
    ]


def test_two_boundaries_of_one_step_are_no_whole_step_in_memory(store: LocalStore) -> None:
    """One rank was killed before an epoch's end was captured, the other after it: 100 is what all have."""
    first = attempt_at(store)
    train(store, first, 50)
    contents = {"a": (0, 100, 100), "b": (1, 100, 100), "c": (0, 101, 102), "d": (1, 101, 101)}
    assert needed_slots(store, survivors(first, contents)) == {"a", "b"}


def test_a_snapshot_in_memory_is_needed_until_a_newer_step_is_committed(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 50)
    held = survivors(first, {"a": (0, 100, 100), "b": (0, 90, 90)})
    assert needed_slots(store, held) == {"a"}
    second = attempt_at(store, name_of(90, first))
    assert needed_slots(store, held) == {"a", "b"}, "of a lineage that was left, but no step is newer yet"
    train(store, second, 95)
    assert needed_slots(store, held) == set()
