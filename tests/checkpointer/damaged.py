"""Runs with committed steps, and the files of a step."""

from pathlib import Path

import torch

import flashckpt
from flashckpt.store import open_store
from flashckpt.store.local import LocalStore
from tests import run_view
from tests.checkpointer.test_loop import Job
from tests.folders import data_of, records


def trained(run: Path, steps: list[int]) -> None:
    """A run with these committed steps and nothing in memory: its keeper has ended."""
    job = Job()
    with flashckpt.attach(run, every=None, persist_every=None, **job.named) as checkpointer:
        while checkpointer.completed < steps[-1]:
            job.train(torch.ones(2, 4) * checkpointer.completed)
            checkpointer.step()
            if checkpointer.completed in steps:
                checkpointer.save()
                checkpointer.wait()
    assert flashckpt.steps(run) == steps


def shard(run: Path, step: int) -> Path:
    [path] = data_of(run, step).glob("rank-*")
    return path


def committed(run: Path) -> list[run_view.Record]:
    """Its committed steps, newest first."""
    store = open_store(run)
    return [run_view.read(store, name) for name in run_view.visible(store)[::-1]]


def newest(run: Path) -> run_view.Record:
    return committed(run)[0]


def record(run: Path, step: int) -> Path:
    """The manifest of the newest commit of a step number."""
    newest = [name for name in records(run) if name.step == step][-1]
    return run / run_view.manifest_of(LocalStore(str(run)), newest.id)


def quarantined(run: Path) -> list[int]:
    """The step numbers of the checkpoints that failed two verifications."""
    return [name.step for name in run_view.damaged(LocalStore(str(run)))]
