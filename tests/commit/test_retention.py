"""What may go and what never does."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from flashckpt import crashpoints
from flashckpt.commit import steps as steps_module
from flashckpt.commit.attempts import attempts, bounds, claim, start
from flashckpt.commit.lineage import branch, check_records, mark, steps, visible
from flashckpt.commit.retention import Survivor, bury, doomed, needed, prune, sweep_dead
from flashckpt.commit.steps import is_committed, read_manifest, read_step
from flashckpt.format.names import (
    AttemptName,
    attempt_folder,
    claim_path,
    constants_name,
    manifest_path,
    start_path,
    step_attempt_folder,
)
from flashckpt.format.records import Tombstone
from flashckpt.options import Keep
from flashckpt.store.local import LocalStore, System
from tests.commit.runs import HOLDER, attempt_at, commit, is_whole, new_run, part_of, publish


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


def train(store: LocalStore, attempt: AttemptName, *at: int, **how: object) -> None:
    for step in at:
        assert commit(store, step, attempt, **how)


def files(store: LocalStore, step: int, attempt: AttemptName) -> list[str]:
    return [entry.name for entry in store.list(step_attempt_folder(step, attempt))]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Keep(last=3), [400, 500, 600]),
        (Keep(last=2), [500, 600]),
        (Keep(last=1), [500, 600]),
        (Keep(last=9), [100, 200, 300, 400, 500, 600]),
        (Keep(last=2, every_steps=200), [200, 400, 500, 600]),
    ],
)
def test_keep(store: LocalStore, keep: Keep, left: list[int]) -> None:
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300, 400, 500, 600)
    expected = [each.step for each in doomed(store, attempt, keep)]
    assert [each.step for each in prune(store, attempt, keep)] == expected
    assert steps(store) == left
    for step in left:
        assert is_whole(store, step, attempt)
    for step in expected:
        assert files(store, step, attempt) == ["manifest.json"]
        assert isinstance(read_manifest(store, step, attempt), Tombstone)
    assert prune(store, attempt, keep) == []


def test_counted_are_committed_steps(store: LocalStore) -> None:
    attempt = attempt_at(store)
    train(store, attempt, 100, 200)
    publish(store, 300, attempt)
    part_of(store, 400, attempt)
    train(store, attempt, 500)
    Path(store.local_path(f"{step_attempt_folder(500, attempt)}/part-00000.json")).unlink()
    assert prune(store, attempt, Keep(last=2)) == []
    assert steps(store) == [100, 200]


def test_tries_that_were_overtaken_go(store: LocalStore) -> None:
    attempt = attempt_at(store)
    publish(store, 50, attempt)
    part_of(store, 60, attempt)
    train(store, attempt, 100, 200)
    publish(store, 250, attempt)
    prune(store, attempt, Keep(last=2))
    assert isinstance(read_manifest(store, 50, attempt), Tombstone)
    assert files(store, 60, attempt) == ["manifest.json"]
    assert len(files(store, 250, attempt)) == 2


def test_only_the_newest_attempt_prunes(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300, 400)
    newer = claim(store, HOLDER)
    assert prune(store, first, Keep(last=2)) == []
    assert prune(store, newer, Keep(last=2)) == []
    assert steps(store) == [100, 200, 300, 400]


def test_only_after_a_commit_of_its_own(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300, 400)
    second = attempt_at(store, first, 400)
    assert prune(store, second, Keep(last=2)) == []
    train(store, second, 500)
    assert [each.step for each in prune(store, second, Keep(last=2))] == [100, 200, 300]
    assert steps(store) == [400, 500]


@pytest.mark.parametrize("claims", ["before", "after"])
def test_a_claim_in_the_middle_stops_it(store: LocalStore, claims: str) -> None:
    """Who has claimed may have read the manifest already: what was about to go comes back."""
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300, 400)
    branches = []

    class Claimed(LocalStore):
        def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
            if claims == "before" and not branches:
                branches.append(branch(store, 100))
            super().replace(path, data, durable=durable)
            if claims == "after" and not branches:
                branches.append(claim(store, HOLDER))

    assert prune(Claimed(store.url), attempt, Keep(last=2)) == []
    assert len(branches) == 1
    assert steps(store) == ([100] if claims == "before" else [100, 200, 300, 400])
    for step in (100, 200, 300, 400):
        assert is_whole(store, step, attempt)


def test_the_step_it_started_from_stays_until_a_newer_one_is_committed(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300)
    # Started at 250, whose snapshot was in memory only; then 250 itself and nothing newer is committed.
    second = attempt_at(store, first, 300)
    train(store, second, 150, 160)
    prune(store, second, Keep(last=1))
    assert 300 in steps(store)
    assert is_whole(store, 300, first)


def test_the_start_step_is_kept_beside_the_newest_two(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100)
    second = attempt_at(store, first, 100)
    train(store, second, 100)
    prune(store, second, Keep(last=1))
    assert is_whole(store, 100, first)
    train(store, second, 200, 300)
    prune(store, second, Keep(last=1))
    assert steps(store) == [200, 300]
    assert not is_committed(store, 100, first)


def test_two_steps_without_a_mark_stay(store: LocalStore) -> None:
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300, 400)
    mark(store, 300, attempt, "host", "why")
    mark(store, 400, attempt, "host", "why")
    assert prune(store, attempt, Keep(last=2)) == []
    train(store, attempt, 500)
    assert [each.step for each in prune(store, attempt, Keep(last=2))] == [100, 300]
    assert steps(store) == [200, 400, 500]


def test_other_branches_stay(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300)
    branch(store, 100, watch_s=0)
    third = attempt_at(store, first, 100)
    train(store, third, 110, 120, 130)
    prune(store, third, Keep(last=2))
    assert steps(store) == [120, 130]
    assert is_whole(store, 300, first)
    branch(store, 300, first, watch_s=0)
    assert steps(store) == [200, 300]


def test_debris_of_attempts_without_a_step_goes(store: LocalStore) -> None:
    lost = attempt_at(store)
    publish(store, 50, lost, constants=True)
    unstarted = claim(store, HOLDER)
    third = attempt_at(store)
    train(store, third, 60)
    prune(store, third, Keep(last=2))
    assert [info.name for info in attempts(store)] == [third]
    for name in (lost, unstarted):
        assert not os.path.exists(store.local_path(attempt_folder(name)))
        assert not store.exists(claim_path(name.number))
    assert [entry.name for entry in store.list("steps")] == [f"{60:012d}"]


def test_an_attempt_with_a_step_left_keeps_all(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, constants=True)
    second = attempt_at(store, first, 200)
    train(store, second, 300)
    prune(store, second, Keep(last=9))
    assert steps(store) == [100, 200, 300]
    assert is_whole(store, 100, first)


def test_constants_stay_as_long_as_a_step_names_them_and_no_longer(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, constants=True)
    file = f"{attempt_folder(first)}/{constants_name(0, 1)}"
    second = attempt_at(store, first, 100)
    train(store, second, 200, 300, constants=True)
    prune(store, second, Keep(last=2))
    assert steps(store) == [200, 300]
    assert [info.name for info in attempts(store)] == [first, second], "none of its steps is left"
    third = attempt_at(store, second, 300)
    sweep_dead(store)
    train(store, third, 400, constants=True)
    prune(store, third, Keep(last=2))
    assert store.exists(file)
    assert all(is_whole(store, each, of) for each, of in ((300, second), (400, third)))
    assert [read_step(store, 400, third).constants_path(0)] == [file]
    train(store, third, 500)
    prune(store, third, Keep(last=2))
    assert store.exists(file), "of 400"
    train(store, third, 600)
    prune(store, third, Keep(last=2))
    assert steps(store) == [500, 600]
    assert [info.name for info in attempts(store)] == [third]
    assert not store.list(attempt_folder(first))


def test_a_lineage_leads_through_an_attempt_without_a_step(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200)
    # It committed nothing and left a snapshot of 250 in memory, from which the third went on.
    second = attempt_at(store, first, 200)
    publish(store, 220, second)
    third = attempt_at(store, second, 250)
    train(store, third, 300)
    prune(store, third, Keep(last=9))
    assert steps(store) == [100, 200, 300]
    assert not os.path.exists(store.local_path(step_attempt_folder(220, second)))
    assert [info.name for info in attempts(store)] == [first, third]
    assert [each.attempt for each in bounds(store)] == [third, second, first]


def num_files(store: LocalStore) -> int:
    return sum(len(names) for _, _, names in os.walk(store.url))


@pytest.mark.parametrize("progress", [0, 1])
def test_a_job_that_dies_before_it_commits_leaves_no_more_and_more_behind(
    store: LocalStore, progress: int
) -> None:
    """Each life goes on from memory: from the first's last snapshot, or from one that the last life made."""
    first = attempt_at(store)
    train(store, first, 100, 200, constants=True)
    parent, step, most = first, 200, 0
    for _ in range(100):
        sweep_dead(store)
        attempt = attempt_at(store, parent, step)
        most = max(most, num_files(store))
        assert steps(store) == [100, 200]
        # Its keeper is killed while it writes.
        step += progress
        part_of(store, step + 1, attempt, nonce=f"{attempt.number:08x}", constants=True)
        if progress:
            parent = attempt
    assert most <= 25, "files of the last two lives, and of the steps"
    # A step that the last life left in memory is still in the lineage of the next.
    assert (parent, step) in [(each.attempt, min(each.last_step, step)) for each in bounds(store)]
    third = attempt_at(store, parent, step)
    train(store, third, step + 1)
    prune(store, third, Keep(last=9))
    assert steps(store) == [100, 200, step + 1]
    assert [info.name for info in attempts(store)] == [first, third]
    assert all(is_whole(store, each.step, each.attempt) for each in visible(store))


