"""Which steps are tried by all ranks, in which order: what each can read, from wherever it has it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashckpt.commit import lineage
from flashckpt.commit.steps import commit, publish_part
from flashckpt.errors import MismatchError, UnusableRunError
from flashckpt.format.names import AttemptName
from flashckpt.ranks.candidates import Content, RanksVoter, Readable, common, decide, is_behind, verdict
from flashckpt.ranks.job import Job
from flashckpt.restore.step_choice import Ballot, Candidate, StepChoice
from tests.commit.runs import attempt_at, new_run, part_of, publish
from tests.ranks.together import LIMIT_S, each_rank

A, B = "000001-aaaaaaaa", "000002-bbbbbbbb"


def memory(step: int, boundary: int, attempt: str = A) -> Readable:
    return Readable(step, attempt, boundary)


def stored(step: int, attempt: str = A, *, is_marked: bool = False) -> Readable:
    return Readable(step, attempt, None, is_marked)


def test_the_newest_that_all_have_comes_first() -> None:
    rows = [[memory(7, 7), memory(6, 6), stored(4)], [memory(6, 6), memory(5, 5), stored(4)]]
    found, said = decide(rows)
    assert found == [Content(6, A, 6), Content(4, A, None)]
    assert "step 7" in said
    assert "rank 1" in said


def test_memory_on_one_rank_and_storage_on_another_is_one_content() -> None:
    rows = [[memory(6, 6), stored(6)], [stored(6)], [memory(6, 6)]]
    assert common(rows) == [Content(6, A, 6)]


def test_of_one_step_the_newer_boundary_comes_first_and_what_is_at_rest_last() -> None:
    rows = [[memory(6, 9), memory(6, 8), stored(6)]] * 2
    assert common(rows) == [Content(6, A, 9), Content(6, A, 8), Content(6, A, None)]


def test_boundaries_of_one_step_are_not_mixed() -> None:
    assert common([[memory(6, 9)], [memory(6, 8)]]) == []


def test_the_newer_attempt_comes_first_and_what_a_rank_has_marked_last() -> None:
    rows = [[stored(6, B), stored(6, A), stored(5, B)], [stored(6, A), stored(5, B), stored(6, B)]]
    assert [each.attempt for each in common(rows)] == [B, A, B]
    rows[1][2] = stored(6, B, is_marked=True)
    assert [(each.step, each.attempt) for each in common(rows)] == [(6, A), (5, B), (6, B)]


def test_a_mark_says_nothing_of_what_is_in_memory() -> None:
    rows = [[memory(6, 6), stored(5), stored(6, is_marked=True)]] * 2
    assert common(rows)[0] == Content(6, A, 6)


def test_ranks_that_list_beside_the_commit_of_a_newer_attempt_have_the_step_in_common(tmp_path: Path) -> None:
    """Two attempts of a lineage may commit one step: the end of an epoch has the number of its last batch."""
    store = new_run(tmp_path / "run")
    first = attempt_at(store)
    for step in (387, 388):
        publish(store, step, first)
        assert commit(store, step, first, 1)
    second = attempt_at(store, first, 388)

    def listed() -> list[Readable]:
        return [stored(each.step, str(each.attempt)) for each in lineage.sources(store, {})]

    before = listed()
    publish(store, 388, second)
    assert commit(store, 388, second, 1)
    assert common([before, listed()])[0] == Content(388, str(first), None)
    assert common([listed(), listed()])[0] == Content(388, str(second), None)


def far(step: int, attempt: str = A) -> Readable:
    return Readable(step, attempt, None, is_remote=True)


def test_a_step_is_read_nearest_and_then_by_all_from_the_remote() -> None:
    """What one rank finds damaged late, when others have read theirs nearer, all read once more."""
    rows = [[stored(6), far(6), stored(4)], [far(6), stored(4)]]
    assert common(rows) == [Content(6, A, None), Content(6, A, None, is_remote=True), Content(4, A, None)]
    assert common([[far(6)], [far(6)]]) == [Content(6, A, None)], "once is enough"
    assert common([[memory(6, 6)], [far(6)]]) == [Content(6, A, 6)]
    assert common([[stored(6), far(6)], [stored(6)]]) == [Content(6, A, None)]


def test_what_is_marked_here_is_taken_from_the_remote_in_its_place() -> None:
    marked = stored(6, is_marked=True)
    rows = [[far(6), stored(4), marked], [far(6), stored(4), marked]]
    assert [each.step for each in common(rows)] == [6, 6, 4]
    assert [each.step for each in common([[stored(4), marked]] * 2)] == [4, 6]


def test_each_rank_is_given_its_own_nearest_first(tmp_path: Path) -> None:
    attempt = AttemptName(1, "aaaaaaaa")
    near, there = Candidate(6, attempt), Candidate(6, attempt, is_remote=True)

    def deed(job: Job) -> Any:
        own = [near, there] if job.rank == 0 else [there]
        return RanksVoter(job).common(own, has_more=False, is_saved=False)

    assert each_rank(2, deed) == [[[near, there], [there]], [[there], [there]]]


def test_nothing_anywhere_is_a_fresh_run_and_so_is_memory_alone_that_not_all_have() -> None:
    assert decide([[], []]) == ([], "")
    found, said = decide([[memory(1, 1)], []])
    assert found == []
    assert "rank 1" in said


def test_memory_that_is_newer_than_what_all_can_read_is_waited_for_once_to_be_saved() -> None:
    assert is_behind([[memory(7, 7), stored(4)], [stored(4)]])
    assert is_behind([[memory(1, 1)], []])
    assert not is_behind([[memory(7, 7), stored(4)], [memory(7, 7), stored(4)]])
    assert not is_behind([[memory(7, 7)], [stored(7)]])
    assert not is_behind([[stored(7)], [stored(6)]]), "storage is as it is"


def test_committed_steps_that_not_all_can_read_are_no_fresh_run() -> None:
    with pytest.raises(UnusableRunError, match=r"step 4 .* cannot be read by rank 1"):
        decide([[stored(4)], []])
    with pytest.raises(UnusableRunError, match="none that every rank can read"):
        decide([[stored(4)], [stored(3)]])


def test_a_step_is_taken_where_all_have_loaded_the_same_boundary_of_it() -> None:
    def ballots(*boundaries: int | None) -> list[dict[str, object]]:
        return [
            {"boundary": each, "reason": "" if each is not None else "damaged", "untaken": [0, 1, []]}
            for each in boundaries
        ]

    assert verdict(ballots(5, 5, 5)) == ""
    assert verdict(ballots(5, None, 5)) == "rank 1 could not load it: damaged"
    assert "2 ranks" in verdict(ballots(None, None, 5))
    assert "4, 5" in verdict(ballots(5, 4, 5))


def test_leaves_that_no_rank_has_a_place_for_are_another_models() -> None:
    def ballots(*untaken: list[object]) -> list[dict[str, object]]:
        return [{"boundary": 5, "reason": "", "untaken": each} for each in untaken]

    lost: list[object] = [2, 77, ["model.b", "model.w"]]
    with pytest.raises(MismatchError, match=r"2 of its leaves .* \(model\.b, model\.w\)"):
        verdict(ballots(lost, lost))
    assert verdict(ballots(lost, [2, 78, ["model.c"]])) == "", "what one leaves another takes: stages"
    assert verdict(ballots(lost, [0, 1, []])) == ""


@pytest.mark.parametrize("lost", [[], ["model.c"]])
def test_what_every_rank_leaves_to_others_is_another_models(lost: list[str]) -> None:
    """The edge of a pipeline's stages was moved on to rank 2, which is as it was; and `lost` is nowhere."""
    here = [["model.a"], ["model.b"], ["model.d"]]
    left = [["model.b", "model.d", *lost], ["model.a", "model.d", *lost], []]

    def deed(job: Job) -> bool:
        elsewhere = tuple(left[job.rank])
        mine = Ballot(
            candidate=None, boundary=5, untaken=elsewhere, elsewhere=elsewhere,
            names=frozenset(here[job.rank]),
        )  # fmt: skip
        return job.together("loading", lambda: RanksVoter(job).vote(mine))

    found = each_rank(3, deed)
    if not lost:
        assert found == [True] * 3
        return
    for error in found:
        assert type(error) is MismatchError
        assert "1 of its leaves have no place on any rank (model.c)" in str(error)


