"""A run with a frozen base, as LoRA has it: its bytes are stored once an attempt, and come back exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import flashckpt
from flashckpt.checkpointer.run import Checkpointer
from flashckpt.format.records import RankRecord
from flashckpt.store import open_store
from tests import run_view
from tests.commit.runs import newest_of
from tests.keeper.driver import told
from tests.waiting import until_slots

pytestmark = pytest.mark.usefixtures("runtime")

BASE_BYTES = 4 * 512 * 512


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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five steps without an order, then steps 6, 7 and 8. The base is a constant of all."""
    run, job = tmp_path / "run", Job()
    with attach(run, job) as checkpointer:
        job.train(checkpointer, 5)
        job.train(checkpointer, 3, save=True)
    assert flashckpt.steps(run)[-3:] == [6, 7, 8]
    assert job.bytes() == straight(8)
    return run


def test_a_later_step_writes_the_trained_part_alone(run: Path) -> None:
    [file] = files(run)
    assert file.stat().st_size == 4096 + BASE_BYTES
    for step in (6, 7, 8):
        each = record(run, step)
        assert each.constants is not None
        assert [leaf.name for leaf in each.constants.leaves] == ["model.base.weight"]
        assert each.constants.shard.file == file.name
        assert each.shard.num_bytes < BASE_BYTES // 8
    written = {line["step"]: line["num_bytes"] for line in told(run, "persist", len(flashckpt.steps(run)))}
    assert set(written) >= {6, 7, 8}
    first = min(step for step in written if record(run, step).constants is not None)
    assert written == {
        step: record(run, step).shard.num_bytes + (file.stat().st_size if step == first else 0)
        for step in written
    }
    assert flashckpt.load(run, 7)["model.base.weight"].numpy().tobytes() == straight(0)["base.weight"]


@pytest.mark.parametrize("tier", ["memory", "local"])
def test_it_comes_back_exactly_and_is_stored_no_second_time(
    run: Path, tier: str, kill_keepers: Callable[..., None]
) -> None:
    if tier == "memory":
        job = Job()
        broken = attach(run, job)
        job.train(broken, 2)
        del broken  # as a death would leave it: step 10 is in memory
    kill_keepers(remove_regions=tier == "local")
    [old, *_] = files(run)
    done = 10 if tier == "memory" else 8
    job = Job(blank=True)
    with attach(run, job) as checkpointer:
        assert checkpointer.resumed is not None
        assert (checkpointer.resumed.tier, checkpointer.completed) == (tier, done)
        assert job.bytes() == straight(done)
        # Its first snapshot has constants already: what they are was compared when they were restored.
        job.train(checkpointer, 1, save=True)
        job.train(checkpointer, 1, save=True)
        attempt = str(checkpointer._session.attempt)
    assert job.bytes() == straight(done + 2)
    assert not [file for file in files(run) if file.name.startswith(attempt)]
    constants = record(run, done + 2).constants
    assert constants is not None
    assert constants.shard.file == old.name
    later = [line for line in told(run, "persist", len(flashckpt.steps(run))) if line["step"] > done]
    assert [line["step"] for line in later] == [done + 1, done + 2]
    assert all(line["num_bytes"] < BASE_BYTES // 8 for line in later)


def test_one_that_the_user_changes_is_ordinary_from_then_on(
    run: Path, kill_keepers: Callable[..., None]
) -> None:
    job = Job(blank=True)
    with attach(run, job) as checkpointer:
        job.train(checkpointer, 2, save=True)
        job.model.base.weight.data.add_(1)
        before = straight(0)["base.weight"]
        now = job.bytes()["base.weight"]
        job.train(checkpointer, 3, save=True)
        done = job.bytes()
    assert now != before
    bases = {step: flashckpt.load(run, step)["model.base.weight"] for step in flashckpt.steps(run)}
    assert set(bases) >= set(range(6, 14))
    assert all((base.numpy().tobytes() == now) == (step > 10) for step, base in bases.items())
    assert all(base.numpy().tobytes() in (before, now) for base in bases.values())
    assert record(run, 10).constants is not None
    assert record(run, 13).constants is None
    assert [leaf.name for leaf in record(run, 13).leaves].count("model.base.weight") == 1
    kill_keepers(remove_regions=True)
    again = Job(blank=True)
    with attach(run, again) as checkpointer:
        assert checkpointer.completed == 13
        assert again.bytes() == done


def test_one_that_is_changed_before_the_first_snapshot_of_a_resumed_run(run: Path) -> None:
    job = Job(blank=True)
    with attach(run, job) as checkpointer:
        job.model.base.weight.data.mul_(3)
        now = job.bytes()["base.weight"]
        job.train(checkpointer, 2, save=True)
    for step in (9, 10):
        assert flashckpt.load(run, step)["model.base.weight"].numpy().tobytes() == now
        assert record(run, step).constants is not None, (
            "what was loaded after attach is constant from then on"
        )
    assert len({file.stat().st_ino for file in files(run)}) == 2


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset, 0 if offset >= 0 else 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 8]))


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


