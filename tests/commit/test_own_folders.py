"""A folder that has some ranks of a job alone: what is committed there, what it is taken for, what may go."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashckpt.checkpointer.folders import _one_run, _shared, file_system_of, unlike_kinds
from flashckpt.cli.history import step_rows
from flashckpt.commit.attempts import bounds, claim, open_run, read_start, start
from flashckpt.commit.lineage import VisibleStep, branch, visible
from flashckpt.commit.retention import doomed, prune
from flashckpt.commit.steps import Committed, check_has_all, commit, read_manifest, read_step
from flashckpt.errors import NoSuchStepError, OptionError, SupersededError, UnusableRunError
from flashckpt.format.names import AttemptName, manifest_path, start_path
from flashckpt.format.records import Manifest
from flashckpt.options import Keep
from flashckpt.persist.stored_steps import Completeness, refusal, stored_step
from flashckpt.persist.writer import looks_before
from flashckpt.restore.step_choice import StepChoice
from flashckpt.store.local import LocalStore
from tests.commit.runs import HOLDER, new_run, publish

WORLD, HERE = 4, (range(1, 4, 2),)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


@pytest.fixture
def attempt(store: LocalStore) -> AttemptName:
    name = claim(store, HOLDER)
    start(store, name, None, 0, WORLD, ranks=HERE)
    return name


def commit_here(store: LocalStore, attempt: AttemptName, *at: int) -> None:
    """Steps of ranks 1 and 3, of two nodes; their boundaries are a tenth of them."""
    for step in at:
        for rank in (1, 3):
            publish(store, step, attempt, ranks=(rank,), world=WORLD, keeper=rank, boundary=step // 10)
        assert commit(store, step, attempt, WORLD, HERE)


def test_what_is_committed_is_no_step_of_all_ranks(store: LocalStore, attempt: AttemptName) -> None:
    publish(store, 10, attempt, ranks=(1,), world=WORLD, keeper=1)
    assert commit(store, 10, attempt, WORLD, HERE) is Committed.WAITING
    assert stored_step(store, 10, attempt).completeness is Completeness.PARTIAL
    # That of a rank that commits elsewhere, copied here.
    publish(store, 10, attempt, ranks=(0,), world=WORLD, keeper=0)
    assert commit(store, 10, attempt, WORLD, HERE) is Committed.WAITING
    publish(store, 10, attempt, ranks=(3,), world=WORLD, keeper=3)
    assert commit(store, 10, attempt, WORLD) is Committed.WAITING, "of all ranks it is not"
    assert commit(store, 10, attempt, WORLD, HERE)
    record = read_step(store, 10, attempt)
    assert [rank.rank for part in record.parts for rank in part.ranks] == [1, 3]
    assert record.manifest.absent == (range(0, 3, 2),)
    assert read_step(store, 10, attempt, {3}).rank(3).rank == 3
    for rank in (0, 2):
        with pytest.raises(NoSuchStepError, match=f"ranks 1, 3 and not rank {rank} of 4"):
            read_step(store, 10, attempt, {rank})
    with pytest.raises(NoSuchStepError, match="it has ranks 1, 3; on the disks of other nodes: ranks 0, 2"):
        check_has_all(record)


def test_a_reader_of_the_version_before_refuses_it(store: LocalStore, attempt: AttemptName) -> None:
    commit_here(store, attempt, 10)
    for path in (manifest_path(10, attempt), start_path(attempt)):
        assert store.read(path, 1 << 20).startswith(b'{"format":3,')
    found = read_manifest(store, 10, attempt)
    assert isinstance(found, Manifest)
    assert Manifest.from_bytes(found.to_bytes(), "manifest.json") == found


def test_parts_at_rest_are_all_that_the_folder_will_have(store: LocalStore, attempt: AttemptName) -> None:
    for rank in (1, 3):
        publish(store, 10, attempt, ranks=(rank,), world=WORLD, keeper=rank)
    assert stored_step(store, 10, attempt).completeness is Completeness.COMPLETE


def test_nothing_goes_that_may_be_what_all_nodes_have(store: LocalStore, attempt: AttemptName) -> None:
    commit_here(store, attempt, 10, 20, 30, 40, 50, 60)

    def left(*common: int) -> list[int]:
        prune(store, attempt, Keep(last=2), common=common)
        return [each.step for each in visible(store)]

    assert left() == [10, 20, 30, 40, 50, 60]
    assert left(9) == [10, 20, 30, 40, 50, 60], "of a boundary that is not here nothing is known"
    assert left(2) == [20, 30, 40, 50, 60]
    assert left(2, 4) == [20, 30, 40, 50, 60]
    assert left(4, 5) == [40, 50, 60]
    assert left(5, 6) == [50, 60]


def test_what_an_attempt_began_with_stays_while_one_step_is_everywhere(
    store: LocalStore, attempt: AttemptName
) -> None:
    commit_here(store, attempt, 10, 20, 30)
    second = claim(store, HOLDER)
    start(store, second, attempt, 10, WORLD, 1, HERE)
    commit_here(store, second, 20, 30, 40)
    prune(store, second, Keep(last=1), common=[4])
    assert [each.step for each in visible(store)] == [10, 30, 40]
    prune(store, second, Keep(last=1), common=[3, 4])
    assert [each.step for each in visible(store)] == [30, 40]


def test_what_an_attempt_began_with_is_still_committed_as_a_step_of_before(
    store: LocalStore, attempt: AttemptName
) -> None:
    """Another node may have committed it before that attempt began, and no other content."""
    for step in (10, 20, 30):
        for rank in (1, 3):
            publish(store, step, attempt, ranks=(rank,), world=WORLD, keeper=rank, boundary=step // 10)
    second = claim(store, HOLDER)
    start(store, second, attempt, 20, WORLD, 2, HERE)
    for step in (10, 30):
        assert refusal(store, stored_step(store, step, attempt), read=False)[0]
        with pytest.raises(SupersededError):
            commit(store, step, attempt, WORLD, HERE)
    assert refusal(store, stored_step(store, 20, attempt), read=False) == ("", False)
    assert commit(store, 20, attempt, WORLD, HERE)
    assert visible(store) == [VisibleStep(20, attempt)]


def test_once_another_attempt_began_with_something_else_it_is_too_late(
    store: LocalStore, attempt: AttemptName
) -> None:
    commit_here(store, attempt, 10)
    for rank in (1, 3):
        publish(store, 20, attempt, ranks=(rank,), world=WORLD, keeper=rank, boundary=2)
    start(store, claim(store, HOLDER), attempt, 20, WORLD, 2, HERE)
    start(store, claim(store, HOLDER), attempt, 10, WORLD, 1, HERE)
    with pytest.raises(SupersededError):
        commit(store, 20, attempt, WORLD, HERE)


def test_a_branch_has_the_same_ranks(store: LocalStore, attempt: AttemptName) -> None:
    commit_here(store, attempt, 10, 20)
    name = branch(store, 10, watch_s=0.0)
    found = read_start(store, name)
    assert found is not None
    assert (found.ranks, found.world) == (HERE, WORLD)
    assert bounds(store)[1].last_step == 10


def test_a_run_is_made_with_the_id_that_all_nodes_have(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "run"))
    assert open_run(store, create=True, run_id="0123456789abcdef").run_id == "0123456789abcdef"
    assert open_run(store, create=True, run_id="f" * 16).run_id == "0123456789abcdef"


def test_keepers_of_a_folder_take_turns_among_its_ranks() -> None:
    here = (range(0, 2000, 2),)
    first = [rank for rank in here[0] if looks_before(7, [rank], 2000, here) == 0]
    assert len(first) == 1


def test_a_resume_of_another_rank_begins_nothing(store: LocalStore, attempt: AttemptName) -> None:
    commit_here(store, attempt, 10, 20)
    with pytest.raises(UnusableRunError, match="it has ranks 1, 3 and not rank 0"):
        StepChoice(store, [], 0, lambda snapshot: None, 1).choose()
    [newest, *_] = StepChoice(store, [], 3, lambda snapshot: None, 1).candidates()
    assert newest.step == 20


def test_it_is_shown_and_not_pruned_by_hand(store: LocalStore, attempt: AttemptName) -> None:
    commit_here(store, attempt, 10, 20, 30)
    assert [row.here for row in step_rows(store, all_branches=False)] == [HERE] * 3
    assert doomed(store, attempt, Keep(last=2)) == []


def test_nodes_agree_on_one_run_and_on_who_shares_its_folder() -> None:
    seen = [["a" * 16, 7], None, ["", 0], ["a" * 16, 9]]
    assert _one_run(seen) == ["a" * 16, 9]
    with pytest.raises(UnusableRunError, match="run a+ on the node of rank 0; run b+ on the node of rank 2"):
        _one_run([["a" * 16, 7], None, ["b" * 16, 1]])
    assert _shared([[0, "x", "nfs4"], [0, "x", "nfs4"], [2, "x", "nfs4"]]) is None
    rows = [[0, "x", "nfs4"], [0, "x", "nfs4"], [2, "y", "root ext4"], [3, "x", "nfs4"]]
    assert _shared(rows) == [[[[0, 2, 1], [3, 4, 1]], "nfs4"], [[[2, 3, 1]], "root ext4"]]
    with pytest.raises(OptionError, match="Ranks 0 and 1 are on one node"):
        _shared([[0, "x", ""], [0, "y", ""]])


def test_a_file_system_that_is_not_mounted_on_one_node_is_told(tmp_path: Path) -> None:
    here, there = (range(8),), (range(8, 16),)
    said = unlike_kinds({here: "nfs4", there: "root ext4"})
    assert "nfs4 for ranks 0-7; root ext4 for ranks 8-15" in said
    assert unlike_kinds({here: "ext4", there: "ext4"}) == ""
    assert file_system_of("/").startswith("root ")
    assert file_system_of("/dev/shm") == "tmpfs"
    assert file_system_of(str(tmp_path / "none")) == ""
