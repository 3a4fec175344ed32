"""Removing debris. Owns these deletions: of what `debris.py` names, and while nobody has begun a job."""

from __future__ import annotations

from dataclasses import replace

from flashckpt.events import Event
from flashckpt.format.names import attempt_folder, step_attempt_folder, step_folder
from flashckpt.keeper.ledger import Ledger
from flashckpt.recovery.debris import Debris, debris
from flashckpt.recovery.node import Hold
from flashckpt.recovery.report import Finding, Kind, Outcome
from flashckpt.store.base import Store


def clear(hold: Hold, ledger: Ledger) -> list[Finding]:
    """Delete debris. RunHeldError once a job has begun meanwhile."""
    found, failed = debris(hold.store), []
    for each in found:
        hold.guard()
        try:
            _remove(hold.store, each)
        except OSError as error:
            failed.append(replace(_finding(each), outcome=Outcome.FAILED, detail=str(error)))
    if found:
        paths = [each.path for each in found]
        ledger.add(None, Event.PRUNE, what="debris", paths=paths[:100], count=len(paths), by="recover")
    places = {each.place for each in failed}
    return [each for each in findings_of(found) if each.place not in places] + failed


def findings_of(found: list[Debris]) -> list[Finding]:
    """One row a file; of empty folders nothing is said."""
    return [_finding(each) for each in found if each.kind != "folder"]


def _finding(each: Debris) -> Finding:
    return Finding(
        kind=Kind.DEBRIS,
        outcome=Outcome.REMOVED,
        place=each.path,
        step=each.step,
        attempt=each.attempt,
        num_bytes=each.num_bytes,
        detail=each.why,
    )


def _remove(store: Store, each: Debris) -> None:
    if each.kind == "folder":
        store.remove(each.path)
        store.remove(each.path.rpartition("/")[0])
        return
    if each.kind == "attempt" and each.attempt is not None:
        # The claim last: as long as it stands, what a crash left of the attempt is found again.
        store.remove_tree(attempt_folder(each.attempt))
    store.remove(each.path)
    # Nobody has a use for a folder that this has left empty.
    if each.step is not None and each.attempt is not None:
        store.remove(step_attempt_folder(each.step, each.attempt))
        store.remove(step_folder(each.step))
