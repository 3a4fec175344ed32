"""A home: what processes do on the store of a run. They commit snapshots, start attempts, delete garbage.

A file lies in the folder of the attempt that wrote it. A version newly names only files of the current
writer, of a snapshot newer than all that this writer has committed, and bases that a checkpoint names
already. Every new writer is made in one way: list data/ after the version that it builds on was read, take a
number above all that is there, and bind the change to that version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from flashckpt._native import xxh3_128
from flashckpt.catalogue.changes import (
    Committed,
    Ids,
    Launch,
    Spared,
    adopt,
    ancestry,
    begin,
    bound_to,
    branch,
    commit,
    files_without_catalogue,
    follow,
    found,
    is_committable,
    is_known,
    is_newer,
    make,
    new_writer,
    newest,
    rebuild,
    retain,
    spared,
    visible,
    writers_with_garbage,
)
from flashckpt.catalogue.requests import Delete, Files, Folders, Has, Put, Read, Steps
from flashckpt.catalogue.versions import Versions
from flashckpt.errors import DamagedError, RunHeldError, SupersededError, UnusableRunError
from flashckpt.format.catalogue import (
    EMPTY,
    FROZEN_PREFIX,
    Catalogue,
    Checkpoint,
    Folder,
    Lineage,
    folders_of,
    manifest_name,
    version_path,
)
from flashckpt.format.manifest import PART, File, Manifest, PartHead, manifest_of, unlike
from flashckpt.format.names import DATA, AttemptName, SnapshotId
from flashckpt.options import Keep
from flashckpt.printable import listed

_SHOWN = 20


@dataclass(frozen=True)
class Home(Versions):
    """The store of a run, a home or a mirror."""

    # ---- snapshots

    def gather(self, folder: Folder, known: dict[str, PartHead] | None = None) -> Steps[Manifest | Committed]:
        """Return the manifest of a snapshot; WAITING if parts, or files that they name, are not there yet;
        DIVERGED if replicas differ; BASE_GONE if a base has lost a file. `known`: heads of parts that were
        read, by name; gets those that are read here.

        A node has two parts if its keeper was replaced; either is right. DamagedError if the parts are of
        different steps or worlds.
        """
        names: dict[str, int] = yield Files(self.store, folder.path)
        found = yield from self.heads(folder, names, known)
        heads = [(File(name, names[name]), head) for name, head in found.items()]
        if len({(head.step, head.world) for _, head in heads}) > 1:
            raise DamagedError(
                f"{folder.path}: its parts are of different steps or numbers of ranks. It is not committed; "
                "older checkpoints are untouched. Let all ranks count steps alike.",
                path=folder.path,
            )
        chosen = _exact_cover(heads, names)
        if chosen is None:
            return Committed.WAITING
        if unlike({file.name: head for file, head in chosen}):
            return Committed.DIVERGED
        manifest = manifest_of(folder, chosen)
        for base, files in manifest.files().items():
            # Those in its own folder are chosen by their sizes.
            is_there = base == folder and files.items() <= names.items()
            if not is_there and (yield from self._missing(base, files)):
                return Committed.BASE_GONE if base != folder else Committed.WAITING
        return manifest

    def heads(
        self, folder: Folder, names: Mapping[str, int], known: dict[str, PartHead] | None = None
    ) -> Steps[dict[str, PartHead]]:
        """The heads of the parts of a snapshot by name, without those that are damaged or of another one.
        `names`: a listing of the folder. `known`: as of `gather`."""
        known = {} if known is None else known
        found = {}
        for name in sorted(filter(PART.fullmatch, names)):
            head = known.get(name)
            if head is None:
                with suppress(DamagedError):  # its shards may be whole: another part of the node can come
                    head = yield Read(self.store, f"{folder.path}/{name}", PartHead, names[name])
            if head is not None and head.id == folder.id:
                known[name] = found[name] = head
        return found

    def missing(self, manifest: Manifest) -> Steps[list[str]]:
        """The paths of the files that are not there with the lengths that a manifest gives."""
        missing = []
        for folder, files in manifest.files().items():
            missing += yield from self._missing(folder, files)
        return missing

    def _missing(self, folder: Folder, files: Mapping[str, int]) -> Steps[list[str]]:
        """A listing of the folder. Asks by name for what an old listing may lack."""
        names: dict[str, int] = yield Files(self.store, folder.path)
        missing = []
        for name, num_bytes in sorted(files.items() - names.items()):
            if not (yield Has(self.store, f"{folder.path}/{name}", num_bytes)):
                missing.append(f"{folder.path}/{name}")
        return missing

    def publish(self, catalogue: Catalogue, manifest: Manifest) -> Steps[Checkpoint]:
        """Write a manifest. Returns the checkpoint, which is not committed yet."""
        lineage = ancestry(catalogue, manifest.folder.id)[1:]
        full = replace(manifest, run_id=catalogue.run_id, lineage=lineage)
        checkpoint = checkpoint_of(full)
        yield Put(self.store, checkpoint.manifest_path, full)
        return checkpoint

    def commit(
        self,
        catalogue: Catalogue,
        writer: AttemptName,
        checkpoint: Checkpoint,
        keep: Keep,
        in_use: Ids = frozenset(),
    ) -> Steps[Catalogue]:
        """Commit a checkpoint whose manifest is published. Returns a version; the checkpoint is committed if
        that version has it. Looks which checkpoints are whole if retention could drop one."""
        whole = frozenset({checkpoint.id})
        if len(visible(catalogue)) >= keep.last:
            whole |= yield from self.whole(catalogue, keep.last - 1)
        kept = partial(commit, keep=keep, whole=whole, in_use=in_use)
        change = partial(kept, writer=writer, checkpoint=checkpoint)
        return (yield from self.update(change, catalogue))

    def retain(self, catalogue: Catalogue, keep: Keep, in_use: Ids = frozenset()) -> Steps[Catalogue]:
        """Drop the checkpoints that retention does not keep. Returns a version."""
        if len(visible(catalogue)) <= keep.last:
            return catalogue
        whole = yield from self.whole(catalogue, keep.last)
        return (yield from self.update(partial(retain, keep=keep, whole=whole, in_use=in_use), catalogue))

    def whole(self, catalogue: Catalogue, most: int) -> Steps[Ids]:
        """The newest checkpoints of the history that are whole now and not damaged, at most so many."""
        found: set[SnapshotId] = set()
        for each in reversed(visible(catalogue)):
            if len(found) >= most:
                break
            if each.id not in catalogue.damaged_ids and (yield from self.is_whole(each)):
                found.add(each.id)
        return frozenset(found)

    def is_whole(self, checkpoint: Checkpoint) -> Steps[bool]:
        """Whether all files of a checkpoint are there."""
        return isinstance((yield from self.whole_or_why(checkpoint)), Manifest)

    def whole_or_why(self, checkpoint: Checkpoint) -> Steps[Manifest | str]:
        """The manifest of a checkpoint whose files are all there, or why it is not whole: its manifest cannot
        be read, files are missing or of another length, or a folder is a link."""
        path = checkpoint.manifest_path
        try:
            manifest = yield Read(self.store, path, Manifest)
            if manifest is not None and checkpoint_of(manifest).manifest_path != path:
                return f"{path} is the manifest of another checkpoint"
            missing = [path] if manifest is None else (yield from self.missing(manifest))
        except DamagedError as error:
            return str(error)
        if not missing:
            return cast(Manifest, manifest)
        return f"{listed(missing, _SHOWN)}: missing, or not as long as when it was written"

    # ---- new writers

    def make(self, run_id: str, known: Catalogue = EMPTY) -> Steps[Catalogue]:
        """Return the newest version. Make an empty run if the store has no version. UnusableRunError if there
        are files of checkpoints and no catalogue."""
        catalogue = yield from self.newest(known)
        if not catalogue.version and (yield from self._writers_with_files(catalogue)):
            raise files_without_catalogue()
        if catalogue.version:
            return catalogue
        return (yield from self.update(partial(make, run_id=run_id)))

    def begin(
        self,
        seen: Catalogue,
        name: AttemptName,
        lineage: Lineage,
        launch: Launch,
        *,
        after: AttemptName,
        is_here: bool = False,
    ) -> Steps[Catalogue]:
        """Begin an attempt whose ranks have loaded the first snapshot of `lineage`, which was chosen when
        `seen` was the newest version, or later. `after`: the writer that has no trainer any more, as this
        start has found before. `is_here`: the ranks have read the snapshot from this store. RunHeldError if
        another attempt has begun since, if a newer checkpoint has come that the ranks did not know, or if the
        one that they have loaded was removed."""
        catalogue, parent = seen, next(iter(lineage), None)
        while True:
            catalogue, writers = yield from self.settle(catalogue)
            above = [each for each in (catalogue.writer, *writers) if each >= name]
            if catalogue.writer != after or above:
                raise RunHeldError(
                    f"Attempt {max([catalogue.writer, *above])} has started meanwhile. This start has begun "
                    "nothing. If another job trains this run, end it; then start again."
                )
            newer = [each for each in visible(catalogue) if parent is None or each.id > parent]
            if unknown := [each for each in newer if not seen.has(each.id)]:
                raise RunHeldError(
                    f"Step {unknown[-1].step} was committed by attempt {catalogue.writer} while this start "
                    "was reading an older one. Nothing was begun. If another job trains this run, end it; "
                    "then start again."
                )
            if is_here and parent is not None and not catalogue.has(parent):
                raise RunHeldError(
                    f"Snapshot {parent} was removed while this start was reading it. Nothing was begun. "
                    "Start again."
                )
            new = bound_to(catalogue, name, writers)
            change = partial(begin, new=new, lineage=lineage, launch=launch)
            catalogue = yield from self.update(change, catalogue)
            if catalogue.writer == name:
                return catalogue

    def branch(self, nonce: str, parent: SnapshotId) -> Steps[Catalogue]:
        """Make an older checkpoint the newest one of the history."""
        catalogue = yield from self.newest()
        while True:
            catalogue, writers = yield from self.settle(catalogue)
            new = new_writer(catalogue, nonce, writers)
            made = yield from self.update(partial(branch, new=new, parent=parent), catalogue)
            if made.writer == new.name:
                return made
            catalogue = _again(catalogue, made)

    def follow(self, nonce: str, lead: Catalogue) -> Steps[Catalogue]:
        """Make this store follow one that leads."""
        catalogue = yield from self.newest()
        while True:
            writers = yield from self._writers_with_files(catalogue)
            new = new_writer(catalogue, nonce, writers, lead.attempt.number)
            made = yield from self.update(partial(follow, new=new, lead=lead), catalogue)
            if made.writer == new.name:
                return made
            catalogue = _again(catalogue, made)

    def rebuild(self, nonce: str) -> Steps[Catalogue]:
        """Make a version from whole checkpoints, if none can be read, or if writers that are not known have
        newer ones. The caller has made sure that no job trains the run. UnusableRunError if none is whole."""
        catalogue, is_lost = yield from self._salvage()
        while True:
            if is_lost:  # what the lost version dropped must not be named again, as `adopt` would do
                yield from self._whole_snapshots(catalogue)
                writers = yield from self._writers_with_files(catalogue)
            else:
                catalogue, writers = yield from self.settle(catalogue)
            found = yield from self._whole_checkpoints(catalogue, writers)
            last = newest(catalogue)
            unknown = (each.id for each in found if not catalogue.has(each.id))
            if not is_lost and not any(last is None or each > last.id for each in unknown):
                return catalogue
            runs = {manifest.run_id for manifest in found.values()}
            if len(runs) != 1:
                why = f"it has those of several runs ({', '.join(sorted(runs))})" if runs else "none is whole"
                raise UnusableRunError(
                    f"The catalogue cannot be rebuilt from the checkpoints in {DATA}/: {why}. Nothing was "
                    "changed. Restore the files of catalogue/ and data/ from a backup or a mirror."
                )
            new = new_writer(catalogue, nonce, writers, max(each.id.attempt.number for each in found))
            change = partial(
                rebuild,
                new=new,
                run_id=runs.pop(),
                found=tuple(found),
                lineages={each.id.attempt: manifest.lineage for each, manifest in found.items()},
            )
            made = yield from self.update(change, catalogue)
            if made.writer == new.name:
                return made
            catalogue, is_lost = _again(catalogue, made), False

    def found(self, manifest: Manifest, run_id: str) -> Steps[Catalogue]:
        """Make a run of one checkpoint, whose files are there. UnusableRunError if there is a run."""
        checkpoint = yield from self.publish(replace(EMPTY, run_id=run_id), manifest)
        return (yield from self.update(partial(found, run_id=run_id, checkpoint=checkpoint)))

    def settle(self, catalogue: Catalogue) -> Steps[tuple[Catalogue, frozenset[AttemptName]]]:
        """Adopt whole snapshots of the current writer. Returns a version, and a listing of the writers that
        is younger than it."""
        while True:
            writers = yield from self._writers_with_files(catalogue)
            found = yield from self._whole_snapshots(catalogue)
            if not found:
                return catalogue, writers
            catalogue = yield from self.update(partial(adopt, found=found), catalogue)

    def _whole_snapshots(self, catalogue: Catalogue) -> Steps[tuple[Checkpoint, ...]]:
        """Write manifests of the whole snapshots that the current writer has not committed. Returns them."""
        found = []
        for folder in (yield from self._folders(catalogue.writer)):
            if not is_newer(catalogue, folder.id) or catalogue.has(folder.id):
                continue
            manifest: Manifest | Committed = Committed.WAITING
            with suppress(DamagedError):  # it is never committed
                manifest = yield from self.gather(folder)
            if isinstance(manifest, Manifest) and is_committable(catalogue, checkpoint_of(manifest)):
                found.append((yield from self.publish(catalogue, manifest)))
        return tuple(found)

    def _salvage(self) -> Steps[tuple[Catalogue, bool]]:
        """Return the newest version that can be read, as if it were the newest, and whether it is not.

        Versions beyond the newest `keep_versions` prove nothing: see Versions.
        """
        numbers = sorted((yield from self._numbers()), reverse=True)
        newest = numbers[0] if numbers else (0, "")
        for number, run_id in numbers[: self.keep_versions]:
            try:
                found = yield Read(self.store, version_path(number, run_id), Catalogue)
            except DamagedError:
                continue
            if found is not None and found.version == number:
                return replace(found, version=newest[0]), number != newest[0]
        return replace(EMPTY, version=newest[0], run_id=newest[1]), True

    def _whole_checkpoints(
        self, catalogue: Catalogue, writers: Iterable[AttemptName]
    ) -> Steps[dict[Checkpoint, Manifest]]:
        """The whole checkpoints whose files `spared` spares, in the order of their writers. Of one snapshot
        that two writers have, that of the newer one."""
        named = {each.id: each for each in catalogue.checkpoints}
        found: dict[SnapshotId, tuple[Checkpoint, Manifest]] = {}
        for writer in sorted(writers):
            folders = yield from self._folders(writer)
            for folder, kept in spared(catalogue, folders).items():
                if kept is not Spared.ALL:
                    continue
                for checkpoint, manifest in (yield from self._manifests(folder)):
                    is_other = named.get(folder.id, checkpoint) != checkpoint
                    is_other |= catalogue.run_id not in ("", manifest.run_id)
                    if not is_other and (yield from self.is_whole(checkpoint)):
                        found.pop(folder.id, None)
                        found[folder.id] = checkpoint, manifest
        return dict(found.values())

    def _manifests(self, folder: Folder) -> Steps[list[tuple[Checkpoint, Manifest]]]:
        """The manifests of a folder that can be read, each with the checkpoint that it makes."""
        found = []
        names = yield Files(self.store, folder.path)
        for name in sorted(names):
            nonce = name.removeprefix("manifest-").removesuffix(".json")
            if name != manifest_name(nonce):
                continue
            try:
                manifest = yield Read(self.store, f"{folder.path}/{name}", Manifest)
            except DamagedError:
                continue
            if manifest is not None and manifest.folder == folder:
                made = checkpoint_of(manifest)
                found += [(made, manifest)] if made.manifest == nonce else []
        return found

    # ---- deletion

    def collect(self, catalogue: Catalogue, before: Catalogue = EMPTY) -> Steps[None]:
        """Delete garbage. Any process may do it at any time. Raises the first error after it has deleted the
        rest. `before`: a version whose garbage was deleted; only what is garbage since then is looked for."""
        failure: OSError | DamagedError | None = None
        if before.version and before.writer == catalogue.writer:
            writers = writers_with_garbage(before, catalogue)
        else:
            writers = yield from self.writers()
        for writer in sorted(writers):
            if not is_known(catalogue, writer):
                continue
            try:
                folders = yield from self._folders(writer)
                if not folders and writer != catalogue.writer:
                    yield Delete(self.store, f"{DATA}/{writer}", ())
            except (OSError, DamagedError) as error:
                failure = failure or error
                continue
            for folder, kept in spared(catalogue, folders).items():
                if kept is Spared.ALL:
                    continue
                try:
                    names = yield Files(self.store, folder.path)
                    if kept is Spared.FROZEN:
                        names = [name for name in names if not name.startswith(FROZEN_PREFIX)]
                    yield Delete(self.store, folder.path, tuple(sorted(names)))
                except (OSError, DamagedError) as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def make_room(self, catalogue: Catalogue) -> Steps[None]:
        yield from super().make_room(catalogue)
        with suppress(OSError, DamagedError):
            yield from self.collect(catalogue)

    def writers(self) -> Steps[frozenset[AttemptName]]:
        """The attempts that have a folder in data/."""
        names = yield Folders(self.store, DATA)
        return frozenset(each for each in map(AttemptName.parse, names) if each is not None)

    def _writers_with_files(self, catalogue: Catalogue) -> Steps[frozenset[AttemptName]]:
        """The writers, without those that are newer than the version's writer and have only empty folders.
        They would stay foreign for ever."""
        writers = yield from self.writers()
        empty = set()
        for writer in sorted(each for each in writers if each > catalogue.writer):
            for folder in (yield from self._folders(writer)):
                if (yield Files(self.store, folder.path)):
                    break
            else:
                empty.add(writer)
        return writers - empty

    def _folders(self, writer: AttemptName) -> Steps[list[Folder]]:
        """The folders of a writer's snapshots, oldest first."""
        return folders_of(writer, (yield Folders(self.store, f"{DATA}/{writer}")))


