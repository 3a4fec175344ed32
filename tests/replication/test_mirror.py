"""The remote of a run gets whole steps of this run alone, and keeps those that it is to keep."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flashckpt import crashpoints
from flashckpt.commit import attempts, collect, starting
from flashckpt.commit.attempts import open_run
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.collect import Knowledge
from flashckpt.commit.verification import verify
from flashckpt.errors import RunError, RunHeldError
from flashckpt.format.names import AttemptName, CommitName, attempt_folder, claim_path, shard_name
from flashckpt.format.records import Start
from flashckpt.options import Keep, Remote
from flashckpt.replication.mirror import Mirror, Mirrored
from flashckpt.replication.run_copy import StepCopier, bring, needed
from flashckpt.store import open_store
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.commit.runs import HOLDER, attempt_at, name_of
from tests.folders import records
from tests.replication.copied import add, delete, of_step, visible


class Tiers:
    """A run and its remote, each a folder."""

    def __init__(self, folder: Path) -> None:
        self.run, self.there = folder / "run", folder / "remote"
        self.source: Store = LocalStore(str(self.run))
        self.target: Store = LocalStore(str(self.there))
        open_run(self.source, create=True)
        self.attempt = attempt_at(self.source)

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


def brought(mirror: Mirror, wanted: CommitName | None = None) -> Mirrored:
    return mirror.bring(wanted, always)


def test_the_newest_is_copied_and_what_is_old_there_goes(tiers: Tiers) -> None:
    mirror = tiers.mirror(keep=2)
    assert brought(mirror).copied is None, "there is nothing yet"
    assert attempts.newest_started(tiers.target) == tiers.attempt, "whose run it is, is known at once"
    pruned: list[int] = []
    for step in (1, 2, 3, 4):
        tiers.add(step)
        found = brought(mirror)
        assert found.newest == name_of(step, tiers.attempt)
        pruned += found.pruned
    assert (tiers.steps(), pruned) == ([3, 4], [1, 2])
    assert records(tiers.there) == [name_of(3, tiers.attempt), name_of(4, tiers.attempt)]
    assert {path.name for path in (tiers.there / "data").glob("*/*")} == {f"{step:010d}" for step in (3, 4)}
    assert brought(mirror).copied is None
    theirs = of_step(tiers.run)
    assert all(theirs[name] == data for name, data in of_step(tiers.there).items() if "alive" not in name)


def test_what_a_killed_copy_left_there_goes_once_newer_steps_are_kept(tiers: Tiers) -> None:
    tiers.add(4)
    brought(tiers.mirror(keep=2))
    left = tiers.there / name_of(5, tiers.attempt).id.data_folder
    left.mkdir()
    (left / shard_name(0, "5f2c0a1b")).write_bytes(b"cut off")
    mirror = tiers.mirror(keep=2)
    for step in (6, 7, 8):
        tiers.add(step)
        brought(mirror)
    assert tiers.steps() == [7, 8]
    assert not left.exists()


def test_a_remote_of_compressed_shards(tiers: Tiers) -> None:
    remote = Remote(url=str(tiers.there), keep=Keep(last=2), compress="zstd")
    mirror, tiers.target = Mirror(tiers.source, remote), open_store(tiers.there)
    for step in (1, 2, 3):
        tiers.add(step)
        assert brought(mirror).newest == name_of(step, tiers.attempt)
    assert tiers.steps() == [2, 3]
    names = [path.name for path in tiers.there.rglob("*") if ".safetensors" in path.name]
    assert len(names) == 2 * 2 + 2, "of two steps and two ranks; constants"
    assert all(name.endswith(".zst") for name in names)
    back = Mirror(tiers.target, Remote(url=str(tiers.there.parent / "back")))
    assert brought(back).newest == name_of(3, tiers.attempt)


def test_a_step_that_is_not_due_is_not_copied(tiers: Tiers) -> None:
    asked: list[tuple[int | None, int]] = []

    def is_due(last: int | None, step: int) -> bool:
        asked.append((last, step))
        return step >= 5

    mirror = tiers.mirror()
    for step in (4, 5, 6):
        tiers.add(step)
        mirror.bring(None, is_due)
    assert asked == [(None, 4), (None, 5), (5, 6)]
    assert tiers.steps() == [5, 6]


def test_what_was_wanted_and_is_gone_gives_way_to_the_newest(tiers: Tiers) -> None:
    tiers.add(1, 2, 3, 4)
    delete(tiers.source, name_of(2, tiers.attempt))
    assert brought(tiers.mirror(), name_of(2, tiers.attempt)).newest == name_of(4, tiers.attempt)
    assert brought(tiers.mirror(), name_of(3, tiers.attempt)).copied is not None
    assert tiers.steps() == [3, 4]


def test_a_step_that_is_deleted_while_it_is_copied(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process, which does not know of the copy: a newer one takes its place."""
    mirror = tiers.mirror()
    tiers.add(1)
    copy = StepCopier._send_step

    def pruned(copier: StepCopier, *arguments: object) -> None:
        monkeypatch.undo()
        assert mirror.copying == name_of(1, tiers.attempt)
        tiers.add(2)
        delete(tiers.source, name_of(1, tiers.attempt))
        copy(copier, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(StepCopier, "_send_step", pruned)
    assert brought(mirror).newest == name_of(2, tiers.attempt)
    assert mirror.copying is None
    assert tiers.steps() == [2]


def test_retention_spares_the_step_that_is_copied_and_no_other(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = tiers.mirror()
    tiers.add(1, 2)
    copy, keep = StepCopier._send_step, Keep(last=2)

    def prune() -> list[int]:
        pinned = [] if mirror.copying is None else [mirror.copying.id]
        plan, _ = collect.prune(tiers.source, tiers.attempt, keep, Knowledge(pinned=pinned))
        return [each.step for each in plan.expired]

    def beside(copier: StepCopier, *arguments: object) -> None:
        monkeypatch.undo()
        tiers.add(3, 4, 5)
        assert prune() == [1, 3]
        copy(copier, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(StepCopier, "_send_step", beside)
    assert brought(mirror).newest == name_of(2, tiers.attempt)
    assert tiers.steps() == [2]
    assert prune() == [2]


def test_attempts_that_follow_are_known_there_though_nothing_was_due(tiers: Tiers) -> None:
    """Many restarts between two copies: the records of the first are swept here, and it is one history."""
    mirror = tiers.mirror()
    tiers.add(1)
    brought(mirror)
    for step in range(2, 40):
        last = name_of(step - 1, tiers.attempt)
        tiers.attempt, found = starting.claim(tiers.source, HOLDER)
        starting.start(tiers.source, tiers.attempt, last.id, last.step, 1, found, near=99)
        tiers.add(step)
        attempts.mark_ended(tiers.source, last.attempt, "dead")
        collect.prune(tiers.source, tiers.attempt, Keep(last=2))
        mirror.bring(None, lambda last, step: step == 39)
    assert tiers.steps() == [1, 39]
    assert Catalogue.of(tiers.target).visible()[1:] == Catalogue.of(tiers.source).visible()[1:]


def test_a_remote_that_was_deleted_is_begun_anew(tiers: Tiers) -> None:
    mirror = tiers.mirror()
    tiers.add(1)
    brought(mirror)
    shutil.rmtree(tiers.there)
    tiers.add(2)
    brought(mirror)
    assert tiers.steps() == [2]
    assert open_run(tiers.target, create=False) == open_run(tiers.source, create=False)


def test_a_remote_of_another_run_is_not_touched(tiers: Tiers) -> None:
    other = open_run(tiers.target, create=True)
    tiers.add(1)
    with pytest.raises(RunError, match=f"holds another run \\({other.run_id}\\)"):
        brought(tiers.mirror())
    assert [path.name for path in tiers.there.iterdir()] == ["run.json"]


def gone_on(tiers: Tiers, attempt: AttemptName, step: int) -> None:
    """A copy of the run, whose first step is on the remote already, goes on from it by itself."""
    second = Tiers.__new__(Tiers)
    second.run, second.there = tiers.run.parent / "copy", tiers.there
    shutil.copytree(tiers.run, second.run, dirs_exist_ok=True)
    second.source, second.target = LocalStore(str(second.run)), tiers.target
    second.attempt = attempt_at(second.source, name_of(step, attempt), world=2)
    second.add(step + 1)
    brought(second.mirror())


def gone_on_meanwhile(tiers: Tiers, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, while the next copy is on its way."""

    def goes_on(point: str) -> None:
        if point == "copy.records":
            monkeypatch.undo()
            gone_on(tiers, tiers.attempt, step)

    monkeypatch.setattr(crashpoints, "point", goes_on)


def as_attempted(tiers: Tiers) -> None:
    """This run goes on itself: two attempts have one number."""
    tiers.attempt = attempt_at(tiers.source, name_of(1, tiers.attempt), world=2)


@pytest.mark.parametrize("also_here", [as_attempted, lambda tiers: None], ids=["it restarts", "it goes on"])
def test_of_two_jobs_the_one_that_is_too_late_is_told(
    tiers: Tiers, also_here: Callable[[Tiers], None]
) -> None:
    mirror = tiers.mirror()
    tiers.add(1)
    brought(mirror)
    gone_on(tiers, tiers.attempt, 1)
    before = of_step(tiers.there)
    also_here(tiers)
    tiers.add(7)
    with pytest.raises(RunError, match="another job|trained by itself"):
        brought(mirror)
    assert of_step(tiers.there) == before


def test_a_step_that_comes_after_another_job_has_gone_on_is_told_and_stays_as_a_branch(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent for an hour; the node is given up, and another goes on from the step before."""
    mirror = tiers.mirror()
    tiers.add(1)
    brought(mirror)
    tiers.add(7)
    late = tiers.attempt

    gone_on_meanwhile(tiers, 1, monkeypatch)
    with pytest.raises(RunError, match=rf"Step 7 .* came too late .*flashckpt branch \S+ 7@{late}:7"):
        brought(mirror)
    assert tiers.steps() == [1, 2]
    assert visible(tiers.source) == [1, 7]
    with pytest.raises(RunError, match="trained by another job"):
        brought(mirror)
    # What the message says.
    starting.branch(tiers.target, name_of(7, late), HOLDER)
    assert tiers.steps() == [1, 7]
    assert verify(tiers.target).ok


def test_a_late_step_that_the_other_job_went_on_from_stays(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = tiers.mirror()
    tiers.add(1)
    brought(mirror)
    tiers.add(7)

    gone_on_meanwhile(tiers, 7, monkeypatch)
    assert brought(mirror).newest == name_of(7, tiers.attempt)
    assert tiers.steps() == [1, 7, 8]


def test_a_remote_that_is_trained_on_itself_is_left_alone(tiers: Tiers) -> None:
    tiers.add(1)
    brought(tiers.mirror())
    attempts.beat(tiers.target, tiers.attempt, 5)
    tiers.attempt = attempt_at(tiers.source, name_of(1, tiers.attempt), world=2)
    tiers.add(2)
    first, ended = Catalogue.of(tiers.target).visible()[0].attempt, threading.Event()

    def beat() -> None:
        count = 6
        while not ended.wait(0.05):
            attempts.beat(tiers.target, first, count)
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
    assert brought(tiers.mirror()).copied is not None
    new = LocalStore(str(tiers.there.parent / "new"))
    open_run(new, create=True, run_id=open_run(tiers.source, create=False).run_id)
    name, mirror = (
        attempts.claim(new, HOLDER, above=tiers.attempt.number),
        Mirror(new, Remote(url=str(tiers.there))),
    )
    assert brought(mirror) == Mirrored(of=None), "it is about to say what it goes on from"
    assert attempts.newest_claimed(tiers.target) == tiers.attempt
    bring(new, needed(Catalogue.of(tiers.target), tiers.attempt))
    starting.start(new, name, name_of(1, tiers.attempt).id, 1, 2, Catalogue.of(new))
    assert brought(mirror).newest == name_of(1, tiers.attempt)
    assert attempts.newest_started(tiers.target) == name


def test_an_attempt_that_goes_while_its_records_are_read_is_none(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention sweeps those without a step at any time."""
    first, read_start = tiers.attempt, attempts.read_start
    tiers.attempt = attempt_at(tiers.source, name_of(0, first), world=2)
    tiers.add(1)
    source = Catalogue.of(tiers.source)

    def swept(store: Store, name: AttemptName) -> Start | None:
        found = read_start(store, name)
        if name == first:
            store.remove_tree(attempt_folder(first))
            store.remove(claim_path(first.number))
        return found

    monkeypatch.setattr(attempts, "read_start", swept)
    assert [each.name for each in needed(source, tiers.attempt)] == [tiers.attempt]
