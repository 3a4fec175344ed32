"""A program that saves again and again and is killed in each save. `python -m tests.dcp.mortal FOLDER`.

Forks a child for each phase of a save by Writer; the child dies there by SIGKILL. Then this process loads
what the folder holds, and prints the phase and which of the two saves that was: `writing older`. `python -m
tests.dcp.mortal functions RUN` saves twice by flashckpt.dcp, and prints "saved N" after each.
"""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp

import flashckpt.dcp as dcp
from flashckpt.store.local import LocalStore, System
from tests.dcp.states import equal, state


def die(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: type, method: str, count: int = 1) -> Callable[[], None]:
    """Die at the start of the COUNT-th call of a method."""

    def arm() -> None:
        original, left = getattr(owner, method), count

        def mortal(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            return die() if left == 0 else original(*arguments, **named)

        setattr(owner, method, mortal)

    return arm


def after(owner: type, method: str) -> Callable[[], None]:
    """Die at the end of a method."""

    def arm() -> None:
        original = getattr(owner, method)
        setattr(owner, method, lambda *arguments, **named: (original(*arguments, **named), die()))

    return arm


# Phase -> how to die in it, and which save the folder must have then.
PHASES = {
    "before planning": (before(dcp.Writer, "set_up_storage_writer"), "older"),
    "planning": (before(dcp.SavePlanner, "create_local_plan"), "older"),
    "local plan": (before(dcp.Writer, "prepare_local_plan"), "older"),
    "global plan": (before(dcp.SavePlanner, "create_global_plan"), "older"),
    "planned": (after(dcp.Writer, "prepare_global_plan"), "older"),
    "before writing": (before(dcp.Writer, "write_data"), "older"),
    "resolving": (before(dcp.SavePlanner, "lookup_object", 8), "older"),
    "writing": (before(dcp.SavePlanner, "lookup_object", 20), "older"),
    "syncing": (before(System, "sync"), "older"),
    "written": (after(dcp.Writer, "write_data"), "older"),
    "before the commit": (before(dcp.Writer, "finish"), "older"),
    "inside the commit": (before(System, "rename"), "older"),
    "committed": (after(LocalStore, "replace"), "newer"),
    "removing": (before(LocalStore, "remove_files"), "newer"),
    "after the commit": (after(dcp.Writer, "finish"), "newer"),
}


def save(path: Path, seed: int) -> None:
    torch_dcp.save(state(seed), storage_writer=dcp.Writer(path), planner=dcp.SavePlanner(), no_dist=True)


def found(path: Path) -> int:
    """The seed of the complete state in the folder."""
    loaded = state(99)
    torch_dcp.load(loaded, storage_reader=dcp.Reader(path), planner=dcp.LoadPlanner(), no_dist=True)
    seed = int(loaded["model"]["count"])
    assert equal(loaded, state(seed))
    return seed


def kill_each(path: Path) -> None:
    save(path, 1)
    newest = 1
    for phase, (arm, _) in PHASES.items():
        child = os.fork()
        if child == 0:
            arm()
            save(path, newest + 1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == -signal.SIGKILL, (phase, status)
        seed = found(path)
        print(phase, {newest: "older", newest + 1: "newer"}[seed], flush=True)
        newest = seed
    save(path, 50)
    assert found(path) == 50
    print("files", len(list(path.iterdir())), flush=True)


def save_twice(run: str) -> None:
    for seed in (1, 2):
        dcp.save(state(seed), checkpoint_id=run)
        print(f"saved {seed}", flush=True)
    dcp.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if sys.argv[1] == "functions":
        save_twice(sys.argv[2])
    else:
        kill_each(Path(sys.argv[1]))
