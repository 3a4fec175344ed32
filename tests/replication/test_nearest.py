"""What a start asks a mirror before it begins. Which of the two stores leads: tests/commit/test_choice.py."""

from pathlib import Path

import pytest

from flashckpt.catalogue.changes import highest_number
from flashckpt.commit import attempts
from flashckpt.commit.view import open_run
from flashckpt.errors import RunError, UnusableRunError
from flashckpt.format.catalogue import CATALOGUE, Folder
from flashckpt.format.names import AttemptName
from flashckpt.replication.mirror import prepare
from flashckpt.replication.run_copy import copy_run
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, commit, name_of
from tests.contracts.flat_store import FlatStore
from tests.run_view import next_name


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "local"))


@pytest.fixture(params=["folder", "flat"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    folder = tmp_path / "remote"
    return LocalStore(str(folder)) if request.param == "folder" else FlatStore(f"flat://{folder}")


def added(store: Store, step: int) -> AttemptName:
    """A step, of an attempt of its own."""
    attempt = attempt_at(store)
    attempts.mark_ended(store, attempt, "closed")
    assert commit(store, step, attempt)
    return attempt


def start(local: Store, remote: Store) -> AttemptName:
    """Ask the mirror; then reserve a name in the home."""
    there = prepare(local, remote, run_id(local))
    known = there.view.catalogue
    open_run(local, create=True, run_id=known.run_id)
    ours = next_name(local, highest_number(known, there.writers))
    attempts.reserve(local, ours)
    return ours


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
    start(local, remote)
    assert run_id(local) == found


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
    assert start(local, remote).number == 8
