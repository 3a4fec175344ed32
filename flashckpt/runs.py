"""Reads and changes a run without a training loop: load, steps, branch, verify."""

from __future__ import annotations

import os
from numbers import Integral
from typing import Any

from flashckpt.commit import lineage, verification
from flashckpt.commit.verification import Report
from flashckpt.commit.view import check_writable
from flashckpt.errors import NoSuchStepError, OptionError
from flashckpt.format.names import parse_at
from flashckpt.recovery.node import refuse_if_trained
from flashckpt.store import open_store

Path = str | os.PathLike[str]


def load(
    path: Path, step: int | None = None, *, only: str | None = None, strip: bool = False
) -> dict[str, Any]:
    """Return the verified leaves of a committed step by name, as new tensors on the CPU, assembled from all
    ranks. Where ranks differ (buffers, counters), rank 0's are taken.

    step: None takes the newest. only: leaves of one part of the state ("model"), or of a part of it
    ("model.encoder"). strip: with `only`, the argument of that module's strict `load_state_dict`: names
    inside the module, its extra state, and no buffers that are not persistent.

    Tied names give the same tensor. Raises OptionError for `strip` with a part that is not a module: only
    `attach` restores an optimizer. Raises NoSuchStepError, RunError, OutOfSpaceError, and DamagedError before
    it returns.
    """
    from flashckpt.restore.loading import load_leaves, module_state

    _check_step(step)
    if strip:
        if only is None:
            raise OptionError(
                'strip=True needs only=. Nothing was read. Name a part of the state, as in only="model".'
            )
        return module_state(open_store(path), step, only)
    return load_leaves(open_store(path), step, only)


def steps(path: Path) -> list[int]:
    """Return the committed steps that a resume sees, oldest first. Raises RunError if `path` is not a run,
    UnusableRunError if it has lost its catalogue."""
    return lineage.steps(open_store(path))


def branch(path: Path, step: int, attempt: str | None = None) -> str:
    """Let the next start resume from an older committed step. Deletes nothing: later steps stay in storage
    and are no longer visible. attempt: that of a step that is not visible ("000002-7fa3c1d2"), with its
    boundary ("000002-7fa3c1d2:1234") if the attempt has several of this step. Return the name of the new
    attempt.

    Raises RunHeldError if a job holds the run, NoSuchStepError, DamagedError.
    """
    _check_step(step)
    store = open_store(path)
    check_writable(store)
    at = None if attempt is None else parse_at(attempt)
    if attempt is not None and at is None:
        raise NoSuchStepError(
            f"{attempt!r} is not the name of an attempt, as 000002-7fa3c1d2 is. Nothing was changed. "
            "`flashckpt ls --all` lists the attempts.",
            step=step,
        )
    return str(lineage.branch(store, step, at, check=lambda: refuse_if_trained(store)))


def verify(path: Path, step: int | None = None) -> Report:
    """Read every file of the committed steps (or of one) and compare every checksum and digest.

    Changes nothing. Damage is in the report, not raised. Raises NoSuchStepError, and RunError, or
    UnusableRunError without a catalogue.
    """
    _check_step(step)
    return verification.verify(open_store(path), step)


def _check_step(step: object) -> None:
    # Text would be compared with numbers and never found.
    if step is not None and not isinstance(step, Integral):
        raise OptionError(f"step={step!r} is invalid. Nothing was read or changed. Pass a step number.")
