"""What a training that nobody kills does, computed once."""

import pytest

from tests.crash.job import reference_of
from tests.zygote import shared


@pytest.fixture(scope="session")
def reference() -> list[int]:
    """Digests of a plain loop of 24 steps."""
    return reference_of(shared(), 24)
