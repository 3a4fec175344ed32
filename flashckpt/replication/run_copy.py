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
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from flashckpt import _native, crashpoints
from flashckpt.catalogue.changes import ancestry, quarantine
from flashckpt.catalogue.home import Home, checkpoint_of
from flashckpt.catalogue.mirror import copy_checkpoint
from flashckpt.catalogue.requests import Copy, Stores
from flashckpt.commit.assets import copy_assets
from flashckpt.commit.commit_step import KEEP_ALL, kept
from flashckpt.commit.lineage import resolve, until_stable
from flashckpt.commit.steps import (
    StepRecord,
    committed,
    damaged,
    is_whole,
    read_checkpoint,
    step_of,
    whole_or_why,
)
from flashckpt.commit.verification import verify_file
from flashckpt.commit.view import HOME, View, ask, open_run
from flashckpt.errors import DamagedError, NoSuchStepError, RunError
from flashckpt.format.catalogue import Checkpoint
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
    FAILED = "not copied"
    """Files of the source are damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The result of one copy. `num_bytes`: the length of the step's files; `sent_bytes`: what was sent.
    `dropped`: the steps that retention dropped in the target. `problem`: why it could not be copied, empty if
    it could. `is_visible`, of `copy_run`: a resume from the target sees it."""

    name: CommitName
    outcome: Outcome
    num_bytes: int = 0
    sent_bytes: int = 0
    dropped: tuple[CommitName, ...] = ()
    problem: str = ""
    is_visible: bool = False

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
        progress: int = 0,
        compress: Compress = "none",
        repairs: bool = False,
        keep: Keep = KEEP_ALL,
        may_supersede: Callable[[], object] = lambda: None,
    ) -> None:
        self._source, self._target, self._compress = source, target, compress
        self._repairs, self._kept = repairs, kept(keep)
        self._word = array("Q", [0])
        self._progress = progress or _native.address_of(self._word)
        self._may_supersede, self._sent_bytes = may_supersede, 0

    def copy(self, name: CommitName) -> Copied:
        """Commit a step of the source in the target, which is the same run.

        Raises, and commits nothing: NoSuchStepError if the source does not have the step, DamagedError if its
        bytes are not those of its records, or if the step in the target is not whole and nothing is repaired;
        RunError if the target has other files in its place or has been trained by itself.
        """
        self._sent_bytes = 0
        here, there = View.of(self._source), View.of(self._target)
        checkpoint, target = committed(here, name), there.checkpoint(name.id)
        dropped = tuple[CommitName, ...]()
        try:
            manifest = read_checkpoint(self._source, checkpoint)
            if target is None:
                outcome, dropped = self._copied(here, checkpoint, manifest, there)
            elif self._repairs:
                outcome = self._mended(name, manifest, there, target)
            elif isinstance(why := whole_or_why(self._target, target), str):
                raise DamagedError(
                    f"{self._target.url} has step {name.step}, which is not whole there: {why}. Nothing was "
                    f"changed. `flashckpt copy {self._source.url} {self._target.url} --step {name} --repair` "
                    "reads what is there, and sends again what is damaged or missing.",
                    step=name.step,
                    path=self._target.url,
                )
            else:
                _native.fetch_add(self._progress, manifest.leaf_bytes)
                outcome = Outcome.THERE
        except FileExistsError as error:
            raise RunError(
                f"{self._target.url}: another copy repairs step {name.step} there at this moment, and has "
                f"written {error.filename}. What it has repaired stays. Run this again when it has ended.",
                step=name.step,
                path=self._target.url,
            ) from error
        except (DamagedError, FileNotFoundError):
            committed(View.of(self._source), name)  # NoSuchStepError if retention has deleted it meanwhile
            raise
        return Copied(
            name=name,
            outcome=outcome,
            num_bytes=manifest.leaf_bytes,
            sent_bytes=self._sent_bytes,
            dropped=dropped,
        )

    def follow(self) -> View:
        """Let the target follow the newest attempt of the source, before that has a step to copy. Returns a
        view of the target. RunError if it has been trained by itself."""
        here, there = View.of(self._source), View.of(self._target)
        if here.attempt is None or there.attempt == here.attempt:
            return there
        self._check_followed(here, there)
        steps = MIRROR.follow(secrets.token_hex(4), here.catalogue)
        return View(Stores({MIRROR.store: self._target}).run(steps), self._target)

    def _copied(
        self, here: View, checkpoint: Checkpoint, manifest: Manifest, there: View
    ) -> tuple[Outcome, tuple[CommitName, ...]]:
        """Copy a checkpoint that the target does not have. Returns the steps that retention dropped there,
        too."""
        self._check_followed(here, there)
        files = _Files(step_of(self._source, manifest).check())
        stores = Stores(
            {HOME.store: self._source, MIRROR.store: self._target}, copy=partial(self._send, files)
        )
        nonce = secrets.token_hex(4)
        after = stores.run(copy_checkpoint(HOME, here.catalogue, checkpoint, MIRROR, nonce, self._kept))
        if after is None:
            raise _damaged(self._source, checkpoint.folder.path, "its files are gone", checkpoint.step)
        dropped = set(there.checkpoints).difference(View(after, self._target).checkpoints)
        return Outcome.COPIED if after.has(checkpoint.id) else Outcome.DELETED, tuple(sorted(dropped))

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

    def _mended(self, name: CommitName, manifest: Manifest, there: View, target: Checkpoint) -> Outcome:
        """Send the files of a checkpoint that the target lacks or has damaged."""
        record = step_of(self._source, manifest).check()
        files = _Files(record)
        made = self._as_there(manifest, files, there, target)
        places, lengths = made.places(), made.paths()
        missing = set(ask(self._target, HOME.missing(made)))
        # First: it is made anew from the lengths of compressed files that are there.
        changed = self._mend_small(target.manifest_path, made.to_bytes())
        for place, row in enumerate(made.parts):
            changed |= self._mend_small(f"{made.folder.path}/{row.name}", record.part_bytes(place))
        for path, contents in files.contents.items():
            there_path = places[contents.file]
            if there_path not in missing:
                status, why = verify_file(self._target, there_path, contents)
                if status == "unreadable":
                    raise OSError(errno.EIO, why, f"{self._target.url}/{there_path}")
                if status == "ok":
                    _native.fetch_add(self._progress, contents.num_bytes)
                    continue
            with self._image(path, contents, name.step) as image:
                self._remove(there_path)  # the source is whole
                found = self._write(path, there_path, contents, image, name.step)
            if found != lengths[there_path]:
                raise RunError(
                    f"{self._target.url}/{there_path} was compressed to {found} bytes, and "
                    f"{lengths[there_path]} were written first: another version of the package zstandard has "
                    "made them. The step is not whole in the target. Repair it with that version, or copy to "
                    "another place.",
                    step=name.step,
                    path=there_path,
                )
            changed = True
        ask(self._target, HOME.update(partial(quarantine, checkpoint=target)))
        return Outcome.REPAIRED if changed else Outcome.THERE

    def _as_there(self, manifest: Manifest, files: _Files, there: View, target: Checkpoint) -> Manifest:
        """The manifest of a checkpoint in the target; made anew from that of the source if it is damaged."""
        with suppress(DamagedError):
            found = read_checkpoint(self._target, target)
            if _names(found) != _names(manifest):
                raise self._is_other(target.manifest_path, manifest.step)
            return found
        lengths = {each.file: each.num_bytes for each in files.contents.values()}
        stored = dict[str, FrozenFile]()
        for folder in sorted({target.folder, *target.bases}):
            for entry in self._target.list(folder.path):
                stored[plain_name(entry.name)] = FrozenFile(folder, entry.name, entry.num_bytes)

        def row(file: File | FrozenFile) -> FrozenFile:
            name = plain_name(file.name)
            found = stored.get(name, FrozenFile(target.folder, name, 0))
            # A plain file may be cut short: its part has its length.
            is_plain = found.name == name
            return FrozenFile(found.base, name, lengths[name]) if is_plain else found

        made = replace(
            manifest,
            folder=target.folder,
            shards=tuple(File(*row(each)[1:]) for each in manifest.shards),
            frozen=tuple(sorted(map(row, manifest.frozen))),
            lineage=ancestry(there.catalogue, target.id)[1:],
        )
        if checkpoint_of(made).manifest != target.manifest:
            raise self._is_other(target.manifest_path, manifest.step)
        return made

    def _mend_small(self, path: str, data: bytes) -> bool:
        """Write a part or a manifest, unless it is in the target. Returns whether it was written."""
        with suppress(FileNotFoundError, DamagedError):  # DamagedError: it is longer
            if self._target.read(path, len(data)) == data:
                return False
        self._remove(path)
        write_once(self._target, path, data)
        return True

    def _remove(self, path: str) -> None:
        """Remove a file, which needs the right to delete only if the file exists."""
        if self._target.exists(path):
            self._target.remove(path)

    # ---- files

    def _write(self, path: str, there: str, contents: Contents, image: MemoryRange, step: int) -> int:
        """Send the image of the file at `path`. Returns the length of the file, compressed if its name says
        so."""
        layout, num_bytes = contents.layout(), contents.num_bytes
        if there.endswith(COMPRESSED):
            written, num_bytes = write_compressed(self._target, there, layout, image, progress=self._progress)
        else:
            written = self._target.write_shard(there, layout, image, progress=self._progress)
        crashpoints.point("copy.written")
        # Chunks of another size than today's are covered by the digests of their leaves.
        is_alike = contents.chunk_bytes != CHUNK_BYTES or written.checksums == contents.checksums
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
        num_bytes = contents.num_bytes
        try:
            is_plain = not path.endswith(COMPRESSED)
            descriptor = self._source.descriptor(path, num_bytes) if is_plain else None
        except (LengthError, FileNotFoundError) as error:
            raise _damaged(self._source, path, str(error) or "it is missing", step) from error
        is_here = descriptor is not None
        descriptor = spool(num_bytes) if descriptor is None else descriptor
        try:
            if is_here:
                status, why = verify_file(self._source, path, contents)
            else:
                pages = mmap.mmap(descriptor, -(-num_bytes // PAGE) * PAGE)
                with pages, memoryview(pages) as into:
                    status, why = verify_file(self._source, path, contents, into)
            if status == "unreadable":
                raise OSError(errno.EIO if is_here else errno.EREMOTEIO, why, f"{self._source.url}/{path}")
            if status != "ok":
                raise _damaged(self._source, path, why, step)
            yield MemoryRange(descriptor, 0)
        finally:
            os.close(descriptor)

    # ---- errors

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


def _names(manifest: Manifest) -> set[str]:
    """The names of its files as the parts have them."""
    return {plain_name(name) for names in manifest.files().values() for name in names}


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
class RunCopy:
    """The steps that were copied, newest first."""

    run_id: str
    source: str
    target: str
    steps: tuple[Copied, ...]

    @property
    def ok(self) -> bool:
        return not any(each.problem for each in self.steps)

    @property
    def sent_bytes(self) -> int:
        return sum(each.sent_bytes for each in self.steps)


def copy_run(
    source: Store,
    target: Store,
    step: int | None = None,
    *,
    at: AttemptName | SnapshotId | None = None,
    all_steps: bool = False,
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
    if not are_apart(source.url, target.url):
        raise RunError(
            f"{target.url}: the run is in {source.url}, and one of the two is inside the other: a copy "
            "would be deleted with it. Nothing was copied. Name another place, on other storage.",
            path=target.url,
        )
    run_id = open_run(source, create=False).run_id
    _chosen(source, step, at, all_steps=all_steps)  # before the run is made there
    check_same_run(run_id, source, open_run(target, create=True, run_id=run_id))
    word = array("Q", [0, 0])  # the bytes that were sent or found, and those of all files
    copier = StepCopier(
        source,
        target,
        progress=_native.address_of(word),
        compress=compress,
        repairs=repairs,
        may_supersede=may_supersede,
    )

    def copies() -> list[Copied]:
        chosen, found = _chosen(source, step, at, all_steps=all_steps), list[Copied]()
        word[0], word[1] = 0, _total(source, chosen)
        for each in chosen:
            try:
                found.append(copier.copy(each))
            except NoSuchStepError:
                if step is not None:
                    raise
            except DamagedError as error:
                if not all_steps:
                    raise
                found.append(Copied(name=each, outcome=Outcome.FAILED, problem=str(error)))
        return found

    rows = watched(
        "copy", lambda: until_stable(source, copies), lambda: progress(min(word[0], word[1]), word[1])
    )
    # After the steps, which damaged assets must not keep from being copied.
    copy_assets(source, target, repairs=repairs)
    seen = View.of(target).visible()
    return RunCopy(
        run_id=run_id,
        source=source.url,
        target=target.url,
        steps=tuple(replace(each, is_visible=not each.problem and each.name in seen) for each in rows),
    )


def check_same_run(run_id: str, source: Store, there: View) -> None:
    """RunError if the target holds another run than the source."""
    if there.run_id != run_id:
        raise RunError(
            f"{there.store.url} holds another run ({there.run_id}) than {source.url} ({run_id}). Nothing was "
            "changed there, and nothing is copied to it. Name a place of this run's own.",
            path=there.store.url,
        )


def _chosen(
    source: Store, step: int | None, at: AttemptName | SnapshotId | None, *, all_steps: bool
) -> list[CommitName]:
    if all_steps:
        view = View.of(source)
        if found := [each for each in view.newest_first() if is_whole(view, each)]:
            return found
    return [resolve(source, step, at).name]


def _total(source: Store, chosen: list[CommitName]) -> int:
    """The bytes of all files; a frozen file counts for each step that names it."""
    view, total = View.of(source), 0
    for each in chosen:
        with suppress(DamagedError, NoSuchStepError):
            total += read_checkpoint(source, committed(view, each)).leaf_bytes
    return total
