"""What is visible, above all after branches. A step of a branch that was left must never come back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flashckpt.commit.attempts import attempts, bounds, claim, newest_started, start
from flashckpt.commit.lineage import (
    branch,
    candidates,
    check_records,
    check_usable,
    mark,
    marks,
    newest_first,
    resolve,
    steps,
    this_host,
    visible,
)
from flashckpt.errors import DamagedError, NoSuchStepError, RunHeldError, UnusableRunError
from flashckpt.format.names import AttemptName, claim_path, manifest_path, start_path, step_attempt_folder
from flashckpt.store.base import Store
from tests.commit.runs import HOLDER, attempt_at, commit, new_run, publish


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_run(tmp_path / "run")


def shown(store: Store) -> list[tuple[int, int]]:
    return [(each.step, each.attempt.number) for each in visible(store)]


def train(store: Store, attempt: object, *at: int) -> None:
    for step in at:
        assert commit(store, step, attempt)


def test_a_restart_goes_on(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200)
    assert shown(store) == [(100, 1), (200, 1)]
    second = attempt_at(store, first, 200)
    assert shown(store) == [(100, 1), (200, 1)]
    train(store, second, 300)
    assert shown(store) == [(100, 1), (200, 1), (300, 2)]
    assert steps(store) == [100, 200, 300]


def test_an_attempt_that_never_started_is_as_if_it_had_never_been(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100)
    lost = claim(store, HOLDER)
    commit(store, 500, lost)
    assert shown(store) == [(100, 1)]
    third = attempt_at(store, first, 100)
    train(store, third, 200)
    assert shown(store) == [(100, 1), (200, 3)]


def test_going_back_hides_what_came_after(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300)
    second = branch(store, 200, watch_s=0)
    assert shown(store) == [(100, 1), (200, 1)]
    third = attempt_at(store, first, 200)
    train(store, third, 300)
    assert shown(store) == [(100, 1), (200, 1), (300, 3)]
    assert newest_started(store) == third != second


def test_branches_twice_over(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300)
    second = attempt_at(store, first, 300)
    train(store, second, 400, 500)
    # Back to a step of the first, through the second: its own steps are past the bound, and so are the
    # first's from 300 on, though the second started at 300.
    third = attempt_at(store, second, 200)
    assert shown(store) == [(100, 1), (200, 1)]
    train(store, third, 300)
    fourth = attempt_at(store, third, 300)
    train(store, fourth, 400)
    assert shown(store) == [(100, 1), (200, 1), (300, 3), (400, 4)]
    fifth = attempt_at(store, third, 200)
    train(store, fifth, 250)
    assert shown(store) == [(100, 1), (200, 1), (250, 5)]


def test_the_bound_is_the_minimum_along_the_way(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300)
    second = attempt_at(store, first, 300)
    train(store, second, 400)
    # A child that started below its parent's own start: all of the parent is past the bound, and so is
    # what the grandparent did past it.
    attempt_at(store, second, 100)
    assert shown(store) == [(100, 1)]


def test_a_damaged_start_of_an_older_attempt_is_named_and_keeps_nobody(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest start.json holds the whole lineage behind it."""
    first = attempt_at(store)
    train(store, first, 100, 200)
    second = attempt_at(store, first, 200)
    train(store, second, 300)
    third = attempt_at(store, second, 300)
    for each in (first, second):
        damage_start(store, each)
    assert steps(store) == [100, 200, 300]
    assert all(start_path(each) in caplog.text for each in (first, second))
    assert not [info for info in attempts(store) if not info.has_started], "none is swept as never begun"
    check_records(store)
    branch(store, 200, watch_s=0)
    assert steps(store) == [100, 200]
    branch(store, 300, second, watch_s=0)
    assert steps(store) == [300], "what was before the second attempt nobody can tell"
    with pytest.raises(DamagedError, match=start_path(second)):
        bounds(store, second)
    assert third in {info.name for info in attempts(store)}


def test_a_damaged_start_of_a_parent_hides_nothing_that_its_child_knows_of(store: Store) -> None:
    """The second attempt left a snapshot of 250 in memory. The third went on from it and died, and so does
    the fourth. What was before the second stands in the third's start.json."""
    first = attempt_at(store)
    train(store, first, 100, 200)
    second = attempt_at(store, first, 200)
    attempt_at(store, second, 250)
    damage_start(store, second)
    fourth = attempt_at(store, second, 250)
    assert shown(store) == [(100, 1), (200, 1)]
    assert [each.attempt for each in bounds(store)] == [fourth, second, first]


def test_a_damaged_newest_start_is_no_older_branch(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200)
    second = branch(store, 100, watch_s=0)
    damage_start(store, second)
    with pytest.raises(UnusableRunError, match=start_path(second)):
        steps(store)
    third = branch(store, 200, first, watch_s=0)
    assert steps(store) == [100, 200]
    assert newest_started(store) == third


def damage_start(store: Store, attempt: AttemptName) -> None:
    path = Path(store.local_path(start_path(attempt)))
    path.write_bytes(path.read_bytes()[:-1])


