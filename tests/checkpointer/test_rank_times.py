"""What the ledger is told of a rank's own times: medians, now and then, the more seldom the more ranks."""

from typing import Any

from flashckpt.checkpointer.run_log import TimesLog
from flashckpt.persist.ledger import Event


class Told:
    """A rank among `world`, with a clock that is set by hand."""

    def __init__(self, world: int = 1) -> None:
        self.now, self.lines = 0.0, list[dict[str, Any]]()
        self.times = TimesLog(world, self._tell, lambda: self.now)
        self.report = {"snapshots": 0.0, "capture_call_seconds": 0.0}

    def _tell(self, event: Event, **fields: Any) -> None:
        assert event is Event.TIMES
        self.lines.append(fields)

    def after(self, seconds: float, *lengths: float, captures: int = 0, last: bool = False) -> None:
        self.now += seconds
        self.report["snapshots"] += captures
        self.report["capture_call_seconds"] += 0.25 * captures
        self.times.add(list(lengths), self.report, last=last)


def test_a_line_has_the_medians_since_the_one_before() -> None:
    told = Told()
    told.after(11, 1.0, 2.0, 30.0, captures=2)
    told.after(61, 5.0, 5.0)
    first, second = told.lines
    assert (first["steps"], first["step_seconds"], first["slowest_seconds"]) == (3, 2.0, 30.0)
    assert (first["captures"], first["capture_seconds"]) == (2, 0.25)
    assert (second["steps"], second["step_seconds"], second["slowest_seconds"]) == (2, 5.0, 5.0)
    assert (second["captures"], second["capture_seconds"]) == (0, None)
    assert first["host"]


def test_all_ranks_together_write_no_more_than_fifty_lines_a_second() -> None:
    for world in (1, 1000, 16384):
        told = Told(world)
        hour = 3600
        for _ in range(hour):
            told.after(1, 0.5)
        assert 1 <= len(told.lines) <= 1 + hour / 60
        assert world * (len(told.lines) - 1) <= 50 * hour
