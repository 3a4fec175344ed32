"""Where a file stands while it is copied from a server to another place. Owns what is said where there is no
room for it."""

from __future__ import annotations

import os
import tempfile

from flashckpt.format.layout import PAGE


def spool(num_bytes: int) -> int:
    """A file without a name, with room for so many bytes: what is written to it may go to the disk. OSError,
    with the folder that has no room: it is neither the source's nor the target's."""
    folder = tempfile.gettempdir()
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, -(-num_bytes // PAGE) * PAGE)
        except OSError as error:
            why = f"{error.strerror}: a file of {num_bytes:,} bytes that is copied stands here meanwhile"
            raise OSError(error.errno, f"{why} ($TMPDIR names another folder)", folder) from error
        return os.dup(file.fileno())
