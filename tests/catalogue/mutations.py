"""Mutations of the protocol: without each of its rules the search finds an invariant that is violated."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from flashckpt.catalogue import changes, home, mirror
from flashckpt.catalogue.changes import NewWriter, Spared
from flashckpt.catalogue.home import Home
from flashckpt.catalogue.requests import Create, Delete, Files, Read, Steps
from flashckpt.errors import RunHeldError, SupersededError, UnusableRunError
from flashckpt.format.catalogue import EMPTY, Catalogue, Checkpoint, Folder, version_path
from flashckpt.format.manifest import Manifest, PartHead
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.options import Keep
from tests.catalogue import invariants, processes
from tests.catalogue.explorer import Found
from tests.catalogue.model import NFS, PLAIN, POSIX, S3, Overwrite, Store
from tests.catalogue.scenarios import MOST_STATES, SCENARIOS

Change = Callable[[Catalogue], Catalogue]


class Mutation:
    """`violates`: the invariant, as its fault begins. `patches`: (where, name, instead)."""

    def __init__(
        self,
        name: str,
        violates: str,
        scenario: str,
        store: Store,
        *patches: tuple[Any, str, Any],
        most_states: int = MOST_STATES,
    ) -> None:
        self.name, self.violates, self.scenario, self._store = name, violates, scenario, store
        self._patches, self._most_states = patches, most_states

    def explore(self) -> Found:
        with ExitStack() as stack:
            for where, name, instead in self._patches:
                stack.enter_context(mock.patch.object(where, name, instead))
            return SCENARIOS[self.scenario].search(self._store, self._most_states).run()


# ---- versions


Number = tuple[int, str]


def newest_read_once(self: Home, known: Catalogue = EMPTY, at_least: Number = (0, "")) -> Steps[Catalogue]:
    """One listing and one read."""
    while True:
        number, run_id = at_least if at_least[0] else (yield from self._newest_number(known))
        if number <= known.version:
            return known
        at_least, found = (0, ""), (yield Read(self.store, version_path(number, run_id), Catalogue))
        if found is not None:
            return found  # type: ignore[no-any-return]


def _create(self: Home, wanted: Catalogue) -> Steps[bool | None]:
    """Whether a version was created. None: the request failed."""
    try:
        return bool((yield Create(self.store, wanted.path, wanted)))
    except OSError:
        return None


def update_unchecked(self: Home, change: Change, known: Catalogue = EMPTY) -> Steps[Catalogue]:
    """What was created counts."""
    catalogue = yield from self.newest(known)
    while (wanted := change(catalogue)) is not catalogue:
        if (yield from _create(self, wanted)):
            return wanted
        catalogue = yield from self.newest(catalogue)
    return catalogue


def update_by_chain(self: Home, change: Change, known: Catalogue = EMPTY) -> Steps[Catalogue]:
    """What was created counts if it is the newest, or if the version after it was made from it."""
    catalogue = yield from newest_read_once(self, known)
    while (wanted := change(catalogue)) is not catalogue:
        created = yield from _create(self, wanted)
        number, _ = yield from self._newest_number(catalogue)
        if created and number == wanted.version:
            return wanted
        if created:
            following = version_path(wanted.version + 1, wanted.run_id)
            after = yield Read(self.store, following, Catalogue)
            if after is not None and change(after) is after:
                return wanted
        catalogue = yield from newest_read_once(self, catalogue)
    return catalogue


def update_failed_is_done(self: Home, change: Change, known: Catalogue = EMPTY) -> Steps[Catalogue]:
    """A creation that failed counts if its number exists afterwards."""
    catalogue = yield from self.newest(known)
    while (wanted := change(catalogue)) is not catalogue:
        created = yield from _create(self, wanted)
        newest = yield from self._newest_number(catalogue)
        if created is not False and newest[0] == wanted.version:
            return wanted
        catalogue = yield from self.newest(catalogue, newest)
    return catalogue


def update_believes_listings(self: Home, change: Change, known: Catalogue = EMPTY) -> Steps[Catalogue]:
    """A number that is taken is looked for in a listing alone."""
    catalogue = yield from self.newest(known)
    while (wanted := change(catalogue)) is not catalogue:
        created = yield from _create(self, wanted)
        newest = max((catalogue.version, catalogue.run_id), (yield from self._newest_number(catalogue)))
        if created and newest[0] == wanted.version:
            return wanted
        catalogue = yield from self.newest(catalogue, newest)
    return catalogue


def update_overwrites(self: Home, change: Change, known: Catalogue = EMPTY) -> Steps[Catalogue]:
    """A version is written as any other file."""
    catalogue = yield from self.newest(known)
    wanted = change(catalogue)
    if wanted is not catalogue:
        yield Overwrite(self.store, wanted.path, wanted)
    return wanted


def update_deletes_first(self: Home, change: Change, known: Catalogue = EMPTY) -> Steps[Catalogue]:
    """Files are deleted before the version that does not name them."""
    catalogue = yield from self.newest(known)
    wanted = change(catalogue)
    if wanted.checkpoints != catalogue.checkpoints:
        yield from self.collect(wanted)
    return (yield from _update(self, change, catalogue))


_update = Home.update


# ---- changes


def commit_for_all(
    catalogue: Catalogue, *, writer: AttemptName, checkpoint: Checkpoint, **_: Any
) -> Catalogue:
    """Any process commits."""
    if catalogue.has(checkpoint.id) or not changes.is_newer(catalogue, checkpoint.id):
        return catalogue
    return changes._next(changes._with(catalogue, checkpoint))


def begin_on_whatever(catalogue: Catalogue, *, new: NewWriter, **found: Any) -> Catalogue:
    """A start is not bound to the version for which it chose."""
    if catalogue.writer == new.name:
        return catalogue
    return changes.begin(catalogue, new=replace(new, seen=catalogue.version), **found)


def begin_without_foreign(catalogue: Catalogue, *, new: NewWriter, **found: Any) -> Catalogue:
    return changes.begin(catalogue, new=replace(new, foreign=frozenset()), **found)


def new_writer_unlisted(catalogue: Catalogue, nonce: str, _: Any, above: int = 0) -> NewWriter:
    """The number after that of the writer, and no look at data/."""
    return changes.new_writer(catalogue, nonce, (), above)


def branch_at_once(self: Home, nonce: str, parent: SnapshotId) -> Steps[Catalogue]:
    """Whole snapshots of the writer before are left behind."""
    catalogue = yield from self.newest()
    new = changes.new_writer(catalogue, nonce, (yield from self._writers_with_files(catalogue)))
    return (yield from self.update(partial(changes.branch, new=new, parent=parent), catalogue))


def again_above(_: Catalogue, made: Catalogue) -> Catalogue:
    """A new writer does not give way to another one."""
    return made


def relate_by_attempts(one: Catalogue, other: Catalogue) -> Catalogue:
    """A store leads if it knows the current attempt of the other."""
    for each, behind in ((one, other), (other, one)):
        known = {EMPTY.attempt, each.attempt, *(attempt for attempt, _ in each.lineages)}
        known |= {ancestor.attempt for _, lineage in each.lineages for ancestor in lineage}
        if behind.attempt in known:
            return each
    raise UnusableRunError("diverged")


def relate_spliced(one: Catalogue, other: Catalogue) -> Catalogue:
    """The lineage of the current attempt keeps only its parent and ancestors with checkpoints."""
    with mock.patch.object(changes, "LINEAGE_KEPT", 1):
        short = [changes._without(each, set()) for each in (one, other)]
    return (one, other)[short.index(_relate(*short))]


def home_leads(one: Catalogue, other: Catalogue) -> Catalogue:
    """A full mirror is no reason not to begin a new run."""
    return one


def commit_by_list(self: Home, catalogue: Catalogue, *rest: Any) -> Steps[Catalogue]:
    """The version in hand decides what retention drops."""
    writer, checkpoint, keep, *_ = rest
    whole = (yield from self.whole(catalogue, keep.last)) | {checkpoint.id}
    kept = sorted(whole)[-keep.last :]
    dropped = {each.id for each in catalogue.checkpoints if len(kept) == keep.last and each.id < kept[0]}

    def change(found: Catalogue) -> Catalogue:
        made = changes.commit(found, writer=writer, checkpoint=checkpoint, keep=keep, whole=frozenset())
        return found if made is found else changes._without(made, dropped)

    return (yield from self.update(change, catalogue))


def all_are_whole(self: Home, catalogue: Catalogue, *_: Any) -> Steps[frozenset[SnapshotId]]:
    return frozenset(each.id for each in catalogue.checkpoints if each.id not in catalogue.damaged_ids)
    yield


def expired_counting_damaged(catalogue: Catalogue, *rest: Any) -> set[SnapshotId]:
    return _expired(replace(catalogue, damaged=()), *rest)


def whole_with_damaged(self: Home, catalogue: Catalogue, *rest: Any) -> Steps[frozenset[SnapshotId]]:
    return (yield from _whole(self, replace(catalogue, damaged=()), *rest))


def choose_undamaged(seen: Catalogue, *rest: Any) -> Steps[Any]:
    good = tuple(each for each in seen.checkpoints if each.id not in seen.damaged_ids)
    return (yield from _chosen(replace(seen, checkpoints=good), *rest))


def rebuild_committable(
    self: Home, catalogue: Catalogue, writers: Iterable[AttemptName]
) -> Steps[dict[Checkpoint, Manifest]]:
    """Only what a commit could name."""
    found = yield from _whole_checkpoints(self, catalogue, writers)
    can = (each for each in found if catalogue.has(each.id) or changes.is_committable(catalogue, each))
    return {each: found[each] for each in can}


def rebuild_all(
    self: Home, catalogue: Catalogue, writers: frozenset[AttemptName]
) -> Steps[dict[Checkpoint, Manifest]]:
    """All that is whole, garbage or not."""
    return (yield from _whole_checkpoints(self, replace(catalogue, foreign=writers), writers))


def hopeless_if_overtaken(catalogue: Catalogue, checkpoint: Checkpoint) -> Any:
    """A base that is gone is no reason."""
    return changes.hopeless(catalogue, replace(checkpoint, bases=frozenset()))


def adopt_newest(catalogue: Catalogue, found: tuple[Checkpoint, ...]) -> Catalogue:
    return changes.adopt(catalogue, found[-1:])


def is_committable_again(catalogue: Catalogue, checkpoint: Checkpoint) -> bool:
    """In any order."""
    return checkpoint.writer == catalogue.writer and not catalogue.has(checkpoint.id)


def is_committable_with_any_base(catalogue: Catalogue, checkpoint: Checkpoint) -> bool:
    return _is_committable(catalogue, replace(checkpoint, bases=frozenset()))


def is_committable_of_any_writer(catalogue: Catalogue, checkpoint: Checkpoint) -> bool:
    """A whole snapshot of an older attempt is adopted if it is newer than the checkpoints of that attempt."""
    had = [each.id for each in catalogue.checkpoints if each.id.attempt == checkpoint.id.attempt]
    return all(checkpoint.id > each for each in had)


def whole_snapshots_of_all(self: Home, catalogue: Catalogue) -> Steps[tuple[Checkpoint, ...]]:
    found: list[Checkpoint] = []
    for writer in sorted((yield from self.writers())):
        for folder in (yield from self._folders(writer)):
            manifest = yield from self.gather(folder)
            if not isinstance(manifest, Manifest):
                continue
            if is_committable_of_any_writer(catalogue, home.checkpoint_of(manifest)):
                found.append((yield from self.publish(catalogue, manifest)))
    return tuple(found)


class SnapshotFolder(Folder):
    """The folder of a snapshot is that of the attempt that captured it."""

    @property
    def path(self) -> str:
        return f"data/{self.id.attempt}/{self.name}"


_is_committable, _relate, _expired = changes.is_committable, changes.relate, changes.expired
_chosen, _whole_checkpoints, _whole = processes._chosen, Home._whole_checkpoints, Home.whole


# ---- deletion


def spared_but(ignores: str) -> Callable[[Catalogue, Iterable[Folder]], dict[Folder, Spared]]:
    """Ignore one of the reasons to spare a folder."""

    def spared(catalogue: Catalogue, folders: Iterable[Folder]) -> dict[Folder, Spared]:
        kept, found = {each.folder for each in catalogue.checkpoints}, {}
        for folder in folders:
            reasons = {
                "checkpoint": folder in kept,
                "pending": changes._is_pending(catalogue, folder),
                "newer": not changes.is_known(catalogue, folder.writer),
            }
            is_base = folder in changes.bases(catalogue) and ignores != "base"
            is_all = any(holds for reason, holds in reasons.items() if reason != ignores)
            found[folder] = Spared.ALL if is_all else Spared.FROZEN if is_base else Spared.NOTHING
        return found

    return spared


def spared_by_snapshot(catalogue: Catalogue, folders: Iterable[Folder]) -> dict[Folder, Spared]:
    """For folders by snapshot: those of earlier attempts are garbage, but for the parent's."""
    kept, found = {each.id for each in catalogue.checkpoints}, {}
    for folder in folders:
        is_current = folder.id.attempt == catalogue.attempt or folder.id == changes.parent_of(catalogue)
        is_pending = is_current and changes.is_newer(catalogue, folder.id)
        is_kept = folder.id in kept or is_pending or folder.id.attempt > catalogue.writer
        found[folder] = Spared.ALL if is_kept else Spared.NOTHING
    return found


