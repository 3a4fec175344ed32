"""A rank that saves or loads the sharded state_dict of an FSDP2 model.

`python -m tests.ranks.rank tests.dcp.sharded ORDERS-JSON`. Orders: `loads` and then `saves`, lists of [how,
path]; or `dies`, the arguments of `die`, or `fails`, the path of `fail`. Hows: "writer", "thread" and
"process" are torch's functions with our storage; "functions" are ours; "run" is a run of `attach`. Prints a
hash of the whole state, which each rank puts together from all parts.
"""

import hashlib
import json
import os
import signal
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flashckpt
import flashckpt.dcp as dcp

VALUES = {"step": 7, "name": "é", "set": {1, 2}, "nan": float("nan"), "pair": (1, 2), "list": [{"a": 1}, 2]}
BLANK = {"step": 0, "name": "", "set": set(), "nan": 0.0, "pair": (), "list": [{"a": 0}, 0]}
# The name that a file of the Writer has for the slice of rank 0.
LIKE_A_SLICE = "model.0.weight@0,0"


class Job:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        # Of three ranks, one has no row of the last weight.
        self.model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
        for each in (self.model[0], self.model[2], self.model):
            fully_shard(each, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 10.0 ** -(2 + seed))

    def train(self) -> None:
        for number in range(2):
            data = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
            self.model(data).pow(2).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def hash(self) -> str:
        found = hashlib.sha256()

        def add(value: Any, path: str) -> None:
            if isinstance(value, dict):
                for key in sorted(value, key=str):
                    add(value[key], f"{path}.{key}")
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    add(item, f"{path}.{index}")
            elif isinstance(value, torch.Tensor):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                found.update(f"{path} {whole.dtype} {list(whole.shape)}".encode())
                found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                found.update(f"{path} {value!r}".encode())

        add(self.state(), "")
        return found.hexdigest()


def save(job: Job, how: str, path: str) -> None:
    if how == "run":
        with flashckpt.attach(path, every=None, model=job.model, optimizer=job.optimizer) as checkpointer:
            checkpointer.step()
            checkpointer.save()
        return
    state = {**job.state(), "values": VALUES, LIKE_A_SLICE: torch.ones(2)}
    if how == "functions":
        dcp.save(state, checkpoint_id=path)
        dcp.close()
    elif how == "writer":
        torch_dcp.save(state, storage_writer=dcp.Writer(path), planner=dcp.SavePlanner())
    else:
        kind = AsyncCheckpointerType(how)
        torch_dcp.async_save(
            state, storage_writer=dcp.Writer(path), planner=dcp.SavePlanner(), async_checkpointer_type=kind
        ).result()


def load(job: Job, how: str, path: str) -> None:
    state = job.state()
    if how not in ("run", "bare"):
        state |= {"values": dict(BLANK), LIKE_A_SLICE: torch.zeros(2)}
    if how == "functions":
        dcp.load(state, checkpoint_id=path)
    else:
        torch_dcp.load(state, storage_reader=dcp.Reader(path), planner=dcp.LoadPlanner())
    if how not in ("run", "bare"):
        assert repr(state["values"]) == repr(VALUES), state["values"]
        assert state[LIKE_A_SLICE].tolist() == [1, 1]
    model, optimizer = state["model"], state["optimizer"]
    set_state_dict(job.model, job.optimizer, model_state_dict=model, optim_state_dict=optimizer)


class Mortal(dcp.Writer):
    """Kills one rank when a save comes to a phase."""

    phase, who = "", 0

    def _at(self, phase: str) -> None:
        if phase == self.phase and self.who == dist.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)

    def write_data(self, plan: Any, planner: Any) -> Any:
        resolve, left = planner.resolve_data, 2

        def resolved(item: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                self._at("writing")
            return resolve(item)

        planner.resolve_data = resolved
        return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self._at("before the commit")
        super().finish(metadata, results)
        self._at("after the commit")


def die(job: Job, path: str, phase: str, who: int) -> None:
    """Save once, train on, and die in the second save."""
    torch_dcp.save(job.state(), storage_writer=dcp.Writer(path), planner=dcp.SavePlanner())
    print(f"first {job.hash()}", flush=True)
    job.train()
    print(f"second {job.hash()}", flush=True)
    writer = Mortal(path)
    writer.phase, writer.who = phase, who
    torch_dcp.save(job.state(), storage_writer=writer, planner=dcp.SavePlanner())


class FailingOnce(dcp.Writer):
    """The disk of rank 1 fails once."""

    failed = False

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1 and not self.failed:
            self.failed = True
            raise OSError("the disk fails")
        return super().write_data(plan, planner)


def fail(job: Job, path: str) -> None:
    """If one rank cannot save, no rank saves. A save on a part of the ranks is refused."""
    torch_dcp.save({**job.state(), "n": 1}, storage_writer=dcp.Writer(path), planner=dcp.SavePlanner())
    writer = FailingOnce(path)
    custom = {"mine": object()} if dist.get_rank() == 1 else {}
    for more in ({}, custom):
        try:
            torch_dcp.save({**job.state(), "n": 2, **more}, storage_writer=writer, planner=dcp.SavePlanner())
        except torch_dcp.CheckpointException as error:
            [(failure, _)] = error.failures.values()
            print(f"refused CheckpointException {type(failure).__name__}", flush=True)
    loaded = {"n": 0}
    dcp.load(loaded, checkpoint_id=path)
    print("still", {1: "older", 2: "newer"}[loaded["n"]], flush=True)
    torch_dcp.save({**job.state(), "n": 2}, storage_writer=writer, planner=dcp.SavePlanner())
    dcp.load(loaded, checkpoint_id=path)
    print("then", {1: "older", 2: "newer"}[loaded["n"]], flush=True)
    try:
        own = dcp.Writer(f"{path}-{dist.get_rank()}")
        torch_dcp.save(job.state(), storage_writer=own, planner=dcp.SavePlanner(), no_dist=True)
    except torch_dcp.CheckpointException as error:
        [(failure, _)] = error.failures.values()
        print(f"refused alone {type(failure).__name__}", flush=True)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for part in ({"no_dist": True}, {"process_group": alone}):
        try:
            dcp.save({"n": 1}, checkpoint_id=f"{path}-run", **part)
        except flashckpt.OptionError:
            print("refused OptionError", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    orders, job = json.loads(sys.argv[1]), None
    dist.init_process_group("gloo")
    for how, path in orders.get("loads", ()):
        job = Job(seed=1)
        load(job, how, path)
        print(f"loaded {how} {job.hash()}", flush=True)
    if job is None:
        job = Job(seed=0)
        job.train()
    if "dies" in orders:
        die(job, *orders["dies"])
    if "fails" in orders:
        fail(job, orders["fails"])
    for how, path in orders.get("saves", ()):
        save(job, how, path)
    print(f"saved {job.hash()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
