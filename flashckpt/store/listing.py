"""What one walk of a folder has found, and small objects that were read or written lately, by their versions.

For stores without folders: names and lengths of everything below a prefix come in pages of a thousand, where
each folder alone costs a request. Asks nothing itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from flashckpt.store.base import Entry

_MAX_BYTES = 4 << 20
LARGEST_RECENT = 1 << 20
"""Bytes of an object that is kept."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object as a listing shows it. `version` changes with its bytes; empty where the server has none."""

    key: str
    num_bytes: int
    modified_s: float = 0.0
    version: str = ""


class Listing:
    """Everything below `folder` at one moment. Whoever changes one has it alone."""

    def __init__(self, folder: str, found: Iterable[Found]) -> None:
        self._folder = folder
        self._below: dict[str, dict[str, Found | None]] = defaultdict(dict)  # None for a folder
        self.count = 0
        for each in found:
            self.add(each)

    def copy(self) -> Listing:
        made = Listing(self._folder, ())
        made.count = self.count
        made._below.update({folder: dict(names) for folder, names in self._below.items()})
        return made

    def covers(self, path: str) -> bool:
        return f"{path}/".startswith(f"{self._folder}/")

    def add(self, each: Found) -> None:
        folder, _, name = each.key.rpartition("/")
        self._below[folder][name] = each
        self.count += 1
        while folder != self._folder:
            folder, _, name = folder.rpartition("/")
            if name in self._below[folder]:
                break
            self._below[folder][name] = None

    def get(self, path: str) -> Found | None:
        folder, _, name = path.rpartition("/")
        return self._below.get(folder, {}).get(name)

    def remove(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        self._below.get(folder, {}).pop(name, None)
        while folder != self._folder and folder in self._below and not self._below[folder]:
            del self._below[folder]
            folder, _, name = folder.rpartition("/")
            self._below[folder].pop(name, None)

    def paths(self, folder: str) -> list[str]:
        """All files below a folder."""
        found = []
        for name, each in self._below.get(folder, {}).items():
            found += [f"{folder}/{name}"] if each is not None else self.paths(f"{folder}/{name}")
        return found

    def entries(self, folder: str) -> list[Entry]:
        return [
            Entry(name, True, 0) if each is None else Entry(name, False, each.num_bytes, each.modified_s)
            for name, each in sorted(self._below.get(folder, {}).items())
        ]


class RecentObjects:
    """Bytes of small objects by key and version: what a fresh listing names need not be fetched again. A few
    MiB, the longest unused go first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: str, version: str) -> bytes | None:
        with self._lock:
            found = self._kept.get(key)
            if found is None or not version or found[0] != version:
                return None
            self._kept.move_to_end(key)
            return found[1]

    def put(self, key: str, version: str, data: bytes) -> None:
        with self._lock:
            _, before = self._kept.pop(key, ("", b""))
            self._num_bytes -= len(before)
            if not version or len(data) > LARGEST_RECENT:
                return
            self._kept[key] = version, data
            self._num_bytes += len(data)
            while self._num_bytes > _MAX_BYTES:
                _, (_, oldest) = self._kept.popitem(last=False)
                self._num_bytes -= len(oldest)
