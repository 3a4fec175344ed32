"""Going back: an attempt that starts at an older step, or at one that is not visible any more.

A deed of its own, not an option: a restart would repeat an option. Deletes nothing.
"""

from __future__ import annotations

from flashckpt.commit.attempts import claim, mark_ended, start
from flashckpt.commit.holder import WATCH_S, Probe, check, here
from flashckpt.commit.reading import resolve
from flashckpt.commit.run import open_run
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Holder
from flashckpt.store.base import Store


def branch(
    store: Store,
    step: int,
    attempt: AttemptName | None = None,
    *,
    probe: Probe | None = None,
    me: Holder | None = None,
    watch_s: float = WATCH_S,
) -> AttemptName:
    """Claim and start an attempt at a visible step, or at `step` of `attempt`. The next resume, and all
    after it, go on from there. Returns the new attempt.

    RunHeldError where a job holds the run, NoSuchStepError where the step is not committed, DamagedError
    where its records are damaged; nothing is changed then.
    """
    open_run(store, create=False)
    holder = me if me is not None else here()
    # Before the claim, so that a wrong step takes no number; after it again, so that it is still true.
    resolve(store, step, attempt)
    name = claim(store, holder, check=lambda: check(store, holder, probe, watch_s=watch_s))
    try:
        found = resolve(store, step, attempt)
        start(store, name, found.attempt, found.step, found.world)
    finally:
        mark_ended(store, name, "closed")
    return name