def all_known(catalogue: Catalogue, writer: AttemptName) -> bool:
    return True


def collect_but_manifests(self: Home, catalogue: Catalogue) -> Steps[None]:
    """A folder with a manifest of a snapshot that was never a checkpoint stays."""
    for writer in sorted((yield from self.writers())):
        folders = yield from self._folders(writer)
        for folder, kept in changes.spared(catalogue, folders).items():
            names = yield Files(self.store, folder.path)
            has_manifest = any(name.startswith("manifest-") for name in names)
            if kept is not Spared.ALL and not (has_manifest and not changes.is_visible(catalogue, folder.id)):
                yield Delete(self.store, folder.path, tuple(sorted(names)))


def collect_unnamed(self: Home, catalogue: Catalogue) -> Steps[None]:
    """In the folders of checkpoints, all that no manifest names goes too."""
    yield from _collect(self, catalogue)
    named: dict[Folder, set[str]] = {}
    for checkpoint in catalogue.checkpoints:
        manifest = yield Read(self.store, checkpoint.manifest_path, Manifest)
        if manifest is None:
            return
        named.setdefault(checkpoint.folder, set()).add(checkpoint.manifest_path.rpartition("/")[2])
        for folder, files in manifest.files().items():
            named.setdefault(folder, set()).update(files)
    for folder in sorted({each.folder for each in catalogue.checkpoints}):
        names = yield Files(self.store, folder.path)
        yield Delete(self.store, folder.path, tuple(sorted(names.keys() - named[folder])))


