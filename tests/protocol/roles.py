"""The actors of the protocol on storage, which call the package's own functions, and the invariants.

    1  A step that was reported as committed is whole and visible, until two newer ones are.
    2  A commit record names no missing file. No fault is a record without parts of an attempt that another
       has followed, which no start takes: `half_steps`.
    3  A start takes a whole step: the first candidate has every byte that was written, and there is one
       where one was ever committed.
    4  No attempt that has started loses its claim or its start.json to an older one, nor the step that it
       went on from, until it has two of its own.
    5  The next collector ends an interrupted deletion: nothing stands beside a tombstone after it.
    6  Files of the dead are removed by the next claimants and collectors: after them every shard is named
       by a part, every part by a record, and every other file belongs to the protocol.

Invariants 1 to 4 hold of the files after every turn, 5 and 6 at each end, once another job has trained for
three steps. An invariant may say that a report requires something, never that a missing one does: reports
come as early as they can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from flashckpt.commit import attempts, holder, lineage, retention, steps
from flashckpt.commit.lineage import VisibleStep
from flashckpt.errors import NoSuchStepError
from flashckpt.format.names import (
    PART,
    SHARD,
    AttemptName,
    claim_path,
    shard_name,
    step_attempt_folder,
)
from flashckpt.format.records import Manifest, Part, Tombstone
from flashckpt.options import Keep
from flashckpt.persist.deletions import is_unused_still, remove, unused_files
from flashckpt.persist.job import JobState, NodeRanks, StepJob
from flashckpt.persist.stored_steps import Completeness, unfinished
from flashckpt.persist.writer import Writer
from flashckpt.store.base import Store
from flashckpt.tiers.step_copy import StepCopier
from tests.commit.runs import HOLDER, half_steps, image_of, is_whole, leaves_of, part_of
from tests.protocol.memory_store import Files, FolderStore, LiveServer
from tests.protocol.search import Invariant, OpenStore, World, repeatable

WORLD = 2
KEEP = Keep(last=2)
FIRST = AttemptName(1, "aaaaaaaa")
Act = Callable[..., object]


@functools.cache
def part_at(rank: int, step: int, attempt: AttemptName, nonce: str) -> Part:
    scratch = FolderStore(LiveServer({"run": None}), "run")
    return part_of(scratch, step, attempt, (rank,), world=WORLD, keeper=rank, nonce=nonce)


@functools.cache
def image_at(rank: int, step: int) -> bytes:
    return image_of(leaves_of(step, rank))[0]


def write_part(store: Store, rank: int, step: int, attempt: AttemptName, nonce: str = "5f2c0a1b") -> Part:
    """Shard, then part, of a keeper that has one rank."""
    part, image = part_at(rank, step, attempt, nonce), image_at(rank, step)
    store.write_parts(f"{step_attempt_folder(step, attempt)}/{shard_name(rank, nonce)}", [image], len(image))
    steps.publish_part(store, part)
    return part


# ---- actors


def commit(store: Store, rank: int, step: int, attempt: AttemptName) -> object:
    """What a keeper does once its part stands, with a trainer that waits."""
    job = StepJob(
        attempt=attempt,
        step=step,
        boundary=1,
        node=NodeRanks(ranks=(rank,), world=WORLD),
        part_of=attempt,
        has_trainers=True,
    )
    outcome = Writer(store, "5f2c0a1b", gathers=True).persist(job)
    if outcome.state is JobState.COMMITTED:
        return "committed", step, attempt
    return outcome.state.value, outcome.message


def committer(rank: int, step: int, attempt: AttemptName) -> Act:
    def act(store: Store) -> object:
        write_part(store, rank, step, attempt)
        return commit(store, rank, step, attempt)

    return act


def late_committer(rank: int, step: int, attempt: AttemptName) -> Act:
    """Its part stands already."""
    return lambda store: commit(store, rank, step, attempt)


def collector(attempt: AttemptName) -> Act:
    return lambda store: ("pruned", *retention.prune(store, attempt, KEEP))


def claim_and_start(store: Store, lock: str = "rival", living: str = "rival") -> AttemptName:
    """The order of a trainer's start: one-job check, sweep, claim, list, read, start. Who claimed with
    the lock
    `living` lives, as far as its runtime folder tells."""
    me = replace(HOLDER, lock=lock)

    def check() -> None:
        holder.check(store, me, lambda _, name: name == living, watch_s=0)
        retention.sweep_dead(store)

    name = attempts.claim(store, me, check)
    for each in lineage.candidates(store, says=False):
        with suppress(NoSuchStepError):
            found = steps.read_step(store, each.step, each.attempt)
            attempts.start(store, name, each.attempt, each.step, WORLD, found.boundary)
            return name
    lineage.check_usable(store)
    attempts.start(store, name, None, 0, WORLD)
    return name


def claimant(store: Store) -> object:
    return "started", claim_and_start(store)


def late_claimant(store: Store) -> object:
    """Two of these take each other for dead."""
    return "started", claim_and_start(store, "silent")


def copier(step: int, attempt: AttemptName) -> Act:
    """Takes the stores "home" and "remote"."""

    def act(home: Store, remote: Store) -> object:
        return StepCopier(home, remote, threads=1).copy(step, attempt).outcome.value

    return act


def brancher(step: int) -> Act:
    return lambda store: ("started", lineage.branch(store, step, me=HOLDER, watch_s=0))


def recovery(store: Store) -> object:
    """What `recover` does to storage: commit what has all its parts, then remove what no start can use."""
    newest = attempts.newest_started(store)
    for each in unfinished(store):
        if each.completeness is Completeness.COMPLETE and each.attempt == newest:
            node = NodeRanks(ranks=tuple(range(WORLD)), world=WORLD)
            job = StepJob(attempt=each.attempt, step=each.step, boundary=1, node=node, stored=each)
            Writer(store, "0badc0de").persist(job)
    for unused in unused_files(store, (), ()):
        if is_unused_still(store, unused):
            remove(store, unused)
    return "recovered"


# ---- how a scenario begins


def run_with(open_store: OpenStore, last_step: int = 2, *more: Callable[[Store], object]) -> Files:
    """A run of the attempt FIRST with the committed steps 1 to `last_step`, and what is done after it."""
    server = LiveServer({"home": None, "remote": None} if open_store is FolderStore else {})
    with repeatable(99):
        store = open_store(server, "home")
        attempts.open_run(store, create=True)
        assert attempts.claim_as(store, FIRST, HOLDER)
        attempts.start(store, FIRST, None, 0, WORLD)
        for step in range(1, last_step + 1):
            for rank in range(WORLD):
                write_part(store, rank, step, FIRST)
            assert steps.commit(store, step, FIRST, WORLD)
        for act in more:
            act(store)
    return server.files


def train_on(store: Store) -> AttemptName:
    """Another job: it starts, saves three steps, and deletes."""
    name = claim_and_start(store, living="none")
    last = max((each.step for each in lineage.everything(store)), default=0)
    for step in range(last + 1, last + 4):
        for rank in range(WORLD):
            write_part(store, rank, step, name, nonce="77777777")
        assert commit(store, 0, step, name) == ("committed", step, name)
        retention.prune(store, name, KEEP, in_hand=())
    return name


# ---- invariants


def reported(world: World, what: str) -> list[tuple[object, ...]]:
    reports = world.reports.values()
    return [each[1:] for each in reports if isinstance(each, tuple) and each[:1] == (what,)]


def committed_steps_stay(world: World) -> str:
    """1"""
    found = reported(world, "committed")
    if not found:
        return ""
    seen = lineage.visible(world.store())
    for step, attempt in found:
        newer = {each.step for each in seen if each.step > step}  # type: ignore[operator]
        if VisibleStep(step, attempt) not in seen and len(newer) < 2:  # type: ignore[arg-type]
            return f"step {step} of {attempt} was reported as committed, and visible are {seen}"
    return ""


def records_are_whole(world: World) -> str:
    """2"""
    return "; ".join(half_steps(world.store()))


def a_start_takes_a_whole_step(world: World) -> str:
    """3"""
    store = world.store()
    lineage.check_records(store)
    lineage.check_usable(store)
    found = lineage.candidates(store, says=False)
    if not found:
        return "no step is left"
    newest = found[0]
    return "" if is_whole(store, newest.step, newest.attempt) else f"{newest} is not whole"


def started_attempts_stay(world: World) -> str:
    """4"""
    store = world.store()
    started = [name for (name,) in reported(world, "started") if isinstance(name, AttemptName)]
    if not started:
        return ""
    newest, found = max(started), attempts.newest_started(store)
    if found is not None and found > newest:
        return ""  # another has followed it
    if found != newest or not store.exists(claim_path(newest.number)):
        return f"{newest} has lost its records"
    begun = attempts.read_start(store, newest)
    assert begun is not None
    if begun.parent is None or steps.is_committed(store, begun.step, begun.parent):
        return ""
    return f"{newest} continues step {begun.step} of {begun.parent}, which is gone"


def the_next_job_clears_up(world: World) -> str:
    """5 and 6"""
    if not world.is_final:
        return ""
    store = world.after(50, train_on).store()
    wrong = []
    for each in lineage.everything(store):
        folder = step_attempt_folder(each.step, each.attempt)
        names = {entry.name for entry in store.list(folder)}
        found = steps.read_manifest(store, each.step, each.attempt)
        if isinstance(found, Tombstone) and len(names) > 1:
            wrong.append(f"beside the tombstone of {each}: {sorted(names)}")
        elif isinstance(found, Manifest):
            kept = {row.file for row in [*found.parts, *found.shards]}
            extra = {name for name in names - kept if PART.fullmatch(name) or SHARD.fullmatch(name)}
            wrong += [f"not named in {each}: {sorted(extra)}"] if extra else []
        elif found is None:
            wrong.append(f"never committed, and there: {each} {sorted(names)}")
    visible = lineage.visible(store)
    if len(visible) != KEEP.last:
        wrong.append(f"visible are {visible}")
    return "; ".join(wrong)


def at_end(invariant: Invariant) -> Invariant:
    """The invariant for a state in which all actors have ended."""

    @functools.wraps(invariant)
    def judged(world: World) -> str:
        return invariant(world) if world.is_final else ""

    return judged


ALWAYS: Sequence[Invariant] = (
    committed_steps_stay,
    records_are_whole,
    a_start_takes_a_whole_step,
    started_attempts_stay,
)
ALL: Sequence[Invariant] = (*ALWAYS, the_next_job_clears_up)
