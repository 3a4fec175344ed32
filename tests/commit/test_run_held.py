"""One job at a time, without a clock: who is refused, who is watched, who may go."""

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

from flashckpt.commit import attempts
from flashckpt.commit.attempts import Probe, beat, check_not_held, local_owner, mark_ended
from flashckpt.commit.view import View
from flashckpt.errors import OptionError, RunHeldError
from flashckpt.format.names import AttemptName, alive_path
from flashckpt.format.owner import Owner
from flashckpt.options import Environment
from flashckpt.store.local import LocalStore
from tests import run_view


def owner(tmp_path: Path, **other: object) -> Owner:
    return replace(local_owner(str(tmp_path), "trainer-1", job_id="job"), **other)  # type: ignore[arg-type]


def never(runtime: str, lock: str) -> bool:
    raise AssertionError("no lock is asked for on another machine")


def free(runtime: str, lock: str) -> bool:
    return False


class Beats:
    """Sleeps by letting the other job do something, and counts how often it was asked to."""

    def __init__(self, act: Callable[[int], object] = lambda count: None) -> None:
        self.count, self.act = 0, act

    def __call__(self, seconds: float) -> None:
        self.count += 1
        self.act(self.count)


def moving(store: LocalStore, name: AttemptName) -> Beats:
    return Beats(lambda count: beat(store, name, count))


def is_held(store: LocalStore, me: Owner, probe: Probe | None, sleep: Beats, match: str = "is held") -> bool:
    try:
        check_not_held(store, me, probe, sleep=sleep)
    except RunHeldError as error:
        return re.search(match, str(error)) is not None
    return False


def test_nobody_yet_and_nobody_that_trains(store: LocalStore, tmp_path: Path) -> None:
    sleep = Beats()
    assert not is_held(store, owner(tmp_path), never, sleep)
    run_view.begin_as(View.of(store), run_view.next_name(store))
    assert not is_held(store, owner(tmp_path), never, sleep)
    assert sleep.count == 0


def test_the_lock_decides_at_once_on_this_machine(store: LocalStore, tmp_path: Path) -> None:
    name, asked = run_view.begin(store, owner=owner(tmp_path)), list[tuple[str, str]]()
    sleep = moving(store, name)

    def probe(runtime: str, lock: str) -> bool:
        asked.append((runtime, lock))
        return True

    says = f"{name}.*process {os.getpid()} on this machine"
    assert is_held(store, owner(tmp_path, restart_count=1), probe, sleep, says)
    assert asked == [(str(tmp_path), "trainer-1")]
    assert not is_held(store, owner(tmp_path), free, sleep)
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
    name = run_view.begin(store, owner=owner(tmp_path, pid=child.pid))

    def taken_again(runtime: str, lock: str) -> bool:
        was_there = (tmp_path / lock).exists()
        (tmp_path / lock).touch()  # right after it was asked for
        return was_there

    assert is_held(store, owner(tmp_path), free, moving(store, name), str(name))
    still = Beats()
    assert not is_held(store, owner(tmp_path), free, still), "the pid is another's by now"
    assert still.count > 1
    assert is_held(store, owner(tmp_path), taken_again, moving(store, name), str(name))
    dead = moving(store, name)
    assert not is_held(store, owner(tmp_path), free, dead), "its lock is there, and free"
    (tmp_path / "trainer-1").unlink()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_held(store, owner(tmp_path), free, dead), (
        "it is dead, and its parent has not read its status"
    )
    child.wait()
    assert not is_held(store, owner(tmp_path), free, dead), "gone"
    assert dead.count == 0, "nothing is watched where it is plain that it is dead"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EMFILE])
