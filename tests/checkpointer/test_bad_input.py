"""What can be wrong with a run, a disk or a machine: a named error that says what, and nothing changed."""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import flashckpt
from flashckpt import OptionError
from tests import zygote
from tests.checkpointer.damaged import shard, trained
from tests.checkpointer.test_loop import Job, loader
from tests.folders import flip
from tests.memory.mounts import fill
from tests.waiting import until

MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on
pytestmark = pytest.mark.usefixtures("runtime")


def huge() -> torch.Tensor:
    """Twice as large as the machine's memory, of pages that nobody ever writes."""
    num_bytes = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | MAP_NORESERVE), dtype=torch.uint8)


def test_a_run_of_which_nothing_can_be_used_is_no_fresh_start(run: Path) -> None:
    flip(shard(run, 2), -9)
    shard(run, 4).unlink()
    job = Job()
    before = job.model.weight.detach().clone()
    with pytest.raises(flashckpt.UnusableRunError):
        flashckpt.attach(run, **job.named)
    assert torch.equal(job.model.weight, before)


RANKS = {
    "RANK=0 WORLD_SIZE=2": "started as one of several, and there is no process group",
    "WORLD_SIZE=2": "WORLD_SIZE=2: this process was started as one of several",
    "RANK=2 WORLD_SIZE=2": "RANK=2 of WORLD_SIZE=2: there is no such rank",
    "RANK=1 WORLD_SIZE=1": "RANK=1 of WORLD_SIZE=1: there is no such rank",
    "RANK=0 WORLD_SIZE=0": "RANK=0 of WORLD_SIZE=0: there is no such rank",
    "RANK=3": "RANK=3 without WORLD_SIZE: how many ranks there are is unknown",
}
ALONE = ["RANK=0 LOCAL_RANK=1 SLURM_PROCID=3 SLURM_NTASKS=4", "RANK=0 WORLD_SIZE=1"]


@contextlib.contextmanager
def variables(text: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for each in text.split():
            patch.setenv(*each.split("="))
        yield


def test_a_rank_of_several_that_is_in_no_group_is_refused(tmp_path: Path) -> None:
    """Before a step is awaited for ever, and before each of them trains the whole run."""
    for each, why in RANKS.items():
        with variables(each), pytest.raises(OptionError, match=f"{why}.* Nothing was started"):
            flashckpt.attach(tmp_path / "run", **Job().named)
    assert not (tmp_path / "run").exists()
    # A process that trains alone is no rank of several.
    for step, each in enumerate(ALONE, 1):
        with variables(each), flashckpt.attach(tmp_path / "run", **Job().named) as checkpointer:
            checkpointer.step()
            checkpointer.save()
        assert flashckpt.steps(tmp_path / "run")[-1] == step


def test_a_run_that_another_process_holds_is_refused_with_its_pid(tmp_path: Path) -> None:
    words = ["tests.checkpointer.growing", str(tmp_path / "run"), str(tmp_path / "log"), "1", "9", "1"]
    owner = zygote.start(words, stdout=zygote.PIPE)
    with owner.stdout:
        assert owner.stdout.readline(), "it has begun, and stands still"
    with pytest.raises(flashckpt.RunHeldError, match=str(owner.pid)):
        flashckpt.attach(tmp_path / "run", **Job().named)
    owner.kill()
    owner.wait(240)


def test_too_little_memory_says_how_much_and_what_helps(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("huge", huge())
    checkpointer = flashckpt.attach(tmp_path / "run", every=None, model=model)
    with pytest.raises(flashckpt.OutOfSpaceError, match="slots=2") as caught:
        checkpointer.save()
    assert caught.value.needed > caught.value.available
    assert caught.value.available > 0


def test_a_loop_that_can_hold_no_snapshot_ends_in_its_first_steps(tmp_path: Path) -> None:
    job = Job()
    job.model.register_buffer("huge", huge())
    options = flashckpt.Options(read_ahead_check=False)
    batches = flashckpt.loop(loader(10**4), str(tmp_path / "run"), options=options, **job.named)
    keeper_link = batches.checkpointer._keeper_link

    def train() -> None:
        for x in batches:
            job.train(x)
            if batches.completed:
                until(lambda: keeper_link.slots.error is not None, "the keeper's answer")

    with pytest.raises(flashckpt.OutOfSpaceError):
        train()
    assert batches.completed < 5


def test_a_run_whose_disk_is_full_is_a_named_error_at_the_next_start(
    small_disk: Path, kill_keepers: Callable[..., None]
) -> None:
    run = small_disk / "run"
    trained(run, [2])
    kill_keepers(remove_regions=True)
    filler = fill(small_disk)
    job = Job()
    before = job.model.weight.detach().clone()
    with pytest.raises(flashckpt.RunError, match=f"{run} cannot be written: No space left"):
        flashckpt.attach(run, **job.named)
    assert torch.equal(job.model.weight, before)
    filler.unlink()
    with flashckpt.attach(run, **job.named) as checkpointer:
        assert checkpointer.resumed.step == 2


def test_what_is_no_path_no_step_and_no_dictionary(run: Path, tmp_path: Path) -> None:
    for path in (None, b"run", 5):
        with pytest.raises(OptionError, match="the run's path is"):
            flashckpt.attach(path, **Job().named)  # type: ignore[arg-type]
    for call in (flashckpt.load, flashckpt.verify, flashckpt.branch):
        with pytest.raises(OptionError, match="Pass a step number"):
            call(run, "2")  # type: ignore[operator]
    with pytest.raises(OptionError, match="^state=Linear"):
        flashckpt.attach(tmp_path / "other", state=nn.Linear(2, 2))  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()
