"""Small file systems of a test's own: the real thing instead of a pretended ENOSPC."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_tmpfs(num_bytes: int, inodes: int = 0) -> Iterator[Path]:
    """A mounted tmpfs of that size, with so many inodes (0: no limit). Skips the test where mounting is not
    allowed."""
    folder = Path(tempfile.mkdtemp(prefix="flashckpt-mount-"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},nr_inodes={inodes},mode=700", "tmpfs", str(folder)],
        capture_output=True,
    )
    if mounted.returncode:
        folder.rmdir()
        pytest.skip("mounting is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def fill(disk: Path, left: int = 0) -> Path:
    """Take all of a file system but so many bytes. Returns the file that has them."""
    filler, found = disk / "filler", os.statvfs(disk)
    with suppress(OSError), open(filler, "wb", buffering=0) as file:
        file.write(bytes(found.f_bavail * found.f_frsize - left))
    return filler
