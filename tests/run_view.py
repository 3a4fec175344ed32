"""What tests see of a run on storage, and how they make one. Black-box tests import this module, and nothing
of flashckpt/commit/: only this module knows how a run is stored.

An id is a SnapshotId; a checkpoint is named by step and id (`CommitName`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from flashckpt.catalogue.changes import Launch, ancestry, is_newer
from flashckpt.catalogue.home import checkpoint_of
from flashckpt.catalogue.requests import Stores
from flashckpt.commit import assets as _assets
from flashckpt.commit import attempts as _attempts
from flashckpt.commit import commit_step, lineage
from flashckpt.commit import verification as _verification
from flashckpt.commit.attempts import local_owner
from flashckpt.commit.steps import StepRecord, read_step
from flashckpt.commit.view import HOME, View, folders_in, open_run, writers_in
from flashckpt.format.catalogue import CATALOGUE, Catalogue, Folder
from flashckpt.format.manifest import Manifest
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.format.owner import Owner
from flashckpt.format.records import Part
from flashckpt.options import Keep
from flashckpt.store.base import Store

Record = StepRecord
Report = _verification.Report
# As the package has them, with their docstrings.
assets = _assets.read_assets
read = read_step
steps = lineage.steps
this_host = lineage.this_host
verify = _verification.verify

# ---- what is there


def visible(store: Store) -> tuple[CommitName, ...]:
    """The checkpoints in the history of the newest attempt, oldest first."""
    return View.of(store).visible()


def checkpoints(store: Store) -> tuple[CommitName, ...]:
    """All checkpoints, of any branch, oldest first."""
    return View.of(store).checkpoints


def damaged(store: Store) -> list[CommitName]:
    """The checkpoints that failed two verifications, oldest first."""
    view = View.of(store)
    return [each for each in view.checkpoints if each.id in view.damaged]


def resumed(store: Store) -> CommitName:
    """The checkpoint that a start would resume."""
    return lineage.next_start(View.of(store)).candidates[0].name


def attempts(store: Store) -> list[AttemptName]:
    """The attempts that are known, oldest first: those of the catalogue, and those with files."""
    return sorted({*View.of(store).attempts(), *writers_in(store)})


def newest_attempt(store: Store) -> AttemptName | None:
    """The newest attempt that has begun."""
    return View.of(store).attempt


def parent_of(store: Store, attempt: AttemptName) -> SnapshotId | None:
    """The snapshot that an attempt has resumed, None for a fresh run. AssertionError if it has not begun."""
    return start_of(store, attempt)[0]


def has_ended(store: Store, attempt: AttemptName) -> bool:
    """Whether an attempt has ended in order."""
    return ending(store, attempt) == "closed"


def start_of(store: Store, attempt: AttemptName) -> tuple[SnapshotId | None, int, int]:
    """Where the newest attempt began: the snapshot that it has resumed (None: afresh), its step number, its
    ranks. AssertionError if another one is the newest."""
    view = View.of(store)
    assert view.attempt == attempt, f"{attempt} has not begun, or is not the newest"
    return view.parent, view.catalogue.parent_step, view.catalogue.world


def ending(store: Store, attempt: AttemptName) -> str:
    """How an attempt has ended, "closed" or "dead"; empty if no end is recorded."""
    return _attempts.ending(View.of(store), attempt)


def endings(store: Store) -> dict[AttemptName, str]:
    """How each attempt has ended, oldest first: "closed", "dead", or empty where nothing is recorded."""
    return {each: ending(store, each) for each in attempts(store)}


def signs_of_life(store: Store, attempt: AttemptName) -> int | None:
    """How many signs of life an attempt has given, None if that cannot be read."""
    alive = _attempts.alive(store, attempt)
    return None if alive is None else alive.count


def folder_of(store: Store, id: SnapshotId) -> str:
    """The folder of a checkpoint, or of a snapshot that the newest attempt writes."""
    view = View.of(store)
    checkpoint = view.checkpoint(id)
    return (Folder(view.catalogue.writer, id) if checkpoint is None else checkpoint.folder).path


def manifest_of(store: Store, id: SnapshotId) -> str:
    """The path of the manifest of a checkpoint."""
    checkpoint = View.of(store).checkpoint(id)
    assert checkpoint is not None, f"{id} is not committed"
    return checkpoint.manifest_path


def snapshots(store: Store) -> list[SnapshotId]:
    """The snapshots that have files, committed or not, oldest first."""
    return sorted(each.id for each in folders_in(store) if store.list(each.path))


def committed_next(store: Store) -> list[CommitName]:
    """The snapshots with all their files that the next start commits."""
    view, stores, found = View.of(store), Stores({HOME.store: store}), []
    for folder in folders_in(store):
        if folder.writer == view.catalogue.writer and is_newer(view.catalogue, folder.id):
            manifest = stores.run(HOME.gather(folder))
            if isinstance(manifest, Manifest):
                found.append(CommitName(manifest.step, folder.id.attempt, folder.id.boundary))
    return found


def files(store: Store) -> list[tuple[str, str, int]]:
    """The versions and data files of the run with their sizes, to see whether anything came or went."""
    folders = [CATALOGUE, *(each.path for each in folders_in(store))]
    return [
        (folder, entry.name, entry.num_bytes) for folder in sorted(folders) for entry in store.list(folder)
    ]


# ---- how it comes there


def make(store: Store) -> None:
    """Make a run without an attempt."""
    open_run(store, create=True)


def run_id(store: Store) -> str:
    return open_run(store, create=False).run_id


def begin(
    store: Store,
    parent: SnapshotId | None = None,
    step: int = 0,
    *,
    world: int = 1,
    owner: Owner | None = None,
) -> AttemptName:
    """Begin an attempt that resumes `parent`, which has this step number. Does not look for a living job."""
    name = next_name(store)
    _attempts.reserve(store, name)
    begin_as(View.of(store), name, parent, step, world=world, owner=owner or local_owner())
    return name


def next_name(store: Store, above: int = 0) -> AttemptName:
    """The name that a start takes, once it has committed whole snapshots."""
    return _attempts.next_attempt(max(above, _attempts.settle(View.of(store))[1]))


def begin_as(
    seen: View,
    name: AttemptName,
    parent: SnapshotId | None = None,
    step: int = 0,
    *,
    world: int = 1,
    owner: Owner | None = None,
    lead: Catalogue | None = None,
) -> View:
    """Begin an attempt of this name. `seen`: the view that its parent was chosen from; `lead`: the catalogue
    that has its history, if that is not this view's."""
    lineage = () if parent is None else ancestry(lead or seen.catalogue, parent)
    launch = Launch(world=world, owner=owner, parent_step=step)
    return seen.after(HOME.begin(seen.catalogue, name, lineage, launch, after=seen.catalogue.writer))