_READABLE = st.builds(
    Readable,
    st.integers(1, 4),
    st.sampled_from([A, B]),
    st.one_of(st.none(), st.integers(1, 3)),
    st.booleans(),
    st.just(False),
) | st.builds(Readable, st.integers(1, 4), st.sampled_from([A, B]), st.none(), st.just(False), st.just(True))


@given(st.lists(st.lists(_READABLE, max_size=6), min_size=1, max_size=4))
def test_every_rank_can_read_each_of_them_and_none_is_missing(rows: list[list[Readable]]) -> None:
    found = common(rows)
    assert len(set(found)) == len(found)
    for content in found:
        for row in rows:
            at = [each for each in row if each.at == (content.step, content.attempt)]
            assert any(each.boundary in (content.boundary, None) for each in at)
            assert not content.is_remote or any(each.is_remote for each in at)
    everywhere = set.intersection(*({(*each.at, each.boundary) for each in row} for row in rows))
    assert everywhere <= {(each.step, each.attempt, each.boundary) for each in found}


class Listed(StepChoice):
    """Gives the first step that is tried."""

    def _try(self, content: Any) -> Any:
        return content[0].step


class Heard:
    """A store that says when it is first told something after `begins`."""

    def __init__(self, store: Any, begins: threading.Event, is_told: threading.Event) -> None:
        self._store, self._begins, self._is_told = store, begins, is_told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        if self._begins.is_set():
            self._is_told.set()


def test_steps_are_listed_once_the_keepers_of_all_nodes_have_saved(tmp_path: Path) -> None:
    """Rank 0's keeper is done first. What it finds before the other one's is done lacks the newest step, and
    all would go on from an older one."""
    store = new_run(tmp_path / "run")
    attempt = attempt_at(store)
    has_saved, has_spoken = threading.Event(), threading.Event()

    def save(step: int) -> None:
        publish_part(store, part_of(store, step, attempt, (0, 1), world=2))
        assert commit(store, step, attempt, 2)

    def keeper_of(rank: int) -> None:
        if rank == 0:
            has_saved.set()
            return
        # Whatever rank 0 does next, it has done: it waits for this one, or has listed what there is.
        assert has_spoken.wait(LIMIT_S)
        save(200)

    def deed(job: Job) -> Any:
        rank = job.rank
        if rank == 0:
            job.store = Heard(job.store, has_saved, has_spoken)
        return Listed(
            store, [], rank, lambda snapshot: None, 1, RanksVoter(job),
            save=lambda: keeper_of(rank), is_unsaved=lambda: rank == 1,
        ).choose()  # fmt: skip

    save(100)
    assert each_rank(2, deed) == [200, 200]