_collect = Home.collect


# ---- processes


def exact_cover_without_sizes(heads: Any, names: Mapping[str, int]) -> Any:
    """What a part names is believed."""
    heads = list(heads)
    return _exact_cover(heads, {each.name: 1 for _, head in heads for each in head.files})


def believed(self: Home, folder: Folder, files: Mapping[str, int]) -> Steps[list[str]]:
    return []
    yield


def write_clearing(
    writer: AttemptName, id: SnapshotId, name: str, node: int = 0, nodes: int = 1, **rest: Any
) -> Steps[PartHead]:
    """A keeper clears unnamed files of its ranks, as it sees them, before it writes them again."""
    folder = Folder(writer, id)
    names = yield Files("home", folder.path)
    catalogue = yield from processes.HOME.newest()
    if not catalogue.has(id):
        mine = [each for each in names if each.startswith((f"rank-{node}-", f"node-{node:05d}-"))]
        yield Delete("home", folder.path, tuple(sorted(mine)))
    return (yield from _write(writer, id, name, node, nodes, **rest))


def lead_by_catalogue(
    self: Any,
    catalogue: Catalogue,
    writer: AttemptName,
    boundaries: tuple[int, ...],
    frozen: tuple[str, ...] = (),
) -> Steps[Catalogue]:
    """A leader takes its name from the version that it knows."""
    for boundary in boundaries:
        writer = catalogue.writer
        catalogue = yield from self.save(catalogue, writer, SnapshotId(writer, boundary))
    return catalogue


