"""The life of a run that the crash tests stop everywhere, and what must hold wherever it was stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flashckpt.commit.attempts import newest_started, open_run
from flashckpt.commit.lineage import branch, check_usable, everything, visible
from flashckpt.commit.retention import doomed, prune
from flashckpt.commit.steps import commit, missing_files, publish_part, read_manifest
from flashckpt.format.names import PART, AttemptName, step_attempt_folder
from flashckpt.format.records import Manifest, Part
from flashckpt.options import Keep
from flashckpt.store.base import Store
from flashckpt.store.local import LocalStore, System
from tests.commit.runs import attempt_at, is_whole, part_of

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
    second = attempt_at(store, first, 300)
    _save(store, 400, second, say)
    for step in (400, 300):
        say("may go", step)
    branch(store, 300, watch_s=0)
    say("gone", 400)
    say("committed", 300)
    third = attempt_at(store, first, 300)
    _save(store, 400, third, say, nonce="33330000")
    _save(store, 500, third, say, nonce="33330000")


def _save(store: Store, step: int, attempt: AttemptName, say: Say, nonce: str = "11110000") -> None:
    part = part_of(store, step, attempt, nonce=nonce, constants=True)
    publish_part(store, part)
    say("begun", step)
    assert commit(store, step, attempt, world=1)
    say("committed", step)
    for each in doomed(store, attempt, KEEP):
        say("may go", each.step)
    prune(store, attempt, KEEP)


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
        found = [(each.step, each.attempt) for each in visible(store)]
        faults = [
            f"step {step} is visible and not whole" for step, of in found if not is_whole(store, step, of)
        ]
        steps = {step for step, _ in found}
        if self.must - steps:
            faults.append(f"committed and not visible: {sorted(self.must - steps)}")
        if steps - self.may:
            faults.append(f"visible and never committed: {sorted(steps - self.may)}")
        faults += [f"a manifest or part without its files: {missing}" for missing in _bereft(store)]
        if not faults and go_on:
            faults += self._go_on(store, found)
        return faults

    def _go_on(self, store: Store, found: list[tuple[int, AttemptName]]) -> list[str]:
        """The next attempt starts from the newest step, commits, and prunes."""
        open_run(store, create=True)
        check_usable(store)
        step, parent = found[-1] if found else (0, None)
        attempt = attempt_at(store, parent, step)
        part = part_of(store, 900, attempt, constants=True)
        publish_part(store, part)
        assert commit(store, 900, attempt, world=1)
        prune(store, attempt, KEEP)
        left = [each.step for each in visible(store)]
        expected = [*(step for step, _ in found), 900][-2:]
        if left != expected or not all(is_whole(store, each.step, each.attempt) for each in visible(store)):
            return [f"the next attempt has {left}, not {expected}"]
        return []


def _bereft(store: Store) -> list[list[str]]:
    """What manifests, and parts without one, name that is not there. Nothing in this life damages a file,
    so it is always none."""
    bereft, newest = [], newest_started(store)
    for each in everything(store):
        found = read_manifest(store, each.step, each.attempt)
        if isinstance(found, Manifest):
            bereft.append(missing_files(store, found))
        elif found is None and each.attempt == newest:
            # Of older attempts a sweep may have left anything: they can commit nothing any more.
            bereft.append(_without_shards(store, step_attempt_folder(each.step, each.attempt)))
    return [missing for missing in bereft if missing]


def _without_shards(store: Store, folder: str) -> list[str]:
    there = {entry.name: entry.num_bytes for entry in store.list(folder)}
    missing = []
    for name in filter(PART.fullmatch, there):
        part = Part.from_bytes(store.read(f"{folder}/{name}", Part.MAX_BYTES), name)
        missing += [r.shard.file for r in part.ranks if there.get(r.shard.file) != r.shard.num_bytes]
    return missing
