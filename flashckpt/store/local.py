"""A run in a local folder or on a mounted file server.

Owns all POSIX details: exclusive, durable creation (temporary name, fsync, link to its name, fsync of the
folder), folders, links, and local paths. Follows no link below the run's own folder. Knows no file name of a
run. See docs/commit.md.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import os
import secrets
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from flashckpt import _native
from flashckpt.errors import DamagedError, RunError
from flashckpt.format.layout import Layout
from flashckpt.format.manifest import COMPRESSED
from flashckpt.format.records import CHUNK_BYTES
from flashckpt.store.base import (
    WRITE_THREADS,
    Entry,
    MemoryRange,
    Written,
    other_length,
    split,
    too_long,
)
from flashckpt.store.compressed_file import read_compressed

_Found = TypeVar("_Found")

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_NO_EXCLUSIVE_RENAME = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
# How often to retry when another process removes the folder because it is empty.
_FOLDER_TRIES = 8


class LocalStore:
    """See Store in base.py."""

    is_read_only, is_folder, delay_s = False, True, 0.0

    def __init__(self, root: str, system: System | None = None) -> None:
        self._root = os.path.abspath(root)
        self._system = system if system is not None else System()
        self._existed = False

    @property
    def url(self) -> str:
        return self._root

    def place(self) -> str:
        """Device and inode of the folder: they identify it even if a backup's files are hard links."""
        found = os.stat(self._root)
        return f"{found.st_dev}:{found.st_ino}"

    def check(self) -> None:
        """Do nothing: the first write reports a problem, and a link or a rename never overwrites."""

    def brief(self) -> LocalStore:
        return self

    def move_to(self, url: str) -> None:
        self._root = os.path.abspath(url)

    # Small files

    def read(self, path: str, max_bytes: int) -> bytes:
        with self._opened(path) as (file, num_bytes):
            if num_bytes > max_bytes:
                raise too_long(path, num_bytes, max_bytes)
            return _read(file, 0, num_bytes)

    def create(self, path: str, data: bytes) -> bool:
        def create_in(name: str, folder: int) -> bool:
            with self._temporary(name, data, folder) as temporary:
                # The new file may depend on names in this folder that another process has just made.
                self._system.sync_folder(folder)
                created = self._publish(temporary, name, folder)
                # Callers rely on the name from here, even if another process made it: no power loss may undo
                # it.
                self._system.sync_folder(folder)
            with suppress(FileNotFoundError):
                self._system.remove(temporary, folder)
            return created

        return self._in_folder(path, create_in)

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        # Make no folder: if it is missing, it was removed together with the subject of this file.
        *folders, name = split(path)
        with self._folder(folders) as folder:
            with self._temporary(name, data, folder, durable=durable) as temporary:
                self._system.rename(temporary, name, folder)
            if durable:
                # The caller's deletions rely on the new file: the old one must not reappear.
                self._system.sync_folder(folder)

    def append(self, path: str, data: bytes, max_bytes: int) -> bool:
        def append_in(name: str, folder: int) -> bool:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(name, flags, 0o644, dir_fd=folder)
            try:
                before = os.fstat(file).st_size
                if before and before + len(data) > max_bytes:
                    return False
                # A single write, so concurrent appends do not interleave.
                os.write(file, data)
                return True
            finally:
                os.close(file)

        return self._in_folder(path, append_in, durable=False)

    def list(self, folder: str) -> builtins.list[Entry]:
        entries = []
        try:
            with self._folder(split(folder)) as opened, os.scandir(opened) as found:
                for entry in found:
                    # The folder itself says what an entry is, and only a file costs a request of its own.
                    if entry.is_dir(follow_symlinks=False):
                        entries.append(Entry(entry.name, True, 0))
                    elif entry.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            entries.append(Entry(entry.name, False, status.st_size, status.st_mtime))
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
                try:
                    self._system.remove_folder(name, folder)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise

    def remove_files(self, paths: Iterable[str]) -> None:
        errors = []
        for path in paths:
            try:
                self.remove(path)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # Shards

    def write_shard(self, path: str, layout: Layout, source: MemoryRange, *, progress: int = 0) -> Written:
        def write(temporary: str) -> Written:
            digests, checksums, direct = self._system.write_shard(
                os.path.join(self._root, temporary),
                source.descriptor,
                source.offset,
                layout.num_bytes,
                chunk_bytes=CHUNK_BYTES,
                leaf_offsets=array("Q", [layout.data_start + leaf.offset for leaf in layout.leaves]),
                leaf_sizes=array("Q", [leaf.num_bytes for leaf in layout.leaves]),
                threads=WRITE_THREADS,
                progress=progress,
            )
            return Written(digests=array("Q", digests), checksums=checksums, direct=direct)

        return self._written(path, lambda path: self._in_folder(path, lambda *_: write(path)))

    def write_parts(self, path: str, parts: Iterable[bytes], most_bytes: int) -> None:
        def write(temporary: str) -> None:
            # The pieces can be iterated once only, so make the folder before taking the first.
            file = self._in_folder(temporary, self._system.create)
            try:
                for part in parts:
                    self._write(file, part)
                self._system.sync(file)
            finally:
                os.close(file)

        self._written(path, write)

    def _written(self, path: str, write: Callable[[str], _Found]) -> _Found:
        """Write a file beside its place, by `write(its temporary path)`, and name it once its bytes are
        durable. So what a killed process has left is a temporary file, and no file of the run."""
        *folders, name = split(path)
        temporary = _temporary_name(name)
        try:
            found = write("/".join([*folders, temporary]))
            with self._folder(folders) as folder:
                if not self._publish(temporary, name, folder):
                    raise FileExistsError(errno.EEXIST, "another file has the name", path)
                try:
                    self._system.sync_folder(folder)  # before a part refers to the name
                except BaseException:
                    with suppress(OSError):
                        self._system.remove(name, folder)
                    raise
            return found
        finally:
            with suppress(FileNotFoundError), self._folder(folders) as folder:
                self._system.remove(temporary, folder)

    def read_chunks(self, path: str, plan: _native.FilePlan, *, threads: int = 2) -> None:
        if path.endswith(COMPRESSED):
            with self._opened(path) as (_, stored_bytes):
                read_compressed(self, path, stored_bytes, plan, max(1, threads))
            return
        with self._opened(path, plan.num_bytes):
            pass
        try:
            plan.read(os.path.join(self._root, path), threads=threads)
        except (ValueError, OSError) as error:
            # The file may have been truncated during the read.
            with self._opened(path, plan.num_bytes):
                pass
            if isinstance(error, ValueError):
                raise DamagedError(f"{path}: {error}", path=path) from error
            raise

    def read_bytes(self, path: str, offset: int, num_bytes: int) -> bytes:
        with self._opened(path) as (file, size):
            if len(data := _read(file, offset, num_bytes)) < num_bytes:
                raise other_length(path, size, offset + num_bytes)
            return data

    def descriptor(self, path: str, num_bytes: int) -> int | None:
        with self._opened(path, num_bytes) as (file, _):
            return os.dup(file)

    # Folders, links and paths

    def _in_folder(self, path: str, act: Callable[[str, int], _Found], *, durable: bool = True) -> _Found:
        """Call `act(name, folder)` with the opened folder of `path`. Make a missing folder. With `durable`,
        the folder is durable in its parents."""
        *names, name = split(path)
        for attempt in range(_FOLDER_TRIES):
            try:
                with self._folder(names, makes=durable or attempt > 0) as folder:
                    return act(name, folder)
            except FileNotFoundError:
                # The folder is missing, or another process removed it while it was empty.
                if attempt + 1 == _FOLDER_TRIES:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    @contextmanager
    def _opened(self, path: str, num_bytes: int | None = None) -> Iterator[tuple[int, int]]:
        """Open a file for reading, which has `num_bytes`, if given. Yield descriptor and length."""
        *folders, name = split(path)
        with self._folder(folders) as folder:
            try:
                # O_NONBLOCK: opening a named pipe would otherwise block.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                file = os.open(name, flags, dir_fd=folder)
            except OSError as error:
                raise (self._not_a_file(path) if error.errno == errno.ELOOP else error) from None
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise self._not_a_file(path)
                if num_bytes is not None and status.st_size != num_bytes:
                    raise other_length(path, status.st_size, num_bytes)
                yield file, status.st_size
            finally:
                os.close(file)

    @contextmanager
    def _folder(self, names: Sequence[str], *, makes: bool = False) -> Iterator[int]:
        """Open a directory name by name, so that no link on the way is followed. `makes`: make those that are
        missing; all are durable in their parents then."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if makes:
            self._make_root()
        opened = os.open(self._root, flags)
        self._existed = True
        try:
            for depth, name in enumerate(names, 1):
                if makes:
                    with suppress(FileExistsError):
                        self._system.make_folder(name, opened)
                try:
                    inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=opened)
                except OSError as error:
                    if error.errno in (errno.ENOTDIR, errno.ELOOP):
                        raise self._not_a_folder("/".join(names[:depth])) from None
                    raise
                above, opened = opened, inner
                try:
                    if makes:
                        # Also if it existed: its maker may not have synced it yet. After opening it, since a
                        # folder that is removed later takes no new name, and may be made again unsynced.
                        self._system.sync_folder(above)
                finally:
                    os.close(above)
            yield opened
        finally:
            os.close(opened)

    def _not_a_file(self, path: str) -> DamagedError:
        return DamagedError(
            f"{path} is a link or another object that is not a file. It was neither followed nor read. "
            "Put the file itself there.",
            path=path,
        )

    def _not_a_folder(self, path: str) -> RunError:
        return RunError(
            f"{os.path.join(self._root, path)} is a link or not a folder. It was not followed, and nothing "
            "was changed. Put the folder itself there.",
            path=path,
        )

    @contextmanager
    def _temporary(self, name: str, data: bytes, folder: int, *, durable: bool = True) -> Iterator[str]:
        """Write a file beside its place. Yields its name, and removes it after an error."""
        temporary = _temporary_name(name)
        file = self._system.create(temporary, folder)
        try:
            try:
                self._write(file, data)
                if durable:
                    # A name must never refer to bytes that a power loss can destroy.
                    self._system.sync(file)
            finally:
                os.close(file)
            yield temporary
        except BaseException:
            with suppress(OSError):
                self._system.remove(temporary, folder)
            raise

    def _write(self, file: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._system.write(file, rest) :]

    def _publish(self, temporary: str, name: str, folder: int) -> bool:
        try:
            self._system.link(temporary, name, folder, folder)
        except FileExistsError:
            # NFS resends a request whose answer was lost; the second one finds the link of the first.
            return self._has_two_links(temporary, folder)
        except OSError as error:
            if error.errno in _NO_LINKS:
                return self._publish_by_rename(temporary, name, folder)
            if self._has_two_links(temporary, folder):
                return True
            raise
        return True

    def _publish_by_rename(self, temporary: str, name: str, folder: int) -> bool:
        try:
            self._system.rename_new(temporary, name, folder)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_EXCLUSIVE_RENAME:
                raise RunError(
                    f"{self._root}: this file system can neither link files nor rename a file without "
                    "replacing another, so a commit there could overwrite another process's commit. Nothing "
                    "was changed. Use another file system for the run.",
                    path=self._root,
                ) from error
            raise
        return True

    def _has_two_links(self, temporary: str, folder: int) -> bool:
        return os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_nlink > 1

    def _make_root(self) -> None:
        missing = []
        path = self._root
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        if missing and self._existed:
            # The run was moved or its disk is away: files written here now would never be found.
            raise FileNotFoundError(errno.ENOENT, "the run's folder has vanished", self._root)
        for path in reversed(missing):
            above = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with suppress(FileExistsError):
                    self._system.make_folder(os.path.basename(path), above)
                self._system.sync_folder(above)
            finally:
                os.close(above)


def _temporary_name(name: str) -> str:
    return f".{name}.{secrets.token_hex(8)}.tmp"


def _read(file: int, offset: int, num_bytes: int) -> bytes:
    """Bytes of an open file; fewer if it ends before."""
    pieces, done = list[bytes](), 0
    # In pieces: a signal is handled between two of them, however slow the storage is.
    while done < num_bytes and (piece := os.pread(file, min(num_bytes - done, CHUNK_BYTES), offset + done)):
        pieces.append(piece)
        done += len(piece)
    return b"".join(pieces)


# ---- system calls

_RENAME_NOREPLACE = 1


def _libc_renameat2() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    function.restype = ctypes.c_int
    return function


_renameat2 = _libc_renameat2()


@contextmanager
def _naming_inodes(folder: int | str) -> Iterator[None]:
    """Say so in the error if a file system has no inodes left: it answers as if full, while `df` shows free
    space."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            found = os.statvfs(folder)
            if found.f_files and not found.f_favail:
                why = "no inodes are left on this file system (see df -i)"
                raise OSError(errno.ENOSPC, why, error.filename) from error
        raise


