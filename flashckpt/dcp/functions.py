"""`save`, `async_save` and `load` with DCP's arguments, over runs: no plan, no pickle, no collective in a
save.

Owns the one run that this process has attached for its saves. A save is a step of the run; the keeper, a
process of its own, writes and commits it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.stateful import Stateful

from flashckpt.checkpointer.attach import append
from flashckpt.checkpointer.attached_run import saved_now
from flashckpt.checkpointer.checkpointer import Checkpointer
from flashckpt.dcp.folder import METADATA
from flashckpt.dcp.planners import LoadPlanner
from flashckpt.dcp.reader import Reader
from flashckpt.dcp.slices import slices_in
from flashckpt.dcp.step_items import PART
from flashckpt.errors import FlashckptError, OptionError, RunError, StateError
from flashckpt.options import Environment, is_switched_off
from flashckpt.store import open_store

log = logging.getLogger(__name__)
Path = str | os.PathLike[str]


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Path,
    storage_writer: None = None,
    planner: None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> int:
    """Save a state_dict as a step of the run in the folder `checkpoint_id`, and wait until it is committed.

    Objects in it with state_dict and load_state_dict are asked for theirs. All ranks of the job call it. The
    newest three steps of the run stay; give each save the same `checkpoint_id`, or a new folder to keep them
    all. Returns the step's number.

    Raises OptionError for a writer, a planner and a process group of fewer ranks, StateError for what cannot
    be saved exactly, and what `flashckpt.attach` and `Checkpointer.wait` raise. What was committed before
    stays loadable.
    """
    return async_save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    ).result()


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Path,
    storage_writer: None = None,
    planner: None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    async_checkpointer_type: object = None,
    async_stager: None = None,
) -> Future[int]:
    """`save` that returns once the state_dict is copied: the program may change it. The future gives the
    step's number once that is committed, or raises PersistError. `async_checkpointer_type` changes nothing:
    a process writes in any case. The first save to a folder attaches its run, and waits for that."""
    for name, value in (
        ("storage_writer", storage_writer),
        ("planner", planner),
        ("async_stager", async_stager),
    ):
        _refuse(name, value, "torch.distributed.checkpoint.save with flashckpt.dcp.Writer and SavePlanner")
    _check_ranks(process_group, no_dist)
    if is_switched_off():
        log.warning("FLASHCKPT=off: nothing is saved to %s", os.fspath(checkpoint_id))
        done: Future[int] = Future()
        done.set_result(0)
        return done
    named = {
        key: each.state_dict() if isinstance(each, Stateful) else each for key, each in state_dict.items()
    }
    if (sliced := slices_in(named)) is not None:
        raise StateError(
            f"{sliced} is slices of a larger tensor (CheckpointableTensor). Nothing was saved. Save it by "
            "torch.distributed.checkpoint.save with flashckpt.dcp.Writer and SavePlanner.",
            location=sliced,
        )
    return _Attached.to(checkpoint_id, named).save(named)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Path,
    step: int | None = None,
    storage_reader: None = None,
    planner: None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load into a state_dict, in place, from any run of this library or a folder that `Writer` wrote.

    Tensors are filled where they are, each rank's own part; other values are replaced; objects with
    load_state_dict are given theirs. step: of a run, which one; None takes the newest, the same on all
    ranks. Only names that are in `state_dict` are read.

    Raises MismatchError and DamagedError before anything of this rank is changed, NoSuchStepError, RunError,
    OptionError.
    """
    for name, value in (("storage_reader", storage_reader), ("planner", planner)):
        _refuse(name, value, "torch.distributed.checkpoint.load with flashckpt.dcp.Reader and LoadPlanner")
    _Attached.settle(checkpoint_id)
    reader = Reader(checkpoint_id, step)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            torch_load(
                state_dict,
                storage_reader=reader,
                planner=LoadPlanner(),
                process_group=process_group,
                no_dist=no_dist,
            )
    except CheckpointException as error:  # a BaseException: `except Exception` of a program would not see it
        raise (reader.refusal or _own(error)) from error


