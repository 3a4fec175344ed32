"""Who of a run's trainers on this node lives, for a keeper, which asks again and again.

Owns the files of the life locks that it was told to watch, each kept open from when it was seen held: a lock
is on a file, not on a name, so a holder whose name somebody has removed (a cleaner of temporary files) lives
until it lets go of the file. Also owns the removal of what the dead leave. Takes no lock. For one thread.
"""

from __future__ import annotations

import os

from flashckpt.errors import KeeperError
from flashckpt.memory.runtime import RuntimeFolder, holder_of, locker_of, says_closed, stacks_name


class Living:
    def __init__(self, folder: RuntimeFolder) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}

    def watch(self, lock: str) -> None:
        """Keep the file of a trainer's lock at hand from when it is first seen held until `forget`."""
        self._files.setdefault(lock, -1)
        self.holds(lock)

    def forget(self, lock: str) -> None:
        descriptor = self._files.pop(lock, -1)
        if descriptor >= 0:
            os.close(descriptor)

    def holds(self, lock: str) -> bool:
        """Whether a living process holds a lock: its file, if that is watched, or else what has its name.
        What is not this user's alone (a link, another mode) is nobody's lock."""
        # The file first: who takes its lock again lets go of the old file once the new one has the name.
        descriptor = self._files.get(lock, -1)
        if descriptor >= 0 and _is_locked(descriptor):
            return True
        try:
            holder = holder_of(self._folder, lock)
        except KeeperError:
            return False
        # This process never opens the file of a lock of its own: closing it would drop the lock.
        if lock in self._files and holder not in (None, os.getpid()):
            self._open(lock)
        return holder is not None

    def has_closed(self, lock: str) -> bool:
        """Whether the last holder of a watched lock, dead by now, has left word that it ended in order."""
        descriptor = self._files.get(lock, -1)
        try:
            return descriptor >= 0 and says_closed(descriptor)
        except OSError:
            return False

    def remove_dead(self, lock: str) -> bool:
        """Remove what a trainer leaves in the runtime folder, if it is dead. Returns whether it is."""
        inode = self._folder.inode(lock)
        if self.holds(lock):
            return False
        # The lock last: by it the next keeper finds the other file if this one is killed here. A file that
        # came meanwhile is of a trainer that had lost its lock and has taken it again.
        for name in (stacks_name(lock), lock):
            if self._folder.inode(lock) == inode:
                self._folder.remove(name)
        return True

    def _open(self, lock: str) -> None:
        try:
            descriptor = self._folder.open_file(lock)
        except (FileNotFoundError, KeeperError):
            return  # removed, or exchanged, since
        if not _is_locked(descriptor):
            os.close(descriptor)
            return
        self.forget(lock)
        self._files[lock] = descriptor


def _is_locked(descriptor: int) -> bool:
    try:
        return locker_of(descriptor) is not None
    except OSError:
        # On a network file system a file without a name may be out of reach: then the name decides.
        return False
