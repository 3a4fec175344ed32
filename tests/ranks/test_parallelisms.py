"""Under each parallelism a rank's snapshot holds its own part, says which it is, and goes back to the bit."""

import json
from typing import Any

import pytest

from flashckpt.format.layout import Box, Leaf
from tests.coverage_of_boxes import check_coverage
from tests.ranks.launch import Launcher

pytestmark = [pytest.mark.dist, pytest.mark.process]
PROGRAM = "tests.ranks.parallelisms"
CASES = (
    "ddp", "ddp_with_experts", "fsdp2", "fsdp2_evaluated",
    "fsdp2_unsharded", "tp", "pipeline", "unlike_its_parameter", "fsdp1",
)  # fmt: skip
# With two dimensions of a mesh, with empty shards, or what is the same on two ranks.
OF_FOUR = (
    "hsdp", "fsdp2_and_tp", "tp_uneven", "expert_parallel", "fsdp2_of_columns", "fsdp2_tied",
    "fsdp2_evaluated_on_fewer", "fsdp1_flat", "fsdp1_evaluated",
)  # fmt: skip

Rows = dict[str, dict[int, dict[str, Leaf]]]  # case -> rank -> name -> leaf
Replicas = dict[str, dict[int, dict[str, tuple[int, ...]]]]


def told(launcher: Launcher, ranks: int, *cases: str) -> tuple[Rows, Replicas]:
    """Run the cases on so many ranks; what each rank said of its leaves."""
    ended = launcher.fork(PROGRAM, *cases, ranks=ranks).finished()
    leaves: Rows = {case: {} for case in cases}
    replicas: Replicas = {case: {} for case in cases}
    for each in ended:
        assert [line for line in each.out if line.startswith("same ")] == [f"same {case}" for case in cases]
        for line in each.out:
            kind, case, text = (line + "  ").split(" ", 2)
            if kind == "leaves":
                rows = json.loads(text)
                leaves[case][each.rank] = {row[0]: leaf_of(row) for row in rows}
                replicas[case][each.rank] = {row[0]: tuple(row[4]) for row in rows}
    return leaves, replicas


def leaf_of(row: list[Any]) -> Leaf:
    name, dtype, shape, box, _ = row
    where = Box(shape=tuple(box[0]), start=tuple(box[1])) if box else None
    return Leaf(name=name, dtype=dtype, shape=tuple(shape), box=where)


def check_whole(leaves: Rows, replicas: Replicas) -> None:
    """The boxes of all ranks are whole tensors, and each replica names the same ones."""
    for case, by_rank in leaves.items():
        assert check_coverage({rank: held.values() for rank, held in by_rank.items()}) == [], case
        for rank, names in replicas[case].items():
            for name, ranks in names.items():
                assert not ranks or (rank in ranks and len(ranks) > 1 and sorted(ranks) == list(ranks))
                for other in ranks:
                    assert replicas[case][other][name] == ranks, (case, name)
                    assert by_rank[other][name] == by_rank[rank][name], (case, name)


@pytest.mark.long
def test_on_four_ranks_each_goes_back_to_the_bit(launcher: Launcher) -> None:
    leaves, replicas = told(launcher, 4, *OF_FOUR, "ddp", "fsdp2", "tp")
    check_whole(leaves, replicas)
    assert replicas["hsdp"][1]["model.up.weight"] == (1, 3)
    assert replicas["fsdp2_and_tp"][3]["model.norm.weight"] == (2, 3)


def test_on_two_ranks_each_goes_back_to_the_bit(launcher: Launcher) -> None:
    leaves, replicas = told(launcher, 2, *CASES)
    check_whole(leaves, replicas)
    every = (0, 1)

    def of(case: str, name: str, rank: int = 0) -> tuple[int, ...]:
        return replicas[case][rank][name]

    assert of("ddp", "model.0.up.weight") == of("ddp", "optimizer.state.model.0.up.weight.exp_avg") == every
    assert of("ddp", "model.0.down.bias") == every
    assert of("ddp", "model.1.running_mean") == of("ddp", "model.1.num_batches_tracked") == ()
    assert of("ddp_with_experts", "model.1.weight") == ()
    assert of("ddp_with_experts", "optimizer.state.model.1.weight.exp_avg") == ()
    assert of("ddp_with_experts", "model.1.bias") == every
    assert of("fsdp2", "model.up.weight") == of("fsdp2", "optimizer.state.model.up.weight.exp_avg") == ()
    assert of("fsdp2", "optimizer.state.model.up.weight.step") == every
    assert of("tp", "model.norm.weight") == of("tp", "optimizer.state.model.norm.weight.exp_avg") == every
    assert of("tp", "model.up.weight") == ()
    assert of("unlike_its_parameter", "optimizer.state.model.up.weight.rows") == every
    assert of("unlike_its_parameter", "optimizer.state.model.up.weight.local") == ()
    assert {of("pipeline", n) for n in replicas["pipeline"][0]} == {()}
    layers = [n for r in every for n in leaves["pipeline"][r] if n.startswith("model.")]
    assert len(layers) == len(set(layers)) == 4 * 2
    # Whatever a module shows in the place of a parameter, the leaves are the same.
    plain = {r: {n: leaf for n, leaf in held.items()} for r, held in leaves["fsdp2"].items()}
    for shown in ("fsdp2_evaluated", "fsdp2_unsharded"):
        assert leaves[shown] == plain, shown
