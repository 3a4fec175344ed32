"""wait(): as long as a failure may pass, and no longer."""

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt import PersistError
from flashckpt.keeper.client import KeeperWait, WaitTimeouts
from flashckpt.keeper.protocol import Failure, Status, TornSnapshot
from tests.checkpointer.test_loop import Job
from tests.keeper.driver import told
from tests.keeper.faulty import faulty_keeper
from tests.processes import keepers_of
from tests.waiting import newest_sealed, until, until_slots


@pytest.fixture
def faults(tmp_path: Path, runtime: Path) -> Iterator[Path]:
    """A keeper of tmp_path / "run" whose storage fails as files in this folder say."""
    folder = tmp_path / "faults"
    with faulty_keeper(tmp_path / "run", runtime, folder):
        yield folder


def attached(run: Path, grace: str = "240s", size: int = 64) -> flashckpt.Checkpointer:
    options = flashckpt.Options(grace=grace)
    model = nn.Linear(size, size)
    return flashckpt.attach(run, every=None, persist_every=None, options=options, model=model)


def test_a_failure_that_passes_is_waited_for(tmp_path: Path, faults: Path) -> None:
    """The wait returns soon after the storage works again: it does not last for the pause between tries."""
    (faults / "write").write_text(f"2 {errno.EIO}")
    (faults / "write.long").touch()
    with attached(tmp_path / "run") as checkpointer:
        checkpointer.save()
        checkpointer.wait()
        assert flashckpt.steps(tmp_path / "run") == [checkpointer.completed]
    errors = {line["errno"] for line in told(tmp_path / "run", "error", 1)}
    assert errors == {errno.EIO}
    assert (faults / "write").read_text().startswith("0 ")


