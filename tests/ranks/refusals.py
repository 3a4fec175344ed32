"""Ranks that attach and must not: each case prints what every rank raised. `python -m … RUN`, two ranks.

All in one job: a refusal leaves nothing behind that the next attach would meet.
"""

import errno
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flashckpt
from flashckpt.checkpointer import resume
from flashckpt.memory import memory_budget
from flashckpt.ranks import job
from flashckpt.restore import step_choice
from flashckpt.state.tree import Tree
from flashckpt.store.local import LocalStore
from tests.folders import data_of, flip

Case = Callable[[Path, int], Any]


def net(width: int = 4) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(width, width)


def trained(run: Path, steps: int) -> None:
    """A run with this many committed steps, and no trainer."""
    rank, model = dist.get_rank(), net()
    with flashckpt.attach(
        run, every=None, persist_every=None, keep=flashckpt.Keep(last=9), model=model
    ) as checkpointer:
        for step in range(steps):
            with torch.no_grad():
                model.weight.fill_(10 * rank + step + 1)
            checkpointer.step()
            checkpointer.save()
    dist.barrier()


def damage(run: Path, rank: int, *steps: int) -> None:
    """Flip the last byte of a rank's shard in these steps."""
    if dist.get_rank() == 0:
        for step in steps:
            [shard] = data_of(run, step).glob(f"rank-{rank:05d}-*.safetensors")
            flip(shard, -1)
    dist.barrier()


def attached(run: Path, **named: Any) -> None:
    """Attach, say what it went on from, and let go."""
    given = {"every": None, "persist_every": None, "keep": flashckpt.Keep(last=9), "model": net(), **named}
    with flashckpt.attach(run, **given) as checkpointer:
        resumed = checkpointer.resumed
        weight = given["model"].weight[0, 0].item()
        print(f"went on {resumed is not None} {weight:.1f}", flush=True)
    dist.barrier()


def rank_0_alone(run: Path, rank: int) -> None:
    """As one saves by hand. What all call next is not confused by it."""
    with (
        mock.patch.object(job, "LEAST_TIMEOUT_S", 0.5),
        mock.patch.object(job, "SHARE_OF_TIMEOUT", 0.0),
    ):
        if rank == 0:
            attached(run)


def other_path(run: Path, rank: int) -> None:
    attached(run if rank == 0 else run.with_name("other"))


def other_options(run: Path, rank: int) -> None:
    attached(
        run, every=1 + rank, keep=flashckpt.Keep(last=3 + rank), options=flashckpt.Options(slots=2 + rank)
    )


def other_remote(run: Path, rank: int) -> None:
    """A message on all ranks' terminals: secrets are not in it."""
    options = flashckpt.Options(remote_storage_options={"secret_access_key": f"geheim-{rank}"})
    attached(run, remote=run.with_name(f"remote-{rank}"), remote_every=5, options=options)


def other_names(run: Path, rank: int) -> None:
    attached(run, **({"ema": net()} if rank == 1 else {}))


def other_lengths(run: Path, rank: int) -> None:
    """One batch less on rank 1: it would end a boundary before the other. Unknown on neither."""
    flashckpt.loop([0] * (5 - rank), run, epochs=2, every=1, persist_every=None, model=net())


def bad_loader(run: Path, rank: int) -> None:
    batches: Any = 7 if rank == 1 else [0]
    flashckpt.loop(batches, run, every=1, persist_every=None, model=net())


def other_epochs(run: Path, rank: int) -> None:
    flashckpt.loop([0], run, epochs=2 + rank, every=1, persist_every=None, model=net())


def bad_option(run: Path, rank: int) -> None:
    attached(run, every="often" if rank == 1 else 1)


def bad_state(run: Path, rank: int) -> None:
    attached(run, own={"function": (lambda: 1) if rank == 1 else 1})


def other_replica(run: Path, rank: int) -> None:
    model = DistributedDataParallel(net())
    if rank == 1:
        model.module.extra = nn.Parameter(torch.zeros(3))
    attached(run, model=model)


