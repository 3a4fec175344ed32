"""How attempts get their names, begin and end."""

import itertools
import os
import re
import time
from pathlib import Path

import pytest

from flashckpt.catalogue.changes import Launch
from flashckpt.commit import attempts
from flashckpt.commit.attempts import beat, mark_ended
from flashckpt.commit.tidying import remove_ledgers, temporary_files, tidy
from flashckpt.commit.view import HOME, View, has_run
from flashckpt.errors import RunHeldError, SupersededError, UnusableRunError
from flashckpt.format.catalogue import CATALOGUE, NO_ATTEMPT
from flashckpt.format.names import ALIVE, MAX_ATTEMPT, AttemptName, SnapshotId, alive_path
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.commit.runs import attempt_at, commit, name_of


def test_of_two_starts_one_begins(store: LocalStore) -> None:
    first, one, two = View.of(store), run_view.next_name(store), run_view.next_name(store)
    first.after(HOME.begin(first.catalogue, one, (), Launch(), after=NO_ATTEMPT))
    # A start that looked for its checkpoint after the other one had begun must not take its place, either.
    for seen, name in itertools.product((first, View.of(store)), (two, AttemptName(9, "0" * 8))):
        with pytest.raises(RunHeldError, match=f"{one} has started meanwhile"):
            seen.after(HOME.begin(seen.catalogue, name, (), Launch(), after=NO_ATTEMPT))
    assert View.of(store).attempt == one
    for name in (one, AttemptName(9, "0" * 8)):
        attempts.check_newest(View.of(store), name)
    with pytest.raises(SupersededError, match=f"{one} has taken over"):
        attempts.check_newest(View.of(store), two)


def test_a_start_does_not_begin_behind_what_came_or_went_while_it_read(store: LocalStore) -> None:
    first = attempt_at(store)
    assert commit(store, 10, first)
    seen, ids = View.of(store), [name_of(step, first).id for step in (10, 20)]
    assert commit(store, 20, first)

    def begin(seen: View, parent: SnapshotId) -> View:
        name = run_view.next_name(store)
        begun = HOME.begin(seen.catalogue, name, (parent,), Launch(), after=first, is_here=True)
        return seen.after(begun)

    with pytest.raises(RunHeldError, match=f"Step 20 was committed by attempt {first}"):
        begin(seen, ids[0])
    seen = View.of(store)
    run_view.delete(store, name_of(20, first))
    with pytest.raises(RunHeldError, match=f"{re.escape(str(ids[1]))} was removed"):
        begin(seen, ids[1])
    assert View.of(store).attempt == first
    assert begin(View.of(store), ids[0]).parent == ids[0]


@pytest.mark.parametrize("days", [-10, 0, 10])
def test_a_clock_that_is_days_apart_takes_no_file_that_is_being_written(
    store: LocalStore, tmp_path: Path, days: int
) -> None:
    """The clock of the store."""
    attempt_at(store)
    young, left = tmp_path / f"run/.assets.json.{'a' * 16}.tmp", tmp_path / f"run/.probe-{'c' * 16}"
    young.write_bytes(b"{")
    left.write_bytes(b"1")
    now_s = time.time() + 86400 * days
    for path in (young, *(tmp_path / "run" / ALIVE).iterdir()):
        os.utime(path, (now_s, now_s))
    os.utime(left, (now_s - 2 * 86400, now_s - 2 * 86400))
    # That of a store which is ahead makes every file younger.
    assert [path for path, _ in temporary_files(store)] == ([] if days > 0 else [left.name])


def test_ledgers_of_the_oldest_attempts_go(store: LocalStore) -> None:
    known, gone = attempt_at(store), [AttemptName(number, "0badcafe") for number in range(2, 72)]
    for name in (known, *gone):
        store.create(f"events/{name}.jsonl", b"{}\n")
    remove_ledgers(View.of(store))
    left = [each.name for each in store.list("events")]
    assert left == [f"{name}.jsonl" for name in (known, *gone[-64:])]


def test_what_a_killed_first_start_has_left_is_no_run(store: LocalStore, tmp_path: Path) -> None:
    assert has_run(store)
    left = tmp_path / "other" / CATALOGUE
    left.mkdir(parents=True)
    (left / ".000000001.0123456789abcdef.tmp").write_bytes(b"{")
    assert not has_run(LocalStore(str(left.parent)))


def test_alive_and_how_it_ends(store: LocalStore) -> None:
    first = attempt_at(store)
    beat(store, first, 7)
    assert run_view.signs_of_life(store, first) == 7
    assert attempts.ending(View.of(store), first) == ""
    mark_ended(store, first, "dead")
    assert attempts.ending(View.of(store), first) == "dead"
    assert not View.of(store).catalogue.ended
    second = attempt_at(store)
    mark_ended(store, first, "closed")
    assert not View.of(store).catalogue.ended, "it is the newer one's to say"
    mark_ended(store, second, "closed")
    assert View.of(store).catalogue.ended
    Path(store.url, alive_path(second)).unlink()
    assert attempts.ending(View.of(store), second) == "closed", "the catalogue says so, too"
    tidy(View.of(store), AttemptName(9, "0" * 8))
    assert store.list("alive") == []


def test_numbers_go_up_above_all_that_have_files(store: LocalStore) -> None:
    names = [run_view.next_name(store) for _ in range(3)]
    assert [each.number for each in names] == [1, 1, 1]
    assert len(set(names)) == 3
    first = attempt_at(store)
    assert run_view.next_name(store).number == 2
    assert run_view.next_name(store, above=7).number == 8
    commit(store, 10, first)
    store.create(f"data/{AttemptName(5, '00000001')}/000005-00000001.00000000000000000001/file", b"x")
    assert run_view.next_name(store).number == 6
    with pytest.raises(UnusableRunError, match="the highest one"):
        run_view.next_name(store, above=MAX_ATTEMPT)
