"""Publish a part, commit a snapshot. Owns the order of these writes; see docs/commit.md.

Any process of the newest attempt may commit: of several that commit one snapshot at once each finds it
committed. Retention is part of the commit; what it drops is deleted by `collect`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from flashckpt import crashpoints
from flashckpt.catalogue import changes
from flashckpt.catalogue.changes import Committed, expired, hopeless, is_newer
from flashckpt.commit.steps import check_alike, heads_at_rest
from flashckpt.commit.view import HOME, View, ask
from flashckpt.errors import RunError, SupersededError
from flashckpt.format.catalogue import EMPTY, Catalogue, Folder
from flashckpt.format.manifest import File, Manifest, PartHead, part_name
from flashckpt.format.names import CommitName, SnapshotId
from flashckpt.format.records import Part
from flashckpt.options import Keep
from flashckpt.store.base import Store, write_once
from flashckpt.threads import results

KEEP_ALL = Keep(last=10**9)
"""The retention of a process that deletes no checkpoint."""
ALWAYS_KEPT = 2
"""How many whole checkpoints are never deleted, so that a damaged newest one has an alternative."""

_AT_ONCE = 32
"""Concurrent reads, where each may take a round trip."""


@dataclass(frozen=True)
class Outcome:
    """True only if the snapshot is committed and every later start finds it. `view`: the newest one.
    `dropped`: the checkpoints that retention dropped with this commit; None if it is still due, since another
    keeper has committed the snapshot, or a checkpoint is not whole."""

    state: Committed
    view: View
    dropped: tuple[CommitName, ...] | None = ()

    def __bool__(self) -> bool:
        return self.state is Committed.YES


def folder_of(view: View, id: SnapshotId) -> Folder:
    """The folder that the newest attempt writes a snapshot into. SupersededError if it can never be
    committed: it is of an older attempt, and not the one that the newest attempt has resumed. RunError if the
    view does not know its attempt yet."""
    catalogue = view.catalogue
    if id.attempt > catalogue.attempt:
        raise RunError(
            f"{view.store.url} does not know attempt {id.attempt}: its listing is old, or an older copy of "
            "the run is in its place. Nothing was committed.",
            path=view.store.url,
        )
    if id not in (view.parent, SnapshotId(catalogue.attempt, id.boundary)):
        raise SupersededError(
            f"attempt {catalogue.attempt} has taken over before boundary {id.boundary} of attempt "
            f"{id.attempt} was committed, and resumed without it: no resume finds it. Committed steps are "
            "untouched. End this process.",
            path=view.store.url,
        )
    return Folder(catalogue.writer, id)


def is_overtaken(view: View, id: SnapshotId) -> bool:
    """Whether a newer snapshot of the newest attempt is committed, and so this one never will be."""
    return not view.catalogue.has(id) and not is_newer(view.catalogue, id)


def publish_part(store: Store, folder: Folder, part: Part, nonce: str) -> File:
    """Create a part, whose shards are written. `nonce`: of this process and file."""
    data, name = part.to_bytes(), part_name(part.node, nonce)
    crashpoints.point("part.checked")
    write_once(store, f"{folder.path}/{name}", data)
    crashpoints.point("part.linked")
    return File(name, len(data))


def commit(
    view: View,
    folder: Folder,
    keep: Keep,
    *,
    known: dict[str, PartHead] | None = None,
    in_use: frozenset[SnapshotId] = frozenset(),
    is_of_many: bool = False,
    guard: Callable[[], None] = lambda: None,
) -> Outcome:
    """Commit a snapshot once its parts cover every rank. `folder`: of the newest attempt. `keep`: what
    retention keeps; it drops the rest in the same version. `known`: the heads of parts that an earlier call
    has read, by name. `in_use`: checkpoints that retention spares. `is_of_many`: of many nodes; their parts
    are read at once. `guard`: raises if this process may not commit any more; called before the version is
    created, and again before the commit is reported.

    SupersededError if a newer attempt has begun; DivergedError if replicas differ; DamagedError if parts are
    of different steps or worlds.
    """
    store = view.store
    heads = {} if known is None else known
    if is_of_many:
        _read_heads(store, folder, heads)
    manifest = ask(store, HOME.gather(folder, heads))
    if manifest is Committed.DIVERGED:
        check_alike(store, folder.path, heads_at_rest(store, folder))
        manifest = Committed.WAITING  # a part has changed meanwhile
    if isinstance(manifest, Committed):
        return Outcome(manifest, view)
    guard()
    crashpoints.point("manifest.checked")
    checkpoint = ask(store, HOME.publish(view.catalogue, manifest))
    crashpoints.point("manifest.written")
    found = view.after(HOME.commit(view.catalogue, folder.writer, checkpoint, kept(keep), in_use))
    crashpoints.point("version.created")
    guard()
    after = found.catalogue
    if not after.has(checkpoint.id):
        return Outcome(hopeless(after, checkpoint) or Committed.OVERTAKEN, found)
    dropped = tuple(sorted(set(view.checkpoints).difference(found.checkpoints)))
    ids = frozenset(each.id for each in after.checkpoints)
    is_due = not dropped and bool(expired(after, kept(keep), ids, in_use))
    return Outcome(Committed.YES, found, None if is_due else dropped)


def _read_heads(store: Store, folder: Folder, heads: dict[str, PartHead]) -> None:
    """Read the heads of parts that are not known yet. Those that cannot be read are read again by `gather`,
    which says why."""
    names = {each.name: each.num_bytes for each in store.list(folder.path)}

    def read(name: str) -> None:
        with suppress(OSError):
            ask(store, HOME.heads(folder, {name: names[name]}, heads))

    for _ in results("heads", (partial(read, name) for name in names.keys() - heads.keys()), _AT_ONCE):
        pass


def found_run(store: Store, folder: Folder, run_id: str) -> View:
    """Make a run of one snapshot, whose parts are all there. UnusableRunError if there is a run."""
    manifest = ask(store, HOME.gather(folder))
    assert isinstance(manifest, Manifest), manifest
    return View(ask(store, HOME.found(manifest, run_id)), store)


def kept(keep: Keep) -> Keep:
    """The retention that a user asks for, with the fewest checkpoints that stay."""
    return replace(keep, last=max(keep.last, ALWAYS_KEPT))


def retain(
    view: View, keep: Keep, in_use: frozenset[SnapshotId] = frozenset()
) -> tuple[View, tuple[CommitName, ...]]:
    """Drop the checkpoints that retention does not keep. Returns the newest view, and those that are gone."""
    found = view.after(HOME.retain(view.catalogue, kept(keep), in_use))
    return found, tuple(sorted(set(view.checkpoints).difference(found.checkpoints)))


def retained(view: View, keep: Keep) -> View:
    """The view that `retain` would return now. Changes nothing."""
    rule = kept(keep)
    whole = ask(view.store, HOME.whole(view.catalogue, rule.last))
    return View(changes.retain(view.catalogue, keep=rule, whole=whole), view.store)


def collect(store: Store, catalogue: Catalogue, before: Catalogue = EMPTY, *, trims: bool = True) -> None:
    """Delete what no version of this run can name any more, by one that was the newest just now; and, if
    `trims`, old versions. `before`: as of `Home.collect`. Any process may do it at any time. OSError or
    DamagedError, after the rest was deleted."""
    crashpoints.point("prune.begun")
    try:
        ask(store, HOME.collect(catalogue, before))
        crashpoints.point("prune.done")
    finally:
        if trims:
            ask(store, HOME.trim(catalogue))