@pytest.mark.long
def test_keepers_that_die_at_each_try_are_not_waited_for(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does for which there is no memory: each writes, and the next one begins anew."""
    monkeypatch.setenv("FLASHCKPT_CRASH_AT", "part.checked")
    checkpointer = attached(tmp_path / "run", "8s", 3000)
    checkpointer.save()
    with pytest.raises(PersistError):
        checkpointer.wait()
    assert checkpointer.report()["keeper_restarts"] > 0
    monkeypatch.delenv("FLASHCKPT_CRASH_AT")
    checkpointer._keeper_link.timeout_s = 240.0  # what comes now succeeds, as slow as the machine may be
    checkpointer.close()
    assert flashckpt.steps(tmp_path / "run") == [checkpointer.completed]


def test_what_stands_in_slots_that_were_outgrown_is_waited_for(tmp_path: Path, runtime: Path) -> None:
    """Nothing is captured into the new ones yet: no optimizer has stepped."""
    growing, job = {"kept": torch.zeros(1000)}, Job()
    given = {"every": 1, "persist_every": None, "growing": growing, **job.named}
    with flashckpt.attach(tmp_path / "run", **given) as checkpointer:  # type: ignore[arg-type]
        for _ in range(3):
            job.train(torch.ones(1, 4))
            checkpointer.step()
            until_slots(checkpointer)
        until(lambda: newest_sealed(checkpointer) == 3, "the third snapshot")
        growing["kept"] = torch.zeros(3_000_000)
        job.train(torch.ones(1, 4))
        checkpointer.step()
        until_slots(checkpointer)
        checkpointer.step()
        assert newest_sealed(checkpointer) == 3
        checkpointer.wait()
        assert flashckpt.steps(tmp_path / "run") == [3]


def test_what_was_torn_in_slots_that_were_outgrown_is_told(tmp_path: Path, runtime: Path) -> None:
    """Nobody here looks at those slots any more when a bit of it flips: it is not taken for persisted."""
    growing, job = {"kept": torch.zeros(1000)}, Job()
    options = flashckpt.Options(grace="3s")
    given = {"every": 1, "persist_every": None, "options": options, "growing": growing, **job.named}
    checkpointer = flashckpt.attach(tmp_path / "run", **given)  # type: ignore[arg-type]
    slots = checkpointer._keeper_link.slots
    for step in range(1, 4):
        job.train(torch.ones(1, 4))
        checkpointer.step()
        until(lambda step=step: newest_sealed(checkpointer) == step, "the snapshot")
    slot, snapshot = slots.newest_sealed()
    growing["kept"] = torch.zeros(3_000_000)
    job.train(torch.ones(1, 4))
    checkpointer.step()
    until(lambda: slots.ready, "larger slots")
    (keeper,) = keepers_of(runtime)
    os.kill(keeper, signal.SIGSTOP)  # it has not saved it when the bit flips
    slot.image_view[snapshot.record.data_start] ^= 1
    checkpointer.step()
    os.kill(keeper, signal.SIGCONT)
    with pytest.raises(PersistError, match="[Ss]tep 3"):
        checkpointer.wait()
    assert flashckpt.steps(tmp_path / "run") == []
    checkpointer.close()
    assert flashckpt.steps(tmp_path / "run") == [checkpointer.completed]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


FAILED = Status(failures=(Failure(5, 9, "no space", errno.ENOSPC),), waiting=(5,))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def waiting(
    clock: Clock, before: Status | None = None, *, step: int | None = 5, timeout_s: float = 10.0
) -> KeeperWait:
    timeouts = WaitTimeouts.same(timeout_s, others_s=600.0)
    generation = None if step is None else 9
    return KeeperWait(before or Status(), timeouts, step=step, generation=generation, clock=clock)


def refused(wait: KeeperWait, status: Status) -> str | None:
    """What a wait makes of another answer of the keeper."""
    wait.has_stalled(replace(status))
    return wait.refusal(status)


def test_failing_for_longer_than_the_timeout_ends_a_wait(clock: Clock) -> None:
    """Though the keeper writes some bytes at each try: those are no progress."""
    wait = waiting(clock)
    assert refused(wait, FAILED) is None
    clock.now = 9.0
    assert refused(wait, replace(FAILED, progress_bytes=1)) is None
    clock.now = 11.0
    assert refused(wait, replace(FAILED, progress_bytes=2)) == "no space"


def test_a_try_under_way_may_be_the_one_that_works(clock: Clock) -> None:
    wait = waiting(clock)
    refused(wait, FAILED)
    clock.now = 1e6
    trying = replace(FAILED, persisting=5)
    assert refused(wait, trying) is None
    assert wait.refusal(replace(trying, counts={"failed": 2})) == "no space", "another one has failed, too"
    assert refused(wait, FAILED) == "no space"


def test_what_the_keeper_has_given_up_is_not_waited_for(clock: Clock) -> None:
    wait, given_up = waiting(clock), Status(failures=FAILED.failures)
    assert refused(wait, given_up) is None, "that answer may be older than the wish"
    assert refused(wait, given_up) == "no space"


def test_another_snapshots_failure_is_not_this_ones(clock: Clock) -> None:
    wait = waiting(clock)
    other = Status(failures=(Failure(4, 9, "x", 5), Failure(5, 8, "x", 5)), waiting=(4,))
    refused(wait, other)
    clock.now = 1e6
    assert refused(wait, other) is None


def test_a_torn_snapshot_is_not_waited_for(clock: Clock) -> None:
    torn = Status(torn=(TornSnapshot(5, 9, "slot", ("model.a",)),))
    assert "model.a" in (refused(waiting(clock), torn) or "")
    assert refused(waiting(clock, before=torn), torn) is None


def test_storage_that_fails_for_whatever_is_waited_for_is_told_once_it_has_for_long(clock: Clock) -> None:
    wait, failing = waiting(clock, step=None), replace(FAILED, failing=(5,))
    assert refused(wait, failing) is None
    clock.now = 11.0
    assert refused(wait, replace(failing, persisting=5)) is None
    assert refused(wait, failing) == "no space"
    wait.count_commits_only()
    assert refused(wait, failing) is None, "another snapshot is waited for"
    clock.now = 22.0
    committed = replace(failing, committed=(4,), newest_committed=4)
    assert refused(wait, committed) is None
    clock.now = 33.0
    assert refused(wait, committed) == "no space", "it fails again for as long"


def test_a_keeper_that_is_started_again_may_begin_anew(clock: Clock) -> None:
    wait = waiting(clock, Status(keeper="a", progress_bytes=9))
    for keeper, progress_bytes, has_moved in (
        ("a", 9, False),
        ("b", 0, True),
        ("b", 5, True),
        ("b", 5, False),
    ):
        clock.now += 11
        status = Status(keeper=keeper, progress_bytes=progress_bytes)
        assert wait.has_stalled(status) is not has_moved, status


def test_each_state_of_a_keeper_has_its_timeout(clock: Clock) -> None:
    timeouts = WaitTimeouts(writing_s=120, idle_s=10, failing_s=60, others_s=5)
    cases = (
        (Status(waiting=(5,), persisting=5), 120),
        (Status(waiting=(5,), failing=(5,)), 60),
        (Status(waiting=(4, 5), for_others=(5,)), 10),
        (Status(waiting=(5,), for_others=(5,)), 5),
    )
    for status, timeout_s in cases:
        wait = KeeperWait(status, timeouts, clock=clock)
        clock.now += timeout_s
        assert not wait.has_stalled(status), status
        clock.now += 1
        assert wait.has_stalled(status), status


def test_the_parts_of_other_nodes_are_waited_for_some_minutes(clock: Clock) -> None:
    """Nobody here sees their keepers write."""
    mine = Status(keeper="a", waiting=(5,), for_others=(5,))
    wait, of_another_step = waiting(clock, mine), waiting(clock, mine, step=6)
    clock.now += 599
    assert not wait.has_stalled(mine)
    assert wait.has_stalled(mine, awaits_others=False), "the ranks of other nodes are gone"
    assert of_another_step.has_stalled(mine)
    clock.now += 2
    assert wait.has_stalled(mine), "nobody waits for ever"


def test_of_keepers_that_die_and_die_only_commits_count(clock: Clock) -> None:
    """A new one learns of them from the slots, which it may get after its first answer."""
    knows = waiting(clock, Status(committed=(1, 2, 3), newest_committed=3))
    wait, moved = waiting(clock, Status()), [0, 0]
    for i in range(1000):
        clock.now += 11
        moved[0] += not wait.has_stalled(Status(keeper=str(i), progress_bytes=i))
        fewer = Status(keeper=str(i // 2), committed=(3,) * (i % 2), progress_bytes=i)
        moved[1] += not knows.has_stalled(fewer)
    assert max(moved) < 10
    for status, has_moved in (
        (Status(keeper="last", progress_bytes=7), False),
        (Status(keeper="last", progress_bytes=7, committed=(3,), newest_committed=3), True),
        (Status(keeper="last", progress_bytes=8, committed=(3,), newest_committed=3), True),
    ):
        clock.now += 11
        assert wait.has_stalled(status) is not has_moved, status


@pytest.mark.parametrize("is_persisted", [False, True])
def test_what_all_ranks_had_and_an_audit_has_discarded_here_is_not_called_safe(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, is_persisted: bool
) -> None:
    with attached(tmp_path / "run") as checkpointer:
        coordination = checkpointer._coordination
        monkeypatch.setattr(coordination, "is_settled", lambda boundary_index: True)
        monkeypatch.setattr(coordination, "outcome", lambda boundary_index, until_s: 7)
        monkeypatch.setattr(
            coordination, "is_persisted", lambda boundary_index: is_persisted and boundary_index == 7
        )
        gone = pytest.raises(PersistError, match="this rank's snapshot is gone")
        with nullcontext() if is_persisted else gone:
            checkpointer.wait()
        monkeypatch.undo()
