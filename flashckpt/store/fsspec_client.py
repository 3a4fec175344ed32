"""Requests to all other URLs through fsspec, which only read: fsspec does not promise exclusive creation."""

from __future__ import annotations

import builtins
import errno
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn, TypeVar

from flashckpt.errors import OptionError
from flashckpt.printable import cause, escaped, redacted
from flashckpt.store.base import Entry, read_only

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _DEADLINE_S = 0.1, 5.0, 60.0
_SFTP_TIMEOUT_S = 60.0

_Found = TypeVar("_Found")


class FsspecClient:
    """See ObjectClient in objects.py. Keys are paths below the URL's folder.

    `options`: keyword arguments of fsspec's file system for this scheme. Connects at the first request, and
    again after a lost connection. Raises OptionError if fsspec or a package that it needs is not installed.
    """

    is_read_only = True

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url, scheme = url.rstrip("/"), url.partition("://")[0].lower()
        self._class, self._is_sftp = _file_system(url, scheme), scheme in ("sftp", "ssh")
        self._root = str(self._class._strip_protocol(self.url)).rstrip("/")
        self._options = {**self._class._get_kwargs_from_urls(self.url), **(options or {})}
        # Idle connections. Most connections serve one thread at a time.
        self._idle: list[Any] = []

    @property
    def server(self) -> str:
        return " ".join(str(self._options[name]) for name in ("host", "port") if name in self._options)

    def brief(self) -> FsspecClient:
        """Return this client: short retries are for the alive counter of an attempt."""
        return self

    def renew(self, options: Mapping[str, Any]) -> None:
        """Use these options for new connections."""
        self._options = {**self._class._get_kwargs_from_urls(self.url), **options}
        self._idle.clear()

    def _refuse(self, *arguments: Any, **named: Any) -> NoReturn:
        raise read_only(self.url)

    put = upload = delete = _refuse

    def get(self, key: str, max_bytes: int) -> memoryview | int:
        data = self.get_range(key, 0, max_bytes + 1)
        return data if len(data) <= max_bytes else self.size(key)

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        return memoryview(self._call(key, lambda system: self._read(system, self._at(key), start, stop)))

    def size(self, key: str) -> int:
        about = self._call(key, lambda system: system.info(self._at(key)))
        if about["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return int(about["size"])

    def list(self, prefix: str) -> builtins.list[Entry]:
        place = self._at(prefix.rstrip("/"))
        try:
            found = self._call(prefix, lambda system: list(system.ls(place, detail=True)))
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

    def _read(self, system: Any, path: str, start: int, stop: int) -> bytes:
        if self._is_sftp:
            with system.open(path, "rb") as file:
                # paramiko sends the many small requests of `readv` at once. Each would cost a round trip.
                wanted = min(stop, int(file.stat().st_size)) - start
                return b"".join(file.readv([(start, wanted)])) if wanted > 0 else b""
        size = int(system.info(path)["size"])
        return bytes(system.cat_file(path, start, min(stop, size))) if start < size else b""

    def _at(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root or "/"

    def _call(self, key: str, act: Callable[[Any], _Found]) -> _Found:
        """Call `act` with a connection. Retry on a new connection if a later try may succeed."""
        pause, deadline = _FIRST_PAUSE_S, time.monotonic() + _DEADLINE_S
        while True:
            system = None
            try:
                found = act(system := self._opened())
                self._idle.append(system)
                return found
            except OptionError:
                raise
            except Exception as error:
                if (known := _as_os_error(error, key, self._options)) is not None:
                    self._idle += [] if system is None else [system]
                    raise known from cause(error, self._options)
                self._idle.clear()  # connections to the same server may be dead too
                if time.monotonic() + pause > deadline:
                    why = f"{self.url}: {_text(error, self._options)}"
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
                f"{self.url} cannot be used: {_text(error, self._options)}. Nothing was changed. Check the "
                "URL and its options."
            ) from cause(error, self._options)
        # Without a cache of listings: other processes write there.
        system.dircache = DirCache(use_listings_cache=False)
        if self._is_sftp:
            system.ftp.get_channel().settimeout(_SFTP_TIMEOUT_S)
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


def _modified_s(about: Mapping[str, Any]) -> float:
    for name in ("mtime", "modified", "LastModified", "last_modified", "updated", "created"):
        value = about.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0


_CODES = {
    FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES,
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
    is_lost = isinstance(error, (ConnectionError, TimeoutError)) or name == "NoValidConnectionsError"
    is_lost = is_lost or "Socket is closed" in text
    if not isinstance(error, OSError) or is_lost or error.errno in (errno.EIO, errno.EHOSTUNREACH):
        return None
    # Some file systems raise an error class without errno, and some only a text.
    code = error.errno or next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)
    return OSError(code or errno.EREMOTEIO, os.strerror(code) if code else text, key)


def _text(error: Exception, options: Mapping[str, Any]) -> str:
    return escaped(redacted(str(error).partition("\n")[0], options)) or type(error).__name__
