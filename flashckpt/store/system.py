"""The calls by which a run's folder is written. Owns no order of them, and no decision: see local.py."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flashckpt import _native

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
def _inodes_named(folder: int | str) -> Iterator[None]:
    """A file system whose inodes are used up answers as a full one does, while `df` shows room."""
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
    """Names are relative to `folder`, an open directory. All raise OSError."""

    def create(self, name: str, folder: int) -> int:
        """A new empty file, open for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with _inodes_named(folder):
            return os.open(name, flags, 0o644, dir_fd=folder)

    def write(self, file: int, data: memoryview) -> int:
        return os.write(file, data)

    def write_shard(
        self, path: str, source: int, offset: int, num_bytes: int, **how: Any
    ) -> tuple[bytes, bytes, bool]:
        """A new file of a region's bytes, written and synced: see `_native.write_file`."""
        with _inodes_named(os.path.dirname(path)):
            return _native.write_file(path, source, offset, num_bytes, **how)

    def sync(self, file: int) -> None:
        os.fsync(file)

    def sync_folder(self, folder: int) -> None:
        try:
            os.fsync(folder)
        except OSError as error:
            # A file system that has no such thing for folders says EINVAL: there is nothing more to ask.
            if error.errno != errno.EINVAL:
                raise

    def link(self, source: str, target: str, source_folder: int, target_folder: int) -> None:
        with _inodes_named(target_folder):
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
        with _inodes_named(folder):
            os.mkdir(name, 0o755, dir_fd=folder)

    def remove(self, name: str, folder: int) -> None:
        os.unlink(name, dir_fd=folder)

    def remove_folder(self, name: str, folder: int) -> None:
        os.rmdir(name, dir_fd=folder)
