"""Runs as a crash leaves them: real trainers and keepers, killed; and looking at all of it at once."""

import os
import signal
from pathlib import Path
from typing import Any

from flashckpt.commit.steps import read_checkpoint
from flashckpt.commit.view import View, folders_in
from flashckpt.format.catalogue import CATALOGUE
from flashckpt.format.manifest import PART, shard_name
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.memory.region import is_region_name
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.recovery.recover import recover
from flashckpt.recovery.report import RecoveryReport
from flashckpt.store import open_store
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.commit.runs import commit, name_of
from tests.keeper.driver import Process, runtime_of, the_keeper
from tests.keeper.fake import keeper_pid
from tests.processes import end
from tests.run_view import folder_of, manifest_of


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
        name = AttemptName.parse(self.attempt)
        assert name is not None
        self.name = name
        if is_started:
            self.trainer.do("start", parent, step, loaded)
        self.folder = runtime_of(run, runtime)
        self._stopped = 0

    def commit(self, *steps: int) -> "Crash":
        for step in steps:
            self.trainer.do("snapshot", step, True)
            self.trainer.do("committed", step)
        return self

    def slots(self, count: int = 3) -> "Crash":
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

    def both_killed(self) -> "Crash":
        pid = self._stopped or stop_keeper(self.folder)
        self.trainer.kill()
        end([pid])
        assert keeper_pid(self.folder) is None
        return self

    def data(self, step: int) -> Path:
        """The folder of a step's parts and shards: the fake trainer counts its boundaries as its steps."""
        return self.run / folder_of(open_store(str(self.run)), name_of(step, self.name).id)

    def uncommit(self, step: int) -> None:
        """As if the trainer and its keeper had died before they committed this step, their last."""
        store = open_store(str(self.run))
        view = View.of(store)
        manifest = manifest_of(store, name_of(step, self.name).id)
        (self.run / view.catalogue.path).unlink()
        assert View.of(store).checkpoint(name_of(step, self.name).id) is None
        (self.run / manifest).unlink()

    def half_written(self, step: int) -> Path:
        """A shard that the keeper, which is dead, left without a part."""
        self.data(step).mkdir(parents=True, exist_ok=True)
        path = self.data(step) / shard_name(0, "0badbeef")
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


def resume(report: RecoveryReport) -> tuple[int, str, str] | None:
    """(step, attempt, tier) of what a start would resume."""
    found = report.resume
    return None if found is None else (found.step, str(found.attempt), found.tier)


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
    """What a run holds, but for what no two recoveries have alike: names of shards, times, versions of the
    catalogue, the ledger, temporary files and shards of one that was killed."""
    view = View.of(LocalStore(str(run)))
    found: dict[str, Any] = {
        "attempt": str(view.attempt),
        "visible": [*map(str, view.visible())],
        "damaged": sorted(map(str, view.damaged)),
    }
    for each in view.catalogue.checkpoints:
        manifest = read_checkpoint(view.store, each)
        files = [f"{folder.path}/{name}" for folder, names in manifest.files().items() for name in names]
        shards = [name for name in files if name.endswith(".safetensors")]
        found[f"{each.step}@{each.id}"] = sorted((run / name).read_bytes() for name in shards)
    committed = {each.folder for each in view.catalogue.checkpoints}
    left = [
        each.path
        for each in folders_in(view.store)
        if any(PART.fullmatch(file.name) for file in view.store.list(each.path))
    ]
    found["uncommitted"] = sorted({*left} - {each.path for each in committed})
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.is_file() and path.suffix != ".tmp" and not name.startswith(("events/", "data/", CATALOGUE)):
            found[name] = path.read_bytes()
    return found


def begun(store: LocalStore, parent: CommitName | None = None, world: int = 1) -> AttemptName:
    """An attempt that is over."""
    snapshot, step = (None, 0) if parent is None else (parent.id, parent.step)
    name = run_view.begin(store, snapshot, step, world=world)
    run_view.end(store, name, "dead")
    return name


def trained(store: LocalStore, *steps: int) -> AttemptName:
    """An attempt that has committed these steps, and is over."""
    attempt = begun(store)
    for step in steps:
        commit(store, step, attempt)
    return attempt
