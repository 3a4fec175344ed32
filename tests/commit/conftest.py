"""A run, and an attempt that has begun in it."""

from pathlib import Path

import pytest

from flashckpt.format.names import AttemptName
from flashckpt.store.local import LocalStore
from tests.commit.runs import attempt_at, new_run


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return new_run(tmp_path / "run")


@pytest.fixture
def attempt(store: LocalStore) -> AttemptName:
    return attempt_at(store)
