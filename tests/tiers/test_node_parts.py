"""The remote of nodes that have folders of their own: a step is there once all of them have sent their parts
of one content, and never before; they choose the same steps without a word between them."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashckpt import crashpoints
from flashckpt.commit import attempts, lineage
from flashckpt.commit import steps as steps_module
from flashckpt.commit.attempts import open_run
from flashckpt.commit.lineage import VisibleStep
from flashckpt.commit.verification import verify
from flashckpt.errors import DamagedError, RunError, RunHeldError, SupersededError, UnusableRunError
from flashckpt.format.names import AttemptName, manifest_path, step_attempt_folder
from flashckpt.format.records import Holder
from flashckpt.format.replicas import ranks_of
from flashckpt.options import Keep, Remote
from flashckpt.store import open_store
from flashckpt.store.local import LocalStore
from flashckpt.tiers import mirror as mirror_module
from flashckpt.tiers import node_parts
from flashckpt.tiers.mirror import Mirror, Mirrored
from flashckpt.tiers.nearest import is_ahead, look, take_over
from flashckpt.tiers.run_copy import copy_run
from flashckpt.tiers.step_copy import Copied, Outcome, StepCopier
from tests.commit.runs import HOLDER, is_whole, publish

WORLD = 2
OTHER_HOLDER = Holder(boot_id="c", runtime="/r", runtime_id="1:2", lock="trainer-1", host="there", pid=2)


class Nodes:
    """Nodes with a rank and a folder each, and one remote."""

    def __init__(self, folder: Path, keep: int = 9, remote: Remote | None = None, world: int = WORLD) -> None:
        self.folder, self.there = folder, folder / "remote"
        self.remote = remote or Remote(url=str(self.there), keep=Keep(last=keep))
        self.target = open_store(self.remote.url, self.remote.options)
        self.stores = [LocalStore(str(folder / f"node{node}")) for node in range(world)]
        self.ranks = list(range(world))
        run = open_run(self.stores[0], create=True)
        for store in self.stores[1:]:
            open_run(store, create=True, run_id=run.run_id)
        self.mirrors: list[Mirror] = []
        self.attempt = self.begin()

    def begin(self, parent: AttemptName | None = None, step: int = 0, above: int = 0) -> AttemptName:
        """An attempt of all, of which each folder has its own claim and start."""
        self.claim(above)
        return self.start(parent, step)

    def claim(self, above: int = 0) -> None:
        first = self.ranks.index(0)
        self.attempt = attempts.claim(self.stores[first], HOLDER, above=above)
        for store in self.stores[:first] + self.stores[first + 1 :]:
            assert attempts.claim_as(store, self.attempt, OTHER_HOLDER)

    def start(self, parent: AttemptName | None, step: int) -> AttemptName:
        for node, store in enumerate(self.stores):
            ranks = ranks_of([self.ranks[node]])
            attempts.start(store, self.attempt, parent, step, len(self.ranks), ranks=ranks, near=4096)
        self.restart()
        return self.attempt

    def restart(self) -> None:
        """Other keepers."""
        self.mirrors = [
            Mirror(store, self.remote, (rank,)) for store, rank in zip(self.stores, self.ranks, strict=True)
        ]

    def add(self, *steps: int, on: Sequence[int] | None = None, boundary: int = 1) -> None:
        world = len(self.ranks)
        for step in steps:
            for node in range(world) if on is None else on:
                rank, store = self.ranks[node], self.stores[node]
                how: dict[str, Any] = {"ranks": (rank,), "world": world, "keeper": rank}
                publish(store, step, self.attempt, **how, constants=True, boundary=boundary)
                assert steps_module.commit(store, step, self.attempt, world, ranks_of([rank]))

    def bring(self, node: int, *, is_last: bool = False) -> Mirrored:
        """A round of a node's keeper: rank 0's begins the newest."""
        begins = is_last or self.ranks[node] == 0
        return self.mirrors[node].bring(None, lambda last, step: True, begins=begins, is_last=is_last)

    def outcome(self, node: int, **how: Any) -> tuple[int, Outcome] | None:
        copied = self.bring(node, **how).copied
        return None if copied is None else (copied.step, copied.outcome)

    def steps(self) -> list[int]:
        """What a resume from the remote sees, every byte of which is looked at."""
        assert verify(self.target).ok
        found = lineage.visible(self.target)
        assert all(is_whole(self.target, each.step, each.attempt) for each in found)
        records = [steps_module.read_step(self.target, each.step, each.attempt) for each in found]
        ranks = sorted(self.ranks)
        assert all([rank.rank for p in each.parts for rank in p.ranks] == ranks for each in records)
        return [each.step for each in found]


@pytest.fixture
def nodes(scratch: str) -> Nodes:
    return Nodes(Path(scratch))


class Clock:
    """What nodes take for the time that has passed since some moment."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def pass_by(self, seconds: float) -> None:
        self._ahead_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(node_parts, "time", made)
    return made


