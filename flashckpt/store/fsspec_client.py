"""Requests to any other URL through fsspec.

Owns which file systems a run may be trained on, and what a request means on one that has folders. Those are
the ones in `_WAYS`, each with a rename that refuses a taken name: a file is written beside its name and then
renamed, so none is ever half visible. All others are only read: fsspec has no promise for creating.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

from flashckpt.errors import OptionError
from flashckpt.printable import cause, escaped, redacted
from flashckpt.store.base import Entry
from flashckpt.store.fsspec_ways import LocalWay, MemoryWay, ReadOnlyWay, SftpWay, Way
from flashckpt.store.listing import Found

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _DEADLINE_S = 0.1, 5.0, 60.0
_BRIEF_DEADLINE_S = 5.0
# How often a folder may vanish under us, because another process found it empty and removed it.
_FOLDER_TRIES = 8

_WAYS: dict[str, type[Way]] = {"local": LocalWay, "memory": MemoryWay, "sftp": SftpWay, "ssh": SftpWay}

_Found = TypeVar("_Found")


class FsspecClient:
    """See ObjectClient in objects.py. Keys are paths below the URL's folder.

    `options` are what fsspec's file system of this scheme takes by keyword. OptionError where fsspec or what
    it needs for the scheme is not installed. Connects at the first request; one that is lost is made anew.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, is_brief: bool = False) -> None:
        self._url, scheme = url.rstrip("/"), url.partition("://")[0].lower()
        self._class = _file_system(url, scheme)
        self._root = str(self._class._strip_protocol(self._url)).rstrip("/")
        self._options = {**self._class._get_kwargs_from_urls(self._url), **(options or {})}
        self._brief: FsspecClient | None = None
        self._way = _WAYS.get(scheme, ReadOnlyWay)()
        self._deadline_s = _BRIEF_DEADLINE_S if is_brief else _DEADLINE_S
        # Connections that nobody uses now: few may be used by two threads at once, and a beat of a trainer's
        # life is not to wait for an upload.
        self._idle: list[Any] = []

    @property
    def url(self) -> str:
        return self._url

    @property
    def server(self) -> str:
        return " ".join(str(self._options[name]) for name in ("host", "port") if name in self._options)

    @property
    def refusal(self) -> str:
        return self._way.refusal

    def brief(self) -> FsspecClient:
        self._brief = self._brief or FsspecClient(self._url, self._options, is_brief=True)
        return self._brief

    def renew(self, options: Mapping[str, Any]) -> None:
        """For connections that are made from now on."""
        self._options = {**self._class._get_kwargs_from_urls(self._url), **options}
        self._idle.clear()
        if self._brief is not None:
            self._brief.renew(options)

    def put(self, key: str, data: memoryview, *, mark: str | None) -> str | None:
        """No version: the times that file systems give are too coarse for one."""
        return "" if self._write(key, (data,), is_new=mark is not None) else None

    def mark(self, key: str) -> str:
        """A try whose answer was lost is told by `put` itself."""
        return ""

    def upload(self, key: str, parts: Iterable[memoryview], part_bytes: int) -> None:
        if not self._write(key, parts, is_new=True):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)

    def get(self, key: str, max_bytes: int) -> tuple[bytes | int, str]:
        data = self.get_range(key, 0, max_bytes + 1)
        return bytes(data) if len(data) <= max_bytes else self.size(key), ""

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        return memoryview(self._call(key, lambda system: self._way.read(system, self._at(key), start, stop)))

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
                continue  # a file that was to be listed itself, or a link
            is_folder = about["type"] == "directory"
            size, modified_s = (0, 0.0) if is_folder else (int(about["size"] or 0), _modified_s(about))
            entries.append(Entry(name, is_folder, size, modified_s))
        return entries

    def keys(self, prefix: str) -> Iterator[str]:
        """Folders, too, each after what is in it."""
        for entry in self.list(prefix):
            key = f"{prefix}{entry.name}"
            if entry.is_folder:
                yield from self.keys(f"{key}/")
            yield key

    def walk(self, prefix: str) -> Iterator[Found]:
        for entry in self.list(prefix):
            key = f"{prefix}{entry.name}"
            if entry.is_folder:
                yield from self.walk(f"{key}/")
            else:
                yield Found(key, entry.num_bytes, entry.modified_s)

    def delete(self, keys: builtins.list[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError, NotADirectoryError):
                self._call(key, lambda system: self._way.remove(system, self._at(key)))  # noqa: B023
            # As in a bucket, a folder is there as long as something is in it.
            while "/" in key:
                key = key.rpartition("/")[0]
                try:
                    self._call(key, lambda system: self._way.remove_empty(system, self._at(key)))  # noqa: B023
                except OSError:
                    break

    def _at(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root or "/"

    # Writing

    def _write(self, key: str, parts: Iterable[memoryview], *, is_new: bool) -> bool:
        """A file is whole under a name of its own before it gets the one it is to have. False where that is
        taken."""
        target = self._at(key)
        above, _, name = target.rpartition("/")
        temporary = f"{above}/.{name}.{secrets.token_hex(8)}.tmp"
        try:
            self._fill(key, temporary, parts)
            if is_new:
                return self._rename_new(key, temporary, target, parts)
            self._call(key, lambda system: self._way.replace(system, temporary, target))
            return True
        except BaseException:
            self._discard(temporary)
            raise

    def _fill(self, key: str, temporary: str, parts: Iterable[memoryview]) -> None:
        # Parts of a shard come once: what fails in the middle of it ends here, and is tried by its writer.
        again = isinstance(parts, tuple)
        folder = temporary.rpartition("/")[0]
        for attempt in range(_FOLDER_TRIES):
            try:
                self._call(key, lambda system: self._way.write(system, temporary, parts), again=again)
                return
            except FileNotFoundError:
                if attempt + 1 == _FOLDER_TRIES:
                    raise
                self._call(key, lambda system: self._way.make_folders(system, folder))

    def _rename_new(self, key: str, temporary: str, target: str, parts: Iterable[memoryview]) -> bool:
        """Where the answer was lost, the file tells: its first name is gone, and its bytes are there. Others
        may have cleared the first name away, once they had taken the second; a shard's has one writer."""
        is_uncertain = False

        def rename(system: Any) -> bool:
            nonlocal is_uncertain
            was_uncertain, is_uncertain = is_uncertain, True
            try:
                return self._way.rename_new(system, temporary, target)
            except FileNotFoundError:
                if not was_uncertain or not system.exists(target):
                    raise
                data = b"".join(parts) if isinstance(parts, tuple) else None
                return data is None or self._way.read(system, target, 0, len(data) + 1) == data

        done = self._call(key, rename)
        if not done:
            self._discard(temporary)
        return done

    def _discard(self, temporary: str) -> None:
        # Else it is debris, which `recover` knows by its name.
        with suppress(OSError):
            self._call(temporary, lambda system: self._way.remove(system, temporary), again=False)

    # Requests

    def _call(self, key: str, act: Callable[[Any], _Found], *, again: bool = True) -> _Found:
        """One policy for all: what may succeed later is tried again, on a new connection."""
        pause, deadline = _FIRST_PAUSE_S, time.monotonic() + self._deadline_s
        while True:
            system = None
            try:
                with self._way.alone:
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
                self._idle.clear()  # they are of the same server, which may have gone
                if not again or time.monotonic() + pause > deadline:
                    why = f"{self._url}: {_text(error, self._options)}"
                    raise OSError(errno.EREMOTEIO, why, key) from cause(error, self._options)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _opened(self) -> Any:
        """A connection that nobody else uses."""
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
        # Others write there, too.
        system.dircache = DirCache(use_listings_cache=False)
        self._way.opened(system)
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
            f"{url!r}: {scheme}:// is not supported here, and no installed package has it. Nothing was "
            "changed. Name a folder or a file:// URL."
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
    """What the error is for good, None where another try may succeed."""
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
    # Some raise a kind of error without its number; of some servers' answers there is no more than a text.
    code = error.errno or next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)
    return OSError(code or errno.EREMOTEIO, os.strerror(code) if code else text, key)


def _text(error: Exception, options: Mapping[str, Any]) -> str:
    return escaped(redacted(str(error).partition("\n")[0], options)) or type(error).__name__
