"""Which of two stores a run goes on in: the one that is ahead, never two histories mixed, and never a new run
where the other does not answer."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from flashckpt.commit import attempts, holder, lineage, retention
from flashckpt.commit.attempts import open_run
from flashckpt.commit.lineage import VisibleStep
from flashckpt.errors import RunError, UnusableRunError
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Claim
from flashckpt.memory.region import region_name
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from flashckpt.tiers.attempt_records import bring, needed
from flashckpt.tiers.nearest import RemoteRun, check_reached, is_ahead, look, take_over, unanswered
from flashckpt.tiers.run_copy import copy_run
from tests.commit.runs import HOLDER, attempt_at, commit, new_run, part_of, publish
from tests.contracts.flat_store import FlatStore


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "local"))


@pytest.fixture(params=["folder", "flat"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    folder = tmp_path / "remote"
    return LocalStore(str(folder)) if request.param == "folder" else FlatStore(f"flat://{folder}")


def away(tmp_path: Path) -> Store:
    """A store that gives an error for whatever it is asked."""
    (tmp_path / "file").write_bytes(b"")
    return LocalStore(str(tmp_path / "file" / "run"))


def added(store: Store, step: int, parent: AttemptName | None = None, begins: int = 0) -> AttemptName:
    """A step, of an attempt of its own."""
    attempt = attempt_at(store, parent, begins)
    attempts.mark_ended(store, attempt, "closed")
    assert commit(store, step, attempt)
    return attempt


def looked(local: Store, remote: Store) -> RemoteRun:
    try:
        return look(local, remote, run_id(local))[1]
    except OSError as error:
        return unanswered(local, remote, run_id(local), str(error))


def run_id(store: Store) -> str:
    try:
        return open_run(store, create=False).run_id
    except RunError:
        return ""


def claimed(store: Store, above: int) -> AttemptName:
    return attempts.claim(store, HOLDER, above=above)


def is_empty(store: LocalStore) -> bool:
    return not Path(store.url).exists() or not list(Path(store.url).iterdir())


def test_a_first_start_has_one_id_in_both(local: LocalStore, remote: Store) -> None:
    found, seen = look(local, remote, "")
    assert open_run(remote, create=False).run_id == found
    assert is_empty(local)
    assert (seen.newest, seen.steps, seen.above, seen.problem) == (None, (), 0, "")


def test_an_empty_folder_is_told_of_the_remotes_attempts(local: LocalStore, remote: Store) -> None:
    source = new_run(Path(local.url).with_name("source"))
    first = added(source, 10)
    second = added(source, 20, first, 10)
    copy_run(source, remote, all_steps=True)

    found, seen = look(local, remote, "")
    assert found == run_id(source)
    assert seen.steps == (VisibleStep(20, second), VisibleStep(10, first))
    assert RemoteRun.heard(remote, seen.told()) == seen
    open_run(local, create=True, run_id=found)
    ours = claimed(local, seen.above)
    assert ours.number > second.number
    take_over(local, seen, ours)
    assert attempts.newest_started(local) == second
    bound = {each.attempt: each.last_step for each in attempts.bounds(local)}
    assert all(each.step <= bound[each.attempt] for each in seen.steps)
    attempts.start(local, ours, second, 20, 1)
    assert not is_ahead(local, looked(local, remote))
    # What it commits goes to the remote, and is its newest.
    commit(local, 30, ours)
    copy_run(local, remote, 30)
    assert [each.step for each in lineage.visible(remote)] == [10, 20, 30]


@pytest.mark.parametrize("left", ["claim", "claim of another", "nothing"])
def test_what_was_cut_off_is_done_again(local: LocalStore, remote: Store, left: str) -> None:
    """A start that was killed while it told the folder, or an older one that died before it began."""
    source = new_run(Path(local.url).with_name("source"))
    newest = added(source, 10)
    copy_run(source, remote)
    open_run(local, create=True, run_id=run_id(source))
    if left == "claim":
        attempts.claim_as(local, newest, HOLDER)
    elif left == "claim of another":
        attempts.claim_as(local, AttemptName(newest.number, "0badcafe"), HOLDER)
    seen = looked(local, remote)
    take_over(local, seen, claimed(local, seen.above))
    assert attempts.newest_started(local) == newest
    assert attempts.read_claim(local, newest).attempt == newest


def test_what_the_local_store_knows_it_is_not_told_again(local: LocalStore, remote: Store) -> None:
    open_run(local, create=True)
    first = added(local, 10)
    copy_run(local, remote)
    before = looked(local, remote)
    second = added(local, 20, first, 10)
    seen = looked(local, remote)
    assert not is_ahead(local, before)
    assert not is_ahead(local, seen)
    take_over(local, seen, claimed(local, seen.above))
    assert attempts.newest_started(local) == second


def test_a_branch_of_the_local_run_is_not_overruled(local: LocalStore, remote: Store) -> None:
    open_run(local, create=True)
    first = added(local, 10)
    commit(local, 20, first)
    copy_run(local, remote)
    made = lineage.branch(local, 10)
    seen = looked(local, remote)
    assert not is_ahead(local, seen)
    assert seen.steps == (VisibleStep(20, first),)
    assert seen.visible_in(local) == []
    assert attempts.newest_started(local) == made


@pytest.mark.parametrize("has_step", [False, True], ids=["no step", "a step before it"])
def test_an_attempt_of_the_remote_without_a_step_yields_to_a_newer_one_here(
    local: LocalStore, remote: Store, has_step: bool
) -> None:
    """A job dies twice before it commits: the next claim here removes the first one's records, which the
    remote has."""
    open_run(local, create=True)
    before, step = (added(local, 10), 10) if has_step else (None, 0)
    if has_step:
        copy_run(local, remote)
    else:
        open_run(remote, create=True, run_id=run_id(local))
    first = attempt_at(local, before, step)
    bring(remote, needed(local, first))
    attempt_at(local, before, step)
    assert retention.sweep_dead(local) == [first]

    seen = looked(local, remote)
    assert seen.newest == first
    assert not is_ahead(local, seen)
    ours = claimed(local, seen.above)
    take_over(local, seen, ours)
    attempts.start(local, ours, before, step, 1)
    assert commit(local, 20, ours)
    copy_run(local, remote, 20)
    assert [each.step for each in lineage.visible(remote)] == [10, 20][not has_step :]


def test_a_run_that_has_gone_on_elsewhere_is_gone_on_with_there(
    local: LocalStore, remote: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_run(local, create=True)
    first = added(local, 10)
    copy_run(local, remote)
    commit(local, 50, first)  # never got there
    elsewhere = LocalStore(str(tmp_path / "elsewhere"))
    copy_run(remote, elsewhere)
    second = added(elsewhere, 20, first, 10)
    copy_run(elsewhere, remote)

    seen = looked(local, remote)
    assert is_ahead(local, seen)
    ours = claimed(local, seen.above)
    take_over(local, seen, ours)
    attempts.mark_ended(local, ours, "dead")
    assert attempts.newest_started(local) == second
    assert "step 50" in caplog.text
    assert "flashckpt branch" in caplog.text
    lineage.branch(local, 50, first)
    assert [each.step for each in lineage.visible(local)] == [10, 50], "nothing was deleted"


def test_two_ways_are_never_mixed(local: LocalStore, remote: Store, tmp_path: Path) -> None:
    open_run(local, create=True)
    first = added(local, 10)
    copy_run(local, remote)
    elsewhere = LocalStore(str(tmp_path / "elsewhere"))
    copy_run(remote, elsewhere)
    added(elsewhere, 20, first, 10)
    copy_run(elsewhere, remote)
    mine = added(local, 30, first, 10)
    before = sorted(Path(local.url).rglob("*"))
    with pytest.raises(
        UnusableRunError, match=rf"attempt {mine} is known here alone.*with step 20.*steps of both stay.*move"
    ):
        looked(local, remote)
    assert sorted(Path(local.url).rglob("*")) == before
    assert [each.step for each in lineage.visible(remote)] == [10, 20]


@dataclass
class Apart:
    """A run that went on in the remote, as `theirs`, while an attempt here, `mine`, saved nothing."""

    local: LocalStore
    remote: Store
    tmp_path: Path
    first: AttemptName = field(init=False)
    theirs: AttemptName = field(init=False)
    mine: AttemptName = field(init=False)

    def __post_init__(self) -> None:
        open_run(self.local, create=True)
        self.first = added(self.local, 10)
        copy_run(self.local, self.remote)
        elsewhere = LocalStore(str(self.tmp_path / "elsewhere"))
        copy_run(self.remote, elsewhere)
        self.theirs = added(elsewhere, 20, self.first, 10)
        copy_run(elsewhere, self.remote)

    def start(
        self,
        *,
        host: str = "",
        world: int = 1,
        above: int = 0,
        ended: str = "",
        boot: str = "",
        runtime: str = f"/gone/flashckpt-{os.geteuid()}/{'0' * 32}",
    ) -> None:
        me = replace(
            HOLDER, host=host or holder.here().host, boot_id=boot or holder.here().boot_id, runtime=runtime
        )
        self.mine = attempts.claim(self.local, me, above=above)
        attempts.start(self.local, self.mine, self.first, 10, world)
        if ended == "closed":
            attempts.mark_ended(self.local, self.mine, "closed")

    def look(self, *, in_memory: bool = False) -> RemoteRun:
        return look(self.local, self.remote, run_id(self.local), lambda: in_memory)[1]


@pytest.fixture
def apart(local: LocalStore, remote: Store, tmp_path: Path) -> Apart:
    return Apart(local, remote, tmp_path)


@pytest.mark.parametrize("above", [0, 5], ids=["of their number", "of a higher one"])
@pytest.mark.parametrize("how", [{"ended": "closed", "world": 2}, {}, {"boot": "before"}])
def test_an_attempt_that_saved_nothing_is_no_other_way(apart: Apart, above: int, how: dict[str, Any]) -> None:
    apart.start(above=above, **how)
    seen = apart.look()
    assert is_ahead(apart.local, seen)
    assert RemoteRun.heard(apart.remote, seen.told()) == seen
    for _ in range(2):  # the first start is killed before its own start.json
        ours = claimed(apart.local, seen.above)
        take_over(apart.local, seen, ours)
        assert attempts.newest_started(apart.local) == apart.theirs
        assert [each.step for each in lineage.visible(apart.local)] == [10]
        attempts.mark_ended(apart.local, ours, "dead")
        seen = apart.look()
    attempts.start(apart.local, ours, apart.theirs, 20, 1)
    assert commit(apart.local, 30, ours)
    assert [each.step for each in lineage.visible(apart.local)] == [10, 30]
    copy_run(apart.local, apart.remote)
    assert [each.step for each in lineage.visible(apart.remote)] == [10, 20, 30]


@pytest.mark.parametrize(
    "why",
    [
        "in memory",
        "a part",
        "a step",
        "on another machine",
        "of several nodes",
        "a step of one before it",
        "in another runtime folder",
        "its keeper's, without a name",
        "on another machine, begun, and closed",
    ],
)
def test_an_attempt_that_may_have_something_is_another_way(apart: Apart, why: str) -> None:
    if why == "a step of one before it":
        apart.first = added(apart.local, 30, apart.first, 10)
    runtime = RuntimeFolder.open(str(apart.tmp_path), "1" * 32)
    apart.start(
        host="another" if "on another machine" in why else "",
        ended="closed" if "closed" in why else "",
        world=2 if why == "of several nodes" else 1,
        runtime=runtime.path,
    )
    if why == "in another runtime folder":
        (Path(runtime.path) / region_name(0, 1, 7)).touch()
    keeper = LifeLock.acquire(runtime, "keeper.lock") if "keeper" in why else None
    if why == "a part":
        publish(apart.local, 20, apart.mine)
    if "begun" in why:
        part_of(apart.local, 20, apart.mine)
    if why == "a step":
        assert commit(apart.local, 20, apart.mine)
    before = sorted(Path(apart.local.url).rglob("*"))
    with pytest.raises(UnusableRunError, match="gone different ways"):
        apart.look(in_memory=why == "in memory")
    assert sorted(Path(apart.local.url).rglob("*")) == before
    if keeper is not None:
        (Path(runtime.path) / "keeper.sock").touch()  # stays where all were killed
        keeper.release(runtime)
        assert is_ahead(apart.local, apart.look())
    runtime.close()


def test_where_the_remote_has_no_step_nobody_is_told_to_begin_anew(local: LocalStore, remote: Store) -> None:
    """The newer attempt was trained on another node's disk, and has sent nothing yet."""
    open_run(local, create=True)
    added(local, 10)
    elsewhere = new_run(Path(local.url).with_name("elsewhere"))
    for _ in range(2):
        theirs = attempt_at(elsewhere)
    open_run(remote, create=True, run_id=run_id(local))
    bring(remote, needed(elsewhere, theirs))
    with pytest.raises(UnusableRunError, match=rf"{theirs} in the remote alone, and has no step") as error:
        looked(local, remote)
    assert "start the job where the folder is" in str(error.value)
    assert "away" not in str(error.value)


