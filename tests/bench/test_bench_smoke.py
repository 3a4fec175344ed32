"""The benchmark still runs: flashckpt and one peer, 64 MiB, in the environment that runs the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """One run of flashckpt, torch.save and a peer that is not installed here: results, output, folder."""
    output = tmp_path_factory.mktemp("bench")
    options = ["--quick", "--here", "--no-figures", "--peers", "flashckpt,torch_save,nvrx"]
    command = [sys.executable, "-m", "benchmarks", *options, "--output", str(output)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    [numbers] = output.glob("*.json")
    return json.loads(numbers.read_text()), done.stdout, output


def test_both_are_measured_and_load_exactly_what_was_saved(run: tuple[dict[str, Any], str, Path]) -> None:
    measured = {peer["name"]: peer for peer in run[0]["peers"]}
    for name in ("flashckpt", "torch_save"):
        peer = measured[name]
        assert "failed" not in peer, peer
        assert peer["load"].get("exact") is True, peer["load"]
        assert peer["state_bytes"] >= 64 << 20
        assert all(block["taken"] for block in peer["rounds"])
        assert all(each["durable_s"] > 0 for each in peer["alone"])


def test_a_peer_that_cannot_run_is_reported_with_its_reason(run: tuple[dict[str, Any], str, Path]) -> None:
    results, printed, _ = run
    [nvrx] = [peer for peer in results["peers"] if peer["name"] == "nvrx"]
    assert "nvidia_resiliency_ext" in nvrx["failed"]
    assert "cannot run here" in printed
    assert "nvidia_resiliency_ext" in printed


def test_the_limits_of_the_machine_stand_beside(run: tuple[dict[str, Any], str, Path]) -> None:
    limits = run[0]["limits"][0]
    assert limits["num_bytes"] >= 64 << 20
    assert limits["copy_s"]
    assert limits.get("write_s") or limits["direct_refused"]


def test_only_the_report_is_left(run: tuple[dict[str, Any], str, Path]) -> None:
    left = {path.suffix for path in run[2].iterdir()}
    assert left <= {".json", ".png"}
