"""What the ledger says of a resume: one line, with its tier; none of a run that begins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashckpt
from flashckpt.persist.ledger import Event
from tests.checkpointer.test_loop import Job
from tests.events import ledger
from tests.waiting import until


def resumes(run: Path) -> list[dict[str, Any]]:
    return [line for line in ledger(run) if line["event"] == "resume"]


def test_one_line_a_resume_and_none_for_a_new_keeper(run: Path, kill_keepers: Callable[..., None]) -> None:
    assert resumes(run) == []
    [times] = [line for line in ledger(run) if line["event"] == "times"]
    assert (times["rank"], times["steps"] >= 1, times["captures"] >= 1) == (0, True, True)
    assert 0 <= times["step_seconds"] <= times["slowest_seconds"]
    assert all("rank" in line for line in ledger(run) if line["event"] in ("attach", "plan", "snapshot"))
    with flashckpt.attach(run, every=None, **Job().named) as checkpointer:
        keeper_link = checkpointer._keeper_link
        until(lambda: resumes(run), "the line: a keeper writes it when it comes to it")
        kill_keepers()
        until(lambda: keeper_link.report()["keeper_restarts"] >= 1, "another keeper, which is told all again")
        # Lines are written in order: once this one is there, all before it are.
        keeper_link.event(Event.SKIP, step=99)
        until(lambda: any(line.get("step") == 99 for line in ledger(run)), "the ledger")
        [line] = resumes(run)
        assert (line["step"], line["tier"], line["rank"]) == (4, "local", 0)
        assert line["from_attempt"].startswith("000001-")
        assert line["seconds"] >= 0
