"""A signal ends a read of storage before its end, whatever reads."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashckpt
from tests.faults.conftest import READ, Faults
from tests.processes import keepers_of
from tests.waiting import until

pytestmark = pytest.mark.process

NUM_CHUNKS = 14
_PROGRAM = """
import signal, sys, torch, flashckpt

def ended(number, frame):
    print("signal", flush=True)
    raise KeyboardInterrupt

signal.signal(int(sys.argv[3]), ended)
torch.set_num_threads(1)
what, run = sys.argv[1:3]
if what == "attach":
    flashckpt.attach(run, every=None, model=torch.nn.Linear(3584, 4096, bias=False))
elif what == "export":
    from flashckpt.export.step import export
    from flashckpt.store import open_store
    export(open_store(run), run + ".safetensors")
else:
    getattr(flashckpt, what)(run)
"""


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("attach", signal.SIGINT),
        ("verify", signal.SIGINT),
        pytest.param("attach", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("load", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("export", signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_a_long_read(
    what: str,
    number: signal.Signals,
    tmp_path: Path,
    runtime: Path,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    with flashckpt.attach(run, every=None, model=torch.nn.Linear(3584, 4096, bias=False)) as made:
        made.step()
        made.save()
    until(lambda: not keepers_of(runtime), "the keeper to leave, with what it has in memory")
    [shard] = run.glob("data/*/*/rank-*")
    assert shard.stat().st_size > NUM_CHUNKS * (4 << 20)
    monkeypatch.setenv("FAULT_FOLDER", str(shard))
    faults.become("hang", READ)
    command = [sys.executable, "-c", _PROGRAM, what, str(run), str(int(number))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        until(lambda: faults.hits > 0, "a read")
        process.send_signal(number)
        assert process.stdout.readline() == b"signal\n"
        # What is begun from here on takes a minute.
        faults.become("slow", READ, micros=60_000_000)
        assert process.wait(240) != 0
    assert 0 < faults.hits < NUM_CHUNKS
    assert not list(tmp_path.glob("*.safetensors"))
