"""Constants that slots share where memory is short: no snapshot ends for what is asked for in vain."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt.checkpointer.attendant import Attendant
from flashckpt.checkpointer.checkpointer import Checkpointer
from flashckpt.checkpointer.sharing import Sharing
from flashckpt.errors import OutOfRoomError
from flashckpt.format.layout import Layout, Leaf
from flashckpt.keeper.client import KeeperClient
from flashckpt.memory.control_page import SlotSize
from flashckpt.memory.slot import Sealed, Slot, SlotRing
from flashckpt.state.tree import Tree
from tests.checkpointer.test_frozen import attach
from tests.checkpointer.test_sharing_attacked import WIDE, Job, regions
from tests.keeper.fake import FakeTrainer
from tests.waiting import until


class Little:
    """Room for slots of `limit` bytes of image and no more, once that is set. `asked` are sizes asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.limit, ask = 0, KeeperClient.slots

        def in_little_room(client: KeeperClient, count: int, needed: SlotSize, *how: Any) -> Any:
            self.asked.append(needed.image_bytes)
            if self.limit and needed.image_bytes > self.limit:
                raise OutOfRoomError("no room", needed=needed.image_bytes, available=self.limit)
            return ask(client, count, needed, *how)

        monkeypatch.setattr(KeeperClient, "slots", in_little_room)


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


def test_smaller_slots_do_not_replace_those_that_a_changed_constant_needs(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are ready when it has changed: where they were taken, nothing could be captured until there were
    larger ones again."""
    job, asked, ask, let_go = Job(), list[int](), KeeperClient.slots, threading.Event()
    thaws = frozen(job, "thaws", 512, 520)

    def slowly(client: KeeperClient, count: int, *how: Any) -> Any:
        if count > 3:
            asked.append(count)
            assert let_go.wait(240)
        return ask(client, count, *how)

    monkeypatch.setattr(KeeperClient, "slots", slowly)
    with attach(tmp_path / "run", job) as checkpointer:  # type: ignore[arg-type]
        slots = checkpointer._attendant.slots
        job.train(checkpointer, 2)
        until(lambda: asked or one(job, checkpointer), "smaller slots to be asked for")
        rounds, ring = checkpointer._attendant._rounds, slots.ring
        let_go.set()
        until(lambda: checkpointer._attendant._rounds > rounds + 2 and slots.ready, "smaller slots")
        assert slots.shrinking
        # The boundary before takes them up; here the change is seen first.
        take, slots.take_ready = slots.take_ready, lambda: None  # type: ignore[method-assign]
        thaws.data.add_(1)
        one(job, checkpointer)
        slots.take_ready = take  # type: ignore[method-assign]
        assert is_captured(checkpointer)
        one(job, checkpointer)
        assert is_captured(checkpointer)
        assert slots.ring is ring
        until(lambda: one(job, checkpointer) or len([*runtime.glob("*/*/slot-*")]) == 3, "them to go")
        job.share(checkpointer)
        assert slots.ring is not ring
        checkpointer.save()
    assert flashckpt.load(tmp_path / "run")["model.thaws"].equal(thaws)


def one(job: Job, checkpointer: Checkpointer) -> None:
    """One step, without standing still for slots."""
    job.optimizer.zero_grad()
    job.model(torch.randn(2, WIDE)).square().sum().backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    checkpointer.step()


def test_no_region_is_taken_that_nothing_can_fill(tmp_path: Path, runtime: Path) -> None:
    """It would keep its memory from the slots that are to hold what it does not."""
    trainer = FakeTrainer(tmp_path / "run", runtime, constants_kib=1024)
    trainer.start()
    trainer.take_slots()
    session = SimpleNamespace(keeper=trainer.client, attempt=trainer.attempt)
    reading = threading.Lock()

    def newest() -> tuple[Slot, Sealed] | None:
        assert reading.locked(), "another thread could unmap what is looked into"
        return trainer.ring.newest_sealed()

    sharing = Sharing(session, newest, lambda _: False, None, reading)  # type: ignore[arg-type]
    constants = trainer.image.constants
    assert constants is not None
    others = Layout.of([*constants.leaves, Leaf(name="more", dtype="float32", shape=(4,))])

    def tended(times: int) -> None:
        for _ in range(times):
            sharing._retry_s = 0.0
            sharing.tend()
            assert not sharing.ready

    sharing.want(constants, used=False)
    tended(20)
    trainer.snapshot(1)
    sharing.want(others, used=False)
    tended(20)
    assert not regions(runtime)
    sharing.want(constants, used=False)
    sharing._retry_s = 0.0
    until(lambda: sharing.tend() or sharing.ready, "a region that is filled")
    sharing.close()
    trainer.end()


def test_the_state_is_walked_once_for_the_size_of_its_first_slots(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may take minutes to be made, and every boundary meanwhile would pay for a walk."""
    job, walks, walk, let_go = Job(), list[Tree](), Tree.walk, threading.Event()
    ask = KeeperClient.slots

    def slowly(client: KeeperClient, *how: Any) -> Any:
        assert let_go.wait(240)
        return ask(client, *how)

    def seen(tree: Tree, used_up: Any) -> Any:
        walks.append(tree)
        return walk(tree, used_up)

    monkeypatch.setattr(KeeperClient, "slots", slowly)
    with attach(tmp_path / "run", job) as checkpointer:  # type: ignore[arg-type]
        with monkeypatch.context() as short:
            # The first boundary of all waits for them, for as long as a keeper is waited for.
            short.setattr(Attendant, "patience_s", 0.1)
            one(job, checkpointer)
        assert checkpointer._attendant.slots.preparing
        monkeypatch.setattr(Tree, "walk", seen)
        for _ in range(5):
            one(job, checkpointer)
        assert not walks
        let_go.set()
        until(lambda: checkpointer._attendant.slots.ready, "slots")
        one(job, checkpointer)
        assert is_captured(checkpointer)
