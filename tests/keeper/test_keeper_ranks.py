"""Several ranks of one node, each a process, with the one keeper that serves them all."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flashckpt.commit import attempts
from flashckpt.commit.steps import read_step
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.memory.region import is_region_name, rank_of
from tests import run_view
from tests.keeper.driver import Process, eventually, kill_keeper, runtime_of, told
from tests.keeper.fake import open_runtime
from tests.persist.node import files, is_committed, is_whole
from tests.processes import keepers_of


class Ranks:
    """The ranks of one node and attempt, started at once. Each has its state of `tests.persist.node`."""

    def __init__(
        self, run: Path, base: Path, ranks: Sequence[int], world: int, attempt: AttemptName | None = None
    ) -> None:
        self.run, self.store = run, open_runtime(run, base)[0]
        self.attempt = attempt or run_view.next_name(self.store)
        if attempt is None:
            attempts.reserve(self.store, self.attempt)
        self.ranks, self.folder = tuple(ranks), runtime_of(run, base)

        def begin(rank: int) -> Process:
            about: dict[str, Any] = {"kib": 16 + rank, "rank": rank, "world": world}
            return Process(run, base, **about, ranks=list(ranks), join=str(self.attempt))

        with ThreadPoolExecutor(len(ranks)) as threads:
            self.processes = dict(zip(ranks, threads.map(begin, ranks), strict=True))

    def do(self, *command: Any, only: Sequence[int] = ()) -> list[Any]:
        """What each rank answers; all are asked at once."""
        asked = [self.processes[rank] for rank in only or self.ranks]
        with ThreadPoolExecutor(len(asked)) as threads:
            return list(threads.map(lambda process: process.do(*command), asked))

    def save(self, step: int) -> None:
        """Persist a step of all ranks."""
        self.do("snapshot", step, True)
        self.do("committed", step)

    def begin(self, parent: AttemptName | None = None, step: int = 0) -> "Ranks":
        """With slots, and where the attempt goes on from written down."""
        before = (None, step, None) if parent is None else (str(parent), step, "slot")
        for rank in self.ranks:
            self.do("start", *before, only=[rank])
        self.do("slots", 0)
        return self

    def slots(self) -> dict[int, int]:
        """How many regions there are of each rank."""
        names = [rank_of(name) for name in self.folder.names() if is_region_name(name)]
        return {rank: names.count(rank) for rank in sorted(set(names))}

    def kill(self, *ranks: int) -> None:
        for rank in ranks or list(self.processes):
            self.processes.pop(rank).kill()


@pytest.fixture
def ranks(run: Path, runtime: Path) -> Any:
    made: list[Ranks] = []

    def make(ranks: Sequence[int], world: int, attempt: AttemptName | None = None) -> Ranks:
        made.append(Ranks(run, runtime, ranks, world, attempt))
        return made[-1]

    yield make
    for each in made:
        each.kill()


MakeRanks = Callable[..., Ranks]


def test_ranks_that_start_at_once_have_one_keeper_and_write_one_part(
    ranks: MakeRanks, runtime: Path, run: Path
) -> None:
    node = ranks(range(4), 4).begin()
    eventually(lambda: len(keepers_of(runtime)) == 1)
    assert node.slots() == dict.fromkeys(range(4), 4)
    for step in (1, 2):
        node.do("snapshot", step, True)
    node.do("committed", 2)
    shards = [f"rank-{rank:05d}" for rank in range(4)]
    assert files(node.store, 2, node.attempt) == ["manifest", "node-00000", *shards]
    assert is_whole(node.store, 1, node.attempt, 4)
    assert is_whole(node.store, 2, node.attempt, 4)
    assert {tuple(line["ranks"]) for line in told(run, "commit", 2)} == {(0, 1, 2, 3)}


def test_a_keeper_that_dies_is_replaced_by_one_that_waits_for_all_ranks(ranks: MakeRanks) -> None:
    """The one that comes knows the ranks that have not spoken to it by their locks."""
    node = ranks(range(2), 2)
    node.do("start", None, 0, None, only=[0])
    node.do("slots", 0, only=[0])
    node.do("snapshot", 1, True, only=[0])
    kill_keeper(node.folder)
    node.do("tend", only=[0])
    assert files(node.store, 1, node.attempt) == [], "rank 1 lives, and has not sealed it yet"
    node.do("slots", 0, only=[1])
    node.do("snapshot", 1, True, only=[1])
    node.do("committed", 1)
    assert is_whole(node.store, 1, node.attempt, 2)


def test_of_ranks_that_are_killed_the_newest_that_all_have_is_saved(ranks: MakeRanks) -> None:
    node = ranks(range(2), 2).begin()
    node.do("snapshot", 1, False)
    node.do("snapshot", 2, False)
    node.do("snapshot", 3, False, only=[0])
    node.kill()
    eventually(lambda: is_committed(node.store, 2, node.attempt))
    assert is_whole(node.store, 2, node.attempt, 2)
    assert files(node.store, 3, node.attempt) == []


def test_slots_of_a_rank_that_the_node_has_no_more_go_once_a_newer_step_is_committed(
    ranks: MakeRanks,
) -> None:
    before = ranks(range(2), 2).begin()
    before.do("snapshot", 3, False)
    before.kill()
    eventually(lambda: is_committed(before.store, 3, before.attempt))
    after = ranks([0], 1).begin(before.attempt, 3)
    eventually(lambda: after.slots()[1] == 1)  # what it had sealed, and of the empty ones none
    after.save(4)
    eventually(lambda: 1 not in after.slots())
    assert read_step(after.store, CommitName(4, after.attempt, 4)).world == 1
