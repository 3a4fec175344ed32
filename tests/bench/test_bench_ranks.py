"""The benchmark of several ranks: what stands in its table, and what it counts as CPU."""

import io
import os
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from benchmarks.ranks import cpu, table
from benchmarks.settings import GIB


def job(peer: str, held_s: float, run: int, others: dict[str, Any]) -> dict[str, Any]:
    return {
        "peer": peer,
        "kind": "ddp",
        "world": 2,
        "run": run,
        "state_bytes": GIB // 2,
        "rounds": [],
        "alone": [{"held_s": held_s, "durable_s": 1.0, "cpu_s": 2.0, "written_bytes": GIB // 2}],
        "loads": {"2": {"seconds": 3.0, "exact": True}, "4": others},
        "load_average": 0.5,
    }


RIGHT = {"seconds": 4.0, "exact": True}
WRONG = {"seconds": 0.1, "exact": False, "differ": ["model.head.weight"]}
RESULTS: dict[str, Any] = {
    "settings": {"state_bytes": GIB // 2},
    "jobs": [
        *(job("flashckpt", held_s, run, RIGHT) for run, held_s in enumerate([1, 2, 4])),
        *(job("dcp_save", 10, run, WRONG) for run in range(3)),
    ],
    "failed": {"nvrx ddp 2": "it wants [/CUDA]"},
}


@pytest.mark.fast
def test_ratios_are_of_pairs_and_what_failed_or_was_loaded_wrong_is_said() -> None:
    ours = table.of_peer(RESULTS, "ddp", 2, "flashckpt")
    theirs = table.of_peer(RESULTS, "ddp", 2, "dcp_save")
    assert table.ratio(theirs["held"], ours["held"]) == 5.0, "the median of 10, 5 and 2.5"
    assert theirs["load on others"] == [[], [], []]
    assert theirs["written"] == [[1.0]] * 3
    assert theirs["CPU"] == [[4.0]] * 3
    console = Console(width=200, file=io.StringIO(), record=True)
    table.show(RESULTS, console)
    told = console.export_text()
    assert "NOT what was saved: model.head.weight" in told
    assert "nvrx ddp 2 ranks: cannot run here: it wants [/CUDA]" in told


@pytest.mark.process
def test_the_cpu_of_children_that_have_ended_is_counted() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print(); input()"
    word = f"FLASHCKPT_TEST_CPU=of-{os.getpid()}"
    name, _, value = word.partition("=")
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, name: value},
    ) as parent:
        parent.stdout.readline()
        assert 0.25 < cpu.seconds_of(word) < 30
        parent.communicate(b"\n")
    assert cpu.seconds_of(word) == 0
