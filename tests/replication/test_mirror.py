"""The remote of a run gets whole steps of this run alone, and keeps those that it is to keep."""

import shutil
import threading
from pathlib import Path

import pytest

from flashckpt import crashpoints
from flashckpt.commit import attempts, commit_step
from flashckpt.commit.commit_step import KEEP_ALL
from flashckpt.commit.verification import verify
from flashckpt.commit.view import View, open_run
from flashckpt.errors import RunError, RunHeldError
from flashckpt.format.names import CommitName
from flashckpt.options import Keep, Remote
from flashckpt.replication.mirror import Mirror
from flashckpt.replication.run_copy import Copied, StepCopier
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.commit.runs import HOLDER, attempt_at, folder_of, name_of, publish
from tests.replication.copied import add, delete, files, visible
from tests.run_view import begin_as, next_name


class Tiers:
    """A run and its remote, each a folder."""

    def __init__(self, folder: Path, name: str = "run", parent: CommitName | None = None) -> None:
        self.run, self.there = folder / name, folder / "remote"
        self.source: Store = LocalStore(str(self.run))
        self.target: Store = LocalStore(str(self.there))
        open_run(self.source, create=True)
        self.attempt = attempt_at(self.source, parent)

    def mirror(self, keep: int = 9) -> Mirror:
        return Mirror(self.source, Remote(url=str(self.there), keep=Keep(last=keep)))

    def add(self, *steps: int) -> None:
        for step in steps:
            add(self.source, step, self.attempt)

    def steps(self) -> list[int]:
        """Those of the remote, every byte of which is looked at."""
        assert verify(self.target).ok
        return visible(self.target)


@pytest.fixture
def tiers(scratch: str) -> Tiers:
    return Tiers(Path(scratch))


def always(last: int | None, step: int) -> bool:
    return True


def brought(mirror: Mirror) -> CommitName | None:
    """The newest step of the remote, once it has got what is here."""
    mirror.bring(always)
    return mirror.newest


def test_a_step_that_is_deleted_while_it_is_copied(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process, which does not know of the copy: a newer one takes its place."""
    mirror = tiers.mirror()
    tiers.add(1)
    copy = StepCopier.copy

    def pruned(copier: StepCopier, name: CommitName) -> Copied:
        monkeypatch.undo()
        assert mirror.copying == name == name_of(1, tiers.attempt)
        tiers.add(2)
        delete(tiers.source, name)
        return copy(copier, name)

    monkeypatch.setattr(StepCopier, "copy", pruned)
    assert brought(mirror) == name_of(2, tiers.attempt)
    assert mirror.copying is None
    assert tiers.steps() == [2]


def test_a_newer_checkpoint_of_the_same_step_is_copied(tiers: Tiers) -> None:
    """As after a `save()` in an epoch's own code, before the epoch's end."""
    mirror = tiers.mirror()
    tiers.add(3)
    assert brought(mirror) == name_of(3, tiers.attempt)
    for rank in (0, 1):
        publish(tiers.source, 3, tiers.attempt, boundary=4, ranks=(rank,), world=2)
    newer = name_of(3, tiers.attempt, 4)
    assert commit_step.commit(View.of(tiers.source), folder_of(tiers.source, newer.id), KEEP_ALL)
    assert brought(mirror) == newer
    assert View.of(tiers.target).visible()[-1] == newer


def test_a_remote_that_was_deleted_is_begun_anew(tiers: Tiers) -> None:
    mirror = tiers.mirror()
    tiers.add(1)
    brought(mirror)
    shutil.rmtree(tiers.there)
    tiers.add(2)
    brought(mirror)
    assert tiers.steps() == [2]
    assert open_run(tiers.target, create=False).run_id == open_run(tiers.source, create=False).run_id


def gone_on(tiers: Tiers, step: int) -> None:
    """A copy of the run, whose first step is on the remote already, goes on from it by itself."""
    shutil.copytree(tiers.run, tiers.run.parent / "copy", dirs_exist_ok=True)
    second = Tiers(tiers.run.parent, "copy", name_of(step, tiers.attempt))
    second.add(step + 1)
    brought(second.mirror())


@pytest.mark.parametrize("restarts", [True, False])
def test_of_two_jobs_the_one_that_is_too_late_is_told(tiers: Tiers, restarts: bool) -> None:
    """One that restarts has the attempt number of the other."""
    mirror = tiers.mirror()
    tiers.add(1)
    brought(mirror)
    gone_on(tiers, 1)
    before = files(tiers.there)
    if restarts:
        tiers.attempt = attempt_at(tiers.source, name_of(1, tiers.attempt))
    tiers.add(7)
    with pytest.raises(RunError, match="Another job|have diverged"):
        brought(mirror)
    assert files(tiers.there) == before


@pytest.mark.parametrize("step", [1, 7], ids=["from the step before", "from this step"])
def test_a_step_that_comes_after_another_job_has_gone_on_is_told_and_stays_here(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The keeper sends the step for an hour. Meanwhile a job on another node continues the run."""
    mirror = tiers.mirror()
    tiers.add(1)
    brought(mirror)
    tiers.add(7)

    def goes_on(point: str) -> None:
        if point == "copy.part":
            monkeypatch.undo()
            gone_on(tiers, step)

    monkeypatch.setattr(crashpoints, "point", goes_on)
    with pytest.raises(RunError, match="taken over"):
        brought(mirror)
    assert tiers.steps() == [1, step + 1]
    assert visible(tiers.source) == [1, 7]
    with pytest.raises(RunError, match="Another job trains this run"):
        brought(mirror)
    assert verify(tiers.target).ok


def test_a_remote_that_is_trained_on_itself_is_left_alone(tiers: Tiers) -> None:
    tiers.add(1)
    brought(tiers.mirror())
    theirs, ended = attempt_at(tiers.target, name_of(1, tiers.attempt), world=2), threading.Event()
    parent, tiers.attempt = name_of(1, tiers.attempt), next_name(tiers.source, theirs.number)
    begin_as(View.of(tiers.source), tiers.attempt, parent.id, 1, world=2, owner=HOLDER)
    tiers.add(2)

    def beat() -> None:
        count = 6
        while not ended.wait(0.05):
            attempts.beat(tiers.target, theirs, count)
            count += 1

    keeper = threading.Thread(target=beat)
    keeper.start()
    try:
        with pytest.raises(RunHeldError):
            brought(tiers.mirror())
    finally:
        ended.set()
        keeper.join()
    assert tiers.steps() == [1]


def test_an_attempt_that_takes_up_what_is_there_is_no_other_job(tiers: Tiers) -> None:
    tiers.add(1)
    assert brought(tiers.mirror()) is not None
    new = LocalStore(str(tiers.there.parent / "new"))
    open_run(new, create=True, run_id=open_run(tiers.source, create=False).run_id)
    there, mirror = View.of(tiers.target), Mirror(new, Remote(url=str(tiers.there)))
    name = next_name(new, above=there.catalogue.attempt.number)
    attempts.reserve(new, name)
    assert (mirror.bring(always), mirror.follows) == (None, None), "its attempt has not begun yet"
    assert View.of(tiers.target).attempt == tiers.attempt
    first = name_of(1, tiers.attempt)
    begin_as(View.of(new), name, first.id, 1, world=2, owner=HOLDER, lead=there.catalogue)
    assert brought(mirror) == first
    assert View.of(tiers.target).attempt == name
