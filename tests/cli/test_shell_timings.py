"""What `show` says of times, from a ledger that is believed in nothing."""

import pytest
from made_runs import MadeRun, Shell

pytestmark = pytest.mark.process


LIES = [
    '{"event":"persist","step":10,"seconds":NaN,"num_bytes":1}',
    '{"event":"persist","step":10,"seconds":-1,"num_bytes":1}',
    '{"event":"persist","step":10,"seconds":"1","num_bytes":[]}',
    '{"event":"persist","step":10,"seconds":1e400,"num_bytes":1' + "0" * 400 + "}",
    '{"event":"persist","step":10,"seco',
    "[" * 100_000,
    '"event"',
    '{"event":["persist"]}',
    "\udcff\x00",
]


def test_times_are_those_of_the_ledger_and_lies_change_nothing(run: MadeRun, shell: Shell) -> None:
    first = run.attempt()
    run.commit(first, 10)
    second = run.attempt(first, 10)
    run.tell(
        first,
        {"event": "persist", "step": 9, "seconds": 7, "num_bytes": 1},
        *LIES,
        {"event": "persist", "step": 10, "seconds": 0.5, "num_bytes": 1 << 20, "direct": False},
        {"event": "commit", "step": 10},
    )
    resumed = {"event": "resume", "step": 10, "seconds": 0.25, "tier": "memory", "from_attempt": str(first)}
    run.tell(second, resumed)
    done = shell("show", run.folder, "10", "--json")
    assert done.code == 0, done.err
    assert done.json["persisted"] == [{"seconds": 0.5, "num_bytes": 1048576, "direct": False}]
    assert done.json["resumed"] == [{"attempt": str(second), "seconds": 0.25, "tier": "memory"}]
    text = shell("show", run.folder, "10").out
    assert "in 0.50 s, 2.0 MiB/s, through the page cache" in text
    assert f"by {second} in 0.25 s, from memory" in text
