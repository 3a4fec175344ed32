"""`save`, `async_save` and `load` with DCP's arguments, over runs. A save needs no plan, pickle or
collective.

Owns the one run that this process has attached for its saves. A save is a step of the run, which the keeper
process writes and commits.
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
from flashckpt.checkpointer.run import Checkpointer, saved_now
from flashckpt.dcp.planners import LoadPlanner, refuse_slices
from flashckpt.dcp.reader import PART, Reader
from flashckpt.dcp.writer import METADATA
from flashckpt.errors import FlashckptError, OptionError, RunError
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

    Objects with state_dict and load_state_dict are saved by their state_dict. All ranks of the job must call
    it. The run keeps its newest three steps; give each save the same `checkpoint_id`, or a new folder to keep
    all. Return the step's number.

    Raises OptionError for a writer, a planner and a process group of fewer ranks, StateError for values that
    cannot be saved exactly, and the errors of `flashckpt.attach` and `Checkpointer.wait`. Committed steps
    stay loadable.
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
    """Like `save`, but return once the state_dict is copied, so that the program may change it. The future
    returns the step's number after the commit, or raises PersistError. `async_checkpointer_type` has no
    effect: a separate process always writes. The first save to a folder attaches its run and waits for it."""
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
    refuse_slices(named)
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
    """Load into a state_dict, in place, from a run or from a folder that `Writer` wrote.

    Fills each rank's part of the tensors in place, replaces other values, and calls load_state_dict of
    objects that have it. step: number of a run's step; None takes the newest, the same on all ranks. Reads
    only names that are in `state_dict`.

    Raises MismatchError and DamagedError before it changes anything on this rank, NoSuchStepError, RunError,
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
    except CheckpointException as error:  # a BaseException, which a program's `except Exception` would miss
        raise (reader.refusal or _unwrapped(error)) from error


def close() -> None:
    """Wait until the last save is committed, then release the run, so that another process may save to it.
    The next save attaches again. Raises PersistError."""
    _Attached.close()


def _refuse(name: str, value: object, instead: str) -> None:
    if value is not None:
        raise OptionError(
            f"{name}={type(value).__name__}: flashckpt.dcp always uses its own, which writes no pickle. "
            f"Nothing was done. Leave {name} out, or call {instead}."
        )


def _check_ranks(process_group: dist.ProcessGroup | None, no_dist: bool) -> None:
    """Raise OptionError unless all ranks of the job save together."""
    has_group = dist.is_available() and dist.is_initialized()
    world = max(Environment.read().world, dist.get_world_size() if has_group else 1)
    is_partial = no_dist or (process_group is not None and dist.get_world_size(process_group) < world)
    if is_partial and world > 1:
        option = "no_dist=True" if no_dist else "a process_group of fewer ranks"
        raise OptionError(
            f"{option} in a job of {world} ranks: a step of a run has the state of all ranks. Nothing was "
            "saved. Call save on all ranks, or torch.distributed.checkpoint.save with "
            "flashckpt.dcp.Writer and SavePlanner."
        )


def _unwrapped(error: CheckpointException) -> Exception:
    """The error inside torch's error; among several ranks' errors, preferably one of this library."""
    found = [failure for failure, _ in error.failures.values()]
    for each in found:
        if isinstance(each, FlashckptError):
            return each
    return RunError(
        f"The checkpoint could not be loaded: {found[0] if found else error}. The state_dict may be partly "
        "filled: do not train with it. Load again, or load another checkpoint."
    )


class _StateDictPart:
    """The run's only part: the state_dict of the newest save. Nothing is ever loaded into it."""

    def __init__(self, named: dict[str, Any]) -> None:
        self.named = named

    def state_dict(self) -> dict[str, Any]:
        return self.named

    def load_state_dict(self, state: object) -> None:
        raise AssertionError("a run attached to append steps restores nothing")


class _Attached:
    """The attached run to which this process saves."""

    current: _Attached | None = None

    def __init__(self, path: Path, url: str, named: dict[str, Any]) -> None:
        self._url, self._process = url, os.getpid()
        self._part = _StateDictPart(named)
        self._run: Checkpointer = append(path, {PART: self._part})
        self._waits = ThreadPoolExecutor(1, thread_name_prefix="flashckpt-dcp")
        self._newest: Future[int] | None = None

    @classmethod
    def to(cls, path: Path, named: dict[str, Any]) -> _Attached:
        """Return the attached run at `path`; attach it if necessary, after releasing another run."""
        url, current = open_store(path).url, cls.current
        if current is not None and current._process != os.getpid():
            current = cls.current = None  # in a forked child, the run belongs to the parent
        if current is not None and current._url != url:
            cls.close()
            current = None
        if current is None:
            if open_store(path).exists(METADATA):
                raise OptionError(
                    f"{url} has a checkpoint of flashckpt.dcp.Writer, which a load would prefer to a run in "
                    "the same folder. Nothing was saved. Name another folder, or save by Writer."
                )
            current = cls.current = cls(path, url, named)
        return current

    def save(self, named: dict[str, Any]) -> Future[int]:
        self._part.named = named
        committed, step = saved_now(self._run), self._run.completed

        def wait() -> int:
            committed()
            return step

        self._newest = self._waits.submit(wait)
        return self._newest

    @classmethod
    def settle(cls, path: Path) -> None:
        """Wait for this process's save to a run before the run is read. The save's future raises its
        failure."""
        current = cls.current
        if current is not None and current._newest is not None and current._url == open_store(path).url:
            current._newest.exception()

    @classmethod
    def close(cls) -> None:
        current, cls.current = cls.current, None
        if current is None or current._process != os.getpid():
            return
        current._waits.shutdown()  # first, since closing unmaps memory that a wait reads
        current._run.close()


def _at_exit() -> None:
    """Close at exit: otherwise the keeper treats the end as a death and holds the memory for a restart."""
    with contextlib.suppress(KeyboardInterrupt):
        try:
            close()
        except FlashckptError as error:
            log.error("at the end of the process: %s", error)


atexit.register(_at_exit)