def end(store: Store, attempt: AttemptName, how: Literal["closed", "dead"] = "closed") -> None:
    """Record that an attempt has ended."""
    _attempts.mark_ended(store, attempt, how)


def supersede(store: Store) -> AttemptName:
    """Take the run over, as a start of another job does, at the newest checkpoint."""
    newest = View.of(store).newest_first()[:1]
    return begin(store, newest[0].id if newest else None, newest[0].step if newest else 0)


def publish(store: Store, part: Part) -> None:
    """Write a part whose shards are written."""
    commit_step.publish_part(store, folder_for(store, part.id), part, secrets.token_hex(6))


def folder_for(store: Store, id: SnapshotId) -> Folder:
    """The folder that the newest attempt writes a snapshot into."""
    return Folder(View.of(store).catalogue.writer, id)


def commit(store: Store, id: SnapshotId, keep: Keep = commit_step.KEEP_ALL) -> None:
    """Commit a snapshot whose parts are published."""
    assert commit_step.commit(View.of(store), folder_for(store, id), keep)


def mark_damaged(store: Store, name: CommitName, host: str = "", why: str = "its bytes differ") -> None:
    """Record that a verification of a checkpoint failed on a host, this one unless another is named."""
    lineage.quarantine(store, name, host or lineage.this_host(), why)


def relist(store: Store, manifest: Manifest) -> None:
    """Give a checkpoint another manifest."""
    catalogue, checkpoint = View.of(store).catalogue, checkpoint_of(manifest)
    store.replace(checkpoint.manifest_path, manifest.to_bytes())
    listed = tuple(checkpoint if each.id == checkpoint.id else each for each in catalogue.checkpoints)
    store.replace(catalogue.path, replace(catalogue, checkpoints=listed).to_bytes())


def delete(store: Store, name: CommitName) -> None:
    """Delete a checkpoint: its entry in the catalogue, and its files."""

    def change(catalogue: Catalogue) -> Catalogue:  # as retention does; `remove` would spare the newest
        if not catalogue.has(name.id):
            return catalogue
        rest = tuple(each for each in catalogue.checkpoints if each.id != name.id)
        damaged = tuple(each for each in catalogue.damaged if each[0] != name.id)
        return replace(catalogue, checkpoints=rest, damaged=damaged, version=catalogue.version + 1)

    Stores({HOME.store: store}).run(HOME.update(change))
    commit_step.collect(store, View.of(store).catalogue)


def keep_assets(store: Store, files: Mapping[str, bytes]) -> None:
    """Give a run that has no assets these."""
    assert _assets.write_assets(store, files)


def watch_for(seconds: float, put: Callable[[object, str, object], None] = setattr) -> None:
    """How long this process watches an attempt on another node before it takes the run over. `put`: sets it,
    a monkeypatch's `setattr` for one test."""
    put(_attempts, "WATCH_S", seconds)
