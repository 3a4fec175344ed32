"""A leaf that was torn on the device is synchronised from then on: exact or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashckpt.capture.copies import DeviceCopies
from flashckpt.capture.devices import DigestTable
from tests.capture.simulated import SimulatedMark, SimulatedStream

from .accelerated import LARGE, Accelerated, Maker, warm


@pytest.fixture
def host_waits(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Let the held side stream continue once the host waits for a mark."""
    happenings: list[Callable[[], object]] = []
    wait = SimulatedMark.wait

    def waits(mark: SimulatedMark) -> None:
        while happenings:
            happenings.pop(0)()
        wait(mark)

    monkeypatch.setattr(SimulatedMark, "wait", waits)
    return happenings


def torn_on_wait(loop: Accelerated, rogue: SimulatedStream) -> torch.Tensor:
    """A teacher with the way `wait` from the start, torn once by an unnamed stream."""
    loop.device.others = (rogue,)
    teacher = loop.add("teacher", torch.randn(LARGE))
    warm(loop)
    assert loop.ways()["more.teacher"] == "wait"
    loop.begin_copies()
    loop.device.compute.settle()
    loop.kernel(lambda: teacher.add_(1), rogue)
    rogue.drain()
    assert loop.result() == "torn"
    assert loop.audit() == ["more.teacher"]
    loop.train()
    loop.device.compute.drain()
    return teacher


def test_the_host_waits_for_a_leaf_torn_on_the_way_wait(
    make: Maker, host_waits: list[Callable[[], object]], caplog: pytest.LogCaptureFixture
) -> None:
    """Events do not hold back an unknown stream; a waiting host enqueues nothing on it."""
    rogue, loop = SimulatedStream("rogue"), make(device_memory=0)
    teacher = torn_on_wait(loop, rogue)
    for _ in range(2):
        loop.device.side.hold()
        host_waits.append(loop.device.side.release)
        assert loop.boundary().captured
        loop.kernel(lambda: teacher.add_(1), rogue)
        rogue.drain()
        assert loop.result() == "exact"
        loop.train()
        loop.device.compute.drain()
    assert [r.getMessage().split()[0] for r in caplog.records] == ["more.teacher"]
    rogue.close()


def test_a_second_digest_refuses_a_synchronised_leaf_written_meanwhile(
    make: Maker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another thread writes just after the copy: bytes and digest agree, although both may have been read in
    the middle of the write."""
    rogue, loop = SimulatedStream("rogue"), make(device_memory=0)
    teacher = torn_on_wait(loop, rogue)
    again = DeviceCopies._digest_direct_again

    def written(transfer: DeviceCopies, table: DigestTable) -> None:
        teacher.add_(1)
        again(transfer, table)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceCopies, "_digest_direct_again", written)
        for _ in range(2):
            assert loop.boundary().captured
            assert loop.result() == "none"
            loop.train()
            loop.device.compute.drain()
    assert len(caplog.records) == 1, "logged once, counted always"
    assert loop.capture.report()["snapshots_lost"] == 3
    loop.boundary()
    assert loop.result() == "exact"
    rogue.close()
