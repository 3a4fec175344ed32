"""What never changes, as the frozen base of LoRA, stands in memory and on storage once, from the first
snapshot on; and every snapshot comes back exactly."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import flashckpt
from flashckpt.checkpointer.run import Checkpointer
from flashckpt.errors import OutOfSpaceError
from flashckpt.format.records import RankRecord
from flashckpt.keeper.client import KeeperClient
from flashckpt.memory.region import Record
from flashckpt.memory.slot import Slot
from flashckpt.store import open_store
from tests import run_view
from tests.commit.runs import newest_of
from tests.folders import flip
from tests.keeper.driver import told
from tests.memory.mounts import small_tmpfs
from tests.processes import end, keepers_of
from tests.waiting import abandon, until, until_slots

pytestmark = pytest.mark.usefixtures("runtime")

BASE_BYTES = 4 * 512 * 512
# Room for what is trained, with its slack in metadata and image of a MiB each.
SLOT_BYTES = (2 << 20) + (256 << 10)
_MOST_STEPS = 400


class Adapted(nn.Module):
    """A frozen layer and a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base = nn.Linear(512, 512, bias=False)
        self.base.weight.requires_grad_(False)
        self.down = nn.Linear(512, 4, bias=False)
        self.up = nn.Linear(4, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Job:
    def __init__(self, *, blank: bool = False) -> None:
        self.model = Adapted()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=0.01)
        if blank:
            for parameter in self.model.parameters():
                nn.init.zeros_(parameter)

    @property
    def named(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, checkpointer: Checkpointer, steps: int, *, save: bool = False) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(checkpointer.completed)
            self.model(torch.randn(3, 512, generator=generator)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            checkpointer.step()
            until_slots(checkpointer)
            if save:
                checkpointer.save()
                checkpointer.wait()

    def bytes(self) -> dict[str, bytes]:
        return {name: tensor.numpy().tobytes() for name, tensor in self.model.state_dict().items()}


def straight(steps: int) -> dict[str, bytes]:
    """The model of a run that was never stopped."""
    job = Job()
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        job.model(torch.randn(3, 512, generator=generator)).square().sum().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job.bytes()


def attach(run: Path, job: Job) -> Checkpointer:
    return flashckpt.attach(run, every=1, persist_every=None, keep=flashckpt.Keep(last=20), **job.named)


def record(run: Path, step: int) -> RankRecord:
    store = open_store(run)
    name = newest_of(store, step)
    return run_view.read(store, name).rank(0)


def files(run: Path) -> list[Path]:
    return sorted(run.glob("data/*/*/frozen-*.safetensors"))


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
        done = checkpointer.completed
    assert job.bytes() == straight(done)
    assert flashckpt.verify(run).ok
    [file] = files(run)
    assert file.stat().st_size == 4096 + BASE_BYTES
    steps = flashckpt.steps(run)
    for step in steps:
        each = record(run, step)
        assert [leaf.name for leaf in each.constants.leaves] == ["model.base.weight"]
        assert each.constants.file == file.name
        assert each.shard.num_bytes < BASE_BYTES // 8
    assert {line["step"]: line["num_bytes"] for line in told(run, "persist", len(steps))} == {
        step: record(run, step).shard.num_bytes + (file.stat().st_size if step == steps[0] else 0)
        for step in steps
    }, "a later step writes the trained part alone"
    for found in (flashckpt.load(run), load_file(file)):  # the safetensors library opens the file as it is
        assert found["model.base.weight"].numpy().tobytes() == straight(0)["base.weight"]
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
        assert (checkpointer.resumed.tier, checkpointer.completed) == ("memory", done)
        assert again.bytes() == straight(done)
        train_until(again, checkpointer, lambda: min(records(runtime)) > done, "its own in every slot")
        assert {each.constants_nonce for each in records(runtime).values()} == {nonce}
        assert only_region(runtime) == nonce
        assert sizes(runtime, "slot") == slots
        again.train(checkpointer, 1, save=True)
    assert again.bytes() == straight(checkpointer.completed)
    assert flashckpt.verify(run).ok
    stored = {record(run, step).constants.file for step in flashckpt.steps(run)}
    assert len(stored) == 1, "nothing is stored a second time"


@pytest.mark.parametrize(
    ("tier", "write", "at"),
    [("local", "numpy", 5), ("memory", "mul_", 0), ("local", "data", 1), ("memory", "numpy", 2)],
)
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
        job.train(checkpointer, 1, save=step == 3)
    train_until(job, checkpointer, lambda: is_captured(checkpointer), "a snapshot in slots that have grown")
    if tier == "local":
        job.train(checkpointer, 1, save=True)
        names = {leaf.name for leaf in record(run, checkpointer.completed).shard.leaves}
        assert ("model.base.weight" in names) == (at > 0)
        assert "model.other.weight" not in names
    step, nonce = newest(runtime)
    assert (step, nonce) == (checkpointer.completed, only_region(runtime))
    done, now = step, job.bytes()
    del checkpointer
    kill_keepers(remove_regions=tier == "local")
    again = Two(blank=True)
    with attach(run, again) as checkpointer:
        assert (checkpointer.completed, checkpointer.resumed.tier) == (done, tier)
        assert again.bytes() == now
        again.train(checkpointer, 2, save=True)
        now, done = again.bytes(), checkpointer.completed
    assert flashckpt.verify(run).ok
    earlier = flashckpt.load(run, 4)["model.base.weight"].numpy().tobytes()
    assert (earlier == straight(0)["base.weight"]) == (at > 3)
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


def test_a_run_of_constants_alone(tmp_path: Path, runtime: Path, kill_keepers: Callable[..., None]) -> None:
    run, model = tmp_path / "run", nn.Linear(512, 512, bias=False)
    model.weight.requires_grad_(False)
    saved = model.weight.numpy().tobytes()
    with flashckpt.attach(run, every=1, persist_every=None, model=model) as checkpointer:
        for _ in range(3):
            checkpointer.step()
        checkpointer.save()
        checkpointer.wait()
        assert record(run, checkpointer.completed).shard.leaves == ()
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
        assert (checkpointer.resumed.tier, checkpointer.completed) == ("local", done)
        assert again.bytes() == straight(done)


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
            assert (checkpointer.resumed.tier, checkpointer.completed) == ("memory", done)
            assert again.bytes() == now
            again.train(checkpointer, 3, save=True)
    assert flashckpt.verify(run).ok


def no_room(*_: Any, **__: Any) -> Any:
    raise OutOfSpaceError("no room for what never changes", needed=2, available=1)


@pytest.mark.parametrize("ordered", [False, True])
def test_without_room_for_another_region_that_of_before_goes_on(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    """What changed in the attempt before would be constant again."""
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
        checkpointer._capture.let_go(found[0])
        slots.give_up(found[0])
        assert slots._is_named(nonce)


def test_a_flipped_byte_in_the_file_is_found_and_an_older_step_taken(
    tmp_path: Path, kill_keepers: Callable[..., None]
) -> None:
    run, job = tmp_path / "run", Job()
    base = job.model.base.weight.requires_grad_(True)
    with attach(run, job) as checkpointer:
        job.train(checkpointer, 1)
        base.requires_grad_(False).grad = None
        job.train(checkpointer, 1, save=True)  # the base is an ordinary leaf of this one
    with attach(run, job) as checkpointer:
        job.train(checkpointer, 4)
        job.train(checkpointer, 1, save=True)
    assert [record(run, step).constants is None for step in (2, 7)] == [True, False]
    kill_keepers(remove_regions=True)
    [file] = files(run)
    flip(file, -100)
    [row] = flashckpt.verify(run, 7).damaged
    assert (row.file, row.detail) == (
        str(file.relative_to(run)),
        "chunk 0 does not have its checksum; not the bytes that were captured: model.base.weight",
    )
    with pytest.raises(flashckpt.DamagedError, match=f"{file.relative_to(run)}"):
        flashckpt.load(run, 7)
    again = Job(blank=True)
    with attach(run, again) as checkpointer:
        assert checkpointer.completed == 2
        assert again.bytes() == straight(2)
