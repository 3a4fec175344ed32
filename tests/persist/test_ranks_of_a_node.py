"""Which ranks of a node a step waits for, and what becomes of it where one of them never comes."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashckpt.commit import attempts
from flashckpt.commit.steps import read_step
from flashckpt.format.names import AttemptName, SnapshotId, alive_path
from flashckpt.keeper import liveness
from flashckpt.keeper.liveness import ExitRule, RunFolder, TrainerRegistry
from flashckpt.memory.runtime import LifeLock, TrainerLocks, trainer_lock_name
from flashckpt.memory.slot import Sealed, Slot, SlotState
from flashckpt.persist import queue
from flashckpt.persist.job import JobState, Trainer
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.persist.node import (
    MakeNode,
    Node,
    begun,
    files,
    is_committed,
    is_whole,
    name_of,
    until_told,
)


@pytest.fixture
def alive(nodes: MakeNode) -> Iterator[Node]:
    """A node whose keeper has just come: nobody has spoken to it, and rank 1 lives."""
    node = nodes((0, 1), 2, known=False)
    lock = LifeLock.acquire(node.folder, trainer_lock_name(1))
    assert lock is not None
    yield node
    lock.release(node.folder)


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_rank_that_lives_and_has_not_spoken_is_waited_for(alive: Node, is_connected: bool) -> None:
    if is_connected:
        alive.queue.set_trainers([Trainer(lock=str(rank), rank=rank) for rank in (0, 1)])
    alive.seal(5, 0)
    alive.run()
    assert files(alive.store, 5, alive.attempt) == [], "a part of rank 0 alone would stand for the node's"
    alive.queue.set_trainers(alive.trainers)
    alive.seal(5, 1)
    alive.run()
    assert is_whole(alive.store, 5, alive.attempt, 2)


def test_a_rank_that_lives_in_another_attempt_is_not_waited_for(alive: Node) -> None:
    alive.seal(5, 0)
    alive.queue.next()
    later = run_view.next_name(alive.store)
    alive.queue.set_trainers([Trainer(lock="later", rank=1, world=1, attempt=later)])
    alive.run()
    assert files(alive.store, 5, alive.attempt) == ["node-00000", "rank-00000"]


@pytest.mark.parametrize("later", [None, (), (6, 7)])
def test_a_rank_that_seals_while_it_is_looked_for_has_sealed_it(
    nodes: MakeNode, monkeypatch: pytest.MonkeyPatch, later: tuple[int, ...] | None
) -> None:
    """It has sealed `later` boundaries, too, and has not passed this one by. None: it ends at once, and a
    keeper that has just come knows of it by its lock alone."""
    node = nodes((0, 1), 2, known=later is not None)
    lock = LifeLock.acquire(node.folder, trainer_lock_name(1)) if later is None else None
    node.seal(5, 0)
    node.queue.next()
    look, looks = node.regions.sealed, iter(range(100))

    def sealed_between_two_looks(rank: int | None = None) -> list[Sealed]:
        found = look(rank)
        if next(looks) == 0:
            node.seal(5, 1)
            for step in later or ():
                node.seal(step, 1, persist=False)
            if lock is not None:
                lock.release(node.folder)
        return found

    [job] = node.queue._jobs
    monkeypatch.setattr(node.regions, "sealed", sealed_between_two_looks)
    node.queue._refresh()
    monkeypatch.undo()
    assert not job.lacks
    node.run()
    assert is_whole(node.store, 5, node.attempt, 2)


def test_who_waits_is_told_which_rank_has_ended(nodes: MakeNode) -> None:
    node = nodes((0, 1), 2)
    [slot] = node.seal(5, 0)
    node.queue.next()
    node.queue.set_trainers(node.trainers[:1])
    node.run()
    assert node.told == [(5, JobState.SUPERSEDED)]
    assert node.whys == ["rank 1 of this node ended before a snapshot of it was sealed"]
    assert slot.state().state is SlotState.SEALED
    assert slot.failed == slot.state().generation, "it may be overwritten"
    assert files(node.store, 5, node.attempt) == []


def test_what_a_dead_rank_had_sealed_and_not_asked_for_is_not_lost(nodes: MakeNode) -> None:
    node = nodes((0, 1), 2)
    node.seal(5, 0)
    node.seal(5, 1, persist=False)
    node.queue.set_trainers(node.trainers[:1])
    node.queue.next()
    node.queue.rescue(1)
    node.run()
    assert is_whole(node.store, 5, node.attempt, 2)


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_a_commit_that_only_one_rank_was_told_of_is_told_to_the_others(
    nodes: MakeNode, is_overwritten: bool
) -> None:
    """The keeper was killed in between, and a rank that was told may write its slot again."""
    node = nodes((0, 1), 2)
    first, second = node.seal(5)
    node.run()
    first.set_persisted(0)
    if is_overwritten:
        assert second.free(second.state())
        node.seal(6, 1, persist=False)
    node.run()
    assert node.told == [(5, JobState.COMMITTED)] * 2
    assert first.persisted == first.state().generation


def incomplete(slots: list[Slot]) -> None:
    """As trainers do that learn of it."""
    for slot in slots:
        slot.request_persist(0)
        if slot.state().state is SlotState.SEALED:
            assert slot.free(slot.state())


def test_a_void_step_ends_whatever_is_at_rest_of_it(nodes: MakeNode, store: LocalStore) -> None:
    first, second = nodes((0, 1), 4), nodes((2, 3), 4)
    slots = first.seal(5)
    first.run()
    assert first.told[-1] == (5, JobState.PART_WRITTEN)
    late = second.seal(5, 2)
    second.queue.next()
    incomplete(slots)
    incomplete(late)
    second.queue.next()
    assert late[0].state().state is SlotState.SEALED, "not pinned any more"
    incomplete(late)
    for node in (first, second):
        node.seal(6)
        node.run()
    until_told(first, (6, JobState.COMMITTED))
    assert is_whole(store, 6, first.attempt, 4)
    assert not is_committed(store, 5, first.attempt)
    for node in (first, second):
        assert node.queue.waiting() == []
        assert not node.queue.is_pending()


def test_a_part_that_waits_for_ever_takes_no_slot_away(
    nodes: MakeNode, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node has lost its snapshot of it (torn, or overwritten after a failure): what is at rest here
    does not need its slot, and where there are two of them, nothing could ever be captured again."""
    first, second = nodes((0,), 2), nodes((1,), 2)
    [slot] = first.seal(5)
    first.run()
    until_told(first, (5, JobState.PART_WRITTEN))
    assert slot.failed != slot.state().generation, "the other nodes may be slower"
    monkeypatch.setattr(queue, "_OTHER_NODES_TIMEOUT_S", 0.0)
    while slot.failed != slot.state().generation:
        first.run()
    for step in (6, 7, 8):
        first.seal(step, persist=False)
    assert first.queue.waiting(for_others=True) == [5]
    second.seal(5)
    second.run()
    until_told(first, (5, JobState.COMMITTED))
    assert is_whole(store, 5, first.attempt, 2)


