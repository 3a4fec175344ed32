"""The life of a run that the crash tests stop everywhere, and what must hold wherever it was stopped."""

from collections.abc import Callable
from dataclasses import dataclass, field

from flashckpt.catalogue.changes import Spared, spared
from flashckpt.commit import commit_step
from flashckpt.commit.attempts import settle
from flashckpt.commit.lineage import branch, next_start
from flashckpt.commit.view import View, folders_in, open_run
from flashckpt.format.manifest import PART
from flashckpt.format.names import AttemptName, CommitName
from flashckpt.format.records import Part
from flashckpt.options import Keep
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore, System
from tests.commit.runs import attempt_at, folder_of, half_steps, is_whole, name_of, publish

KEEP = Keep(last=2)

# Takes each change of a step: "begun", "committed", "may go" or "gone", and the step.
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
    say("may go", 400)
    branch(store, 300)
    say("gone", 400)
    third = attempt_at(store, name_of(300, first))
    _save(store, 400, third, say)
    _save(store, 500, third, say)


def _save(store: Store, step: int, attempt: AttemptName, say: Say) -> None:
    part = publish(store, step, attempt, constants=True)
    say("begun", step)
    view = View.of(store)
    for each in view.visible()[:-1]:
        say("may go", each.step)
    outcome = commit_step.commit(view, folder_of(store, part.id), KEEP)
    assert outcome
    say("committed", step)
    commit_step.collect(store, outcome.view.catalogue)


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
        else:
            self.must.discard(step)
        if what == "gone":
            self.may.discard(step)

    def faults(self, path: str, *, go_on: bool = True) -> list[str]:
        """What is wrong with a run that was stopped; then the next attempt goes on from it."""
        store = LocalStore(path)
        found = list(View.of(store).visible())
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
        """The next attempt starts from the newest step, commits, and deletes."""
        open_run(store, create=True)
        assert next_start(View.of(store)).refusal is None
        found = list(settle(View.of(store))[0].visible())  # also what lacked only its manifest
        attempt = attempt_at(store, found[-1] if found else None)
        part = publish(store, 900, attempt, constants=True)
        outcome = commit_step.commit(View.of(store), folder_of(store, part.id), KEEP)
        assert outcome
        commit_step.collect(store, outcome.view.catalogue)
        left = View.of(store).visible()
        expected = [*(each.step for each in found), 900][-2:]
        is_good = all(is_whole(store, each.step, each.attempt) for each in left)
        if [each.step for each in left] != expected or not is_good:
            return [f"the next attempt has {left}, not {expected}"]
        return []


def _bereft(store: Store) -> list[list[str]]:
    """The shards that parts name and that are not there, of snapshots that may still be committed. Nothing in
    this life damages a file, so it is always none."""
    kept = spared(View.of(store).catalogue, folders_in(store))
    left = [folder.path for folder, what in kept.items() if what is Spared.ALL]
    return [missing for each in left if (missing := _without_shards(store, each))]


def _without_shards(store: Store, folder: str) -> list[str]:
    there = {entry.name: entry.num_bytes for entry in store.list(folder)}
    missing = []
    for name in filter(PART.fullmatch, there):
        part = Part.from_bytes(store.read(f"{folder}/{name}", Part.MAX_BYTES), name)
        missing += [r.shard.file for r in part.ranks if there.get(r.shard.file) != r.shard.num_bytes]
    return missing
