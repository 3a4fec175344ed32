"""Ranks agree while they attach: all hear one decision, or all raise one error that names who failed and
why."""

import contextlib
import os
import re
import subprocess
import threading
import time
from typing import Any

import pytest

from flashckpt.errors import MismatchError, OptionError, OutOfSpaceError, RunError
from flashckpt.options import Environment
from flashckpt.ranks import job, liveness
from flashckpt.ranks.agreement import Ranks
from flashckpt.ranks.job import Job
from flashckpt.ranks.liveness import ProcessId
from tests.ranks.together import each_rank
from tests.waiting import until

WORLD = 3


def test_rank_0_which_has_the_store_stays_until_all_have_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_PARTING_S", 60.0)
    left: list[int] = []

    def operation(job: Job) -> None:
        job.agree("the last word", job.rank, sum)
        if job.rank > 0:
            time.sleep(0.1)  # rank 0 would be gone by now
            left.append(job.rank)
        job.attached()
        if job.rank == 0:
            left.append(job.rank)

    each_rank(WORLD, operation)
    assert left[-1] == 0
    assert sorted(left) == [0, 1, 2]


@pytest.mark.parametrize("rank", [0, 2])
def test_where_one_cannot_all_raise_its_error_and_name_it(rank: int) -> None:
    row = ("weight", "3", "4")

    def operation(job: Job) -> Any:
        def mine() -> int:
            if job.rank == rank:
                raise MismatchError("it is of another model", differences=(row,), step=7)
            return job.rank

        return job.together("loading", mine)

    for each, error in enumerate(each_rank(WORLD, operation)):
        assert type(error) is MismatchError
        assert str(error).startswith(f"rank {rank} of {WORLD}: it is of another model")
        assert error.rank == rank
        assert error.differences == ((row,) if each == rank else ())


def test_what_several_ranks_raise_is_told_of_all_of_them() -> None:
    def operation(job: Job) -> Any:
        def mine() -> None:
            if job.rank == 1:
                raise OutOfSpaceError("no memory", needed=2, available=1)
            if job.rank == 2:
                raise ZeroDivisionError("a fault of the program")

        return job.together("loading", mine)

    for error in each_rank(WORLD, operation):
        assert type(error) is OutOfSpaceError
        assert "rank 1 of 3: no memory" in str(error)
        assert "rank 2 of 3: ZeroDivisionError: a fault of the program" in str(error)


