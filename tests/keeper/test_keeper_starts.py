"""A keeper that starts beside the reading of a step: nothing waits for it until it is asked something."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt.errors import KeeperError
from flashckpt.keeper import client as keeper_client
from flashckpt.keeper import start
from flashckpt.keeper.client import KeeperClient, may_have_memory
from flashckpt.keeper.protocol import ELECTION_LOCK
from flashckpt.memory.runtime import LifeLock, RuntimeFolder, enter, trainer_lock_name
from flashckpt.options import Keep
from flashckpt.restore.step_reading import StepReading
from tests.keeper.driver import InProcess, eventually
from tests.keeper.fake import FakeTrainer, open_runtime
from tests.processes import keepers_of
from tests.waiting import until

THREAD = "flashckpt-keeper"


@contextmanager
def trainer(run: Path, base: Path) -> Iterator[tuple[KeeperClient, RuntimeFolder, LifeLock]]:
    """A trainer of rank 1, on a node where no keeper runs."""
    folder, life = enter(str(base), open_runtime(run, base)[1], trainer_lock_name(1))
    client = KeeperClient(str(run), folder, life)
    yield client, folder, life
    client.close()
    life.release(folder)
    folder.close()


def hello(client: KeeperClient, *, is_first: bool = False) -> None:
    attempt = "000001-aaaaaaaa"
    client.hello(rank=1, world=2, attempt=attempt, keep=Keep(), linger_s=1.0, is_first=is_first)


def test_a_hello_waits_for_no_keeper_and_the_next_call_does(run: Path, runtime: Path) -> None:
    with trainer(run, runtime) as (client, folder, life):
        assert not may_have_memory(folder)
        hello(client)
        keeper = InProcess(run, RuntimeFolder.at(folder.path)).keeper
        thread = threading.Thread(target=keeper.run)
        thread.start()
        try:
            client.status()
            assert [each.rank for each in keeper.registry.all()] == [1]
            assert client.restarts == 0
            assert may_have_memory(folder)
        finally:
            client.close()
            life.release(folder)
            keeper.exit.ask()
            thread.join()


def test_the_next_call_raises_the_error_of_a_keeper_that_does_not_answer(
    run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_client, "_START_TIMEOUT_S", 0.0)
    with trainer(run, runtime) as (client, folder, _):
        election = LifeLock.acquire(folder, ELECTION_LOCK)
        assert election is not None
        hello(client)
        until(lambda: client._first_error is not None, "the end of the wait")
        monkeypatch.setattr(keeper_client, "_START_TIMEOUT_S", 60.0)
        with pytest.raises(KeeperError, match="did not answer"):
            client.status()
        election.release(folder)


def test_a_trainer_that_leaves_waits_for_no_keeper(run: Path, runtime: Path) -> None:
    with trainer(run, runtime) as (client, folder, _):
        election = LifeLock.acquire(folder, ELECTION_LOCK)
        assert election is not None
        hello(client)
        client.close()
        until(lambda: THREAD not in {each.name for each in threading.enumerate()}, "the end of the thread")
        assert client._peer is None
        election.release(folder)


@pytest.mark.process
def test_a_step_is_read_while_the_keeper_starts(
    run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper of this start is held back until all bytes are read."""
    saved = nn.Linear(64, 64)
    with flashckpt.attach(run, every=None, persist_every=None, model=saved) as checkpointer:
        checkpointer.save()
        checkpointer.wait()
    until(lambda: not keepers_of(runtime), "the end of its keeper")
    is_read, program, read = threading.Event(), start._start_program, StepReading.read
    begun: list[bool] = []

    def held_back(run_path: str, orders: bytes, log_file: int, held: int) -> None:
        descriptors = [os.dup(log_file), os.dup(held)]

        def later() -> None:
            begun.append(is_read.wait(60.0))
            program(run_path, orders, *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)

        threading.Thread(target=later).start()

    def noted(self: StepReading, *arguments: object) -> None:
        read(self, *arguments)  # type: ignore[arg-type]
        is_read.set()

    monkeypatch.setattr(start, "_start_program", held_back)
    monkeypatch.setattr(StepReading, "read", noted)
    model = nn.Linear(64, 64)
    with flashckpt.attach(run, every=None, persist_every=None, model=model) as checkpointer:
        assert checkpointer.resumed.tier == "local"
    assert begun == [True]
    assert torch.equal(model.weight, saved.weight)


