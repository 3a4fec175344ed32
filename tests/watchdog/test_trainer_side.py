"""The trainer's part: when a boundary is awaited, and a signal that disturbs nobody."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt.memory.slot import Heartbeat
from tests.checkpointer.test_loop import Job, loader
from tests.waiting import until_slots

ROOT = Path(__file__).parents[2]
OPTIONS = flashckpt.Options(watchdog="50s")
AWAITED_NS = 50 * 10**9


def heartbeats(checkpointer: flashckpt.Checkpointer) -> list[Heartbeat]:
    found = [target.slot.heartbeat for target in checkpointer._capture._writers.by_name.values()]
    assert found, "no slot was taken yet"
    return found


def awaited(checkpointer: flashckpt.Checkpointer) -> bool:
    [timeout_ns] = {each.timeout_ns for each in heartbeats(checkpointer)}
    assert timeout_ns in (0, AWAITED_NS)
    return timeout_ns != 0


def train(job: Job, checkpointer: flashckpt.Checkpointer, last: int = 100) -> None:
    for index, batch in enumerate(checkpointer.batches(loader(6))):
        job.train(batch)
        until_slots(checkpointer)
        assert index < 4 or awaited(checkpointer)
        if index == last:
            break


def test_a_boundary_is_awaited_in_a_loop_and_nowhere_else(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    with flashckpt.attach(tmp_path / "run", every=1, options=OPTIONS, **job.named) as checkpointer:
        for _ in checkpointer.epochs(2):
            train(job, checkpointer)
            assert not awaited(checkpointer), "a validation after the epoch may take as long as it likes"
        train(job, checkpointer, last=4)
        assert not awaited(checkpointer), "a loop that is left awaits nothing"

        waited: list[bool] = []
        wait_committed = checkpointer._keeper_link.wait_committed
        monkeypatch.setattr(
            checkpointer._keeper_link,
            "wait_committed",
            lambda **how: (waited.append(awaited(checkpointer)), wait_committed(**how))[1],
        )
        job.train(torch.ones(2, 4))
        checkpointer.step()
        assert awaited(checkpointer), "a loop that marks its steps is one"
        checkpointer.wait()
        assert waited == [False], "whoever waits for storage is not stuck"
        assert awaited(checkpointer), "and goes on afterwards"
        checkpointer.save()
        assert awaited(checkpointer)
    assert len(waited) == 2


SIGNALS = """
import os, signal, sys
from flashckpt.checkpointer.session import Stacks
from flashckpt.memory.runtime import RuntimeFolder

first = signal.SIGRTMIN + 10
heard = []
signal.signal(first, lambda *_: heard.append("user"))
signal.signal(first + 1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [first + 2])
folder = RuntimeFolder.open(sys.argv[1], "0" * 32)

one = Stacks.open(folder, "trainer-00000-1-aaaaaaaa.lock")
two = Stacks.open(folder, "trainer-00000-1-bbbbbbbb.lock")
assert (one.signal_number, two.signal_number) == (first + 3, first + 4), (one, two)
os.kill(os.getpid(), first)
assert heard == ["user"]

def stuck_here():
    os.kill(os.getpid(), two.signal_number)

stuck_here()
path = os.path.join(folder.path, two.name)
assert "stuck_here" in open(path).read()
assert os.stat(path).st_mode & 0o777 == 0o600
assert os.stat(os.path.join(folder.path, one.name)).st_size == 0

two.close(folder)
assert not os.path.exists(path)
os.kill(os.getpid(), two.signal_number)  # a keeper that is a moment too late
three = Stacks.open(folder, "trainer-00000-1-cccccccc.lock")
assert three.signal_number == two.signal_number, "signals are used again"
for number in range(40):
    Stacks.open(folder, f"trainer-00000-1-{number:08d}.lock")
last = Stacks.open(folder, "trainer-00000-1-dddddddd.lock")
assert last.signal_number == 0, "no more than there are"
last.close(folder)
print("all well")
"""


def test_the_signal_is_nobody_elses_and_harmless_to_the_end(runtime: Path) -> None:
    command = [sys.executable, "-c", SIGNALS, str(runtime)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.stdout == "all well\n", done.stderr
    assert done.returncode == 0


def test_nothing_of_it_is_left_in_the_runtime_folder(tmp_path: Path, runtime: Path) -> None:
    with flashckpt.attach(tmp_path / "run", options=OPTIONS, **Job().named):
        assert len(list(runtime.rglob("stacks-*"))) == 1
    assert list(runtime.rglob("stacks-*")) == []
    off = flashckpt.Options(watchdog=None)
    with flashckpt.attach(tmp_path / "run", options=off, **Job().named):
        assert list(runtime.rglob("stacks-*")) == []
