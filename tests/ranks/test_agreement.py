"""Which steps are tried by all ranks, in which order: what each can read, from wherever it has it."""

import threading
from pathlib import Path
from typing import Any

import pytest

from flashckpt.commit.view import View
from flashckpt.errors import MismatchError
from flashckpt.format.layout import Leaf
from flashckpt.format.names import AttemptName
from flashckpt.ranks.agreement import RanksAgreement, verdict
from flashckpt.ranks.job import Job
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_choice import StepChoice
from tests.commit.runs import attempt_at, commit, name_of, new_run
from tests.ranks.together import LIMIT_S, each_rank
from tests.restore.snapshots import AnyLayout

A = AttemptName(1, "aaaaaaaa")


def test_a_step_is_taken_where_all_could_load_it() -> None:
    def proposals(*could: bool) -> list[dict[str, object]]:
        return [{"reason": "" if each else "damaged", "untaken": [0, 1, []]} for each in could]

    assert verdict(proposals(True, True, True)) == ""
    assert verdict(proposals(True, False, True)) == "rank 1 could not load it: damaged"
    assert "2 ranks" in verdict(proposals(False, False, True))


def test_leaves_that_no_rank_has_a_place_for_are_another_models() -> None:
    def proposals(*untaken: list[object]) -> list[dict[str, object]]:
        return [{"reason": "", "untaken": each} for each in untaken]

    lost: list[object] = [2, 77, ["model.b", "model.w"]]
    with pytest.raises(MismatchError, match=r"2 of its leaves .* \(model\.b, model\.w\)"):
        verdict(proposals(lost, lost))
    assert verdict(proposals(lost, [2, 78, ["model.c"]])) == "", "what one leaves another takes: stages"
    assert verdict(proposals(lost, [0, 1, []])) == ""


@pytest.mark.parametrize("lost", [[], ["model.c"]])
def test_what_every_rank_leaves_to_others_is_another_models(lost: list[str]) -> None:
    """The edge of a pipeline's stages was moved on to rank 2, which is as it was; and `lost` is nowhere."""
    here = [["model.a"], ["model.b"], ["model.d"]]
    left = [["model.b", "model.d", *lost], ["model.a", "model.d", *lost], []]

    def operation(job: Job) -> bool:
        elsewhere = tuple(left[job.rank])
        leaves = {name: Leaf(name=name, dtype="int8", shape=()) for name in here[job.rank]}
        mine = Snapshot(
            step=1, attempt=A, boundary=1, tier="local", leaves=leaves, values={}, untaken=elsewhere,
            elsewhere=elsewhere,
        )  # fmt: skip
        return job.together("loading", lambda: RanksAgreement(job).vote("", mine))

    found = each_rank(3, operation)
    if not lost:
        assert found == [True] * 3
        return
    for error in found:
        assert type(error) is MismatchError
        assert "1 of its leaves have no place on any rank (model.c)" in str(error)


class Listed(StepChoice):
    """Gives the first step that is tried."""

    def _try(self, content: Any) -> Any:
        return content[0].name.step


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
        assert commit(store, step, attempt, ranks=(0, 1), world=2)

    def keeper_of(rank: int) -> None:
        if rank == 0:
            has_saved.set()
            return
        # Whatever rank 0 does next, it has done: it waits for this one, or has listed what there is.
        assert has_spoken.wait(LIMIT_S)
        save(200)

    def operation(job: Job) -> Any:
        rank = job.rank
        if rank == 0:
            job.store = Heard(job.store, has_saved, has_spoken)
        return Listed(
            View.of(store), [], rank, lambda snapshot: None, AnyLayout(), 1, RanksAgreement(job),
            save=lambda: keeper_of(rank), unsaved=lambda: [name_of(200, attempt)] if rank == 1 else [],
        ).choose()  # fmt: skip

    save(100)
    assert each_rank(2, operation) == [200, 200]
