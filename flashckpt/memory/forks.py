"""Closes descriptors in forked children: of regions, of the runtime folder and its locks, and of the keeper's
socket. A loader's worker with one of them would keep memory that all other processes have released.

Owns the weak list of their holders. In a child each holder closes its own (`forked`), so that none closes a
reused number later; descriptors of threads that were just using them are found by their names.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from typing import Protocol

_MEMFD = re.compile(r"/memfd:(?:cached-)?(?:slot|constants|shard)-[0-9a-f-]+ \(deleted\)")


class DescriptorHolder(Protocol):
    def forked(self) -> None:
        """Close the descriptors in a child, which has no other threads, and must not wait for a lock."""


_holders: weakref.WeakSet[DescriptorHolder] = weakref.WeakSet()
_folders: set[str] = set()


def hold(owner: DescriptorHolder) -> None:
    """Call `owner.forked` in each forked child while this object exists."""
    _holders.add(owner)


def hold_folder(path: str) -> None:
    """Close all descriptors of files in this folder in each forked child."""
    _folders.add(path)


class OwnDescriptor:
    """A descriptor that forked children close; -1 before it is set, and once it is closed."""

    descriptor = -1

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        hold(self)

    def forked(self) -> None:
        close(self.descriptor)
        self.descriptor = -1

    def close(self) -> bool:
        """Close it, and return whether it was open."""
        # Forget it first: a child that is forked in between must not close a reused number.
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        return descriptor >= 0


def close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _in_child() -> None:
    for owner in list(_holders):
        owner.forked()
    _holders.clear()
    if not _folders:
        return
    with contextlib.suppress(OSError):  # without /proc
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if _is_ours(os.readlink(f"/proc/self/fd/{name}")):
                    close(int(name))
    _folders.clear()


def _is_ours(link: str) -> bool:
    path = link.removesuffix(" (deleted)")
    return path in _folders or os.path.dirname(path) in _folders or _MEMFD.fullmatch(link) is not None


os.register_at_fork(after_in_child=_in_child)
