"""Removing debris in a recovery: of what `persist/debris.py` names, and while nobody has begun a job."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from flashckpt.events import Event
from flashckpt.persist.debris import Debris, debris, remove
from flashckpt.persist.ledger import Ledger
from flashckpt.recovery.node import Hold
from flashckpt.recovery.report import Finding, Kind, Outcome

_MOST_NAMED = 100


def clear(hold: Hold, writers: Collection[str], ledger: Ledger) -> list[Finding]:
    """Delete debris, that of dead keepers included: `writers` are their nonces. RunHeldError once a job has
    begun meanwhile."""
    found, failed = debris(hold.store, (), writers), []
    for each in found:
        hold.guard()
        try:
            remove(hold.store, each)
        except OSError as error:
            failed.append(replace(_finding(each), outcome=Outcome.FAILED, detail=str(error)))
    if found:
        paths = [each.path for each in found]
        ledger.add(
            None, Event.PRUNE, what="debris", paths=paths[:_MOST_NAMED], count=len(paths), by="recover"
        )
    places = {each.place for each in failed}
    return [each for each in found_debris(found) if each.place not in places] + failed


def found_debris(found: list[Debris]) -> list[Finding]:
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
