"""The words that the ranks of a node share: nobody passes what was promised for him, nothing is half read."""

import random
import sys
import threading

import pytest

from flashckpt.ranks.joint_coordination import judged_until
from flashckpt.ranks.messages import MOST_OPEN, Announcement
from flashckpt.ranks.node_state import NodeState, RankRow, Table

RACES = 20_000


def board_of(*ranks: int) -> NodeState:
    node_state = NodeState(bytearray(NodeState.num_bytes(len(ranks))), ranks)
    node_state.format()
    return node_state


def broken_promises(row: RankRow, races: int) -> int:
    """One thread passes boundaries, the other promises for it, a few ahead, that it does not pass one. How
    often it did."""
    done, chance, broken = threading.Event(), random.Random(1), 0

    def train() -> None:
        boundary_index = 0
        while not done.is_set():
            boundary_index += row.enter(boundary_index + 1)

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(races):
        limit = row.progress.entered + chance.randint(1, 3)
        if row.promise(limit):
            broken += any([row.progress.entered > limit for _ in range(3)])
            row.lift(limit)
    done.set()
    thread.join()
    return broken


def test_no_promise_is_broken_in_20000_races() -> None:
    [row] = board_of(0).rows
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert broken_promises(row, RACES) == 0
    finally:
        sys.setswitchinterval(before)


def test_an_announcement_is_never_half_read() -> None:
    memory = bytearray(NodeState.num_bytes(1))
    writer, reader = NodeState(memory, (0,)), NodeState(memory, (0,))
    writer.format()
    done = threading.Event()
    found: list[tuple[int, int, tuple[int, ...]]] = []

    def read() -> None:
        while not done.is_set():
            read = reader.announced
            found.append((read.number, read.decided, read.complete))

    thread = threading.Thread(target=read)
    thread.start()
    told = []
    for number in range(1, 2000):
        complete = tuple(range(2 * number, 2 * number + number % 16 + 1))
        told.append(writer.announce(Announcement(number=number, decided=2 * number + 20, complete=complete)))
    done.set()
    thread.join()
    assert sum(told) > 1000
    numbers = [number for number, _, _ in found]
    assert numbers == sorted(numbers)
    for number, decided, complete in found:
        assert number == 0 or (decided, complete) == (
            2 * number + 20, tuple(range(2 * number, 2 * number + number % 16 + 1))
        )  # fmt: skip


def test_what_is_sealed_keeps_its_place_while_others_come_and_go() -> None:
    """Who reads beside the writer misses none."""
    [row] = board_of(0).rows
    tables = {each: Table(each, 2 * each) for each in (3, 5, 8, 9)}
    row.publish(5, {each: tables[each] for each in (3, 5)})
    place = list(row.sealed).index(3)
    row.publish(9, {each: tables[each] for each in (3, 8, 9)})
    assert list(row.sealed)[place] == 3
    assert row.sealed == {each: tables[each] for each in (3, 8, 9)}
    assert row.judged == 9
    row.publish(8, {})
    assert row.judged == 9, "it only moves on"


def test_a_boundary_whose_snapshot_is_on_its_way_is_not_judged() -> None:
    assert judged_until(7, 5, is_begun=False) == 7
    assert judged_until(7, 5, is_begun=True) == 4
    assert judged_until(7, 7, is_begun=True) == 6
    # One is being begun at a boundary that is still open: the one before it has ended.
    assert judged_until(7, 8, is_begun=True) == 7


def row_and_its_reader() -> tuple[RankRow, RankRow]:
    """The same row, as it is written and as it is read."""
    memory = bytearray(NodeState.num_bytes(1))
    [row], [read] = NodeState(memory, (0,)).rows, NodeState(memory, (0,)).rows
    return row, read


def table_of(boundary_index: int) -> Table:
    return Table(boundary_index, 2 * boundary_index)


def sealed_up_to(newest: int) -> dict[int, Table]:
    return {
        boundary_index: table_of(boundary_index) for boundary_index in range(max(1, newest - 2), newest + 1)
    }


def test_what_is_sealed_is_never_read_with_the_table_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each word that is written another rank's is read: two that are alike would be taken for unlike,
    or two that are not for alike."""
    row, read = row_and_its_reader()
    store, seen = row._store, set()

    def store_and_look(offset: int, value: int) -> None:
        store(offset, value)
        for boundary_index, table in read.sealed.items():
            assert table == table_of(boundary_index)
            seen.add(boundary_index)

    monkeypatch.setattr(row, "_store", store_and_look)
    for newest in range(1, 8):
        row.publish(newest, sealed_up_to(newest))
    assert seen == set(range(1, 8))


def test_what_is_written_again_while_it_is_read_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two words that are read another snapshot may have taken the place."""
    row, read = row_and_its_reader()
    load, loads, moment = read._load, 0, 0

    def load_and_write(offset: int) -> int:
        nonlocal loads
        found, loads = load(offset), loads + 1
        if loads == moment:
            row.publish(newest, sealed_up_to(newest))
        return found

    monkeypatch.setattr(read, "_load", load_and_write)
    newest = 1
    while loads >= moment:
        row.publish(newest, sealed_up_to(newest))
        loads, moment, newest = 0, moment + 1, newest + 3
        assert all(table == table_of(boundary_index) for boundary_index, table in read.sealed.items()), moment
    assert moment > MOST_OPEN + 3 * 3, "each place, and the words of three tables"
