"""When a trainer counts as stuck: the watchdog itself, on real slots and a real process, with a clock that
the test moves."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashckpt.keeper import watchdog
from flashckpt.keeper.watchdog import Watchdog, collect, condition, held
from flashckpt.memory.held_regions import HeldRegion
from flashckpt.memory.region import OWNERS, SlotSize
from flashckpt.memory.runtime import LifeLock, RuntimeFolder, is_alive, stacks_name
from flashckpt.memory.slot import Heartbeat
from flashckpt.persist.job import Trainer
from flashckpt.persist.ledger import MAX_LINE_BYTES
from tests.keeper.driver import InProcess, Process, eventually, runtime_of
from tests.keeper.fake import open_runtime

LOCK = "trainer-00000-1-cafecafe.lock"
PATIENCE_S = 100


class Watched:
    """A keeper's parts in this process, and a child that stands for the trainer."""

    def __init__(self, run: Path, base: Path) -> None:
        _, identity = open_runtime(run, base)
        self.folder = RuntimeFolder.open(str(base), identity)
        self.keeper = keeper = InProcess(run, self.folder).keeper
        self.child = subprocess.Popen(["sleep", "1000"])
        life = LifeLock.acquire(self.folder, LOCK)
        assert life is not None
        self.life = life
        [region] = keeper.regions.make(0, [0], SlotSize(4096, 4096)).regions
        self.held: HeldRegion = keeper.regions.put(region)
        self.owner = self.enroll()
        self.trainer = keeper.registry.watch(Trainer(lock=LOCK, rank=0, pid=self.child.pid))
        self.now_s = 1000.0
        self.events: list[str] = []
        keeper.ledger.add = lambda attempt, event, **fields: self.events.append(str(event.value))  # type: ignore
        parts = (self.folder, keeper.regions, keeper.registry, keeper.ledger, keeper.queue)
        self.dog = Watchdog(*parts, keeper._watch_worker, clock=lambda: self.now_s)

    def enroll(self, lock: str = LOCK) -> int:
        return self.held.slot.enroll(self.child.pid, lock, lambda name: is_alive(self.folder, name))

    def beat(self, boundaries: int, patience_s: int = PATIENCE_S) -> None:
        self.held.slot.beat(Heartbeat(boundaries, time.monotonic_ns(), self.owner, patience_s * 10**9))

    def looks(self, seconds: int) -> list[str]:
        """Look once a second for so many seconds of the test's clock; what was told since the beginning."""
        worker = self.keeper._watch_worker
        for _ in range(seconds):
            self.now_s += 1
            self.dog.check()
            if worker.busy:
                eventually(lambda: (worker.collect(), not worker.busy)[1])
        return self.events

    def hold_still(self) -> None:
        self.child.send_signal(signal.SIGSTOP)
        eventually(lambda: condition(self.child.pid).is_stopped)

    def go_on(self) -> None:
        self.child.send_signal(signal.SIGCONT)
        eventually(lambda: not condition(self.child.pid).is_stopped)

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        self.life.release(self.folder)


@pytest.fixture
def watched(tmp_path: Path, runtime: Path) -> Iterator[Watched]:
    made = Watched(tmp_path / "run", runtime)
    made.looks(1)
    yield made
    made.close()


def test_a_silence_is_told_once_at_its_limit_and_again_after_the_next_boundary(watched: Watched) -> None:
    for boundary in range(3):
        watched.beat(boundary)
        assert watched.looks(PATIENCE_S - 1) == []
    watched.beat(3)
    assert watched.looks(PATIENCE_S) == []
    assert watched.looks(2) == ["stuck"]
    assert watched.looks(10 * PATIENCE_S) == ["stuck"]
    watched.beat(4)
    assert watched.looks(PATIENCE_S) == ["stuck", "goes-on"]
    assert watched.looks(2) == ["stuck", "goes-on", "stuck"]


def test_time_in_which_the_keeper_itself_did_not_run_makes_nobody_stuck(watched: Watched) -> None:
    watched.beat(1)
    watched.looks(1)
    for _ in range(10):
        watched.now_s += 100 * PATIENCE_S
        assert watched.looks(1) == []
    assert watched.looks(PATIENCE_S) == ["stuck"]


