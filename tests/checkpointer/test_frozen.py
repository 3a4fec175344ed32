"""A run with a frozen base, as LoRA has it: its bytes are stored once an attempt, and come back exactly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import flashckpt
from flashckpt.checkpointer.facade import Checkpointer
from flashckpt.commit import lineage, retention
from flashckpt.commit.steps import read_step
from flashckpt.format.names import AttemptName, attempt_folder
from flashckpt.format.records import RankRecord
from flashckpt.store.base import open_store
from tests.keeper.driver import ledger
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
    each = next(each for each in lineage.newest_first(store) if each.step == step)
    return read_step(store, each.step, each.attempt).rank(0)


def files(run: Path) -> list[Path]:
    return sorted(run.glob("attempts/*/constants-*"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five steps without an order (the base is a constant from the fourth on), then steps 6, 7 and 8."""
    run, job = tmp_path / "run", Job()
    with attach(run, job) as checkpointer:
        job.train(checkpointer, 5)
        job.train(checkpointer, 3, save=True)
    assert flashckpt.steps(run) == [6, 7, 8]
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
    written = [line["num_bytes"] for line in ledger(run) if line["event"] == "persist"]
    assert written == [
        record(run, 6).shard.num_bytes + file.stat().st_size,
        record(run, 7).shard.num_bytes,
        record(run, 8).shard.num_bytes,
    ]
    assert flashckpt.load(run, 7)["model.base.weight"].numpy().tobytes() == straight(0)["base.weight"]


@pytest.mark.parametrize("tier", ["memory", "local"])
def test_it_comes_back_exactly_and_is_stored_once_more_as_a_link(
    run: Path, tier: str, kill_keepers: Callable[..., None], caplog: pytest.LogCaptureFixture
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
    [new] = [file for file in files(run) if file.parent.name == attempt]
    assert new.stat().st_ino == old.stat().st_ino
    later = [line for line in ledger(run) if line["event"] == "persist" and line["step"] > done]
    assert len(later) == 2
    assert all(line["num_bytes"] < BASE_BYTES // 8 for line in later)
