"""A keeper that can be told to stand still."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.keeper.faulty import faulty_keeper


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    return tmp_path / "faults"


@pytest.fixture
def keeper(run: Path, runtime: Path, faults: Path) -> Iterator[int]:
    """A keeper that can be told to stand still, and its process id."""
    with faulty_keeper(run, runtime, faults) as process:
        yield process.pid