def test_a_part_of_the_attempt_before_waits_no_longer_than_the_next_commit(
    nodes: MakeNode, store: LocalStore
) -> None:
    """The node that has the other part is lost, and its trainer has resumed from memory elsewhere."""
    node = nodes((0,), 2)
    [slot] = node.seal(5)
    until_told(node, (5, JobState.PART_WRITTEN))
    resumed = begun(store, 1, name_of(5, node.attempt))
    node.ranks[0].attempt = resumed
    node.queue.set_trainers([Trainer(lock="0", rank=0, world=1, ranks=(0,), attempt=resumed)])
    assert slot.free(slot.state())
    assert node.queue.waiting(for_others=True) == [5]
    node.seal(6)
    node.run()
    assert is_committed(store, 6, resumed)
    assert node.queue.waiting() == []


def test_nothing_older_than_what_is_committed_is_saved_of_the_dead(nodes: MakeNode) -> None:
    """Also at the end of a run in order: each node would write what others lack."""
    node = nodes((0,), 2)
    for step in (4, 5):
        node.seal(step, persist=False)
    [slot] = node.seal(6, persist=False)
    slot.set_persisted(slot.state().generation)
    node.ranks[0].ring.set_complete(node.attempt.number, 4)
    node.queue.rescue(0)
    node.run()
    assert node.told == []


@pytest.mark.parametrize("known", [False, True])
def test_of_what_the_dead_left_the_step_that_is_complete_goes_first(nodes: MakeNode, known: bool) -> None:
    """Only the control pages say which step the other nodes have, too. Not `known`: keeper and trainers died
    together."""
    node = nodes((0, 1), 4, known=known)
    node.queue.set_trainers([])
    for step in (4, 5, 6):
        node.seal(step, persist=False)
    for rank in node.ranks.values():
        rank.ring.set_complete(node.attempt.number, 5)
    for each in node.ranks:
        node.queue.rescue(each)
    node.run()
    assert node.told[:2] == [(5, JobState.PART_WRITTEN), (6, JobState.PART_WRITTEN)]
    assert files(node.store, 4, node.attempt) == []


