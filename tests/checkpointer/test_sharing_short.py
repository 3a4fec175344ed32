"""Constants that slots share where memory is short: no snapshot ends for what is asked for in vain."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt.checkpointer.facade import Checkpointer
from flashckpt.errors import OutOfRoomError
from flashckpt.keeper.client import KeeperClient
from flashckpt.memory.slots import SlotRing
from tests.checkpointer.test_frozen import attach
from tests.checkpointer.test_sharing_attacked import WIDE, Job
from tests.waiting import until


class Little:
    """Room for slots of `limit` bytes of image and no more, once that is set. `asked` are sizes asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.limit, ask = 0, KeeperClient.ask_slots

        def in_little_room(client: KeeperClient, count: int, metadata: int, image: int, **how: Any) -> Any:
            self.asked.append(image)
            if self.limit and image > self.limit:
                raise OutOfRoomError("no room", needed=image, available=self.limit)
            return ask(client, count, metadata, image, **how)

        monkeypatch.setattr(KeeperClient, "ask_slots", in_little_room)


def frozen(job: Job, name: str, *shape: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.randn(*shape), requires_grad=False)
    job.model.register_parameter(name, parameter)
    return parameter


def shares(checkpointer: Checkpointer, count: int) -> bool:
    """Whether snapshots share so many constants."""
    arrangement = checkpointer._capture._following.current
    shared = arrangement.plan.shared if arrangement is not None else None
    return shared is not None and len(shared.digests) == count


def is_captured(checkpointer: Checkpointer) -> bool:
    return checkpointer._attendant.newest_sealed_step() == checkpointer.completed


def test_slots_that_are_large_enough_again_are_not_asked_for_any_more(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for what is thawed is in the slack: what was asked for meanwhile must not fail a save for good."""
    job, little = Job(), Little(monkeypatch)
    thaws = frozen(job, "thaws", 512, 512)
    with attach(tmp_path / "run", job) as checkpointer:  # type: ignore[arg-type]
        job.share(checkpointer)
        little.limit = 4 * WIDE * WIDE
        thaws.data.add_(1)
        until(
            lambda: (job.train(checkpointer), shares(checkpointer, 1) and is_captured(checkpointer))[1],
            "a region of the base alone",
        )
        asked = len(little.asked)
        job.train(checkpointer, 4)
        assert is_captured(checkpointer)
        assert len(little.asked) == asked
        take, tries = SlotRing.take, list[SlotRing]()

        def busy(ring: SlotRing) -> Any:
            tries.append(ring)
            return None if len(tries) < 3 else take(ring)

        checkpointer._progress.step += 1  # a boundary that the pace passed over
        monkeypatch.setattr(SlotRing, "take", busy)
        checkpointer.save()
        assert is_captured(checkpointer)
        little.limit = 0
    assert flashckpt.load(tmp_path / "run")["model.thaws"].equal(thaws)


def test_a_region_that_cannot_be_mapped_leaves_no_descriptor(tmp_path: Path, runtime: Path) -> None:
    job = Job()
    with attach(tmp_path / "run", job) as checkpointer:  # type: ignore[arg-type]
        job.share(checkpointer)
        [path] = runtime.glob("*/*/constants-*")
        grant = checkpointer._session.keeper.keep_constants(path.name)
        with path.open("r+b", buffering=0) as region:
            began = region.read(64)
            os.pwrite(region.fileno(), bytes(64), 0)
            with pytest.raises(flashckpt.DamagedError):
                grant.open()
            os.pwrite(region.fileno(), began, 0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(grant.descriptor)


def test_what_no_region_can_hold_does_not_take_the_others_out_of_theirs(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that is frozen later and does not lie row by row: with it, nothing was shared any more, and
    for slots that hold all there may be no memory."""
    job, little = Job(), Little(monkeypatch)
    late = nn.Parameter(torch.randn(256, 128, 3, 3).to(memory_format=torch.channels_last))
    job.model.register_parameter("late", late)
    job.optimizer.add_param_group({"params": [late]})
    with attach(tmp_path / "run", job) as checkpointer:  # type: ignore[arg-type]
        late.grad = torch.zeros_like(late)
        job.share(checkpointer)
        little.limit = 4 * WIDE * WIDE
        late.requires_grad_(False)
        late.grad = None
        job.optimizer.param_groups.pop()
        job.optimizer.state.pop(late, None)
        for _ in range(8):
            job.train(checkpointer)
            assert is_captured(checkpointer)
        assert shares(checkpointer, 1)
        little.limit = 0
        checkpointer.save()
    assert flashckpt.load(tmp_path / "run")["model.late"].equal(late)


def test_a_constant_that_is_laid_out_otherwise_leaves_the_others_shared(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, little = Job(), Little(monkeypatch)
    turned = frozen(job, "turned", 64, 64, 9, 9)
    with attach(tmp_path / "run", job) as checkpointer:  # type: ignore[arg-type]
        job.share(checkpointer)
        assert shares(checkpointer, 2)
        little.limit = 4 * WIDE * WIDE
        turned.data = turned.data.to(memory_format=torch.channels_last)
        until(
            lambda: (job.train(checkpointer), shares(checkpointer, 1) and is_captured(checkpointer))[1],
            "a region of the base alone",
        )
        little.limit = 0
        checkpointer.save()
    assert flashckpt.load(tmp_path / "run")["model.turned"].equal(turned)
