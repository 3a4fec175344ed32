"""Constants that slots share, attacked through whole runs: what is let go, what stays, what goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt.checkpointer.checkpointer import Checkpointer
from flashckpt.errors import OutOfRoomError
from flashckpt.keeper.client import KeeperClient
from flashckpt.memory.control_page import SlotSize
from tests.checkpointer.test_frozen import Adapted, attach
from tests.waiting import until

WIDE = 1536  # 9 MiB of base, beside which everything else is little


class Job:
    """A wide frozen base, and little that is trained."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Adapted()
        self.model.base = nn.Linear(WIDE, WIDE, bias=False)
        self.model.base.weight.requires_grad_(False)
        self.model.down, self.model.up = nn.Linear(WIDE, 4, bias=False), nn.Linear(4, WIDE, bias=False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=0.01)

    @property
    def named(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, checkpointer: Checkpointer, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(checkpointer.completed)
            self.model(torch.randn(2, WIDE, generator=generator)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            checkpointer.step()
            settled(checkpointer)

    def share(self, checkpointer: Checkpointer, *, smaller: bool = True) -> None:
        """Train until constants are shared, and the slots have shrunk to what they hold then."""
        capture = checkpointer._capture

        def is_done() -> bool:
            arrangement = capture._following.current
            is_shared = arrangement is not None and arrangement.plan.shared is not None
            slots = checkpointer._attendant.slots
            return is_shared and (not smaller or (capture.room_to_spare() is None and not slots.preparing))

        until(lambda: self.train(checkpointer) or is_done(), "the constants to be shared")

    def bytes(self) -> dict[str, bytes]:
        return {name: tensor.numpy().tobytes() for name, tensor in self.model.state_dict().items()}


class History:
    """Values that grow."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows)}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        self.rows = list(found["rows"])


def settled(checkpointer: Checkpointer) -> None:
    """Stand still until slots that were asked for are ready, or it is known that there are none."""
    slots = checkpointer._attendant.slots
    until(lambda: slots.ready or not slots.preparing or slots.error, "slots, or that there are none")


def regions(runtime: Path) -> list[str]:
    return sorted(path.name for path in runtime.glob("*/*/constants-*"))


def largest_slot(runtime: Path) -> int:
    return max(path.stat().st_size for path in runtime.glob("*/*/slot-*"))


def test_a_region_that_nothing_can_name_any_more_goes(tmp_path: Path, runtime: Path) -> None:
    job = Job()
    with attach(tmp_path / "run", job) as checkpointer:  # type: ignore[arg-type]
        job.share(checkpointer)
        assert len(regions(runtime)) == 1
        job.model.base.weight.data.add_(1)
        until(lambda: job.train(checkpointer) or not regions(runtime), "the region to go")
        checkpointer.save()
        checkpointer.wait()
    found = flashckpt.load(tmp_path / "run")["model.base.weight"]
    assert found.numpy().tobytes() == job.bytes()["base.weight"]


def test_a_region_is_held_as_long_as_a_snapshot_names_it(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in a memfd dies with its keeper, once this process has let go of it."""
    job, released, release = Job(), [], KeeperClient.release
    with attach(tmp_path / "run", job) as checkpointer:  # type: ignore[arg-type]

        def named() -> set[int]:
            ring = checkpointer._attendant.slots.ring
            sealed = [slot.sealed() for slot in ring.slots] if ring is not None else []
            return {each.record.constants_nonce for each in sealed if each is not None}

        def seen(client: KeeperClient, names: Sequence[str]) -> None:
            for name in names:
                if name.startswith("constants-"):
                    released.append((name, int(name.rpartition("-")[2], 16) in named()))
            release(client, names)

        monkeypatch.setattr(KeeperClient, "release", seen)
        job.share(checkpointer)
        [first] = regions(runtime)
        job.model.base.weight.data.add_(1)
        job.train(checkpointer)
        until(lambda: job.train(checkpointer) or released, "it to be let go")
        assert released == [(first, False)]


def test_a_snapshot_that_cannot_fill_a_region_is_looked_at_once(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that stands still between two snapshots must not have gigabytes copied beside it."""
    job, copies = Job(), []

    def damaged(*arguments: Any) -> bool:
        copies.append(arguments)
        return False

    with attach(tmp_path / "run", job) as checkpointer:  # type: ignore[arg-type]
        monkeypatch.setattr("flashckpt.checkpointer.sharing._copied", damaged)
        until(lambda: job.train(checkpointer) or copies, "a first try")
        attendant = checkpointer._attendant
        seen, rounds = len(copies), attendant._rounds
        until(lambda: attendant._rounds > rounds + 8, "some rounds")
        assert len(copies) <= seen + 1
        monkeypatch.undo()
        job.share(checkpointer)
    assert flashckpt.steps(tmp_path / "run")


def test_smaller_slots_are_not_fewer(tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, asked, ask = Job(), [], KeeperClient.slots

    def few(client: KeeperClient, count: int, *how: Any) -> Any:
        if count > 3:  # beside the three there are
            asked.append(count)
            count -= 1
        return ask(client, count, *how)

    monkeypatch.setattr(KeeperClient, "slots", few)
    history = History()
    with flashckpt.attach(tmp_path / "run", every=1, history=history, **job.named) as checkpointer:
        job.share(checkpointer, smaller=False)
        until(lambda: job.train(checkpointer) or asked, "smaller ones to be asked for")
        for _ in range(5):
            history.rows += [0] * 10_000  # with each page more, slots of another size would do
            job.train(checkpointer)
        assert asked == [6], "and it is not tried at every boundary"
        assert checkpointer.report()["slots"] == 3


def test_a_parameter_that_is_frozen_later_ends_no_snapshots_where_memory_is_short(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, kill_keepers: Callable[..., None]
) -> None:
    job = Job()
    late = nn.Parameter(torch.randn(512, 640))
    job.model.register_parameter("late", late)
    job.optimizer.add_param_group({"params": [late]})

    def no_room(*_: Any, **__: Any) -> Any:
        raise OutOfRoomError("no room", needed=2, available=1)

    run = tmp_path / "run"
    with attach(run, job) as checkpointer:  # type: ignore[arg-type]
        late.grad = torch.zeros_like(late)
        job.share(checkpointer)
        monkeypatch.setattr(KeeperClient, "slots", no_room)
        late.requires_grad_(False)
        late.grad = None
        job.optimizer.param_groups.pop()
        job.optimizer.state.pop(late, None)
        for _ in range(8):
            job.train(checkpointer)
            checkpointer.save()
            assert checkpointer._attendant.newest_sealed_step() == checkpointer.completed

        def both() -> bool:
            arrangement = checkpointer._capture._following.current
            assert arrangement is not None
            shared = arrangement.plan.shared
            return shared is not None and len(shared.digests) == 2

        # Filled from a slot and from the region before it: for that there need be no room in slots.
        until(lambda: job.train(checkpointer) or both(), "a region of both")
        checkpointer.save()
        until(lambda: job.train(checkpointer) or len(regions(runtime)) == 1, "the region before it to go")
        checkpointer.save()
        done, completed = job.bytes(), checkpointer.completed
        monkeypatch.undo()
        checkpointer.wait()
    kill_keepers(remove_regions=True)
    again = Job()
    again.model.register_parameter("late", nn.Parameter(torch.zeros(512, 640), requires_grad=False))
    with attach(run, again) as checkpointer:  # type: ignore[arg-type]
        assert checkpointer.completed == completed
        assert again.bytes() == done


def test_a_parameter_that_is_trained_again_ends_no_snapshots_where_memory_is_short(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, kill_keepers: Callable[..., None]
) -> None:
    """Of two constants the smaller is none any more: slots then need room for that one, and not for both."""
    job, run = Job(), tmp_path / "run"
    thaws = nn.Parameter(torch.randn(512, 520), requires_grad=False)
    job.model.register_parameter("thaws", thaws)
    limit = 0
    asked: list[int] = []
    ask = KeeperClient.slots

    def in_little_room(client: KeeperClient, count: int, needed: SlotSize, *how: Any) -> Any:
        asked.append(needed.image_bytes)
        if limit and needed.image_bytes > limit:
            raise OutOfRoomError("no room", needed=needed.image_bytes, available=limit)
        return ask(client, count, needed, *how)

    with attach(run, job) as checkpointer:  # type: ignore[arg-type]
        job.share(checkpointer)
        monkeypatch.setattr(KeeperClient, "slots", in_little_room)
        limit = 4 * WIDE * WIDE  # the base alone
        thaws.requires_grad_(True)
        thaws.data.add_(1)
        until(
            lambda: job.train(checkpointer) or max(asked, default=0) > limit, "slots for both to be asked for"
        )
        before = checkpointer._attendant.newest_sealed_step()

        def goes_on() -> bool:
            job.train(checkpointer)
            return checkpointer._attendant.newest_sealed_step() != before

        until(goes_on, "snapshots")
        checkpointer.save()
        arrangement = checkpointer._capture._following.current
        assert arrangement is not None
        assert arrangement.plan.shared is not None
        assert len(arrangement.plan.shared.digests) == 1
        done, completed = job.bytes(), checkpointer.completed
        monkeypatch.undo()
        checkpointer.wait()
    kill_keepers(remove_regions=True)
    again = Job()
    again.model.register_parameter("thaws", nn.Parameter(torch.zeros(512, 520)))
    with attach(run, again) as checkpointer:  # type: ignore[arg-type]
        assert checkpointer.completed == completed
        assert again.bytes() == done
