"""A snapshot of several ranks on a device is sealed once the training thread has confirmed it."""

import pytest

from flashckpt import _native
from flashckpt.memory.slot import SlotRing, SlotState

from .accelerated import Accelerated, Maker
from .test_host import Run, check


def states(loop: Accelerated) -> list[SlotState]:
    return [slot.state().state for slot in loop.ring.slots]


def sealed_step(loop: Accelerated) -> int | None:
    newest = loop.ring.newest_sealed()
    return None if newest is None else newest[1].step


def test_the_next_boundary_after_the_last_copy_confirms(make: Maker) -> None:
    loop = make(group_failure=lambda: "")
    for step in range(1, 6):
        assert loop.iterate().captured, "no boundary is skipped for it"
        loop.finish()
        assert states(loop).count(SlotState.UNCONFIRMED) == 1
        assert sealed_step(loop) == (step - 1 or None)
    loop.capture.wait()
    assert loop.result() == "exact"


def test_a_boundary_before_the_last_copy_does_not_confirm(make: Maker) -> None:
    loop = make(group_failure=lambda: "")
    loop.iterate()
    loop.finish()
    loop.device.side.hold()
    assert loop.iterate().captured
    loop.device.compute.drain()
    loop.train()
    assert not loop.boundary().captured
    assert sealed_step(loop) == 1
    loop.finish()
    assert sealed_step(loop) == 1
    assert loop.iterate().captured
    assert sealed_step(loop) == 2


def test_a_wait_confirms_and_the_same_boundary_does_not(make: Maker) -> None:
    loop = make(group_failure=lambda: "")
    loop.iterate()
    loop.finish()
    assert not loop.capture.boundary(loop.step, lambda: b"{}", due=True).captured
    assert sealed_step(loop) is None
    loop.capture.wait()
    assert loop.result() == "exact"


def test_a_group_failure_discards_unconfirmed_snapshots(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    """They may have been computed after the abort. Confirmed snapshots stay."""
    failure = ""
    loop = make(group_failure=lambda: failure)
    for _ in range(2):
        loop.iterate()
        loop.finish()
    failure = "an abort"
    for lost in (1, 2):
        loop.iterate()
        loop.finish()
        assert sealed_step(loop) == 1
        assert loop.capture.report()["snapshots_lost"] == lost
    loop.capture.wait()
    assert sealed_step(loop) == 1
    assert SlotState.UNCONFIRMED not in states(loop)
    assert loop.capture.lost_step == loop.step
    assert loop.capture.lost_reason == "an abort"
    assert len(caplog.records) == 1, "logged once, counted always"


def test_an_end_without_a_wait_does_not_confirm(make: Maker) -> None:
    loop = make(group_failure=lambda: "")
    loop.iterate()
    loop.finish()
    loop.capture.close()
    assert sealed_step(loop) is None


def test_a_state_in_host_memory_is_sealed_at_its_boundary(ring: SlotRing, sealer: _native.Sealer) -> None:
    run = Run(ring, sealer, group_failure=lambda: "never asked")
    run.iterate()
    check(run, ring)
    run.capture.close()


def test_host_memory_that_a_device_writes_is_confirmed(make: Maker) -> None:
    """An offloaded optimizer: its state depends on results of collectives on the device."""
    loop = make(group_failure=lambda: "")
    loop.device.pin(loop.model.a)
    loop.device._adopted.clear()
    assert loop.boundary(ordered=True).captured
    loop.finish()
    assert sealed_step(loop) is None
    loop.capture.wait()
    assert sealed_step(loop) == loop.step
