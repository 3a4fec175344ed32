"""The folders of a run on disk, also while another process removes files and folders."""

import os
import pathlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashckpt.format.names import CommitName
from flashckpt.store.local import LocalStore
from tests import run_view


def records(run: Path) -> list[CommitName]:
    """The names of the checkpoints of a run, of any branch, oldest first."""
    return list(run_view.checkpoints(LocalStore(str(run))))


def data_of(run: Path, step: int) -> Path:
    """The folder with the shards and parts of the newest commit of a step number."""
    newest = [name for name in records(run) if name.step == step][-1]
    return run / run_view.folder_of(LocalStore(str(run)), newest.id)


def flip(path: str | Path, offset: int, bit: int = 1) -> None:
    """Flip one bit of a file; once more, and it is as it was. offset: from the end where it is negative."""
    with open(path, "r+b", buffering=0) as file:
        at = file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        [byte] = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte ^ bit]), at)


def contents(*folders: Path) -> list[bytes]:
    """Of all files that are there to the end of the look."""
    found = []
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for path in (Path(parent, name) for name in names):
                if path.is_file():
                    with suppress(FileNotFoundError):
                        found.append(path.read_bytes())
    return found


class _Nothing(tuple[()]):
    """As `os.scandir` gives of an empty folder."""

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: object) -> None: ...


def let_folders_go() -> None:
    """`glob` and `rglob` pass over a folder that goes while they look through it, as Python 3.13's do."""
    if sys.version_info >= (3, 13):
        return
    owner: Any = getattr(pathlib, "_NormalAccessor", Path)  # Python 3.10 has the one, 3.11 and 3.12 the other
    name = "scandir" if owner is not Path else "_scandir"
    scandir = getattr(owner, name)

    def gently(*arguments: Any) -> Any:
        try:
            return scandir(*arguments)
        except FileNotFoundError:
            return _Nothing()

    setattr(owner, name, staticmethod(gently) if owner is not Path else gently)
