"""The actors of the protocol on storage, which call the package's own functions, and the invariants.

    1  A step that was reported as committed is whole and visible, until two newer ones are, or `branch` has
       resumed from an older one: then it is whole.
    2  A commit record names no missing file. No fault is a record of which no file is left, where no start
       needs it: its committer was killed before its check (`half_steps`).
    3  A start takes a whole step: the first candidate has every byte that was written, and there is one
       where one was ever committed.
    4  No attempt that has started loses its claim or its start.json to an older one, nor the step that it
       resumed from, until it has two of its own.
    5  The next collector ends an interrupted deletion: no tombstone is left after it.
    6  Files of the dead are removed by the next claimants and collectors: after them every shard is named
       by a part, every part and every frozen instance by a record, and every other file belongs to the
       protocol. A snapshot of another branch that has all its parts stays.
    7  A step that has a record in a remote, or was reported as copied there, is whole there, until two newer
       ones are: a collector there may take data that is sent for that of a step that is never committed.
    8  A snapshot that has all its parts, and whose record was lost, keeps them (`keeps`).

Invariants 1 to 4 and 7 hold of the files after every turn, 5 and 6 at each end, once another job has trained
for three steps. An invariant may say that a report requires something, never that a missing one does: reports
come as early as they can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from flashckpt.commit import attempts, collect, commit_step, starting
from flashckpt.commit.catalogue import Catalogue, snapshots_with_data
from flashckpt.commit.steps import is_whole, missing_files, read_record
from flashckpt.errors import UnusableRunError
from flashckpt.format.names import (
    DATA,
    FROZEN_FOLDER,
    AttemptName,
    CommitName,
    SnapshotId,
    claim_path,
    frozen_name,
    frozen_path,
    part_name,
    shard_name,
)
from flashckpt.format.records import CommitRecord, Contents, Part
from flashckpt.options import Keep
from flashckpt.replication.run_copy import Outcome, copy_in_order, open_as
from flashckpt.store.base import Store
from tests.commit.runs import HOLDER, contents_of, image_of, leaves_of, part_of
from tests.protocol.memory_store import Files, FolderStore, LiveServer
from tests.protocol.search import Invariant, OpenStore, World, repeatable

WORLD = 2
KEEP = Keep(last=2)
FIRST = AttemptName(1, "aaaaaaaa")
Act = Callable[..., object]


def at(step: int, attempt: AttemptName = FIRST, boundary: int | None = None) -> CommitName:
    """A step's name. Its boundary has the step's number, unless another is given."""
    return CommitName(step, attempt, step if boundary is None else boundary)


BRANCHED = at(1)
"""The step that `branch` resumes from; no claimant does in a scenario with a committer."""


@functools.cache
def frozen_contents(file: str) -> tuple[bytes, Contents]:
    return contents_of(file, {"frozen.weight": np.arange(8, dtype="float64")})


@functools.cache
def part_at(rank: int, name: CommitName, nonce: str, frozen: str) -> Part:
    scratch = FolderStore(LiveServer({"run": None}), "run")
    part = part_of(
        scratch,
        name.step,
        name.attempt,
        (rank,),
        world=WORLD,
        keeper=rank,
        nonce=nonce,
        boundary=name.boundary,
    )
    if not frozen:
        return part
    ranks = tuple(replace(each, constants=frozen_contents(frozen)[1]) for each in part.ranks)
    return replace(part, ranks=ranks)


@functools.cache
def image_at(rank: int, step: int) -> bytes:
    return image_of(leaves_of(step, rank))[0]


def write_part(store: Store, rank: int, name: CommitName, nonce: str = "5f2c0a1b", frozen: str = "") -> Part:
    """Shard, then part, of a keeper that has one rank. `frozen`: an instance that the part names."""
    part, image = part_at(rank, name, nonce, frozen), image_at(rank, name.step)
    store.write_parts(f"{name.id.data_folder}/{shard_name(rank, nonce)}", [image], len(image))
    commit_step.publish_part(store, part)
    return part


def write_frozen(store: Store, attempt: AttemptName, rank: int = 0, nonce: str = "5f2c0a1b") -> str:
    """An instance of frozen leaves. Returns its file name."""
    file = frozen_name(attempt, rank, nonce)
    image = frozen_contents(file)[0]
    store.write_parts(frozen_path(file), [image], len(image))
    return file


# ---- actors


def commit(store: Store, snapshot: SnapshotId) -> object:
    """What a keeper does once its part stands, with a trainer that waits."""
    outcome = commit_step.commit(store, snapshot, WORLD)
    return ("committed", outcome.name) if outcome else outcome.state.value


def committer(rank: int, name: CommitName, frozen: str = "") -> Act:
    def act(store: Store) -> object:
        write_part(store, rank, name, frozen=frozen)
        return commit(store, name.id)

    return act


def late_committer(rank: int, name: CommitName) -> Act:
    """Its part stands already."""
    return lambda store: commit(store, name.id)


def frozen_committer(name: CommitName, instance: str = "") -> Act:
    """Writes an instance, or names one that stands, then the part of rank 0, and commits. Rank 1's part
    stands."""

    def act(store: Store) -> object:
        write_part(store, 0, name, frozen=instance or write_frozen(store, name.attempt, nonce="77777777"))
        return commit(store, name.id)

    return act


def collector(attempt: AttemptName, dead: Sequence[str] = ()) -> Act:
    def act(store: Store) -> object:
        knowledge = collect.Knowledge(dead_writers=dead)
        plan, done = collect.prune(store, attempt, KEEP, knowledge)
        return ("pruned", *plan.expired, *done.frozen)

    return act


def _check(store: Store, me: object, living: str) -> None:
    attempts.check_not_held(store, me, lambda _, name: name == living, watch_s=0)  # type: ignore[arg-type]


def claim_and_start(store: Store, lock: str = "rival", living: str = "rival") -> AttemptName:
    """The order of a trainer's start: one-job check, claim, sweep, list, read, start, check. The process
    that claimed with the lock `living` lives, as far as its runtime folder shows."""
    me = replace(HOLDER, lock=lock)
    name, catalogue = starting.claim(store, me, lambda: _check(store, me, living), keep=KEEP)
    for each in catalogue.newest_first():
        if is_whole(store, each):
            starting.start(store, name, each.id, each.step, WORLD, catalogue)
            starting.check_started(store, name, each)
            return name
    if catalogue.commits or catalogue.dying:
        raise UnusableRunError("no committed step can be resumed")
    starting.start(store, name, None, 0, WORLD, catalogue)
    return name


def claimant(store: Store) -> object:
    return "started", claim_and_start(store)


def late_claimant(store: Store) -> object:
    """Two of these take each other for dead."""
    return "started", claim_and_start(store, "silent")


def copier(name: CommitName) -> Act:
    """Takes the stores "home" and "remote"."""

    def act(home: Store, remote: Store) -> object:
        open_as(attempts.open_run(home, create=False).run_id, home, remote)

        def send(record: CommitRecord) -> None:
            send_files(home, remote, record)

        outcome, _ = copy_in_order(home, remote, name, send)
        return "copied", name, outcome is Outcome.COPIED

    return act


def send_files(home: Store, remote: Store, record: CommitRecord) -> None:
    """Frozen instances, shards, parts: what stands is not sent again."""
    folder = record.name.id.data_folder
    frozen = [(frozen_path(each.file), each.num_bytes) for each in record.frozen]
    for path, num_bytes in [*frozen, *((f"{folder}/{e.file}", e.num_bytes) for e in record.shards)]:
        if not remote.exists(path):
            with suppress(FileExistsError):
                remote.write_parts(path, [home.read_bytes(path, 0, num_bytes)], num_bytes)
    for part in record.parts:
        remote.create(f"{folder}/{part.file}", home.read(f"{folder}/{part.file}", Part.MAX_BYTES))


def brancher(name: CommitName) -> Act:
    def act(store: Store) -> object:
        return "started", starting.branch(store, name, HOLDER, lambda: _check(store, HOLDER, "rival"))

    return act


def recovery(store: Store) -> object:
    """What `recover` does to storage: commit what has all its parts, then remove what no start can use."""
    catalogue = Catalogue.of(store)
    committed = {each.id for each in (*catalogue.commits, *catalogue.dying)}
    for snapshot in snapshots_with_data(store.at_once()):
        if snapshot.attempt == catalogue.newest_started and snapshot not in committed:
            commit_step.commit(store, snapshot, WORLD)
    assert catalogue.newest_claimed is not None
    collect.prune(store, catalogue.newest_claimed, KEEP, collect.Knowledge(dead_writers=["5f2c0a1b"]))
    return "recovered"


# ---- how a scenario begins


def run_with(open_store: OpenStore, last_step: int = 2, *more: Callable[[Store], object]) -> Files:
    """A run of the attempt FIRST with the committed steps 1 to `last_step`, and what is done after it."""
    server = LiveServer({"home": None, "remote": None} if open_store is FolderStore else {})
    with repeatable(99):
        store = open_store(server, "home")
        attempts.open_run(store, create=True)
        assert attempts.claim_as(store, FIRST, HOLDER)
        starting.start(store, FIRST, None, 0, WORLD, Catalogue.of(store))
        for step in range(1, last_step + 1):
            commit_all(store, at(step))
        for act in more:
            act(store)
    return server.files


def commit_all(store: Store, name: CommitName, nonce: str = "5f2c0a1b", frozen: str = "") -> None:
    """Both parts of a step, and its record. `frozen`: an instance that rank 0 names."""
    for rank in range(WORLD):
        write_part(store, rank, name, nonce=nonce, frozen=frozen if rank == 0 else "")
    assert commit(store, name.id) == ("committed", name)


def train_on(store: Store) -> AttemptName:
    """Another job: it starts, saves three steps, and deletes."""
    name = claim_and_start(store, living="none")
    last = max((each.step for each in Catalogue.of(store).visible()), default=0)
    for step in range(last + 1, last + 4):
        commit_all(store, at(step, name), nonce="88888888")
        _, done = collect.prune(store, name, KEEP)
        assert not done.errors
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
    catalogue = Catalogue.of(world.store())
    is_branched = catalogue.start is not None and catalogue.start.parent == BRANCHED.id
    seen = catalogue.commits if is_branched else catalogue.visible()
    for (name,) in found:
        newer = {each.step for each in seen if each.step > name.step}  # type: ignore[attr-defined]
        if name not in seen and len(newer) < 2:
            return f"step {name} was reported as committed, and visible are {list(map(str, seen))}"
    return ""


def half_steps(world: World) -> str:
    """2"""
    store, faults = world.store(), []
    catalogue = Catalogue.of(store)
    visible = [each for each in catalogue.visible() if is_whole(store, each)]
    for name in catalogue.commits:
        record = read_record(store, name)
        assert record is not None
        missing = missing_files(store, record)
        is_removed = set(missing) >= set(record.data_paths())
        newer = {each.step for each in visible if each.step > name.step}
        is_past = not catalogue.is_in_lineage(name.id) or len(newer) >= 2
        is_past = is_past and (bool(world.dead) or not world.is_final)
        if missing and not (is_removed and is_past):
            faults.append(f"the record of {name} names what is not there: {missing}")
    return "; ".join(faults)


def is_as_written(store: Store, name: CommitName) -> bool:
    """Whether every byte of a step is the one that was written."""
    record = read_record(store, name)
    if record is None:
        return False
    for row in record.parts:
        path = f"{name.id.data_folder}/{row.file}"
        for rank in Part.from_bytes(store.read(path, Part.MAX_BYTES), path).ranks:
            shard = store.read_bytes(f"{name.id.data_folder}/{rank.shard.file}", 0, rank.shard.num_bytes)
            if shard != image_at(rank.rank, name.step):
                return False
            if rank.constants is not None:
                file = rank.constants.shard.file
                image = frozen_contents(file)[0]
                if store.read_bytes(frozen_path(file), 0, len(image)) != image:
                    return False
    return True


def a_start_takes_a_whole_step(world: World) -> str:
    """3"""
    store = world.store()
    found = Catalogue.of(store).newest_first()
    whole = next((each for each in found if is_whole(store, each)), None)
    if whole is None:
        return "no step is left"
    return "" if is_as_written(store, whole) else f"{whole} is not whole"


def started_attempts_stay(world: World) -> str:
    """4"""
    store = world.store()
    started = [name for (name,) in reported(world, "started") if isinstance(name, AttemptName)]
    if not started:
        return ""
    newest, catalogue = max(started), Catalogue.of(store)
    found = catalogue.newest_started
    if found is not None and found > newest:
        return ""  # another has followed it
    if found != newest or not store.exists(claim_path(newest.number)):
        return f"{newest} has lost its records"
    parent = catalogue.needed_parent
    name = None if parent is None else catalogue.named(parent)
    if parent is None or (name in catalogue.commits and is_whole(store, name)):
        return ""
    return f"{newest} resumed from {parent}, which is gone"


def the_next_job_clears_up(world: World) -> str:
    """5 and 6"""
    if not world.is_final:
        return ""
    store = world.after(50, train_on).store()
    catalogue, wrong = Catalogue.of(store), []
    wrong += [f"a tombstone is left: {each}" for each in catalogue.tombstones]
    named = set[str]()
    for name in catalogue.commits:
        record = read_record(store, name)
        assert record is not None
        named |= {*record.data_paths(), *(frozen_path(each.file) for each in record.frozen)}
    for snapshot in snapshots_with_data(store):
        if has_all_parts(store, snapshot) and not catalogue.is_in_lineage(snapshot):
            named |= {f"{snapshot.data_folder}/{entry.name}" for entry in store.list(snapshot.data_folder)}
    there = _files(store)
    wrong += [f"no record names {path}" for path in sorted(there - named)]
    if len(catalogue.visible()) != KEEP.last:
        wrong.append(f"visible are {list(map(str, catalogue.visible()))}")
    return "; ".join(wrong)


def has_all_parts(store: Store, snapshot: SnapshotId) -> bool:
    """Whether both parts are there, with the shards that they name."""
    for rank in range(WORLD):
        path = f"{snapshot.data_folder}/{part_name(rank)}"
        if not store.exists(path):
            return False
        for each in Part.from_bytes(store.read(path, Part.MAX_BYTES), path).ranks:
            if not store.exists(f"{snapshot.data_folder}/{each.shard.file}"):
                return False
    return True


def keeps(snapshot: SnapshotId) -> Invariant:
    """8, in a scenario in which retention keeps it."""

    def judged(world: World) -> str:
        return "" if has_all_parts(world.store(), snapshot) else f"{snapshot} has lost files"

    return judged


def _files(store: Store) -> set[str]:
    """All files in data/ and frozen/. A temporary file in frozen/ stays until it is a day old."""
    names = (entry.name for entry in store.list(FROZEN_FOLDER))
    found = {f"{FROZEN_FOLDER}/{name}" for name in names if not name.startswith(".")}
    for attempt in store.list(DATA):
        for boundary in store.list(f"{DATA}/{attempt.name}"):
            folder = f"{DATA}/{attempt.name}/{boundary.name}"
            found |= {f"{folder}/{entry.name}" for entry in store.list(folder)}
    return found


def copies_are_whole(world: World) -> str:
    """7"""
    remote = world.store("remote")
    commits = Catalogue.of(remote).commits
    whole = [each for each in commits if is_whole(remote, each) and is_as_written(remote, each)]
    copied = [name for name, is_copied in reported(world, "copied") if is_copied]
    faults = []
    for name in {*commits, *copied} - set(whole):  # type: ignore[arg-type]
        newer = {each.step for each in whole if each.step > name.step}  # type: ignore[attr-defined]
        if len(newer) < 2:
            what = "was reported as copied" if name in copied else "has a record"
            faults.append(f"{name} {what} in the remote, which has {list(map(str, whole))}")
    return "; ".join(faults)


def with_remote(files: Files, open_store: OpenStore, steps: Sequence[int]) -> Files:
    """The same, once these steps of FIRST are copied to the remote."""
    server = LiveServer(files)
    with repeatable(98):
        for step in steps:
            copier(at(step))(open_store(server, "home"), open_store(server, "remote"))
    return server.files


def at_end(invariant: Invariant) -> Invariant:
    """The invariant for a state in which all actors have ended."""

    @functools.wraps(invariant)
    def judged(world: World) -> str:
        return invariant(world) if world.is_final else ""

    return judged


ALWAYS: Sequence[Invariant] = (
    committed_steps_stay,
    half_steps,
    a_start_takes_a_whole_step,
    started_attempts_stay,
    copies_are_whole,
)
ALL: Sequence[Invariant] = (*ALWAYS, the_next_job_clears_up)
