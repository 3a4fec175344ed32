"""Runs as a crash leaves them: real trainers and keepers, killed; and looking at all of it at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from flashckpt.format.names import AttemptName, shard_name
from flashckpt.memory.region import is_region_name
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.recovery.node import dead_keepers
from flashckpt.recovery.recover import recover
from flashckpt.recovery.report import RecoveryReport
from flashckpt.store import open_store
from tests.commit.runs import name_of
from tests.keeper.driver import Process, runtime_of, the_keeper
from tests.keeper.fake import keeper_pid
from tests.processes import end


def parsed(text: str) -> AttemptName:
    name = AttemptName.parse(text)
    assert name is not None
    return name


def stop_keeper(folder: RuntimeFolder) -> int:
    """A keeper that is stopped sees no death and saves nothing."""
    pid = the_keeper(folder)
    os.kill(pid, signal.SIGSTOP)
    return pid


class Crash:
    """A trainer and its keeper. `both_killed` leaves named regions, and nobody who looks after them."""

    def __init__(self, run: Path, runtime: Path, *, parent: str | None = None, step: int = 0, **how: Any):
        self.run, self.runtime = run, runtime
        loaded = how.pop("loaded", None)
        is_started = how.pop("start", True)
        self.trainer = Process(run, runtime, **how)
        self.attempt = self.trainer.attempt
        self.name = parsed(self.attempt)
        if is_started:
            self.trainer.do("start", parent, step, loaded)
        self.folder = runtime_of(run, runtime)
        self._stopped = 0

    def commit(self, *steps: int) -> Crash:
        for step in steps:
            self.trainer.do("snapshot", step, True)
            self.trainer.do("committed", step)
        return self

    def slots(self, count: int = 3) -> Crash:
        self.trainer.do("slots", count)
        return self

    def seal(self, *steps: int, persist: bool = False) -> list[str]:
        """Snapshots that no keeper gets to see. Returns the names of their slots."""
        if not self._stopped:
            self._stopped = stop_keeper(self.folder)
        return [self.trainer.do("snapshot", step, persist)[0] for step in steps]

    def wake(self) -> None:
        """The keeper goes on."""
        os.kill(self._stopped, signal.SIGCONT)
        self._stopped = 0

    def both_killed(self) -> Crash:
        pid = self._stopped or stop_keeper(self.folder)
        self.trainer.kill()
        end([pid])
        assert keeper_pid(self.folder) is None
        return self

    def regions(self) -> list[str]:
        return regions_of(self.folder)

    def data(self, step: int) -> Path:
        """The folder of a step's parts and shards: the fake trainer counts its boundaries as its steps."""
        return self.run / name_of(step, self.name).id.data_folder

    def record(self, step: int) -> Path:
        return self.run / name_of(step, self.name).path

    def half_written(self, step: int) -> Path:
        """A shard that the keeper, which is dead, left without a part."""
        [nonce] = dead_keepers(self.folder)
        self.data(step).mkdir(parents=True, exist_ok=True)
        path = self.data(step) / shard_name(0, f"{nonce}beef")
        path.write_bytes(b"cut off")
        return path


def regions_of(folder: RuntimeFolder) -> list[str]:
    try:
        return [name for name in folder.names() if is_region_name(name)]
    except FileNotFoundError:
        return []


def recovered(run: Path, **how: Any) -> RecoveryReport:
    return recover(open_store(str(run)), **how)


def rows(report: RecoveryReport, kind: str | None = None) -> list[tuple[Any, ...]]:
    """(kind, outcome, step) of what was found."""
    return [
        (each.kind.value, each.outcome.value, each.step)
        for each in report.findings
        if kind is None or each.kind.value == kind
    ]


def whole_tree(*folders: Path) -> dict[str, tuple[Any, ...]]:
    """Every name under the folders, with everything that a change of any kind would change."""
    found: dict[str, tuple[Any, ...]] = {}
    for folder in folders:
        for path in [folder, *sorted(folder.rglob("*"))]:
            status = path.lstat()
            data = path.read_bytes() if path.is_file() else b""
            found[str(path)] = (status.st_mode, status.st_ino, status.st_nlink, status.st_mtime_ns, data)
    return found


def contents(run: Path) -> dict[str, Any]:
    """What a run holds, but for what no two recoveries have alike: names of shards, times, the ledger,
    temporary files of one that was killed."""
    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if not path.is_file() or name.startswith("events/") or path.suffix == ".tmp":
            continue
        folder = str(path.parent.relative_to(run))
        if path.suffix == ".safetensors":
            found.setdefault(f"{folder}/shards", []).append(path.read_bytes())
        elif ".quarantine-" in path.name:
            found.setdefault(f"{folder}/quarantines", []).append(1)
        else:
            names_a_shard = folder == "commits" or path.name.startswith("part-")
            found[name] = b"" if names_a_shard else path.read_bytes()
    return found
