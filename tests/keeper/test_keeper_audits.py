"""Audits are for idle time: what is to be persisted does not wait for their end."""

from __future__ import annotations

from pathlib import Path

from tests.keeper.driver import committed, eventually
from tests.keeper.fake import FakeTrainer
from tests.keeper.faulty import faulty_keeper


def test_an_audit_ends_where_something_is_to_be_persisted(tmp_path: Path, runtime: Path) -> None:
    run, faults = tmp_path / "run", tmp_path / "faults"
    with faulty_keeper(run, runtime, faults):
        trainer = FakeTrainer(run, runtime, kib=4096)
        trainer.start()
        trainer.take_slots()
        (faults / "audit.pause").touch()
        trainer.snapshot(1)
        eventually(lambda: (faults / "audit.paused").exists())
        trainer.snapshot(2, persist=True)
        # Answered twice: between the two the keeper has looked for what is to be done.
        for _ in range(2):
            assert trainer.client.status().waiting == (2,)
        (faults / "audit.pause").unlink()
        trainer.wait_committed(2)
        looked_at = (faults / "audit.windows").stat().st_size
        assert looked_at < 8, "windows of the 64 there are"
        # Later, in idle time, it is looked at to its end.
        trainer.snapshot(3)
        trainer.wait_for(lambda status: status.counts.get("audited"))
        assert (faults / "audit.windows").stat().st_size > 64
        assert committed(run) == [2]
        trainer.end()