def close() -> None:
    """Let go of the run that saves have attached, once its last save is committed: another process may then
    save to it. The next save attaches again. Raises PersistError."""
    _Attached.close()


def _refuse(name: str, value: object, instead: str) -> None:
    if value is not None:
        raise OptionError(
            f"{name}={type(value).__name__}: flashckpt.dcp has its own, and a checkpoint of it holds no "
            f"pickle. Nothing was done. Leave {name} out, or call {instead}."
        )


def _check_ranks(process_group: dist.ProcessGroup | None, no_dist: bool) -> None:
    """Raise OptionError unless all ranks of the job save together."""
    is_there = dist.is_available() and dist.is_initialized()
    world = max(Environment.read().world, dist.get_world_size() if is_there else 1)
    part = no_dist or (process_group is not None and dist.get_world_size(process_group) < world)
    if part and world > 1:
        said = "no_dist=True" if no_dist else "a process_group of fewer ranks"
        raise OptionError(
            f"{said} in a job of {world} ranks: a step of a run has the state of all of them. Nothing was "
            "saved. Call save on all ranks, or torch.distributed.checkpoint.save with "
            "flashckpt.dcp.Writer and SavePlanner."
        )


def _own(error: CheckpointException) -> Exception:
    """The error behind torch's: of several ranks one of this library's, if there is one."""
    found = [failure for failure, _ in error.failures.values()]
    for each in found:
        if isinstance(each, FlashckptError):
            return each
    return RunError(
        f"The checkpoint could not be loaded: {found[0] if found else error}. The state_dict may be filled "
        "in part: do not train on with it. Load again, or load another checkpoint."
    )


class _Held:
    """What the run's one part is: the state_dict of the newest save. Nothing is ever loaded into it."""

    def __init__(self, named: dict[str, Any]) -> None:
        self.named = named

    def state_dict(self) -> dict[str, Any]:
        return self.named

    def load_state_dict(self, state: object) -> None:
        raise AssertionError("a run that is attached to add steps restores nothing")


class _Attached:
    """The run that saves go to, attached."""

    current: _Attached | None = None

    def __init__(self, path: Path, url: str, named: dict[str, Any]) -> None:
        self._url, self._process = url, os.getpid()
        self._held = _Held(named)
        self._run: Checkpointer = append(path, {PART: self._held})
        self._waits = ThreadPoolExecutor(1, thread_name_prefix="flashckpt-dcp")
        self._newest: Future[int] | None = None

    @classmethod
    def to(cls, path: Path, named: dict[str, Any]) -> _Attached:
        """The run at `path`, attached; another one that was is let go first."""
        url, current = open_store(path).url, cls.current
        if current is not None and current._process != os.getpid():
            current = cls.current = None  # a forked child: the run is its parent's
        if current is not None and current._url != url:
            cls.close()
            current = None
        if current is None:
            if open_store(path).exists(METADATA):
                raise OptionError(
                    f"{url} holds a checkpoint of flashckpt.dcp.Writer, which a load would find before any "
                    "run there. Nothing was saved. Name another folder, or save by Writer."
                )
            current = cls.current = cls(path, url, named)
        return current

    def save(self, named: dict[str, Any]) -> Future[int]:
        self._held.named = named
        committed, step = saved_now(self._run), self._run.completed

        def wait() -> int:
            committed()
            return step

        self._newest = self._waits.submit(wait)
        return self._newest

    @classmethod
    def settle(cls, path: Path) -> None:
        """Wait for this process's save to a run before that is read. Its future raises its failure."""
        current = cls.current
        if current is not None and current._newest is not None and current._url == open_store(path).url:
            current._newest.exception()

    @classmethod
    def close(cls) -> None:
        current, cls.current = cls.current, None
        if current is None or current._process != os.getpid():
            return
        current._waits.shutdown()  # first: closing unmaps what a wait reads
        current._run.close()


def _at_exit() -> None:
    """Let go in order: the keeper would take the end for a death and hold the memory for a restart."""
    with contextlib.suppress(KeyboardInterrupt):
        try:
            close()
        except FlashckptError as error:
            log.error("at the end of the process: %s", error)


atexit.register(_at_exit)
