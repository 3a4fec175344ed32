"""What the benchmark does to a peer's files between measurements: make them durable, forget them, remove
them. Never inside of what is timed, but for `sync_all`, which is the end of "durable".
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def sync_all(folder: Path) -> None:
    """fsync of every file and folder below: only then has a peer that does not sync kept its word."""
    for path in _walk(folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def forget(folder: Path) -> None:
    """Put the files out of the page cache, so that a load reads the disk. They must be synced before."""
    for path in _walk(folder):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def keep_newest(folder: Path, count: int) -> None:
    """Remove all but the newest checkpoints of peers that name them by step. Others prune by themselves."""
    steps = sorted(
        (path for path in folder.iterdir() if path.name.partition(".")[0].isdigit()),
        key=lambda path: int(path.name.partition(".")[0]),
    )
    for path in steps[:-count] if count else steps:
        remove(path)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def num_bytes(folder: Path) -> int:
    return sum(sizes(folder).values())


def sizes(folder: Path) -> dict[Path, int]:
    """Of the files that are there: what a peer removes meanwhile is not."""
    found = {}
    for path in _walk(folder):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                found[path] = path.stat().st_size
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield Path(parent)
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                yield path
