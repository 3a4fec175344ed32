"""What never changes stands in memory once for all slots: these shrink, and every snapshot stays whole."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt.checkpointer.checkpointer import Checkpointer
from flashckpt.checkpointer.sharing import Sharing
from flashckpt.memory.control_page import Record
from flashckpt.memory.slot import Slot
from tests.checkpointer.test_frozen import BASE_BYTES, Job, attach, flip, record, straight
from tests.keeper.fake import FakeTrainer
from tests.memory.mounts import small_tmpfs
from tests.processes import end, keepers_of
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("runtime")

# A region of a slot: its metadata and its image have a MiB of slack each, and little else but the base.
LARGE_SLOT = 3 * BASE_BYTES + (256 << 10)
SMALL_SLOT = 2 * BASE_BYTES + (256 << 10)
_MOST_STEPS = 400


def regions(runtime: Path, kind: str) -> dict[str, int]:
    """Regions of a kind, by name, with their sizes in bytes."""
    found = {}
    for path in runtime.glob(f"*/*/{kind}-*"):
        with suppress(FileNotFoundError):  # the keeper lets go of some meanwhile
            found[path.name] = path.stat().st_size
    return found


def records(runtime: Path) -> dict[int, Record]:
    """The records of all snapshots in named slots, by step."""
    found = {}
    for path in runtime.glob("*/*/slot-*"):
        try:
            slot = Slot.open(os.open(path, os.O_RDWR), map_image=False)
        except (FileNotFoundError, flashckpt.DamagedError):  # gone, or not made yet
            continue
        sealed = slot.sealed()
        if sealed is not None:
            found[sealed.step] = sealed.record
        slot.close()
    return found


def train_until(job: Job, checkpointer: Checkpointer, condition: Callable[[], object], what: str) -> None:
    """Train on, at most some hundred steps, as a loop of short steps would."""
    for _ in range(_MOST_STEPS):
        if condition():
            return
        job.train(checkpointer, 1)
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come")


def shared(job: Job, checkpointer: Checkpointer, runtime: Path) -> str:
    """Train until snapshots name one region, and the slots are small. Its name."""

    def shares() -> bool:
        sizes = regions(runtime, "slot").values()
        return bool(sizes) and max(sizes) <= SMALL_SLOT and newest(runtime)[1] != 0

    train_until(job, checkpointer, shares, "a shared region")
    [name] = regions(runtime, "constants")
    return name


def newest(runtime: Path) -> tuple[int, int]:
    """Step of the newest snapshot in a named slot, and the nonce of the region that it names."""
    found = records(runtime)
    step = max(found, default=-1)
    return step, found[step].constants_nonce if found else 0


def test_a_run_holds_what_never_changes_once(tmp_path: Path, runtime: Path) -> None:
    run, job = tmp_path / "run", Job()
    with attach(run, job) as checkpointer:
        job.train(checkpointer, 4)
        before = sum(regions(runtime, "slot").values())
        assert 3 * SMALL_SLOT < before <= 3 * LARGE_SLOT
        name = shared(job, checkpointer, runtime)
        assert int(name.rsplit("-", 1)[1], 16) == newest(runtime)[1]
        slots, region = regions(runtime, "slot"), regions(runtime, "constants")[name]
        assert BASE_BYTES < region < BASE_BYTES + (64 << 10)
        assert len(slots) == 3
        assert sum(slots.values()) + region < before - BASE_BYTES * 3 // 2
        for step in (1, 2):
            job.train(checkpointer, 1, save=True)
            each = record(run, checkpointer.completed)
            assert each.constants is not None, step
            assert [leaf.name for leaf in each.constants.leaves] == ["model.base.weight"]
        assert regions(runtime, "constants") == {name: region}
        done = checkpointer.completed
    assert job.bytes() == straight(done)
    assert flashckpt.verify(run).ok
    assert flashckpt.load(run)["model.base.weight"].numpy().tobytes() == straight(0)["base.weight"]
    until(lambda: not regions(runtime, "constants"), "the region gone with its run")


@pytest.mark.parametrize("keeper", ["alive", "killed"])
def test_a_resume_takes_region_and_slots_back(
    tmp_path: Path, runtime: Path, keeper: str, kill_keepers: Callable[..., None]
) -> None:
    run, job = tmp_path / "run", Job()
    broken = attach(run, job)
    name = shared(job, broken, runtime)
    job.train(broken, 2)
    done = broken.completed
    until(lambda: newest(runtime)[0] == done, "the last snapshot")
    slots = regions(runtime, "slot")
    del broken  # as a death would leave it
    if keeper == "killed":
        kill_keepers()
    again = Job(blank=True)
    with attach(run, again) as checkpointer:
        assert checkpointer.resumed is not None
        assert (checkpointer.resumed.tier, checkpointer.completed) == ("memory", done)
        assert again.bytes() == straight(done)
        # Its own first snapshots name the region already, and the slots are large enough for them.
        train_until(again, checkpointer, lambda: min(records(runtime)) > done, "its own in every slot")
        assert {each.constants_nonce for each in records(runtime).values()} == {newest(runtime)[1]} != {0}
        assert list(regions(runtime, "constants")) == [name]
        assert regions(runtime, "slot") == slots
        again.train(checkpointer, 1, save=True)
    assert again.bytes() == straight(checkpointer.completed)
    assert flashckpt.verify(run).ok


def test_a_resume_from_disk_fills_another_region(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]
) -> None:
    run, job = tmp_path / "run", Job()
    with attach(run, job) as checkpointer:
        first = shared(job, checkpointer, runtime)
        job.train(checkpointer, 1, save=True)
        done = checkpointer.completed
    kill_keepers(remove_regions=True)
    again = Job(blank=True)
    with attach(run, again) as checkpointer:
        assert checkpointer.resumed is not None
        assert (checkpointer.resumed.tier, checkpointer.completed) == ("local", done)
        second = shared(again, checkpointer, runtime)
        assert second != first
        done = checkpointer.completed
    assert again.bytes() == straight(done)


def test_one_that_changes_is_saved_in_the_very_snapshot_of_its_change(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]
) -> None:
    run, job = tmp_path / "run", Job()
    with attach(run, job) as checkpointer:
        shared(job, checkpointer, runtime)
        job.train(checkpointer, 1, save=True)
        last = checkpointer.completed
        job.model.base.weight.data.add_(1)
        checkpointer.save()
        checkpointer.wait()
        now = job.bytes()
        assert now["base.weight"] != straight(0)["base.weight"]
        job.train(checkpointer, 1, save=True)
        job.train(checkpointer, 1, save=True)
        assert record(run, checkpointer.completed).constants is None
        train_until(job, checkpointer, lambda: not regions(runtime, "constants"), "the region's end")
        job.train(checkpointer, 1, save=True)
        done = checkpointer.completed
    loaded = {step: flashckpt.load(run, step)["model.base.weight"] for step in flashckpt.steps(run)}
    base = {step: weight.numpy().tobytes() for step, weight in loaded.items()}
    assert base[last] == straight(0)["base.weight"]
    assert all(each == now["base.weight"] for step, each in base.items() if step > last)
    kill_keepers(remove_regions=True)
    again = Job(blank=True)
    with attach(run, again) as checkpointer:
        assert checkpointer.completed == done
        assert again.bytes() == job.bytes()


def test_a_region_that_rots_is_found_and_the_run_goes_on_from_disk(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]
) -> None:
    run, job = tmp_path / "run", Job()
    broken = attach(run, job)
    name = shared(job, broken, runtime)
    job.train(broken, 2)
    done = broken.completed
    del broken
    until(lambda: flashckpt.steps(run)[-1:] == [done], "the newest snapshot")
    kill_keepers()
    [path] = runtime.glob(f"*/*/{name}")
    flip(path, -2000)
    again = Job(blank=True)
    with attach(run, again) as checkpointer:
        assert checkpointer.resumed is not None
        assert (checkpointer.resumed.tier, checkpointer.completed) == ("local", done)
        assert again.bytes() == straight(done)


class Convolved(Job):
    """A frozen weight whose bytes do not lie row by row."""

    def __init__(self, *, blank: bool = False) -> None:
        super().__init__(blank=blank)
        self.model.conv = nn.Conv2d(256, 256, 3).to(memory_format=torch.channels_last)
        for parameter in self.model.conv.parameters():
            parameter.requires_grad_(False)
        assert not self.model.conv.weight.is_contiguous()


def test_what_has_to_be_made_row_major_stays_in_the_slots(tmp_path: Path, runtime: Path) -> None:
    run, job = tmp_path / "run", Convolved()
    with attach(run, job) as checkpointer:
        job.train(checkpointer, 8)
        for _ in range(3):
            job.train(checkpointer, 1, save=True)
        constants = record(run, checkpointer.completed).constants
        assert constants is not None
        assert {leaf.name for leaf in constants.leaves} == {"model.base.weight", "model.conv.weight"}
        assert not regions(runtime, "constants")
        assert newest(runtime)[1] == 0
    saved = flashckpt.load(run)["model.conv.weight"]
    assert torch.equal(saved, job.model.conv.weight)


@contextmanager
def room_for(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with small_tmpfs(num_bytes) as base:
        monkeypatch.setenv("FLASHCKPT_RUNTIME", str(base))
        try:
            yield base
        finally:
            end(keepers_of(base))


def test_without_room_for_a_region_each_slot_goes_on_holding_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, job = tmp_path / "run", Job()
    with room_for(3 * LARGE_SLOT + (1 << 20), monkeypatch) as base:
        broken = attach(run, job)
        job.train(broken, 4)
        slots = regions(base, "slot")
        assert len(slots) == 3
        sharing = broken._attendant.slots.sharing
        train_until(job, broken, lambda: sharing._retry_s > time.monotonic() + 30, "the refusal")
        job.train(broken, 1, save=True)
        assert record(run, broken.completed).constants is not None
        assert not regions(base, "constants")
        assert newest(base)[1] == 0
        done = broken.completed
        del broken  # as a death would leave it
        again = Job(blank=True)
        with attach(run, again) as checkpointer:
            assert checkpointer.resumed is not None
            assert (checkpointer.resumed.tier, checkpointer.completed) == ("memory", done)
            # What it holds is laid out a little differently from the beginning: the slots do all the same.
            again.train(checkpointer, 3)
            ring = checkpointer._attendant.slots.ring
            assert ring is not None
            assert {slot.name for slot in ring.slots} == set(slots)
            again.train(checkpointer, 1, save=True)
    assert again.bytes() == straight(done + 4)
    assert flashckpt.verify(run).ok


def test_a_region_is_filled_with_the_bytes_of_the_digests_or_not_at_all(
    tmp_path: Path, runtime: Path
) -> None:
    """A slot that rots, or is written again while it is read, fills none; the next one does."""
    trainer = FakeTrainer(tmp_path / "run", runtime, constants_kib=1024)
    trainer.start()
    trainer.take_slots()
    slot, _ = trainer.snapshot(1)
    session = SimpleNamespace(keeper=trainer.client, attempt=trainer.attempt)
    newest = trainer.ring.newest_sealed
    sharing = Sharing(session, newest, lambda _: False, None, nullcontext())  # type: ignore[arg-type]
    constants = trainer.image.constants
    assert constants is not None
    spoiled = trainer.image.constants_start + constants.data_start + 12345
    slot.image_view[spoiled] ^= 1
    sharing.want(constants, used=False)
    until(lambda: sharing.tend() or sharing._judged, "a region, and a look at the slot")
    [name] = regions(runtime, "constants")
    assert not sharing.ready
    slot, _ = trainer.snapshot(2)
    until(lambda: sharing.tend() or sharing.ready, "the region to be filled")
    found = sharing.take_ready()
    assert found is not None
    assert (found.name, found.layout) == (name, constants)
    assert found.digests == tuple(slot.metadata(slot.sealed()).constants_digests)  # type: ignore[arg-type]
    sharing.close()
    trainer.end()
