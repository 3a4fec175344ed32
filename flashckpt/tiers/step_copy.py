"""One committed step from one store to another, byte for byte: files, part after part, attempts, manifest.

Owns what may be taken for sent already, and that a part stands in the target only for bytes that were
compared with it. Deletes nothing but what it wrote itself and nobody reads, and, where it is asked to repair,
what is damaged. The order is that of
docs/commit.md: whoever is killed leaves a step that is not there, and the next copier goes on from it.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum

from flashckpt import _native, crashpoints
from flashckpt.commit.attempts import newest_started
from flashckpt.commit.constants_files import Going, buried_constants
from flashckpt.commit.lineage import VisibleStep, everything, has_manifest
from flashckpt.commit.step_parts import KnownHeads, part_paths
from flashckpt.commit.steps import (
    Committed,
    StepRecord,
    commit,
    missing_files,
    publish_manifest,
    read_manifest,
    read_step,
    stands_compressed,
)
from flashckpt.commit.verification import FileStatus, verify_file
from flashckpt.errors import DamagedError, NoSuchStepError, RunError
from flashckpt.format.layout import PAGE
from flashckpt.format.names import (
    MARK,
    AttemptName,
    constants_path,
    manifest_path,
    part_keeper,
    step_attempt_folder,
)
from flashckpt.format.records import CHUNK_BYTES, Contents, Manifest, Part, RankRecord, Tombstone, manifest_of
from flashckpt.options import Compress
from flashckpt.store.base import LengthError, MemoryRange, Read, Store, Written
from flashckpt.store.compressed_store import compressing
from flashckpt.tiers.attempt_records import AttemptRecords, bring, check_one_history, needed
from flashckpt.tiers.sender_mark import SenderMark
from flashckpt.tiers.spool import spool

_TRIES = 4
_SHOWN = 8
_TEMPORARY = re.compile(r"\.((?:shard|constants)-[0-9a-f-]+\.safetensors)\.[0-9a-f]{16}\.tmp")


class Outcome(Enum):
    COPIED = "copied"
    THERE = "there already"
    PART = "waits for the other nodes"
    """What this node's own disk has of it is there, and not yet what those of other nodes have."""
    BURIED = "deleted there"
    """A tombstone stands there: retention, or somebody, has deleted the step, and it stays deleted."""
    REPAIRED = "repaired"
    """What was damaged there was sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What became of one step. `num_bytes` are those of its files, `sent_bytes` those that were sent now."""

    step: int
    attempt: AttemptName
    outcome: Outcome
    num_bytes: int
    sent_bytes: int


