"""The life of a run that the crash tests stop everywhere, and what must hold wherever it was stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flashckpt.commit import collect, commit_step, starting
from flashckpt.commit.attempts import open_run
from flashckpt.commit.catalogue import Catalogue, snapshots_with_data
from flashckpt.commit.collect import Knowledge
from flashckpt.commit.lineage import branch, next_start
from flashckpt.format.names import PART, AttemptName, CommitName
from flashckpt.format.records import Part
from flashckpt.options import Keep
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore, System
from tests.commit.runs import HOLDER, attempt_at, half_steps, is_whole, name_of, part_of

KEEP = Keep(last=2)

# What the run says of itself as it goes on: ("begun" | "committed" | "may go", step).
Say = Callable[[str, int], None]


def live(path: str, system: System, say: Say) -> None:
    """Two attempts, retention, a branch, and training over an old step again."""
    store = LocalStore(path, system)
    open_run(store, create=True)
    first = attempt_at(store)
    for step in (100, 200, 300):
        _save(store, step, first, say)
    second = attempt_at(store, name_of(300, first))
    _save(store, 400, second, say)
    for step in (400, 300):
        say("may go", step)
    branch(store, 300, watch_s=0)
    say("gone", 400)
    say("committed", 300)
    third = attempt_at(store, name_of(300, first))
    _save(store, 400, third, say, nonce="33330000")
    _save(store, 500, third, say, nonce="33330000")


def _save(store: Store, step: int, attempt: AttemptName, say: Say, nonce: str = "11110000") -> None:
    part = part_of(store, step, attempt, nonce=nonce, constants=True)
    commit_step.publish_part(store, part)
    say("begun", step)
    assert commit_step.commit(store, name_of(step, attempt).id, world=1)
    say("committed", step)
    for each in collect.collect(Catalogue.of(store), KEEP, Knowledge()).expired:
        say("may go", each.step)
    collect.prune(store, attempt, KEEP)


@dataclass
class Expected:
    """What was said up to a moment, as bounds on what is visible then."""

    must: set[int] = field(default_factory=set)
    may: set[int] = field(default_factory=set)

    def say(self, what: str, step: int) -> None:
        if what == "begun":
            self.may.add(step)
        elif what == "committed":
            self.must.add(step)
            self.may.add(step)
        elif what == "may go":
            self.must.discard(step)
        elif what == "gone":
            self.must.discard(step)
            self.may.discard(step)

    def faults(self, path: str, *, go_on: bool = True) -> list[str]:
        """What is wrong with a run that was stopped; then the next attempt goes on from it."""
        store = LocalStore(path)
        found = list(Catalogue.of(store).visible())
        faults = [
            f"step {each.step} is visible and not whole"
            for each in found
            if not is_whole(store, each.step, each.attempt)
        ]
        steps = {each.step for each in found}
        if self.must - steps:
            faults.append(f"committed and not visible: {sorted(self.must - steps)}")
        if steps - self.may:
            faults.append(f"visible and never committed: {sorted(steps - self.may)}")
        faults += half_steps(store)
        faults += [f"a part without its files: {missing}" for missing in _bereft(store)]
        if not faults and go_on:
            faults += self._go_on(store, found)
        return faults

    def _go_on(self, store: Store, found: list[CommitName]) -> list[str]:
        """The next attempt starts from the newest step, commits, and prunes."""
        open_run(store, create=True)
        assert next_start(store).refusal is None
        attempt, catalogue = starting.claim(store, HOLDER)
        found = list(catalogue.visible())  # also what lacked only its record
        parent, step = (found[-1].id, found[-1].step) if found else (None, 0)
        starting.start(store, attempt, parent, step, 1, catalogue)
        part = part_of(store, 900, attempt, constants=True)
        commit_step.publish_part(store, part)
        assert commit_step.commit(store, name_of(900, attempt).id, world=1)
        collect.prune(store, attempt, KEEP)
        left = Catalogue.of(store).visible()
        expected = [*(each.step for each in found), 900][-2:]
        is_good = all(is_whole(store, each.step, each.attempt) for each in left)
        if [each.step for each in left] != expected or not is_good:
            return [f"the next attempt has {left}, not {expected}"]
        return []


def _bereft(store: Store) -> list[list[str]]:
    """The shards that parts without a record name and that are not there, unless they are being deleted.
    Nothing in this life damages a file, so it is always none."""
    catalogue = Catalogue.of(store)
    committed = {each.id for each in (*catalogue.commits, *catalogue.dying)}
    left = set(snapshots_with_data(store)) - committed - catalogue.tombstones
    return [missing for each in left if (missing := _without_shards(store, each.data_folder))]


def _without_shards(store: Store, folder: str) -> list[str]:
    there = {entry.name: entry.num_bytes for entry in store.list(folder)}
    missing = []
    for name in filter(PART.fullmatch, there):
        part = Part.from_bytes(store.read(f"{folder}/{name}", Part.MAX_BYTES), name)
        missing += [r.shard.file for r in part.ranks if there.get(r.shard.file) != r.shard.num_bytes]
    return missing
