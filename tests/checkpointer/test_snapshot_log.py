"""What the log and the ledger are told of snapshots: each thing once, and again where it has changed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flashckpt.checkpointer.run_log import SnapshotLog, limits_s
from flashckpt.persist.ledger import Event


class Captures:
    """What a capture says of itself."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("snapshots", "snapshots_skipped", "snapshots_lost"), 0.0)
        self.plan: list[tuple[str, int, int]] = []

    def report(self) -> dict[str, float]:
        return dict(self.counts)

    def describe(self) -> list[tuple[str, int, int]]:
        return self.plan


def log_of(captures: Captures, limits: tuple[float, float], now: list[float]) -> SnapshotLog:
    capture: Any = captures
    return SnapshotLog(capture, limits, clock=lambda: now[0])


def test_counts_and_plans_are_told_where_they_changed() -> None:
    captures = Captures()
    told = log_of(captures, (1e9, 1e9), [0.0])
    assert list(told.poll(None, None)) == []
    captures.counts["snapshots"], captures.plan = 3.0, [("direct", 2, 64)]
    assert list(told.poll(5, None)) == [
        (Event.SNAPSHOT, {"step": 5, "count": 3}),
        (Event.PLAN, {"ways": [["direct", 2, 64]]}),
    ]
    captures.counts["snapshots_skipped"] = 2.0
    assert list(told.poll(5, None)) == [(Event.SKIP, {"step": 5, "count": 2})]
    assert list(told.poll(5, None)) == []


def test_an_age_is_warned_of_past_its_limit_and_when_it_has_doubled(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    told = log_of(Captures(), (600.0, 3600.0), now)
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