def test_a_branch_behind_attempts_that_are_gone_comes_back(store: LocalStore) -> None:
    """A -> B -> C with steps of A and C only: C's own lineage leads to A without B's files."""
    first = attempt_at(store)
    train(store, first, 100, 200)
    second = attempt_at(store, first, 200)
    third = attempt_at(store, second, 250)
    train(store, third, 300)
    branch(store, 100, watch_s=0)
    fifth = attempt_at(store, first, 100)
    sweep_dead(store)
    assert steps(store) == [100]
    assert [info.name for info in attempts(store)] == [first, third, fifth]
    branch(store, 300, third, watch_s=0)
    assert steps(store) == [100, 200, 300]


def test_a_branch_at_an_attempt_whose_start_is_lost_takes_up_no_lineage_of_others(store: LocalStore) -> None:
    """A -> B, then A -> C: a branch at C never leads to steps of B, whatever is left of C's records."""
    first = attempt_at(store)
    train(store, first, 50, 100)
    second = attempt_at(store, first, 50)
    train(store, second, 60, 90)
    third = attempt_at(store, first, 100)
    train(store, third, 110)
    Path(store.local_path(start_path(third))).unlink()
    branch(store, 110, third, watch_s=0)
    assert [(each.step, each.attempt) for each in visible(store)] == [(110, third)]


