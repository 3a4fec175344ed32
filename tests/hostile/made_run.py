"""A run with one of everything that is written."""

from flashckpt.commit.attempts import beat
from flashckpt.commit.commit_step import collect
from flashckpt.commit.lineage import branch
from flashckpt.commit.view import View
from flashckpt.options import Keep
from tests import run_view
from tests.commit.runs import attempt_at, commit, name_of, new_run, publish


def make_run(path: str) -> None:
    store = new_run(path)
    first = attempt_at(store)
    beat(store, first, 7)
    for step in (100, 200, 300):
        commit(store, step, first, constants=True, keep=Keep(last=2))
    collect(store, View.of(store).catalogue)
    run_view.end(store, first, "dead")
    branch(store, 200)
    third = attempt_at(store, name_of(200, first))
    commit(store, 250, third)
    run_view.mark_damaged(store, name_of(250, third), "node-7", "chunk 3 does not have its checksum")
    publish(store, 260, third)
    run_view.end(store, third, "closed")
