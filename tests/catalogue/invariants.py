"""The invariants of the storage protocol, which the search checks in every state.

I1  A checkpoint that was reported as committed is in every later version, until retention of its history
    or the user removes it. The newest version is never deleted; no version is overwritten or left out.
I2  A reader sees a version that was the newest once, and finds all files of its checkpoints, or they were
    removed meanwhile.
I3  A version newly names only files that its writer wrote. No process writes into the folder of another
    writer. A process reports a commit only if a version contains it, and reports "never" only if no later
    version can contain it.
I4  All files of the checkpoints of the newest version are there. No file of a snapshot that the current
    writer can still commit is deleted, and none of a writer that the catalogue does not know.
I5  After one more job has started, committed and collected, nothing is left but what its catalogue names.
    A store holds no frozen file twice.
I6  An attempt resumes the newest whole checkpoint of the history that leads, or a newer snapshot that memory
    offers. Every whole snapshot of the attempt before is adopted. No start is refused.
I7  Every process ends, in every order.
"""

from dataclasses import dataclass, replace
from typing import Any

from flashckpt.catalogue.changes import (
    is_committable,
    is_newer,
    is_visible,
    parent_of,
    visible,
)
from flashckpt.catalogue.requests import Copy, Delete
from flashckpt.errors import FlashckptError
from flashckpt.format.catalogue import EMPTY, Catalogue, Folder, parse_version
from flashckpt.format.manifest import Manifest
from flashckpt.format.names import AttemptName, SnapshotId
from tests.catalogue.explorer import Process
from tests.catalogue.model import Link, Report, World, run_alone, size_of
from tests.catalogue.processes import HOME, MIRROR, Leader, copy_newest, paths_of, recover


@dataclass(frozen=True)
class History:
    """What has happened: the versions of each store that were the newest once, in order."""

    versions: tuple[tuple[str, tuple[Catalogue, ...]], ...]
    fault: str = ""

    def of(self, store: str) -> tuple[Catalogue, ...]:
        return dict(self.versions).get(store, ())

    def last(self, store: str) -> Catalogue:
        return self.of(store)[-1] if self.of(store) else EMPTY