def test_what_the_newest_attempt_was_loaded_from_stays(store: LocalStore) -> None:
    first = attempt_at(store)
    publish(store, 100, first)
    second = attempt_at(store, first, 100)
    assert sweep_dead(store) == [], "the first's keeper may be at it still"
    assert len(files(store, 100, first)) == 2
    slow = claim(store, HOLDER)
    third = attempt_at(store, first, 100)
    assert sweep_dead(store) == [second, slow]
    attempt_at(store, third, 110)
    assert sweep_dead(store) == [first, third]
    assert store.list("steps") == []


def test_two_boundaries_of_one_step_are_no_whole_step_in_memory(store: LocalStore) -> None:
    """One rank was killed before an epoch's end was captured, the other after it: 100 is what all have."""
    first = attempt_at(store)
    train(store, first, 50)
    contents = {"a": (0, 100, 100), "b": (1, 100, 100), "c": (0, 101, 102), "d": (1, 101, 101)}
    survivors = [
        Survivor(slot=name, rank=rank, attempt=first, step=step, boundary=boundary)
        for name, (rank, step, boundary) in contents.items()
    ]
    assert needed(store, survivors) == {"a", "b"}


def test_what_was_gone_on_from_stays_in_memory_until_all_nodes_have_a_newer_step(store: LocalStore) -> None:
    """Where each node has a folder of its own, what this one has committed alone settles nothing."""
    first = attempt_at(store)
    train(store, first, 50)
    second = claim(store, HOLDER)
    start(store, second, first, 100, world=2, boundary=9, ranks=(range(1),))
    train(store, second, 150)
    survivors = [Survivor(slot="a", rank=0, attempt=first, step=100, boundary=9)]
    assert needed(store, survivors) == needed(store, survivors, {second: (0,)}) == {"a"}
    assert needed(store, survivors, {second: (0, 4)}) == set()


