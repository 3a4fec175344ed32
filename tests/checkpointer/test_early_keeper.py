"""A new process starts its run's keeper before it has imported the rest: that one, and no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import flashckpt

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib.abc, json, sys
from pathlib import Path
import torch, flashckpt
from flashckpt.keeper.protocol import ELECTION_LOCK
from flashckpt.memory.runtime import RuntimeFolder, holder_of
from tests.descriptors import closed_after
from tests.waiting import until

seen = {}

def keeper():
    folders = list(Path(sys.argv[2]).glob("flashckpt-*/*"))
    if not folders:
        return None
    runtime = closed_after(RuntimeFolder.at(str(folders[0])))
    try:
        return holder_of(runtime, ELECTION_LOCK)
    finally:
        runtime.close()

class Gate(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "flashckpt.checkpointer.resume" and Path(sys.argv[1], "run.json").exists():
            until(keeper, "a keeper")
            seen["early"] = keeper()

sys.meta_path.insert(0, Gate())
torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
checkpointer = flashckpt.attach(sys.argv[1], every=1, model=model)
seen["then"], seen["resumed"] = keeper(), checkpointer.resumed and checkpointer.resumed.step
checkpointer.step()
checkpointer.save()
checkpointer.wait()
checkpointer.close()
print(json.dumps(seen))
"""


def started(run: Path, runtime: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, str(run), str(runtime)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_keeper_that_was_started_early_is_the_runs(tmp_path: Path, runtime: Path) -> None:
    run = tmp_path / "run"
    first = started(run, runtime)
    assert first == {"then": first["then"], "resumed": None}, "no run, no keeper yet"
    second = started(run, runtime)
    assert second["early"] == second["then"] != first["then"]
    assert second["resumed"] == flashckpt.steps(run)[0]