class System:
    """Names are relative to `folder`, an open directory. All methods raise OSError."""

    def create(self, name: str, folder: int) -> int:
        """Create an empty file, open for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with _naming_inodes(folder):
            return os.open(name, flags, 0o644, dir_fd=folder)

    def write(self, file: int, data: memoryview) -> int:
        return os.write(file, data)

    def write_shard(
        self, path: str, source: int, offset: int, num_bytes: int, **how: Any
    ) -> tuple[bytes, bytes, bool]:
        """Write and sync a new file from a region's bytes: see `_native.write_file`."""
        with _naming_inodes(os.path.dirname(path)):
            return _native.write_file(path, source, offset, num_bytes, **how)

    def sync(self, file: int) -> None:
        os.fsync(file)

    def sync_folder(self, folder: int) -> None:
        try:
            os.fsync(folder)
        except OSError as error:
            # A file system that cannot sync folders.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise

    def link(self, source: str, target: str, source_folder: int, target_folder: int) -> None:
        with _naming_inodes(target_folder):
            os.link(source, target, src_dir_fd=source_folder, dst_dir_fd=target_folder, follow_symlinks=False)

    def rename(self, source: str, target: str, folder: int) -> None:
        os.rename(source, target, src_dir_fd=folder, dst_dir_fd=folder)

    def rename_new(self, source: str, target: str, folder: int) -> None:
        """Rename unless the target is taken (FileExistsError)."""
        if _renameat2 is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
        if _renameat2(folder, os.fsencode(source), folder, os.fsencode(target), _RENAME_NOREPLACE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), target)

    def make_folder(self, name: str, folder: int) -> None:
        with _naming_inodes(folder):
            os.mkdir(name, 0o755, dir_fd=folder)

    def remove(self, name: str, folder: int) -> None:
        os.unlink(name, dir_fd=folder)

    def remove_folder(self, name: str, folder: int) -> None:
        os.rmdir(name, dir_fd=folder)