def test_a_claim_goes_with_its_own_attempt_alone(store: LocalStore) -> None:
    """Two copies of a run in one folder: the second attempt of one of them never committed."""
    first = attempt_at(store)
    train(store, first, 100)
    second = attempt_at(store, first, 100)
    train(store, second, 200)
    other = AttemptName(second.number, "0badcafe")
    publish(store, 150, other)
    third = attempt_at(store, second, 200)
    assert sweep_dead(store) == [other]
    assert [info.name for info in attempts(store)] == [first, second, third]


def test_what_a_slow_keeper_makes_anew_of_an_attempt_that_was_swept_goes(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100)
    second = attempt_at(store, first, 100)
    third = attempt_at(store, first, 100)
    assert sweep_dead(store) == [second]
    left = f"{attempt_folder(second)}/constants-00000-00000001.safetensors"
    assert store.create(left, b"a base model")
    attempt_at(store, third, 100)
    sweep_dead(store)
    assert not store.exists(left)
    assert store.list(attempt_folder(second)) == []


def test_a_number_that_was_taken_and_swept_during_the_check_does_not_come_again(store: LocalStore) -> None:
    """Watching another machine's counter takes a while: jobs come and die meanwhile."""
    first = attempt_at(store)
    train(store, first, 100)
    others: list[AttemptName] = []

    def look() -> None:
        if not others:
            others.extend([claim(store, HOLDER), attempt_at(store, first, 100)])
        sweep_dead(store)

    assert claim(store, HOLDER, look).number == others[-1].number + 1


def test_a_job_that_fails_at_each_start_leaves_no_more_and_more_behind(store: LocalStore) -> None:
    first = attempt_at(store)
    train(store, first, 100)
    for number in range(2, 102):
        sweep_dead(store)
        name = claim(store, HOLDER)
        assert name.number == number, "no number comes again"
        assert num_files(store) <= 30
    check_records(store)
    left = [info.name.number for info in attempts(store)]
    assert left == [1, *range(93, 102)], "who is slow, and not dead, is one of the last"
    assert steps(store) == [100]


def test_attempts_do_not_pile_up_where_a_run_is_restarted_for_ever(store: LocalStore) -> None:
    """Nothing of an attempt stays once neither it nor one that it went on from has a step left."""
    attempt = attempt_at(store)
    train(store, attempt, 1)
    for step in range(2, 12):
        attempt = attempt_at(store, attempt, step - 1)
        train(store, attempt, step)
        prune(store, attempt, Keep(last=2))
        assert steps(store) == [step - 1, step]
        assert [info.name.number for info in attempts(store)] == [step - 1, step]
    assert len(list(Path(store.local_path("attempts")).iterdir())) == 4
    assert all(is_whole(store, each.step, each.attempt) for each in visible(store))


def test_what_a_crash_left_of_a_deletion_goes_next_time(store: LocalStore) -> None:
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300)

    class Dying(LocalStore):
        def remove(self, path: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(Dying(store.url), attempt, Keep(last=2))
    assert steps(store) == [200, 300]
    # Manifest, part and shard, and the manifest that had its place.
    assert len(files(store, 100, attempt)) == 4
    prune(store, attempt, Keep(last=2))
    assert files(store, 100, attempt) == ["manifest.json"]


def test_a_step_that_cannot_be_deleted_keeps_no_other(store: LocalStore) -> None:
    """A user protects a step by making it read-only: the storage must not fill up for it."""
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300, 400)
    protected = step_attempt_folder(100, attempt)

    class Stubborn(LocalStore):
        def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
            if path.startswith(protected):
                raise PermissionError(path)
            super().replace(path, data, durable=durable)

    for newest in (400, 500):
        if newest not in steps(store):
            train(store, attempt, newest)
        with pytest.raises(PermissionError):
            prune(Stubborn(store.url), attempt, Keep(last=2), in_hand=())
        assert steps(store) == [100, newest - 100, newest]
    assert is_whole(store, 100, attempt)
    assert not os.path.exists(store.local_path(step_attempt_folder(200, attempt))), (
        "nor does its tombstone stay"
    )


