"""A run in a folder of this machine, or of a file server that it has mounted.

Owns all that is POSIX: exclusive, durable creation (temporary name, fsync, link to its name, fsync of the
folder), folders, links, and local paths. Follows no link below the run's own folder. Knows no name of a run's
files. See docs/commit.md.
"""

from __future__ import annotations

import builtins
import errno
import mmap
import os
import re
import secrets
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from flashckpt import _native
from flashckpt.errors import DamagedError, RunError
from flashckpt.format.layout import Layout
from flashckpt.format.records import CHUNK_BYTES, Contents
from flashckpt.store.base import (
    Capabilities,
    Entry,
    MemoryRange,
    Read,
    Written,
    other_length,
    split,
    too_long,
)
from flashckpt.store.system import System

_Found = TypeVar("_Found")

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_NO_EXCLUSIVE_RENAME = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_TEMPORARY = ".tmp"
# How often a folder may vanish under us, because another process found it empty and removed it.
_FOLDER_TRIES = 8


class LocalStore:
    """See Store in base.py."""

    def __init__(self, root: str, system: System | None = None) -> None:
        self._root = os.path.abspath(root)
        self._system = system if system is not None else System()
        self._was_there = False

    @property
    def url(self) -> str:
        return self._root

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_create=True, rename=True, is_shared=None, part_bytes=0)

    def place(self) -> str:
        """Device and inode: a copied folder is another run, also where the copy's files are hard links (a
        backup's often are)."""
        found = os.stat(self._root)
        return f"{found.st_dev}:{found.st_ino}"

    def check(self) -> None:
        """The first file says it soon enough, and a link or a rename never overwrites."""

    def at_once(self, recent: str = "") -> LocalStore:
        return self

    def brief(self) -> LocalStore:
        return self

    def move_to(self, url: str) -> None:
        self._root = os.path.abspath(url)

    # Small files

    def read(self, path: str, max_bytes: int) -> bytes:
        with self._opened(path) as (file, num_bytes):
            if num_bytes > max_bytes:
                raise too_long(path, num_bytes, max_bytes)
            return _read_all(file, max_bytes)

    def fetch(self, paths: Iterable[str], max_bytes: int) -> None:
        """Nothing is gained by it."""

    def create(self, path: str, data: bytes) -> bool:
        def create_in(name: str, folder: int) -> bool:
            temporary = self._write_temporary(name, data, folder)
            try:
                # What the new file names, or was written because of, stands here, perhaps under a name that
                # another process has just made.
                self._system.sync_folder(folder)
                created = self._publish(temporary, name, data, folder)
                # The name, ours or another's, may be counted on from here: no power loss may take it back.
                self._system.sync_folder(folder)
                return created
            finally:
                with suppress(FileNotFoundError):
                    self._system.remove(temporary, folder)

        return self._in_folder(path, create_in)

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        # No folder is made: one that is not there was removed with what this file was about.
        *folders, name = split(path)
        with self._folder(folders) as folder:
            temporary = self._write_temporary(name, data, folder, durable=durable)
            try:
                self._system.rename(temporary, name, folder)
            except BaseException:
                with suppress(FileNotFoundError):
                    self._system.remove(temporary, folder)
                raise
            if durable:
                # What follows (deletions) counts on the new file: the old one must not come back.
                self._system.sync_folder(folder)

    def append(self, path: str, data: bytes, max_bytes: int) -> bool:
        def append_in(name: str, folder: int) -> bool:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(name, flags, 0o644, dir_fd=folder)
            try:
                before = os.fstat(file).st_size
                if before and before + len(data) > max_bytes:
                    return False
                # One write: two processes that append at once do not mix their bytes.
                os.write(file, data)
                return True
            finally:
                os.close(file)

        return self._in_folder(path, append_in, durable=False)

    def copy(self, source: str, target: str) -> bool:
        *source_folders, source_name = split(source)

        def link_in(name: str, folder: int) -> bool:
            with self._folder(source_folders) as above:
                if not stat.S_ISREG(os.stat(source_name, dir_fd=above, follow_symlinks=False).st_mode):
                    raise self._not_a_file(source)
                try:
                    self._system.link(source_name, name, above, folder)
                except FileExistsError:
                    return False
                except OSError as error:
                    if error.errno in _NO_LINKS:
                        return False
                    raise
            # A part may name the new link next.
            self._system.sync_folder(folder)
            return True

        return self._in_folder(target, link_in)

    def list(self, folder: str, named: re.Pattern[str] | None = None) -> builtins.list[Entry]:
        entries = []
        try:
            with self._folder(split(folder)) as opened, os.scandir(opened) as found:
                for entry in found:
                    if named is not None and not named.fullmatch(entry.name):
                        continue
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            named_s = status.st_ctime if status.st_nlink > 1 else 0.0
                            entries.append(
                                Entry(entry.name, False, status.st_size, status.st_mtime, named_s=named_s)
                            )
                        elif stat.S_ISDIR(status.st_mode):
                            entries.append(Entry(entry.name, True, 0, status.st_mtime))
        except FileNotFoundError:
            return []
        return sorted(entries, key=lambda entry: entry.name)

    def exists(self, path: str) -> bool:
        *folders, name = split(path)
        try:
            with self._folder(folders) as folder:
                return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    def remove(self, path: str) -> None:
        *folders, name = split(path)
        with suppress(FileNotFoundError), self._folder(folders) as folder:
            try:
                self._system.remove(name, folder)
            except (IsADirectoryError, PermissionError):
                if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise
                self._remove_empty(name, folder)

    def remove_files(self, paths: Iterable[str]) -> None:
        errors = []
        for path in paths:
            try:
                self.remove(path)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def remove_tree(self, path: str) -> None:
        *folders, name = split(path)
        with suppress(FileNotFoundError), self._folder(folders) as folder:
            self._remove_tree(name, folder)

    # Shards

    def write_shard(
        self, path: str, layout: Layout, source: MemoryRange, *, threads: int = 2, progress: int = 0
    ) -> Written:
        def write_in(name: str, folder: int) -> Written:
            digests, checksums, direct = self._system.write_shard(
                os.path.join(self._root, path),
                source.descriptor,
                source.offset,
                layout.num_bytes,
                chunk_bytes=CHUNK_BYTES,
                **_leaves(layout),
                threads=threads,
                progress=progress,
            )
            try:
                # The bytes are on the disk; without this the name may not be when a part names it.
                self._system.sync_folder(folder)
            except BaseException:
                with suppress(OSError):
                    self._system.remove(name, folder)
                raise
            return Written(digests=array("Q", digests), checksums=checksums, direct=direct)

        return self._in_folder(path, write_in)

    def write_parts(self, path: str, parts: Iterable[bytes], most_bytes: int) -> None:
        # The pieces come once: nothing of them is taken where the folder is still to be made.
        file = self._in_folder(path, self._system.create)
        try:
            for part in parts:
                self._write(file, part)
            self._system.sync(file)
            with self._folder(split(path)[:-1]) as folder:
                self._system.sync_folder(folder)
        except BaseException:
            with suppress(OSError):
                self.remove(path)
            raise
        finally:
            os.close(file)

    def read_ranges(
        self,
        path: str,
        contents: Contents,
        into: memoryview | None,
        *,
        threads: int = 2,
        progress: int = 0,
        cancel: int = 0,
    ) -> Read:
        shard = contents.shard
        how: dict[str, Any] = {
            "num_bytes": shard.num_bytes,
            "chunk_bytes": shard.chunk_bytes,
            "checksums": shard.checksums,
            **_leaves(contents.layout()),
            "threads": threads,
            "progress": progress,
            "cancel": cancel,
        }
        self._check_length(path, shard.num_bytes)
        local = os.path.join(self._root, path)
        try:
            if into is None:
                digests, bad_chunks, _ = _native.check_file(local, **how)
            else:
                digests, bad_chunks, _ = _native.read_file(local, into, **how)
        except (ValueError, OSError) as error:
            # It may have become shorter meanwhile.
            self._check_length(path, shard.num_bytes)
            if isinstance(error, ValueError):
                raise DamagedError(f"{path}: {error}", path=path) from error
            raise
        return Read(digests=array("Q", digests), bad_chunks=bad_chunks)

    def read_bytes(self, path: str, offset: int, num_bytes: int, file_bytes: int | None = None) -> bytes:
        with self._opened(path) as (file, there):
            data = b""
            while len(data) < num_bytes:
                piece = os.pread(file, num_bytes - len(data), offset + len(data))
                if not piece:
                    raise other_length(path, there, offset + num_bytes)
                data = data + piece if data else piece
            return data

    def descriptor(self, path: str, num_bytes: int) -> int | None:
        with self._opened(path) as (file, there):
            if there != num_bytes:
                raise other_length(path, there, num_bytes)
            return os.dup(file)

    def view(self, path: str, num_bytes: int) -> memoryview:
        with self._opened(path) as (file, there):
            if there != num_bytes:
                raise other_length(path, there, num_bytes)
            # Private and writable: a user may change what was loaded, and the file never.
            return memoryview(mmap.mmap(file, num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))

    # Folders, links and paths: known here alone

    def local_path(self, path: str) -> str:
        """The path in the local file system; no folder on the way is a link."""
        *folders, _ = split(path)
        with suppress(FileNotFoundError), self._folder(folders):
            pass
        return os.path.join(self._root, path)

    def make_folder(self, path: str) -> None:
        """The folder and those above it, each durable in its parent when this returns."""
        names = split(path)
        self._make_root()
        for depth in range(1, len(names) + 1):
            self._make_one(names[:depth])

    def _in_folder(self, path: str, act: Callable[[str, int], _Found], *, durable: bool = True) -> _Found:
        """What `act` does with a name in its open folder, which is made where there is none, and durable in
        those above it."""
        *names, name = split(path)
        for attempt in range(_FOLDER_TRIES):
            try:
                with self._folder(names) as folder:
                    if durable:
                        # Each time: another process may have removed it and made it again, under the same
                        # inode even. Once it is open: what is removed from here on takes no new name.
                        self.make_folder("/".join(names))
                    return act(name, folder)
            except FileNotFoundError:
                # It is missing, or another process found it empty and removed it.
                if attempt + 1 == _FOLDER_TRIES:
                    raise
                self.make_folder("/".join(names))
        raise AssertionError("a folder was tried for longer than it is tried")

    @contextmanager
    def _opened(self, path: str) -> Iterator[tuple[int, int]]:
        """A file that is read, and its length."""
        *folders, name = split(path)
        with self._folder(folders) as folder:
            file = self._open(name, folder, path)
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise self._not_a_file(path)
                yield file, status.st_size
            finally:
                os.close(file)

    def _check_length(self, path: str, num_bytes: int) -> None:
        with self._opened(path) as (_, there):
            if there != num_bytes:
                raise other_length(path, there, num_bytes)

    @contextmanager
    def _folder(self, names: Sequence[str]) -> Iterator[int]:
        """An open directory, reached name by name so that no link on the way is followed."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        opened = os.open(self._root, flags)
        self._was_there = True
        try:
            for depth, name in enumerate(names, 1):
                try:
                    inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=opened)
                except OSError as error:
                    if error.errno in (errno.ENOTDIR, errno.ELOOP):
                        raise self._elsewhere("/".join(names[:depth])) from None
                    raise
                os.close(opened)
                opened = inner
            yield opened
        finally:
            os.close(opened)

    def _open(self, name: str, folder: int, path: str) -> int:
        try:
            # A named pipe in a file's place would otherwise be waited for.
            return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._not_a_file(path) from None
            raise

    def _not_a_file(self, path: str) -> DamagedError:
        return DamagedError(
            f"{path} is a link or of another kind than a file. It was not followed, nothing of it was read. "
            "Put the file itself there.",
            path=path,
        )

    def _elsewhere(self, path: str) -> RunError:
        return RunError(
            f"{os.path.join(self._root, path)} is a link or no folder. It was not followed, nothing was "
            "changed. Put the folder itself there.",
            path=path,
        )

    def _write_temporary(self, name: str, data: bytes, folder: int, *, durable: bool = True) -> str:
        temporary = f".{name}.{secrets.token_hex(8)}{_TEMPORARY}"
        file = self._system.create(temporary, folder)
        try:
            self._write(file, data)
            if durable:
                # A name must never stand for bytes that a power loss can still take.
                self._system.sync(file)
        except BaseException:
            with suppress(OSError):
                self._system.remove(temporary, folder)
            raise
        finally:
            os.close(file)
        return temporary

    def _write(self, file: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._system.write(file, rest) :]

    def _publish(self, temporary: str, name: str, data: bytes, folder: int) -> bool:
        try:
            self._system.link(temporary, name, folder, folder)
        except FileExistsError:
            # On NFS a request whose answer was lost is sent again, and finds its own work.
            return self._linked(temporary, folder)
        except OSError as error:
            if error.errno in _NO_LINKS:
                return self._publish_by_rename(temporary, name, data, folder)
            if self._linked(temporary, folder) or self._holds(name, data, folder):
                return True
            raise
        return True

    def _publish_by_rename(self, temporary: str, name: str, data: bytes, folder: int) -> bool:
        try:
            self._system.rename_new(temporary, name, folder)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_EXCLUSIVE_RENAME:
                raise RunError(
                    f"{self._root}: this file system can neither link files nor rename one without replacing "
                    "another, so a commit there could overwrite another's. Nothing was changed. Use another "
                    "file system for the run.",
                    path=self._root,
                ) from error
            if self._holds(name, data, folder):
                return True
            raise
        return True

    def _linked(self, temporary: str, folder: int) -> bool:
        return os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_nlink > 1

    def _holds(self, name: str, data: bytes, folder: int) -> bool:
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            return False
        try:
            return _read_all(file, len(data)) == data
        finally:
            os.close(file)

    def _make_root(self) -> None:
        missing = []
        path = self._root
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        if missing and self._was_there:
            # Moved, or a disk that is away: nothing that is written here now would ever be found.
            raise FileNotFoundError(errno.ENOENT, "the run is not there any more", self._root)
        for path in reversed(missing):
            above = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with suppress(FileExistsError):
                    self._system.make_folder(os.path.basename(path), above)
                self._system.sync_folder(above)
            finally:
                os.close(above)

    def _make_one(self, names: Sequence[str]) -> None:
        for attempt in range(_FOLDER_TRIES):
            try:
                with self._folder(names[:-1]) as above:
                    with suppress(FileExistsError):
                        self._system.make_folder(names[-1], above)
                    # Also where it was there: whoever made it may not have synced it yet.
                    self._system.sync_folder(above)
                with self._folder(names):
                    return
            except FileNotFoundError:
                if attempt + 1 == _FOLDER_TRIES:
                    raise
                self.make_folder("/".join(names[:-1]))

    def _remove_empty(self, name: str, folder: int) -> None:
        try:
            self._system.remove_folder(name, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def _remove_tree(self, name: str, folder: int) -> None:
        try:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            self._system.remove(name, folder)
            return
        errors = []
        try:
            for entry in os.listdir(inner):
                try:
                    self._remove_tree(entry, inner)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    errors.append(error)
        finally:
            os.close(inner)
        if errors:
            raise errors[0]
        self._system.remove_folder(name, folder)


def _leaves(layout: Layout) -> dict[str, array[int]]:
    """Where the leaves stand in a file of this layout, as the native engine takes it."""
    return {
        "leaf_offsets": array("Q", [layout.data_start + leaf.offset for leaf in layout.leaves]),
        "leaf_sizes": array("Q", [leaf.num_bytes for leaf in layout.leaves]),
    }


def _read_all(file: int, max_bytes: int) -> bytes:
    pieces, total = [], 0
    while piece := os.read(file, min(1 << 20, max_bytes + 1 - total)):
        pieces.append(piece)
        total += len(piece)
        if total > max_bytes:
            break
    return b"".join(pieces)