def test_a_failure_is_told_to_all_before_the_slowest_has_said_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be reading for hours; it hears of it when it comes."""
    monkeypatch.setattr(job, "_LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(job, "_PARTING_S", 0.1)
    told = threading.Barrier(WORLD)

    def operation(job: Job) -> Any:
        def mine() -> None:
            if job.rank == 1:
                raise MismatchError("it is of another model")
            if job.rank == 2:
                told.wait(240)

        try:
            job.together("loading", mine, timeout_s=240.0)
        except MismatchError as error:
            if job.rank != 2:
                told.wait(240)
            return str(error)

    for words in each_rank(WORLD, operation):
        assert isinstance(words, str), words
        assert words.startswith("rank 1 of 3: it is of another model")


def test_who_is_taken_for_dead_and_speaks_in_that_moment_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_LONGEST_WAIT_S", 0.05)

    def operation(job: Job) -> Any:
        if job.rank == 2:
            job.store.set("0/failed", "")  # what was said in its place it has written over
            time.sleep(0.3)
        return job.agree("a sum", job.rank, sum)

    assert each_rank(WORLD, operation) == [3, 3, 3]


def test_what_is_no_error_of_ours_is_told_by_one_of_ours() -> None:
    def operation(job: Job) -> Any:
        return job.together("loading", lambda: 1 // (job.rank - 1))

    found = each_rank(WORLD, operation)
    assert all(type(error) is RunError and "rank 1 of 3: ZeroDivisionError" in str(error) for error in found)
    assert isinstance(found[1].__cause__, ZeroDivisionError)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_fails_where_others_already_agree_on_more_keeps_none_of_them(rank: int) -> None:
    """The others stand in the middle of the operation, and hear the error there."""

    def operation(job: Job) -> Any:
        def mine() -> int:
            if job.rank == rank:
                raise OptionError("not here")
            return int(job.agree("a vote", job.rank, sum))

        return job.together("voting", mine)

    for error in each_rank(WORLD, operation):
        assert type(error) is OptionError
        assert str(error).startswith(f"rank {rank} of {WORLD}: not here")


def test_a_refusal_by_what_all_said_is_raised_on_all_and_is_nobodys() -> None:
    def refuse(rows: list[Any]) -> None:
        raise RunError(f"they differ: {rows}", step=7)

    errors = each_rank(WORLD, lambda job: job.agree("whether they are alike", job.rank, refuse))
    for error in errors:
        assert (type(error), str(error), error.rank) == (RunError, "they differ: [0, 1, 2]", None)
    assert errors[0].step == 7, "the rank that decides raises its own error"


def test_who_fails_alone_is_heard_in_the_next_round() -> None:
    def operation(job: Job) -> Any:
        job.guarded("loading", lambda: 1 // (job.rank - 1))
        return job.agree("a sum", job.rank, sum)

    for error in each_rank(WORLD, operation):
        assert type(error) is RunError
        assert "rank 1 of 3: ZeroDivisionError" in str(error)


def test_who_fails_alone_waits_for_those_that_still_load() -> None:
    """Longer than a round may take: a step is read for hours."""
    loaded = threading.Barrier(WORLD - 1)

    def operation(job: Job) -> Any:
        def load() -> None:
            if job.rank == 1:
                raise MismatchError("it is of another model")
            time.sleep(4.5)
            loaded.wait(240)

        group = Ranks(Environment(rank=job.rank, world=WORLD), job)
        try:
            group.guarded("loading", load)
            return group.together("what follows", lambda: None)
        finally:
            group.close()

    for error in each_rank(WORLD, operation, timeout_s=2.0):
        assert type(error) is MismatchError
        assert str(error).startswith("rank 1 of 3: it is of another model")


@pytest.mark.parametrize("absent", [(0,), (1, 2)])
def test_a_rank_that_says_nothing_keeps_nobody_for_ever(
    absent: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_PARTING_S", 0.1)
    found = each_rank(WORLD, lambda job: job.agree("a sum", 1, sum), timeout_s=0.3, absent=absent)
    errors = [error for error in found if error is not None]
    assert errors
    for error in errors:
        assert type(error) is RunError
        named = re.match(r"ranks? ([0-9, ]+) said nothing for", str(error))
        # On a busy machine a rank that is present may be late, too.
        assert set(absent) <= set(map(int, named[1].split(",")))


def test_rank_0_that_is_gone_is_said() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Connection reset by peer")

    alone = Job(1, 2, Gone())  # type: ignore[arg-type]
    with pytest.raises(RunError, match="rank 0 serves"):
        alone.agree("a sum", 1, sum)


def test_a_fault_in_what_rank_0_decides_is_told_to_all_at_once() -> None:
    def operation(job: Job) -> Any:
        return job.together("loading", lambda: job.agree("a sum", "word", sum))

    for error in each_rank(WORLD, operation):
        assert type(error) is RunError
        assert "The decision for all ranks failed (a sum: TypeError" in str(error)


@pytest.mark.parametrize(("rank", "inside"), [(0, True), (1, False), (2, True)])
def test_an_interrupted_rank_is_waited_for_by_nobody(rank: int, inside: bool) -> None:
    """Before it has said a word in a round, or in the middle of what the others agree on."""

    def operation(job: Job) -> Any:
        group = Ranks(Environment(rank=job.rank, world=WORLD), job)

        def mine() -> None:
            if inside:
                job.agree("a sum", 1, sum)
            if job.rank == rank:
                raise KeyboardInterrupt
            job.agree("another sum", 1, sum)

        try:
            return group.together("loading", mine)
        except KeyboardInterrupt:
            group.close()
            return "interrupted"

    found = each_rank(WORLD, operation)
    assert found.pop(rank) == "interrupted"
    for error in found:
        assert type(error) is RunError
        assert f"rank {rank} of {WORLD}: it has left attach" in str(error)


@pytest.mark.process
@pytest.mark.parametrize(("dead", "inside"), [(2, True), (1, False)])
def test_a_rank_that_was_killed_is_named_by_the_others_of_its_node(
    dead: int, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before patience ends, whether or not it had said a word in that round."""
    monkeypatch.setattr(job, "_LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(job, "_PARTING_S", 0.1)
    child = subprocess.Popen(["sleep", "600"])

    def operation(job: Job) -> Any:
        own = ProcessId.of(child.pid if job.rank == dead else os.getpid())
        job.meet("first" if job.rank == 0 else "second", own)

        def mine() -> None:
            if inside:
                job.agree("a sum", 1, sum)
            if job.rank == dead:
                child.kill()
                child.wait()
                raise SystemExit
            job.agree("another sum", 1, sum)

        if job.rank != dead:
            return job.together("loading", mine)
        with contextlib.suppress(SystemExit):
            mine()
        return None

    try:
        found = each_rank(3, operation)
    finally:
        child.kill()
        child.wait()
    for error in found[:dead] + found[dead + 1 :]:
        assert type(error) is RunError
        assert f"rank {dead} of 3: its process has ended during attach" in str(error)


def test_a_node_that_nothing_is_heard_of_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 and 2 were on it."""
    monkeypatch.setattr(job, "_LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(job, "_PARTING_S", 0.1)
    monkeypatch.setattr(liveness, "SILENT_S", 1.0)
    monkeypatch.setattr(liveness, "BEAT_S", 0.02)

    def operation(job: Job) -> Any:
        job.meet("first" if job.rank in (0, 3) else "second")
        if job.rank in (1, 2):
            return job.end()
        return job.agree("a sum", 1, sum)

    found = each_rank(4, operation)
    for error in (found[0], found[3]):
        assert type(error) is RunError
        assert "rank 1 of 4: its node has been silent" in str(error)
        assert "rank 2 of 4: its node has been silent" in str(error)


def test_who_was_stopped_itself_does_not_take_others_for_silent() -> None:
    now_s = 0.0
    silence = liveness.Silence(2, lambda: now_s)
    assert silence.update([b"1", b"1"]) == []
    now_s = 10_000.0
    assert silence.update([b"1", b"1"]) == [], "none of them could be heard meanwhile"
    for look in range(20):
        now_s += 4.0
        found = silence.update([b"1", str(look).encode()])
    assert found == [0]


@pytest.mark.process
def test_a_process_is_known_by_its_start_too() -> None:
    own = ProcessId.of(os.getpid())
    assert own.started
    assert not own.has_ended
    assert own._replace(started=own.started + 1).has_ended, "the pid is another's now"
    assert not own._replace(namespace=own.namespace + 1, pid=1 << 30).has_ended, "nothing is known of it"
    child = subprocess.Popen(["sleep", "600"])
    try:
        process = ProcessId.of(child.pid)
        assert not process.has_ended
        child.kill()
        until(lambda: process.has_ended, "its end, though nobody has asked for its status")
    finally:
        child.kill()
        child.wait()
    assert process.has_ended
