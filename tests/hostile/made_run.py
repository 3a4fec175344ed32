"""A run with one of everything that is written: attempts, steps, constants, a branch, a mark, a tombstone."""

from __future__ import annotations

from flashckpt.commit.attempts import beat, mark_ended
from flashckpt.commit.lineage import branch, mark
from flashckpt.commit.retention import prune
from flashckpt.options import Keep
from tests.commit.runs import HOLDER, attempt_at, commit, new_run, publish


def make_run(path: str) -> None:
    store = new_run(path)
    first = attempt_at(store)
    beat(store, first, 7)
    for step in (100, 200, 300):
        commit(store, step, first, constants=True)
    prune(store, first, Keep(last=2))
    mark_ended(store, first, "dead")
    branch(store, 200, me=HOLDER, watch_s=0)
    third = attempt_at(store, first, 200)
    commit(store, 250, third)
    mark(store, 250, third, "node-7", "chunk 3 does not have its checksum")
    publish(store, 260, third)
    mark_ended(store, third, "closed")
