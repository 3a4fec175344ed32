"""The slots of a node's ranks through one job to one part and, with those of other nodes, to a checkpoint."""

import errno
import threading
from pathlib import Path
from re import Pattern
from typing import Any

import pytest

from flashckpt import _native
from flashckpt.commit.view import View
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.memory.slot import Sealed, Slot, SlotState
from flashckpt.persist.committer import Committer, polls_before
from flashckpt.persist.job import JobState, StepJob, StepOutcome
from flashckpt.store.base import Entry
from flashckpt.store.local import LocalStore
from tests.commit.runs import new_run
from tests.events import ledger
from tests.keeper.driver import eventually
from tests.keeper.fake import layout_for
from tests.keeper.jobs import failing_for
from tests.persist.node import (
    MakeNode,
    Node,
    begun,
    files,
    is_committed,
    is_whole,
    name_of,
    until_told,
    visible_steps,
)
from tests.run_view import folder_for


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_ranks_of_a_node_make_one_part_and_the_step_is_committed(nodes: MakeNode, world: int) -> None:
    node = nodes(tuple(range(world)), world)
    slots = node.seal(5)
    node.run()
    shards = [f"rank-{rank:05d}" for rank in range(world)]
    assert files(node.store, 5, node.attempt) == ["manifest", "node-00000", *shards]
    assert is_whole(node.store, 5, node.attempt, world)
    assert node.told == [(5, JobState.COMMITTED)]
    for slot in slots:
        sealed = slot.sealed()
        assert sealed.word.state is SlotState.SEALED, "nothing stays pinned"
        assert slot.persisted == sealed.generation
    node.seal(6)
    node.run()
    assert is_whole(node.store, 6, node.attempt, world)


def test_a_step_is_pinned_as_its_ranks_seal_it_and_written_once_all_have(nodes: MakeNode) -> None:
    node = nodes((0, 1, 2, 3), 4)
    pinned = node.seal(5, 0, 1, 2)
    node.queue.next()
    assert [slot.state().state for slot in pinned] == [SlotState.PINNED] * 3
    assert node.queue.is_pending(), "the last rank lives, and will seal it"
    assert files(node.store, 5, node.attempt) == []
    # However many boundaries pass: it is in nobody's way and nobody overwrites it.
    for step in (6, 7, 8):
        node.seal(step, 0, 1, 2, persist=False)
    node.seal(5, 3)
    node.run()
    assert is_whole(node.store, 5, node.attempt, 4)


def test_a_step_that_a_rank_has_passed_over_is_void(nodes: MakeNode) -> None:
    node = nodes((0, 1), 2)
    [slot] = node.seal(5, 0)
    node.queue.next()
    assert slot.state().state is SlotState.PINNED
    node.seal(6)
    node.run()
    assert files(node.store, 5, node.attempt) == []
    assert is_whole(node.store, 6, node.attempt, 2)
    assert slot.state().state is SlotState.SEALED, "it may be overwritten"
    assert node.told == [(5, JobState.SUPERSEDED), (6, JobState.COMMITTED)]
    assert not node.queue.is_pending()
    # It takes no slot away for ever.
    for step in range(7, 12):
        node.seal(step, persist=False)


