"""The protocol on storage under every interleaving of two or three actors, each killed at each call.
Invariants by number: roles.py. How to run it, and read a failing schedule: docs/commit.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from flashckpt.commit import attempts, catalogue, collect, commit_step, starting
from flashckpt.commit.catalogue import Catalogue
from flashckpt.format.names import SnapshotId, frozen_name
from flashckpt.format.records import CommitRecord
from flashckpt.store.base import Store
from tests.protocol import roles
from tests.protocol.memory_store import FolderStore, object_store
from tests.protocol.roles import (
    ALL,
    FIRST,
    at,
    brancher,
    claimant,
    collector,
    commit_all,
    committer,
    copier,
    frozen_committer,
    late_claimant,
    late_committer,
    recovery,
    run_with,
    write_frozen,
    write_part,
)
from tests.protocol.search import Actor, Invariant, OpenStore, Search

STORES = [FolderStore, object_store]
long = pytest.mark.long
STEP_3 = at(3)
EPOCH_END = at(3, boundary=4)
UNNAMED = frozen_name(FIRST, 0, "5f2c0a1b")


def one_part(store: Store) -> None:
    write_part(store, 0, STEP_3)


def both_parts(store: Store) -> None:
    one_part(store)
    write_part(store, 1, STEP_3)


def part_1(store: Store) -> None:
    write_part(store, 1, STEP_3)


def overtaken(store: Store) -> None:
    """A try at step 3 that two newer steps have overtaken: retention removes it."""
    both_parts(store)
    for step in (4, 5):
        commit_all(store, at(step))


def epoch_end(store: Store) -> None:
    """Step 3 is committed, and the epoch's end has the same number: its parts stand."""
    commit_all(store, STEP_3)
    for rank in range(2):
        write_part(store, rank, EPOCH_END)


def unnamed_instance(store: Store) -> None:
    """A frozen instance of a dead keeper that nothing names, and rank 1's part of step 3."""
    write_frozen(store, FIRST)
    part_1(store)


def named_by_part(store: Store) -> None:
    """A frozen instance that the parts of step 3 name, which are not committed."""
    file = write_frozen(store, FIRST)
    write_part(store, 0, STEP_3, frozen=file)
    part_1(store)


def named_by_oldest(store: Store) -> None:
    """A frozen instance that the oldest of three steps names, which retention removes."""
    commit_all(store, at(1), frozen=write_frozen(store, FIRST))
    for step in (2, 3):
        commit_all(store, at(step))


def left_by_older(store: Store) -> None:
    """Uncommitted parts of FIRST, and two attempts that have started since."""
    both_parts(store)
    for _ in range(2):
        roles.claim_and_start(store, "gone")


def half_left_by_older(store: Store) -> None:
    """The same of one part alone."""
    one_part(store)
    for _ in range(2):
        roles.claim_and_start(store, "gone")


def resumed_in_memory(store: Store) -> None:
    """An attempt that has resumed from step 3 in memory, and died: both parts of the step stand."""
    both_parts(store)
    name, found = starting.claim(store, roles.HOLDER, above=1)
    starting.start(store, name, STEP_3.id, 3, roles.WORLD, found)


def lost_older(store: Store) -> None:
    """Two attempts have started since, and the record of an older step is lost."""
    commit_all(store, at(5, roles.claim_and_start(store, "gone")))
    roles.claim_and_start(store, "gone", living="none")
    store.remove(at(3).path)


KEEPER_0, KEEPER_1 = (Actor(f"keeper {rank}", committer(rank, STEP_3)) for rank in range(2))
LATE_0, LATE_1 = (Actor(f"keeper {rank}", late_committer(rank, STEP_3)) for rank in range(2))
END_0, END_1 = (Actor(f"keeper {rank}", late_committer(rank, EPOCH_END)) for rank in range(2))
FROZEN_NEW = Actor("keeper 0", frozen_committer(STEP_3))
FROZEN_OLD = Actor("keeper 0", frozen_committer(STEP_3, UNNAMED))
COLLECTOR, COLLECTOR_2 = (Actor(f"collector {n}", collector(FIRST, ["5f2c0a1b"])) for n in (1, 2))
CLAIMANT, CLAIMANT_2 = (Actor(f"claimant {number}", claimant) for number in (1, 2))
LATE_CLAIMANT = Actor("late claimant", late_claimant)
COPIER, COPIER_2 = (Actor(f"copier {number}", copier(at(1)), ("home", "remote")) for number in (1, 2))
REMOTE_COLLECTOR = Actor("collector 3", collector(FIRST), ("remote",))
BRANCHER, BRANCHER_2 = (Actor(f"branch {number}", brancher(roles.BRANCHED)) for number in (1, 2))
RECOVERY = Actor("recover", recovery)

