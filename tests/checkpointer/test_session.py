"""Sessions of one attempt in one process: one leads, one joins, and the keeper is a thread of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashckpt.checkpointer import session as opening
from flashckpt.checkpointer.session import KnownRun, Session, open_session
from flashckpt.commit import attempts
from flashckpt.errors import RunError, RunHeldError, SupersededError
from flashckpt.format.names import ATTEMPTS, RUN, AttemptName, alive_path
from flashckpt.keeper.client import KeeperClient
from flashckpt.keeper.daemon import Keeper
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
from flashckpt.options import Environment, Keep, Options
from flashckpt.store.base import Entry
from flashckpt.store.local import LocalStore
from tests.commit.runs import HOLDER
from tests.keeper.driver import InProcess
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
        assert self.keeper is not None
        return {each.rank: (str(each.attempt), each.world) for each in self.keeper.roster.all()}

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
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.end()


def test_one_leads_and_one_joins(node: Node) -> None:
    first = node.lead()
    second = node.join(first.attempt)
    assert (second.attempt, second.identity) == (first.attempt, first.identity)
    assert [each.name for each in attempts.attempts(first.store)] == [first.attempt], "one claim, not two"
    assert node.known_ranks() == {rank: (str(first.attempt), WORLD) for rank in range(WORLD)}
    first.start()
    second.start()
    found = attempts.read_start(first.store, first.attempt)
    assert found is not None
    assert (found.parent, found.step, found.world) == (None, 0, WORLD)
    first.close()
    second.close()
    until(lambda: (alive := attempts.alive(first.store, first.attempt)) and alive.ended, "the end")


def test_who_joins_goes_on_from_where_the_attempt_does(node: Node) -> None:
    first = node.lead()
    second = node.join(first.attempt)
    with pytest.raises(RunError, match="goes on from nothing yet"):
        second.start()
    first.start()
    with pytest.raises(RunError, match=r"took up step 3 .* \(boundary 7\), and .* goes on from step 0"):
        second.start(first.attempt, 3, 7)
    second.start()


def test_who_joins_goes_on_from_the_same_boundary_of_a_step(node: Node) -> None:
    earlier = node.lead()
    earlier.start()
    earlier.close()
    first = node.lead()
    second = node.join(first.attempt)
    first.start(earlier.attempt, 3, 8, from_memory=True)
    with pytest.raises(RunError, match=r"\(boundary 7\), and .*\(boundary 8\)"):
        second.start(earlier.attempt, 3, 7, from_memory=True)
    second.start(earlier.attempt, 3, 8)


def test_an_attempt_that_was_never_claimed_is_not_joined(node: Node) -> None:
    first = node.lead()
    locks = node.locks()
    with pytest.raises(RunError, match="never claimed"):
        node.join(AttemptName(first.attempt.number, "00000000"))
    with pytest.raises(RunError, match="never claimed"):
        node.join(AttemptName(first.attempt.number + 1, "00000000"))
    assert node.locks() == locks
    assert node.join(first.attempt).attempt == first.attempt, "what was refused holds no place"


def test_a_superseded_attempt_is_not_joined(node: Node) -> None:
    first = node.lead()
    first.close()
    second = node.lead()
    with pytest.raises(SupersededError):
        node.join(first.attempt)
    assert node.join(second.attempt).attempt == second.attempt


def test_a_rank_is_held_once_by_a_process(node: Node) -> None:
    first = node.lead()
    with pytest.raises(RunHeldError):
        node.lead()
    node.join(first.attempt)
    with pytest.raises(RunHeldError):
        node.join(first.attempt)


def test_a_node_that_shares_its_folder_may_claim_the_attempt_in_the_same_moment(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes find no claim of the leader's in the folder that they share: one claims it, the other one
    joins, and takes it for no other job."""
    name = AttemptName(1, "ab" * 4)

    class Shared(LocalStore):
        """The other node claims it after the first look, and its keeper says that it lives."""

        def list(self, folder: str, *how: Any) -> list[Entry]:
            found = super().list(folder, *how)
            if folder == ATTEMPTS and self.exists(RUN):
                attempts.claim_as(LocalStore(self._root), name, HOLDER)
            return found

        def read(self, path: str, most: int) -> bytes:
            if path == alive_path(name):
                other = LocalStore(self._root)
                attempts.move_on(other, name, getattr(attempts.alive(other, name), "count", None))
            return super().read(path, most)

    monkeypatch.setattr(opening, "open_store", lambda path, options: Shared(str(path)))
    known = KnownRun("ab" * 8)
    joined = node.join(name, rank=1, known=known, claims=True)
    assert (joined.attempt, joined.leads) == (name, False)
