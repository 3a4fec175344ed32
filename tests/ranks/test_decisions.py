"""What rank 0 decides, played through for many ranks: snapshots that all have, never overwritten, without
end; and one boundary at which all end, whatever is late, lost or missed."""

from functools import partial

import pytest

from flashckpt.ranks.decisions import Verdicts
from flashckpt.ranks.leader import Leader
from flashckpt.ranks.messages import NodeMessage
from flashckpt.ranks.node_state import NodeState, Table

from .simulated import Conditions, SimulatedJob


@pytest.mark.parametrize(
    "conditions",
    [
        Conditions(iteration_s=0.01, every="auto", persist_every="5s"),
        Conditions(misses=0.05, lost=0.2, late=0.3, persist_every=10),
        Conditions(slots=2, iteration_s=0.7),
    ],
    ids=["fast", "bad", "two-slots"],
)
def test_there_are_always_newer_steps_that_all_have(conditions: Conditions) -> None:
    job = SimulatedJob(1, conditions)
    job.run(40.0)
    assert len(job.complete) >= 6
    before = len(job.complete)
    job.run(80.0)
    assert len(job.complete) >= before + 6
    if conditions.persist_every is not None:
        whole = [each for each, ranks in job.persisted.items() if len(ranks) == len(job.by_rank)]
        assert len(whole) >= 3


def test_the_steps_that_were_ordered_are_those_that_are_persisted() -> None:
    job = SimulatedJob(8, Conditions(every="auto", persist_every=60))
    job.run(80.0)
    whole = [each for each, ranks in job.persisted.items() if len(ranks) == len(job.by_rank)]
    assert len(whole) > 3
    assert all(each % 60 == 0 for each in whole)


def test_nobody_misses_once_the_pace_is_set() -> None:
    """Spacing above the round trip and above the slowest rank's copies: snapshots find a slot."""
    job = SimulatedJob(4, Conditions(iteration_s=0.05, landing_s=0.4))
    job.run(30.0)
    missed = sum(len(rank.missed) for rank in job.by_rank)
    for rank in job.by_rank:
        rank.missed.clear()
    job.run(90.0)
    assert len(job.complete) > 40
    assert sum(len(rank.missed) for rank in job.by_rank) == 0, missed


def test_ranks_that_miss_different_steps_do_not_fill_up() -> None:
    """Each of 8 ranks misses 3 % of the boundaries. If a step that not all have kept its slot, all slots
    would hold such steps in the end, and no step would ever be whole again."""
    job = SimulatedJob(1, Conditions(nodes=1, ranks=8, misses=0.03, iteration_s=1.0, look_s=0.2))
    job.run(400.0)
    assert job.complete[-1] > 350


def test_a_rank_that_learns_late_voids_the_steps_that_it_lacks_and_no_others() -> None:
    job = SimulatedJob(2, Conditions(nodes=2, ranks=2))
    late = job.by_rank[3]
    late.hears_from = 20.0
    job.run(19.0)
    assert job.complete == [], "nothing is complete before it has slots"
    assert not any(rank.taken for rank in job.by_rank), "and nobody takes what cannot be complete"
    late.hears_from = 0.0
    job.run(35.0)
    assert len(job.complete) >= 4
    # It is deaf for a while, in which the others go on.
    late.hears_from = 40.0
    before = job.complete[-1]
    job.run(39.0)
    late.hears_from = 0.0
    job.run(60.0)
    assert job.complete[-1] > before + 50
    assert max(late.taken) in range(max(job.by_rank[0].taken) - 20, max(job.by_rank[0].taken) + 20)


def test_the_loss_of_rank_0_stops_no_training() -> None:
    job = SimulatedJob(3)
    job.run(20.0)
    job.is_deaf = True
    at = job.by_rank[0].boundary_index
    job.run(60.0)
    assert job.by_rank[0].boundary_index > at + 100
    job.check_held()
    job.is_deaf = False
    newest = job.complete[-1]
    job.run(80.0)
    assert job.complete[-1] > newest + 100, "the slots that were kept meanwhile are found again"


