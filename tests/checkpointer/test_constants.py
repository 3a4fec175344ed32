"""What never changes stands in memory once, from the first snapshot on; and every snapshot stays whole."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt.checkpointer.run import Checkpointer
from flashckpt.errors import OutOfSpaceError
from flashckpt.keeper.client import KeeperClient
from flashckpt.memory.region import Record, SlotSize
from flashckpt.memory.slot import Slot
from flashckpt.state.tree import Tree
from tests.checkpointer.test_frozen import BASE_BYTES, Job, attach, files, flip, record, straight
from tests.memory.mounts import small_tmpfs
from tests.processes import end, keepers_of
from tests.waiting import abandon, until

pytestmark = pytest.mark.usefixtures("runtime")

# Room for what is trained, with its slack in metadata and image of a MiB each.
SLOT_BYTES = (2 << 20) + (256 << 10)
_MOST_STEPS = 400


def sizes(runtime: Path, kind: str) -> dict[str, int]:
    """Regions of a kind, by name, with their sizes in bytes."""
    found = {}
    for folder, _, names in os.walk(runtime):
        for name in names:
            if name.startswith(f"{kind}-"):
                with suppress(FileNotFoundError):  # the keeper lets go of some meanwhile
                    found[name] = os.stat(f"{folder}/{name}").st_size
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


def newest(runtime: Path) -> tuple[int, int]:
    """Step of the newest snapshot in a named slot, and the nonce of the region that it names."""
    found = records(runtime)
    step = max(found, default=-1)
    return step, found[step].constants_nonce if found else 0


def only_region(runtime: Path) -> int:
    [name] = sizes(runtime, "constants")
    return int(name.rsplit("-", 1)[1], 16)


def train_until(job: Job, checkpointer: Checkpointer, condition: Callable[[], object], what: str) -> None:
    """Train on, at most some hundred steps, as a loop of short steps would."""
    for _ in range(_MOST_STEPS):
        if condition():
            return
        job.train(checkpointer, 1)
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come")


def is_captured(checkpointer: Checkpointer) -> bool:
    return checkpointer._keeper_link.newest_sealed_step() == checkpointer.completed


class Two(Job):
    """With a second frozen weight, and both also where nothing is trained yet."""

    def __init__(self, *, blank: bool = False) -> None:
        super().__init__()
        self.model.other = nn.Linear(512, 1024, bias=False)
        self.model.other.weight.requires_grad_(False)
        if blank:
            for parameter in self.model.parameters():
                nn.init.zeros_(parameter)


def test_the_first_snapshot_names_a_region_and_its_slot_holds_the_rest(tmp_path: Path, runtime: Path) -> None:
    run, job = tmp_path / "run", Job()
    with attach(run, job) as checkpointer:
        job.train(checkpointer, 1)
        until(lambda: newest(runtime)[0] == 1, "the first snapshot")
        nonce = only_region(runtime)
        for step in range(1, 6):
            assert newest(runtime) == (step, nonce)
            [region], slots = sizes(runtime, "constants").values(), sizes(runtime, "slot")
            assert BASE_BYTES < region < BASE_BYTES + (64 << 10)
            assert len(slots) == 3
            assert max(slots.values()) < SLOT_BYTES
            job.train(checkpointer, 1, save=True)
            each = record(run, checkpointer.completed)
            assert each.constants is not None
            assert [leaf.name for leaf in each.constants.leaves] == ["model.base.weight"]
        done = checkpointer.completed
    assert job.bytes() == straight(done)
    assert flashckpt.verify(run).ok
    assert len(files(run)) == 1
    assert flashckpt.load(run)["model.base.weight"].numpy().tobytes() == straight(0)["base.weight"]
    until(lambda: not sizes(runtime, "constants"), "the region gone with its run")


@pytest.mark.parametrize("keeper", ["alive", "killed"])
def test_a_resume_takes_region_and_slots_back(
    tmp_path: Path, runtime: Path, keeper: str, kill_keepers: Callable[..., None]
) -> None:
    run, job = tmp_path / "run", Job()
    broken = attach(run, job)
    job.train(broken, 5)
    done = broken.completed
    until(lambda: newest(runtime)[0] == done, "the last snapshot")
    slots, nonce = sizes(runtime, "slot"), only_region(runtime)
    del broken  # as a death would leave it
    if keeper == "killed":
        kill_keepers()
    again = Job(blank=True)
    with attach(run, again) as checkpointer:
        assert checkpointer.resumed is not None
        assert (checkpointer.resumed.tier, checkpointer.completed) == ("memory", done)
        assert again.bytes() == straight(done)
        train_until(again, checkpointer, lambda: min(records(runtime)) > done, "its own in every slot")
        assert {each.constants_nonce for each in records(runtime).values()} == {nonce}
        assert only_region(runtime) == nonce
        assert sizes(runtime, "slot") == slots
        again.train(checkpointer, 1, save=True)
    assert again.bytes() == straight(checkpointer.completed)
    assert flashckpt.verify(run).ok


def test_after_a_resume_from_disk_the_first_snapshot_names_a_region(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]
) -> None:
    run, job = tmp_path / "run", Job()
    with attach(run, job) as checkpointer:
        job.train(checkpointer, 2, save=True)
        done = checkpointer.completed
    kill_keepers(remove_regions=True)
    again = Job(blank=True)
    with attach(run, again) as checkpointer:
        assert checkpointer.resumed is not None
        assert (checkpointer.resumed.tier, checkpointer.completed) == ("local", done)
        assert not sizes(runtime, "constants")
        assert not sizes(runtime, "slot")
        again.train(checkpointer, 1)
        until(lambda: newest(runtime)[0] == done + 1, "the first snapshot")
        nonce = only_region(runtime)
        again.train(checkpointer, 3)
        assert newest(runtime) == (done + 4, nonce)
        assert only_region(runtime) == nonce
        assert max(sizes(runtime, "slot").values()) < SLOT_BYTES
        done = checkpointer.completed
    assert again.bytes() == straight(done)
    assert len({file.stat().st_ino for file in files(run)}) == 1, "the second attempt's is a link"


@pytest.mark.parametrize("tier", ["memory", "local"])
@pytest.mark.parametrize("write", ["mul_", "data", "numpy"])
@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_one_that_changes_is_never_resumed_with_old_bytes(
    tmp_path: Path, runtime: Path, tier: str, write: str, at: int, kill_keepers: Callable[..., None]
) -> None:
    """Between any two boundaries, the first ones too. The other one stays in the region."""
    run, job = tmp_path / "run", Two()
    checkpointer = attach(run, job)
    for step in range(7):
        if step == at:
            weight = job.model.base.weight
            with torch.no_grad():
                match write:
                    case "mul_":
                        weight.mul_(2)
                    case "data":
                        weight.data = weight.data + 1
                    case "numpy":
                        weight.detach().numpy()[3] = 5
        job.train(checkpointer, 1)
    train_until(job, checkpointer, lambda: is_captured(checkpointer), "a snapshot in slots that have grown")
    if tier == "local":
        job.train(checkpointer, 1, save=True)
        names = {leaf.name for leaf in record(run, checkpointer.completed).leaves}
        assert ("model.base.weight" in names) == (at > 0)
        assert "model.other.weight" not in names
    step, nonce = newest(runtime)
    assert (step, nonce) == (checkpointer.completed, only_region(runtime))
    done, now = step, job.bytes()
    del checkpointer
    kill_keepers(remove_regions=tier == "local")
    again = Two(blank=True)
    with attach(run, again) as checkpointer:
        assert checkpointer.resumed is not None
        assert (checkpointer.completed, checkpointer.resumed.tier) == (done, tier)
        assert again.bytes() == now
        again.train(checkpointer, 2, save=True)
        now, done = again.bytes(), checkpointer.completed
    assert flashckpt.verify(run).ok
    loaded = flashckpt.load(run)
    assert {name: loaded[f"model.{name}"].numpy().tobytes() for name in now} == now
    kill_keepers(remove_regions=True)
    last = Two(blank=True)
    with attach(run, last) as checkpointer:
        assert checkpointer.completed == done
        assert last.bytes() == now


def test_weights_that_are_loaded_after_a_resume_are_constants_anew(
    tmp_path: Path, runtime: Path, caplog: pytest.LogCaptureFixture, kill_keepers: Callable[..., None]
) -> None:
    run, job = tmp_path / "run", Two()
    broken = attach(run, job)
    job.train(broken, 4)
    done, nonce = broken.completed, only_region(runtime)
    until(lambda: newest(runtime)[0] == done, "the last snapshot")
    del broken
    again = Two(blank=True)
    with attach(run, again) as checkpointer:
        assert checkpointer.completed == done
        with torch.no_grad():
            again.model.base.weight.fill_(3)
            again.model.other.weight.fill_(4)
        again.train(checkpointer, 3, save=True)
        assert sum("loaded after attach" in each for each in caplog.messages) == 1
        assert newest(runtime)[1] not in (0, nonce)
        train_until(again, checkpointer, lambda: len(sizes(runtime, "constants")) == 1, "the old one to go")
        assert only_region(runtime) == newest(runtime)[1]
        again.train(checkpointer, 1, save=True)
        done, now = checkpointer.completed, again.bytes()
    kill_keepers(remove_regions=True)
    last = Two(blank=True)
    with attach(run, last) as checkpointer:
        assert checkpointer.completed == done
        assert last.bytes() == now


def test_what_is_frozen_in_a_run_is_spared_from_the_next_start_on(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]
) -> None:
    run, job = tmp_path / "run", Two()
    late = job.model.other.weight.requires_grad_(True)
    with attach(run, job) as checkpointer:
        job.train(checkpointer, 2)
        late.requires_grad_(False)
        late.grad = None
        before = sizes(runtime, "slot")
        job.train(checkpointer, 8, save=True)
        assert sizes(runtime, "slot") == before, "nothing shrinks in a run"
        done, now = checkpointer.completed, job.bytes()
    kill_keepers(remove_regions=True)
    again = Two(blank=True)
    with attach(run, again) as checkpointer:
        assert again.bytes() == now
        again.train(checkpointer, 2, save=True)
        constants = record(run, checkpointer.completed).constants
        assert constants is not None
        assert [leaf.name for leaf in constants.leaves] == ["model.base.weight", "model.other.weight"]
        assert max(sizes(runtime, "slot").values()) < SLOT_BYTES
        assert checkpointer.completed == done + 2
    assert flashckpt.verify(run).ok


def test_a_run_of_constants_alone(tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]) -> None:
    run, model = tmp_path / "run", nn.Linear(512, 512, bias=False)
    model.weight.requires_grad_(False)
    saved = model.weight.numpy().tobytes()
    with flashckpt.attach(run, every=1, persist_every=None, model=model) as checkpointer:
        for _ in range(3):
            checkpointer.step()
        checkpointer.save()
        checkpointer.wait()
        assert record(run, checkpointer.completed).leaves == ()
        step = checkpointer.completed
    assert flashckpt.verify(run).ok
    kill_keepers(remove_regions=True)
    nn.init.zeros_(model.weight)
    with flashckpt.attach(run, every=1, persist_every=None, model=model) as checkpointer:
        assert checkpointer.completed == step
        assert model.weight.numpy().tobytes() == saved
        checkpointer.step()


def test_a_region_that_rots_is_found_and_the_run_goes_on_from_disk(
    tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]
) -> None:
    run, job = tmp_path / "run", Job()
    broken = attach(run, job)
    job.train(broken, 4)
    done = broken.completed
    del broken
    until(lambda: flashckpt.steps(run)[-1:] == [done], "the newest snapshot")
    kill_keepers()
    [path] = runtime.glob("*/*/constants-*")
    flip(path, -2000)
    again = Job(blank=True)
    with attach(run, again) as checkpointer:
        assert checkpointer.resumed is not None
        assert (checkpointer.resumed.tier, checkpointer.completed) == ("local", done)
        assert again.bytes() == straight(done)


class Convolved(Job):
    """A frozen weight whose bytes are not row-major."""

    def __init__(self, *, blank: bool = False) -> None:
        super().__init__(blank=blank)
        self.model.conv = nn.Conv2d(256, 256, 3).to(memory_format=torch.channels_last)
        for parameter in self.model.conv.parameters():
            parameter.requires_grad_(False)
        assert not self.model.conv.weight.is_contiguous()


def test_what_has_to_be_made_row_major_is_copied_each_time(
    tmp_path: Path, runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, job = tmp_path / "run", Convolved()
    with caplog.at_level("INFO", logger="flashckpt"), attach(run, job) as checkpointer:
        job.train(checkpointer, 4, save=True)
        constants = record(run, checkpointer.completed).constants
        assert constants is not None
        assert [leaf.name for leaf in constants.leaves] == ["model.base.weight"]
    assert sum("are not row-major" in each for each in caplog.messages) == 1
    assert torch.equal(flashckpt.load(run)["model.conv.weight"], job.model.conv.weight)


# ---- where memory is short


@contextmanager
def room_for(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with small_tmpfs(num_bytes) as base:
        monkeypatch.setenv("FLASHCKPT_RUNTIME", str(base))
        try:
            yield base
        finally:
            end(keepers_of(base))


def test_without_room_for_names_region_and_slots_are_memfds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, job = tmp_path / "run", Two()
    with room_for(1 << 20, monkeypatch) as base:
        broken = attach(run, job)
        job.train(broken, 4)
        assert not sizes(base, "constants")
        assert not sizes(base, "slot")
        end(keepers_of(base))
        with torch.no_grad():
            job.model.base.weight.mul_(2)
        before = broken.completed
        keeper = broken._session.keeper
        until(lambda: keeper.restarts, "another keeper, which is handed what only we hold")
        job.train(broken, 1)
        while not (is_captured(broken) and broken.completed > before + 2):
            assert broken.completed < before + _MOST_STEPS
            job.train(broken, 1)
        done, now = broken.completed, job.bytes()
        del broken  # as a death would leave it
        again = Two(blank=True)
        with attach(run, again) as checkpointer:
            assert checkpointer.resumed is not None
            assert (checkpointer.resumed.tier, checkpointer.completed) == ("memory", done)
            assert again.bytes() == now
            again.train(checkpointer, 3, save=True)
    assert flashckpt.verify(run).ok


def test_without_room_for_a_region_there_is_no_slot_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise OutOfSpaceError("no room for what never changes", needed=2, available=1)

    job = Job()
    checkpointer = attach(tmp_path / "run", job)
    monkeypatch.setattr(KeeperClient, "constants", no_room)
    with pytest.raises(OutOfSpaceError, match="what never changes"):
        checkpointer.save()
    monkeypatch.undo()
    checkpointer.save()
    checkpointer.wait()
    assert record(tmp_path / "run", checkpointer.completed).constants is not None
    checkpointer.close()


@pytest.mark.parametrize("ordered", [False, True])
def test_without_room_for_another_region_that_of_before_goes_on(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    """What changed in the attempt before would be constant again."""

    def no_room(*_: Any, **__: Any) -> Any:
        raise OutOfSpaceError("no room for what never changes", needed=2, available=1)

    run, job = tmp_path / "run", Two()
    checkpointer = attach(run, job)
    job.train(checkpointer, 2)
    with torch.no_grad():
        job.model.other.weight.mul_(2)
    train_until(job, checkpointer, lambda: is_captured(checkpointer), "a snapshot")
    job.train(checkpointer, 1, save=True)
    checkpointer.wait()
    # After an orderly close the keeper may leave, with its memory, before the next attach asks it.
    abandon(checkpointer)
    again = Two(blank=True)
    with attach(run, again) as checkpointer:
        nonce = only_region(runtime)
        monkeypatch.setattr(KeeperClient, "constants", no_room)
        if ordered:
            checkpointer.save()
        train_until(again, checkpointer, lambda: newest(runtime)[0] == checkpointer.completed, "a snapshot")
        assert newest(runtime)[1] == nonce
        again.train(checkpointer, 1, save=True)
        now = again.bytes()
    found = flashckpt.load(run)
    assert {name: found[f"model.{name}"].numpy().tobytes() for name in now} == now


class Little:
    """Room for slots of `limit` bytes of image and no more, once that is set. `asked` are sizes asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.limit, ask = 0, KeeperClient.slots

        def in_little_room(client: KeeperClient, count: int, needed: SlotSize, *how: Any) -> Any:
            self.asked.append(needed.image_bytes)
            if self.limit and needed.image_bytes > self.limit:
                raise OutOfSpaceError("no room", needed=needed.image_bytes, available=self.limit)
            return ask(client, count, needed, *how)

        monkeypatch.setattr(KeeperClient, "slots", in_little_room)


