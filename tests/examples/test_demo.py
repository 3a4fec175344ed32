"""A shorter demo than `make demo`. It exits with 0 only if every bit is equal."""

import json
import os
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "tiny_gpt" / "demo.py"


def test_a_killed_training_ends_bit_for_bit_like_an_uninterrupted_one(tmp_path: Path, runtime: Path) -> None:
    output = tmp_path / "output"
    options = ["--steps", "12", "--kill", "5", "--kill-both", "9", "--rank-steps", "8", "--output"]
    # Several threads wait for each other at each operation, which is slow on a busy machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(DEMO), *options, str(output)],
        capture_output=True, text=True, timeout=290, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((output / "result.json").read_text())
    assert [kill["step"] for kill in result["kills"]] == [5, 9]
    for kill in result["kills"]:
        assert 0 < kill["resumed_from"] < kill["step"], "the kill was not in the middle of its step"
    lost = sum(kill["steps_lost"] for kill in result["kills"])
    assert result["losses_compared"] == 12 + lost
    assert "training resumes from step" in done.stdout
    assert result["losses_equal"]
    assert result["weights_equal"]
    ranks = result["ranks"]
    assert 0 < ranks["resumed_from"] < ranks["killed_in"]
    assert ranks["losses_compared"] >= 2 * 8
    assert result["rank_losses_equal"]
    assert result["rank_weights_equal"]
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
