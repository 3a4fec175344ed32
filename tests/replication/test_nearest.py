"""Which of two stores a run goes on in: the one that is ahead, never two histories mixed, and never a new run
where the other does not answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flashckpt.catalogue.changes import highest_number
from flashckpt.commit import attempts, lineage
from flashckpt.commit.choice import Choice, Offer, RankOffers
from flashckpt.commit.lineage import RemoteRun, next_start
from flashckpt.commit.view import View, newest_version, open_run
from flashckpt.errors import RunError, UnusableRunError
from flashckpt.format.catalogue import CATALOGUE, EMPTY, Folder
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.replication.mirror import check_unanswered, prepare
from flashckpt.replication.run_copy import StepCopier, copy_run
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.commit.runs import HOLDER, attempt_at, commit, name_of, new_run
from tests.contracts.flat_store import FlatStore
from tests.replication.copied import visible
from tests.run_view import begin_as, next_name


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


def added(store: Store, step: int, parent: CommitName | None = None, above: int = 0) -> AttemptName:
    """A step, of an attempt of its own."""
    attempt = next_name(store, above)
    begin(store, attempt, parent)
    attempts.mark_ended(store, attempt, "closed")
    assert commit(store, step, attempt)
    return attempt


def follow(source: Store, remote: Store) -> None:
    """The remote follows the newest attempt of a home, which has no step of it yet."""
    StepCopier(source, remote).follow()


def newest(store: Store) -> AttemptName | None:
    """The newest attempt that has begun."""
    return View.of(store).attempt


def begin(store: Store, name: AttemptName, parent: CommitName | None, **how: Any) -> None:
    snapshot, step = (None, 0) if parent is None else (parent.id, parent.step)
    attempts.reserve(store, name)
    begin_as(View.of(store), name, snapshot, step, owner=HOLDER, **how)


@dataclass
class Started:
    """A start that has a name: what was found of the mirror, and which steps it tries."""

    local: Store
    remote: RemoteRun
    ours: AttemptName

    def choose(self, *rows: RankOffers, is_saved: bool = True) -> Choice:
        return next_start(View.of(self.local), rows or None, self.remote, is_saved=is_saved)

    def begin(self, parent: CommitName | None) -> None:
        begin(self.local, self.ours, parent, lead=newest_version(self.remote.store))


def start(local: Store, remote: Store) -> Started:
    """Ask the mirror; then reserve a name in the home."""
    problem, above, found, known = "", 0, run_id(local), EMPTY
    try:
        there = prepare(local, remote, found)
        known = there.view.catalogue
        found, above = known.run_id, highest_number(known, there.writers)
    except OSError as error:
        problem = str(error)
        check_unanswered(local, remote, found, problem)
    open_run(local, create=True, run_id=found)
    ours = next_name(local, above)
    attempts.reserve(local, ours)
    return Started(local, RemoteRun(store=remote, problem=problem, known=known), ours)


def mirror_leads(local: Store, remote: Store) -> bool:
    choice = next_start(View.of(local), remote=RemoteRun(store=remote))
    return choice.lead is not choice.home


def steps_of(choice: Choice) -> list[int]:
    assert choice.refusal is None
    return list(dict.fromkeys(each.step for each in choice.candidates))


def refused(choice: Choice) -> str:
    assert choice.refusal is not None
    return str(choice.refusal)


def run_id(store: Store) -> str:
    try:
        return open_run(store, create=False).run_id
    except (RunError, OSError):
        return ""


def is_empty(store: LocalStore) -> bool:
    return not Path(store.url).exists() or not list(Path(store.url).iterdir())


def test_a_first_start_has_one_id_in_both(local: LocalStore, remote: Store) -> None:
    found = prepare(local, remote, "").view.run_id
    assert open_run(remote, create=False).run_id == found
    assert is_empty(local)
    began = start(local, remote)
    assert run_id(local) == found
    assert steps_of(began.choose()) == []


def test_an_empty_home_takes_the_mirrors_attempts(local: LocalStore, remote: Store) -> None:
    source = new_run(Path(local.url).with_name("source"))
    first = added(source, 10)
    second = added(source, 20, name_of(10, first))
    copy_run(source, remote, all_steps=True)

    began = start(local, remote)
    assert run_id(local) == run_id(source)
    assert began.ours.number > second.number
    assert steps_of(began.choose()) == [20, 10]
    began.begin(name_of(20, second))
    assert View.of(local).is_in_lineage(name_of(10, first).id)
    assert not mirror_leads(local, remote)
    # What it commits goes to the remote, and is its newest.
    commit(local, 30, began.ours)
    copy_run(local, remote, 30)
    assert visible(remote) == [10, 20, 30]


def test_a_process_that_only_looks_changes_nothing(local: LocalStore, remote: Store) -> None:
    source = new_run(Path(local.url).with_name("source"))
    added(source, 10)
    copy_run(source, remote)
    open_run(local, create=True, run_id=run_id(source))
    before = sorted(Path(local.url).rglob("*"))
    assert mirror_leads(local, remote)
    assert sorted(Path(local.url).rglob("*")) == before


@pytest.mark.parametrize("left", ["reserved", "begun", "nothing"])
def test_what_was_cut_off_is_done_again(local: LocalStore, remote: Store, left: str) -> None:
    """A start in an empty home that died before it began, or before it committed."""
    source = new_run(Path(local.url).with_name("source"))
    first = added(source, 10)
    copy_run(source, remote)
    open_run(local, create=True, run_id=run_id(source))
    if left != "nothing":
        other = AttemptName(first.number, "0badcafe")
        attempts.reserve(local, other)
        if left == "begun":
            begin(local, other, None)
    began = start(local, remote)
    assert steps_of(began.choose()) == [10]
    began.begin(name_of(10, first))
    assert commit(local, 20, began.ours)
    copy_run(local, remote)
    assert visible(remote) == [10, 20]


@pytest.mark.parametrize("is_known", [False, True], ids=["of another attempt", "of the mirror's newest"])
def test_what_ranks_hold_counts_if_the_mirror_knows_its_attempt(
    local: LocalStore, remote: Store, *, is_known: bool
) -> None:
    source = new_run(Path(local.url).with_name("source"))
    last = added(source, 10)
    copy_run(source, remote)
    held = name_of(20, last if is_known else AttemptName(7, "0badcafe"))
    row, began = RankOffers(0, (Offer(id=held.id, step=20),)), start(local, remote)
    for is_saved in (False, True):
        choice = began.choose(row, is_saved=is_saved)
        assert not choice.needs_save
        assert steps_of(choice) == ([20, 10] if is_known else [10])


def test_what_the_home_alone_knows_is_tried_first(local: LocalStore, remote: Store) -> None:
    open_run(local, create=True)
    first = added(local, 10)
    copy_run(local, remote)
    second = added(local, 20, name_of(10, first))
    choice = start(local, remote).choose()
    assert not mirror_leads(local, remote)
    assert steps_of(choice) == [20, 10]
    assert newest(local) == second


def test_a_branch_of_the_home_is_not_overruled(local: LocalStore, remote: Store) -> None:
    """The newest attempt in the mirror is one of this home that committed nothing: after the branch, the home
    has forgotten it."""
    open_run(local, create=True)
    first = added(local, 10)
    commit(local, 20, first)
    copy_run(local, remote)
    after = attempt_at(local, name_of(20, first))
    follow(local, remote)
    attempts.mark_ended(local, after, "dead")
    made = lineage.branch(local, 10)
    began = start(local, remote)
    assert after not in View.of(local).attempts()
    choice = began.choose()
    assert not mirror_leads(local, remote)
    assert steps_of(choice) == [10]
    assert newest(local) == made


@pytest.mark.parametrize("has_step", [False, True], ids=["no step", "a step before it"])
def test_an_attempt_of_the_remote_without_a_step_yields_to_a_newer_one_here(
    local: LocalStore, remote: Store, has_step: bool
) -> None:
    """A job dies twice before it commits: the home forgets the first attempt, which the remote follows."""
    open_run(local, create=True)
    before = name_of(10, added(local, 10)) if has_step else None
    if has_step:
        copy_run(local, remote)
    else:
        open_run(remote, create=True, run_id=run_id(local))
    first = attempt_at(local, before)
    follow(local, remote)
    second = attempt_at(local, before)
    began = start(local, remote)
    assert first not in View.of(local).attempts()

    choice = began.choose()
    assert not mirror_leads(local, remote)
    assert steps_of(choice) == [10][not has_step :]
    assert newest(local) == second
    began.begin(before)
    assert commit(local, 20, began.ours)
    copy_run(local, remote, 20)
    assert visible(remote) == [10, 20][not has_step :]


def test_a_run_that_was_trained_further_elsewhere_resumes_from_there(
    local: LocalStore, remote: Store, tmp_path: Path
) -> None:
    open_run(local, create=True)
    first = added(local, 10)
    copy_run(local, remote)
    elsewhere = LocalStore(str(tmp_path / "elsewhere"))
    copy_run(remote, elsewhere)
    second = added(elsewhere, 20, name_of(10, first))
    copy_run(elsewhere, remote)

    began = start(local, remote)
    choice = began.choose()
    assert mirror_leads(local, remote)
    assert steps_of(choice) == [20, 10]
    began.begin(name_of(20, second))
    assert View.of(local).is_in_lineage(name_of(20, second).id)


def test_an_attempt_elsewhere_without_a_step_hides_no_step_here(
    local: LocalStore, remote: Store, tmp_path: Path
) -> None:
    """Another node began from the mirror and died before it committed; step 50 is in this home alone."""
    open_run(local, create=True)
    first = added(local, 10)
    copy_run(local, remote)
    commit(local, 50, first)
    elsewhere = LocalStore(str(tmp_path / "elsewhere"))
    copy_run(remote, elsewhere)
    attempt_at(elsewhere, name_of(10, first))
    follow(elsewhere, remote)
    began = start(local, remote)
    choice = began.choose()
    assert not mirror_leads(local, remote)
    assert steps_of(choice) == [50, 10]
    began.begin(name_of(50, first))
    assert commit(local, 60, began.ours)
    copy_run(local, remote, all_steps=True)
    assert visible(remote) == [10, 50, 60]


def test_two_ways_are_never_mixed(local: LocalStore, remote: Store, tmp_path: Path) -> None:
    open_run(local, create=True)
    first = added(local, 10)
    copy_run(local, remote)
    elsewhere = LocalStore(str(tmp_path / "elsewhere"))
    copy_run(remote, elsewhere)
    theirs = added(elsewhere, 20, name_of(10, first))
    copy_run(elsewhere, remote)
    mine = added(local, 30, name_of(10, first), above=theirs.number)
    began = start(local, remote)
    before = sorted(Path(local.url).rglob("*"))
    text = refused(began.choose())
    assert f"step 30 of attempt {mine} is in the history of the home alone" in text
    assert f"step 20 of attempt {theirs} in that of the mirror alone" in text
    assert f"its mirror (remote={remote.url})" in text
    assert sorted(Path(local.url).rglob("*")) == before
    assert visible(remote) == [10, 20]


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
        self.theirs = added(elsewhere, 20, name_of(10, self.first))
        copy_run(elsewhere, self.remote)

    def begin(self, above: int = 0) -> None:
        self.mine = next_name(self.local, above)
        begin(self.local, self.mine, name_of(10, self.first), world=2)


@pytest.fixture
def apart(local: LocalStore, remote: Store, tmp_path: Path) -> Apart:
    return Apart(local, remote, tmp_path)


@pytest.mark.parametrize("above", [0, 5], ids=["of their number", "of a higher one"])
def test_an_attempt_that_committed_nothing_is_no_other_way(apart: Apart, above: int) -> None:
    apart.begin(above)
    for _ in range(2):  # the first start is killed before it begins
        began = start(apart.local, apart.remote)
        assert steps_of(began.choose()) == [20, 10]
        assert visible(apart.local) == [10]
    began.begin(name_of(20, apart.theirs))
    assert commit(apart.local, 30, began.ours)
    assert visible(apart.local) == [10, 30]
    copy_run(apart.local, apart.remote)
    assert visible(apart.remote) == [10, 20, 30]


def test_an_attempt_that_has_a_step_is_another_way(apart: Apart) -> None:
    apart.begin()
    assert commit(apart.local, 20, apart.mine)
    began = start(apart.local, apart.remote)
    before = sorted(Path(apart.local.url).rglob("*"))
    for is_saved in (False, True):
        assert "have diverged" in refused(began.choose(is_saved=is_saved))
    assert sorted(Path(apart.local.url).rglob("*")) == before


def test_a_mirror_without_a_step_does_not_hold_up_a_home_that_has_one(
    local: LocalStore, remote: Store
) -> None:
    """The newer attempt was trained in another folder, and has sent nothing yet."""
    open_run(local, create=True)
    mine = added(local, 10)
    elsewhere = LocalStore(f"{local.url}-elsewhere")
    open_run(elsewhere, create=True, run_id=run_id(local))
    for _ in range(2):
        attempt_at(elsewhere)
    open_run(remote, create=True, run_id=run_id(local))
    follow(elsewhere, remote)
    assert steps_of(start(local, remote).choose()) == [10]
    assert newest(local) == mine


def test_another_run_is_refused_before_it_begins(local: LocalStore, remote: Store) -> None:
    open_run(local, create=True)
    open_run(remote, create=True)
    before = sorted(Path(local.url).rglob("*"))
    with pytest.raises(UnusableRunError, match="different runs"):
        start(local, remote)
    assert sorted(Path(local.url).rglob("*")) == before


def test_nothing_begins_where_nobody_can_tell(local: LocalStore, tmp_path: Path) -> None:
    """The fault that loses weeks: a new node, and a remote that does not answer for a minute."""
    with pytest.raises(RunError, match="has no step, and the mirror .* cannot be read"):
        start(local, away(tmp_path))
    assert is_empty(local), "an id of its own would keep the remote's run out for good"


def test_what_is_here_is_gone_on_from_where_the_remote_is_away(local: LocalStore, tmp_path: Path) -> None:
    open_run(local, create=True)
    first = added(local, 10)
    began = start(local, away(tmp_path))
    [warning] = began.choose().warnings
    assert "cannot be read" in warning
    # It has gone on from a step that was the remote's alone, and died before it committed one of its own.
    begin(local, began.ours, name_of(40, first))
    assert "has step 10, which is older than" in refused(began.choose())
    row = RankOffers(0, (Offer(id=name_of(40, first).id, step=40),))
    assert steps_of(began.choose(row)) == [40, 10]


def test_a_run_without_steps_here_is_no_fresh_one_where_the_remote_is_away(
    local: LocalStore, tmp_path: Path
) -> None:
    open_run(local, create=True)
    assert "has no step" in refused(start(local, away(tmp_path)).choose())


def test_a_remote_without_its_catalogue_is_not_believed(local: LocalStore, remote: Store) -> None:
    open_run(local, create=True)
    added(local, 10)
    copy_run(local, remote)
    remote.remove_files(f"{CATALOGUE}/{each.name}" for each in remote.list(CATALOGUE))
    empty = LocalStore(f"{local.url}-new")
    for home in (local, empty):
        before = sorted(Path(local.url).rglob("*"))
        with pytest.raises(UnusableRunError, match="no catalogue"):
            start(home, remote)
        assert sorted(Path(local.url).rglob("*")) == before
    assert is_empty(empty)


def test_an_attempt_that_has_only_files_in_the_remote_counts_for_the_number(
    local: LocalStore, remote: Store
) -> None:
    open_run(local, create=True)
    first = added(local, 10)
    copy_run(local, remote)
    folder = Folder(AttemptName(7, "0badcafe"), name_of(20, first).id)
    remote.create(f"{folder.path}/rank-00000-5f2c0a1b.safetensors", b"cut off")
    assert start(local, remote).ours.number == 8
