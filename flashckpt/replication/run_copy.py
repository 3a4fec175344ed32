"""Copies checkpoints of a run to another store, byte for byte, newest first.

`copy_run` owns the choice of steps. flashckpt/catalogue/mirror.py owns the order of the writes. `StepCopier`
owns how files are sent: the bytes of a source are compared with its records before they are sent, and what
was written is compared with what was read. Deletes only what the catalogue of the target does not need and,
when asked to repair, damaged files.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

from flashckpt import _native, crashpoints
from flashckpt.catalogue.changes import Keep as Kept
from flashckpt.catalogue.changes import ancestry, clear
from flashckpt.catalogue.home import Home, checkpoint_of
from flashckpt.catalogue.mirror import copy_checkpoint
from flashckpt.catalogue.requests import Copy, Stores
from flashckpt.commit.assets import copy_assets
from flashckpt.commit.commit_step import KEEP_ALL, kept
from flashckpt.commit.lineage import resolve
from flashckpt.commit.steps import (
    StepRecord,
    committed,
    damaged,
    is_whole,
    missing_of,
    read_checkpoint,
    read_manifest,
    step_of,
    whole_or_why,
)
from flashckpt.commit.verification import FileStatus, verify_file
from flashckpt.commit.view import HOME, View, open_run
from flashckpt.errors import DamagedError, NoSuchStepError, RunError
from flashckpt.format.catalogue import Checkpoint, Folder
from flashckpt.format.layout import PAGE
from flashckpt.format.manifest import COMPRESSED, File, FrozenFile, Manifest, plain_name
from flashckpt.format.names import AttemptName, CommitName, SnapshotId
from flashckpt.format.records import CHUNK_BYTES, Contents
from flashckpt.options import Compress, Keep
from flashckpt.store import are_apart
from flashckpt.store.base import LengthError, MemoryRange, Store, write_once
from flashckpt.store.compressed_file import is_worth, write_compressed
from flashckpt.threads import watched

MIRROR = Home("mirror")


class Outcome(Enum):
    COPIED = "copied"
    THERE = "there already"
    DELETED = "overtaken there"
    """Another copier has committed a newer step there meanwhile."""
    REPAIRED = "repaired"
    """Damaged files of the target were sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The result of one copy. `num_bytes`: the length of the step's files; `sent_bytes`: what was sent.
    `view`: of the target, after the copy; `dropped`: the steps that retention dropped there."""

    name: CommitName
    outcome: Outcome
    num_bytes: int
    sent_bytes: int
    view: View = field(compare=False, repr=False)
    dropped: tuple[CommitName, ...] = ()

    @property
    def is_new(self) -> bool:
        """Whether this copy has committed it."""
        return self.outcome is Outcome.COPIED


class StepCopier:
    """Copies steps of one run. `progress`: 0, or the address of a u64 that grows by the bytes sent or found.
    `compress`: see `is_worth`. `repairs`: compare every byte in the target, and send damaged files again.
    `may_supersede` raises if a job that lives trains the run in the target."""

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        threads: int = 2,
        progress: int = 0,
        compress: Compress = "none",
        repairs: bool = False,
        keep: Keep = KEEP_ALL,
        may_supersede: Callable[[], object] = lambda: None,
    ) -> None:
        self._source, self._target, self._compress = source, target, compress
        self._repairs, self._keep = repairs, keep
        self._word = array("Q", [0])
        self._progress = progress or _native.address_of(self._word)
        self._threads, self._may_supersede = threads, may_supersede
        self._sent_bytes = 0

    @property
    def _kept(self) -> Kept:
        return kept(self._keep)

    def copy(self, name: CommitName) -> Copied:
        """Commit a step of the source in the target, which is the same run.

        Raises, and commits nothing: NoSuchStepError if the source does not have the step, DamagedError if its
        bytes are not those of its records, RunError if the target has other files in its place or has been
        trained by itself.
        """
        self._sent_bytes = 0
        here, there = View.of(self._source), View.of(self._target)
        checkpoint = here.checkpoint(name.id)
        if checkpoint is None or checkpoint.step != name.step:
            raise self._no_step(name)
        try:
            if (target := there.checkpoint(name.id)) is not None:
                return self._found_there(here, name, there, target)
            return self._copied(here, name, checkpoint, there)
        except (DamagedError, FileNotFoundError):
            if not View.of(self._source).has(name):
                raise self._no_step(name) from None
            raise

    def follow(self) -> View:
        """Let the target follow the newest attempt of the source, before that has a step to copy. Returns a
        view of the target. RunError if it has been trained by itself."""
        here, there = View.of(self._source), View.of(self._target)
        if here.attempt is None or there.attempt == here.attempt:
            return there
        self._check_followed(here, there)
        steps = MIRROR.follow(secrets.token_hex(4), here.catalogue)
        return View(Stores({MIRROR.store: self._target}).run(steps), self._target)

    def _copied(self, here: View, name: CommitName, checkpoint: Checkpoint, there: View) -> Copied:
        self._check_followed(here, there)
        manifest = read_checkpoint(self._source, checkpoint)
        files = _Files(step_of(self._source, manifest))
        stores = Stores(
            {HOME.store: self._source, MIRROR.store: self._target}, copy=partial(self._send, files)
        )
        nonce = secrets.token_hex(4)
        after = stores.run(copy_checkpoint(HOME, here.catalogue, checkpoint, MIRROR, nonce, self._kept))
        if after is None:
            raise _damaged(self._source, checkpoint.folder.path, "its files are gone", checkpoint.step)
        view = View(after, self._target)
        outcome = Outcome.COPIED if after.has(checkpoint.id) else Outcome.DELETED
        dropped = tuple(sorted(set(there.checkpoints).difference(view.checkpoints)))
        return self._result(name, outcome, manifest, view, dropped)

    def _check_followed(self, here: View, there: View) -> None:
        if there.attempt not in (None, here.attempt) and not there.catalogue.ended:
            self._may_supersede()

    def _send(self, files: _Files, source: Store, target: Store, request: Copy) -> File:
        """Send one file, which has no name in the target yet."""
        contents, path = files.contents.get(request.path), request.target_path
        if contents is None:
            crashpoints.point("copy.files")
            data = files.part(request.path)
            write_once(target, path, data)
            crashpoints.point("copy.part")
            return File(path.rpartition("/")[2], len(data))
        with self._image(request.path, contents, files.step) as image:
            if is_worth(self._compress, target, contents.layout(), image):
                path += COMPRESSED
            num_bytes = self._write(request.path, path, contents, image, files.step)
        return File(path.rpartition("/")[2], num_bytes)

    # ---- a checkpoint that the target has

    def _found_there(self, here: View, name: CommitName, there: View, target: Checkpoint) -> Copied:
        """Leave a checkpoint of the target as it is if its files are there; send those that are missing, or,
        when repairing, damaged."""
        manifest = read_checkpoint(self._source, committed(here, name))
        if not self._repairs and not isinstance(whole_or_why(self._target, target), str):
            _native.fetch_add(self._progress, manifest.leaf_bytes)
            return self._result(name, Outcome.THERE, manifest, there)
        record = step_of(self._source, manifest)
        files = _Files(record)
        made = self._as_there(manifest, files, there, target)
        places, lengths = made.places(), made.paths()
        missing = set(missing_of(self._target, made))
        changed = False
        for place, row in enumerate(made.parts):
            changed |= self._mend_small(f"{made.folder.path}/{row.name}", record.part_bytes(place), name)
        for path, contents in files.contents.items():
            there_path = places[contents.shard.file]
            is_absent = there_path in missing
            changed |= self._mend(path, there_path, lengths[there_path], contents, name, is_absent)
        changed |= self._mend_small(target.manifest_path, made.to_bytes(), name)
        if self._repairs:
            change = partial(clear, checkpoint=target)
            there = View(Stores({HOME.store: self._target}).run(HOME.update(change)), self._target)
        outcome = Outcome.THERE
        if changed:
            outcome = Outcome.REPAIRED if self._repairs else Outcome.COPIED
        return self._result(name, outcome, manifest, there)

    def _result(
        self,
        name: CommitName,
        outcome: Outcome,
        manifest: Manifest,
        view: View,
        dropped: tuple[CommitName, ...] = (),
    ) -> Copied:
        return Copied(
            name=name, outcome=outcome, num_bytes=manifest.leaf_bytes,
            sent_bytes=self._sent_bytes, view=view, dropped=dropped,
        )  # fmt: skip

    def _as_there(self, manifest: Manifest, files: _Files, there: View, target: Checkpoint) -> Manifest:
        """The manifest of the target, made again from that of the source if it cannot be read. RunError if
        the target has other files of this snapshot."""
        with suppress(DamagedError):
            if (found := read_manifest(self._target, target)) is not None:
                if _names(found) != _names(manifest):
                    raise self._is_other(target.manifest_path, manifest.step)
                return found
        compressed = dict[str, FrozenFile]()
        lengths = {each.shard.file: each.shard.num_bytes for each in files.contents.values()}
        bases = dict.fromkeys((plain_name(each.name) for each in manifest.frozen), target.folder)
        for folder in {target.folder, *target.bases}:
            for entry in self._target.list(folder.path):
                name = plain_name(entry.name)
                if name in bases:
                    bases[name] = folder
                if name != entry.name:
                    compressed[name] = FrozenFile(folder, entry.name, entry.num_bytes)

        def stored(row: File | FrozenFile, folder: Folder) -> FrozenFile:
            name = plain_name(row.name)
            return compressed.get(name, FrozenFile(folder, name, lengths[name]))

        made = replace(
            manifest,
            folder=target.folder,
            shards=tuple(File(*stored(each, target.folder)[1:]) for each in manifest.shards),
            frozen=tuple(sorted(stored(each, bases[plain_name(each.name)]) for each in manifest.frozen)),
            lineage=ancestry(there.catalogue, target.id)[1:],
        )
        if checkpoint_of(made).manifest != target.manifest:
            raise self._is_other(target.manifest_path, manifest.step)
        return made

    def _mend_small(self, path: str, data: bytes, name: CommitName) -> bool:
        """Write a part or a manifest that is missing in the target, or, when repairing, another there."""
        try:
            if self._target.read(path, len(data)) == data:
                return False
        except FileNotFoundError:
            self._target.create(path, data)
            return True
        except DamagedError:
            pass  # it is longer
        if not self._repairs:
            raise self._is_not_whole(path, name)
        self._target.replace(path, data)
        return True

    def _mend(
        self,
        path: str,
        there: str,
        num_bytes: int,
        contents: Contents,
        name: CommitName,
        is_absent: bool,
    ) -> bool:
        """Send a file that is missing in the target, or, when repairing, damaged there. A file that is there
        is read: it may have rotted. `num_bytes`: the length that the target's manifest gives. `is_absent`: no
        file of this length is there."""
        if not is_absent:
            status, detail = self._verify(self._target, there, contents)
            if status == "unreadable":
                raise OSError(errno.EIO, detail, f"{self._target.url}/{there}")
            if status == "ok":
                _native.fetch_add(self._progress, contents.shard.num_bytes)
                return False
        if not self._repairs and self._target.exists(there):
            raise self._is_not_whole(there, name)
        with self._image(path, contents, name.step) as image:
            found = self._write(path, there, contents, image, name.step, replaces=True)
        if found != num_bytes:
            raise RunError(
                f"{self._target.url}/{there} was compressed to {found} bytes, and {num_bytes} were written "
                "first: another version of the package zstandard has made them. The step is not whole in the "
                "target. Repair it with that version, or copy to another place.",
                step=name.step,
                path=there,
            )
        return True

    # ---- files

    def _verify(
        self, store: Store, path: str, contents: Contents, into: memoryview | None = None
    ) -> tuple[FileStatus, str]:
        return verify_file(store, path, contents, into, threads=self._threads)

    def _write(
        self,
        path: str,
        there: str,
        contents: Contents,
        image: MemoryRange,
        step: int,
        *,
        replaces: bool = False,
    ) -> int:
        """Send the image of the file at `path`. Returns the length of the file, compressed if its name says
        so."""
        layout, num_bytes = contents.layout(), contents.shard.num_bytes
        how: dict[str, Any] = {
            "threads": self._threads, "progress": self._progress, "replaces": replaces
        }  # fmt: skip
        if there.endswith(COMPRESSED):
            written, num_bytes = write_compressed(self._target, there, layout, image, **how)
        else:
            written = self._target.write_shard(there, layout, image, **how)
        crashpoints.point("copy.written")
        # Chunks of another size than today's are covered by the digests of their leaves.
        is_alike = contents.shard.chunk_bytes != CHUNK_BYTES or written.checksums == contents.shard.checksums
        if not is_alike or tuple(written.digests) != contents.digests:
            with suppress(OSError):
                self._target.remove(there)
            raise _damaged(self._source, path, "it has changed while it was copied", step)
        self._sent_bytes += num_bytes
        return num_bytes

    @contextmanager
    def _image(self, path: str, contents: Contents, step: int) -> Iterator[MemoryRange]:
        """The image of a file of the source: the local file, or a spool file with its bytes. All bytes
        were compared with the record before: no damaged byte is sent, and a failing disk raises an error (in
        a mapping it would be a SIGBUS)."""
        num_bytes = contents.shard.num_bytes
        try:
            is_plain = not path.endswith(COMPRESSED)
            descriptor = self._source.descriptor(path, num_bytes) if is_plain else None
        except (LengthError, FileNotFoundError) as error:
            raise _damaged(self._source, path, str(error) or "it is missing", step) from error
        is_here = descriptor is not None
        descriptor = spool(num_bytes) if descriptor is None else descriptor
        try:
            if is_here:
                status, why = self._verify(self._source, path, contents)
            else:
                pages = mmap.mmap(descriptor, -(-num_bytes // PAGE) * PAGE)
                with pages, memoryview(pages) as into:
                    status, why = self._verify(self._source, path, contents, into)
            if status == "unreadable":
                raise OSError(errno.EIO if is_here else errno.EREMOTEIO, why, f"{self._source.url}/{path}")
            if status != "ok":
                raise _damaged(self._source, path, why, step)
            yield MemoryRange(descriptor, 0)
        finally:
            os.close(descriptor)

    # ---- errors

    def _no_step(self, name: CommitName) -> NoSuchStepError:
        return NoSuchStepError(
            f"{self._source.url} has no committed step {name}, or retention has deleted it. It is "
            "not committed in the target. Name a newer one.",
            step=name.step,
            path=self._source.url,
        )

    def _is_not_whole(self, path: str, name: CommitName) -> RunError:
        return RunError(
            f"{self._target.url}/{path} is damaged, and that file was not touched. `flashckpt copy "
            f"{self._source.url} {self._target.url} --step {name} --repair` reads what is there, and sends "
            "again what is damaged.",
            step=name.step,
            path=path,
        )

    def _is_other(self, path: str, step: int) -> RunError:
        return RunError(
            f"{self._target.url}/{path} names other files than step {step} of the source has: it stays, and "
            "the step was not copied. `flashckpt show` describes both. To have both, copy to a place of its "
            "own.",
            step=step,
            path=path,
        )


class _Files:
    """The files of a checkpoint of the source: the contents of shards and frozen files by path, and parts."""

    def __init__(self, record: StepRecord) -> None:
        self._record, self.step = record, record.step
        self._parts = {record.part_path(place): place for place in range(len(record.parts))}
        self.contents = {
            path: contents
            for part in record.parts
            for rank in part.ranks
            for path, contents in record.files(rank.rank)
        }

    def part(self, path: str) -> bytes:
        if path not in self._parts:
            raise damaged(path, "the manifest names it, and no part does", self.step)
        return self._record.part_bytes(self._parts[path])


def _names(manifest: Manifest) -> tuple[set[str], set[str], set[str]]:
    """The names of its parts, shards and frozen files, as the parts have them."""
    rows = manifest.parts, manifest.shards, manifest.frozen
    parts, shards, frozen = ({plain_name(each.name) for each in row} for row in rows)
    return parts, shards, frozen


def _damaged(store: Store, path: str, why: str, step: int) -> DamagedError:
    return DamagedError(
        f"{store.url}/{path} is damaged: {why}. Step {step} was not copied, other steps are as they were. "
        "Run `flashckpt verify` on the run to see which steps are whole.",
        step=step,
        path=path,
    )


def spool(num_bytes: int) -> int:
    """An unnamed temporary file with space for `num_bytes`. OSError with its folder, which belongs neither to
    the source nor to the target, if the space is missing."""
    folder = tempfile.gettempdir()
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, -(-num_bytes // PAGE) * PAGE)
        except OSError as error:
            why = f"{error.strerror}: a copied file of {num_bytes:,} bytes is kept here meanwhile"
            raise OSError(error.errno, f"{why} ($TMPDIR names another folder)", folder) from error
        return os.dup(file.fileno())


# ---- the steps of a run

Progress = Callable[[int, int], None]
"""Called with the bytes done, and the bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step. `problem` says why it could not be copied, empty if it could; `is_visible`: a resume from
    the target sees it."""

    name: CommitName
    copied: Copied | None = None
    is_visible: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCopy:
    """The steps that were copied, newest first."""

    run_id: str
    source: str
    target: str
    steps: tuple[StepResult, ...]

    @property
    def ok(self) -> bool:
        return not any(each.problem for each in self.steps)

    @property
    def sent_bytes(self) -> int:
        return sum(each.copied.sent_bytes for each in self.steps if each.copied is not None)


def copy_run(
    source: Store,
    target: Store,
    step: int | None = None,
    *,
    at: AttemptName | SnapshotId | None = None,
    all_steps: bool = False,
    threads: int = 2,
    compress: Compress = "none",
    repairs: bool = False,
    progress: Progress = lambda done, total: None,
    may_supersede: Callable[[], object] = lambda: None,
) -> RunCopy:
    """Copy a committed step: the one that a resume would take, or `step`; with `all_steps` every visible one.
    `at`: the attempt or the snapshot of `step`. Steps that are there are not sent again. `compress`: see
    `is_worth`; `repairs`: see `StepCopier`.

    For one step all errors are raised; with `all_steps` a damaged step is reported, and a step that is
    deleted meanwhile is left out. RunError if the target holds another run, was trained by itself, or one of
    the two is inside the other.
    """
    _check_apart(source, target)
    run_id = open_run(source, create=False).run_id
    chosen = _chosen(source, step, at, all_steps=all_steps)
    open_as(run_id, source, target)
    word = array("Q", [0])
    copier = StepCopier(
        source,
        target,
        threads=threads,
        progress=_native.address_of(word),
        compress=compress,
        repairs=repairs,
        may_supersede=may_supersede,
    )

    def work() -> list[StepResult]:
        steps = chosen
        while not (found := [row for each in steps if (row := copied(each))]):
            # A living job has deleted all of them and committed newer ones.
            steps = _chosen(source, step, at, all_steps=all_steps)
        return found

    def copied(each: CommitName) -> StepResult | None:
        try:
            return StepResult(name=each, copied=copier.copy(each))
        except NoSuchStepError:
            if step is not None:
                raise
            return None
        except DamagedError as error:
            if not all_steps:
                raise
            return StepResult(name=each, problem=str(error))

    total = _total(source, chosen)
    rows = watched("copy", work, lambda: progress(min(word[0], total), total))
    # After the steps, which damaged assets must not keep from being copied.
    copy_assets(source, target, repairs=repairs)
    there = View.of(target)
    return RunCopy(
        run_id=run_id,
        source=source.url,
        target=target.url,
        steps=tuple(_seen(each, there) for each in rows),
    )


def _check_apart(source: Store, target: Store) -> None:
    if not are_apart(source.url, target.url):
        raise RunError(
            f"{target.url}: the run is in {source.url}, and one of the two is inside the other: a copy "
            "would be deleted with it. Nothing was copied. Name another place, on other storage.",
            path=target.url,
        )


def open_as(run_id: str, source: Store, target: Store) -> None:
    """Make the run in a target that holds none. RunError if it holds another."""
    found = open_run(target, create=True, run_id=run_id)
    if found.run_id != run_id:
        raise RunError(
            f"{target.url} holds another run ({found.run_id}) than {source.url} ({run_id}). Nothing was "
            "changed. Copy to a place of its own.",
            path=target.url,
        )


def _chosen(
    source: Store, step: int | None, at: AttemptName | SnapshotId | None, *, all_steps: bool
) -> list[CommitName]:
    if all_steps:
        view = View.of(source)
        if found := [each for each in view.newest_first() if is_whole(view, each)]:
            return found
    return [resolve(source, step, at).name]


def _seen(row: StepResult, there: View) -> StepResult:
    is_copied = row.copied is not None and row.copied.outcome is not Outcome.DELETED
    return replace(row, is_visible=is_copied and there.is_in_lineage(row.name.id))


def _total(source: Store, chosen: list[CommitName]) -> int:
    """The bytes of all files; a frozen file counts for each step that names it."""
    view, total = View.of(source), 0
    for each in chosen:
        with suppress(DamagedError, NoSuchStepError):
            total += read_checkpoint(source, committed(view, each)).leaf_bytes
    return total