@pytest.mark.parametrize("seed", range(6))
def test_all_ranks_end_at_one_boundary(seed: int) -> None:
    conditions = Conditions(
        nodes=3, ranks=2, lost=0.3, late=0.3, misses=0.1, iteration_s=[0.002, 0.05, 1.5][seed % 3], every=None
    )
    job = SimulatedJob(seed, conditions)
    job.by_rank[1].slow = 1.5
    job.run(3.0 + job.random.random())
    for rank in job.random.sample(job.by_rank, 2):
        job.after(job.random.random(), partial(setattr, rank.row, "stop_asked", 15))
    job.run(300.0, lambda: job.all_ended)
    assert job.all_ended, f"they wait for ever: {[rank.row.progress for rank in job.by_rank]}"
    assert {rank.ended_at for rank in job.by_rank} == {job.proposed[-1]}


def test_a_stop_that_comes_too_soon_for_one_is_void_and_a_later_one_holds() -> None:
    """The node of the last rank hears of it after it has passed that boundary."""
    job = SimulatedJob(5, Conditions(nodes=3, ranks=1, every=None, iteration_s=0.01))
    job.run(5.0)
    slow = job.leaders[2]
    hear = slow.act_on
    job.by_rank[0].row.stop_asked = 15

    def late(announced: object, count: list[int] = []) -> None:  # noqa: B006
        count.append(1)
        if len(count) > 6:
            hear(announced)  # type: ignore[arg-type]

    slow.act_on = late  # type: ignore[method-assign]
    job.run(300.0, lambda: job.all_ended)
    assert job.all_ended
    assert len(job.proposed) > 1
    assert {rank.ended_at for rank in job.by_rank} == {job.proposed[-1]}


def test_a_rank_that_died_is_promised_for_by_its_node() -> None:
    """Nobody waits for its answer. (The others end where it cannot, and what they have there is not
    complete.)"""
    job = SimulatedJob(6, Conditions(nodes=2, ranks=2, every=None))
    job.run(3.0)
    job.by_rank[3].is_dead = True
    job.by_rank[0].row.stop_asked = 15
    job.run(20.0)
    assert job.boards[0].confirmed == job.boards[1].confirmed == job.proposed[-1]


@pytest.mark.long
def test_a_thousand_ranks() -> None:
    job = SimulatedJob(7, Conditions(nodes=128, ranks=8, iteration_s=1.0, look_s=0.8, misses=0.0001))
    job.run(26.0)
    assert len(job.complete) > 1
    job.by_rank[777].row.stop_asked = 15
    job.run(60.0, lambda: job.all_ended)
    assert job.all_ended


def test_a_boundary_that_nodes_took_as_other_steps_is_void_and_a_rank_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its parts would never meet, and what it overwrites in the slots is the last one that counts."""
    verdicts = Verdicts([(0, 1), (2, 3)])
    one = NodeMessage(judged=4, sealed=(3, 4), steps=(103, 104))
    found = verdicts.judge([one, NodeMessage(judged=4, sealed=(3, 4), steps=(103, 105))])
    assert (found.complete, found.incomplete) == ((3,), (4,))
    assert verdicts.missed == (4, 2)
    assert "rank 2 counts step 105 where rank 0 counts step 104" in caplog.text


def test_a_boundary_that_ranks_of_a_node_took_as_other_steps_is_missed() -> None:
    """What they divide stays divided."""
    node_state = NodeState(bytearray(NodeState.num_bytes(2)), (4, 5))
    node_state.format()
    for row, step in zip(node_state.rows, (103, 104), strict=True):
        row.enter(3)
        row.settled = 3
        row.publish(3, {2: Table(7, step=102), 3: Table(7, step=step)})
    said = Leader(node_state).message()
    assert (said.sealed, said.steps, said.missed) == ((2,), (102,), (3, 5))
    assert not node_state.holds_whole
