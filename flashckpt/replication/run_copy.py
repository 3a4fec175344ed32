"""Copies committed steps of a run to another store, byte for byte, newest first.

`copy_run` owns the choice of steps and the target's run.json. `copy_in_order` owns the order of the writes:
frozen instances, shards and parts, attempts, commit record, check. `StepCopier` owns how files are sent: a
part stands in the target only for bytes that were compared with it. Deletes only its own temporary files, its
own record where a deletion in the target has removed the data meanwhile, and, when asked to repair, damaged
files. `alive` is copied only of an attempt that has ended: a copy must not look like a living trainer.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum

from flashckpt import _native, crashpoints
from flashckpt.commit import attempts
from flashckpt.commit.assets import copy_assets
from flashckpt.commit.attempts import open_run
from flashckpt.commit.catalogue import Catalogue
from flashckpt.commit.commit_step import create_record
from flashckpt.commit.lineage import check_records, resolve
from flashckpt.commit.steps import StepRecord, is_whole, missing_files, missing_frozen, read_record, read_step
from flashckpt.commit.verification import FileStatus, verify_file
from flashckpt.errors import DamagedError, NoSuchStepError, RunError
from flashckpt.format.layout import PAGE
from flashckpt.format.names import (
    FROZEN_FOLDER,
    AttemptName,
    CommitName,
    SnapshotId,
    alive_path,
    claim_path,
    start_path,
)
from flashckpt.format.records import (
    CHUNK_BYTES,
    Alive,
    Claim,
    CommitRecord,
    Contents,
    Part,
    RankRecord,
    Start,
)
from flashckpt.options import Compress
from flashckpt.store import are_apart
from flashckpt.store.base import LengthError, MemoryRange, Read, Store, Written
from flashckpt.store.compressed_store import compressing
from flashckpt.store.read_plan import read_shard
from flashckpt.threads import start_thread

# ---- the records of attempts: a store that was trained on its own is never mixed with another


@dataclass(frozen=True, slots=True)
class AttemptRecords:
    """The bytes of an attempt's claim and start record. `start` is empty for one that never started."""

    name: AttemptName
    claim: bytes
    start: bytes
    ended: str

    @classmethod
    def of(cls, store: Store, name: AttemptName) -> AttemptRecords | None:
        """Read them; None if the claim was deleted with its attempt. DamagedError."""
        try:
            attempts.read_claim(store, name)
            claim, start = store.read(claim_path(name.number), Claim.MAX_BYTES), b""
            if attempts.read_start(store, name) is not None:
                start = store.read(start_path(name), Start.MAX_BYTES)
        except FileNotFoundError:
            return None
        alive = attempts.alive(store, name)
        return cls(name, claim, start, "" if alive is None else alive.ended)


def needed(source: Catalogue, step_of: AttemptName) -> list[AttemptRecords]:
    """The records by which a start finds a step of attempt `step_of`, oldest first: those of this attempt, of
    the newest started attempt, and of its lineage. DamagedError if those of the newest are damaged."""
    found = []
    for name in sorted({step_of, *(bound.attempt for bound in source.lineage)}):
        try:
            records = AttemptRecords.of(source.store, name)
        except DamagedError:
            if name == source.newest_started:
                raise
            continue  # the start.json of the newest attempt has the lineage
        if records is not None and records.start:
            found.append(records)
    return found


def check_one_history(
    source: Catalogue, target: Catalogue, records: list[AttemptRecords], may_supersede: Callable[[], None]
) -> None:
    """RunError if the target has attempts with another history, or with steps that these records would hide.
    `may_supersede` raises if a living attempt of the target must not be followed by a newer one."""
    if not records:
        return
    for each in records:
        _check_alike(target.store, each)
    newest = target.newest_claimed
    if newest is None or records[-1].name.number <= newest.number:
        return
    known = {*source.attempts, *(bound.attempt for bound in source.lineage), *(each.name for each in records)}
    is_foreign = newest not in known and newest == target.newest_started
    if is_foreign and not all(source.is_in_lineage(each.id) for each in target.visible()):
        raise _other_history(target.store, newest)
    alive = attempts.alive(target.store, newest)
    if alive is not None and not alive.ended:
        may_supersede()