# Committed steps before it, what is done besides, and who acts.
Scenario = tuple[int, tuple[Callable[[Store], object], ...], list[Actor]]
SCENARIOS: dict[str, Scenario] = {
    "two committers": (2, (), [KEEPER_0, KEEPER_1]),
    "committer and claimant": (2, (both_parts,), [LATE_0, CLAIMANT]),
    "collector": (3, (), [COLLECTOR]),
    "claimant after a record was lost": (4, (lost_older,), [CLAIMANT]),
    "branch and collector": (3, (), [BRANCHER, COLLECTOR]),
}
LONG: dict[str, Scenario] = {
    "recovery and committer": (2, (one_part,), [RECOVERY, KEEPER_1]),
    "collector and claimant": (3, (), [COLLECTOR, CLAIMANT]),
    "copier and collector": (3, (), [COPIER, COLLECTOR]),
    "copier and collector of the remote": (3, (), [COPIER, REMOTE_COLLECTOR]),
    "collector and late committer": (0, (overtaken,), [COLLECTOR, LATE_0]),
    "collector and epoch's end": (2, (epoch_end,), [COLLECTOR, END_0]),
    "two collectors": (3, (), [COLLECTOR, COLLECTOR_2]),
    "two collectors and a branch": (3, (), [COLLECTOR, COLLECTOR_2, BRANCHER]),
    "two copiers": (3, (), [COPIER, COPIER_2]),
    "two claimants": (2, (), [CLAIMANT, CLAIMANT_2]),
    "two branches and a collector": (3, (), [BRANCHER, BRANCHER_2, COLLECTOR]),
    "branch, claimant and collector": (3, (), [BRANCHER, CLAIMANT, COLLECTOR]),
    "branch and committer": (2, (both_parts,), [BRANCHER, LATE_0]),
    "two committers and a claimant": (2, (both_parts,), [LATE_0, LATE_1, CLAIMANT]),
    "claimant sweeps beside a late committer": (2, (left_by_older,), [CLAIMANT, LATE_0]),
    "committer of a resumed snapshot and claimant": (2, (resumed_in_memory,), [LATE_0, CLAIMANT]),
    "keeper and claimant": (2, (one_part,), [KEEPER_1, CLAIMANT]),
    "claimant sweeps beside a late keeper": (2, (half_left_by_older,), [CLAIMANT, KEEPER_1]),
    "two claimants sweep": (2, (half_left_by_older,), [CLAIMANT, LATE_CLAIMANT]),
    "collector and an instance that is named again": (2, (unnamed_instance,), [COLLECTOR, FROZEN_OLD]),
    "collector and a new instance": (2, (part_1,), [COLLECTOR, FROZEN_NEW]),
    "collector and an instance of a part": (2, (named_by_part,), [COLLECTOR, LATE_0]),
    "two collectors of an instance": (0, (named_by_oldest,), [COLLECTOR, COLLECTOR_2]),
    "two collectors and an instance that is named again": (
        2, (unnamed_instance,), [COLLECTOR, COLLECTOR_2, FROZEN_OLD],
    ),
}  # fmt: skip