def other_shards(run: Path, rank: int) -> None:
    """Parts that leave a hole in one tensor, and overlap in another."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4 + rank), nn.Linear(6 - rank, 4))
    attached(run, model=fully_shard(model))


def other_model(run: Path, rank: int) -> None:
    trained(run, 2)
    model = net(4 + rank)
    before = model.weight.detach().clone()
    try:
        attached(run, model=model)
    finally:
        print(f"unchanged {torch.equal(model.weight, before)}", flush=True)


def no_memory(run: Path, rank: int) -> None:
    """As for a state on devices, which is read into new host memory."""
    trained(run, 1)
    available = 1 if rank == 1 else 1 << 40
    with (
        mock.patch.object(memory_budget, "available_bytes", return_value=available),
        mock.patch.object(Tree, "targets", return_value={}),
        without_memory(run),
    ):
        attached(run)


class Own:
    """Part of a state that this rank refuses to take back."""

    def __init__(self, *, refuses: bool = False) -> None:
        self._refuses = refuses

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self._refuses:
            raise ValueError(f"count={state['count']}")


def own_refused(run: Path, rank: int) -> None:
    """Once the live state was written into: no rank may train on it."""
    with flashckpt.attach(run, every=None, persist_every=None, model=net(), part=Own()) as checkpointer:
        checkpointer.step()
        checkpointer.save()
    dist.barrier()
    model = net()
    try:
        attached(run, model=model, part=Own(refuses=rank == 1))
    finally:
        print(f"trains {is_trainable(model)} after own_refused", flush=True)


def is_trainable(model: nn.Module) -> bool:
    try:
        model(torch.ones(1, 4))
    except flashckpt.StateError:
        return False
    return True


def storage_away(run: Path, rank: int) -> None:
    """For one of them: no reason for an older step."""
    trained(run, 2)

    def away(store: LocalStore, path: str, *more: Any, **how: Any) -> None:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), path)

    read = away if rank == 1 else LocalStore.read_chunks
    with (
        mock.patch.object(LocalStore, "read_chunks", read),
        mock.patch.object(step_choice, "_PAUSES_S", ()),
        without_memory(run),
    ):
        attached(run)


def not_begun(run: Path, rank: int) -> None:
    """What fails on the leader after its thread has begun leaves none behind."""
    error = flashckpt.KeeperError("nothing can run beside the loop")
    try:
        with mock.patch.object(resume, "KeeperLink", side_effect=error if rank == 0 else resume.KeeperLink):
            attached(run)
    finally:
        left = [each.name for each in threading.enumerate() if each.name == "flashckpt-ranks"]
        print(f"threads of ranks left: {left}", flush=True)


def no_runtime(run: Path, rank: int) -> None:
    with runtime("/proc/nowhere" if rank == 1 else os.environ["FLASHCKPT_RUNTIME"]):
        attached(run)


def damaged_on_one(run: Path, rank: int) -> None:
    """All go on from an older step, each with its own of it."""
    trained(run, 3)
    damage(run, 1, flashckpt.steps(run)[-1])
    with without_memory(run):
        attached(run)


def damaged_everywhere(run: Path, rank: int) -> None:
    trained(run, 2)
    damage(run, 1, *flashckpt.steps(run))
    with without_memory(run):
        attached(run)


@contextmanager
def runtime(folder: str) -> Iterator[None]:
    before = os.environ["FLASHCKPT_RUNTIME"]
    os.environ["FLASHCKPT_RUNTIME"] = folder
    try:
        yield
    finally:
        os.environ["FLASHCKPT_RUNTIME"] = before


@contextmanager
def without_memory(run: Path) -> Iterator[None]:
    """As on another node: what the keeper may still have is not found."""
    folder = f"{os.environ['FLASHCKPT_RUNTIME']}/without-{run.name}"
    os.makedirs(folder, exist_ok=True)
    with runtime(folder):
        yield


CASES: dict[str, Case] = {
    each.__name__: each
    for each in (
        rank_0_alone,
        other_path, other_options, other_remote, other_names, other_replica,
        other_shards, other_lengths, other_epochs,
        bad_loader, bad_option, bad_state, other_model, own_refused, storage_away,
        not_begun, no_runtime, damaged_on_one, damaged_everywhere, no_memory,
    )
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    for name, case in CASES.items():
        try:
            case(folder / name, rank)
        except Exception as error:
            print(f"{name} {json.dumps([type(error).__name__, str(error)])}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
