"""Uploads that died in the middle: which of those below a run nobody goes on with, and their end.

An upload that lives is never ended: its writer would have to begin anew. Nor is another's: only a key that is
spelled as that of a shard of the run is looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from flashckpt.format.names import ATTEMPTS, CONSTANTS, STEPS, AttemptName, shard_writer, step_number
from flashckpt.persist.deletions import COPY_AGE_S, ended_attempts
from flashckpt.recovery.node import Hold
from flashckpt.recovery.report import Fate, Finding, Kind
from flashckpt.store.base import Store
from flashckpt.store.unfinished_uploads import (
    UnfinishedUploads,
    Upload,
    UploadsUnknownError,
    unfinished_uploads,
)

log = logging.getLogger(__name__)

SAFE_AGE_S = 7 * 86400.0
"""No upload takes as long; Azure's limit, too."""


def dead_uploads(
    store: Store,
    dead: Collection[AttemptName] = (),
    writers: Collection[str] = (),
    remote: Store | None = None,
) -> list[Finding]:
    """What would be ended: see `unused_files` for `dead` and `writers`. Changes nothing. `remote`: not in the
    run's own store but there."""
    _, found = _dead(store, dead, writers, remote)
    return [_finding(each, remote) for each in found]


def end_dead_uploads(hold: Hold, writers: Collection[str], remote: Store | None = None) -> list[Finding]:
    """End them. RunHeldError once a job has begun meanwhile."""
    uploads, found = _dead(hold.store, (), writers, remote)
    findings = []
    for each in found:
        hold.guard()
        try:
            assert uploads is not None
            uploads.abort(each)
        except OSError as error:
            why = f"its upload could not be ended: {error}"
            findings.append(_finding(each, remote, Fate.FAILED, why))
        else:
            findings.append(_finding(each, remote))
    return findings


def _dead(
    store: Store, dead: Collection[AttemptName], writers: Collection[str], remote: Store | None
) -> tuple[UnfinishedUploads | None, list[Upload]]:
    """Which attempts are over the run's own store knows."""
    try:
        if (uploads := unfinished_uploads(remote or store)) is None or not (found := uploads.list()):
            return None, []
    except UploadsUnknownError as error:
        log.warning("%s", error)
        return None, []
    except OSError as error:
        if remote is None:
            raise
        log.warning("unfinished uploads to %s are not known: %s", remote.url, error)
        return None, []
    over = ended_attempts(store) | set(dead)

    def is_dead(upload: Upload) -> bool:
        if (attempt := _attempt(upload)) is None:
            return False
        is_over = attempt in over and upload.age_s > COPY_AGE_S
        return is_over or upload.age_s > SAFE_AGE_S or shard_writer(_file(upload)) in writers

    return uploads, [each for each in found if is_dead(each)]


def _attempt(upload: Upload) -> AttemptName | None:
    """That of the shard or the constants that its key spells, None for any other key."""
    match upload.path.split("/"):
        case [top, attempt, file] if top == ATTEMPTS and CONSTANTS.fullmatch(file):
            return AttemptName.parse(attempt)
        case [top, step, attempt, file] if top == STEPS and step_number(step) is not None:
            return AttemptName.parse(attempt) if shard_writer(file) else None
    return None


def _file(upload: Upload) -> str:
    return upload.path.rpartition("/")[2]


def _finding(
    upload: Upload,
    remote: Store | None,
    outcome: Fate = Fate.REMOVED,
    why: str = "its upload was cut off, its parts are paid for",
) -> Finding:
    place = upload.path if remote is None else f"{remote.url}/{upload.path}"
    return Finding(Kind.DEBRIS, outcome, place, attempt=_attempt(upload), detail=why)
