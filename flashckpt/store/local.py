"""A run in a folder of this machine, or of a file server that it has mounted.

Owns exclusive, durable creation: temporary name, fsync, link to its name, fsync of the folder. Follows
no link below the run's own folder. Knows no record and no name of a run's files. See docs/commit.md.
"""

from __future__ import annotations

import builtins
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from flashckpt.errors import DamagedError, RunError
from flashckpt.store.base import Entry, split
from flashckpt.store.system import System

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
_NO_EXCLUSIVE_RENAME = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_TEMPORARY = ".tmp"
# How often a folder may vanish under us, because another process found it empty and removed it.
_FOLDER_TRIES = 8


class LocalStore:
    """See Store in base.py."""

    def __init__(self, root: str, system: System | None = None) -> None:
        self._root = os.path.abspath(root)
        self._system = system if system is not None else System()

    @property
    def url(self) -> str:
        return self._root

    def read(self, path: str, max_bytes: int) -> bytes:
        *folders, name = split(path)
        with self._folder(folders) as folder:
            file = self._open(name, folder, path)
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise self._not_a_file(path)
                if status.st_size > max_bytes:
                    raise DamagedError(
                        f"{path} has {status.st_size} bytes, where at most {max_bytes} can be. Nothing of it "
                        "was read. Run `flashckpt verify` on the run to see which steps are whole.",
                        path=path,
                    )
                return _read_all(file, max_bytes)
            finally:
                os.close(file)

    def create(self, path: str, data: bytes) -> bool:
        *folders, name = split(path)
        with self._folder(folders) as folder:
            temporary = self._write_temporary(name, data, folder)
            try:
                created = self._publish(temporary, name, data, folder)
                # The name, ours or another's, may be counted on from here: no power loss may take it back.
                self._system.sync_folder(folder)
                return created
            finally:
                with suppress(FileNotFoundError):
                    self._system.remove(temporary, folder)

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
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

    def link(self, source: str, target: str) -> bool:
        *source_folders, source_name = split(source)
        *target_folders, target_name = split(target)
        with self._folder(source_folders) as above, self._folder(target_folders) as folder:
            if not stat.S_ISREG(os.stat(source_name, dir_fd=above, follow_symlinks=False).st_mode):
                raise self._not_a_file(source)
            try:
                self._system.link(source_name, target_name, above, folder)
                created = True
            except FileExistsError:
                created = False
            # A part may name the new link next.
            self._system.sync_folder(folder)
            return created

    def list(self, folder: str) -> builtins.list[Entry]:
        entries = []
        try:
            with self._folder(split(folder)) as opened, os.scandir(opened) as found:
                for entry in found:
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            entries.append(Entry(entry.name, False, status.st_size))
                        elif stat.S_ISDIR(status.st_mode):
                            entries.append(Entry(entry.name, True, 0))
        except FileNotFoundError:
            return []
        return sorted(entries, key=lambda entry: entry.name)

    def make_folder(self, path: str) -> None:
        names = split(path)
        self._make_root()
        for depth in range(1, len(names) + 1):
            self._make_one(names[:depth])

    def sync_folder(self, path: str) -> None:
        with self._folder(split(path)) as folder:
            self._system.sync_folder(folder)

    def remove(self, path: str) -> None:
        *folders, name = split(path)
        with suppress(FileNotFoundError), self._folder(folders) as folder:
            self._system.remove(name, folder)

    def remove_tree(self, path: str) -> None:
        *folders, name = split(path)
        with suppress(FileNotFoundError), self._folder(folders) as folder:
            self._remove_tree(name, folder)

    def remove_empty(self, path: str) -> bool:
        *folders, name = split(path)
        try:
            with self._folder(folders) as folder:
                self._system.remove_folder(name, folder)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        return True

    def exists(self, path: str) -> bool:
        *folders, name = split(path)
        try:
            with self._folder(folders) as folder:
                mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return False
        return stat.S_ISREG(mode) or stat.S_ISDIR(mode)

    def local_path(self, path: str) -> str:
        *folders, _ = split(path)
        with suppress(FileNotFoundError), self._folder(folders):
            pass
        return os.path.join(self._root, path)

    def move_to(self, url: str) -> None:
        self._root = os.path.abspath(url)

    @contextmanager
    def _folder(self, names: Sequence[str]) -> Iterator[int]:
        """An open directory, reached name by name so that no link on the way is followed."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        opened = os.open(self._root, flags)
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
            rest = memoryview(data)
            while rest:
                rest = rest[self._system.write(file, rest) :]
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

    def _remove_tree(self, name: str, folder: int) -> None:
        try:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            self._system.remove(name, folder)
            return
        try:
            for entry in os.listdir(inner):
                with suppress(FileNotFoundError):
                    self._remove_tree(entry, inner)
        finally:
            os.close(inner)
        self._system.remove_folder(name, folder)


def _read_all(file: int, max_bytes: int) -> bytes:
    pieces, total = [], 0
    while piece := os.read(file, min(1 << 20, max_bytes + 1 - total)):
        pieces.append(piece)
        total += len(piece)
        if total > max_bytes:
            break
    return b"".join(pieces)