KEPT = {
    "claimant after a record was lost": roles.keeps(at(3).id),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Warnings of thousands of runs."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def search(name: str, open_store: OpenStore, invariants: Sequence[Invariant] = ALL) -> Search:
    last_step, more, actors = {**SCENARIOS, **LONG}[name]
    files = run_with(open_store, last_step, *more)
    if not {REMOTE_COLLECTOR, COPIER_2}.isdisjoint(actors):
        files = roles.with_remote(files, open_store, (2, 3))
    if len(actors) > 2:
        # With the kills of all there are too many states: a collector alone is killed, the first.
        actors = [replace(each, may_die=each is COLLECTOR) for each in actors]
    return Search(files, actors, open_store, [*invariants, *([KEPT[name]] if name in KEPT else [])])


@pytest.mark.parametrize("open_store", STORES)
@pytest.mark.parametrize("name", [*SCENARIOS, *(pytest.param(name, marks=long) for name in LONG)])
def test_no_schedule_violates_an_invariant(name: str, open_store: OpenStore) -> None:
    found = search(name, open_store).run()
    print(f"{name}, {open_store.__name__}: {found}")
    assert found.fault == "", f"{found.fault}\n{found}"
    assert len(found.finals) > 1


# ---- the rules: without each of them a scenario fails


def _unchecked(store: Store, record: CommitRecord) -> commit_step.Outcome:
    return commit_step.Outcome(commit_step.Committed.YES, None, record.name)


def _tombstone_first(store: Store, snapshot: SnapshotId, catalogue: Catalogue) -> set[str]:
    store.remove(snapshot.tombstone_path)
    return _delete_snapshot(store, snapshot, catalogue)


def _record_first(store: Store, snapshot: SnapshotId, catalogue: Catalogue) -> set[str]:
    store.remove_files(collect._records_of(store, snapshot))
    entries = store.list(snapshot.data_folder)
    store.remove_files([f"{snapshot.data_folder}/{entry.name}" for entry in entries])
    store.remove(snapshot.tombstone_path)
    return set()


def _without_second_listing(store: Store, file: str, may_still: Callable[[], bool]) -> bool:
    with mock.patch.object(collect, "frozen_instances", return_value={file: False}):
        return _delete_frozen(store, file, may_still)


def _claimed_by_all(store: Store, name: Any, owner: Any) -> bool:
    store.replace(f"attempts/{name.number:06d}.json", attempts.Claim(attempt=name, owner=owner).to_bytes())
    store.create(attempts.alive_path(name), attempts.Alive(count=0).to_bytes())
    return True


def _record_before_files(home: Store, remote: Store, record: CommitRecord) -> None:
    remote.create(record.name.path, record.to_bytes())
    _send_files(home, remote, record)


_send_files = roles.send_files
_delete_snapshot, _delete_frozen = collect._delete_snapshot, collect._delete_frozen
NAMED_AGAIN = "collector and an instance that is named again"
Rule = tuple[Any, str, Any, str]
RULES: dict[str, Rule] = {
    "attempts, commits and files are listed after the record": (
        commit_step, "check_committed", _unchecked, "keeper and claimant",
    ),
    "a record without data is removed": (
        commit_step, "_remove_without_data", lambda *_: None, "collector and late committer",
    ),
    "a tombstone stands before a shard goes": (
        collect, "_put_tombstone", lambda *_: None, "collector",
    ),
    "claims are listed after the tombstone": (
        collect, "newest_claimed", lambda _: FIRST, "branch and collector",
    ),
    "a tombstone of the resumed step does not count": (
        catalogue, "_needed_parent", lambda *_: None, "branch and collector",
    ),
    "the tombstone goes last": (collect, "_delete_snapshot", _tombstone_first, "collector"),
    "the record goes after the data": (
        collect, "_delete_snapshot", _record_first, "collector and late committer",
    ),
    "a claim is created exclusively": (attempts, "claim_as", _claimed_by_all, "two claimants"),
    "names are listed after the tombstone of a frozen instance": (
        collect, "_delete_frozen", _without_second_listing, NAMED_AGAIN,
    ),
    "tombstones of frozen instances are listed before the record": (
        commit_step, "missing_frozen", lambda *_, **__: [], NAMED_AGAIN,
    ),
    "a deletion has its own tombstone of a frozen instance": (
        collect, "frozen_tombstone_path", lambda file, _: f"frozen/{file}.tombstone-00000000",
        "two collectors and an instance that is named again",
    ),
    "what has all its parts is left alone": (
        starting, "partial", lambda *_: lambda _: None, "claimant after a record was lost",
    ),
    "the record of a copy is created last": (
        roles, "send_files", _record_before_files, "copier and collector",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("open_store", STORES)
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule: str, open_store: OpenStore) -> None:
    where, name, instead, scenario = RULES[rule]
    wanted = search(scenario, open_store, roles.ALWAYS)
    with mock.patch.object(where, name, instead):
        found = wanted.run()
    print(f"{rule}, {open_store.__name__}: {found.fault}")
    assert found.fault


@pytest.mark.parametrize("open_store", STORES)
def test_steps_that_have_lost_files_do_not_count_for_retention(open_store: OpenStore) -> None:
    def lose(store: Store) -> None:
        for step in (3, 4):
            store.remove(f"{at(step).id.data_folder}/part-00000.json")

    files = run_with(open_store, 4, lose)
    invariant = roles.a_start_takes_a_whole_step
    assert Search(files, [COLLECTOR], open_store, [invariant]).run().fault == ""
    counted = Search(files, [COLLECTOR], open_store, [invariant])
    with mock.patch.object(collect, "broken_steps", return_value=set()):
        assert "no step is left" in counted.run().fault