class StepCopier:
    """Copies steps of one run. `progress`: 0, or the address of a u64 that grows by the bytes that are done
    with, sent or found there. `compress`: whether shards stand compressed in the target, see `Compression`.
    `repairs`: every byte of what stands in the target is compared, and what is damaged is sent again.
    `may_supersede` as for `check_one_history`. `joins`: the target is of all ranks, and where the source has
    some alone, on a node's own disk, their parts go there beside those of other nodes: whoever finds all
    of them commits the step, by the rule of any commit. Else a part of a run is copied as such."""

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
        joins: bool = False,
    ) -> None:
        self._repairs, self._has_replaced = repairs, False
        self._joins = joins
        self._source, self._plain, self._compressing = source, target, compressing(target, compress)
        self._target = target
        # Bytes that are done with, and those that were read to be compared.
        self._words = array("Q", [0]), array("Q", [0])
        done, self._reading = (_native.address_of(each) for each in self._words)
        self._progress = progress or done
        self._threads, self._may_supersede = threads, may_supersede
        self._mark: SenderMark | None = None
        self._heads = KnownHeads()
        self._known: dict[str, Contents] = {}  # constants that stand in the target, by their path
        # Attempts whose records are alike in both, with all that the newest went on from: they never change.
        self._alike: set[tuple[AttemptName | None, AttemptName]] = set()
        self._sent_bytes, self._compared = 0, set[str]()

    def copy(self, step: int, attempt: AttemptName) -> Copied:
        """Commit a step of the source in the target, which is the same run.

        NoSuchStepError where the source has not got it, or not any more; DamagedError where its bytes are not
        those of its record; RunError where the target holds something else in its place. Then nothing of the
        step is to be seen in the target that was not before.
        """
        self._sent_bytes, self._compared, self._has_replaced = 0, set(), False
        try:
            return self._copied(step, attempt)
        except (DamagedError, FileNotFoundError):
            if not has_manifest(self._source, VisibleStep(step, attempt)):
                raise NoSuchStepError(
                    f"step {step} of attempt {attempt} was deleted in {self._source.url} while it was "
                    "copied. It is not committed in the target. Name a newer one.",
                    step=step,
                    path=self._source.url,
                ) from None
            raise

    def bring_lineage(self) -> None:
        """Bring the records of the newest attempt that has started in the source, and of those behind it,
        though it may have no step yet: who has gone on many times since the last copy is still known there.
        RunError as of `copy`."""
        newest = newest_started(self._source)
        if newest is not None and (newest, newest) not in self._alike:
            records = self._records(newest)
            check_one_history(self._source, self._target, records, self._may_supersede)
            bring(self._target, records)
            self._alike.add((newest, newest))

    def meet(self, step: int, attempt: AttemptName, seen: Store) -> Outcome:
        """Commit a step of which this node's part is there, if those of all others are. `seen`: the look at
        the target that shows them. Raises as `copy` and `commit` do."""
        record = read_step(self._source, step, attempt)
        self._target = self._compressing
        return self._joined(record.manifest, seen)

    def _records(self, step_of: AttemptName) -> list[AttemptRecords]:
        found = needed(self._source, step_of)
        return [each.of_all_ranks() for each in found] if self._joins else found

    def _is_part(self, manifest: Manifest) -> bool:
        """Whether a manifest of the source is one of some ranks, of a step that is to be one of all."""
        return self._joins and manifest.ranks is not None

    def _copied(self, step: int, attempt: AttemptName) -> Copied:
        record, path = read_step(self._source, step, attempt), manifest_path(step, attempt)
        data = self._source.read(path, Manifest.MAX_BYTES)
        if manifest_of(data, path) != record.manifest:
            raise _damaged(self._source, path, "it has changed while it was read", step)
        # The rows of a manifest of the first format have no meaning in another one.
        self._target = self._compressing if record.manifest.format > 1 else self._plain
        lineage = newest_started(self._source), attempt
        records = [] if lineage in self._alike else self._records(attempt)
        check_one_history(self._source, self._target, records, self._may_supersede)
        standing = outcome = self._standing(record.manifest)
        if self._repairs and standing is Outcome.THERE:
            outcome = Outcome.COPIED
        if outcome is Outcome.COPIED:
            self._copy_parts(record)
        bring(self._target, records)
        self._alike.add(lineage)
        crashpoints.point("copy.records")
        if outcome is Outcome.COPIED and self._is_part(record.manifest):
            outcome = self._joined(record.manifest)
        elif outcome is Outcome.COPIED:
            outcome = self._publish(*self._as_it_stands(record.manifest, data))
        if outcome is Outcome.COPIED:
            outcome = self._completed(record)
        if outcome is Outcome.COPIED and self._has_replaced:
            outcome = Outcome.REPAIRED
            self._remove_marks(record)
        elif outcome is Outcome.COPIED and standing is Outcome.THERE and not self._sent_bytes:
            outcome = standing
        if self._target.capabilities.rename:
            self._clear(record.manifest)
        sizes = [*record.manifest.shards, *record.manifest.constants]
        return Copied(
            step=step,
            attempt=attempt,
            outcome=outcome,
            num_bytes=sum(each.num_bytes for each in sizes),
            sent_bytes=self._sent_bytes,
        )

    def _standing(self, manifest: Manifest) -> Outcome:
        """COPIED where there is something to do."""
        path = manifest_path(manifest.step, manifest.attempt)
        try:
            found = read_manifest(self._target, manifest.step, manifest.attempt)
        except DamagedError as error:
            if self._repairs:
                return Outcome.COPIED
            why = f"{error} {self._advice(manifest.step)}"
            raise _damaged(self._target, path, why, manifest.step) from error
        if isinstance(found, Tombstone):
            return Outcome.BURIED
        if found is not None and not self._is_of(found, manifest):
            raise self._is_whole_other(path, manifest.step)
        if found is not None and not found.compressed:
            self._target = self._plain  # what is put back is what its manifest says
        is_there = found is not None and not missing_files(self._target, manifest)
        return Outcome.THERE if is_there else Outcome.COPIED

    def _is_of(self, found: Manifest, manifest: Manifest) -> bool:
        """Whether a manifest of the target is that of the source, or lists its parts beside those of all
        other ranks."""
        if not self._is_part(manifest):
            return found == manifest
        is_whole = found.ranks is None and found.world == manifest.world
        return is_whole and set(found.parts).issuperset(manifest.parts)

    def _joined(self, manifest: Manifest, seen: Store | None = None) -> Outcome:
        step, attempt, world, known = manifest.step, manifest.attempt, manifest.world, self._heads
        if self._repairs:
            self._remove_damaged_manifest(manifest)
        found = commit(self._target, step, attempt, world, seen=seen, is_copy=True, known=known)
        if found is Committed.WAITING:
            return Outcome.PART
        return Outcome.COPIED if found else Outcome.BURIED

    def _as_it_stands(self, manifest: Manifest, data: bytes) -> tuple[Manifest, bytes]:
        """The manifest for the target, where other files may be compressed than in the source."""
        is_compressed = stands_compressed(self._target, self._target, manifest)
        if is_compressed == manifest.compressed:
            return manifest, data
        manifest = replace(manifest, compressed=is_compressed)
        return manifest, manifest.to_bytes()

    def _publish(self, manifest: Manifest, data: bytes) -> Outcome:
        path = manifest_path(manifest.step, manifest.attempt)
        look = self._target.at_once()
        # In this order: what is to go is gone before the record of it is.
        going = buried_constants(look, manifest.attempt, (each.file for each in manifest.constants))
        if going and not self._is_published(manifest):
            raise self._may_go(going[0], manifest.step)
        if missing := missing_files(look, manifest):
            raise self._gone(missing[0], manifest.step)
        if self._repairs:
            self._remove_damaged_manifest(manifest)
        try:
            committed = publish_manifest(self._target, manifest, data)
        except DamagedError as error:
            if self._is_published(manifest):
                return Outcome.COPIED
            raise self._gone(path, manifest.step) from error
        if committed is Committed.WAITING:
            raise self._gone(path, manifest.step)
        return Outcome.COPIED if committed else Outcome.BURIED

    def _is_published(self, manifest: Manifest) -> bool:
        """Whether this very manifest stands in the target. Nobody removes constants that it names, whatever
        he has written down: he looks once more before he does."""
        with suppress(DamagedError):
            return read_manifest(self._target, manifest.step, manifest.attempt) == manifest
        return False

    def _remove_damaged_manifest(self, manifest: Manifest) -> None:
        try:
            read_manifest(self._target, manifest.step, manifest.attempt)
        except DamagedError:
            self._has_replaced = True
            self._target.remove(manifest_path(manifest.step, manifest.attempt))

    def _remove_marks(self, record: StepRecord) -> None:
        """Each byte of the step is known to be right there, whatever a host has found before."""
        folder = step_attempt_folder(record.step, record.attempt)
        found = [each.name for each in self._target.list(folder) if MARK.fullmatch(each.name)]
        self._target.remove_files(f"{folder}/{name}" for name in found)

    def _completed(self, record: StepRecord) -> Outcome:
        """Send again what went before the manifest stood: a recovery takes for debris what no part names yet.
        Now it finds the manifest, and takes no more."""
        for _ in range(_TRIES):
            outcome = self._standing(record.manifest)
            if outcome is not Outcome.COPIED:
                return Outcome.COPIED if outcome is Outcome.THERE else outcome
            self._copy_parts(record)
        raise self._gone(manifest_path(record.step, record.attempt), record.step)

    # ---- parts and files

    def _copy_parts(self, record: StepRecord) -> None:
        with self._shown(record):
            for place in range(len(record.parts)):
                self._copy_part(record, place)
        self._mark = None

    def _shown(self, record: StepRecord) -> AbstractContextManager[None]:
        """That this sender is still at it, to who waits for all parts."""
        if not self._is_part(record.manifest):
            return nullcontext()
        folder = step_attempt_folder(record.step, record.attempt)
        if self._mark is None or self._mark.folder != folder:
            keeper = part_keeper(record.manifest.parts[0].file)
            self._mark = SenderMark(self._target, folder, keeper, self._moved)
        return self._mark.shown()

    def _moved(self) -> tuple[int, int]:
        return _native.load(self._progress), _native.load(self._reading)

    def _copy_part(self, record: StepRecord, place: int) -> None:
        part, data = record.parts[place], record.part_bytes(place)
        folder = step_attempt_folder(record.step, record.attempt)
        path = f"{folder}/{part.file}"
        is_there = self._has_part(path, data, record.step)
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
                self._has_part(path, data, record.step)
            crashpoints.point("copy.part")

    def _has_part(self, path: str, data: bytes, step: int) -> bool:
        """Whether this very part stands in the target. One that is damaged does not, where it may be
        replaced."""
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
            raise self._is_not_whole(path, step) from error
        raise self._is_whole_other(path, step)

    def _send(
        self, record: StepRecord, rank: RankRecord, path: str, contents: Contents, size: int | None
    ) -> None:
        """`size`: what the target has under this name. A manifest is to be published over it: what this
        process did not send or compare itself may have rotted since."""
        num_bytes = contents.shard.num_bytes
        if size is None:
            self._known.pop(path, None)
        is_there = size is not None or self._has_linked(path, contents)
        if not is_there:
            self._sent_bytes += self._write(path, contents, record.step)
        elif size is not None:
            is_known = self._known.get(path) == contents or path in self._compared
            if not (is_known and size == num_bytes) and not self._is_whole(path, contents):
                if contents is rank.constants and self._is_another(path, contents):
                    raise self._is_whole_other(path, record.step)
                if not self._repairs:
                    raise self._is_not_whole(path, record.step)
                is_there, self._has_replaced = False, True
                self._sent_bytes += self._write(path, contents, record.step, replaces=True)
        if is_there:
            _native.fetch_add(self._progress, num_bytes)
        self._compared.add(path)
        if contents is rank.constants:
            self._known[path] = contents

    def _has_linked(self, path: str, contents: Contents) -> bool:
        """The same constants of an earlier attempt, where they stand in the target by another name."""
        like = replace(contents.shard, file="")
        for other, known in self._known.items():
            is_alike = (known.leaves, known.digests) == (contents.leaves, contents.digests)
            if is_alike and replace(known.shard, file="") == like:
                return self._target.copy(other, path)
        return False

    def _is_another(self, path: str, contents: Contents) -> bool:
        """Whether a step of the target names a constants shard, and says that it has other bytes: then it may
        be all that is left of that one. A part that cannot be read says nothing."""
        for each in everything(self._target):
            for place in part_paths(self._target, step_attempt_folder(each.step, each.attempt)):
                with suppress(DamagedError, FileNotFoundError):
                    part = Part.from_bytes(self._target.read(place, Part.MAX_BYTES), place)
                    found = [of.constants for of in part.ranks if of.constants is not None]
                    named = (of.shard for of in found if constants_path(each.attempt, of.shard.file) == path)
                    if any(replace(of, file="") != replace(contents.shard, file="") for of in named):
                        return True
        return False

    def _is_whole(self, path: str, contents: Contents) -> bool:
        status, detail = self._verify(self._target, path, contents)
        if status == "unreadable":
            raise OSError(errno.EIO, detail, f"{self._target.url}/{path}")
        return status == "ok"

    def _verify(self, store: Store, path: str, contents: Contents) -> tuple[FileStatus, str]:
        return verify_file(store, path, contents, threads=self._threads, progress_word=self._reading)

    def _write(self, path: str, contents: Contents, step: int, *, replaces: bool = False) -> int:
        """The bytes that were sent. A local file gets its name once its bytes were compared; an object has
        its name at once. What it `replaces` goes once the source's bytes are known to be right."""
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
                    # Of another copier, or of one that is dead.
                    if not self._is_whole(path, contents):
                        raise self._is_not_whole(path, step)
                    return 0
                is_beside = False
        raise self._gone(path, step)

    def _write_beside(
        self, path: str, contents: Contents, descriptor: int, step: int, *, replaces: bool
    ) -> int:
        """The bytes that were sent; 0 where the name is taken meanwhile, or there are no links."""
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"
        try:
            sent_bytes = self._write_as(temporary, path, contents, descriptor, step)
            crashpoints.point("copy.written")
            if replaces:
                self._target.remove(path)
            return sent_bytes if self._target.copy(temporary, path) else 0
        except FileNotFoundError:
            # Another copier has put the same file there, and cleared up.
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
        """What is wrong with what was written, in words."""
        if contents.shard.chunk_bytes != CHUNK_BYTES:
            return self._verify(self._target, name, contents)[1]
        bad = [] if written.checksums == contents.shard.checksums else [0]
        return _words(Read(digests=written.digests, bad_chunks=bad), contents)

    @contextmanager
    def _image(self, path: str, contents: Contents, step: int) -> Iterator[int]:
        """A file of the source as a descriptor: its own where it is here, else what was read of it. It was
        compared with its record: nothing wrong is sent, and where a disk gives no bytes it is said (in a
        mapping it would be a SIGBUS)."""
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
        """Read a file of the source; what is wrong with it, in words."""
        with mmap.mmap(descriptor, -(-contents.shard.num_bytes // PAGE) * PAGE) as memory:
            view = memoryview(memory)
            try:
                how = {"threads": self._threads, "progress": self._reading}
                found = self._source.read_ranges(path, contents, view, **how)
            except FileNotFoundError:
                return "it is missing"
            except LengthError as error:
                return str(error)
            finally:
                view.release()
        return _words(found, contents)

    def _clear(self, manifest: Manifest) -> None:
        """What copiers that were killed left of files that stand now."""
        for folder in _folders(manifest):
            with suppress(OSError):
                names = {each.name for each in self._target.list(folder)}
                for name in names:
                    if (match := _TEMPORARY.fullmatch(name)) is not None and match[1] in names:
                        self._target.remove(f"{folder}/{name}")

    # ---- errors

    def _is_not_whole(self, path: str, step: int) -> RunError:
        return RunError(
            f"{self._target.url}/{path} is not whole: it is damaged, or another copy writes it now. Nothing "
            f"of step {step} was published there, and that file was not touched. If no other copy runs: "
            f"{self._advice(step)}",
            step=step,
            path=path,
        )

    def _is_whole_other(self, path: str, step: int) -> RunError:
        """Of a file that nothing says is damaged: it is never replaced."""
        return RunError(
            f"{self._target.url}/{path} is another file than step {step} of the source has under this name, "
            "and not damaged: it stays, and nothing of this step was published there. `flashckpt show` says "
            "of both what they are. Copy to a place of its own to have both.",
            step=step,
            path=path,
        )

    def _advice(self, step: int) -> str:
        return (
            f"`flashckpt copy {self._source.url} {self._target.url} --step {step} --repair` reads what is "
            "there, and sends again what is damaged."
        )

    def _may_go(self, going: Going, step: int) -> DamagedError:
        return DamagedError(
            f"step {step} is not committed in {self._target.url}: {going.path} may be removed there, as "
            f"{going.record} says, by somebody who is at work or was killed. All files of the step are there "
            "and whole, and are not sent again. If nothing trains or deletes in that run now, delete that "
            "record, and copy again.",
            step=step,
            path=going.path,
        )

    def _gone(self, path: str, step: int) -> RunError:
        return RunError(
            f"{self._target.url}/{path} went away while step {step} was copied: somebody deletes there. The "
            "step is not committed there. Copy again.",
            step=step,
            path=path,
        )


def _folders(manifest: Manifest) -> set[str]:
    """Where the shards and the constants of a step are."""
    return {path.rpartition("/")[0] for path in manifest.paths()}


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
