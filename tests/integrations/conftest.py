"""Gives a test the cases that its module names in IMPORTED: those of the first of these modules."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations import harness
from tests.integrations.harness import Cases
from tests.zygote import Zygote


@pytest.fixture(scope="module")
def framework(request: pytest.FixtureRequest) -> Iterator[Zygote]:
    """A process that has imported these modules, once for all tests of a module."""
    yield from harness.framework(*request.module.IMPORTED)


@pytest.fixture
def cases(framework: Zygote, tmp_path: Path, runtime: Path, request: pytest.FixtureRequest) -> Cases:
    return Cases(request.module.IMPORTED[0], framework, tmp_path, runtime)