@dataclass(frozen=True)
class Invariants:
    """`first`: files at the beginning. For the others see `Scenario`."""

    first: World
    keep: int
    memory: frozenset[SnapshotId]
    foreign: frozenset[AttemptName]
    resumes: SnapshotId | None
    is_lost: bool

    def history(self) -> History:
        versions: dict[str, tuple[Catalogue, ...]] = {}
        for path in sorted(self.first):
            store, area, name = path.split("/", 2)
            if area == "catalogue":
                found = self.first[path]
                made = found if isinstance(found, Catalogue) else replace(EMPTY, version=_number(name))
                versions[store] = (*versions.get(store, ()), made)
        return History(tuple(versions.items()))

    def changed(
        self, history: History, process: Process, request: Any, files: World, after: World
    ) -> History:
        """I1, I3, I4, I6: judge a request that took effect."""
        if isinstance(request, Delete):
            paths = [f"{request.store}/{request.folder}/{name}" for name in request.names]
            faults = (self._judge_deletion(history, path) for path in paths if path in files)
            return replace(history, fault=next((each for each in faults if each), ""))
        if isinstance(request, Copy):
            store, path = request.target, request.target_path
        elif isinstance(request, Link):
            store, path = request.store, f"{request.folder}/{request.name}"
        else:
            store, path = request.store, request.path
        area, *rest = path.split("/")
        is_file = area == "data" and not rest[2].startswith("manifest-")
        if is_file and process.nonce and not self.is_own(rest[0], process.nonce):
            return replace(history, fault=f"I3: {process.name} writes {path}, as another writer")
        if area != "catalogue" or not _number(rest[0]) or f"{store}/{path}" not in after:
            return history
        return self._judge_created(history, process, store, path, files, after)

    def is_own(self, writer: str, nonce: str) -> bool:
        return writer.endswith(nonce)

    def _judge_created(
        self, history: History, process: Process, store: str, path: str, files: World, after: World
    ) -> History:
        made, before = after[f"{store}/{path}"], history.last(store)
        if f"{store}/{path}" in files:
            is_other = files[f"{store}/{path}"] != made
            return replace(history, fault="I1: a version was overwritten" if is_other else "")
        if made.version <= before.version:
            return history  # its number was free again: it is not a version of the run
        versions = {**dict(history.versions), store: (*history.of(store), made)}
        fault = self._judge_version(store, before, made, process, files)
        fault = fault or self._judge_start(made, history, files) if store == "home" else fault
        return History(tuple(sorted(versions.items())), fault)

    def _judge_deletion(self, history: History, path: str) -> str:
        store, area, *rest = path.split("/")
        catalogue = history.last(store)
        if area == "catalogue":
            is_newest = _number(rest[0]) == catalogue.version
            return "I1: the newest version was deleted" if is_newest else ""
        folder = folder_of(rest[0], rest[1])
        if folder.writer == catalogue.writer and is_newer(catalogue, folder.id):
            return f"I4: {path} was deleted, and can still be committed"
        is_foreign = folder.writer in self.foreign
        return f"I4: {path} was deleted, and its writer is not known" if is_foreign else ""

    def _judge_version(
        self, store: str, before: Catalogue, made: Catalogue, process: Process, files: World
    ) -> str:
        had, has = ({each.id for each in one.checkpoints} for one in (before, made))
        lacking = broken(files, made, store)
        if lacking & (has - had):
            return f"I4: {store} lacks files of {min(lacking)}, which version {made.version} names"
        good = [each.id for each in visible(made) if each.id not in lacking | before.damaged_ids]
        for gone in had - has - broken(files, before, store):
            if sum(each > gone for each in good) < (1 if process.may_remove else self.keep):
                return f"I1: version {made.version} drops {gone}, which is needed"
        if made.version != before.version + 1:
            return f"I1: version {made.version} follows version {before.version}"
        frozen = [path for path in named(files, made, store) if "/frozen-" in path]
        if len({path.rpartition("/")[2] for path in frozen}) < len(frozen):
            return f"I5: version {made.version} of {store} has a frozen file twice"
        if made.writer != before.writer:
            return ""
        for each in made.checkpoints:
            if each.id not in had and not self.is_own(str(each.writer), str(before.writer)):
                return f"I3: {process.name} commits {each.folder.path}, and {before.writer} may not"
        is_adopting = bool(has - had) and before.writer.nonce != process.nonce
        return self._judge_adoption(before, made) if is_adopting else ""

    def _judge_start(self, made: Catalogue, history: History, files: World) -> str:
        """Judge an attempt that begins, or a branch."""
        before, mirror = history.last("home"), history.last("mirror")
        if made.writer == before.writer or made.attempt != made.writer:
            return ""
        last, parent = newest_whole(before, files), parent_of(made)
        if made.ended:
            return self._judge_adoption(before, made)
        if parent is None and (visible(before) or visible(mirror)):
            return f"I6: {made.attempt} begins a fresh run beside checkpoints"
        if last is not None and (parent is None or parent < last):
            return f"I6: {made.attempt} resumes {parent}, and {last} is committed"
        if parent is not None and not (made.has(parent) or mirror.has(parent) or parent in self.memory):
            return f"I6: {made.attempt} resumes {parent}, which neither a store nor memory has"
        if self.resumes and not is_visible(made, self.resumes):
            return f"I6: {made.attempt} resumes {parent}, and not {self.resumes}"
        return self._judge_adoption(before, made)

    def _judge_adoption(self, before: Catalogue, made: Catalogue) -> str:
        """Snapshots that were whole at the beginning, and that only `made` can still commit, are in it."""
        for folder in {
            folder_of(*path.split("/")[2:4]) for path in self.first if path.startswith("home/data/")
        }:
            is_whole = isinstance(run_alone(self.first, HOME.gather(folder))[1], Manifest)
            is_pending = folder.writer == before.writer and is_newer(before, folder.id)
            if is_pending and is_whole and not made.has(folder.id):
                return f"I6: version {made.version} does not adopt {folder.id}, which is whole"
        return ""

    def reported(self, history: History, process: Process, report: Report) -> History:
        """I2, I3: judge a report."""
        if report.kind == "error":
            return history
        fault, (store, value) = "", report.value
        if report.kind == "committed" and not any(each.has(value) for each in history.of(store)):
            fault = f"I3: {process.name} was told that {value} is committed, and no version has it"
        if report.kind == "started" and not any(each.writer == value for each in history.of(store)):
            fault = f"I3: {process.name} was told that {value} has begun, and no version says so"
        if report.kind == "saw" and value != EMPTY and value not in history.of(store):
            fault = f"I2: {process.name} saw a version {value.version} that never was the newest"
        if report.kind == "never" and is_committable(history.last(store), value):
            fault = f"I3: {process.name} was told that {value.id} can never be committed, and it can"
        if report.kind == "missing" and history.last(store).has(value):
            fault = f"I2: {process.name} misses files of {value}"
        return replace(history, fault=fault)

    def standing(self, history: History, files: World) -> str:
        """I4: the files of the checkpoints of the newest version."""
        for store, versions in history.versions:
            lacking = broken(files, versions[-1], store)
            if lacking and not lacking <= broken(self.first, self.history().last(store), store):
                return (
                    f"I4: {store} lacks files of {min(lacking)}, which version {versions[-1].version} names"
                )
        return ""

    def final(self, history: History, files: World) -> str:
        """I5, I6: one more job, alone, starts and leaves nothing but what it names."""
        before, mirror = newest_whole(history.last("home"), files), history.of("mirror") and MIRROR or None
        try:
            if self.is_lost:
                files, _ = run_alone(files, recover("y"))
            leader = Leader("z", self.keep, trims=True, mirror=mirror)
            files, last = run_alone(files, leader.train((90, 91)))
            lasts = {"home": last}
            if mirror:
                files, _ = run_alone(files, copy_newest("z"))
                lasts["mirror"] = run_alone(files, MIRROR.newest())[1]
        except (FlashckptError, OSError) as error:
            return f"I6: the next job cannot start: {type(error).__name__}"
        parent = parent_of(last)
        if before is not None and (parent is None or parent < before):
            return f"I6: the next job does not resume {before}"
        if self.resumes and not is_visible(last, self.resumes):
            return f"I6: the next job does not resume {self.resumes}"
        for store, catalogue in lasts.items():
            folders, kept = {each.folder for each in catalogue.checkpoints}, named(files, catalogue, store)
            for path in (path.partition("/")[2] for path in files if path.startswith(f"{store}/data/")):
                folder = folder_of(*path.split("/")[1:3])
                if not (path in kept or folder in folders or folder.writer in self.foreign):
                    return f"I5: {store}/{path} is never deleted"
        if mirror and not lasts["mirror"].has(SnapshotId(last.attempt, 91)):
            return "I5: the mirror does not get the last checkpoint"
        for store in lasts:
            versions = [path for path in files if path.startswith(f"{store}/catalogue/")]
            if len(versions) > HOME.keep_versions:
                return f"I5: {versions} are left"
        return ""