def start_again(*arguments: Any) -> Steps[Catalogue]:
    """A start that finds another one ahead begins again, above it."""
    while True:
        try:
            return (yield from _start(*arguments))
        except RunHeldError:
            pass


def copy_again(name: str, keep: int = 1) -> Steps[None]:
    """A copier that was superseded tries again with the same checkpoint."""
    source = yield from processes.HOME.newest()
    while True:
        try:
            yield from mirror.copy_checkpoint(
                processes.HOME,
                source,
                source.checkpoints[-1],
                processes.MIRROR,
                processes.nonce(name),
                Keep(last=keep),
            )
            return
        except SupersededError:
            pass


def copy_all_files(*_: Any) -> Steps[dict[str, Any]]:
    """Frozen files too, with each checkpoint."""
    return {}
    yield


_exact_cover, _start, _write = home._exact_cover, processes.start, processes.write


def in_both(name: str, instead: Any) -> tuple[tuple[Any, str, Any], ...]:
    return (changes, name, instead), (home, name, instead)


def in_start(name: str, instead: Any) -> tuple[tuple[Any, str, Any], ...]:
    return (changes, name, instead), (processes, name, instead)


ALL_OWN = (invariants.Invariants, "is_own", lambda *_: True)
ALL_MAY_GO = (invariants.Invariants, "_judge_deletion", lambda *_: "")