@pytest.mark.parametrize("has_steps", [False, True])
@pytest.mark.every_set
@pytest.mark.process
def test_a_keeper_that_never_answers_lets_no_attempt_begin(
    run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, has_steps: bool
) -> None:
    if has_steps:
        model = nn.Linear(4, 4)
        with flashckpt.attach(run, every=None, persist_every=None, model=model) as checkpointer:
            checkpointer.save()
            checkpointer.wait()
        until(lambda: not keepers_of(runtime), "the end of its keeper")
    versions = set(run.glob("catalogue/*"))
    monkeypatch.setattr(keeper_client, "_START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(start, "_start_program", lambda *orders: None)
    live = nn.Linear(4, 4)
    with pytest.raises(KeeperError):
        flashckpt.attach(run, every=None, persist_every=None, model=live)
    assert {each for each in run.glob("catalogue/*") if each not in versions} <= {run / "catalogue/000000001"}
    if has_steps:
        assert set(run.glob("catalogue/*")) == versions
        with pytest.raises(flashckpt.StateError, match="had begun to write"):
            live(torch.zeros(1, 4))


# One that was started and does not come: the next one is started at once, not after a pause


# Takes a lock of a runtime folder, says so, and stands until its input ends.
_HOLDS = """
import sys
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
lock = LifeLock.acquire(RuntimeFolder.at(sys.argv[1]), sys.argv[2])
print(lock is not None, flush=True)
sys.stdin.read()
"""


def held(folder: RuntimeFolder, name: str) -> subprocess.Popen[str]:
    given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", _HOLDS, folder.path, name], **given)  # type: ignore[call-overload]
    assert process.stdout.readline() == "True\n"
    return process  # type: ignore[no-any-return]


def dies_as_it_begins(begin: Callable[[], int], folder: RuntimeFolder, runtime: Path) -> int:
    os.environ["FLASHCKPT_CRASH_AT"] = "adopt.taken"
    try:
        return begin()
    finally:
        del os.environ["FLASHCKPT_CRASH_AT"]


def finds_another_that_dies(begin: Callable[[], int], folder: RuntimeFolder, runtime: Path) -> int:
    other = held(folder, ELECTION_LOCK)
    begun = begin()
    eventually(lambda: keepers_of(runtime) == [])
    other.kill()
    other.communicate()
    return begun


@pytest.mark.parametrize("how", [dies_as_it_begins, finds_another_that_dies])
def test_one_that_does_not_come_is_replaced_at_once(
    how: Callable[..., int], run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, starts = start.start, list[str]()

    def started(run: str, folder: RuntimeFolder) -> int:
        starts.append(run)
        if len(starts) == 1:
            return how(lambda: begin(run, folder), folder, runtime)
        return begin(run, folder)

    monkeypatch.setattr(start, "start", started)
    monkeypatch.setattr(
        keeper_client, "_START_AGAIN_S", 600.0
    )  # the pause would be longer than anybody waits
    trainer = FakeTrainer(run, runtime)
    assert len(starts) == 2
    trainer.end()
    eventually(lambda: keepers_of(runtime) == [])


@pytest.mark.long
def test_those_that_die_at_each_start_are_not_started_without_end(
    run: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor at the end of a run, when no pause is asked for."""
    begin, starts = start.start, list[str]()

    def started(run: str, folder: RuntimeFolder) -> int:
        starts.append(run)
        return dies_as_it_begins(lambda: begin(run, folder), folder, runtime)

    trainer = FakeTrainer(run, runtime)
    monkeypatch.setattr(start, "start", started)
    monkeypatch.setattr(keeper_client, "_START_AGAIN_S", 600.0)
    monkeypatch.setattr(keeper_client, "_START_TIMEOUT_S", 15.0)
    trainer.client.longest_pause_s = start.NO_PAUSE_S
    for pid in keepers_of(runtime):
        os.kill(pid, 9)
    with pytest.raises(KeeperError):
        trainer.client.tend()
    assert 1 <= len(starts) <= 2 * start._STARTS_AT_ONCE
