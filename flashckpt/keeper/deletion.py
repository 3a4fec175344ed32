"""Whether a folder was deleted for certain, and not moved, and not on a disk that is away.

Owns an inotify watch on the folder: unlike an open descriptor it keeps no disk from being unmounted. On a
network file system nobody hears of deletions by other machines; then nothing is ever certain.
"""

from __future__ import annotations

import ctypes
import os
import struct

_EVENT = struct.Struct("iIII")
_DELETE_SELF = 0x400
_READ_BYTES = 4096


class Deletion:
    """Watches what has `path` now. For one thread."""

    def __init__(self, path: str) -> None:
        self._heard = False
        self._descriptor = -1
        libc = ctypes.CDLL(None)
        try:
            self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if libc.inotify_add_watch(self._descriptor, os.fsencode(path), _DELETE_SELF) < 0:
                self._close()
        except AttributeError:  # a C library without it
            self._close()

    @property
    def is_watched(self) -> bool:
        """Whether the kernel tells of it: not where nothing had the path, or no watch could be had."""
        return self._descriptor >= 0

    def has_come(self) -> bool:
        while self._descriptor >= 0:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            while data:
                _, mask, _, length = _EVENT.unpack_from(data)
                data = data[_EVENT.size + length :]
                self._heard = self._heard or bool(mask & _DELETE_SELF)
            if self._heard:
                self._close()
        return self._heard

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
