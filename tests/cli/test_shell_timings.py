"""What `show` says of times, from a ledger that is believed in nothing."""

from __future__ import annotations

import pytest
from made_runs import MadeRun, Shell

pytestmark = pytest.mark.process


def test_times_are_those_of_the_ledger(run: MadeRun, shell: Shell) -> None:
    first = run.attempt()
    run.commit(first, 10)
    second = run.attempt(first, 10)
    events = run.folder / "events"
    events.mkdir()
    (events / f"{first}.jsonl").write_text(
        '{"event":"persist","step":9,"seconds":7,"num_bytes":1}\n'
        '{"event":"persist","step":10,"seconds":0.5,"num_bytes":1048576,"direct":false}\n'
        '{"event":"commit","step":10}\n'
    )
    (events / f"{second}.jsonl").write_text(
        f'{{"event":"resume","step":10,"seconds":0.25,"tier":"memory","from_attempt":"{first}"}}\n'
    )
    told = shell("show", run.folder, "10", "--json").json
    assert told["persisted"] == [{"seconds": 0.5, "num_bytes": 1048576, "direct": False}]
    assert told["resumed"] == [{"attempt": str(second), "seconds": 0.25, "tier": "memory"}]
    text = shell("show", run.folder, "10").out
    assert "in 0.50 s, 2.0 MiB/s, through the page cache" in text
    assert f"by {second} in 0.25 s, from memory" in text


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


def test_a_ledger_that_lies_changes_nothing(run: MadeRun, shell: Shell) -> None:
    attempt = run.attempt()
    run.commit(attempt, 10)
    (run.folder / "events").mkdir()
    lines = "".join(f"{line}\n" for line in LIES)
    (run.folder / f"events/{attempt}.jsonl").write_bytes(lines.encode(errors="surrogateescape"))
    done = shell("show", run.folder, "10", "--json")
    assert done.code == 0, done.err
    assert done.json["persisted"] == []
