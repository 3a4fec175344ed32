"""Jobs of which something was taken away, held by others, or published by others in the middle of them."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from re import Pattern

import pytest

from flashckpt.format.names import SnapshotId
from flashckpt.memory.slot import SlotState
from flashckpt.persist.job import JobState
from flashckpt.store.base import Entry
from flashckpt.store.local import LocalStore
from tests.events import ledger
from tests.keeper.jobs import failing_for
from tests.persist.node import MakeNode, Node, is_whole, until_told
from tests.run_view import folder_for

_LONG_S = 60.0


def run_in_time(node: Node) -> None:
    end = time.monotonic() + _LONG_S

    def watch() -> None:
        assert time.monotonic() < end, "it waits for what will not come"

    node.queue.run_to_idle(watch)


def test_a_slot_that_another_process_has_pinned_is_left_to_it(nodes: MakeNode) -> None:
    node = nodes((0,), 1)
    [slot] = node.seal(5)
    pinned = slot.pin(9, slot.state())
    assert pinned is not None
    run_in_time(node)
    assert node.told == []
    assert slot.state() == pinned
    slot.unpin(pinned)
    run_in_time(node)
    assert is_whole(node.store, 5, node.attempt, 1)


def test_what_fails_after_it_has_waited_is_said(
    nodes: MakeNode,
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    nodes: MakeNode,
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
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
