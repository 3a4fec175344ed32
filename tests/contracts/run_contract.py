"""A run's whole life on a store that is not a file system. Trainers, keepers and the shell, each in its own
process, find the run by its URL, and no file of it is anywhere else. A store's tests subclass RunContract."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import flashckpt
from flashckpt.persist.ledger import lines_of
from flashckpt.store import open_store
from tests import zygote
from tests.resume.training import Trainer, last_of_each, uninterrupted
from tests.waiting import until


class UrlTrainer(Trainer):
    """A trainer of a run at a URL, and the shell."""

    def __init__(self, url: str, folder: Path, runtime: Path, recipe: str = "workers") -> None:
        super().__init__(folder, runtime, recipe)
        self.run = url  # type: ignore[assignment]

    def shell(self, *arguments: object) -> Any:
        """The JSON output of a command."""
        done = zygote.shared().run(["tests.contracts.shell", *map(str, arguments), "--json"])
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

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


class RunContract:
    """The fixture `trainer` trains a run at an empty URL, which this process can open too."""

    def test_killed_and_resumed_from_memory_and_from_storage(
        self, trainer: UrlTrainer, tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]
    ) -> None:
        trainer.kill_in_step(6)
        trainer.kill_in_step(9)
        trainer.wait_committed()
        kill_keepers(remove_regions=True)
        trainer.kill_in_step(13)
        kill_keepers(remove_regions=True)
        trainer.options["copies"] = True
        trainer.finish()
        assert [event["tier"] for event in trainer.events("resume")] == ["memory", "local", "local"]
        assert last_of_each(trainer.records()) == uninterrupted(tmp_path, runtime, "workers")
        assert flashckpt.verify(str(trainer.run)).ok
        assert {name.partition("-")[0] for name in os.listdir(tmp_path)} <= {"err", "log", "uninterrupted"}

    def test_snapshots_left_by_a_crash_are_recovered_pruned_and_exported(
        self, trainer: UrlTrainer, tmp_path: Path, kill_keepers: Callable[..., None]
    ) -> None:
        trainer.options["persist_every"] = 2
        trainer.kill_in_step(9)
        until(lambda: len(trainer.committed()) >= 2, "two committed steps")
        kill_keepers()
        url, shell = str(trainer.run), trainer.shell
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
        loaded, weights = flashckpt.load(url, only="model", strip=True), load_file(tmp_path / "weights")
        assert weights.keys() <= loaded.keys(), "tied leaves are stored once"
        assert all((loaded[name] == tensor).all() for name, tensor in weights.items())

        name = flashckpt.branch(url, recovered[-2])
        assert trainer.committed() == recovered[-2:-1]
        trainer.finish()
        assert trainer.resumed_steps() == [recovered[-2]]
        assert name != trainer.events("resume")[0]["from_attempt"]