class Immovable(System):
    """Files of one name cannot be removed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def remove(self, name: str, folder: int) -> None:
        if name.startswith(self.name):
            raise PermissionError(errno.EPERM, "Operation not permitted", name)
        super().remove(name, folder)


@pytest.mark.parametrize("name", ["shard", "constants"])
def test_a_file_that_cannot_be_removed_keeps_no_other_of_dead_attempts(
    name: str, store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    first = attempt_at(store)
    train(store, first, 100)
    for step in (110, 120):
        stuck = attempt_at(store, first, 100)
        publish(store, step, stuck, constants=True)
    slow = [claim(store, HOLDER) for _ in range(9)]
    attempt_at(store, first, 100)
    assert sweep_dead(LocalStore(store.url, Immovable(name))) == slow
    left = [path.name for path in Path(store.url).rglob("*.safetensors")]
    assert sum(each.startswith("shard") for each in left) == (3 if name == "shard" else 1)
    said = [record for record in caplog.records if "could not be removed" in record.message]
    assert [record.levelname for record in said] == ["WARNING"], "once, and in sight"
    assert len(sweep_dead(store)) == 2
    assert len(list(Path(store.url).rglob("*.safetensors"))) == 1, "that of the step"


def test_a_file_that_cannot_be_removed_keeps_no_other_of_its_step(store: LocalStore) -> None:
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300, 400)
    with pytest.raises(PermissionError):
        prune(LocalStore(store.url, Immovable("part")), attempt, Keep(last=2), in_hand=())
    assert steps(store) == [300, 400]
    for step in (100, 200):
        assert files(store, step, attempt) == ["manifest.json", "part-00000.json"]


def test_a_manifest_comes_back_on_a_disk_that_fills_up_meanwhile(small_disk: Path) -> None:
    """Somebody claims while a step goes, and has read its manifest, which is longer than the tombstone."""
    store, ranks = new_run(small_disk / "run"), tuple(range(130))
    attempt = attempt_at(store)
    for step in (100, 200, 300):
        publish(store, step, attempt, ranks=ranks, world=130)
        assert steps_module.commit(store, step, attempt, world=130)
    manifest = store.read(manifest_path(100, attempt), 1 << 20)
    assert len(manifest) > 4096

    def claimed_and_full() -> bool:
        with open(small_disk / "filler", "ab", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        return False

    assert not bury(store, 100, attempt, claimed_and_full)
    assert store.read(manifest_path(100, attempt), 1 << 20) == manifest
    assert steps(store) == [100, 200, 300]
    assert is_whole(store, 100, attempt)
    (small_disk / "filler").unlink()
    assert bury(store, 100, attempt)
    assert files(store, 100, attempt) == ["manifest.json"]


class Killed(BaseException):
    pass


def filled(disk: Path) -> None:
    """To its last byte."""
    with open(disk / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))


def on_full_disk(disk: Path) -> tuple[LocalStore, AttemptName, AttemptName]:
    """A run with a dead attempt that committed nothing, constants and all, and a living one with three
    committed steps and one try before them."""
    store = new_run(disk / "run")
    dead = attempt_at(store)
    publish(store, 20, dead, constants=True)
    attempt = attempt_at(store)
    publish(store, 50, attempt)
    for step in (100, 200, 300):
        commit(store, step, attempt)
    filled(disk)
    with pytest.raises(OSError, match="No space"):
        store.create("steps/nothing", b"more")
    return store, dead, attempt


def test_a_disk_that_is_full_to_the_last_byte_is_made_room_on(small_disk: Path) -> None:
    store, dead, attempt = on_full_disk(small_disk)
    # Tries first, before a step that is committed has made any room.
    assert bury(store, 50, attempt)
    assert files(store, 50, attempt) == ["manifest.json"]
    data = Path(store.local_path(manifest_path(50, attempt))).read_bytes()
    assert data == Tombstone(step=50, attempt=attempt).to_bytes(), "there is room now"
    filled(small_disk)
    assert sweep_dead(store) == [dead]
    assert [info.name for info in attempts(store)] == [attempt]
    assert not os.path.exists(store.local_path(attempt_folder(dead)))
    filled(small_disk)
    assert [each.step for each in prune(store, attempt, Keep(last=2))] == [100]
    assert steps(store) == [200, 300]
    assert all(is_whole(store, step, attempt) for step in (200, 300))


def test_on_a_full_disk_no_manifest_is_taken_away_that_somebody_may_have_read(small_disk: Path) -> None:
    """There may be no room for it to come back."""
    store, _, attempt = on_full_disk(small_disk)
    manifest = store.local_path(manifest_path(100, attempt))
    before = os.stat(manifest).st_ino
    assert not bury(store, 100, attempt, may_still=lambda: False)
    assert os.stat(manifest).st_ino == before, "it was never away"
    assert is_whole(store, 100, attempt)
    assert not [name for name in os.listdir(os.path.dirname(manifest)) if name.endswith(".tmp")]


def test_what_stands_for_a_tombstone_is_one(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever removes is killed between it and the first file."""
    store, _, attempt = on_full_disk(small_disk)

    def stop(name: str) -> None:
        raise Killed

    with monkeypatch.context() as armed:
        armed.setattr(crashpoints, "point", stop)
        with pytest.raises(Killed):
            bury(store, 50, attempt)
    assert len(files(store, 50, attempt)) == 3, "nothing has gone yet"
    assert read_manifest(store, 50, attempt) == Tombstone(step=50, attempt=attempt)
    assert steps_module.commit(store, 50, attempt, 1) is steps_module.Committed.BURIED
    os.remove(small_disk / "filler")
    prune(store, attempt, Keep(last=2), in_hand=())
    assert not os.path.exists(store.local_path(step_attempt_folder(50, attempt)))
    assert steps(store) == [200, 300]


