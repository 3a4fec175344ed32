"""The run of an import: killed at every point, from the shell, and resumed by several ranks."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

import flashckpt
from flashckpt.checkpointer.trainer_run import TrainerRun, attach_trainer
from flashckpt.cli.command import ExitCode
from flashckpt.crashpoints import POINTS
from flashckpt.errors import MismatchError, RunError, UnusableRunError
from flashckpt.importing.run import Mapped, import_checkpoint
from tests.contracts.test_recover_contract import shell
from tests.importing.ranks import made
from tests.ranks.launch import Launcher
from tests.zygote import Zygote

pytestmark = pytest.mark.process


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model, optimizer = made()
    for _ in range(2):
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "last.pt")
    return tmp_path / "last.pt"


@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("import.")])
def test_a_killed_import_is_not_a_run(
    point: str, source: Path, tmp_path: Path, runtime: Path, zygote: Zygote
) -> None:
    """Neither a checkpoint nor a place for a fresh run."""
    run = tmp_path / "run"
    environment = {**os.environ, "FLASHCKPT_CRASH_AT": point}
    ended = zygote.run(["tests.contracts.shell", "import", str(source), str(run)], env=environment)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with pytest.raises(UnusableRunError):
        flashckpt.steps(run)
    model, optimizer = made()
    with pytest.raises(UnusableRunError, match=r"not taken for a fresh run"):
        flashckpt.attach(run, model=model, optimizer=optimizer)
    with pytest.raises(RunError, match="an import into it was interrupted"):
        import_checkpoint(source, run)
    shutil.rmtree(run)
    import_checkpoint(source, run)
    assert flashckpt.verify(run).ok


def test_a_run_made_concurrently_by_another_process_stays(source: Path, tmp_path: Path) -> None:
    import_checkpoint(source, tmp_path / "other")

    def become_a_run(done: int, total: int) -> None:
        shutil.copytree(tmp_path / "other" / "catalogue", tmp_path / "run" / "catalogue", dirs_exist_ok=True)

    with pytest.raises(RunError, match="Another process made .* a run"):
        import_checkpoint(source, tmp_path / "run", progress=become_a_run)
    assert flashckpt.steps(tmp_path / "run") == [0]
    assert not (tmp_path / "run" / "data").exists(), "the imported files are removed"


@pytest.mark.long
def test_two_ranks_resume_from_an_import(source: Path, tmp_path: Path, launcher: Launcher) -> None:
    for name in ("run", "run-ddp"):
        import_checkpoint(source, tmp_path / name)
    ranks = launcher.fork("tests.importing.ranks", tmp_path / "run", str(source), ranks=2).finished()
    for rank in ranks:
        assert rank.out == ["at 0: []", "after 1, seeded True"] * 2
    assert flashckpt.verify(tmp_path / "run").ok


def test_the_first_loop_resumes_from_an_import(source: Path, tmp_path: Path, runtime: Path) -> None:
    """A trainer of any integration, to which the run then belongs."""
    import_checkpoint(source, tmp_path / "run", Mapped(step="7", epoch="2"))
    model, optimizer = made()
    state = {"model": model, "optimizer": optimizer}

    def attached(integration: str) -> TrainerRun:
        return attach_trainer(
            tmp_path / "run", state, integration=integration, on_stop=lambda: None, every=1, persist_every=1
        )

    trainer = attached("testing")
    assert (trainer.checkpointer.completed, trainer.epoch, trainer.trained) == (7, 2, 0)
    assert optimizer.state[model[0].weight]["step"].item() == 2
    assert list(trainer.tap([1, 2])) == [1, 2]
    trainer.begin()
    trainer.end_epoch()
    trainer.close()
    with pytest.raises(MismatchError, match=r"made by flashckpt\.testing, and flashckpt\.other now"):
        attached("other")
    trainer = attached("testing")
    assert (trainer.checkpointer.completed, trainer.epoch) == (8, 3)
    trainer.close()


def test_the_shell(source: Path, tmp_path: Path) -> None:
    done = shell("import", source, tmp_path / "run", "--state", "net=model", "--step", 40, "--json")
    assert done.returncode == ExitCode.WELL, done.stderr
    told = json.loads(done.stdout)
    assert (told["step"], told["left_out"], told["skipped"]) == (40, ["optimizer"], [])
    assert told["parts"] == [{"name": "net", "tensors": 4, "num_bytes": 4 * 66}]
    assert flashckpt.steps(tmp_path / "run") == [40]
    assert shell("import", source, tmp_path / "other", "--state", "net").returncode == ExitCode.USAGE