def test_what_is_saved_after_the_look_is_another_way(apart: Apart) -> None:
    """By a keeper that was stopped."""
    apart.start(above=5)
    seen = apart.look()
    publish(apart.local, 20, apart.mine)
    with pytest.raises(UnusableRunError, match="gone different ways"):
        take_over(apart.local, seen, claimed(apart.local, seen.above))
    assert attempts.newest_started(apart.local) == apart.mine


def test_another_run_is_refused(local: LocalStore, remote: Store) -> None:
    open_run(local, create=True)
    open_run(remote, create=True)
    with pytest.raises(UnusableRunError, match="different runs"):
        looked(local, remote)


def test_nothing_begins_where_nobody_can_tell(local: LocalStore, tmp_path: Path) -> None:
    """The fault that loses weeks: a new node, and a remote that does not answer for a minute."""
    with pytest.raises(RunError, match="neither a fresh start nor an older step"):
        looked(local, away(tmp_path))
    assert is_empty(local), "an id of its own would keep the remote's run out for good"


def test_what_is_here_is_gone_on_from_where_the_remote_is_away(
    local: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_run(local, create=True)
    first = added(local, 10)
    seen = looked(local, away(tmp_path))
    assert seen.problem
    take_over(local, seen, claimed(local, seen.above))
    check_reached(local, seen, 10)
    assert "cannot be read" in caplog.text
    with pytest.raises(RunError, match="no step here"):
        check_reached(local, seen, None)
    # It has gone on from a step that was the remote's alone, and died before it committed one of its own.
    attempts.start(local, claimed(local, 5), first, 40, 1)
    with pytest.raises(RunError, match="gone on from step 40.*here is step 10"):
        check_reached(local, seen, 10)
    check_reached(local, seen, 40)


def test_a_remote_without_its_records_is_not_believed(local: LocalStore, remote: Store) -> None:
    open_run(local, create=True)
    newest = added(local, 10)
    copy_run(local, remote)
    remote.remove(f"attempts/{newest}/start.json")
    seen = looked(local, remote)
    assert "lost records" in seen.problem
    assert not seen.steps


def test_a_claim_that_never_started_in_the_remote_counts_for_the_number(
    local: LocalStore, remote: Store
) -> None:
    open_run(local, create=True)
    added(local, 10)
    copy_run(local, remote)
    name = AttemptName(7, "0badcafe")
    remote.create("attempts/000007.json", Claim(attempt=name, holder=HOLDER).to_bytes())
    assert claimed(local, looked(local, remote).above).number == 8