def test_where_nothing_tells_whether_the_process_lives_the_counter_does(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuses(pid: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", refuses)
    name, still = run_view.begin(store, owner=owner(tmp_path, pid=os.getppid())), Beats()
    assert not is_held(store, owner(tmp_path), free, still)
    assert still.count > 1
    assert is_held(store, owner(tmp_path), free, moving(store, name), str(name))


@pytest.mark.parametrize("difference", [{"boot_id": "other"}, {"runtime": "/other"}, {"runtime_id": "0:0"}])
def test_elsewhere_the_counter_is_watched(
    store: LocalStore, tmp_path: Path, difference: dict[str, str]
) -> None:
    name = run_view.begin(store, owner=owner(tmp_path, host="node-7", job_id="", **difference))
    me, moves, still = owner(tmp_path, restart_count=3), moving(store, name), Beats()
    assert is_held(store, me, never, moves, f"{name}.*node-7")
    assert moves.count == 1
    assert not is_held(store, me, never, still)
    assert still.count > 1
    Path(store.url, alive_path(name)).write_bytes(b"")
    assert not is_held(store, me, never, Beats()), "damaged, and it stands still"
    assert is_held(store, me, never, Beats(lambda count: count == 3 and beat(store, name, 1)))


@pytest.mark.parametrize("how", ["closed", "dead"])
def test_an_ended_attempt_needs_no_watching(store: LocalStore, tmp_path: Path, how: str) -> None:
    name, sleep = run_view.begin(store, owner=owner(tmp_path, boot_id="other")), Beats()
    beat(store, name, 5)
    ending = Beats(lambda count: count == 2 and mark_ended(store, name, how))  # type: ignore[arg-type]
    assert not is_held(store, owner(tmp_path), never, ending)
    assert ending.count == 2, "it ends while it is watched"
    assert not is_held(store, owner(tmp_path), never, sleep)
    assert sleep.count == 0


@pytest.mark.parametrize("restart_count", [0, 1], ids=["another job", "restarted by Slurm"])
def test_keepers_elsewhere_that_save_are_waited_for(
    store: LocalStore, tmp_path: Path, restart_count: int
) -> None:
    """For as long as they make progress, which may be longer than the watch."""
    name = run_view.begin(store, owner=owner(tmp_path, boot_id="other"))
    me, most = owner(tmp_path, restart_count=restart_count), int(3 * attempts.WATCH_S)
    beat(store, name, 1, saves=True)

    def save(count: int) -> None:
        if count == most:
            mark_ended(store, name, "dead")
        elif count % 2 == 0:
            beat(store, name, count, saves=True)

    saving = Beats(save)
    assert not is_held(store, me, never, saving)
    assert saving.count == most
    # One that makes no progress any more is not waited for.
    beat(store, name, 1, saves=True)
    stuck = Beats(lambda count: count == 5 and beat(store, name, 2, saves=True))
    assert not is_held(store, me, never, stuck)
    assert stuck.count <= 2 * attempts.WATCH_S


def test_an_attempt_that_begins_during_the_watch_is_looked_at(store: LocalStore, tmp_path: Path) -> None:
    run_view.begin(store, owner=owner(tmp_path, boot_id="other"))
    begun: list[AttemptName] = []

    def act(count: int) -> None:
        if not begun:
            begun.append(run_view.begin(store, owner=owner(tmp_path, boot_id="third", host="node-9")))
        elif count > 6:
            beat(store, begun[0], count)

    assert is_held(store, owner(tmp_path), never, Beats(act), "node-9")


def started_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, **variables: str) -> Owner:
    """A trainer on another node as its environment describes it."""
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "FLASHCKPT_JOB"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = Environment.read()
    return owner(tmp_path, boot_id=host, host=host, job_id=found.job_id, restart_count=found.restart_count)


@pytest.mark.parametrize("run_id", ["none", "gpt"])
def test_a_second_job_of_torchrun_is_refused_after_its_restart_too(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_id: str
) -> None:
    """Two jobs may have one id, and the count of restarts rises where a job was refused."""
    variables = {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": "0"}
    name = run_view.begin(store, owner=started_by(monkeypatch, tmp_path, "first", **variables))
    for count in ("0", "1", "2"):
        variables["TORCHELASTIC_RESTART_COUNT"] = count
        second = started_by(monkeypatch, tmp_path, "second", **variables)
        assert is_held(store, second, never, moving(store, name), f"{name}.*first")


def test_slurm_tells_a_restart_from_another_job(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for ranks that torchrun has restarted, in either of them."""
    job = {"SLURM_CLUSTER_NAME": "a", "SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "none"}
    name = run_view.begin(store, owner=started_by(monkeypatch, tmp_path, "first", **job))
    sleep = moving(store, name)
    requeued = {**job, "SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert not is_held(store, started_by(monkeypatch, tmp_path, "second", **requeued), never, sleep)
    assert sleep.count == 0
    for other in (
        {**job, "TORCHELASTIC_RESTART_COUNT": "3"},
        {**requeued, "SLURM_CLUSTER_NAME": "b"},
        {**requeued, "SLURM_JOB_ID": "8"},
    ):
        assert is_held(store, started_by(monkeypatch, tmp_path, "second", **other), never, sleep)


def test_another_scheduler_tells_a_restart_by_a_variable(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start by mistake has the same id, and no higher count."""
    name = run_view.begin(store, owner=started_by(monkeypatch, tmp_path, "first", FLASHCKPT_JOB="a/7/1"))
    sleep = moving(store, name)
    assert not is_held(
        store, started_by(monkeypatch, tmp_path, "second", FLASHCKPT_JOB="a/7/2"), never, sleep
    )
    assert sleep.count == 0
    slurm = {"SLURM_CLUSTER_NAME": "a", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    for other in ({"FLASHCKPT_JOB": "a/7/1"}, {"FLASHCKPT_JOB": "a/8/2"}, slurm):
        assert is_held(store, started_by(monkeypatch, tmp_path, "second", **other), never, sleep)


@pytest.mark.parametrize("named", ["7", "/1", "a/", "a/-1", "a/1x", "a/" + 10 * "1", "a/²"])
def test_a_job_without_a_count_is_refused(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHCKPT_JOB", named)
    with pytest.raises(OptionError, match="FLASHCKPT_JOB.*ID/COUNT.*Nothing was started"):
        Environment.read()


def test_the_log_says_what_is_waited_for_and_escapes_it(
    store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = run_view.begin(store, owner=owner(tmp_path, boot_id="other", host="\x1b[2Jnode"))
    with caplog.at_level(logging.WARNING):
        check_not_held(store, owner(tmp_path), never, sleep=lambda _: None)
    assert re.search(rf"{name} .*\\x1b\[2Jnode.*until \d\d:\d\d:\d\d", caplog.text)
    assert "\x1b" not in caplog.text
