"""What can be asked of a run's folder without a training loop."""

from __future__ import annotations

import os
from numbers import Integral
from typing import Any

from flashckpt.commit import lineage, verification
from flashckpt.commit.attempts import open_run
from flashckpt.commit.verification import Report
from flashckpt.errors import NoSuchStepError, OptionError
from flashckpt.format.names import AttemptName
from flashckpt.recovery.node import lock_probe
from flashckpt.store import open_store

Path = str | os.PathLike[str]


def load(
    path: Path, step: int | None = None, *, only: str | None = None, strip: bool = False
) -> dict[str, Any]:
    """The leaves of a committed step by name, verified: mapped copy-on-write, or of a step that several ranks
    made put together in memory, each whole; those of rank 0 where ranks differ (buffers, counters).

    step: None takes the newest. only: leaves of one part of the state ("model"), or of a part of that
    ("model.encoder"). strip: with `only`, what `load_state_dict` of that module takes, strictly: names as
    they are in it, its extra state, and no buffers that are not persistent; of other parts (an optimizer's
    state_dict has another form) an OptionError, since only `attach` restores them.

    Tied names give the same tensor, shapes are those of the state, tensors are on the CPU. Raises
    NoSuchStepError, DamagedError (before anything is returned), RunError, OptionError.
    """
    from flashckpt.restore.mapping import mapped_leaves, module_state, under

    _check_step(step)
    if strip:
        if only is None:
            raise OptionError(
                'strip=True without only=: names of which part of the state? As in only="model". Nothing was '
                "read."
            )
        return module_state(open_store(path), step, rank=0, only=only)
    leaves = mapped_leaves(open_store(path), step, rank=0)
    return leaves if only is None else under(leaves, only, step)


def steps(path: Path) -> list[int]:
    """The committed steps that a resume sees, oldest first. Raises RunError where `path` is no run,
    UnusableRunError where records of its attempts are lost, so that a resume would be refused."""
    return lineage.steps(open_store(path))


def branch(path: Path, step: int, attempt: str | None = None) -> str:
    """Make the run go on from an older committed step, from the next start on. Nothing is deleted: the
    steps after it stay on disk and are seen no more. `attempt` names the one whose step is meant, where
    it is not a visible one. Returns the name of the new attempt.

    Raises RunHeldError where a job holds the run, NoSuchStepError, DamagedError.
    """
    _check_step(step)
    store = open_store(path)
    run = open_run(store, create=False)
    name = None if attempt is None else AttemptName.parse(attempt)
    if attempt is not None and name is None:
        raise NoSuchStepError(
            f"{attempt!r} is no attempt's name (000002-7fa3c1d2 is one). Nothing was changed. "
            "`flashckpt ls --all` shows them.",
            step=step,
        )
    with lock_probe(store, run) as (me, probe):
        return str(lineage.branch(store, step, name, probe=probe, me=me))


def verify(path: Path, step: int | None = None) -> Report:
    """Read every file of the committed steps (or of one) and compare every checksum and digest.

    Changes nothing. Raises NoSuchStepError, RunError (UnusableRunError where records of its attempts are
    lost, so that nobody can tell which steps are the run's); damage is in the report, not raised.
    """
    _check_step(step)
    store = open_store(path)
    open_run(store, create=False)
    if step is None:
        lineage.check_records(store)
    return verification.verify(store, step)


def _check_step(step: object) -> None:
    """A step's name in text would be looked for among numbers, and not be there."""
    if step is not None and not isinstance(step, Integral):
        raise OptionError(f"step={step!r}: the number of a step. Nothing was read or changed.")