def test_a_change_that_keeps_a_digest_is_saved(tmp_path: Path) -> None:
    run, job = tmp_path / "run", Job()
    job.model.register_buffer("mask", torch.tensor([1.0, 0.0, 0.0, 1.0]))
    with attach(run, job) as checkpointer:
        job.train(checkpointer, 2)
        checkpointer.save()
        checkpointer.wait()
        job.model.mask.copy_(torch.tensor([0.0, 1.0, 1.0, 0.0]))
        checkpointer.save()
        checkpointer.wait()
    assert flashckpt.load(run)["model.mask"].tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("factor", [2.0, -1.0, 0.0])
def test_one_of_a_power_of_two_of_words_that_is_scaled_is_not_taken_for_what_it_was(
    tmp_path: Path, kill_keepers: Callable[..., None], factor: float
) -> None:
    """A digest that is a sum over words is the same before and after."""
    run, frozen, model = tmp_path / "run", nn.Linear(1024, 2048, bias=False), nn.Linear(4, 4)
    nn.init.ones_(frozen.weight.requires_grad_(False))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named: dict[str, object] = {"model": model, "frozen": frozen, "optimizer": optimizer}

    def train(checkpointer: Checkpointer, steps: int, *, save: bool) -> None:
        for _ in range(steps):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            until_slots(checkpointer)
            if save:
                checkpointer.save()
                checkpointer.wait()

    keep = flashckpt.Keep(last=20)
    with flashckpt.attach(run, every=1, persist_every=None, keep=keep, **named) as checkpointer:
        train(checkpointer, 5, save=False)
        train(checkpointer, 3, save=True)
        constants = record(run, 8).constants
        assert constants is not None
        assert [leaf.name for leaf in constants.leaves] == ["frozen.weight"]
        frozen.weight.data.mul_(factor)
        train(checkpointer, 3, save=True)
    expected = torch.full((2048, 1024), factor).numpy().tobytes()
    assert flashckpt.steps(run)[-1] == 11
    assert flashckpt.load(run, 8)["frozen.weight"].eq(1).all()
    assert flashckpt.load(run, 11)["frozen.weight"].numpy().tobytes() == expected
    assert flashckpt.verify(run).ok
    kill_keepers(remove_regions=True)
    nn.init.normal_(frozen.weight)
    with flashckpt.attach(run, every=1, persist_every=None, **named) as checkpointer:
        assert checkpointer.completed == 11
        assert frozen.weight.numpy().tobytes() == expected


@pytest.mark.parametrize("factor", [0.5, 2.0, -1.0])
def test_a_save_after_weights_were_scaled_is_not_dropped_as_unchanged(tmp_path: Path, factor: float) -> None:
    run, model = tmp_path / "run", nn.Linear(1024, 2048, bias=False)
    with flashckpt.attach(run, every=1, persist_every=None, model=model) as checkpointer:
        for _ in range(3):
            checkpointer.step()
            until_slots(checkpointer)
        checkpointer.save()
        checkpointer.wait()
        with torch.no_grad():
            model.weight.mul_(factor)
        checkpointer.save()
        checkpointer.wait()
        newest = flashckpt.load(run)["model.weight"]
        assert newest.numpy().tobytes() == model.weight.detach().numpy().tobytes()