def test_slots_grow_by_the_one_that_changes_alone(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, kill_keepers: Callable[..., None]
) -> None:
    """There is no memory for slots that hold both."""
    run, job, little = tmp_path / "run", Two(), Little(monkeypatch)
    with attach(run, job) as checkpointer:
        job.train(checkpointer, 3)
        little.limit = 3 << 20
        with torch.no_grad():
            job.model.other.weight.mul_(2)  # 2 MiB
        job.train(checkpointer, 1)
        train_until(job, checkpointer, lambda: is_captured(checkpointer), "a snapshot")
        assert newest(runtime)[1] == only_region(runtime)
        job.train(checkpointer, 2, save=True)
        done, now = checkpointer.completed, job.bytes()
    kill_keepers(remove_regions=True)
    again = Two(blank=True)
    with attach(run, again) as checkpointer:
        assert checkpointer.completed == done
        assert again.bytes() == now


def test_a_region_that_nothing_names_any_more_goes_and_not_before(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in a memfd dies with its keeper, once this process has let go of it."""
    job, released, release = Job(), [], KeeperClient.release
    with attach(tmp_path / "run", job) as checkpointer:

        def named() -> set[int]:
            ring = checkpointer._keeper_link.slots.ring
            sealed = [slot.sealed() for slot in ring.slots] if ring is not None else []
            return {each.record.constants_nonce for each in sealed if each is not None}

        def seen(client: KeeperClient, names: Sequence[str]) -> None:
            for name in names:
                if name.startswith("constants-"):
                    released.append((name, int(name.rpartition("-")[2], 16) in named()))
            release(client, names)

        monkeypatch.setattr(KeeperClient, "release", seen)
        job.train(checkpointer, 3)
        [first] = sizes(runtime, "constants")
        with torch.no_grad():
            job.model.base.weight.add_(1)
        train_until(job, checkpointer, lambda: not sizes(runtime, "constants"), "the region's end")
        assert released == [(first, False)]
        checkpointer.save()
        checkpointer.wait()
    found = flashckpt.load(tmp_path / "run")["model.base.weight"]
    assert found.numpy().tobytes() == job.bytes()["base.weight"]


def test_a_region_stays_while_a_slot_that_was_outgrown_names_it(tmp_path: Path, runtime: Path) -> None:
    """The newest snapshot may stand there, or one that is still to be persisted."""
    job = Job()
    with attach(tmp_path / "run", job) as checkpointer:
        job.train(checkpointer, 1)
        until(lambda: newest(runtime)[0] == 1, "the first snapshot")
        nonce, slots = only_region(runtime), checkpointer._keeper_link.slots
        found = slots.newest_sealed()
        assert found is not None
        checkpointer._capture.let_go(found[0])
        slots.give_up(found[0])
        assert slots._is_named(nonce)


def test_a_region_that_cannot_be_mapped_leaves_no_descriptor(tmp_path: Path, runtime: Path) -> None:
    job = Job()
    with attach(tmp_path / "run", job) as checkpointer:
        job.train(checkpointer, 2)
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


def one(job: Job, checkpointer: Checkpointer) -> None:
    """One step, without standing still for slots."""
    job.model(torch.randn(2, 512)).square().sum().backward()
    job.optimizer.step()
    job.optimizer.zero_grad()
    checkpointer.step()


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
    with attach(tmp_path / "run", job) as checkpointer:
        with monkeypatch.context() as short:
            # The first boundary of all waits for them, for as long as a keeper is waited for.
            short.setattr(checkpointer._keeper_link, "timeout_s", 0.1)
            one(job, checkpointer)
        assert checkpointer._keeper_link.slots.preparing
        monkeypatch.setattr(Tree, "walk", seen)
        for _ in range(5):
            one(job, checkpointer)
        assert not walks
        let_go.set()
        until(lambda: checkpointer._keeper_link.slots.ready, "slots")
        one(job, checkpointer)
        assert is_captured(checkpointer)


def test_one_that_changes_while_its_region_is_made_is_stored_as_it_is(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, kill_keepers: Callable[..., None]
) -> None:
    run, job, let_go, ask = tmp_path / "run", Two(), threading.Event(), KeeperClient.constants

    def slowly(client: KeeperClient, *how: Any, **more: Any) -> Any:
        assert let_go.wait(240)
        return ask(client, *how, **more)

    monkeypatch.setattr(KeeperClient, "constants", slowly)
    with attach(run, job) as checkpointer:
        with monkeypatch.context() as short:
            short.setattr(checkpointer._keeper_link, "timeout_s", 0.1)
            one(job, checkpointer)
        with torch.no_grad():
            job.model.base.weight.add_(1)
        one(job, checkpointer)
        let_go.set()
        until(lambda: checkpointer._keeper_link.slots.ready, "slots")
        job.train(checkpointer, 1)
        train_until(job, checkpointer, lambda: is_captured(checkpointer), "a snapshot")
        assert newest(runtime)[1] == only_region(runtime)
        job.train(checkpointer, 1, save=True)
        done, now = checkpointer.completed, job.bytes()
    kill_keepers(remove_regions=True)
    again = Two(blank=True)
    with attach(run, again) as checkpointer:
        assert checkpointer.completed == done
        assert again.bytes() == now