def bring(target: Store, records: list[AttemptRecords]) -> None:
    """Create the records in the target, oldest first. RunError if a record exists and differs."""
    for each in records:
        if not target.exists(start_path(each.name)) or not target.exists(claim_path(each.name.number)):
            target.create(claim_path(each.name.number), each.claim)
            _check_alike(target, each)
            target.create(start_path(each.name), each.start)
        if each.ended and attempts.alive(target, each.name) is None:
            target.create(alive_path(each.name), Alive(count=0, ended=each.ended).to_bytes())
        _check_alike(target, each)


def _check_alike(target: Store, records: AttemptRecords) -> None:
    for path, data in (
        (claim_path(records.name.number), records.claim),
        (start_path(records.name), records.start),
    ):
        try:
            found = target.read(path, Start.MAX_BYTES)
        except FileNotFoundError:
            continue
        except DamagedError as error:
            raise DamagedError(f"{target.url}: {error}", path=path) from error
        if found != data:
            raise _other_history(target, records.name, path)


def _other_history(target: Store, name: AttemptName, path: str = "") -> RunError:
    what = f"{path} is another there" if path else f"the source has no attempt {name}"
    return RunError(
        f"{target.url} has been trained by itself: {what}. Nothing was changed there. Copy to a place of its "
        "own.",
        path=target.url,
    )


# ---- one committed step

_TRIES = 4
_SHOWN = 8
_TEMPORARY = re.compile(r"\.((?:shard-)?[0-9a-f-]+\.safetensors)\.[0-9a-f]{16}\.tmp")

# The newest started attempt of the source and the attempt of a step, whose records are in the target.
Alike = set[tuple[AttemptName | None, AttemptName]]


class Outcome(Enum):
    COPIED = "copied"
    THERE = "there already"
    DELETED = "deleted there"
    """The target is deleting the step: its tombstone stands."""
    REPAIRED = "repaired"
    """Damaged files of the target were sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The result of one copy. `num_bytes`: the length of the step's files; `sent_bytes`: what was sent.
    `catalogue`: that of the target by which the copy was checked."""

    name: CommitName
    outcome: Outcome
    num_bytes: int
    sent_bytes: int
    catalogue: Catalogue = field(compare=False, repr=False)

    @property
    def step(self) -> int:
        return self.name.step


def copy_in_order(
    source: Store,
    target: Store,
    name: CommitName,
    send: Callable[[CommitRecord], None],
    *,
    alike: Alike | None = None,
    may_supersede: Callable[[], None] = lambda: None,
) -> tuple[Outcome, Catalogue]:
    """Copy one committed step to a store that holds the same run. `send` writes its frozen instances, shards
    and parts, and may skip existing ones. `alike`: attempts whose records an earlier call has compared; this
    call adds to it. `may_supersede`: as of `check_one_history`. Returns the outcome with the catalogue of the
    target by which it was checked.

    FileNotFoundError if the source does not have the step, or is deleting it. RunError if the target deletes
    files of it meanwhile. DamagedError.
    """
    home, there = Catalogue.of(source), Catalogue.of(target)
    record = read_record(source, name)
    if record is None or name not in home.commits:
        raise FileNotFoundError(errno.ENOENT, "no such committed step", name.path)
    lineage = home.newest_started, name.attempt
    records = [] if alike is not None and lineage in alike else needed(home, name.attempt)
    check_one_history(home, there, records, may_supersede)
    if name.id in there.tombstones:
        return Outcome.DELETED, there
    send(record)
    bring(target, records)
    if alike is not None:
        alike.add(lineage)
    crashpoints.point("copy.records")
    if lost := missing_frozen(target, record.frozen):
        raise _gone(target, lost[0], name.step)
    create_record(target, record)
    return _checked(target, record)


