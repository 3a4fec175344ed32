"""Leaves the first parameter set of each test that starts processes in `make test`; the others are `long`.

A plugin of pytest. `make test-all` runs every set. A test whose sets each guard a promise of their own has
the mark `every_set`, and keeps all. A set that is named on the command line is run.
"""

from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("[" in argument for argument in config.args):
        return
    functions: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        is_short = item.get_closest_marker("long") is None
        if is_short and "process" in item.keywords and "every_set" not in item.keywords:
            functions[item.nodeid.partition("[")[0]].append(item)
    for sets in functions.values():
        for item in sets[1:]:
            item.add_marker(pytest.mark.long)
