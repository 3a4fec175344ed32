"""A run, and nodes of a job on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashckpt.persist import queue
from flashckpt.store.local import LocalStore
from tests.commit.runs import new_run
from tests.persist.node import MakeNode, Node, begun


@pytest.fixture(autouse=True)
def _polls_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits long between two looks for the parts of other nodes."""
    monkeypatch.setattr(queue, "poll_pause_s", lambda polls: 0.02)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


@pytest.fixture
def nodes(tmp_path: Path, store: LocalStore) -> Iterator[MakeNode]:
    """Makes nodes of one attempt, which is started with the first."""
    made: list[Node] = []

    def make(ranks: tuple[int, ...], world: int, **how: Any) -> Node:
        attempt = made[0].attempt if made else begun(store, world)
        made.append(Node(store, tmp_path / f"memory-{len(made)}", attempt, ranks, world, **how))
        return made[-1]

    yield make
    for node in made:
        node.close()
