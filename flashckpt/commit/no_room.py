"""Records that a removal begins with, on a disk that is full to the last byte.

Owns what stands for one there: a further name of run.json, since a link takes no room. Under a manifest's
name it is a tombstone; under that of a record of buried constants it is one that cannot be read, and may name
any file of its folder.
"""

from __future__ import annotations

import errno
from enum import Enum

from flashckpt.errors import DamagedError, FormatError
from flashckpt.format.names import RUN
from flashckpt.format.records import Run
from flashckpt.store.base import Store

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Created(Enum):
    FILE = "the file"
    STAND_IN = "what stands for it"
    TAKEN = "nothing: the name is taken"

    def __bool__(self) -> bool:
        return self is not Created.TAKEN


def is_full(error: OSError) -> bool:
    """Whether it says that there is no room."""
    return error.errno in _FULL


def create_or_stand_in(store: Store, path: str, data: bytes) -> Created:
    """Create a small file, or, where there is no room for it, what stands for it. OSError also where the
    storage has no links."""
    try:
        return Created.FILE if store.create(path, data) else Created.TAKEN
    except OSError as error:
        if not is_full(error):
            raise
        if not store.copy(RUN, path):
            if store.exists(path):
                return Created.TAKEN
            raise
    return Created.STAND_IN


def replace_stand_in(store: Store, path: str, data: bytes) -> bool:
    """Put the file itself where something stands for it, now that there may be room. False where there still
    is none."""
    try:
        store.replace(path, data)
    except OSError as error:
        if not is_full(error):
            raise
        return False
    return True


def is_stand_in(data: bytes) -> bool:
    """Whether these are the bytes of a run.json, under another name."""
    if len(data) > Run.MAX_BYTES or b'"run"' not in data:
        return False
    try:
        Run.from_bytes(data, RUN)
    except (DamagedError, FormatError):
        return False
    return True