def _number(name: str) -> int:
    """The number of a version, 0 for other names."""
    return (parse_version(name) or (0, ""))[0]


def folder_of(writer: str, name: str) -> Folder:
    attempt = AttemptName.parse(writer)
    assert attempt is not None, writer
    folder = Folder.parse(attempt, name)
    assert folder is not None, name
    return folder


def named(files: World, catalogue: Catalogue, store: str) -> set[str]:
    """All files that the manifests of a catalogue name."""
    manifests = (files.get(f"{store}/{each.manifest_path}") for each in catalogue.checkpoints)
    return {path for each in manifests if isinstance(each, Manifest) for path in paths_of(each)}


def broken(files: World, catalogue: Catalogue, store: str) -> set[SnapshotId]:
    """The checkpoints that lack files."""
    found = set()
    for checkpoint in catalogue.checkpoints:
        manifest = files.get(f"{store}/{checkpoint.manifest_path}")
        paths = [f"{store}/{path}" for path in paths_of(manifest)] if manifest else [""]
        if any(size_of(files.get(path)) != 1 for path in paths):
            found.add(checkpoint.id)
    return found


def newest_whole(catalogue: Catalogue, files: World) -> SnapshotId | None:
    found = {each.id for each in visible(catalogue)} - broken(files, catalogue, "home")
    return max(found, default=None)