def test_a_step_that_a_rank_has_passed_over_takes_no_slot_while_storage_fails(
    nodes: MakeNode, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes((0, 1), 2)
    [slot] = node.seal(5, 0)
    node.queue.next()
    assert slot.state().state is SlotState.PINNED
    node.seal(6, persist=False)

    def gone(*_: object) -> list[Entry]:
        raise OSError(errno.EIO, "the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(store, "list", gone)
        until_told(node, (5, JobState.FAILED))
    assert slot.state().state is SlotState.SEALED, "it may be overwritten"
    node.queue.try_again()
    until_told(node, (5, JobState.SUPERSEDED))


def test_what_a_torn_rank_has_is_published_by_nobody(nodes: MakeNode) -> None:
    node = nodes((0, 1), 2)
    slots = node.seal(5)
    slots[1].image_view[5000] ^= 1
    node.run()
    assert files(node.store, 5, node.attempt) == []
    assert slots[1].state().state is SlotState.FREE
    assert [slot.persisted for slot in slots] == [0, 0]
    node.seal(6)
    node.run()
    assert is_whole(node.store, 6, node.attempt, 2)


# Another node


def test_a_second_nodes_part_is_waited_for_and_that_is_no_failure(nodes: MakeNode, tmp_path: Path) -> None:
    first, second = nodes((0, 1), 4), nodes((2, 3), 4)
    slots = first.seal(5)
    first.run()
    assert files(first.store, 5, first.attempt) == ["node-00000", "rank-00000", "rank-00001"]
    assert first.told[0] == (5, JobState.PART_WRITTEN)
    assert not first.queue.is_pending(), "what this node has is at rest"
    assert first.queue.waiting() == first.queue.waiting(for_others=True) == [5]
    assert all(first.queue.is_settled(rank) for rank in (0, 1)), "nobody need wait for this node"
    assert [slot.failed for slot in slots] == [0] * 2
    second.seal(5)
    second.run()
    shards = [f"rank-{rank:05d}" for rank in range(4)]
    assert files(first.store, 5, first.attempt) == ["manifest", "node-00000", "node-00002", *shards]
    assert is_whole(first.store, 5, first.attempt, 4)
    assert second.told == [(5, JobState.COMMITTED)], "who writes the last part commits"
    until_told(first, (5, JobState.COMMITTED))
    assert [slot.persisted for slot in slots] == [1, 1]
    for node in (first, second):
        node.ledger.close()
    lines = ledger(tmp_path / "run")
    assert "error" not in [line["event"] for line in lines]
    written = [line["written"] for line in lines if line["event"] == "persist"]
    assert sorted([rank for rank, _, _ in rows] for rows in written) == [[0, 1], [2, 3]], "once a node"
    for rank, seconds, num_bytes in (row for rows in written for row in rows):
        assert seconds >= 0
        assert num_bytes == layout_for(16 + rank).num_bytes


def test_slots_are_not_needed_for_what_waits(
    nodes: MakeNode, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second node dies after its part; the first has overwritten its slots, and commits all the same."""
    first, second = nodes((0,), 2), nodes((1,), 2)
    first.seal(5)
    first.run()
    second.seal(5)
    create = store.create
    with monkeypatch.context() as patch:
        patch.setattr(store, "create", failing_for("catalogue/", create))
        second.run()
    assert second.told[-1] == (5, JobState.FAILED)
    assert not is_committed(store, 5, first.attempt)
    for slot in first.ranks[0].slots:
        if slot.state().state is SlotState.SEALED:
            assert slot.free(slot.state())
    until_told(first, (5, JobState.COMMITTED))
    assert is_whole(store, 5, first.attempt, 2)


def test_what_fails_is_tried_so_often_and_then_it_is_idle(
    nodes: MakeNode, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes((0, 1), 2)
    slots = node.seal(5)
    with monkeypatch.context() as patch:
        patch.setattr(store, "create", failing_for("data/", store.create))
        node.run()
    assert node.told == [(5, JobState.FAILED)] * 4
    assert files(store, 5, node.attempt) == [], "no shard stays that nothing names"
    assert [slot.failed for slot in slots] == [1] * 2
    node.queue.try_again()
    node.run()
    assert is_whole(store, 5, node.attempt, 2)


# Which boundary


def resumed(node: Node, boundary: int) -> AttemptName:
    """A later attempt that all ranks of the job have resumed from this boundary at step 5."""
    return begun(node.store, 4, name_of(5, node.attempt, boundary))


def test_the_boundary_that_an_attempt_resumed_from_is_committed_as_its_parents(
    nodes: MakeNode, store: LocalStore
) -> None:
    """A later one that each rank was asked for, with the same step number, is void."""
    both, slots = (nodes((0, 1), 4), nodes((2, 3), 4)), list[Slot]()
    for node in both:
        node.seal(5, persist=False, boundary=8)
        slots += node.seal(5, boundary=9)
    resumed(both[0], 8)
    for node in both:
        node.queue.resumed(SnapshotId(node.attempt, 8))
        node.run()
    assert is_whole(store, 5, both[0].attempt, 4, 8)
    assert visible_steps(store) == [5]
    assert all((5, JobState.SUPERSEDED) in node.told for node in both)
    assert [slot.persisted for slot in slots] == [0] * 4
    assert files(store, 9, both[0].attempt) == []


def test_two_boundaries_with_one_step_number_are_two_steps(nodes: MakeNode, store: LocalStore) -> None:
    node = nodes((0, 1), 2)
    slots = [*node.seal(5, boundary=8), *node.seal(5, boundary=9)]
    node.run()
    assert is_whole(store, 5, node.attempt, 2, 8)
    assert is_whole(store, 5, node.attempt, 2, 9)
    assert all(slot.persisted == slot.state().generation for slot in slots)


def test_what_a_trainer_asks_for_meanwhile_stands(
    nodes: MakeNode, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new keeper is told again what the attempt went on from, while its trainer writes that slot anew."""
    node = nodes((0,), 1)
    [slot] = node.seal(5, persist=False, boundary=8)
    resumed(node, 8)
    look = node.regions.sealed

    def overtaken(rank: int | None = None) -> list[Sealed]:
        found = look(rank)
        newer = slot.begin(node.ranks[0].owners[slot.name])
        assert newer is not None
        slot.request_persist(newer)
        return found

    monkeypatch.setattr(node.regions, "sealed", overtaken)
    node.queue.resumed(SnapshotId(node.attempt, 8))
    assert slot.asked == slot.state().generation


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2, 3)])
def test_a_keeper_knows_it_by_the_catalogue_alone(
    nodes: MakeNode, store: LocalStore, ranks: tuple[int, ...]
) -> None:
    """Its trainers died before one of them could say a word."""
    first = nodes(ranks, 4)
    second = nodes((2, 3), 4) if len(ranks) < 4 else None
    there = [node for node in (first, second) if node is not None]
    for node in there:
        node.seal(5, persist=False, boundary=8)
    resumed(first, 8)
    for node in there:
        node.queue.set_trainers([])
        for rank in node.ranks:
            node.queue.rescue(rank)
        node.run()
    assert is_whole(store, 5, first.attempt, 4, 8)