def _exact_cover(
    heads: Iterable[tuple[File, PartHead]], names: Mapping[str, int]
) -> list[tuple[File, PartHead]] | None:
    """Choose parts that together hold each rank once and whose shards are there. Return None if some rank has
    no such part. `names`: the lengths of the files in their folder. All parts that a node writes in an
    attempt hold the same ranks."""
    chosen: list[tuple[File, PartHead]] = []
    free: set[int] = set()
    for file, head in sorted(heads, key=lambda each: (-len(each[1].ranks), each[0].name)):
        free = free or set(range(head.world))
        ranks = {each.rank for each in head.ranks}
        if ranks <= free and all(names.get(each.name) == each.num_bytes for each in head.files):
            chosen.append((file, head))
            free -= ranks
            if not free:
                return chosen
    return None


def _again(catalogue: Catalogue, made: Catalogue) -> Catalogue:
    """The version for which a change is prepared again.

    A new writer gives way to another one that came first: else two could supersede each other for ever.
    """
    if made.writer != catalogue.writer:
        raise SupersededError(
            f"Attempt {made.writer} has taken over meanwhile. Nothing was changed. Try again."
        )
    return made


def checkpoint_of(manifest: Manifest) -> Checkpoint:
    """The checkpoint that a manifest makes. Its nonce is a checksum of its bytes: processes that write the
    same manifest write one file."""
    return Checkpoint(
        id=manifest.folder.id,
        step=manifest.step,
        writer=manifest.folder.writer,
        manifest=xxh3_128(manifest.to_bytes()).hex()[:16],
        num_bytes=manifest.num_bytes,
        bases=manifest.bases,
    )
