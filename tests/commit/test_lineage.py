"""What is visible, above all after branches. A step of a branch that was left must never come back."""

from pathlib import Path

import pytest

from flashckpt.commit.lineage import branch, next_start, resolve, steps
from flashckpt.commit.view import View
from flashckpt.errors import NoSuchStepError, UnusableRunError
from flashckpt.format.names import AttemptName
from flashckpt.store.base import Store
from tests.commit.runs import attempt_at, commit, name_of, publish
from tests.run_view import manifest_of


def shown(store: Store) -> list[tuple[int, int]]:
    return [(each.step, each.attempt.number) for each in View.of(store).visible()]


def train(store: Store, attempt: AttemptName, *at: int) -> None:
    for step in at:
        assert commit(store, step, attempt)


def test_branches_twice_over(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300)
    second = attempt_at(store, name_of(300, first))
    train(store, second, 400, 500)
    # Back to a step of the first: the second is in no lineage any more.
    third = attempt_at(store, name_of(200, first))
    assert shown(store) == [(100, 1), (200, 1)]
    train(store, third, 300)
    fourth = attempt_at(store, name_of(300, third))
    train(store, fourth, 400)
    assert shown(store) == [(100, 1), (200, 1), (300, 3), (400, 4)]
    fifth = attempt_at(store, name_of(300, third))
    train(store, fifth, 350)
    assert shown(store) == [(100, 1), (200, 1), (300, 3), (350, 5)]


def test_a_branch_that_was_left_comes_back_only_by_name(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200, 300)
    branch(store, 100)
    assert steps(store) == [100]
    with pytest.raises(NoSuchStepError, match=f"300@{first}"):
        branch(store, 300)
    branch(store, 300, first)
    assert steps(store) == [100, 200, 300]
    with pytest.raises(NoSuchStepError):
        branch(store, 301, first)


def test_a_step_number_of_two_attempts_is_the_newer_ones(store: Store) -> None:
    first = attempt_at(store)
    train(store, first, 100, 200)
    second = attempt_at(store, name_of(200, first))
    train(store, second, 200)
    assert shown(store) == [(100, 1), (200, 1), (200, 2)]
    assert resolve(store, 200).attempt == second
    assert [each.id.attempt for each in next_start(View.of(store)).candidates] == [second, first, first]
    Path(store.url, resolve(store, 200).shard_path(0)).unlink()
    assert resolve(store, 200).attempt == first, "the other of that number is whole"


def test_a_run_of_which_nothing_can_be_used_is_an_error(store: Store) -> None:
    first = attempt_at(store)
    assert next_start(View.of(store)).refusal is None
    publish(store, 100, first)
    assert next_start(View.of(store)).refusal is None
    train(store, first, 200)
    assert next_start(View.of(store)).refusal is None
    Path(store.url, resolve(store, 200).shard_path(0)).unlink()
    with pytest.raises(UnusableRunError, match="not taken for a fresh run"):
        resolve(store)
    Path(store.url, manifest_of(store, name_of(200, first).id)).write_bytes(b"{}")
    with pytest.raises(UnusableRunError):
        resolve(store)


def test_attempts_are_bound_by_boundary_and_not_by_step(store: Store) -> None:
    """An epoch's last batch and the epoch's end have one step number."""
    first = attempt_at(store)
    for boundary in (1, 2):
        assert commit(store, 100, first, boundary=boundary)
    assert [each.boundary for each in View.of(store).newest_first()] == [2, 1]
    assert resolve(store, 100).boundary == 2
    assert resolve(store, 100, name_of(100, first, 1).id).boundary == 1
    attempt_at(store, name_of(100, first, 1))
    assert [each.boundary for each in View.of(store).visible()] == [1]
    assert steps(store) == [100]
