"""A snapshot of a provisional boundary is sealed once a batch follows, and never where none does."""

import pytest

from flashckpt import _native
from flashckpt.memory.slot import SlotRing, SlotState

from .accelerated import Accelerated, Maker
from .test_confirmed import sealed_step, states
from .test_host import Run, check


def provisional(loop: Accelerated, **how: object) -> None:
    loop.capture.begin_provisional()
    loop.capture.boundary_index += 1
    assert loop.iterate(**how).captured


def test_host_memory_is_sealed_when_a_batch_follows(ring: SlotRing, sealer: _native.Sealer) -> None:
    run = Run(ring, sealer)
    run.capture.begin_provisional()
    run.iterate()
    assert ring.newest_sealed() is None
    run.capture.wait()
    assert ring.newest_sealed() is None, "to wait for copies is not to know that a batch follows"
    assert run.capture.has_provisional
    run.capture.confirm()
    check(run, ring)
    run.capture.close()


@pytest.mark.parametrize("copied", [False, True], ids=["before its copies end", "after"])
def test_a_batch_follows(make: Maker, copied: bool) -> None:
    """No boundary is needed for the seal: the program may be killed in the next iteration."""
    loop = make()
    loop.device.side.hold()
    provisional(loop)
    if copied:
        loop.finish()
        assert states(loop).count(SlotState.UNCONFIRMED) == 1
    loop.capture.confirm()
    assert copied == (sealed_step(loop) == 1)
    assert loop.result() == "exact"
    assert loop.capture.report()["snapshots_lost"] == 0
    for _ in range(5):
        provisional(loop)
        loop.capture.confirm()
        assert loop.result() == "exact"


@pytest.mark.parametrize("copied", [False, True], ids=["before its copies end", "after"])
def test_no_batch_follows(make: Maker, copied: bool) -> None:
    loop = make()
    provisional(loop)
    loop.capture.confirm()
    loop.finish()
    loop.device.side.hold()
    loop.capture.order()
    loop.capture.begin_provisional()
    loop.capture.boundary_index += 1
    loop.train()
    assert loop.boundary().captured
    if copied:
        loop.finish()
    assert loop.capture.withdraw()
    loop.finish()
    assert sealed_step(loop) == 1
    assert states(loop).count(SlotState.SEALED) == 1
    assert not {SlotState.UNCONFIRMED, SlotState.WRITING} & {*states(loop)}, "its slot can be used again"
    capture = loop.capture
    assert capture.is_ordered, "the order that it has fulfilled is open again"
    assert capture.lost_step is None, "wait() has nothing to raise"
    assert capture.report()["snapshots_lost"] == 0
    assert not capture.withdraw()
    for _ in range(5):
        provisional(loop)
        capture.confirm()
        assert loop.result() == "exact"


def test_several_ranks_confirm_at_the_next_boundary(make: Maker) -> None:
    """That a batch follows says nothing about the process groups."""
    loop = make(group_failure=lambda: "")
    provisional(loop)
    loop.finish()
    loop.capture.confirm()
    assert sealed_step(loop) is None
    provisional(loop)
    assert sealed_step(loop) == 1


def test_a_boundary_that_is_passed_confirms_no_provisional_one(make: Maker) -> None:
    loop = make(group_failure=lambda: "")
    provisional(loop)
    loop.finish()
    loop.capture.boundary_index += 1
    loop.iterate()
    assert sealed_step(loop) is None


def test_an_end_without_a_batch_seals_nothing(make: Maker) -> None:
    loop = make()
    provisional(loop)
    loop.finish()
    loop.capture.close()
    assert sealed_step(loop) is None
