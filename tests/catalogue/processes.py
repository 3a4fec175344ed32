"""The processes of the search: keepers, leaders, jobs, readers, commands, copiers. Each is a generator that
uses the functions of flashckpt/catalogue/ and nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashckpt.catalogue import mirror as mirrors
from flashckpt.catalogue.changes import (
    Committed,
    Launch,
    ancestry,
    end,
    hopeless,
    is_visible,
    lineage_of,
    new_writer,
    newest,
    parent_of,
    quarantine,
    relate,
    visible,
)
from flashckpt.catalogue.home import Home
from flashckpt.catalogue.requests import Files, Put, Read, Steps
from flashckpt.errors import SupersededError, UnusableRunError
from flashckpt.format.catalogue import EMPTY, Catalogue, Checkpoint, Folder
from flashckpt.format.manifest import File, FrozenFile, Manifest, PartFile, PartHead, RankFiles, part_name
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.options import Keep
from tests.catalogue.model import Report

HOME, MIRROR = Home("home", keep_versions=2), Home("mirror", keep_versions=2)
ROTTEN = "rotten"
"""The content of a damaged file."""


def nonce(name: str) -> str:
    """The nonce of a process of this name."""
    return name.encode().hex().rjust(8, "0")[-8:]


def run_id(name: str) -> str:
    """The id of a run that a job of this name makes."""
    return nonce(name) * 2


def attempt(number: int, name: str) -> AttemptName:
    return AttemptName(number, nonce(name))


def write(
    writer: AttemptName,
    id: SnapshotId,
    name: str,
    node: int = 0,
    nodes: int = 1,
    frozen: str | FrozenFile = "",
) -> Steps[PartHead]:
    """A keeper of one rank: its files, then its part. `frozen`: a file that another snapshot has, or "new".

    A keeper that is alone writes no shard, and its part stands for one: less to explore.
    """
    folder, part = Folder(writer, id), part_name(node, nonce(name))
    shard = File(f"rank-{node}-{nonce(name)}" if nodes > 1 else part, 1)
    if nodes > 1:
        yield Put("home", f"{folder.path}/{shard.name}", "bytes")  # type: ignore[arg-type]
    if frozen == "new":
        frozen = FrozenFile(folder, f"frozen-{node}-{nonce(name)}", 1)
        yield Put("home", f"{folder.path}/{frozen.name}", "bytes")  # type: ignore[arg-type]
    files = RankFiles(node, shard, frozen if isinstance(frozen, FrozenFile) else None)
    head = PartHead(id=id, step=id.boundary, world=nodes, node=node, ranks=(files,))
    yield Put("home", f"{folder.path}/{part}", head)
    return head


def alone(folder: Folder, name: str, head: PartHead) -> Manifest:
    """The manifest of a snapshot of one rank."""
    part = PartFile(part_name(0, nonce(name)), 1, (0,))
    return Manifest(
        folder=folder,
        step=head.step,
        world=1,
        parts=(part,),
        shards=tuple(each for each in head.files if each.name != part.name),
        frozen=tuple(head.frozen),
    )


def start(
    name: str, memory: frozenset[SnapshotId] = frozenset(), mirror: Home | None = None
) -> Steps[Catalogue]:
    """The start of a job of this name."""
    return start_in(HOME, run_id(name), nonce(name), memory, mirror)


def start_in(
    home: Home,
    run_id: str,
    nonce: str,
    memory: frozenset[SnapshotId] = frozenset(),
    mirror: Home | None = None,
) -> Steps[Catalogue]:
    """The start of a job, as its rank 0 does it: it opens the run and takes a name, chooses from a later
    version, lets the ranks load, and begins last. `memory`: what nodes offer."""
    other = (yield from mirror.newest()) if mirror else EMPTY
    made = yield from home.make(other.run_id or run_id)
    opened, writers = yield from home.settle(made)
    above = max((each.attempt.number for each in memory), default=0)
    mine = new_writer(opened, nonce, writers, max(above, other.attempt.number)).name
    seen = yield from home.newest(opened)
    lead = relate(seen, other)
    chosen = yield from _chosen(seen, lead, memory, home, mirror, other)
    if chosen is None and (visible(seen) or visible(other)):
        raise UnusableRunError("no checkpoint is whole")
    lineage = ancestry(lead, chosen[0]) if chosen else ()
    is_here = chosen is not None and chosen[1]
    return (yield from home.begin(seen, mine, lineage, Launch(), after=opened.writer, is_here=is_here))


def _chosen(
    seen: Catalogue,
    lead: Catalogue,
    memory: frozenset[SnapshotId],
    home: Home,
    mirror: Home | None,
    other: Catalogue,
) -> Steps[tuple[SnapshotId, bool] | None]:
    """The newest snapshot of the leading history that memory offers, or that is whole in a store; and whether
    that is the home."""
    here, there = ({each.id: each for each in one.checkpoints} for one in (seen, other))
    for id in sorted(memory | here.keys() | there.keys(), reverse=True):
        if not is_visible(lead, id):
            continue
        if id in memory:
            return id, False
        if id in here and (yield from home.is_whole(here[id])):
            return id, True
        if mirror and id in there and (yield from mirror.is_whole(there[id])):
            return id, False
    return None


@dataclass(frozen=True)
class Leader:
    """A leader. `polls`: how often it looks for the parts of others; 0: it writes the only part."""

    name: str
    keep: int = 1
    polls: int = 0
    mirror: Home | None = None
    collects: bool = True
    trims: bool = False
    ends: bool = False

    def train(
        self, boundaries: tuple[int, ...] = (), memory: frozenset[SnapshotId] = frozenset()
    ) -> Steps[Catalogue]:
        """A job: start, save the parent if only memory has it, then its own snapshots."""
        catalogue = yield from start(self.name, memory, self.mirror)
        writer = catalogue.writer
        yield Report("started", ("home", writer))  # type: ignore[misc]
        yield from self._tidy(catalogue)
        for parent in memory & {*lineage_of(catalogue, writer)[:1]}:
            if boundaries and not catalogue.has(parent):
                catalogue = yield from self.save(catalogue, writer, parent)
        return (yield from self.lead(catalogue, writer, boundaries))

    def lead(
        self,
        catalogue: Catalogue,
        writer: AttemptName,
        boundaries: tuple[int, ...],
        frozen: tuple[str | FrozenFile, ...] = (),
    ) -> Steps[Catalogue]:
        """Save snapshots of this attempt. `catalogue` is the version that the leader knows."""
        for index, boundary in enumerate(boundaries):
            id, shared = SnapshotId(writer, boundary), frozen[index] if frozen else ""
            catalogue = yield from self.save(catalogue, writer, id, shared)
            if shared and not catalogue.has(id):
                frozen = ("new",) * len(frozen)  # the base is gone
        if self.ends:
            catalogue = yield from HOME.update(partial(end, writer=writer), catalogue)
        return catalogue

    def save(
        self,
        catalogue: Catalogue,
        writer: AttemptName,
        id: SnapshotId,
        frozen: str | FrozenFile = "",
    ) -> Steps[Catalogue]:
        name, folder = f"{self.name}{id.boundary}", Folder(writer, id)
        manifest: Manifest | Committed = Committed.WAITING
        for _ in range(self.polls):
            manifest = yield from HOME.gather(folder)
            if manifest is not Committed.WAITING:
                break
        if not self.polls:
            head = yield from _until_done(lambda: write(writer, id, name, frozen=frozen))
            manifest = alone(folder, name, head)
        if not isinstance(manifest, Manifest):
            return catalogue
        checkpoint = yield from _until_done(lambda: HOME.publish(catalogue, manifest))
        while True:
            keep = Keep(last=self.keep)
            try:
                catalogue = yield from HOME.commit(catalogue, writer, checkpoint, keep)
            except OSError:
                continue
            if catalogue.has(id):
                yield Report("committed", ("home", id))  # type: ignore[misc]
                break
            if hopeless(catalogue, checkpoint):
                yield Report("never", ("home", checkpoint))  # type: ignore[misc]
                break
        yield from self._tidy(catalogue)
        return catalogue

    def _tidy(self, catalogue: Catalogue) -> Steps[None]:
        if self.collects:
            yield from _until_done(lambda: HOME.collect(catalogue))
        if self.trims:
            yield from _until_done(lambda: HOME.trim(catalogue))


def _until_done(act: Any) -> Steps[Any]:
    """Try again after a request that failed."""
    while True:
        try:
            return (yield from act())
        except OSError:
            pass


def resume_half_written(name: str, memory: frozenset[SnapshotId], saves: bool) -> Steps[None]:
    """A job of two nodes that resumes from memory. A keeper writes no part that is in the folder already."""
    catalogue = yield from start(name, memory)
    writer, parent = catalogue.writer, parent_of(catalogue)
    yield Report("started", ("home", writer))  # type: ignore[misc]
    if not saves or parent is None:
        yield from HOME.collect(catalogue)
        return
    names = yield Files("home", Folder(writer, parent).path)
    for node in (0, 1):
        if not any(each.startswith(f"node-{node:05d}-") for each in names):
            yield from write(writer, parent, f"{name}n{node}", node, 2)
    yield from Leader(name, polls=1, collects=False).save(catalogue, writer, parent)


def read_all(home: Home = HOME) -> Steps[None]:
    """`flashckpt ls` and `load`."""
    catalogue = yield from home.newest()
    yield Report("saw", (home.store, catalogue))  # type: ignore[misc]
    for checkpoint in visible(catalogue):
        if not (yield from _is_read(home, checkpoint)):
            yield Report("missing", (home.store, checkpoint.id))  # type: ignore[misc]


def _is_read(home: Home, checkpoint: Checkpoint) -> Steps[bool]:
    manifest = yield Read(home.store, checkpoint.manifest_path, Manifest)
    for path in paths_of(manifest) if manifest else ():
        if (yield Read(home.store, path, object)) is None:  # type: ignore[arg-type]
            return False
    return manifest is not None


def paths_of(manifest: Manifest) -> Iterator[str]:
    """The paths of all files of a checkpoint, but for its manifest."""
    for folder, files in manifest.files().items():
        yield from (f"{folder.path}/{name}" for name in files)


def prune(keep: int = 0) -> Steps[None]:
    """`flashckpt prune`, or a collector alone if nothing is to be pruned."""
    catalogue = yield from HOME.newest()
    if keep:
        catalogue = yield from HOME.retain(catalogue, Keep(last=keep))
    yield from HOME.collect(catalogue)


def go_back(name: str, parent: SnapshotId) -> Steps[None]:
    catalogue = yield from HOME.branch(nonce(name), parent)
    yield Report("started", ("home", catalogue.writer))  # type: ignore[misc]


def recover(name: str, *expected: SnapshotId) -> Steps[None]:
    """`flashckpt recover`, which must find these snapshots, unless a job has committed newer ones."""
    last = newest((yield from HOME.rebuild(nonce(name))))
    for id in expected:
        if last is None or id > last.id:
            yield Report("committed", ("home", id))  # type: ignore[misc]


def verify(checkpoint: Checkpoint, path: str) -> Steps[None]:
    """`flashckpt verify`."""
    for _ in range(2):
        if (yield Read("home", path, object)) != ROTTEN:  # type: ignore[arg-type]
            return
    yield from HOME.update(partial(quarantine, checkpoint=checkpoint, why="two reads differ"))


def save_parent(name: str, parent: SnapshotId) -> Steps[None]:
    """A job that resumes a snapshot from memory, saves it, and dies."""
    catalogue = yield from start(name, frozenset({parent}))
    yield from Leader(name).save(catalogue, catalogue.writer, parent)


def copy_newest(name: str, keep: int = 1) -> Steps[None]:
    """Copy the newest checkpoint of the home, as long as there is a newer one. The package waits for more."""
    tried, source = None, (yield from HOME.newest())
    while (checkpoint := newest(source)) is not None and checkpoint.id != tried:
        tried = checkpoint.id
        try:
            target = yield from mirrors.copy_checkpoint(
                HOME, source, checkpoint, MIRROR, nonce(name), Keep(last=keep)
            )
        except SupersededError:
            target = None
        if target is not None and target.has(tried):
            yield Report("committed", ("mirror", tried))  # type: ignore[misc]
        source = yield from HOME.newest(source)