def test_a_step_is_there_once_both_have_sent_their_part(nodes: Nodes) -> None:
    nodes.add(10)
    assert nodes.outcome(1) is None, "rank 0's node begins"
    assert nodes.outcome(0) == (10, Outcome.PART)
    assert (nodes.steps(), nodes.bring(0).newest, nodes.bring(0).waits) == ([], None, True)
    assert nodes.outcome(1) == (10, Outcome.COPIED)
    assert nodes.steps() == [10]
    found = nodes.bring(0)
    assert (found.newest, found.waits, found.copied) == (VisibleStep(10, nodes.attempt), False, None)
    assert not list(nodes.there.rglob("*.tmp"))
    record = attempts.read_start(nodes.target, nodes.attempt)
    assert record is not None
    assert record.ranks is None, "the remote has all ranks"


def test_others_follow_what_is_begun_and_rank_0_waits_for_them(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.add(1, 2)
    nodes.add(3, on=(0,))
    assert nodes.outcome(0) == (3, Outcome.PART)
    assert nodes.outcome(1) is None, "it has not got that yet, and begins no other"
    nodes.add(4)
    found = nodes.bring(0)
    assert (found.copied, found.is_put_off) == (None, True)
    nodes.add(3, on=(1,))
    assert nodes.outcome(1) == (3, Outcome.COPIED)
    # One that never comes: the next is begun all the same, later each time.
    assert nodes.outcome(0) == (4, Outcome.PART)
    nodes.add(5, 6)
    assert nodes.bring(0).is_put_off
    monkeypatch.setattr(node_parts, "_LEAST_WAIT_S", 0.0)
    nodes.mirrors[0]._parts._took_s = 0.0  # type: ignore[union-attr]
    assert nodes.outcome(0) == (6, Outcome.PART)
    assert nodes.outcome(1) == (6, Outcome.COPIED), "the newest"
    assert nodes.steps() == [3, 6]
    assert nodes.outcome(1) is None, "step 4 is of no use any more"


POINTS = ["copy.begun", "copy.written", "copy.files", "copy.part", "copy.records"]
CASES = [(0, point) for point in POINTS] + [
    (1, point) for point in [*POINTS[1:], "manifest.checked", "manifest.linked"]
]


@pytest.mark.process
@pytest.mark.parametrize(("victim", "point"), CASES)
def test_a_keeper_is_killed_in_its_copy(nodes: Nodes, victim: int, point: str) -> None:
    nodes.add(10)
    assert [nodes.outcome(0), nodes.outcome(1)] == [(10, Outcome.PART), (10, Outcome.COPIED)]
    nodes.add(20)
    if victim == 1:
        assert nodes.outcome(0) == (20, Outcome.PART)
    child = os.fork()
    if not child:
        crashpoints.arm(point)
        nodes.restart()
        nodes.bring(victim)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, "the point was never reached"
    assert nodes.steps() == ([10, 20] if point == "manifest.linked" else [10])
    if victim == 0:
        # The other goes on at once. Where the dead one's part stands that is all that was to come.
        nodes.bring(1)
        assert nodes.steps() == ([10, 20] if point in ("copy.part", "copy.records") else [10])
    nodes.restart()
    for node in (0, 1, 0):
        nodes.bring(node)
    assert nodes.steps() == [10, 20]
    assert not list(nodes.there.rglob("*.tmp"))
    nodes.add(30)
    for node in (0, 1):
        nodes.bring(node)
    assert nodes.steps() == [10, 20, 30]


def test_parts_of_two_attempts_are_no_step(nodes: Nodes) -> None:
    first = nodes.attempt
    nodes.add(4, 5)
    assert nodes.outcome(0) == (5, Outcome.PART)
    nodes.begin(first, 4)
    nodes.add(5, on=(1,))
    assert nodes.outcome(1) is None
    late = StepCopier(nodes.stores[1], nodes.target, joins=True)
    with pytest.raises(SupersededError):
        late.copy(5, first)
    assert nodes.steps() == [], "of 5 there are both parts of an attempt that nobody went on from"
    nodes.add(5, on=(0,))
    assert [nodes.outcome(0), nodes.outcome(1)] == [(5, Outcome.PART), (5, Outcome.COPIED)]
    assert lineage.visible(nodes.target) == [VisibleStep(5, nodes.attempt)]
    assert nodes.steps() == [5]
    assert not nodes.target.exists(manifest_path(5, first))


def test_the_next_attempt_finishes_what_it_goes_on_from(nodes: Nodes) -> None:
    first = nodes.attempt
    nodes.add(5)
    assert nodes.outcome(0) == (5, Outcome.PART)
    nodes.begin(first, 5)
    assert nodes.outcome(1) == (5, Outcome.COPIED)
    assert lineage.visible(nodes.target) == [VisibleStep(5, first)]
    assert nodes.steps() == [5]


def test_two_boundaries_are_no_step(nodes: Nodes) -> None:
    nodes.add(5, on=(0,), boundary=7)
    nodes.add(5, on=(1,), boundary=8)
    assert nodes.outcome(0) == (5, Outcome.PART)
    with pytest.raises(SupersededError, match="different snapshots"):
        nodes.bring(1)
    assert nodes.steps() == []
    assert [nodes.bring(node).waits for node in (0, 1)] == [True, True], "that is said once"
    nodes.add(6)
    assert nodes.outcome(0, is_last=True) == (6, Outcome.PART)
    assert nodes.outcome(1) == (6, Outcome.COPIED)
    assert nodes.steps() == [6]


def test_the_last_step_that_all_have(nodes: Nodes) -> None:
    """One node died before the newest: what both have is there, and that is no step."""
    nodes.add(90)
    nodes.add(100, on=(0,))
    assert nodes.outcome(0) == (100, Outcome.PART)
    assert nodes.outcome(1) is None
    assert nodes.outcome(1, is_last=True) == (90, Outcome.PART)
    assert nodes.outcome(0) is None, "while it trains it waits for newer ones"
    assert nodes.outcome(0, is_last=True) == (90, Outcome.COPIED)
    assert nodes.steps() == [90]


def test_only_rank_0s_node_deletes_and_a_late_part_comes_to_nothing(scratch: str) -> None:
    nodes = Nodes(Path(scratch), keep=2)
    nodes.add(1)
    assert nodes.outcome(0) == (1, Outcome.PART)
    copier, late = StepCopier(nodes.stores[1], nodes.target, joins=True), nodes.attempt
    left = lambda: {each.name[:5] for each in nodes.target.list(step_attempt_folder(1, late))}  # noqa: E731
    for step in (2, 3):
        nodes.add(step)
        assert nodes.outcome(0, is_last=True) == (step, Outcome.PART)
        assert nodes.outcome(1) == (step, Outcome.COPIED)
        assert left() == {"part-", "shard"}
    nodes.add(4)
    nodes.bring(1)
    assert left() == {"part-", "shard"}, "two newer ones are whole, and this is not rank 0's node"
    assert nodes.outcome(0) == (4, Outcome.PART)
    assert left() == {"manif"}, "a tombstone"
    assert nodes.outcome(1) == (4, Outcome.COPIED)
    assert nodes.steps() == [2, 3, 4]
    assert copier.copy(1, late).outcome is Outcome.BURIED
    assert nodes.bring(0).pruned == (2,)
    assert nodes.steps() == [3, 4]
    for step in (5, 6):
        nodes.add(step)
        for node in (0, 1, 0):
            nodes.bring(node)
    assert left() == set(), "each node is past it"
    # Who wakes up now finds no tombstone, and can make no step of it all the same.
    assert copier.copy(1, late).outcome is Outcome.PART
    nodes.add(7)
    for node in (0, 1, 0):
        nodes.bring(node)
    assert nodes.steps() == [6, 7]
    assert left() <= {"manif"}


def test_tombstones_there_do_not_grow_with_the_steps(scratch: str) -> None:
    nodes, counts = Nodes(Path(scratch), keep=2), list[int]()
    for step in range(1, 9):
        nodes.add(step)
        for node in (0, 1, 0):
            nodes.bring(node)
        counts.append(len(nodes.target.list("steps")))
    assert nodes.steps() == [7, 8]
    assert max(counts) == counts[-1] == 3, "two whole ones, and what was deleted last"


def test_what_nobody_adds_to_goes_once_another_was_begun(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node's disk takes nothing for days."""
    monkeypatch.setattr(node_parts, "_LEAST_WAIT_S", 0.0)
    for step in (1, 2):
        nodes.add(step, on=(0,))
        assert nodes.outcome(0) == (step, Outcome.PART)
        nodes.mirrors[0]._parts._took_s = 0.0  # type: ignore[union-attr]
    nodes.bring(0)
    shards = lambda: sorted(path.parts[-3] for path in nodes.there.rglob("shard-*"))  # noqa: E731
    assert shards() == [f"{step:012d}" for step in (1, 2)]
    monkeypatch.setattr(node_parts, "_LEAST_GONE_S", 0.0)
    nodes.bring(0)
    assert shards() == [f"{2:012d}"], "the newest may still come"


def test_a_step_that_came_whole_meanwhile_is_not_taken_for_stale(
    nodes: Nodes, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's node has seen it half, and then sends its own part of another one for hours."""
    monkeypatch.setattr(node_parts, "_LEAST_WAIT_S", 0.0)
    for step in (1, 2, 3):
        nodes.add(step, on=(0,))
        assert nodes.bring(0, is_last=True).copied is not None
    nodes.add(1, on=(1,))
    nodes.add(4, on=(0,))
    copy = StepCopier.copy

    def slow(copier: StepCopier, step: int, attempt: AttemptName) -> Copied:
        monkeypatch.setattr(StepCopier, "copy", copy)
        late = StepCopier(nodes.stores[1], nodes.target, joins=True)
        assert late.copy(1, nodes.attempt).outcome is Outcome.COPIED
        clock.pass_by(7200.0)
        return copier.copy(step, attempt)

    monkeypatch.setattr(StepCopier, "copy", slow)
    assert nodes.outcome(0, is_last=True) == (4, Outcome.PART)
    assert nodes.steps() == [1]


def test_a_node_that_comes_back_with_an_empty_disk(nodes: Nodes) -> None:
    first = nodes.attempt
    nodes.add(10)
    for node in (0, 1):
        nodes.bring(node)
    nodes.add(20)
    assert nodes.outcome(0) == (20, Outcome.PART)
    shutil.rmtree(nodes.folder / "node1")
    run_id = open_run(nodes.stores[0], create=False).run_id
    nodes.stores[1] = LocalStore(str(nodes.folder / "node1"))
    open_run(nodes.stores[1], create=True, run_id=run_id)
    _, seen = look(nodes.stores[0], nodes.target, run_id)
    assert [each.step for each in seen.steps] == [10]
    # Ranks change places, too: another node's claim is that of the attempt.
    nodes.ranks = [1, 0]
    nodes.claim(above=seen.above)
    for store in nodes.stores:
        take_over(store, seen, nodes.attempt)
        assert seen.visible_in(store) == [VisibleStep(10, first)]
    nodes.start(first, 10)
    nodes.add(30)
    assert nodes.outcome(1) == (30, Outcome.PART)
    assert nodes.outcome(0) == (30, Outcome.COPIED)
    assert nodes.steps() == [10, 30], "and never 20, of which a disk is lost"
    # It is one history for all of them, and no other job's.
    _, seen = look(nodes.stores[1], nodes.target, run_id)
    assert not any(is_ahead(store, seen) for store in nodes.stores)


def test_two_histories_are_refused(nodes: Nodes, tmp_path: Path) -> None:
    first = nodes.attempt
    nodes.add(10)
    for node in (0, 1):
        nodes.bring(node)
    copy = [
        LocalStore(shutil.copytree(store.url, tmp_path / f"copy{i}")) for i, store in enumerate(nodes.stores)
    ]
    nodes.begin(first, 10)
    nodes.add(11)
    for node in (0, 1):
        nodes.bring(node)
    before = sorted(map(str, nodes.there.rglob("*")))
    nodes.stores = copy
    nodes.begin(first, 10)
    nodes.add(12)
    for node in (0, 1):
        with pytest.raises(RunError, match="another job|trained by itself"):
            nodes.bring(node)
        with pytest.raises(UnusableRunError, match="different ways"):
            look(nodes.stores[node], nodes.target, open_run(nodes.target, create=False).run_id)
    assert sorted(map(str, nodes.there.rglob("*"))) == before


def test_a_step_that_others_have_begun_is_spared_while_it_cannot_be_sent(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.add(10)
    nodes.bring(0)

    def failing(*_: Any) -> Copied:
        assert nodes.mirrors[1].copying == VisibleStep(10, nodes.attempt)
        raise OSError("the server is away")

    monkeypatch.setattr(StepCopier, "copy", failing)
    with pytest.raises(OSError, match="away"):
        nodes.bring(1)
    assert nodes.mirrors[1].spared == VisibleStep(10, nodes.attempt)
    assert nodes.mirrors[1].copying is None
    monkeypatch.setattr(mirror_module, "_SPARED_S", -time.monotonic())
    assert nodes.mirrors[1].spared is None, "not for ever"
    monkeypatch.undo()
    # Shards that took an hour have arrived, and what names them has not.
    monkeypatch.setattr(mirror_module, "_SPARED_S", 600.0)
    nodes.mirrors[1]._failed = VisibleStep(10, nodes.attempt), time.monotonic() - 3600.0
    create = LocalStore.create
    monkeypatch.setattr(LocalStore, "create", failing)
    with pytest.raises(OSError, match="away"):
        nodes.bring(1)
    assert nodes.mirrors[1].spared == VisibleStep(10, nodes.attempt)
    monkeypatch.setattr(LocalStore, "create", create)
    assert nodes.outcome(1) == (10, Outcome.COPIED)


def test_what_is_brought_by_hand_is_a_part_of_the_whole_too(nodes: Nodes) -> None:
    """As `recover --remote` does on each node. One node's disk copied as such would stand for the run."""
    nodes.add(10)
    [sent] = copy_run(nodes.stores[0], nodes.target, joins=True).steps
    assert sent.copied is not None
    assert (sent.copied.outcome, sent.is_visible) == (Outcome.PART, False)
    with pytest.raises(RunError, match="another node's part"):
        copy_run(nodes.stores[1], nodes.target)
    assert nodes.steps() == []
    [sent] = copy_run(nodes.stores[1], nodes.target, joins=True).steps
    assert sent.is_visible
    with pytest.raises(RunError, match="another node's part"):
        copy_run(nodes.stores[0], nodes.target)
    assert nodes.steps() == [10]


@pytest.mark.parametrize(
    "damaged",
    [["shard-00001-*"], ["constants-00001-*"], ["part-00001*"], ["manifest*"], ["shard-*", "manifest*"]],
)
def test_each_node_repairs_what_it_has_sent(nodes: Nodes, damaged: list[str]) -> None:
    nodes.add(10)
    for node in (0, 1):
        nodes.bring(node)
    whole = {path: path.read_bytes() for path in nodes.there.rglob("*-*.*") if path.is_file()}
    for path in [path for pattern in damaged for path in nodes.there.rglob(pattern)]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert not verify(nodes.target).ok
    for store in nodes.stores:
        [done] = copy_run(store, nodes.target, 10, repairs=True).steps
        assert done.copied is not None
    assert done.is_visible
    assert {path: path.read_bytes() for path in whole} == whole
    assert nodes.steps() == [10]
    [again] = copy_run(nodes.stores[0], nodes.target, 10, repairs=True).steps
    assert again.copied is not None
    assert again.copied.outcome is Outcome.THERE


def test_a_node_repairs_what_it_sent_before_an_attempt_that_is_not_known_there(nodes: Nodes) -> None:
    """The remote was away when the job went on."""
    first = nodes.attempt
    nodes.add(10)
    for node in (0, 1):
        nodes.bring(node)
    nodes.begin(first, 10)
    [shard] = nodes.there.rglob("shard-00001-*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    [done] = copy_run(nodes.stores[1], nodes.target, 10, repairs=True).steps
    assert done.copied is not None
    assert done.copied.outcome is Outcome.REPAIRED
    assert nodes.steps() == [10]


def test_what_is_damaged_here_keeps_no_newer_step_up(nodes: Nodes) -> None:
    nodes.add(10)
    shard = next((nodes.folder / "node0" / "steps").rglob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedError):
        nodes.bring(0)
    assert nodes.outcome(1) == (10, Outcome.PART), "it is begun, and nobody can know"
    nodes.add(20)
    assert nodes.outcome(0) == (20, Outcome.PART)
    assert nodes.outcome(1) == (20, Outcome.COPIED)
    assert nodes.steps() == [20]


def test_what_a_hold_keeps_from_being_sent_is_sent_once_it_is_gone(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job claims the remote and lives there, and this one begins its next attempt, while a step is
    about to be sent."""
    nodes.add(10)
    brief = replace(nodes.target.capabilities, delay_s=0.1)
    monkeypatch.setattr(LocalStore, "capabilities", brief)
    mirror, settle, other = nodes.mirrors[0], Mirror._settle, list[AttemptName]()

    def meanwhile(*about: Any) -> Any:
        look = settle(*about)
        monkeypatch.setattr(Mirror, "_settle", settle)
        other.append(attempts.claim(nodes.target, OTHER_HOLDER))
        first = nodes.attempt
        nodes.claim(above=other[0].number)
        nodes.start(first, 10)
        return look

    def beat() -> None:
        count = 0
        while not ended.wait(0.001):
            count += 1
            if other:
                attempts.beat(nodes.target, other[0], count)

    monkeypatch.setattr(Mirror, "_settle", meanwhile)
    ended, begins = threading.Event(), lambda last, step: True
    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(RunHeldError):
            mirror.bring(None, begins)
    finally:
        ended.set()
        beating.join()
    copied = mirror.bring(None, begins).copied
    assert copied is not None
    assert (copied.step, copied.outcome) == (10, Outcome.PART)
    assert nodes.outcome(1) == (10, Outcome.COPIED)


def test_a_step_of_some_ranks_never_stands_there_for_one_of_all(nodes: Nodes) -> None:
    """One node goes on alone with the run: what its disk has of older steps is no step of the remote."""
    first = nodes.attempt
    nodes.add(10)
    alone = nodes.stores[0]
    attempts.mark_ended(alone, first, "closed")
    nodes.attempt = attempts.claim(alone, HOLDER)
    attempts.start(alone, nodes.attempt, first, 10, 1)
    mirror = Mirror(alone, nodes.remote, (0,))
    found = mirror.bring(None, lambda last, step: True)
    assert found.copied is not None
    assert (found.copied.outcome, found.newest) == (Outcome.PART, None)
    assert nodes.steps() == []


def test_a_server_that_fails_at_the_manifest_is_asked_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts are there: no file comes any more by which a node would see that there is something to do."""
    nodes.add(10)
    assert nodes.outcome(0) == (10, Outcome.PART)
    create, manifest = LocalStore.create, manifest_path(10, nodes.attempt)

    def failing(store: LocalStore, path: str, data: bytes, **how: Any) -> bool:
        if path == manifest:
            raise OSError("the server is away")
        return create(store, path, data, **how)

    monkeypatch.setattr(LocalStore, "create", failing)
    with pytest.raises(OSError, match="away"):
        nodes.bring(1)
    for node in (1, 0):
        assert nodes.bring(node).waits
    nodes.add(20)
    assert nodes.outcome(0, is_last=True) == (20, Outcome.PART), "a newer one does not wait for it"
    monkeypatch.setattr(LocalStore, "create", create)
    assert nodes.bring(0).newest == VisibleStep(10, nodes.attempt)
    assert nodes.outcome(1) == (20, Outcome.COPIED)
    assert nodes.steps() == [10, 20]


def test_nothing_older_than_what_is_there_is_begun(nodes: Nodes) -> None:
    nodes.add(10, 20)
    assert [nodes.outcome(0), nodes.outcome(1)] == [(20, Outcome.PART), (20, Outcome.COPIED)]
    for wanted in (10, 20):
        found = nodes.mirrors[0].bring(VisibleStep(wanted, nodes.attempt), lambda last, step: True)
        assert found.copied is None
    assert nodes.steps() == [20]


def test_an_attempt_that_went_on_differently_on_two_nodes_is_not_one(nodes: Nodes) -> None:
    first = nodes.attempt
    nodes.add(4, 5)
    nodes.claim()
    for node, step in enumerate((5, 4)):
        ranks = ranks_of([node])
        attempts.start(nodes.stores[node], nodes.attempt, first, step, WORLD, ranks=ranks, near=4096)
    nodes.restart()
    nodes.add(6)
    assert nodes.outcome(0) == (6, Outcome.PART)
    with pytest.raises(RunError, match="trained by itself"):
        nodes.bring(1)
    assert nodes.steps() == []


def test_a_part_of_other_bytes_than_the_remotes_is_not_taken_for_there(nodes: Nodes) -> None:
    """The step is whole there, of what the disk had that this one replaced."""
    nodes.add(10)
    for node in (0, 1):
        nodes.bring(node)
    shutil.rmtree(nodes.folder / "node1" / "steps")
    nodes.add(10, on=(1,), boundary=2)
    with pytest.raises(RunError, match="is another file"):
        StepCopier(nodes.stores[1], nodes.target, joins=True).copy(10, nodes.attempt)
    assert nodes.steps() == [10]


def test_a_step_that_the_next_attempt_captures_anew_is_sent_too(nodes: Nodes) -> None:
    """It went on from a step before its epoch ended, and saved the end, which has the same number."""
    first = nodes.attempt
    nodes.add(5)
    assert [nodes.outcome(0), nodes.outcome(1)] == [(5, Outcome.PART), (5, Outcome.COPIED)]
    nodes.begin(first, 5)
    nodes.add(5, boundary=2)
    anew = VisibleStep(5, nodes.attempt)
    found = nodes.mirrors[0].bring(anew, lambda last, step: True)
    assert found.copied is not None
    assert nodes.outcome(1) == (5, Outcome.COPIED)
    assert nodes.bring(0).newest == anew
    assert lineage.visible(nodes.target) == [anew]
    assert nodes.steps() == [5]
