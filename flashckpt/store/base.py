"""The narrow waist between commit and whatever holds the files. Owns the Protocol, and which URL is what.

A store holds small files under '/'-separated paths relative to its run. Shards are written and read by
the native engine, through `local_path`. A backend passes tests/contracts/ or it is not one.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote, urlsplit

from flashckpt.errors import OptionError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_MAX_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder. `num_bytes` is the length of a file, 0 for a folder."""

    name: str
    is_folder: bool
    num_bytes: int


class Store(Protocol):
    """All of it may raise OSError, with errno and path; a link raises RunError in a folder's place
    and DamagedError in a file's: none is followed."""

    @property
    def url(self) -> str:
        """The run as its user would name it."""

    def read(self, path: str, max_bytes: int) -> bytes:
        """A whole file. FileNotFoundError where there is none, DamagedError beyond `max_bytes`."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a new file, durably and whole or not at all. False where the name is taken: what stands
        there is then durable too. The folder must be there."""

    def replace(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Put a file in a name's place at once: a reader sees the old bytes or the new ones. Not
        durable means that a power loss may leave either, or an empty file."""

    def link(self, source: str, target: str) -> bool:
        """A second name for a file, durably. False where `target` is taken; OSError where links cannot be."""

    def list(self, folder: str) -> list[Entry]:
        """Files and folders by name; links and everything else are left out. Empty where there is none."""

    def make_folder(self, path: str) -> None:
        """The folder and those above it, each durable in its parent when this returns."""

    def sync_folder(self, path: str) -> None:
        """The names in a folder are durable when this returns."""

    def remove(self, path: str) -> None:
        """Remove one file; nothing where there is none. Not durable by itself."""

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all in it; nothing where there is none. Links are removed, not followed."""

    def remove_empty(self, path: str) -> bool:
        """Remove a folder if nothing is in it."""

    def exists(self, path: str) -> bool:
        """Whether a file or folder (no link) has this name."""

    def local_path(self, path: str) -> str:
        """The path in the local file system, for the native engine; no folder on the way is a link."""

    def move_to(self, url: str) -> None:
        """The run is found there from now on: somebody has moved it. Calls under way end where it was."""


def split(path: str) -> list[str]:
    """The names on a path in a store. ValueError for one that could lead out of it."""
    names = path.split("/") if path else []
    for name in names:
        if name in ("", ".", "..") or "\0" in name or len(os.fsencode(name)) > _MAX_NAME_BYTES:
            raise ValueError(f"{path!r} is no path inside a run")
    return names


def open_store(url_or_path: str | os.PathLike[str]) -> Store:
    """The store that a run's path or `file://` URL names. Nothing is created or read.

    OptionError for any other scheme, which is named.
    """
    from flashckpt.store.local import LocalStore

    text = os.fspath(url_or_path) if isinstance(url_or_path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise OptionError(f"the run's path is {url_or_path!r}. Nothing was changed. Name a folder, as text.")
    match = _SCHEME.match(text)
    if match is None:
        if not text:
            raise OptionError("the run's path is empty. Nothing was changed. Name a folder.")
        return LocalStore(text)
    if match[1].lower() != "file":
        raise OptionError(
            f"{text!r}: {match[1]}:// is not supported yet. Nothing was changed. "
            "Name a folder or a file:// URL."
        )
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise OptionError(
            f"{text!r} names a file on another machine. Nothing was changed. Write file:///absolute/path."
        )
    return LocalStore(unquote(parts.path))
