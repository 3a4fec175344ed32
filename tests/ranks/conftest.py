"""What tests of several ranks get: a launcher, whose processes and memory go with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.launch import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    folder = tmp_path / "output"
    folder.mkdir()
    made = Launcher(folder)
    yield made
    made.close()
