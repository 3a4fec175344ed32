"""What a forked child must not keep: descriptors of regions, of the runtime folder and its locks, and the
keeper's socket. A loader's worker that kept one would hold memory that everybody else has let go.

Owns the list of those who hold such descriptors, weakly. In a child each lets go of its own (`forked`), so
that none closes a number later that is another file's by then; what a thread had in its hands is found by its
name.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from typing import Protocol

_MEMFD = re.compile(r"/memfd:(?:slot|constants|chunks)-[0-9a-f-]+ \(deleted\)")


class DescriptorHolder(Protocol):
    def forked(self) -> None:
        """Close what is held, in a child: there are no other threads, and no lock can be waited for."""


_holders: weakref.WeakSet[DescriptorHolder] = weakref.WeakSet()
_folders: set[str] = set()


def hold(holder: DescriptorHolder) -> None:
    """From now on until it is gone, a child of this process lets go of what this object holds."""
    _holders.add(holder)


def hold_folder(path: str) -> None:
    """What is below this folder is open in no child."""
    _folders.add(path)


class OwnDescriptor:
    """A descriptor that no child keeps; -1 once it is closed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        hold(self)

    def forked(self) -> None:
        close(self.descriptor)
        self.descriptor = -1

    def close(self) -> bool:
        """Returns whether it was open."""
        # Forgotten first: a child that is forked in between must not close what has the number next.
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        return descriptor >= 0


def close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _in_child() -> None:
    for holder in list(_holders):
        holder.forked()
    _holders.clear()
    if not _folders:
        return
    with contextlib.suppress(OSError):  # without /proc there is nothing to look at
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if _is_ours(os.readlink(f"/proc/self/fd/{name}")):
                    close(int(name))
    _folders.clear()


def _is_ours(link: str) -> bool:
    path = link.removesuffix(" (deleted)")
    return path in _folders or os.path.dirname(path) in _folders or _MEMFD.fullmatch(link) is not None


os.register_at_fork(after_in_child=_in_child)
