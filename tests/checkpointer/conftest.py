"""A run that is trained once, and given to each test that only asks what becomes of it."""

import shutil
from pathlib import Path

import pytest

from tests.checkpointer.damaged import trained
from tests.processes import end, keepers_of
from tests.waiting import until


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run, runtime = tmp_path_factory.mktemp("trained") / "run", tmp_path_factory.mktemp("runtime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHCKPT_RUNTIME", str(runtime))
        trained(run, [2, 4])
        until(lambda: not keepers_of(runtime), "the keeper to leave")
        end(keepers_of(runtime))
    return run


@pytest.fixture
def run(trained_once: Path, tmp_path: Path, runtime: Path) -> Path:
    """A run with the committed steps 2 and 4, and nothing of it in memory."""
    return Path(shutil.copytree(trained_once, tmp_path / "run"))