MUTATIONS = [
    # versions
    Mutation("no look at the newest version after a creation", "I3", "sleeping leader", POSIX,
        (Home, "update", update_unchecked)),
    Mutation("a version is read without listing again", "I2", "sleeping leader and reader", POSIX,
        (Home, "newest", newest_read_once)),
    Mutation("the same, with a start and a collector", "I4", "sleeping start and collector", POSIX,
        (Home, "newest", newest_read_once)),
    Mutation("a version counts if the next one was made from it", "I3", "two sleepers", PLAIN,
        (Home, "update", update_by_chain), (Home, "newest", newest_read_once)),
    Mutation("a creation that failed counts if its number exists", "I3", "deposed leader", S3,
        (Home, "update", update_failed_is_done)),
    Mutation("a number that is taken is looked for in listings alone", "I7", "deposed leader", NFS,
        (Home, "update", update_believes_listings)),
    Mutation("a version is written as any other file", "I1", "first start", S3,
        (Home, "update", update_overwrites)),
    # who commits what
    Mutation("any process commits", "I3", "deposed leader", POSIX,
        (home, "commit", commit_for_all)),
    Mutation("any session commits at a mirror", "I3", "mirror and reader", POSIX,
        (home, "commit", commit_for_all)),
    Mutation("a leader takes its name from the catalogue", "I3", "parent in memory", POSIX,
        (processes.Leader, "lead", lead_by_catalogue)),
    Mutation("snapshots are committed in any order", "I4", "two leaders of one attempt", POSIX,
        *in_both("is_committable", is_committable_again)),
    # starts
    Mutation("a start is not bound to the version that it has read", "I6", "deposed leader", POSIX,
        (home, "begin", begin_on_whatever)),
    Mutation("starts begin again above each other", "I7", "first start", S3,
        (processes, "start", start_again), most_states=70_000),
    Mutation("whole snapshots are adopted without sizes", "I4", "backup", POSIX,
        (home, "_exact_cover", exact_cover_without_sizes), (Home, "_missing", believed)),
    Mutation("only the newest whole snapshot is adopted", "I6", "backup", POSIX,
        (home, "adopt", adopt_newest)),
    Mutation("whole snapshots of older attempts are adopted", "I4", "late manifest", POSIX,
        *in_both("is_committable", is_committable_of_any_writer),
        (Home, "_whole_snapshots", whole_snapshots_of_all),
        ALL_OWN),
    Mutation("writers of a lost catalogue are not recorded", "I4", "backup", POSIX,
        (home, "begin", begin_without_foreign)),
    # new writers
    Mutation("a branch does not list data/", "I4", "backup and branch", POSIX,
        (home, "new_writer", new_writer_unlisted)),
    Mutation("a branch adopts nothing", "I6", "backup and branch", POSIX,
        (Home, "branch", branch_at_once)),
    Mutation("new writers do not give way", "I7", "mirror and reader", POSIX,
        (home, "_again", again_above), most_states=100_000),
    Mutation("rebuild names only what is committable", "I6", "no version", POSIX,
        (Home, "_whole_checkpoints", rebuild_committable)),
    Mutation("rebuild names garbage", "I4", "backup and recover", POSIX,
        (Home, "_whole_checkpoints", rebuild_all)),
    # two stores
    Mutation("stores are related by attempts", "I6", "mirror that missed a start", POSIX,
        *in_start("relate", relate_by_attempts)),
    Mutation("the current lineage keeps ancestors with checkpoints only",
        "I6", "old home, newer mirror", POSIX,
        *in_start("relate", relate_spliced)),
    Mutation("an empty home begins a new run beside a full mirror", "I6", "empty home, full mirror", POSIX,
        *in_start("relate", home_leads)),
    Mutation("a copier tries again with the same checkpoint", "I7", "mirror and reader", POSIX,
        (processes, "copy_newest", copy_again), most_states=100_000),
    Mutation("frozen files are copied with each checkpoint", "I5", "mirror, frozen file", POSIX,
        (mirror, "_frozen_files", copy_all_files)),
    # retention
    Mutation("the version in hand decides what retention drops", "I1", "damaged", POSIX,
        (Home, "commit", commit_by_list)),
    Mutation("retention counts what lacks files", "I1", "file lost", POSIX,
        (Home, "whole", all_are_whole)),
    Mutation("retention counts what is damaged", "I1", "damaged", POSIX,
        (changes, "expired", expired_counting_damaged), (Home, "whole", whole_with_damaged)),
    Mutation("a start passes by what is damaged", "I6", "damaged", POSIX,
        (processes, "_chosen", choose_undamaged)),
    Mutation("a base that is gone is not reported", "I7", "base never whole", POSIX,
        (processes, "hopeless", hopeless_if_overtaken)),
    # deletion
    Mutation("files are deleted before the version", "I4", "deposed leader", POSIX,
        (Home, "update", update_deletes_first)),
    Mutation("the collector ignores what is being saved", "I4", "two leaders of one attempt", POSIX,
        (home, "spared", spared_but("pending"))),
    Mutation("the same, for a parent in memory", "I4", "parent half written", POSIX,
        (home, "spared", spared_but("pending"))),
    Mutation("the collector ignores newer writers", "I4", "deposed leader", POSIX,
        (home, "spared", spared_but("newer")), (home, "is_known", all_known)),
    Mutation("folders by snapshot, not by writer", "I4", "parent half written", POSIX,
        (Folder, "path", SnapshotFolder.path),
        (home, "spared", spared_by_snapshot),
        (home, "is_known", all_known),
        ALL_OWN),
    Mutation("an unknown manifest protects its folder", "I5", "deposed leader", POSIX,
        (Home, "collect", collect_but_manifests)),
    Mutation("a keeper clears its files before it writes again", "I4", "keeper replaced", POSIX,
        (processes, "write", write_clearing), ALL_MAY_GO),
    Mutation("the collector ignores frozen files", "I4", "frozen file shared", POSIX,
        (home, "spared", spared_but("base"))),
    Mutation("a base need not be named by a checkpoint", "I4", "frozen file dropped", POSIX,
        *in_both("is_committable", is_committable_with_any_base)),
    Mutation("unnamed files in the folders of checkpoints go", "I4", "frozen file twice", POSIX,
        (Home, "collect", collect_unnamed)),
]  # fmt: skip
