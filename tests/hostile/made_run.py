"""A run with one of everything that is written: attempts, steps, frozen leaves, a branch, a quarantine, a
tombstone."""

from __future__ import annotations

from flashckpt.commit.attempts import beat
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.collect import prune
from flashckpt.commit.lineage import branch
from flashckpt.format.names import SnapshotId
from flashckpt.format.records import Tombstone
from flashckpt.options import Keep
from tests import run_view
from tests.commit.runs import HOLDER, attempt_at, commit, name_of, new_run, publish


def make_run(path: str) -> None:
    store = new_run(path)
    first = attempt_at(store)
    beat(store, first, 7)
    for step in (100, 200, 300):
        commit(store, step, first, constants=True)
    prune(store, first, Keep(last=2))
    run_view.end(store, first, "dead")
    branch(store, 200, me=HOLDER, watch_s=0)
    third = attempt_at(store, name_of(200, first))
    commit(store, 250, third)
    run_view.mark_damaged(store, name_of(250, third), "node-7", "chunk 3 does not have its checksum")
    publish(store, 260, third)
    dying = Tombstone(id=SnapshotId(third, 240))
    store.create(dying.id.tombstone_path, dying.to_bytes())
    run_view.end(store, third, "closed")
    assert Catalogue.of(store).tombstones
