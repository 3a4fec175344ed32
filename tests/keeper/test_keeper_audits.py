"""Audits are for idle time: what is to be persisted does not wait for their end."""

from __future__ import annotations

from pathlib import Path

from flashckpt.format.layout import SlotImage
from tests.keeper.driver import begun, committed, eventually
from tests.keeper.fake import layout_for
from tests.keeper.faulty import faulty_keeper


def test_an_audit_ends_where_something_is_to_be_persisted(run: Path, tmp_path: Path, runtime: Path) -> None:
    faults = tmp_path / "faults"
    with faulty_keeper(run, runtime, faults):
        trainer = begun(run, runtime, kib=4096)
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


def test_a_slot_that_is_let_go_while_it_is_audited(run: Path, tmp_path: Path, runtime: Path) -> None:
    """Its memory goes: an audit that looks at it afterwards is the keeper's death."""
    faults = tmp_path / "faults"
    with faulty_keeper(run, runtime, faults) as keeper:
        trainer = begun(run, runtime, kib=16)
        before, names = trainer.slots, [grant.name for grant in trainer.grants]

        def left() -> list[str]:
            return [name for name in names if list(runtime.glob(f"*/*/{name}"))]

        (faults / "audit.pause").touch()
        trainer.snapshot(1)
        eventually(lambda: (faults / "audit.paused").exists())
        trainer.layout = layout_for(6000)
        trainer.image = SlotImage(trainer.layout)
        trainer.take_slots()
        trainer.client.release(names)
        trainer.snapshot(2)
        eventually(lambda: not left())
        (faults / "audit.pause").unlink()
        trainer.wait_for(lambda status: status.counts.get("audited"))
        assert keeper.poll() is None
        assert trainer.client.restarts == 0
        for slot in before:
            slot.close()