def test_what_fewer_ranks_went_on_from_keeps_the_ranks_that_made_it(
    nodes: MakeNode, store: LocalStore
) -> None:
    node = nodes((0, 1), 2)
    node.seal(5, persist=False, boundary=8)
    begun(store, 1, name_of(5, node.attempt, 8))
    node.queue.resumed(SnapshotId(node.attempt, 8))
    node.run()
    assert is_whole(store, 5, node.attempt, 2, 8)
    assert read_step(store, name_of(5, node.attempt, 8)).world == 2


# The end of an attempt


def exit_rule(node: Node) -> ExitRule:
    return ExitRule(node.store, TrainerRegistry(TrainerLocks(node.folder)), node.queue, node.regions)


@pytest.mark.parametrize("closing", [(False, True), (True, False), (True, True)])
def test_a_rank_that_died_is_waited_for_unless_all_have_closed(
    nodes: MakeNode, closing: tuple[bool, ...]
) -> None:
    node = nodes((0, 1), 2)
    rule = exit_rule(node)
    for trainer, is_closing in zip(node.trainers, closing, strict=True):
        trainer.closing = is_closing
        rule.trainer_ended(trainer)
    has_died = not all(closing)
    assert (rule.lingers_s > 0, rule.has_died(node.attempt)) == (has_died, has_died)


def test_an_attempt_on_several_nodes_has_ended_once_no_keeper_moves_its_counter(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = begun(store, 2)
    here, there = RunFolder(store, ""), RunFolder(store, "")
    monkeypatch.setattr(RunFolder, "_stands", lambda *_: True)
    ended, living = [(attempt, "dead")], [attempt]

    def end() -> str:
        found = attempts.alive(store, attempt)
        return found.ended

    assert here.round([], ended, {attempt}).marked == ()
    there.round(living, [])
    assert here.round([], ended, {attempt}).marked == (attempt,), "it is the other's to say"
    assert end() == ""
    assert there.round([], ended, {attempt}).marked == ()
    assert end() == ""
    monkeypatch.setattr(attempts, "WATCH_S", 0.0)
    assert there.round([], ended, {attempt}).marked == (attempt,)
    assert end() == "dead"
    monkeypatch.undo()
    monkeypatch.setattr(RunFolder, "_stands", lambda *_: True)
    third = RunFolder(store, "")
    assert third.round([], ended, {attempt}).marked == (attempt,), "an end that is recorded needs no watch"


def test_a_keeper_that_saves_moves_the_counter_as_long_as_it_makes_progress(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, folder = begun(store, 2), RunFolder(store, "")
    monkeypatch.setattr(RunFolder, "_stands", lambda *_: True)
    found = []
    for saved_bytes in (0, 100, 100, 200):
        folder.round([], [], {attempt}, [attempt], saved_bytes)
        found.append(attempts.alive(store, attempt))
    assert [each.count for each in found if each is not None] == [1, 2, 2, 3]
    assert {each.phase for each in found if each is not None} == {"saving"}
    other = RunFolder(store, "")
    assert other.round([], [(attempt, "dead")], {attempt}).marked == ()
    folder.round([], [], {attempt}, [attempt], 300)
    assert other.round([], [(attempt, "dead")], {attempt}).marked == (attempt,)
    assert attempts.alive(store, attempt).phase == "saving", "the keeper that saves writes the end"
    third = RunFolder(store, "")
    for _ in range(2):
        assert third.round([], [(attempt, "dead")], {attempt}).marked == (), "it may be at a long request"
    monkeypatch.setattr(attempts, "WATCH_S", 0.0)
    assert third.round([], [(attempt, "dead")], {attempt}).marked == (attempt,)


class Stopped(LocalStore):
    """Its keeper stands still for a minute in its second read of a counter, and the counter goes on."""

    reads, now_s = 0, 0.0
    attempt: AttemptName

    def brief(self) -> "Stopped":
        return self

    def read(self, path: str, max_bytes: int) -> bytes:
        found = super().read(path, max_bytes)
        self.reads += path == alive_path(self.attempt)
        if self.reads == 2:
            self.reads, self.now_s = self.reads + 1, self.now_s + 60
            attempts.beat(LocalStore(self.url), self.attempt, 2)
        return found


def test_a_keeper_that_stands_still_in_a_read_takes_no_moving_counter_for_a_still_one(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Stopped(store.url)
    stopped.attempt = attempt = begun(store, 2)
    monkeypatch.setattr(RunFolder, "_stands", lambda *_: True)
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: stopped.now_s))
    here = RunFolder(stopped, "")
    for _ in range(3):
        here.round([], [(attempt, "dead")], {attempt})
    found = attempts.alive(store, attempt)
    assert found.ended == ""