def test_without_links_a_full_disk_says_so_and_loses_nothing(small_disk: Path) -> None:
    class Linkless(System):
        def link(self, *args: object) -> None:
            raise OSError(errno.EPERM, "no links")

    store, _, attempt = on_full_disk(small_disk)
    before = files(store, 50, attempt)
    with pytest.raises(OSError, match="No space"):
        bury(LocalStore(store.url, Linkless()), 50, attempt)
    assert files(store, 50, attempt) == before
    os.remove(small_disk / "filler")
    assert steps_module.commit(store, 50, attempt, 1)


def test_a_manifest_that_comes_where_a_damaged_one_was_is_no_tombstone(store: LocalStore) -> None:
    """The disk is full; somebody who has all parts commits the step between the removal and the tombstone."""
    attempt = attempt_at(store)
    train(store, attempt, 100)
    path = manifest_path(100, attempt)
    whole = store.read(path, 1 << 20)
    Path(store.local_path(path)).write_bytes(b"rot")

    class Full(LocalStore):
        def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def remove(self, path: str) -> None:
            super().remove(path)
            assert store.create(path, whole)

    assert not bury(Full(store.url), 100, attempt)
    assert is_whole(store, 100, attempt)


@pytest.mark.parametrize("rot", [b"", b"rot"], ids=["whole", "damaged"])
def test_what_was_committed_stays_where_only_the_unfinished_is_to_go(store: LocalStore, rot: bytes) -> None:
    """It came whole since it was last looked at; a manifest that rotted can be repaired, its files not."""
    attempt = attempt_at(store)
    train(store, attempt, 100)
    path = Path(store.local_path(manifest_path(100, attempt)))
    whole = path.read_bytes()
    path.write_bytes(rot or whole)
    assert not bury(store, 100, attempt, leaves_whole=True)
    assert path.read_bytes() == (rot or whole)
    path.write_bytes(whole)
    assert is_whole(store, 100, attempt)


def test_the_tombstone_comes_before_any_deletion(store: LocalStore) -> None:
    attempt = attempt_at(store)
    train(store, attempt, 100, 200, 300)
    publish(store, 50, attempt)
    removed = []

    class Watched(LocalStore):
        def remove(self, path: str) -> None:
            step = int(path.split("/")[1])
            assert isinstance(read_manifest(store, step, attempt), Tombstone)
            removed.extend([] if path.endswith(".tmp") else [path])
            super().remove(path)

    prune(Watched(store.url), attempt, Keep(last=2))
    assert len(removed) == 4
    assert visible(store)[-1].step == 300
