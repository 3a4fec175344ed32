"""Driving fake trainers in processes of their own, and waiting for what keepers do."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashckpt.commit.steps import is_whole, read_step
from flashckpt.commit.view import View
from flashckpt.errors import DamagedError, NoSuchStepError
from flashckpt.format.names import AttemptName
from flashckpt.keeper.daemon import Keeper
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.store import open_store
from tests.descriptors import closed_after, readable
from tests.events import ledger
from tests.keeper.fake import FakeTrainer, content, keeper_pid, open_runtime
from tests.processes import candidates, end

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A fake trainer as a process: `do` sends a command and waits for its answer."""

    def __init__(self, run: Path, base: Path, **options: Any) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.keeper.fake"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self.pid = self._child.pid
        closed_after(self)
        self.attempt: str = self.do("attach", str(run), str(base), options)

    def do(self, *command: Any) -> Any:
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(command) + "\n")
        self._child.stdin.flush()
        assert readable(self._child.stdout), f"no answer to {command}"
        line = self._child.stdout.readline()
        assert line, f"the trainer died of {command}"
        return json.loads(line)

    def save(self, *steps: int) -> None:
        """Persist steps, one after the other."""
        for step in steps:
            self.do("snapshot", step, True)
            self.do("committed", step)

    def end(self) -> None:
        """End in order."""
        self.do("end")
        self.gone()

    def kill(self) -> None:
        self._child.kill()
        self.gone()

    close = kill

    def gone(self) -> None:
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.close()
        self._child.wait(240)


def begun(
    run: Path, base: Path, *, slots: int = 3, parent: AttemptName | None = None, step: int = 0, **options: Any
) -> FakeTrainer:
    """A trainer of this process whose attempt has begun, from a step of its parent, with slots."""
    trainer = FakeTrainer(run, base, **options)
    trainer.start(parent, step)
    trainer.take_slots(slots)
    return trainer


def begun_process(run: Path, base: Path, *, slots: int = 3, **options: Any) -> Process:
    """The same as a process, which may be killed."""
    trainer = Process(run, base, **options)
    trainer.do("start", None, 0, None)
    trainer.do("slots", slots)
    return trainer


def saved(trainer: FakeTrainer, *steps: int) -> None:
    """Persist steps, one after the other."""
    for step in steps:
        trainer.snapshot(step, persist=True)
        trainer.wait_committed(step)


def ended(trainer: FakeTrainer) -> None:
    """End in order, and wait until the keeper has left: it leaves nothing behind."""
    trainer.end()
    eventually(lambda: keeper_pid(trainer.folder) is None)
    eventually(lambda: not os.path.exists(trainer.folder.path))


def eventually(condition: Callable[[], Any], timeout_s: float = 240) -> Any:
    """Wait for something that must become true."""
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, "it did not come true"
        time.sleep(0.01)
    return found


def runtime_of(run: Path, base: Path) -> RuntimeFolder:
    _, identity = open_runtime(run, base)
    return closed_after(RuntimeFolder.open(str(base), identity))


class InProcess:
    """A keeper of this process. What it has open goes with the test, as it would with its own process."""

    def __init__(self, run: Path, folder: RuntimeFolder, starter: int = 0) -> None:
        closed_after(folder)
        keeper = Keeper.elected(str(run), folder, starter)
        assert keeper is not None
        self.keeper = keeper
        closed_after(self)

    def close(self) -> None:
        keeper = self.keeper
        keeper.regions.close()
        if keeper._server._listener.fileno() >= 0:  # it has not left
            keeper._server.close()
        keeper._election.release(keeper.folder)


def the_keeper(folder: RuntimeFolder) -> int:
    """The elected keeper, once no other is on its way. Ranks that start at once begin one each, and who waits
    long for one begins a second: those that come late end, unless the elected one has died by then."""

    def alone() -> int | None:
        pid = keeper_pid(folder)
        return None if pid is None or candidates(folder.path) else pid

    pid: int = eventually(alone)
    return pid


def kill_keeper(folder: RuntimeFolder) -> int:
    """SIGKILL the elected keeper: its lock is free, or that of one which a trainer has started since."""
    pid = the_keeper(folder)
    end([pid])
    assert keeper_pid(folder) != pid
    return pid


def committed(run: Path) -> list[int]:
    """Visible steps that are whole, each verified: its shard holds, byte for byte, what the step had. Old
    steps go after a commit is reported: one that goes meanwhile is looked for again."""
    while True:
        seen = View.of(open_store(str(run))).visible()
        try:
            return _verified(run)
        except (NoSuchStepError, DamagedError, FileNotFoundError):
            if View.of(open_store(str(run))).visible() == seen:
                raise


def _verified(run: Path) -> list[int]:
    view = View.of(open_store(str(run)))
    found = []
    for each in view.visible():
        if not is_whole(view, each):
            continue
        record = read_step(view, each)
        for path, contents in record.files(0):
            data, layout = (run / path).read_bytes(), contents.layout()
            assert data[: layout.data_start] == layout.header
            for leaf in layout.leaves:
                start = layout.data_start + leaf.offset
                assert data[start : start + leaf.num_bytes] == content(leaf, each.step), (each, leaf.name)
        found.append(each.step)
    return found


def told(run: Path, event: str, count: int) -> list[dict[str, Any]]:
    """The lines of one kind, once there are so many: a keeper writes them beside what they tell of."""

    def found() -> list[dict[str, Any]]:
        return [line for line in ledger(run) if line["event"] == event]

    eventually(lambda: len(found()) >= count)
    return found()
