"""One job at a time, without a clock: who is refused, who is watched, who may go."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flashckpt.commit import attempts as timing
from flashckpt.commit.attempts import beat, check_not_held, claim, local_owner, mark_ended
from flashckpt.errors import RunHeldError
from flashckpt.format.names import alive_path
from flashckpt.format.records import Owner
from flashckpt.options import Environment
from flashckpt.store import open_store
from flashckpt.store.local import LocalStore
from tests.commit.runs import new_run

WATCH_S = timing.WATCH_S


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


def owner(tmp_path: Path, **other: object) -> Owner:
    return replace(local_owner(str(tmp_path), "trainer-1", job_id="job"), **other)


def never(runtime: str, lock: str) -> bool:
    raise AssertionError("no lock is asked for on another machine")


class Beats:
    """Sleeps by letting the other job do something, and counts how often it was asked to."""

    def __init__(self, act: Callable[[int], None] = lambda count: None) -> None:
        self.count, self.act = 0, act

    def __call__(self, seconds: float) -> None:
        self.count += 1
        self.act(self.count)


def test_nobody_yet(store: LocalStore, tmp_path: Path) -> None:
    check_not_held(store, owner(tmp_path), never, sleep=Beats())


def test_a_held_lock_refuses_at_once(store: LocalStore, tmp_path: Path) -> None:
    name = claim(store, owner(tmp_path))
    asked, sleep = [], Beats()

    def probe(runtime: str, lock: str) -> bool:
        asked.append((runtime, lock))
        return True

    with pytest.raises(RunHeldError, match=f"{name}.*process {os.getpid()} on this machine"):
        check_not_held(store, owner(tmp_path, restart_count=1), probe, sleep=sleep)
    assert asked == [(str(tmp_path), "trainer-1")]
    assert sleep.count == 0


def test_a_free_lock_is_dead_without_watching(store: LocalStore, tmp_path: Path) -> None:
    name = claim(store, owner(tmp_path))
    sleep = Beats(lambda count: beat(store, name, count))
    check_not_held(store, owner(tmp_path), lambda runtime, lock: False, sleep=sleep)
    assert sleep.count == 0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.process
def test_a_lock_without_a_name_is_not_free_while_its_process_lives(
    store: LocalStore, tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    name = claim(store, owner(tmp_path, pid=child.pid))

    def look() -> int:
        sleep = Beats(lambda count: beat(store, name, count))
        check_not_held(store, owner(tmp_path), lambda runtime, lock: False, sleep=sleep)
        return sleep.count

    with pytest.raises(RunHeldError, match=str(name)):
        look()
    # Nothing is watched where it is plain that it is dead.
    lock = tmp_path / "trainer-1"
    lock.touch()
    assert look() == 0, "its lock is there, and free"
    lock.unlink()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert look() == 0, "dead, though nobody has waited for it yet"
    child.wait()
    assert look() == 0, "gone"


@pytest.mark.process
def test_a_lock_that_is_taken_again_while_it_is_asked_for_is_not_free(
    store: LocalStore, tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    name = claim(store, owner(tmp_path, pid=child.pid))

    def probe(runtime: str, lock: str) -> bool:
        was_there = (tmp_path / lock).exists()
        (tmp_path / lock).touch()  # right after it was asked for
        return was_there

    with pytest.raises(RunHeldError, match=str(name)):
        check_not_held(store, owner(tmp_path), probe, sleep=Beats(lambda count: beat(store, name, count)))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_where_nothing_tells_whether_the_process_lives_the_counter_does(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuses(pid: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", refuses)
    name = claim(store, owner(tmp_path, pid=os.getppid()))
    still, moving = Beats(), Beats(lambda count: beat(store, name, count))
    check_not_held(store, owner(tmp_path), lambda runtime, lock: False, sleep=still)
    assert still.count > 1
    with pytest.raises(RunHeldError, match=str(name)):
        check_not_held(store, owner(tmp_path), lambda runtime, lock: False, sleep=moving)


@pytest.mark.process
def test_a_process_that_lives_and_lets_the_counter_stand_is_another(
    store: LocalStore, tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    claim(store, owner(tmp_path, pid=child.pid))
    sleep = Beats()
    check_not_held(store, owner(tmp_path), lambda runtime, lock: False, sleep=sleep)
    assert sleep.count > 1


@pytest.mark.parametrize("difference", [{"boot_id": "other"}, {"runtime": "/other"}, {"runtime_id": "0:0"}])
def test_elsewhere_the_counter_is_watched(
    store: LocalStore, tmp_path: Path, difference: dict[str, str]
) -> None:
    name = claim(store, owner(tmp_path, host="node-7", job_id="", **difference))
    me, moving, still = owner(tmp_path), Beats(lambda count: beat(store, name, count)), Beats()
    with pytest.raises(RunHeldError, match=f"{name}.*node-7"):
        check_not_held(store, me, never, sleep=moving)
    assert moving.count == 1
    check_not_held(store, me, never, sleep=still)
    assert still.count > 1


def test_a_counter_that_begins_moves(store: LocalStore, tmp_path: Path) -> None:
    name = claim(store, owner(tmp_path, boot_id="other"))
    with pytest.raises(RunHeldError):
        check_not_held(
            store, owner(tmp_path), never, sleep=Beats(lambda count: count == 3 and beat(store, name, 1))
        )


@pytest.mark.parametrize("how", ["closed", "dead"])
def test_an_ended_attempt_needs_no_watching(store: LocalStore, tmp_path: Path, how: str) -> None:
    name, sleep = claim(store, owner(tmp_path, boot_id="other")), Beats()
    beat(store, name, 5)
    mark_ended(store, name, how)
    check_not_held(store, owner(tmp_path), never, sleep=sleep)
    assert sleep.count == 0


def test_ending_while_watched(store: LocalStore, tmp_path: Path) -> None:
    name = claim(store, owner(tmp_path, boot_id="other"))
    beat(store, name, 5)
    check_not_held(
        store, owner(tmp_path), never, sleep=Beats(lambda count: mark_ended(store, name, "closed"))
    )


def started_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, **variables: str) -> Owner:
    """A trainer on another node as its environment describes it."""
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = Environment.read()
    return owner(tmp_path, boot_id=host, host=host, job_id=found.job_id, restart_count=found.restart_count)


@pytest.mark.parametrize("run_id", ["none", "", "100", "gpt"])
def test_a_second_job_of_torchrun_is_refused_after_its_restart_too(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_id: str
) -> None:
    """Two jobs may have one id, and the count of restarts rises where a job was refused."""
    variables = {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": "0"}
    name = claim(store, started_by(monkeypatch, tmp_path, "first", **variables))
    for count in ("0", "1", "2"):
        variables["TORCHELASTIC_RESTART_COUNT"] = count
        second = started_by(monkeypatch, tmp_path, "second", **variables)
        with pytest.raises(RunHeldError, match=f"{name}.*first"):
            check_not_held(store, second, never, sleep=Beats(lambda count: beat(store, name, count)))


def test_slurm_tells_a_restart_from_another_job(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for ranks that torchrun has restarted, in either of them."""
    job = {"SLURM_CLUSTER_NAME": "a", "SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "none"}
    name = claim(store, started_by(monkeypatch, tmp_path, "first", **job))
    moving = Beats(lambda count: beat(store, name, count))
    requeued = {**job, "SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    check_not_held(store, started_by(monkeypatch, tmp_path, "second", **requeued), never, sleep=moving)
    assert moving.count == 0
    for other in (
        {**job, "TORCHELASTIC_RESTART_COUNT": "3"},
        {**requeued, "SLURM_CLUSTER_NAME": "b"},
        {**requeued, "SLURM_JOB_ID": "8"},
    ):
        with pytest.raises(RunHeldError):
            check_not_held(store, started_by(monkeypatch, tmp_path, "second", **other), never, sleep=moving)


def test_the_schedulers_restart_goes_at_once(store: LocalStore, tmp_path: Path) -> None:
    name = claim(store, owner(tmp_path, boot_id="other", restart_count=1))
    moving = Beats(lambda count: beat(store, name, count))
    check_not_held(store, owner(tmp_path, restart_count=2), never, sleep=moving)
    assert moving.count == 0
    for same in ({"restart_count": 1}, {"restart_count": 2, "job_id": "another"}):
        with pytest.raises(RunHeldError):
            check_not_held(store, owner(tmp_path, **same), never, sleep=moving)


def test_the_log_says_what_is_waited_for(
    store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = claim(store, owner(tmp_path, boot_id="other", host="node-7"))
    said = []
    with caplog.at_level(logging.WARNING):
        check_not_held(
            store,
            owner(tmp_path),
            never,
            watch_s=40.0,
            sleep=lambda seconds: said.append(len(caplog.messages)),
        )
    assert said[0] == 1, "before the first pause"
    assert len(caplog.messages) == 3, "at the start, and every 15 s"
    assert all(re.search(rf"{name} .*node-7.*until \d\d:\d\d:\d\d", each) for each in caplog.messages)


def test_the_log_escapes_a_host_that_a_foreign_run_names(
    store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    claim(store, owner(tmp_path, boot_id="other", host="\x1b[2Jnode"))
    check_not_held(store, owner(tmp_path), never, watch_s=1.0, sleep=Beats())
    assert "\\x1b[2Jnode" in caplog.text
    assert "\x1b" not in caplog.text


def test_no_job_id_is_no_restart(store: LocalStore, tmp_path: Path) -> None:
    name = claim(store, owner(tmp_path, boot_id="other", job_id=""))
    with pytest.raises(RunHeldError):
        check_not_held(
            store,
            owner(tmp_path, job_id="", restart_count=3),
            never,
            sleep=Beats(lambda count: beat(store, name, count)),
        )


def test_a_claim_during_the_watch_is_looked_at(store: LocalStore, tmp_path: Path) -> None:
    claim(store, owner(tmp_path, boot_id="other"))
    claimed = []

    def act(count: int) -> None:
        if not claimed:
            claimed.append(claim(store, owner(tmp_path, boot_id="third", host="node-9")))
        elif count > 6:
            beat(store, claimed[0], count)

    with pytest.raises(RunHeldError, match="node-9"):
        check_not_held(store, owner(tmp_path), never, sleep=Beats(act))


@pytest.mark.parametrize(("url", "seconds"), [("{}", 60.0), ("local://{}", 90.0)])
def test_a_counter_is_watched_for_a_minute_and_the_delay_of_its_store(
    tmp_path: Path, url: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers refuse for seconds what is written often: no reason to think that a trainer is dead."""
    monkeypatch.setattr(timing, "WATCH_S", WATCH_S)
    new_run(tmp_path / "run")
    slept: list[float] = []
    store = open_store(url.format(tmp_path / "run"))
    claim(store, owner(tmp_path, boot_id="other"))
    check_not_held(store, owner(tmp_path), never, sleep=slept.append)
    assert sum(slept) == pytest.approx(seconds)


def test_the_file_is_opened_at_each_look(store: LocalStore, tmp_path: Path) -> None:
    name = claim(store, owner(tmp_path, boot_id="other"))
    beat(store, name, 1)
    first = os.stat(store.local_path(alive_path(name))).st_ino
    with pytest.raises(RunHeldError):
        check_not_held(store, owner(tmp_path), never, sleep=Beats(lambda count: beat(store, name, 2)))
    assert os.stat(store.local_path(alive_path(name))).st_ino != first


def test_a_damaged_counter_that_stands_still_is_dead(store: LocalStore, tmp_path: Path) -> None:
    name = claim(store, owner(tmp_path, boot_id="other"))
    Path(store.local_path(alive_path(name))).write_bytes(b"")
    check_not_held(store, owner(tmp_path), never, sleep=Beats())
