"""A run without steps, and the shell as a process."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import Ended, MadeRun, Shell

from flashckpt.store import open_store
from tests import run_view
from tests.zygote import Zygote

# What takes long to import, of what the commands import; no torch, as in a shell.
IMPORTED = ("flashckpt.cli.main", "flashckpt.commit.verification", "flashckpt.recovery.recover")


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    store = open_store(tmp_path / "run")
    run_view.make(store)
    return MadeRun(tmp_path / "run", store)


@pytest.fixture(scope="session")
def forking() -> Iterator[Zygote]:
    process = Zygote(IMPORTED, {"COLUMNS": "200"})
    yield process
    process.close()


@pytest.fixture
def shell(forking: Zygote, tmp_path: Path, request: pytest.FixtureRequest) -> Shell:
    """Runs `flashckpt` with these arguments in a process of its own."""
    own = {} if "runtime" in request.fixturenames else {"FLASHCKPT_RUNTIME": str(tmp_path)}

    def call(*arguments: object) -> Ended:
        command = ["tests.contracts.shell", *map(str, arguments)]
        done = forking.run(command, env={**os.environ, "COLUMNS": "200", **own})
        return Ended(done.returncode, done.stdout, done.stderr)

    return call
