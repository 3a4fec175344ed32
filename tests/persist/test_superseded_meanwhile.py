"""A newer attempt begins while a keeper commits a step. The keeper reports the step as committed only if the
newer attempt sees it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from flashckpt import crashpoints
from flashckpt.commit import attempts
from flashckpt.commit.view import View
from flashckpt.errors import RunHeldError
from flashckpt.format.names import CommitName
from flashckpt.memory.slot import Slot
from flashckpt.persist.job import JobState
from tests import run_view
from tests.commit.runs import attempt_at
from tests.persist.node import MakeNode, Node, name_of, until_told, visible_steps

At = Callable[[str, Callable[[], object]], None]
POINTS = ["manifest.checked", "manifest.written", "version.created"]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    """Something is done when a keeper passes this point for the first time."""

    def arm(point: str, operation: Callable[[], object]) -> None:
        due = [operation]

        def passed(name: str) -> None:
            if name == point and due:
                due.pop()()

        monkeypatch.setattr(crashpoints, "point", passed)

    return arm


@pytest.fixture
def node(nodes: MakeNode) -> Node:
    """With step 4 committed."""
    found = nodes((0,), 1)
    found.seal(4)
    found.run()
    return found


def newest(view: View) -> CommitName:
    return view.newest_first()[0]


def resumes(node: Node) -> CommitName:
    """A whole start: it settles, chooses and begins. Returns what it has resumed."""
    parent = newest(attempts.settle(View.of(node.store))[0])
    attempt_at(node.store, parent)
    return parent


def is_said(slot: Slot) -> bool:
    sealed = slot.sealed()
    return sealed.is_persisted


@pytest.mark.parametrize("point", POINTS)
def test_a_start_that_has_chosen_an_older_step_does_not_begin(node: Node, at: At, point: str) -> None:
    """It has loaded step 4 when step 6 is committed, or whole."""
    chosen = View.of(node.store)
    name, parent = run_view.next_name(node.store), newest(chosen)
    refused: list[RunHeldError] = []

    def begins() -> None:
        with pytest.raises(RunHeldError) as error:
            run_view.begin_as(chosen, name, parent.id, parent.step)
        refused.append(error.value)

    at(point, begins)
    [slot] = node.seal(6)
    node.run()
    assert refused
    assert node.told[-1] == (6, JobState.COMMITTED)
    assert is_said(slot)
    assert View.of(node.store).attempt == node.attempt
    assert visible_steps(node.store) == [4, 6]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("knows", ["its attempt", "its slots alone", "that it is dead"])
def test_a_start_adopts_what_is_whole_and_then_all_are_told(
    node: Node, at: At, point: str, knows: str
) -> None:
    """Whatever the keeper `knows` of the trainer."""
    parents: list[CommitName] = []
    at(point, lambda: parents.append(resumes(node)))
    [slot] = node.seal(6)
    if knows != "its attempt":
        known = [replace(each, attempt=None) for each in node.trainers]
        node.queue.set_trainers(known if knows == "its slots alone" else [])
    node.run()
    assert parents == [name_of(6, node.attempt)]
    assert node.told[-1] == (6, JobState.COMMITTED)
    assert is_said(slot)
    assert visible_steps(node.store) == [4, 6]


@pytest.mark.parametrize("point", ["audit.pinned", "write.begun", "part.checked", "part.linked"])
def test_what_a_start_resumes_from_memory_meanwhile_is_written_anew_and_no_failure(
    node: Node, at: At, point: str
) -> None:
    """Its folder is now that of the newer attempt."""
    at(point, lambda: attempt_at(node.store, name_of(6, node.attempt)))
    [slot] = node.seal(6)
    node.run()
    assert node.told[-1] == (6, JobState.COMMITTED)
    assert JobState.FAILED not in [state for _, state in node.told]
    assert is_said(slot)
    assert visible_steps(node.store) == [4, 6]


@pytest.mark.parametrize("point", ["audit.pinned", "write.begun", "part.checked"])
def test_a_step_that_a_newer_attempt_went_on_without_is_not_committed(node: Node, at: At, point: str) -> None:
    """It begins before the step is whole, however fast that is."""
    at(point, lambda: resumes(node))
    [slot] = node.seal(6)
    node.run()
    assert node.told[-1] == (6, JobState.SUPERSEDED)
    assert "taken over" in node.whys[-1]
    assert not is_said(slot)
    assert visible_steps(node.store) == [4]


def test_a_step_whose_last_part_comes_too_late_is_not_committed(nodes: MakeNode) -> None:
    first, second = nodes((0,), 2), nodes((1,), 2)
    for node in (first, second):
        node.seal(4)
        node.run()
    until_told(first, (4, JobState.COMMITTED))
    slots = first.seal(6)
    first.run()
    assert first.told[-1] == (6, JobState.PART_WRITTEN)
    assert resumes(first).step == 4
    slots += second.seal(6)
    second.run()
    until_told(first, (6, JobState.SUPERSEDED))
    assert second.told[-1] == (6, JobState.SUPERSEDED)
    assert not any(map(is_said, slots))
    assert visible_steps(first.store) == [4]
