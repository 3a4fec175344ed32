"""How many slots a rank is given, and that a node's ranks are given theirs or none is."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flashckpt.errors import FlashckptError, OutOfSpaceError
from flashckpt.format.layout import PAGE
from flashckpt.format.names import AttemptName
from flashckpt.keeper import allocation
from flashckpt.keeper.allocation import Allocation
from flashckpt.memory.held_regions import MAX_REGIONS, Regions
from flashckpt.memory.region import SlotSize
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
from flashckpt.persist.job import Trainer
from tests.descriptors import closed_after
from tests.waiting import until

SIZE = SlotSize(PAGE, 1 << 20)
EACH = SIZE.region_bytes


class Node:
    """A keeper's memory, where so much is available; answers are kept, by rank."""

    def __init__(self, runtime: Path, room: int) -> None:
        self.room = room
        self.folder = closed_after(RuntimeFolder.open(str(runtime), "ab" * 16))
        self.wake, self.regions = os.eventfd(0, os.EFD_NONBLOCK), Regions(self.folder, "0" * 8)
        self.allocation = Allocation(self.regions, lambda *_: True, self.wake, lambda: self.room)
        self.asked: dict[int, tuple[Trainer, dict[str, Any]]] = {}
        self.answers: dict[int, int | FlashckptError] = {}
        self.trainers: dict[int, LifeLock] = {}

    def ask(
        self, rank: int, *, of: int = 1, count: int = 0, purpose: str = "slots", size: SlotSize = SIZE
    ) -> None:
        if rank not in self.trainers:
            lock = LifeLock.acquire(self.folder, f"trainer-{rank}.lock")
            assert lock is not None
            self.trainers[rank] = lock
        name, attempt = self.trainers[rank].name, AttemptName(1, "0" * 8)
        trainer = Trainer(lock=name, rank=rank, ranks=tuple(range(of)), attempt=attempt)
        sizes = {"needed": [*size], "wanted": [*size]}
        asked = {"purpose": purpose, "count": count, **sizes, "have": [], "node": -1}
        self.asked[rank] = trainer, asked
        self.repeat()

    def repeat(self) -> None:
        """Each rank repeats the request that is not answered yet."""
        for rank, (trainer, message) in list(self.asked.items()):
            try:
                answer, _ = self.allocation.ask(trainer, message)
                if "slots" not in answer:
                    continue
                self.answers[rank] = len(answer["slots"])
            except FlashckptError as error:
                self.answers[rank] = error
            del self.asked[rank]

    def answered(self) -> dict[int, int | FlashckptError]:
        until(lambda: (self.repeat(), not self.asked)[1], "all answers")
        return self.answers

    def close(self) -> None:
        for held in self.regions.everything():
            self.regions.remove(held)
        for lock in self.trainers.values():
            lock.release(self.folder)
        os.close(self.wake)


@pytest.fixture
def node(runtime: Path) -> Iterator[Callable[[int], Node]]:
    made: list[Node] = []

    def with_room(num_bytes: int) -> Node:
        made.append(Node(runtime, num_bytes))
        return made[-1]

    yield with_room
    for each in made:
        each.close()


def test_as_many_as_fit_into_half_or_as_the_user_said_else_two_or_none(runtime: Path) -> None:
    for room, count, given in (
        (6 * EACH, 0, 3), (6 * EACH - 1, 0, 2), (2 * EACH, 0, 2), (5 * EACH, 5, 5), (5 * EACH - 1, 5, 2),
        (EACH, 1, 1), (2 * EACH - 1, 0, 0),
    ):  # fmt: skip
        with closing(Node(runtime, room)) as alone:
            alone.ask(0, count=count)
            answer = alone.answered()[0]
            assert answer == given if given else isinstance(answer, OutOfSpaceError), (room, count)
            assert len(alone.regions.everything()) == given


def test_a_trainer_that_dies_after_it_has_repeated_its_request(node: Callable[[int], Node]) -> None:
    """Its message is handled before its death is noticed: nothing is given, and what was made goes."""
    alone = node(6 * EACH)
    alone.ask(0)
    (request,) = alone.allocation._requests.values()
    until(lambda: (alone.allocation.next(), request.is_granted)[1], "the memory")
    alone.trainers.pop(0).release(alone.folder)
    alone.repeat()
    assert alone.answers == {}
    assert not alone.allocation.busy
    assert all(each.retired for each in alone.regions.everything())


