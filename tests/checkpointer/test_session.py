"""Sessions of one attempt in one process: one leads, one joins, and the keeper is a thread of it."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashckpt.checkpointer.session import KnownRun, Session, Start, open_session
from flashckpt.commit import attempts
from flashckpt.commit.choice import Choice
from flashckpt.errors import KeeperError, OptionError, RunError, SupersededError
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.keeper.client import KeeperClient
from flashckpt.keeper.daemon import Keeper
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
from flashckpt.options import Environment, Keep, Options
from flashckpt.ranks.agreement import Ranks
from flashckpt.ranks.job import Job
from tests import run_view
from tests.keeper.driver import InProcess
from tests.ranks.together import each_rank
from tests.waiting import until

WORLD = 2
# The keeper stays when a session closes: a test ends it.
OPTIONS = Options(linger="1h", watchdog=None)


class Node:
    """One run on one node: its keeper begins with the first session that asks for it."""

    def __init__(self, folder: Path) -> None:
        self.run, self._runtime = folder / "run", folder / "runtime"
        self._runtime.mkdir()
        self.keeper: Keeper | None = None
        self._thread: threading.Thread | None = None
        self._sessions: list[Session] = []

    def connect(self, run: str, runtime: RuntimeFolder, life: LifeLock) -> KeeperClient:
        if self.keeper is None:
            self.keeper = InProcess(Path(run), RuntimeFolder.at(runtime.path)).keeper
            self._thread = threading.Thread(target=self.keeper.run)
            self._thread.start()
        return KeeperClient(run, runtime, life)

    def environment(self, rank: int) -> Environment:
        return Environment(rank=rank, world=WORLD, runtime_folder=str(self._runtime))

    def lead(self) -> Session:
        return self._kept(open_session(self.run, Keep(), OPTIONS, self.environment(0), connect=self.connect))

    def join(self, attempt: AttemptName, rank: int = 1, **known: Any) -> Session:
        place = self.environment(rank)
        return self._kept(
            open_session(self.run, Keep(), OPTIONS, place, join=attempt, connect=self.connect, **known)
        )

    def known_ranks(self) -> dict[int, tuple[str, int]]:
        return {each.rank: (str(each.attempt), each.world) for each in self.keeper.registry.all()}

    def locks(self) -> set[str]:
        return {path.name for path in self._runtime.glob("*/trainer-*")}

    def end(self) -> None:
        for session in self._sessions:
            session.close()
        if self._thread is not None and self.keeper is not None:
            self.keeper.exit.ask()
            self._thread.join(60)
            assert not self._thread.is_alive()

    def _kept(self, session: Session) -> Session:
        self._sessions.append(session)
        return session


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(attempts, "STILL_S", 0.1)  # the keeper looks so long for other nodes before it leaves
    made = Node(tmp_path)
    yield made
    made.end()


def counters(session: Session) -> list[str]:
    """The attempts that have a name in the run."""
    return [each.name for each in session.store.list("alive") if not each.name.startswith(".")]


def start(session: Session, parent: SnapshotId | None = None, step: int = 0, tier: str = "local") -> None:
    home = session.opened.catalogue
    session.start(Start(parent=parent, step=step, tier=tier, choice=Choice(home=home, lead=home)))


def started(sessions: list[Session], parents: list[SnapshotId | None], *, step: int = 0) -> list[Any]:
    """Start the sessions, a rank each, at these snapshots. Returns the error of each, None for none."""

    def operation(job: Job) -> None:
        session = sessions[job.rank]
        session.group = Ranks(session.environment, job)
        start(session, parents[job.rank], step, "memory" if parents[job.rank] else "local")
        session.group.together("what follows", lambda: None)

    return each_rank(len(sessions), operation)


def test_one_leads_and_one_joins(node: Node) -> None:
    first = node.lead()
    second = node.join(first.attempt)
    assert (second.attempt, second.identity) == (first.attempt, first.identity)
    assert counters(first) == [str(first.attempt)], "one name, not two"
    assert node.known_ranks() == {rank: (str(first.attempt), WORLD) for rank in range(WORLD)}
    assert started([first, second], [None, None]) == [None, None]
    assert run_view.attempts(first.store) == [first.attempt]
    assert run_view.start_of(first.store, first.attempt) == (None, 0, WORLD)
    first.close()
    second.close()
    until(lambda: run_view.ending(first.store, first.attempt), "the end")


def test_ranks_that_have_loaded_different_snapshots_begin_no_attempt(node: Node) -> None:
    earlier = node.lead()
    start(earlier)
    earlier.close()
    sessions = [first := node.lead(), node.join(first.attempt)]
    parents = [SnapshotId(earlier.attempt, boundary) for boundary in (8, 7)]
    for error in started(sessions, parents, step=3):
        assert type(error) is RunError
        assert re.search(r"rank 1 has loaded step 3 .* \(boundary 7\), and rank 0 .* 8\)", str(error))
    assert run_view.attempts(first.store) == [earlier.attempt]


def test_a_keeper_that_does_not_answer_one_rank_ends_all_by_its_error(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = node.lead()
    start(earlier)
    earlier.close()
    sessions = [first := node.lead(), node.join(first.attempt)]

    def gone(parent: SnapshotId) -> None:
        raise KeeperError("it is gone")

    monkeypatch.setattr(sessions[1].keeper, "started", gone)
    for error in started(sessions, [SnapshotId(earlier.attempt, 8)] * 2, step=3):
        assert type(error) is KeeperError
        assert str(error).startswith("rank 1 of 2: it is gone")


def test_an_attempt_without_a_counter_is_not_joined(node: Node) -> None:
    first = node.lead()
    locks = node.locks()
    known = KnownRun(first.run_id, place="there (rank 0)")
    for number in (first.attempt.number, first.attempt.number + 1):
        for is_first in (False, True):
            with pytest.raises(OptionError, match=r"\(rank 1\) is not there \(rank 0\)"):
                node.join(AttemptName(number, "00000000"), known=known, is_first=is_first)
    assert counters(first) == [str(first.attempt)]
    assert node.locks() == locks
    assert node.join(first.attempt).attempt == first.attempt, "what was refused holds no place"


def test_a_superseded_attempt_is_not_joined(node: Node) -> None:
    first = node.lead()
    start(first)
    first.close()
    second = node.lead()
    start(second)
    with pytest.raises(SupersededError):
        node.join(first.attempt)
    assert node.join(second.attempt).attempt == second.attempt
