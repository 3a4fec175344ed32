"""How files are made, renamed and read on the file systems of fsspec that have folders.

Owns what fsspec has no common call for: a rename that refuses a taken name, and syncing. Tries nothing twice.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

_TIMEOUT_S = 60.0
_SFTP_EXTENDED = 200


class Way:
    """Paths are those of the file system. All raise what it raises."""

    refusal = ""
    """Why no run is trained there; empty where one may be."""

    alone: AbstractContextManager[Any] = nullcontext()
    """Held while anything is done, where several connections are one."""

    def opened(self, system: Any) -> None:
        """To be told of each connection."""

    def read(self, system: Any, path: str, start: int, stop: int) -> bytes:
        """Fewer bytes where the file ends before."""
        size = int(system.info(path)["size"])
        return bytes(system.cat_file(path, start, min(stop, size))) if start < size else b""

    def write(self, system: Any, path: str, parts: Iterable[memoryview]) -> None:
        """A new file, or an old one anew, durable as far as the file system has that."""
        num_bytes = 0
        with system.open(path, "wb") as file:
            self._prepare(file)
            for part in parts:
                file.write(part)
                num_bytes += len(part)
            file.flush()
            self._sync(system, file)
        if (found := int(system.info(path)["size"])) != num_bytes:
            raise OSError(errno.EIO, f"{found} bytes of {num_bytes} were written", path)

    def _prepare(self, file: Any) -> None:
        pass

    def _sync(self, system: Any, file: Any) -> None:
        pass

    def rename_new(self, system: Any, path: str, target: str) -> bool:
        """False where the target is taken: then the file keeps its name."""
        raise NotImplementedError

    def replace(self, system: Any, path: str, target: str) -> None:
        system.mv(path, target)

    def make_folders(self, system: Any, path: str) -> None:
        """Those that are missing. Others may make them at the same time."""
        names = path.strip("/").split("/")
        for count in range(1, len(names) + 1):
            folder = "/" + "/".join(names[:count])
            if not system.isdir(folder):
                try:
                    system.mkdir(folder, create_parents=False)
                except OSError:
                    if not system.isdir(folder):
                        raise

    def remove(self, system: Any, path: str) -> None:
        """A file, or an empty folder; a folder with something in it stays."""
        if system.info(path)["type"] != "directory":
            system.rm_file(path)
            return
        with suppress(OSError):
            self.remove_empty(system, path)

    def remove_empty(self, system: Any, path: str) -> None:
        system.rmdir(path)


class LocalWay(Way):
    """Files of this machine: a link refuses a taken name."""

    def _sync(self, system: Any, file: Any) -> None:
        os.fsync(file.fileno())

    def rename_new(self, system: Any, path: str, target: str) -> bool:
        try:
            system.link(path, target)
        except FileExistsError:
            return False
        with suppress(OSError):  # else it is debris
            system.rm_file(path)
        self._sync_folder(target)
        return True

    def replace(self, system: Any, path: str, target: str) -> None:
        system.mv(path, target)
        self._sync_folder(target)

    def _sync_folder(self, path: str) -> None:
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class MemoryWay(Way):
    refusal = "files there are in the memory of one process, and its keeper is another"

    alone = threading.RLock()

    def write(self, system: Any, path: str, parts: Iterable[memoryview]) -> None:
        system.pipe_file(path, b"".join(parts))

    def rename_new(self, system: Any, path: str, target: str) -> bool:
        if system.exists(target):
            return False
        self.replace(system, path, target)
        return True

    def replace(self, system: Any, path: str, target: str) -> None:
        system.store[target] = system.store.pop(path)


class SftpWay(Way):
    """A server's rename refuses a taken name (so says version 3 of the protocol; OpenSSH links and unlinks),
    and its `posix-rename` does not."""

    def opened(self, system: Any) -> None:
        system.ftp.get_channel().settimeout(_TIMEOUT_S)

    def read(self, system: Any, path: str, start: int, stop: int) -> bytes:
        with system.open(path, "rb") as file:
            size = int(file.stat().st_size)
            # Many small requests at once: one after the other each costs a round trip.
            wanted = min(stop, size) - start
            return b"".join(file.readv([(start, wanted)])) if wanted > 0 else b""

    def _prepare(self, file: Any) -> None:
        file.set_pipelined(True)

    def _sync(self, system: Any, file: Any) -> None:
        # Each write's own answer: what reads others' answers later drops an error in them.
        while file._reqs:
            file.sftp._read_response(file._reqs.popleft())
        try:
            file.sftp._request(_SFTP_EXTENDED, "fsync@openssh.com", file.handle)
        except OSError as error:
            # Only OpenSSH has it.
            if "unsupported" not in str(error).lower():
                raise

    def rename_new(self, system: Any, path: str, target: str) -> bool:
        try:
            system.ftp.rename(path, target)
        except OSError as error:
            # A taken name is a failure like any other there.
            if error.errno is None and system.exists(target):
                return False
            raise
        return True


class ReadOnlyWay(Way):
    refusal = "fsspec does not promise for it that a file is created only where there is none"

    def write(self, system: Any, path: str, parts: Iterable[memoryview]) -> None:
        raise OSError(errno.EROFS, "this storage is only read here", path)

    def remove(self, system: Any, path: str) -> None:
        raise OSError(errno.EROFS, "this storage is only read here", path)

    remove_empty = remove
