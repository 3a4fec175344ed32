"""Runs the folders with the slowest tests first, so that no worker is left alone with one at the end.

A plugin of pytest. Workers steal from the end of each other's queues.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
SLOW = ("ranks", "examples", "integrations", "crash", "resume", "documents", "signals", "dcp", "cache")
"""Slowest first, by the average of a test."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    folder = item.path.relative_to(ROOT).parts[0] if item.path.is_relative_to(ROOT) else ""
    return SLOW.index(folder) if folder in SLOW else len(SLOW)
