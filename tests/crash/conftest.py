"""One zygote for all tests that kill: torch is imported once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="session")
def reference(zygote: Zygote) -> list[int]:
    """Digests of a plain loop of 24 steps."""
    return zygote.reference(24)
