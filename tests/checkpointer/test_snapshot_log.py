"""The log warns of an old snapshot once, and again when its age has doubled."""

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from flashckpt.checkpointer.run_log import SnapshotLog, limits_s


def test_an_age_is_warned_of_past_its_limit_and_when_it_has_doubled(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    capture: Any = SimpleNamespace(report=Counter, describe=list)
    told = SnapshotLog(capture, (600.0, 3600.0), clock=lambda: now[0])
    ages = []
    for seconds, sealed in [(0, 1), (599, 1), (601, 1), (900, 1), (1203, 1), (1300, 2), (1800, 2), (1901, 2)]:
        now[0] = float(seconds)
        with caplog.at_level(logging.WARNING, "flashckpt"):
            caplog.clear()
            list(told.poll(sealed, None))
        ages += [seconds] if caplog.records else []
        assert all("sealed in memory" in record.getMessage() for record in caplog.records)
    assert ages == [601, 1203, 1901], "the age begins anew with a newer step"
    now[0] = 3600.0
    with caplog.at_level(logging.WARNING, "flashckpt"):
        list(told.poll(3, None))
    assert "no snapshot has been committed to storage for 60 minutes" in caplog.text
    assert told.report() == {"sealed_age_seconds": 0.0, "committed_age_seconds": 3600.0}


def test_limits_follow_the_users_own_intervals() -> None:
    never = float("inf")
    assert limits_s("auto", "5min") == (600.0, 900.0)
    assert limits_s("auto", "1s") == (600.0, 60.0)
    assert limits_s(10, 100) == (600.0, 3600.0)
    assert limits_s(None, None) == (never, never)