def test_a_branch_that_was_left_comes_back_only_by_name(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300)
    branch(store, 100, watch_s=0)
    assert steps(store) == [100]
    with pytest.raises(NoSuchStepError, match=f"300@{first}"):
        branch(store, 300, watch_s=0)
    branch(store, 300, first, watch_s=0)
    assert steps(store) == [100, 200, 300]
    with pytest.raises(NoSuchStepError):
        branch(store, 301, first, watch_s=0)


def test_branch_respects_the_holder(store: Store) -> None:
    from flashckpt.commit.holder import here

    me = here("/", "trainer-1")
    name = claim(store, me)
    start(store, name, None, 0, 1)
    train(store, name, 100)
    with pytest.raises(RunHeldError):
        branch(store, 100, me=here("/"), probe=lambda runtime, lock: True, watch_s=0)
    assert newest_started(store) == name
    assert branch(store, 100, me=here("/"), probe=lambda runtime, lock: False, watch_s=0).number == 2


def test_one_step_of_two_attempts_is_the_newer_ones(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200)
    second = attempt_at(store, first, 200)
    train(store, second, 200)
    assert shown(store) == [(100, 1), (200, 2)]


def test_no_parts_are_opened(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, *range(1, 6))
    for step in range(1, 6):
        path = Path(store.local_path(f"{step_attempt_folder(step, first)}/part-00000.json"))
        path.write_bytes(b"x" * path.stat().st_size)
    assert steps(store) == [1, 2, 3, 4, 5]


def test_the_newest_is_found_without_the_rest(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, *range(1, 6))
    read = []

    class Counting(type(store)):
        def read(self, path: str, max_bytes: int) -> bytes:
            read.append(path)
            return super().read(path, max_bytes)

    assert next(newest_first(Counting(store.url))).step == 5
    assert sum("manifest" in path for path in read) == 1


def test_a_mark_of_this_host_puts_a_step_last_and_hides_nothing(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300)
    mark(store, 300, first, this_host(), "chunk 3")
    assert [each.step for each in candidates(store)] == [200, 100, 300]
    assert steps(store) == [100, 200, 300]
    assert resolve(store).step == 200
    assert resolve(store, 300).step == 300
    assert [(each.host, each.reason) for each in marks(store, 300, first)] == [(this_host(), "chunk 3")]


def test_a_mark_of_another_host_changes_no_order(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200)
    mark(store, 200, first, "node-7", "chunk 3")
    assert [each.step for each in candidates(store)] == [200, 100]
    assert resolve(store).step == 200


@pytest.mark.parametrize("lost", ["claim", "start", "claim of one without steps", "both"])
def test_an_older_lineage_does_not_win_when_records_are_lost(store: Store, lost: str) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200)
    second = attempt_at(store, first, 100)
    if lost != "claim of one without steps":
        train(store, second, 150)
    check_records(store)
    if lost != "start":
        Path(store.local_path(claim_path(2))).unlink()
    if lost in ("start", "both"):
        Path(store.local_path(start_path(second))).unlink()
    assert shown(store) == [(100, 1), (200, 1)]
    with pytest.raises(UnusableRunError, match=str(second)):
        check_records(store)
    with pytest.raises(UnusableRunError):
        resolve(store)
    # To say where to go on is the way out, and it stays said.
    branch(store, 200, first, watch_s=0)
    check_records(store)
    assert shown(store) == [(100, 1), (200, 1)]


def test_what_a_sweep_leaves_of_an_older_attempt_is_no_lost_record(store: Store) -> None:
    first = attempt_at(store)
    second = attempt_at(store)
    train(store, second, 100)
    # A power loss may keep the later of two removals and undo the earlier one.
    Path(store.local_path(claim_path(first.number))).unlink()
    check_records(store)
    assert resolve(store).step == 100


def test_a_claim_comes_after_all_whose_steps_are_there(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100)
    second = attempt_at(store, first, 100)
    train(store, second, 200)
    shutil.rmtree(store.local_path("attempts"))
    assert claim(store, HOLDER).number == 3


def test_steps_that_the_newest_attempt_did_not_go_on_from_are_no_fresh_start(store: Store) -> None:
    train(store, attempt_at(store), 100)
    attempt_at(store)
    with pytest.raises(UnusableRunError, match="100@000001"):
        check_usable(store)


def test_a_run_of_which_nothing_can_be_used_is_an_error(store: Store) -> None:
    first = attempt_at(store)
    check_usable(store)
    publish(store, 100, first)
    check_usable(store)
    train(store, first, 200)
    check_usable(store)
    Path(store.local_path(resolve(store, 200).shard_path(0))).unlink()
    assert steps(store) == []
    with pytest.raises(UnusableRunError, match="not taken for a fresh run"):
        check_usable(store)
    Path(store.local_path(manifest_path(200, first))).write_bytes(b"{}")
    with pytest.raises(UnusableRunError):
        check_usable(store)


def test_what_is_there_is_said(store: Store) -> None:
    with pytest.raises(NoSuchStepError, match="Visible steps: none"):
        resolve(store)
    first = attempt_at(store)
    train(store, first, 100, 200)
    with pytest.raises(NoSuchStepError, match="Visible steps: 200, 100"):
        resolve(store, 150)
    with pytest.raises(NoSuchStepError, match="no rank 1"):
        resolve(store, 100).rank(1)
