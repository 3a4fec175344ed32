"""`enabled=False` and FLASHCKPT=off: the loop as it is without the library, with the same calls."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flashckpt
from flashckpt import OptionError
from tests.checkpointer.test_loop import loader

PROGRAM = """
import sys, threading
import flashckpt
class Stateful:
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
seen = []
batches = flashckpt.loop(range(3), "run", steps=7, every=1, thing=Stateful())
for batch in batches:
    seen.append(batch)
with flashckpt.attach("run", thing=Stateful()) as ckpt:
    for epoch in ckpt.epochs(2):
        for position, batch in ckpt.enumerate([5, 6]):
            ckpt.save()
        ckpt.save()
        ckpt.wait()
print(seen, batches.completed, ckpt.completed, ckpt.resumed, ckpt.report())
print(threading.active_count(), sorted(m for m in sys.modules if m in (
    "torch", "numpy", "flashckpt._native", "flashckpt.keeper.client", "flashckpt.checkpointer.resume")))
"""


@pytest.mark.process
def test_nothing_is_started_written_or_imported(tmp_path: Path) -> None:
    environment = {**os.environ, "FLASHCKPT": "off", "FLASHCKPT_RUNTIME": str(tmp_path / "runtime")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 1, 2, 0, 1, 2, 0] 7 4 None {}", "1 []"]
    assert list(tmp_path.iterdir()) == []
    assert done.stderr.count("FLASHCKPT=off: nothing is restored from run, and nothing is saved") == 2


def test_it_ends_where_it_is_told_to() -> None:
    batches = flashckpt.loop(range(100), "never/made", enabled=False)
    for _ in batches:
        if batches.completed == 3:
            batches.stop()
    assert batches.completed == 4
    assert batches.checkpointer.stop_reason == "stop"
    assert list(batches) == []
    assert not Path("never").exists()


def test_a_loaders_attributes_are_handed_on_and_options_are_looked_at() -> None:
    data = loader()
    with flashckpt.attach("never/made", enabled=False) as ckpt:
        batches: Any = ckpt.batches(data)
        assert batches.dataset is data.dataset
        assert len(batches) == 6
        ckpt.step()
        assert ckpt.completed == 1
        for _ in batches:
            ckpt.step()
            break
        assert ckpt.completed == 2
    with pytest.raises(OptionError, match="every"):
        flashckpt.attach("never/made", every="often", enabled=False)  # type: ignore[arg-type]
