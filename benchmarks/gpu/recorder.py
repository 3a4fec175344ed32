"""A plugin of pytest that writes each test's outcome down as it happens, and leaves out what was begun.

So a test that ends the whole process, or that never ends, costs itself and nothing else: pytest is started
again and goes on after it. Tests that start processes run last. FLASHCKPT_GPU_RECORD names the file, one
JSON object a line.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

# After one of these every further call of CUDA in the process fails.
_DEVICE_LOST = ("illegal memory access", "device-side assert", "launch failure", "misaligned address")


def _path() -> str:
    return os.environ["FLASHCKPT_GPU_RECORD"]


def _write(entry: dict[str, Any]) -> None:
    with open(_path(), "a") as file:
        file.write(json.dumps(entry) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    with open(_path()) as file:
        begun = {json.loads(line)["test"] for line in file}
    items[:] = [item for item in items if item.nodeid not in begun]
    # These take a minute or more: where the time ends first, the tests of the device itself have run.
    items.sort(key=lambda item: item.get_closest_marker("process") is not None)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write({"test": report.nodeid, "outcome": "not collected", "told": report.longreprtext})


def pytest_runtest_logstart(nodeid: str, location: tuple[str, int | None, str]) -> None:
    _write({"test": nodeid, "outcome": "begun"})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        told = report.longreprtext if report.outcome != "passed" else ""
        if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
            told = report.longrepr[2]
        lost = report.outcome == "failed" and any(sign in told for sign in _DEVICE_LOST)
        entry = {"test": item.nodeid, "outcome": report.outcome, "seconds": report.duration, "told": told}
        _write({**entry, "device_lost": True} if lost else entry)
        if lost:
            item.session.shouldstop = "the device is lost to this process"
    return report
