"""The simulation of many ranks: its parts are taken by the code that reads real ones."""

from pathlib import Path

import pytest

from benchmarks import scale
from flashckpt.commit import steps
from tests import run_view

WORLD = 64


def test_every_operation_runs_on_a_simulated_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "_LAYERS", 1)
    # Parts that are small are read whole before a record; here they are to be read as large ones are.
    monkeypatch.setattr(steps, "_FEW_BYTES", 0)
    run = scale.Simulation(tmp_path / "run", WORLD)
    run.make()
    for step in scale.STEPS:
        assert run.commit(step)
    run.fill(scale.STEPS[-1], scale.reshard(run))
    for name in scale._MEASURED:
        assert scale.measure(run.folder, WORLD, name)["cpu_seconds"] >= 0
    assert [each.step for each in run_view.visible(run.store)] == list(scale.STEPS[-2:])
