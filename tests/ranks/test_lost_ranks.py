"""Ranks that wait in their program wait for those that live, and not for those that are gone."""

import math
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flashckpt.errors import BoundaryError
from flashckpt.keeper.client import KeeperWait, WaitTimeouts
from flashckpt.keeper.protocol import Status
from flashckpt.options import Options
from flashckpt.ranks import joint_coordination
from flashckpt.ranks.coordination import SnapshotPolicy
from flashckpt.ranks.decisions import Decider
from flashckpt.ranks.joint_coordination import JointCoordination
from flashckpt.ranks.leader import Leader
from flashckpt.ranks.liveness import SILENT_S, ProcessId
from flashckpt.ranks.messages import NONE, Announcement, Gone, NodeMessage
from flashckpt.ranks.node_state import NodeState

pytestmark = pytest.mark.process
NODE = (4, 5)


class Node:
    """The board of two ranks: a process of its own leads, and this one is the other."""

    def __init__(self) -> None:
        self.memory = bytearray(NodeState.num_bytes(len(NODE)))
        self.node_state = NodeState(self.memory, NODE)
        self.node_state.format()
        self.leader = subprocess.Popen(["sleep", "600"])
        self.node_state.rows[0].live(ProcessId.of(self.leader.pid))
        snapshot_policy = SnapshotPolicy(every=1, persist_every=None, options=Options(grace="100ms"))
        attempt = SimpleNamespace(number=1)
        job, memory = SimpleNamespace(rank=5, world=8, node=NODE), self.memory
        self.pace = JointCoordination(
            cast(Any, memory), cast(Any, job), cast(Any, attempt), snapshot_policy, None
        )

    def kill_leader(self) -> None:
        self.leader.kill()
        self.leader.wait()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.kill_leader()


def test_save_waits_for_ranks_that_are_busy_for_longer_than_the_grace_period(node: Node) -> None:
    found: list[object] = []

    def call() -> None:
        try:
            node.pace.save_outside(5, math.inf)
        except BoundaryError as error:
            found.append(error)
        found.append("saved")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    time.sleep(0.3)  # the grace period is over
    assert not found
    node.node_state.announce(Announcement(number=1, agreed=5))
    thread.join(60)
    assert found == ["saved"]


def test_what_a_rank_that_is_gone_would_decide_is_not_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = node.pace
    assert (pace.lost, pace.awaits_others) == ("", True)
    monkeypatch.setattr(joint_coordination, "_LAST_WORD_S", 0.1)
    node.node_state.announce(Announcement(number=1, gone=Gone(ended=7)))
    assert pace.outcome(5, math.inf) is None, "it has let its run go before this boundary"
    assert (pace.lost, pace.awaits_others) == ("", True), "its parts are on their way"
    with pytest.raises(BoundaryError, match="not by rank 7"):
        pace.save_outside(5, math.inf)
    node.node_state.announce(Announcement(number=2, decided=5, complete=(5,), gone=Gone(ended=7)))
    assert pace.outcome(5, math.inf) == 5, "what it knew was decided before"
    node.node_state.announce(Announcement(number=3, decided=5, complete=(5,), gone=Gone(died=3)))
    assert (pace.lost, pace.awaits_others) == ("rank 3", False)
    assert pace.outcome(6, math.inf) is None
    with pytest.raises(BoundaryError, match="not by rank 3"):
        pace.save_outside(6, math.inf)
    # A node that was silent is heard of again.
    node.node_state.announce(Announcement(number=4, decided=5, complete=(5,)))
    assert pace.awaits_others
    node.kill_leader()
    assert (pace.lost, pace.awaits_others) == ("rank 4", False), "nobody is left who would announce it"
    assert pace.outcome(6, math.inf) is None
    node.node_state.rows[0].is_ended = 1
    assert pace.awaits_others
    assert pace.outcome(6, math.inf) is None, "in order, and it hears nothing for its node either"


def test_a_save_without_an_answer_is_an_error_once_its_boundary_is_decided(node: Node) -> None:
    pace, row = node.pace, node.node_state.row_of(5)
    row.enter(4)
    pace.request_save(5)
    assert pace.unanswered_save() is None, "its boundary is to come"
    row.enter(5)
    node.node_state.announce(Announcement(number=1, decided=5, complete=(4,), missed=(5, 3)))
    assert pace.unanswered_save() is None, "wait() waits for the snapshot of this boundary"
    row.settled = 5
    assert "rank 3 has none of its boundary" in str(pace.unanswered_save())
    row.enter(6)
    row.settled = 6
    node.node_state.announce(Announcement(number=2, decided=6, complete=(4, 6)))
    assert pace.unanswered_save() is None, "a later one answers it"
    pace.request_save(7)
    row.enter(7)
    row.settled = 7
    assert pace.unanswered_save() is None, "it is not decided"


def test_a_leader_says_which_of_its_ranks_has_died(node: Node) -> None:
    """One that has let its run go may end as it likes."""
    first, second = node.node_state.rows
    assert Leader(node.node_state).message().gone == Gone()
    node.kill_leader()
    assert Leader(node.node_state).message().gone == Gone(died=4)
    first.is_ended = 1
    assert Leader(node.node_state).message().gone == Gone(ended=4)
    second.live(ProcessId(os.getpid(), 1, ProcessId.of(os.getpid()).namespace))
    assert Leader(node.node_state).message().gone == Gone(died=5, ended=4), "its pid is another's now"


def test_rank_0_names_the_dead_and_a_node_that_says_nothing_any_more() -> None:
    nodes = [(0, 1), (2, 3), (4, 5)]
    decider, number = Decider(nodes, 1, None, 0.01), 0

    def gone_after(seconds: float, *silent: int, died: int = NONE) -> Gone:
        nonlocal number
        for _ in range(round(seconds)):
            number += 1
            said = [
                None
                if node in silent
                else NodeMessage(number=number, gone=Gone(died=died * (node == 1) or NONE))
                for node in range(3)
            ]
            found = decider.round(said, float(number)).gone
        return found

    assert gone_after(5) == Gone()
    assert gone_after(SILENT_S / 2, 2) == Gone()
    assert gone_after(5) == Gone()
    assert gone_after(SILENT_S + 2, 2) == Gone(died=4)
    assert gone_after(2) == Gone()
    assert gone_after(2, died=3) == Gone(died=3)


def test_parts_of_ranks_that_died_meanwhile_are_given_no_minutes() -> None:
    waits = Status(waiting=(5,), for_others=(5,))
    now = iter((0.0, 2.0, 2.0))
    wait = KeeperWait(waits, WaitTimeouts.same(1.0, others_s=600.0), step=5, clock=lambda: next(now))
    assert not wait.has_stalled(waits)
    assert wait.has_stalled(waits, awaits_others=False)