def test_where_no_boundary_is_awaited_none_is_missed(watched: Watched) -> None:
    watched.beat(1, patience_s=0)
    assert watched.looks(10 * PATIENCE_S) == []
    watched.beat(1)
    watched.looks(PATIENCE_S // 2)
    watched.beat(1, patience_s=0)
    assert watched.looks(10 * PATIENCE_S) == []
    watched.beat(1)
    watched.looks(2)
    watched.trainer.closing = True
    assert watched.looks(10 * PATIENCE_S) == [], "it has said that it closes"


def test_a_process_held_still_is_told_as_that_and_has_all_its_time_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its newest snapshot is persisted meanwhile."""
    saved: list[int] = []
    monkeypatch.setattr(watched.keeper.queue, "rescue", saved.append)
    watched.trainer.kill_when_stuck = True
    watched.beat(1)
    watched.looks(PATIENCE_S - 10)
    watched.hold_still()
    assert watched.looks(10 * PATIENCE_S) == ["stopped"]
    assert saved == [0]
    watched.go_on()
    assert watched.looks(PATIENCE_S - 1) == ["stopped"]
    assert watched.child.poll() is None
    watched.beat(2)
    assert watched.looks(2) == ["stopped", "goes-on"]


def test_a_process_held_still_after_it_was_told_is_not_ended(watched: Watched) -> None:
    """Somebody looks into the hang with a debugger."""
    watched.beat(1)
    assert watched.looks(PATIENCE_S + 2) == ["stuck"]
    watched.trainer.kill_when_stuck = True
    watched.hold_still()
    assert watched.looks(10 * PATIENCE_S) == ["stuck"]


def test_an_end_that_cannot_be_is_said_once_and_hits_nobody_else(watched: Watched) -> None:
    """The lock is held by another process than the pid says: that pid was used again."""
    watched.trainer.kill_when_stuck = True
    watched.beat(1)
    assert watched.looks(PATIENCE_S + 2) == ["stuck", "error"]
    assert watched.looks(PATIENCE_S) == ["stuck", "error"]
    assert watched.child.poll() is None


def test_what_a_dead_trainer_left_on_the_page_is_not_the_next_ones(watched: Watched) -> None:
    watched.beat(1)
    assert watched.looks(PATIENCE_S + 2) == ["stuck"]
    watched.life.release(watched.folder)
    other = LifeLock.acquire(watched.folder, "trainer-00000-2-beefbeef.lock")
    assert other is not None
    for index in range(1, OWNERS + 1):  # free entries are used first
        if watched.held.slot.owner(index) is None:
            watched.enroll(f"trainer-{index}.lock")
    assert watched.enroll(other.name) == watched.owner, "the index of the dead is used again"
    watched.keeper.registry.remove_dead()
    watched.keeper.registry.watch(Trainer(lock=other.name, rank=0, pid=watched.child.pid))
    assert watched.looks(10 * PATIENCE_S) == ["stuck"]
    other.release(watched.folder)


def test_no_signal_reaches_a_process_without_a_handler_for_it(tmp_path: Path, runtime: Path) -> None:
    """The default action of a real-time signal ends the process."""
    trainer = Process(tmp_path / "run", runtime)
    folder = runtime_of(tmp_path / "run", runtime)
    [lock] = [name for name in folder.names() if name.startswith("trainer-")]
    os.close(folder.open_file(stacks_name(lock), os.O_RDWR | os.O_CREAT))
    found = collect(folder, lock, signal.SIGRTMIN + 12)
    assert "no signal handler" in found.reason
    assert trainer.do("status")["committed"] == [], "it lives and answers"
    trainer.kill()
    gone = collect(folder, lock, signal.SIGRTMIN + 12)
    assert gone.stacks == ()
    assert "gone" in gone.reason


@pytest.mark.every_set
@pytest.mark.parametrize(
    ("goes_on", "ends", "told"),
    [
        (True, "closes", ["stuck", "goes-on"]),
        (True, "dies", ["stuck", "goes-on"]),
        (False, "dies", ["stuck"]),
    ],
)
def test_a_trainer_that_goes_on_and_ends_between_two_looks_has_gone_on(
    watched: Watched, goes_on: bool, ends: str, told: list[str]
) -> None:
    watched.beat(1)
    assert watched.looks(PATIENCE_S + 2) == ["stuck"]
    if goes_on:
        watched.beat(2)
    if ends == "closes":
        watched.trainer.closing = True
    else:
        watched.life.release(watched.folder)
        watched.keeper.registry.remove_dead()
    assert watched.looks(2) == told


def test_an_end_waits_for_the_snapshot_but_not_for_ever(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched.keeper.queue, "is_settled", lambda rank: False)
    watched.trainer.kill_when_stuck = True
    watched.beat(1)
    assert watched.looks(PATIENCE_S + 2) == ["stuck"]
    assert watched.looks(290) == ["stuck"]
    assert watched.looks(20) == ["stuck", "error"], "it was tried: the lock is not the child's"


def test_a_boundary_at_the_last_moment_saves_a_trainer(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.beat(1)
    assert watched.looks(PATIENCE_S + 2) == ["stuck"]
    watched.trainer.kill_when_stuck = True

    def settled(rank: int) -> bool:
        watched.beat(2)
        return True

    monkeypatch.setattr(watched.keeper.queue, "is_settled", settled)
    monkeypatch.setattr(watchdog, "holder_of", lambda folder, lock: watched.child.pid)
    assert watched.looks(1) == ["stuck"]
    assert watched.child.poll() is None
    assert watched.looks(1) == ["stuck", "goes-on"]


def test_a_trainer_that_dies_while_it_is_looked_up_is_nobody(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid may have gone to another process between the lock's word and the pidfd."""
    answers = iter([watched.child.pid, None])
    monkeypatch.setattr(watchdog, "holder_of", lambda folder, lock: next(answers))
    with held(watched.folder, LOCK) as process:
        assert process is None


def test_of_too_many_threads_those_that_matter_are_told() -> None:
    def thread(name: str, frames: int) -> str:
        lines = "".join(
            f'  File "/a/rather/long/path/{name}.py", line {i} in {name}\n' for i in range(frames)
        )
        return f"Thread 0x{name} (most recent call first):\n{lines}"

    others = [thread(f"other{i}", 40) for i in range(30)]
    answering = thread("answering", 40).replace("Thread", "Current thread")
    text = "\n".join([*others[:20], answering, *others[20:], thread("main", 60)])
    told = watchdog._bounded(text)
    assert told[0].startswith("Current thread 0xanswering")
    assert "line 59 in main" in "".join(told)
    assert told[-1].endswith("more threads")
    assert len(json.dumps(told)) < MAX_LINE_BYTES - 4096
    assert watchdog._bounded("Stack of\n\ttwo lines\n") == ("Stack of", "\ttwo lines")