def _checked(target: Store, record: CommitRecord) -> tuple[Outcome, Catalogue]:
    """Check a copy after its record was created: a deletion in the target may have removed the files as
    uncommitted."""
    there = Catalogue.of(target)
    lost = missing_files(target.at_once(), record)
    if set(lost) >= set(record.data_paths()):
        target.remove(record.name.path)
    if record.name.id in there.tombstones:
        return Outcome.DELETED, there
    if lost or record.name not in there.commits:
        raise _gone(target, lost[0] if lost else record.name.path, record.name.step)
    return Outcome.COPIED, there


class StepCopier:
    """Copies steps of one run. `progress`: 0, or the address of a u64 that grows by the bytes sent or found.
    `compress`: see `Compression`. `repairs`: compare every byte in the target, and send damaged files again.
    `may_supersede`: as of `check_one_history`."""

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        threads: int = 2,
        progress: int = 0,
        compress: Compress = "none",
        repairs: bool = False,
        may_supersede: Callable[[], None] = lambda: None,
    ) -> None:
        self._source, self._target = source, compressing(target, compress)
        self._repairs, self._has_replaced, self._was_there = repairs, False, False
        self._word = array("Q", [0])
        self._progress = progress or _native.address_of(self._word)
        self._threads, self._may_supersede = threads, may_supersede
        self._frozen: dict[str, Contents] = {}  # instances that stand in the target, by their paths
        self._alike: Alike = set()
        self._sent_bytes, self._compared = 0, set[str]()

    def copy(self, name: CommitName) -> Copied:
        """Commit a step of the source in the target, which is the same run.

        Raises, and commits nothing: NoSuchStepError if the source does not have the step, DamagedError if its
        bytes are not those of its record, RunError if the target has other files in its place.
        """
        self._sent_bytes, self._compared = 0, set()
        self._has_replaced = self._was_there = False
        record: list[CommitRecord] = []

        def send(found: CommitRecord) -> None:
            record.append(found)
            self._send_step(found)

        try:
            outcome, catalogue = copy_in_order(
                self._source,
                self._target,
                name,
                send,
                alike=self._alike,
                may_supersede=self._may_supersede,
            )
        except (DamagedError, FileNotFoundError):
            if name not in Catalogue.of(self._source).commits:
                raise NoSuchStepError(
                    f"{self._source.url} has no committed step {name}, or retention has deleted it. It is "
                    "not committed in the target. Name a newer one.",
                    step=name.step,
                    path=self._source.url,
                ) from None
            raise
        if outcome is Outcome.COPIED and self._has_replaced:
            outcome = Outcome.REPAIRED
            self._remove_quarantines(name)
        elif outcome is Outcome.COPIED and self._was_there and not self._sent_bytes:
            outcome = Outcome.THERE
        files = [each for found in record for each in (*found.shards, *found.frozen)]
        return Copied(
            name=name,
            outcome=outcome,
            num_bytes=sum(each.num_bytes for each in files),
            sent_bytes=self._sent_bytes,
            catalogue=catalogue,
        )

    def bring_lineage(self) -> None:
        """Copy the records of the newest started attempt of the source and of its lineage, before its first
        commit. RunError as of `copy`."""
        home = Catalogue.of(self._source)
        newest = home.newest_started
        if newest is not None and (newest, newest) not in self._alike:
            records = needed(home, newest)
            check_one_history(home, Catalogue.of(self._target), records, self._may_supersede)
            bring(self._target, records)
            self._alike.add((newest, newest))

    def _send_step(self, record: CommitRecord) -> None:
        """Send the files that are missing in the target, or, when repairing, damaged there."""
        self._was_there = self._stands(record)
        if self._was_there and not self._repairs:
            return
        step = read_step(self._source, record.name)
        if step.record != record:
            raise _damaged(
                self._source, record.name.path, "it has changed while it was read", record.name.step
            )
        for place in range(len(step.parts)):
            self._copy_part(step, place)
        if self._target.capabilities.rename:
            self._clear(record)

    def _stands(self, record: CommitRecord) -> bool:
        """Whether the target has the step, with the length of every file. Removes a damaged record when
        repairing."""
        name = record.name
        try:
            found = read_record(self._target, name)
        except DamagedError as error:
            if not self._repairs:
                why = f"{error} {self._advice(name)}"
                raise _damaged(self._target, name.path, why, name.step) from error
            self._has_replaced = True
            self._target.remove(name.path)
            return False
        if found is not None and found != record:
            raise self._is_whole_other(name.path, name.step)
        return found is not None and not missing_files(self._target, record)

    def _remove_quarantines(self, name: CommitName) -> None:
        """Remove the quarantines of a step whose bytes were all compared."""
        there = Catalogue.of(self._target)
        self._target.remove_files(path for each, path in there.quarantines if each == name)

    # ---- parts and files

    def _copy_part(self, record: StepRecord, place: int) -> None:
        part, data = record.parts[place], record.part_bytes(place)
        path = f"{record.name.id.data_folder}/{part.file}"
        is_there = self._has_part(path, data, record.name)
        paths = [file for rank in part.ranks for file, _ in record.files(rank.rank)]
        folders = {file.rpartition("/")[0] for file in paths}
        sizes = {f"{each}/{e.name}": e.num_bytes for each in folders for e in self._target.list(each)}
        for rank in part.ranks:
            for file, contents in record.files(rank.rank):
                self._send(record, rank, file, contents, sizes.get(file))
        if not is_there:
            crashpoints.point("copy.files")
            if self._repairs and self._target.exists(path):
                self._has_replaced = True
                self._target.remove(path)
            if not self._target.create(path, data):
                self._has_part(path, data, record.name)
            crashpoints.point("copy.part")

    def _has_part(self, path: str, data: bytes, name: CommitName) -> bool:
        """Whether the target has the part. When repairing, a damaged part counts as missing."""
        try:
            found = self._target.read(path, Part.MAX_BYTES)
            if found == data:
                return True
            Part.from_bytes(found, path)
        except FileNotFoundError:
            return False
        except DamagedError as error:
            if self._repairs:
                return False
            raise self._is_not_whole(path, name) from error
        raise self._is_whole_other(path, name.step)

    def _send(
        self, record: StepRecord, rank: RankRecord, path: str, contents: Contents, size: int | None
    ) -> None:
        """Send a file if needed. `size`: its length in the target, None if it is missing. A file that this
        process did not send or compare is read: it may have rotted."""
        num_bytes, is_frozen = contents.shard.num_bytes, contents is rank.constants
        is_there = size is not None
        if not is_there:
            self._sent_bytes += self._write(path, contents, record.name)
        else:
            is_known = path in self._compared or (is_frozen and self._frozen.get(path) == contents)
            if not (is_known and size == num_bytes) and not self._is_whole(path, contents):
                if not self._repairs:
                    raise self._is_not_whole(path, record.name)
                is_there, self._has_replaced = False, True
                self._sent_bytes += self._write(path, contents, record.name, replaces=True)
        if is_there:
            _native.fetch_add(self._progress, num_bytes)
        self._compared.add(path)
        if is_frozen:
            self._frozen[path] = contents

    def _is_whole(self, path: str, contents: Contents) -> bool:
        status, detail = self._verify(self._target, path, contents)
        if status == "unreadable":
            raise OSError(errno.EIO, detail, f"{self._target.url}/{path}")
        return status == "ok"

    def _verify(self, store: Store, path: str, contents: Contents) -> tuple[FileStatus, str]:
        return verify_file(store, path, contents, threads=self._threads)

    def _write(self, path: str, contents: Contents, name: CommitName, *, replaces: bool = False) -> int:
        """Send a file. Returns the number of bytes sent. A local file gets its name once its bytes were
        compared, an object at once. `replaces`: remove the existing file once the source's bytes were
        compared."""
        step = name.step
        is_beside = self._target.capabilities.rename
        with self._image(path, contents, step) as descriptor:
            for _ in range(_TRIES):
                if is_beside:
                    if sent_bytes := self._write_beside(path, contents, descriptor, step, replaces=replaces):
                        return sent_bytes
                else:
                    if replaces:
                        self._target.remove(path)
                    with suppress(FileExistsError):
                        return self._write_as(path, path, contents, descriptor, step)
                if self._target.exists(path):
                    # Another copier, which may be dead, has written it.
                    if not self._is_whole(path, contents):
                        raise self._is_not_whole(path, name)
                    return 0
                is_beside = False
        raise _gone(self._target, path, step)

    def _write_beside(
        self, path: str, contents: Contents, descriptor: int, step: int, *, replaces: bool
    ) -> int:
        """Send to a temporary name, then link. Returns the bytes sent; 0 if the name was taken meanwhile or
        the target has no links."""
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"
        try:
            sent_bytes = self._write_as(temporary, path, contents, descriptor, step)
            crashpoints.point("copy.written")
            if replaces:
                self._target.remove(path)
            return sent_bytes if self._target.copy(temporary, path) else 0
        except FileNotFoundError:
            # Another copier has written the same file, and removed temporary files.
            return 0
        finally:
            with suppress(OSError):
                self._target.remove(temporary)

    def _write_as(self, name: str, path: str, contents: Contents, descriptor: int, step: int) -> int:
        written = self._target.write_shard(
            name,
            contents.layout(),
            MemoryRange(descriptor, 0),
            threads=self._threads,
            progress=self._progress,
        )
        try:
            if wrong := self._unlike(name, contents, written):
                raise _damaged(self._source, path, wrong, step)
        except BaseException:
            with suppress(OSError):
                self._target.remove(name)
            raise
        return contents.shard.num_bytes if written.stored_bytes is None else written.stored_bytes

    def _unlike(self, name: str, contents: Contents, written: Written) -> str:
        """The difference between the written bytes and the record, in words; empty if they are equal."""
        if contents.shard.chunk_bytes != CHUNK_BYTES:
            return self._verify(self._target, name, contents)[1]
        bad = [] if written.checksums == contents.shard.checksums else [0]
        return _words(Read(digests=written.digests, bad_chunks=bad), contents)

    @contextmanager
    def _image(self, path: str, contents: Contents, step: int) -> Iterator[int]:
        """A file of the source as a descriptor: the local file, or a spool file with its bytes. All bytes
        were compared with the record before: no damaged byte is sent, and a failing disk raises an error (in
        a mapping it would be a SIGBUS)."""
        num_bytes, wrong = contents.shard.num_bytes, ""
        try:
            descriptor = self._source.descriptor(path, num_bytes)
        except (LengthError, FileNotFoundError) as error:
            raise _damaged(self._source, path, str(error) or "it is missing", step) from error
        is_here = descriptor is not None
        descriptor = spool(num_bytes) if descriptor is None else descriptor
        try:
            if not is_here:
                wrong = self._fetch(path, contents, descriptor)
            else:
                status, wrong = self._verify(self._source, path, contents)
                if status == "unreadable":
                    raise OSError(errno.EIO, wrong, f"{self._source.url}/{path}")
            if wrong:
                raise _damaged(self._source, path, wrong, step)
            yield descriptor
        finally:
            os.close(descriptor)

    def _fetch(self, path: str, contents: Contents, descriptor: int) -> str:
        """Read a file of the source into the spool file. Returns what is wrong with it, in words."""
        with mmap.mmap(descriptor, -(-contents.shard.num_bytes // PAGE) * PAGE) as memory:
            view = memoryview(memory)
            try:
                found = read_shard(self._source, path, contents, view, threads=self._threads)
            except FileNotFoundError:
                return "it is missing"
            except LengthError as error:
                return str(error)
            finally:
                view.release()
        return _words(found, contents)

    def _clear(self, record: CommitRecord) -> None:
        """Remove temporary files of killed copiers, if their final files exist."""
        for folder in (record.name.id.data_folder, *([FROZEN_FOLDER] if record.frozen else [])):
            with suppress(OSError):
                names = {each.name for each in self._target.list(folder)}
                for name in names:
                    if (match := _TEMPORARY.fullmatch(name)) is not None and match[1] in names:
                        self._target.remove(f"{folder}/{name}")

    # ---- errors

    def _is_not_whole(self, path: str, name: CommitName) -> RunError:
        return RunError(
            f"{self._target.url}/{path} is not whole: it is damaged, or another copy writes it now. Nothing "
            f"of step {name.step} was published there, and that file was not touched. If no other copy runs: "
            f"{self._advice(name)}",
            step=name.step,
            path=path,
        )

    def _is_whole_other(self, path: str, step: int) -> RunError:
        """The error for a file that is not damaged: it is never replaced."""
        return RunError(
            f"{self._target.url}/{path} differs from the file that step {step} of the source has under this "
            "name, and is not damaged: it stays, and the step was not published there. `flashckpt show` "
            "describes both. To have both, copy to a place of its own.",
            step=step,
            path=path,
        )

    def _advice(self, name: CommitName) -> str:
        return (
            f"`flashckpt copy {self._source.url} {self._target.url} --step {name} --repair` reads what is "
            "there, and sends again what is damaged."
        )


def _gone(target: Store, path: str, step: int) -> RunError:
    return RunError(
        f"{target.url}/{path} was deleted by another process while step {step} was copied. The step is not "
        "committed there. Copy again.",
        step=step,
        path=path,
    )


def _words(found: Read, contents: Contents) -> str:
    """What is wrong, empty where nothing is."""
    leaves = ", ".join(found.wrong_leaves(contents)[:_SHOWN])
    if leaves:
        return f"not the bytes that were captured: {leaves}"
    return "chunks do not have their checksums" if found.bad_chunks else ""


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
_POLL_S = 0.1


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
    may_supersede: Callable[[], None] = lambda: None,
) -> RunCopy:
    """Copy a committed step: the one that a resume would take, or `step`; with `all_steps` every visible one.
    `at`: the attempt or the snapshot of `step`. Existing files are not sent again. `compress`: see
    `Compression`; `repairs`: see `StepCopier`.

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
        if not all_steps and step is None:
            return [_newest(source, copier)]
        steps = chosen
        while not (found := [row for each in steps if (row := _one(copier, each, reports=all_steps))]):
            # A living job has deleted all of them and committed newer ones.
            steps = _chosen(source, step, at, all_steps=all_steps)
        return found

    rows = _watched(work, word, _total(source, chosen), progress)
    # After the steps, which damaged assets must not keep from being copied.
    copy_assets(source, target, repairs=repairs)
    there = Catalogue.of(target)
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
    """Create run.json in a target that holds no run. RunError if it holds another."""
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
        check_records(source)
        catalogue = Catalogue.of(source)
        if found := [each for each in catalogue.newest_first() if is_whole(catalogue.store, each)]:
            return found
    return [resolve(source, step, at).name]


def _newest(source: Store, copier: StepCopier) -> StepResult:
    """Copy the newest step. If a living job deletes it meanwhile, copy a newer one."""
    while True:
        name = resolve(source).name
        try:
            return StepResult(name=name, copied=copier.copy(name))
        except NoSuchStepError:
            continue


def _one(copier: StepCopier, each: CommitName, *, reports: bool) -> StepResult | None:
    try:
        return StepResult(name=each, copied=copier.copy(each))
    except NoSuchStepError:
        if not reports:
            raise
        return None
    except DamagedError as error:
        if not reports:
            raise
        return StepResult(name=each, problem=str(error))


def _seen(row: StepResult, there: Catalogue) -> StepResult:
    is_copied = row.copied is not None and row.copied.outcome is not Outcome.DELETED
    return replace(row, is_visible=is_copied and there.is_in_lineage(row.name.id))


def _total(source: Store, chosen: list[CommitName]) -> int:
    """The bytes of all files; a frozen instance counts for each step that names it."""
    total = 0
    for each in chosen:
        with suppress(DamagedError):
            if (record := read_record(source, each)) is not None:
                total += sum(file.num_bytes for file in (*record.shards, *record.frozen))
    return total


def _watched(
    work: Callable[[], list[StepResult]], word: array[int], total: int, progress: Progress
) -> list[StepResult]:
    """Run `work` in a thread, for which an interrupt does not wait, and report the progress."""
    found: list[StepResult] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.extend(work())
        except BaseException as error:
            errors.append(error)

    thread = start_thread("flashckpt-copy", run)
    while thread.is_alive():
        thread.join(_POLL_S)
        progress(min(word[0], total), total)
    if errors:
        raise errors[0]
    return found