def test_ranks_that_count_a_boundary_as_different_steps_are_named(nodes: MakeNode) -> None:
    """One of them knows the end of an epoch before the other does, say. Nobody waits for what never comes."""
    node = nodes((0, 1), 2)
    node.seal(5, 0, boundary=8)
    node.seal(6, 1, boundary=8)
    node.run()
    assert [state for _, state in node.told] == [JobState.SUPERSEDED]
    assert "step 5 on rank 0, step 6 on rank 1" in node.whys[0]
    assert not node.queue.is_pending()
    node.seal(7, boundary=9)
    node.run()
    assert is_whole(node.store, 7, node.attempt, 2, 9)


def test_nodes_that_count_a_boundary_as_different_steps_are_told(nodes: MakeNode, store: LocalStore) -> None:
    first, second = nodes((0,), 2), nodes((1,), 2)
    first.seal(5, boundary=8)
    second.seal(6, boundary=8)
    for node in (first, second):
        node.run()
    until_told(first, (5, JobState.SUPERSEDED))
    assert second.told == [(6, JobState.SUPERSEDED)]
    assert all("step 5 on rank 0, step 6 on rank 1" in node.whys[-1] for node in (first, second))
    assert visible_steps(store) == []


def test_a_run_to_idle_polls_once_for_other_nodes(nodes: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow store the pause before the next poll of one step is over before the others were polled."""
    node = nodes((0,), 2)
    for step in (4, 5, 6):
        node.seal(step)
    monkeypatch.setattr("flashckpt.persist.queue.poll_pause_s", lambda polls: 0.0)

    class TooManyPolls(Exception):
        pass

    def watch() -> None:
        if len(node.told) > 20:
            raise TooManyPolls

    node.queue.run_to_idle(watch)
    assert sorted(node.told) == [(step, JobState.PART_WRITTEN) for step in (4, 5, 6)]
    node.queue.run_to_idle(watch)
    assert len(node.told) == 6, "a further run polls again"


@pytest.fixture
def leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of many nodes: only the keeper of rank 0's node gathers the parts of all."""
    monkeypatch.setattr("flashckpt.persist.committer._FEW_NODES", 0)


def turn(node: Node) -> None:
    """As the keeper's loop does once."""
    node.queue.collect()
    node.queue.next()


@pytest.mark.usefixtures("leads")
def test_a_step_is_committed_while_the_next_one_is_written(
    nodes: MakeNode, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its write takes: storage may be slow, or the state large."""
    monkeypatch.setattr("flashckpt.persist.queue.poll_pause_s", lambda polls: 1000.0)
    first, second = nodes((0,), 2), nodes((1,), 2)
    first.seal(5)
    first.run()
    for step in (5, 6):
        second.seal(step)
        second.run()
    assert first.told == [(5, JobState.PART_WRITTEN)]
    write, began, may_end = _native.write_file, threading.Event(), threading.Event()

    def write_file(*arguments: Any, **named: Any) -> Any:
        began.set()
        assert may_end.wait(60)
        return write(*arguments, **named)

    monkeypatch.setattr(_native, "write_file", write_file)
    first.seal(6)
    try:
        eventually(lambda: turn(first) or began.is_set())
        first.queue.expedite()
        eventually(lambda: turn(first) or (5, JobState.COMMITTED) in first.told)
        assert visible_steps(store) == [5]
    finally:
        may_end.set()
    eventually(lambda: turn(first) or (6, JobState.COMMITTED) in first.told)
    assert is_whole(store, 6, first.attempt, 2)


@pytest.mark.usefixtures("leads")
def test_an_older_step_that_is_whole_is_committed_before_a_newer_one(
    nodes: MakeNode, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next poll is far away when the parts of the newer one are all there; afterwards it is too late."""
    monkeypatch.setattr("flashckpt.persist.queue.poll_pause_s", lambda polls: 1000.0)
    first, second = nodes((0,), 2), nodes((1,), 2)
    first.seal(5)
    first.run()
    for step in (5, 6):
        second.seal(step)
        second.run()
    first.seal(6)
    eventually(lambda: turn(first) or (6, JobState.COMMITTED) in first.told)
    assert first.told == [(5, JobState.PART_WRITTEN), (5, JobState.COMMITTED), (6, JobState.COMMITTED)]
    assert visible_steps(store) == [5, 6]


@pytest.mark.usefixtures("leads")
def test_an_older_step_that_is_whole_after_its_poll_has_begun_is_committed_too(
    nodes: MakeNode, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are all there when those of the newer one are, whose write ends during that poll."""
    monkeypatch.setattr("flashckpt.persist.queue.poll_pause_s", lambda polls: 1000.0)
    first, second = nodes((0,), 2), nodes((1,), 2)
    first.seal(5)
    first.run()
    write, commit = _native.write_file, Committer.commit
    writes, is_written, polled, is_answered = (threading.Event() for _ in range(4))

    def write_file(*arguments: Any, **named: Any) -> Any:
        if "rank-00000" in arguments[0]:
            writes.set()
            assert is_written.wait(60)
        return write(*arguments, **named)

    def answered_late(committer: Committer, job: StepJob) -> StepOutcome:
        outcome = commit(committer, job)
        polled.set()
        assert is_answered.wait(60)
        return outcome

    monkeypatch.setattr(_native, "write_file", write_file)
    first.seal(6)
    try:
        eventually(lambda: turn(first) or writes.is_set())
        first.queue.expedite()
        with monkeypatch.context() as patch:
            patch.setattr(Committer, "commit", answered_late)
            eventually(lambda: turn(first) or polled.is_set())
        for step in (5, 6):
            second.seal(step)
            second.run()
        is_written.set()
        eventually(lambda: turn(first) or first.queue.writing is None)
    finally:
        is_written.set()
        is_answered.set()
    eventually(lambda: turn(first) or (6, JobState.COMMITTED) in first.told)
    assert visible_steps(store) == [5, 6]


@pytest.mark.usefixtures("leads")
def test_an_older_step_is_polled_before_a_newer_one_that_waits_as_long(
    nodes: MakeNode, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poll of the newer one is due, and that of the older one is not."""
    monkeypatch.setattr("flashckpt.persist.queue.poll_pause_s", lambda polls: 1000.0)
    first, second = nodes((0,), 2), nodes((1,), 2)
    for step in (5, 6):
        first.seal(step)
        eventually(lambda step=step: turn(first) or (step, JobState.PART_WRITTEN) in first.told)
    for step in (5, 6):
        second.seal(step)
        second.run()
    [newer] = [job for job in first.queue._jobs if job.step == 6]
    newer.retry.due_at = 0.0
    eventually(lambda: turn(first) or (6, JobState.COMMITTED) in first.told)
    assert visible_steps(store) == [5, 6]


def test_polls_for_other_nodes_leave_time_for_a_write(
    nodes: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow store the next poll is due when one ends, and no write begins during one."""
    monkeypatch.setattr("flashckpt.persist.queue.poll_pause_s", lambda polls: 0.0)
    node = nodes((0,), 2)
    node.seal(5)
    node.run()
    node.seal(6)
    node.queue.next()
    assert node.queue.writing is not None
    assert node.queue.writing.step == 6
    eventually(lambda: turn(node) or (6, JobState.PART_WRITTEN) in node.told)
    count = node.told.count((5, JobState.PART_WRITTEN))
    eventually(lambda: turn(node) or node.told.count((5, JobState.PART_WRITTEN)) > count)


@pytest.mark.usefixtures("leads")
def test_a_snapshot_that_rots_after_its_part_was_stored_is_committed(
    nodes: MakeNode, store: LocalStore
) -> None:
    first, second = nodes((0,), 2), nodes((1,), 2)
    [slot] = first.seal(5)
    first.run()
    slot.image_view[5000] ^= 1
    eventually(lambda: turn(first) or slot.state().state is SlotState.FREE)
    eventually(lambda: turn(first) or (5, JobState.TORN) in first.told)
    assert first.queue.waiting() == [5]
    second.seal(5)
    second.run()
    eventually(lambda: turn(first) or (5, JobState.COMMITTED) in first.told)
    assert is_whole(store, 5, first.attempt, 2)


def test_another_run_in_the_place_of_this_one_ends_no_wait_for_other_nodes(
    nodes: MakeNode, store: LocalStore, tmp_path: Path
) -> None:
    """The folder was moved away, say, and is moved back."""
    run_id, run, away = View.of(store).run_id, tmp_path / "run", tmp_path / "away"
    first, second = nodes((0,), 2, stands=lambda: View.of(store).run_id == run_id), nodes((1,), 2)
    first.seal(5)
    first.run()
    run.rename(away)
    other = new_run(run)
    for _ in range(2):
        begun(other, 2)
    until_told(first, (5, JobState.FAILED))
    assert {state for _, state in first.told} == {JobState.PART_WRITTEN, JobState.FAILED}, first.whys
    run.rename(tmp_path / "other")
    away.rename(run)
    second.seal(5)
    second.run()
    first.queue.try_again()
    until_told(first, (5, JobState.COMMITTED))
    assert is_whole(store, 5, first.attempt, 2)


def test_a_request_that_is_withdrawn_while_it_is_written_leaves_no_pin(
    nodes: MakeNode, store: LocalStore
) -> None:
    node = nodes((0,), 2)
    [slot] = node.seal(5)
    node.queue.next()
    eventually(lambda: "node-00000" in files(store, 5, node.attempt))
    slot.request_persist(0)
    eventually(lambda: turn(node) or not node.queue.is_busy)
    assert slot.state().state is SlotState.SEALED


@pytest.mark.parametrize(("world", "each", "polls"), [(1, 1, 0), (16, 4, 0), (1024, 8, 12)])
def test_of_many_nodes_that_of_rank_0_gathers_and_in_the_end_all(world: int, each: int, polls: int) -> None:
    first, *others = (polls_before(range(at, at + each), world) for at in range(0, world, each))
    assert first == 0
    assert {*others} <= {polls}


# What was taken away, is held by others, or fails in the middle


def test_a_slot_that_another_process_has_pinned_is_left_to_it(nodes: MakeNode) -> None:
    node = nodes((0,), 1)
    [slot] = node.seal(5)
    pinned = slot.pin(9, slot.state())
    assert pinned is not None
    node.run()
    assert node.told == []
    assert slot.state() == pinned
    slot.unpin(pinned)
    node.run()
    assert is_whole(node.store, 5, node.attempt, 1)


def test_what_fails_after_it_has_waited_is_said(
    nodes: MakeNode, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes((0,), 2)
    node.seal(5)
    node.run()
    assert node.told == [(5, JobState.PART_WRITTEN)]
    listed = store.list

    def gone(folder: str, *names: Pattern[str]) -> list[Entry]:
        if folder.startswith("data/"):
            raise OSError(errno.EIO, "the disk is gone", folder)
        return listed(folder, *names)

    with monkeypatch.context() as patch:
        patch.setattr(store, "list", gone)
        until_told(node, (5, JobState.FAILED))
    node.ledger.close()
    lines = ledger(tmp_path / "run")
    assert [line["what"] for line in lines if line["event"] == "error"] == ["persist"]


def test_a_rank_that_lets_go_of_its_slot_harms_nothing_that_is_at_rest(nodes: MakeNode) -> None:
    """The step waits for another node; the other ranks' slots learn of its commit."""
    first, second = nodes((0, 1), 4), nodes((2, 3), 4)
    slots = first.seal(5)
    first.run()
    assert slots[0].free(slots[0].state())
    first.run()
    assert slots[1].failed == 0
    second.seal(5)
    second.run()
    until_told(first, (5, JobState.COMMITTED))
    assert {state for _, state in first.told} == {JobState.PART_WRITTEN, JobState.COMMITTED}
    assert slots[1].persisted == 1
    assert slots[1].state().state is SlotState.SEALED
    assert is_whole(first.store, 5, first.attempt, 4)


def test_what_a_killed_keeper_had_not_finished_goes_with_the_next_try(
    nodes: MakeNode, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a keeper that is killed in each write fills the disk. Other nodes may be writing their files."""
    node = nodes((0,), 1)
    folder = folder_for(store, SnapshotId(node.attempt, 5)).path
    unfinished = [f"{folder}/.rank-0000{rank}-5f2c.safetensors.{'0' * 16}.tmp" for rank in (0, 1)]
    for path in unfinished:
        store.create(path, b"half of it")
    node.seal(5)
    with monkeypatch.context() as patch:
        patch.setattr(store, "create", failing_for(".json", store.create))
        until_told(node, (5, JobState.FAILED))
    node.queue.try_again()
    until_told(node, (5, JobState.COMMITTED))
    assert [store.exists(path) for path in unfinished] == [False, True]
    assert is_whole(store, 5, node.attempt, 1)
