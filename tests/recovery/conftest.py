"""The place of a run, and a run there without an attempt."""

from pathlib import Path

import pytest

from flashckpt.store.local import LocalStore
from tests.commit.runs import new_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def store(run: Path, runtime: Path) -> LocalStore:
    return new_run(run)
