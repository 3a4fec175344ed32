"""Requests to all other URLs through fsspec.

A run is read, copied and mirrored there, and never trained. Copies go to the file systems in `_ADAPTERS`,
whose rename refuses a taken name: the client writes a temporary file and then renames it, so no file is ever
visible in part. All others are read-only: fsspec does not promise exclusive creation.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from typing import Any, TypeVar

from flashckpt.errors import OptionError
from flashckpt.printable import cause, escaped, redacted
from flashckpt.store.base import Entry

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _DEADLINE_S = 0.1, 5.0, 60.0
# How often to retry when another process removes the folder because it is empty.
_FOLDER_TRIES = 8

_Found = TypeVar("_Found")


class FsspecClient:
    """See ObjectClient in objects.py. Keys are paths below the URL's folder.

    `options`: keyword arguments of fsspec's file system for this scheme. Connects at the first request, and
    again after a lost connection. Raises OptionError if fsspec or a package that it needs is not installed.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._url, scheme = url.rstrip("/"), url.partition("://")[0].lower()
        self._class = _file_system(url, scheme)
        self._root = str(self._class._strip_protocol(self._url)).rstrip("/")
        self._options = {**self._class._get_kwargs_from_urls(self._url), **(options or {})}
        self._adapter = _ADAPTERS.get(scheme, ReadOnlyAdapter)()
        # Idle connections. Most connections serve one thread at a time, and a short request must not wait for
        # an upload.
        self._idle: list[Any] = []

    @property
    def url(self) -> str:
        return self._url

    @property
    def server(self) -> str:
        return " ".join(str(self._options[name]) for name in ("host", "port") if name in self._options)

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def refusal(self) -> str:
        return self._adapter.refusal

    def brief(self) -> FsspecClient:
        """Return this client: short retries are for the alive counter of an attempt."""
        return self

    def renew(self, options: Mapping[str, Any]) -> None:
        """Use these options for new connections."""
        self._options = {**self._class._get_kwargs_from_urls(self._url), **options}
        self._idle.clear()

    def put(self, key: str, data: memoryview, *, is_new: bool = False) -> bool:
        return self._write(key, (data,), is_new=is_new)

    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        if not self._write(key, parts, is_new=True):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)

    def get(self, key: str, max_bytes: int) -> bytes | int:
        data = self.get_range(key, 0, max_bytes + 1)
        return bytes(data) if len(data) <= max_bytes else self.size(key)

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        return memoryview(
            self._call(key, lambda system: self._adapter.read(system, self._at(key), start, stop))
        )

    def size(self, key: str) -> int:
        about = self._call(key, lambda system: system.info(self._at(key)))
        if about["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return int(about["size"])

    def list(self, prefix: str) -> builtins.list[Entry]:
        place = self._at(prefix.rstrip("/"))
        try:
            found = self._call(prefix, lambda system: _listed(system, place))
        except (FileNotFoundError, NotADirectoryError):
            return []
        entries = []
        for about in found:
            above, _, name = str(about["name"]).rstrip("/").rpartition("/")
            if above.strip("/") != place.strip("/") or about["type"] not in ("file", "directory"):
                continue  # the listed path is itself a file, or the entry is a link
            is_folder = about["type"] == "directory"
            size, modified_s = (0, 0.0) if is_folder else (int(about["size"] or 0), _modified_s(about))
            entries.append(Entry(name, is_folder, size, modified_s))
        return entries

    def delete(self, keys: builtins.list[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError, NotADirectoryError):
                self._call(key, lambda system: self._adapter.remove(system, self._at(key)))  # noqa: B023
            # As in a bucket, a folder exists only as long as it has files.
            while "/" in key:
                key = key.rpartition("/")[0]
                try:
                    self._call(key, lambda system: self._adapter.remove_empty(system, self._at(key)))  # noqa: B023
                except OSError:
                    break

    def _at(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root or "/"

    # Writing

    def _write(self, key: str, parts: Iterable[memoryview], *, is_new: bool) -> bool:
        """Write a temporary file, then rename it to `key`. Return False if `is_new` and the name is taken."""
        target = self._at(key)
        above, _, name = target.rpartition("/")
        temporary = f"{above}/.{name}.{secrets.token_hex(8)}.tmp"
        try:
            self._fill(key, temporary, parts)
            if is_new:
                return self._rename_new(key, temporary, target, parts)
            self._call(key, lambda system: self._adapter.replace(system, temporary, target))
            return True
        except BaseException:
            self._discard(temporary)
            raise

    def _fill(self, key: str, temporary: str, parts: Iterable[memoryview]) -> None:
        # Parts of a shard can be iterated once only, so the caller retries a failed shard.
        again = isinstance(parts, tuple)
        folder = temporary.rpartition("/")[0]
        for attempt in range(_FOLDER_TRIES):
            try:
                self._call(key, lambda system: self._adapter.write(system, temporary, parts), again=again)
                return
            except FileNotFoundError:
                if attempt + 1 == _FOLDER_TRIES:
                    raise
                self._call(key, lambda system: self._adapter.make_folders(system, folder))

    def _rename_new(self, key: str, temporary: str, target: str, parts: Iterable[memoryview]) -> bool:
        """Rename unless the target is taken; return whether this client's file has the name.

        After a lost answer, the rename succeeded if the temporary name is gone and the target has the bytes.
        The bytes are compared because another process may have created the target and then removed the
        temporary name as stale. A shard has one writer and needs no comparison.
        """
        is_uncertain = False

        def rename(system: Any) -> bool:
            nonlocal is_uncertain
            was_uncertain, is_uncertain = is_uncertain, True
            try:
                return self._adapter.rename_new(system, temporary, target)
            except FileNotFoundError:
                if not was_uncertain or not system.exists(target):
                    raise
                data = b"".join(parts) if isinstance(parts, tuple) else None
                return data is None or self._adapter.read(system, target, 0, len(data) + 1) == data

        done = self._call(key, rename)
        if not done:
            self._discard(temporary)
        return done

    def _discard(self, temporary: str) -> None:
        # On failure it stays as a stale temporary file, which `recover` recognizes by its name.
        with suppress(OSError):
            self._call(temporary, lambda system: self._adapter.remove(system, temporary), again=False)

    # Requests

    def _call(self, key: str, act: Callable[[Any], _Found], *, again: bool = True) -> _Found:
        """Call `act` with a connection. Retry on a new connection if a later try may succeed."""
        pause, deadline = _FIRST_PAUSE_S, time.monotonic() + _DEADLINE_S
        while True:
            system = None
            try:
                with self._adapter.lock:
                    system = self._opened()
                    found = act(system)
                self._idle.append(system)
                return found
            except OptionError:
                raise
            except Exception as error:
                known = _as_os_error(error, key, self._options)
                if known is not None:
                    if system is not None:
                        self._idle.append(system)
                    raise known from cause(error, self._options)
                self._idle.clear()  # connections to the same server may be dead too
                if not again or time.monotonic() + pause > deadline:
                    why = f"{self._url}: {_text(error, self._options)}"
                    raise OSError(errno.EREMOTEIO, why, key) from cause(error, self._options)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _opened(self) -> Any:
        """Take an idle connection or open one."""
        with suppress(IndexError):
            return self._idle.pop()
        from fsspec.dircache import DirCache

        try:
            system = self._class(**self._options, skip_instance_cache=True)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"{self._url} cannot be used: {_text(error, self._options)}. Nothing was changed. Check the "
                "URL and its options."
            ) from cause(error, self._options)
        # Disable the cache of listings: other processes write there too.
        system.dircache = DirCache(use_listings_cache=False)
        self._adapter.configure(system)
        return system


def _file_system(url: str, scheme: str) -> Any:
    try:
        import fsspec
    except ImportError as error:
        raise OptionError(
            f"{url}: {scheme}:// needs the package fsspec, which is not installed. Nothing was changed. "
            "Install it: pip install 'flashckpt[fsspec]'."
        ) from error
    try:
        return fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise OptionError(
            f"{url}: fsspec needs a package for {scheme}:// that is not installed: {error}. Nothing was "
            "changed. Install it."
        ) from error
    except ValueError as error:
        raise OptionError(
            f"{url!r}: neither flashckpt nor an installed package supports {scheme}://. Nothing was changed. "
            "Name a folder or a file:// URL."
        ) from error


def _listed(system: Any, place: str) -> builtins.list[dict[str, Any]]:
    system.invalidate_cache()
    return list(system.ls(place, detail=True))


def _modified_s(about: Mapping[str, Any]) -> float:
    for name in ("mtime", "modified", "LastModified", "last_modified", "updated", "created"):
        value = about.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0


_CODES = {
    FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST, PermissionError: errno.EACCES,
    NotADirectoryError: errno.ENOTDIR, IsADirectoryError: errno.EISDIR,
}  # fmt: skip
_NEVER = (TypeError, ValueError, AttributeError, NotImplementedError)


def _as_os_error(error: Exception, key: str, options: Mapping[str, Any]) -> OSError | None:
    """Translate a permanent error; return None if another try may succeed."""
    text, name = _text(error, options), type(error).__name__
    if re.search("Authentication|BadHostKey", name) or "not found in known_hosts" in text:
        return PermissionError(errno.EACCES, text, key)
    if isinstance(error, _NEVER):
        return OSError(errno.EREMOTEIO, f"{name}: {text}", key)
    is_lost = isinstance(error, (ConnectionError, TimeoutError)) or "Socket is closed" in text
    if not isinstance(error, OSError) or is_lost or error.errno in (errno.EIO, errno.EHOSTUNREACH):
        return None
    if name == "NoValidConnectionsError":
        return None
    # Some file systems raise an error class without errno, and some only a text.
    code = error.errno or next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)
    return OSError(code or errno.EREMOTEIO, os.strerror(code) if code else text, key)


def _text(error: Exception, options: Mapping[str, Any]) -> str:
    return escaped(redacted(str(error).partition("\n")[0], options)) or type(error).__name__


# ---- what fsspec has no common call for: a rename that refuses a taken name, and syncing

_TIMEOUT_S = 60.0
_SFTP_EXTENDED = 200


class Adapter:
    """Takes paths of the file system, and raises its errors."""

    refusal = ""
    """Why nothing may be written there; empty if it may."""

    lock: AbstractContextManager[Any] = nullcontext()
    """Held during each operation if several connections share one."""

    def configure(self, system: Any) -> None:
        """Prepare a new connection."""

    def read(self, system: Any, path: str, start: int, stop: int) -> bytes:
        """Read a range; return fewer bytes if the file ends before."""
        size = int(system.info(path)["size"])
        return bytes(system.cat_file(path, start, min(stop, size))) if start < size else b""

    def write(self, system: Any, path: str, parts: Iterable[memoryview]) -> None:
        """Write or overwrite a file, durably if the file system can."""
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
        """Rename a file. Return False, and change nothing, if the target is taken."""
        raise NotImplementedError

    def replace(self, system: Any, path: str, target: str) -> None:
        system.mv(path, target)

    def make_folders(self, system: Any, path: str) -> None:
        """Make missing folders. Other processes may make them at the same time."""
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
        """Remove a file or an empty folder; keep a folder that is not empty."""
        if system.info(path)["type"] != "directory":
            system.rm_file(path)
            return
        with suppress(OSError):
            self.remove_empty(system, path)

    def remove_empty(self, system: Any, path: str) -> None:
        system.rmdir(path)


class LocalAdapter(Adapter):
    """Local files. Renames by a hard link, which refuses a taken name."""

    def _sync(self, system: Any, file: Any) -> None:
        os.fsync(file.fileno())

    def rename_new(self, system: Any, path: str, target: str) -> bool:
        try:
            system.link(path, target)
        except FileExistsError:
            return False
        with suppress(OSError):  # on failure it stays as a stale temporary file
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


class MemoryAdapter(Adapter):
    refusal = "its files are in the memory of this process alone"

    lock = threading.RLock()

    def write(self, system: Any, path: str, parts: Iterable[memoryview]) -> None:
        system.pipe_file(path, b"".join(parts))

    def rename_new(self, system: Any, path: str, target: str) -> bool:
        if system.exists(target):
            return False
        self.replace(system, path, target)
        return True

    def replace(self, system: Any, path: str, target: str) -> None:
        system.store[target] = system.store.pop(path)


class SftpAdapter(Adapter):
    """SFTP. A rename refuses a taken name (by version 3 of the protocol; OpenSSH links and unlinks), unlike
    `posix-rename`."""

    def configure(self, system: Any) -> None:
        system.ftp.get_channel().settimeout(_TIMEOUT_S)

    def read(self, system: Any, path: str, start: int, stop: int) -> bytes:
        with system.open(path, "rb") as file:
            size = int(file.stat().st_size)
            # readv pipelines many small requests, which would each cost a round trip.
            wanted = min(stop, size) - start
            return b"".join(file.readv([(start, wanted)])) if wanted > 0 else b""

    def _prepare(self, file: Any) -> None:
        file.set_pipelined(True)

    def _sync(self, system: Any, file: Any) -> None:
        # Read the answer of each write here: paramiko drops errors in answers that it reads later.
        while file._reqs:
            file.sftp._read_response(file._reqs.popleft())
        try:
            file.sftp._request(_SFTP_EXTENDED, "fsync@openssh.com", file.handle)
        except OSError as error:
            # Only OpenSSH supports this request.
            if "unsupported" not in str(error).lower():
                raise

    def rename_new(self, system: Any, path: str, target: str) -> bool:
        try:
            system.ftp.rename(path, target)
        except OSError as error:
            # SFTP has no error code of its own for a taken name.
            if error.errno is None and system.exists(target):
                return False
            raise
        return True


class ReadOnlyAdapter(Adapter):
    refusal = "fsspec does not promise exclusive creation of files for it"

    def write(self, system: Any, path: str, parts: Iterable[memoryview]) -> None:
        raise OSError(errno.EROFS, "this storage is only read here", path)

    def remove(self, system: Any, path: str) -> None:
        raise OSError(errno.EROFS, "this storage is only read here", path)

    remove_empty = remove


_ADAPTERS: dict[str, type[Adapter]] = {
    "local": LocalAdapter,
    "memory": MemoryAdapter,
    "sftp": SftpAdapter,
    "ssh": SftpAdapter,
}
