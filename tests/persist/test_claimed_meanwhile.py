"""A newer attempt claims the run, or starts, while a step is committed: nobody is told that it is committed
whom a resume would prove wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from flashckpt import crashpoints
from flashckpt.commit import attempts, starting
from flashckpt.commit.attempts import local_owner
from flashckpt.commit.catalogue import Catalogue
from flashckpt.format.names import AttemptName, SnapshotId, start_path
from flashckpt.memory.slot import Slot
from flashckpt.persist.job import JobState
from flashckpt.store.local import LocalStore
from tests.persist.node import MakeNode, Node, visible_steps

At = Callable[[str, Callable[[], object]], None]


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


def claimed(node: Node) -> AttemptName:
    return attempts.claim(node.store, local_owner())


def starts(node: Node, name: AttemptName, step: int) -> None:
    parent = SnapshotId(node.attempt, step)
    starting.start(node.store, name, parent, step, 1, Catalogue.of(node.store))


def is_said(slot: Slot) -> bool:
    sealed = slot.sealed()
    assert sealed is not None
    return sealed.is_persisted


@pytest.mark.parametrize("point", ["manifest.checked", "manifest.linked"])
def test_a_step_that_a_newer_attempt_went_on_without_is_not_committed(node: Node, at: At, point: str) -> None:
    """It starts between the last look before the manifest and the word to the trainer, however fast that
    is."""
    at(point, lambda: starts(node, claimed(node), 4))
    [slot] = node.seal(6)
    node.run()
    assert node.told[-1] == (6, JobState.INCOMPLETE)
    assert "without it" in node.whys[-1]
    assert not is_said(slot)
    assert visible_steps(node.store) == [4]


@pytest.mark.parametrize("goes_on_from", [4, 6])
def test_a_living_trainer_is_told_once_the_newer_attempt_has_started(
    node: Node, at: At, goes_on_from: int
) -> None:
    """Who has claimed may have looked for steps already, and not have found this one."""
    newer: list[AttemptName] = []
    at("manifest.checked", lambda: newer.append(claimed(node)))
    [slot] = node.seal(6)
    node.run()
    assert node.told[-1] == (6, JobState.PART_WRITTEN)
    assert str(newer[0]) in node.whys[-1]
    assert not is_said(slot)
    starts(node, newer[0], goes_on_from)
    is_seen = goes_on_from == 6
    while node.told[-1][1] is JobState.PART_WRITTEN:
        node.run()
    assert node.told[-1] == (6, JobState.COMMITTED if is_seen else JobState.INCOMPLETE)
    assert is_said(slot) is is_seen
    assert (visible_steps(node.store)[-1] == 6) is is_seen


@pytest.mark.parametrize("look", [1, 2])
def test_a_start_between_two_looks_at_the_attempts_is_no_commit(
    node: Node, at: At, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    """Whether the newer attempt has started is looked up twice: it starts before the first look, or between
    them."""
    newer: list[AttemptName] = []
    exists, looks = LocalStore.exists, itertools.count(1)

    def look_up(store: LocalStore, path: str) -> bool:
        if newer and path == start_path(newer[0]) and next(looks) == look:
            starts(node, newer[0], 4)
        return exists(store, path)

    monkeypatch.setattr(LocalStore, "exists", look_up)
    at("manifest.linked", lambda: newer.append(claimed(node)))
    [slot] = node.seal(6)
    node.run()
    while node.told[-1][1] is JobState.PART_WRITTEN:
        node.run()
    assert node.told[-1] == (6, JobState.INCOMPLETE)
    assert not is_said(slot)


def test_a_trainer_that_is_known_by_its_slots_alone_is_told_nothing_either(node: Node, at: At) -> None:
    """The keeper before this one died, and the trainer has not said its attempt to this one."""
    at("manifest.checked", lambda: claimed(node))
    [slot] = node.seal(6)
    node.queue.set_trainers([replace(each, attempt=None) for each in node.trainers])
    node.run()
    assert node.told[-1] == (6, JobState.PART_WRITTEN)
    assert not is_said(slot)


def test_what_a_dead_trainer_left_is_saved_for_who_has_claimed(node: Node, at: At) -> None:
    """Who has claimed waits for this keeper, and looks for steps after that."""
    at("manifest.checked", lambda: claimed(node))
    [slot] = node.seal(6)
    node.queue.set_trainers([])
    node.run()
    assert node.told[-1] == (6, JobState.COMMITTED)
    assert is_said(slot)
