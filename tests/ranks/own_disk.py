"""A store of which each node has its own under one URL, as of a path on its own disk: `disk:///folder/run` is
`/folder/run-NODE`, where NODE is the name of the node's runtime folder.

`python -m tests.ranks.rank tests.ranks.own_disk PROGRAM …` runs a program of ranks that finds it.
"""

from __future__ import annotations

import errno
import os
import re
import runpy
import sys
from pathlib import Path

from flashckpt.format.layout import Layout
from flashckpt.store import ENTRY_POINTS
from flashckpt.store.base import MemoryRange, Written
from flashckpt.store.local import LocalStore

_SCHEME, _ROOM = "disk://", "-room"


class OwnDisk(LocalStore):
    """The folder of the node that this process is on. Which nodes share one stands in FLASHCKPT_TEST_SHARED:
    "name=other" has the first use the second's; and in FLASHCKPT_TEST_FULL which steps find one full:
    "name=first" or "name=first-last", until `make_room`."""

    def __init__(self, url: str) -> None:
        self._url = url
        super().__init__(folder_of(url, os.environ["FLASHCKPT_RUNTIME"]))

    def write_shard(
        self, path: str, layout: Layout, source: MemoryRange, *, threads: int = 2, progress: int = 0
    ) -> Written:
        found, name = re.match("steps/([0-9]+)/", path), os.path.basename(os.environ["FLASHCKPT_RUNTIME"])
        full = dict(each.split("=") for each in os.environ.get("FLASHCKPT_TEST_FULL", "").split())
        first, _, last = full.get(name, "").partition("-")
        is_full = first and found and int(first) <= int(found[1]) <= int(last or found[1])
        if is_full and not os.path.exists(self._root + _ROOM):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return super().write_shard(path, layout, source, threads=threads, progress=progress)

    @property
    def url(self) -> str:
        return self._url


def folder_of(url: str, runtime: str | Path) -> str:
    """Where a node, by its runtime folder, has what the URL names."""
    name = os.path.basename(str(runtime))
    shared = dict(each.split("=") for each in os.environ.get("FLASHCKPT_TEST_SHARED", "").split())
    return f"{url.removeprefix(_SCHEME)}-{shared.get(name, name)}"


def make_room(folder: Path) -> None:
    """From now on this folder's disk is not full."""
    Path(f"{folder}{_ROOM}").touch()


def installed(folder: Path) -> str:
    """Make `folder` one whose packages have this store: for FLASHCKPT_TEST_PACKAGES."""
    about = folder / "own_disk-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-disk\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\ndisk = tests.ranks.own_disk:OwnDisk\n")
    return str(folder)


def arm_keeper(url: str) -> None:
    """Of a run that begins, this node's keeper stops at the crash point that FLASHCKPT_TEST_STOPS names:
    "name=point"."""
    name, _, point = os.environ.get("FLASHCKPT_TEST_STOPS", "").partition("=")
    runtime = os.environ["FLASHCKPT_RUNTIME"]
    if name == os.path.basename(runtime) and not os.path.exists(folder_of(url, runtime)):
        os.environ["FLASHCKPT_CRASH_AT"] = f"{point}:stop"


if __name__ == "__main__":
    packages = os.environ["FLASHCKPT_TEST_PACKAGES"]
    sys.path.append(packages)
    # For its keeper.
    os.environ["PYTHONPATH"] = f"{packages}:{os.environ.get('PYTHONPATH', '')}"
    sys.argv = sys.argv[1:]
    arm_keeper(sys.argv[1])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
