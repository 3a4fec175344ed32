"""What a recovery does for the remote of a run: the newest step goes there, for a node that is to go away.

Owns that it comes last: what is in memory is saved in the run's own store first, whatever the remote does.
"""

from __future__ import annotations

import logging

from flashckpt.commit import lineage
from flashckpt.commit.attempts import open_run
from flashckpt.commit.holder import check
from flashckpt.commit.steps import is_committed
from flashckpt.errors import FlashckptError, NoSuchStepError
from flashckpt.recovery.node import lock_probe
from flashckpt.recovery.report import RemoteFate, RemoteReport, Watcher
from flashckpt.store.base import Store
from flashckpt.tiers.nearest import RemoteRun, seen
from flashckpt.tiers.run_copy import copy_run
from flashckpt.tiers.step_copy import Outcome

log = logging.getLogger(__name__)

_FATES = {
    Outcome.COPIED: RemoteFate.COPIED,
    Outcome.THERE: RemoteFate.THERE,
    Outcome.PART: RemoteFate.PART,
    Outcome.BURIED: RemoteFate.BURIED,
}
_UNSEEN = (Outcome.PART, Outcome.BURIED)


def bring_newest(store: Store, remote: Store, watcher: Watcher, *, dry_run: bool) -> RemoteReport:
    """Copy the step at rest that a resume would take, or only look whether the remote has it. What goes wrong
    is in the report, and changes nothing of the run."""
    watcher.stage("copying")
    try:
        if dry_run:
            return _foreseen(store, remote)
        done = copy_run(
            store,
            remote,
            progress=watcher.progress,
            may_supersede=lambda: refuse_if_trained(remote),
            joins=True,
        )
    except NoSuchStepError:
        return RemoteReport(url=remote.url, outcome=RemoteFate.NOTHING)
    except (FlashckptError, OSError) as error:
        return RemoteReport(url=remote.url, outcome=RemoteFate.FAILED, problem=str(error))
    [found] = done.steps
    assert found.copied is not None
    hidden = (
        f"the run has gone on there without it: it is kept as another branch, and `flashckpt branch "
        f"{remote.url} {found.step}@{found.attempt}` goes on from it"
    )
    return RemoteReport(
        url=remote.url,
        outcome=_FATES[found.copied.outcome],
        step=found.step,
        attempt=found.attempt,
        sent_bytes=found.copied.sent_bytes,
        note="" if found.is_visible or found.copied.outcome in _UNSEEN else hidden,
    )


def look_at(remote: Store) -> RemoteRun | None:
    """What it has of the run; None where nobody can tell."""
    try:
        open_run(remote, create=False)
        return seen(remote)
    except (FlashckptError, OSError) as error:
        log.info("%s was not looked at: %s", remote.url, error)
        return None


def refuse_if_trained(target: Store) -> None:
    """RunHeldError where an attempt that lives there would be superseded."""
    with lock_probe(target, open_run(target, create=False)) as (me, probe):
        check(target, me, probe)


def _foreseen(store: Store, remote: Store) -> RemoteReport:
    found = next(iter(lineage.candidates(store, says=False)), None)
    if found is None:
        return RemoteReport(url=remote.url, outcome=RemoteFate.NOTHING)
    is_there = is_committed(remote, found.step, found.attempt)
    fate = RemoteFate.THERE if is_there else RemoteFate.MISSING
    return RemoteReport(url=remote.url, outcome=fate, step=found.step, attempt=found.attempt)
