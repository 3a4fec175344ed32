"""A file system's memory: what a power loss leaves at any moment of what a store did.

Owns a strict model: a file's bytes last once it was synced, a name once its folder was. Between two
syncs each changed name and each unsynced file may last or not, independently of the others.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flashckpt.store.local import System
from tests.crash.mortal import written_by_calls


@dataclass(eq=False)
class File:
    now: bytes = b""
    lasting: bytes = b""


@dataclass(eq=False)
class Folder:
    now: "dict[str, File | Folder]" = field(default_factory=dict)
    lasting: "dict[str, File | Folder]" = field(default_factory=dict)


class Recorder(System):
    """Does every call, and keeps it as a change of the model, to be played again up to any moment."""

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)
        self.changes: list[Callable[[Model], None]] = []
        self._files: dict[int, int] = {}
        self._count = 0

    def _path(self, folder: int) -> tuple[str, ...]:
        path = os.path.relpath(os.readlink(f"/proc/self/fd/{folder}"), self.root)
        return () if path == "." else tuple(path.split("/"))

    def create(self, name: str, folder: int) -> int:
        file = super().create(name, folder)
        self._count += 1
        self._files[file], where, key = self._count, self._path(folder), self._count
        self.changes.append(lambda model: model.create(where, name, key))
        return file

    def write(self, file: int, data: memoryview) -> int:
        written, key = super().write(file, data), self._files[file]
        for half in (bytes(data[: written // 2]), bytes(data[written // 2 : written])):
            self.changes.append(lambda model, half=half: model.write(key, half))  # type: ignore[misc]
        return written

    def write_shard(
        self, path: str, source: int, offset: int, num_bytes: int, **how: Any
    ) -> tuple[bytes, bytes, bool]:
        return written_by_calls(self, path, os.pread(source, num_bytes, offset), **how)

    def sync(self, file: int) -> None:
        key = self._files[file]
        self.changes.append(lambda model: model.sync(key))

    def sync_folder(self, folder: int) -> None:
        where = self._path(folder)
        self.changes.append(lambda model: model.sync_folder(where))

    def link(self, source: str, target: str, source_folder: int, target_folder: int) -> None:
        super().link(source, target, source_folder, target_folder)
        a, b = self._path(source_folder), self._path(target_folder)
        self.changes.append(lambda model: model.link(a, source, b, target))

    def rename(self, source: str, target: str, folder: int) -> None:
        super().rename(source, target, folder)
        where = self._path(folder)
        self.changes.append(lambda model: model.rename(where, source, target))

    def make_folder(self, name: str, folder: int) -> None:
        super().make_folder(name, folder)
        where = self._path(folder)
        self.changes.append(lambda model: model.make_folder(where, name))

    def remove(self, name: str, folder: int) -> None:
        super().remove(name, folder)
        where = self._path(folder)
        self.changes.append(lambda model: model.remove(where, name))

    def remove_folder(self, name: str, folder: int) -> None:
        super().remove_folder(name, folder)
        where = self._path(folder)
        self.changes.append(lambda model: model.remove(where, name))


class Model:
    """The file system at one moment: as programs see it, and as the disk has it."""

    def __init__(self) -> None:
        self.root = Folder()
        self._files: dict[int, File] = {}

    def _folder(self, where: tuple[str, ...]) -> Folder:
        found = self.root
        for name in where:
            inner = found.now[name]
            assert isinstance(inner, Folder)
            found = inner
        return found

    def create(self, where: tuple[str, ...], name: str, key: int) -> None:
        self._files[key] = self._folder(where).now[name] = File()

    def write(self, key: int, data: bytes) -> None:
        self._files[key].now += data

    def sync(self, key: int) -> None:
        self._files[key].lasting = self._files[key].now

    def sync_folder(self, where: tuple[str, ...]) -> None:
        folder = self._folder(where)
        folder.lasting = dict(folder.now)

    def link(self, a: tuple[str, ...], source: str, b: tuple[str, ...], target: str) -> None:
        self._folder(b).now[target] = self._folder(a).now[source]

    def rename(self, where: tuple[str, ...], source: str, target: str) -> None:
        self._folder(where).now[target] = self._folder(where).now.pop(source)

    def make_folder(self, where: tuple[str, ...], name: str) -> None:
        self._folder(where).now[name] = Folder()

    def remove(self, where: tuple[str, ...], name: str) -> None:
        del self._folder(where).now[name]

    def left(self, luck: random.Random | None) -> dict[str, bytes | None]:
        """What a loss of power leaves, folders (None) before what is in them: only what lasts, or with `luck`
        some of the rest."""
        found: dict[str, bytes | None] = {}

        def look(folder: Folder, path: str) -> None:
            found[path] = None
            for name in sorted({*folder.now, *folder.lasting}):
                lucky = luck is not None and luck.random() < 0.5
                node = (folder.now if lucky else folder.lasting).get(name)
                if isinstance(node, Folder):
                    look(node, f"{path}/{name}")
                elif isinstance(node, File):
                    whole = luck is not None and luck.random() < 0.5
                    found[f"{path}/{name}"] = node.now if whole else node.lasting

        look(self.root, "")
        return found


def write(left: dict[str, bytes | None], into: str) -> None:
    """Write what is left into a folder without files."""
    for path, data in left.items():
        if data is None:
            os.makedirs(f"{into}{path}", exist_ok=True)
        else:
            with open(f"{into}{path}", "wb") as file:
                file.write(data)
