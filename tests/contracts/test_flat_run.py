"""A run's whole life on a store that is no file system: trainers, keepers and the shell, each a process of
its own, find it by its URL, and nothing of the run is anywhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import flashckpt
from flashckpt.errors import OptionError
from flashckpt.persist.ledger import lines_of
from flashckpt.store import open_store
from tests.contracts.flat_store import installed
from tests.resume.training import ROOT, Trainer, last_of_each
from tests.waiting import until


class FlatTrainer(Trainer):
    """A trainer of a run at a URL, always in an interpreter of its own: the zygote has no such store."""

    def __init__(self, folder: Path, runtime: Path, **options: object) -> None:
        super().__init__(folder, runtime, "workers", **options)
        self.run = f"flat://{folder}/bucket"  # type: ignore[assignment]

    def events(self, kind: str) -> list[dict[str, object]]:
        store = open_store(str(self.run))
        names = sorted({entry.name.partition(".")[0] for entry in store.list("events")})
        return [line for name in names for line in lines_of(store, name) if line["event"] == kind]

    def wait_committed(self) -> None:
        until(self.committed, "a committed step")

    def committed(self) -> list[int]:
        try:
            return flashckpt.steps(str(self.run))
        except flashckpt.NoSuchStepError:
            return []


@pytest.fixture
def trainer(tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> FlatTrainer:
    packages = installed(tmp_path / "packages")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", packages)
    return FlatTrainer(tmp_path, runtime)


def shell(*arguments: object) -> Any:
    """What a command says as JSON."""
    program = "from flashckpt.cli.main import main; main()"
    command = [sys.executable, "-c", program, *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def reference(folder: Path, runtime: Path) -> dict[object, object]:
    folder.mkdir()
    whole = Trainer(folder, runtime, "workers")
    whole.finish(fresh=True)
    return last_of_each(whole.records())


def test_a_scheme_that_no_package_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="flat://"):
        open_store(f"flat://{tmp_path}")


def test_killed_and_resumed_from_memory_and_from_storage(
    trainer: FlatTrainer, tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]
) -> None:
    trainer.kill_in_step(6, fresh=True)
    trainer.kill_in_step(9, fresh=True)
    trainer.wait_committed()
    kill_keepers(remove_regions=True)
    trainer.finish(fresh=True)
    memory, storage = trainer.events("resume")
    assert (memory["tier"], storage["tier"]) == ("memory", "local")
    assert last_of_each(trainer.records()) == reference(tmp_path / "reference", runtime)
    assert flashckpt.verify(str(trainer.run)).ok
    assert {name.partition("-")[0] for name in os.listdir(tmp_path)} == {
        "bucket", "err", "log", "packages", "reference",
    }  # fmt: skip


def test_what_a_crash_left_in_memory_is_recovered_pruned_and_exported(
    trainer: FlatTrainer, tmp_path: Path, kill_keepers: Callable[..., None]
) -> None:
    trainer.options["persist_every"] = 2
    trainer.kill_in_step(9, fresh=True)
    until(lambda: len(trainer.committed()) >= 2, "two committed steps")
    kill_keepers()
    url = str(trainer.run)
    before = trainer.committed()
    shell("recover", url, "--dry-run")
    assert trainer.committed() == before
    report = shell("recover", url)
    recovered = trainer.committed()
    assert report["resume"]["step"] == recovered[-1] >= 7
    assert report["resume"]["tier"] == "local"
    assert shell("recover", url)["found"] == []

    gone = shell("prune", url, "--keep-last", 2)
    assert [row["step"] for row in gone["gone"]] == recovered[:-2]
    assert trainer.committed() == gone["kept"] == recovered[-2:]
    assert [row["step"] for row in shell("ls", url)["steps"]] == recovered[-2:]
    assert shell("show", url)["step"] == recovered[-1]
    assert flashckpt.verify(url).ok

    exported = shell("export", url, tmp_path / "weights", "--only", "model")
    assert exported["step"] == recovered[-1]
    loaded, weights = flashckpt.load(url, only="model"), load_file(tmp_path / "weights")
    assert weights.keys() <= loaded.keys(), "tied leaves are stored once"
    assert all((loaded[name] == tensor).all() for name, tensor in weights.items())

    name = flashckpt.branch(url, recovered[-2])
    assert trainer.committed() == recovered[-2:-1]
    trainer.finish(fresh=True)
    assert trainer.resumed_steps() == [recovered[-2]]
    assert name != trainer.events("resume")[0]["from_attempt"]
