"""Ranks that are declared to hold the same leaves and do not are found before anything is begun."""

from typing import Any

import pytest

from flashckpt.errors import StateError
from flashckpt.ranks.agreement import check_alike
from flashckpt.ranks.coordination import Tables
from flashckpt.ranks.job import Job
from tests.ranks.together import each_rank

SAME = {"model.weight": "float32 [4, 4]", "model.bias": "float32 [4]"}


def checked(tables: list[Tables]) -> list[Any]:
    def operation(job: Job) -> None:
        check_alike(job, {}, tables[job.rank])

    return each_rank(len(tables), operation)


def test_replicas_that_are_alike_pass_whatever_else_ranks_hold() -> None:
    assert checked([{(0, 1, 2): SAME}] * 3) == [None] * 3
    # A mesh: replicas of two shards each, in sets that lie apart; and a rank that has none.
    other = {"model.weight": "float32 [4, 4] at [4, 0] of [8, 4]"}
    assert checked([{(0, 2): SAME}, {(1, 3): other}, {(0, 2): SAME}, {(1, 3): other}, {}]) == [None] * 5


@pytest.mark.parametrize(
    ("of_rank_2", "said"),
    [
        ({"model.weight": "float32 [4, 5]", "model.bias": "float32 [4]"}, "float32 [4, 5] on rank 2"),
        ({"model.weight": "float32 [4, 4]"}, "model.bias: float32 [4] on rank 0, not there on rank 2"),
        ({**SAME, "more": "int64 []"}, "more: not there on rank 0, int64 [] on rank 2"),
    ],
)
def test_what_differs_is_named_on_all_ranks(of_rank_2: dict[str, str], said: str) -> None:
    everyone = (0, 1, 2, 3)
    for error in checked([{everyone: SAME}, {everyone: SAME}, {everyone: of_rank_2}, {everyone: SAME}]):
        assert type(error) is StateError
        assert said in str(error)


def test_a_rank_that_declares_none_of_it_is_named() -> None:
    for error in checked([{(0, 1, 5): SAME}, {(0, 1, 5): SAME}, {}, {}, {}, {(0, 5): SAME}]):
        assert type(error) is StateError
        assert "Ranks 0 and 5 are declared" in str(error)