def test_others_are_served_while_memory_is_taken(
    node: Callable[[int], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, make, may_go_on = node(6 * EACH), Regions.make, threading.Event()

    def slow(*arguments: Any, **named: Any) -> Any:
        assert may_go_on.wait(240)
        return make(*arguments, **named)

    monkeypatch.setattr(Regions, "make", slow)
    alone.ask(0)
    assert (alone.allocation.busy, alone.answers) == (True, {})
    may_go_on.set()
    assert alone.answered() == {0: 3}


def test_ranks_of_a_node_do_not_all_pass_one_look(node: Callable[[int], Node]) -> None:
    """There is room for two of them and not for three: nothing is taken that would be in vain."""
    narrow = node(5 * EACH)
    for rank in range(3):
        narrow.ask(rank, of=3)
    assert all(isinstance(each, OutOfSpaceError) for each in narrow.answered().values())
    assert len(narrow.answers) == 3
    assert not narrow.regions.everything()


def test_a_rank_that_takes_constants_still_has_its_slots_to_come(node: Callable[[int], Node]) -> None:
    """There is no room for two slots of each rank, whatever the first one takes meanwhile."""
    narrow = node(4 * EACH - 1)
    narrow.ask(0, of=2, purpose="constants")
    narrow.ask(1, of=2)
    assert isinstance(narrow.answered()[1], OutOfSpaceError)
    assert narrow.answers[0] == 1


def test_each_rank_has_its_constants_where_there_is_just_room_for_them(node: Callable[[int], Node]) -> None:
    tight = node(2 * EACH)
    for rank in range(2):
        tight.ask(rank, of=2, purpose="constants")
        assert tight.answered()[rank] == 1
        tight.room -= EACH


@pytest.mark.every_set
@pytest.mark.parametrize(("ranks", "room"), [(2, 8), (MAX_REGIONS // 4 + 1, 16)])
def test_all_ranks_of_a_node_have_the_same_number_of_slots(
    node: Callable[[int], Node], ranks: int, room: int
) -> None:
    wide = node(room * ranks * EACH)
    for rank in range(ranks):
        wide.ask(rank, of=ranks)
    assert wide.answered() == dict.fromkeys(range(ranks), 4)


def test_a_slot_that_is_still_written_is_not_waited_for(node: Callable[[int], Node]) -> None:
    """Its trainer has said that it needs it no more, and writes it all the same."""
    narrow = node(EACH)
    narrow.ask(0, count=1)
    assert narrow.answered() == {0: 1}
    [held] = narrow.regions.slots()
    owner = held.slot.enroll(os.getpid(), narrow.trainers[0].name, lambda _: True)
    assert held.slot.begin(owner) is not None
    held.retired, held.writer = True, ""
    narrow.ask(0, count=1, size=SlotSize(PAGE, 4 << 20))
    assert isinstance(narrow.answers[0], OutOfSpaceError)
    assert not narrow.allocation.busy


def test_a_machine_without_threads_left_refuses_and_goes_on(
    node: Callable[[int], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, begin = node(6 * EACH), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    alone.ask(0)
    assert isinstance(alone.answers[0], OutOfSpaceError)
    monkeypatch.setattr(threading.Thread, "start", begin)
    alone.ask(0)
    assert alone.answered() == {0: 3}


def test_a_slot_that_goes_while_others_are_made_beside_it_is_not_given(node: Callable[[int], Node]) -> None:
    """It was released, and what was in it is needed no more."""
    alone = node(8 * EACH)
    alone.ask(0, count=1)
    assert alone.answered() == {0: 1}
    [held] = alone.regions.slots()
    held.retired, held.writer = True, ""
    alone.ask(0, count=2)
    alone.regions.remove_spent(held, lambda *_: False)
    assert alone.answered() == {0: 2}
    assert held not in alone.regions.slots()


@pytest.mark.every_set
@pytest.mark.parametrize("is_dead", [True, False])
def test_what_a_trainer_asked_for_and_does_not_take_is_let_go(
    node: Callable[[int], Node], monkeypatch: pytest.MonkeyPatch, is_dead: bool
) -> None:
    alone = node(6 * EACH)
    alone.ask(0)
    if is_dead:
        alone.trainers[0].release(alone.folder)
    else:
        monkeypatch.setattr(allocation, "_ABANDONED_S", 0.0)
    until(lambda: (alone.allocation.next(), not alone.allocation.busy)[1], "the end of it")
    assert [(held.retired, held.writer) for held in alone.regions.slots()] == [(True, "")] * 3
