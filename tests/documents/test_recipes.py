"""Every recipe of docs/recipes.md does what it says: killed in its middle and started again, it comes to what
a run comes to that was never stopped, bit for bit."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import flashckpt
from tests import zygote
from tests.documents.recipe_program import recipes


def run(title: str, folder: Path, runtime: Path, kill_at: int = -1) -> Any:
    environment = {**os.environ, "FLASHCKPT_RUNTIME": str(runtime)}
    folder.mkdir(exist_ok=True)
    words = ["tests.documents.recipe_program", title, str(folder), str(kill_at)]
    with open(folder / "err", "ab") as err:
        process = zygote.start(words, stdout=zygote.PIPE, stderr=err, env=environment)
    with process.stdout:
        said = process.stdout.read()
    code = process.wait(timeout=120)
    assert code == (-9 if kill_at > 0 else 0), (folder / "err").read_text()
    return json.loads(said) if said else None


def test_there_are_recipes() -> None:
    assert len(recipes()) == 8


@pytest.mark.parametrize("title", sorted(recipes()))
def test_a_recipe_that_is_killed_comes_to_the_same(title: str, tmp_path: Path, runtime: Path) -> None:
    straight = run(title, tmp_path / "straight", runtime)
    killed = tmp_path / "killed"
    run(title, killed, runtime, kill_at=6)
    assert run(title, killed, runtime) == straight
    [folder] = (killed / "runs").iterdir()
    assert flashckpt.verify(folder).ok
    # Else nothing was gone on from, and nothing is shown.
    assert (killed / "err").read_text().count("resumed from step") == 1, (killed / "err").read_text()
