"""Lists the failed tests of a run for `scripts/run-tests`, and names the flaky ones in its second run.

A plugin of pytest. Owns two environment variables: FAILURES names the file that the first run writes its
failed tests to; FLAKY says that this is the second run, whose tests have failed once.
"""

from __future__ import annotations

import json
import os

import pytest

FAILURES, FLAKY = "FLASHCKPT_TEST_FAILURES", "FLASHCKPT_TEST_FLAKY"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    failed = {report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())}
    if path := os.environ.get(FAILURES):
        with open(path, "w") as file:
            json.dump(sorted(failed), file)
    if os.environ.get(FLAKY):
        for report in stats.get("passed", ()):
            if report.nodeid not in failed:
                terminalreporter.write_line(f"flaky: {report.nodeid} failed once and passed alone")
