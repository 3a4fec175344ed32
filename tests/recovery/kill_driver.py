"""Recovers a mess again and again in a forked child that is killed at its n-th call, for every n, and then
once more to the end: the same must come out as where nobody was killed.

A program of its own: `python -m tests.recovery.kill_driver FOLDER RUNTIME MESS`. Writes what went wrong
as JSON.
"""

import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

from flashckpt.commit.verification import verify
from flashckpt.recovery.recover import recover
from flashckpt.recovery.report import Watcher
from flashckpt.store.local import LocalStore, System
from tests.crash.mortal import KilledAtCall
from tests.recovery import messes
from tests.recovery.scene import contents


class MortalWatcher(Watcher):
    """Dies between the steps of a recovery, too, where no call to the system is made."""

    def __init__(self, system: KilledAtCall) -> None:
        self._system = system

    def stage(self, name: str) -> None:
        self._system.live()

    def say(self, text: str) -> None:
        self._system.live()


class Scene:
    """A mess that is put back, all but the folders whose inodes identify the run on this node."""

    def __init__(self, folder: Path, runtime: Path, mess: str) -> None:
        self.run, self._kept = folder / "run", folder / "kept"
        getattr(messes, mess)(self.run, runtime)
        [own] = runtime.glob("flashckpt-*/*/")
        self.memory = own
        # So that the folder is never empty, never removed, and keeps its inode.
        (own / "stays").touch(mode=0o600)
        shutil.copytree(self.run, self._kept / "run")
        (own / "keeper.socket").unlink(missing_ok=True)
        shutil.copytree(own, self._kept / own.name)

    def put_back(self) -> None:
        for entry in (*self.run.iterdir(), *self.memory.iterdir()):
            if entry.name != "stays":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for folder in (self.run, self.memory):
            shutil.copytree(self._kept / folder.name, folder, dirs_exist_ok=True)

    def outcome(self) -> dict[str, Any]:
        """What is left at last, to be compared."""
        regions = sorted(name for name in os.listdir(self.memory) if name.startswith("slot-"))
        locks = sorted(name for name in os.listdir(self.memory) if name.endswith((".lock", ".socket")))
        return {"run": contents(self.run), "regions": regions, "locks": locks}


def lived(run: Path, said: Path, system: System | None) -> int:
    """The exit status of a child that recovers the run."""
    child = os.fork()
    if child == 0:
        try:
            watcher = MortalWatcher(system) if isinstance(system, KilledAtCall) else None
            report = recover(LocalStore(str(run), system), watcher=watcher)
            said.write_text(json.dumps(report.to_dict()["resume"]))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(folder: str, runtime: str, mess: str) -> None:
    scene, said = Scene(Path(folder), Path(runtime), mess), Path(folder) / "said"
    scene.put_back()
    assert lived(scene.run, said, None) == 0
    expected, expected_resume = scene.outcome(), said.read_text()
    committed = {row.step for row in verify(LocalStore(str(scene.run))).rows}
    faults, last, status = [], 0, 1
    while status:
        last += 1
        scene.put_back()
        status = lived(scene.run, said, KilledAtCall(last))
        if status and not os.WIFSIGNALED(status):
            faults.append(f"call {last}: the recovery itself failed")
            break
        said.unlink(missing_ok=True)
        if lived(scene.run, said, None) != 0:
            faults.append(f"call {last}: the second recovery failed")
            continue
        found = scene.outcome()
        if found != expected:
            keys = [key for key in expected if found[key] != expected[key]]
            names = found["run"].keys() | expected["run"].keys()
            odd = [name for name in names if found["run"].get(name) != expected["run"].get(name)]
            faults.append(f"call {last}: another outcome in {keys}: {sorted(odd)}, {found['regions']}")
        if said.read_text() != expected_resume:
            faults.append(f"call {last}: resumes from {said.read_text()}, not {expected_resume}")
    print(json.dumps({"calls": last - 1, "faults": faults, "committed": sorted(committed)}))


if __name__ == "__main__":
    main(*sys.argv[1:4])
