"""The runtime folder of a run on this node, and the life locks in it, which show that a process lives.

Owns the folder `flashckpt-UID/IDENTITY`, the checks that only this user can access it, and the lock files.
Refuses files of others, and never repairs or removes them. See docs/memory.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flashckpt import _native
from flashckpt.errors import FlashckptError, KeeperError
from flashckpt.memory import forks

_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
_MAX_NAME_BYTES = 64
_UNBORN = "unborn-"
_CLOSED = b"closed"
_JOIN_TRIES = 20
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_TRAINER_LOCK = re.compile(r"trainer-([0-9]{5,9})-[0-9]+-[0-9a-f]{8}\.lock")
# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid, padding to 32 bytes.
_FLOCK = struct.Struct("@hhqqi4x")


def base_folders(override: str | None = None) -> list[str]:
    """The places where runtime folders may be, the preferred one first."""
    if override is not None:
        return [os.path.abspath(override)]
    places = ["/dev/shm", os.environ.get("XDG_RUNTIME_DIR") or ""]
    # gettempdir writes a file: it fails if all temporary folders are full.
    with contextlib.suppress(FileNotFoundError):
        places.append(tempfile.gettempdir())
    return list(dict.fromkeys(filter(None, places)))


def base_folder(override: str | None = None) -> str:
    """The first usable folder for runtime folders, or `override`."""
    if override is not None:
        return os.path.abspath(override)
    candidates = base_folders()
    for folder in candidates:
        if folder and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise KeeperError(
        f"None of {', '.join(candidates)} can be written, so the keeper has no runtime folder. "
        "Nothing was started. Set FLASHCKPT_RUNTIME to a folder of yours, on a tmpfs if there is one."
    )


def identity_of(run_id: str, place: str) -> str:
    """A run's name on this node, of 32 characters, from its id and its store's `place()`."""
    return _native.xxh3_128(f"{run_id}\0{place}".encode()).hex()


class RuntimeFolder(forks.OwnDescriptor):
    """An open runtime folder. Accesses files through its descriptor: exchanging a folder above it has no
    effect."""

    def __init__(self, path: str, descriptor: int) -> None:
        super().__init__(descriptor)
        self.path = path
        forks.hold_folder(os.path.realpath(path))

    @classmethod
    def open(cls, base: str, identity: str, *, create: bool = True) -> RuntimeFolder:
        """Open `base/flashckpt-UID/identity`; `create`: make it if it is missing. Raises KeeperError if it
        belongs to another user, has another mode or is a link, FileNotFoundError."""
        if not _IDENTITY.fullmatch(identity):
            raise KeeperError(f"{identity!r} names no run. Nothing was opened.")
        try:
            with _opened(os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as above:
                own = f"flashckpt-{os.geteuid()}"
                with _opened(_own_folder(above, own, base, create)) as middle:
                    folder = os.path.join(base, own)
                    return cls(os.path.join(folder, identity), _own_folder(middle, identity, folder, create))
        except NotADirectoryError as error:
            raise _refused(base, "it is not a folder") from error

    @classmethod
    def at(cls, path: str) -> RuntimeFolder:
        """Open the existing folder at `path`, with the same checks."""
        own, identity = os.path.split(os.path.abspath(path))
        folder = cls.open(os.path.dirname(own), identity, create=False)
        if folder.path != os.path.abspath(path):
            folder.close()
            raise _refused(path, "its name is not one of this library")
        return folder

    @property
    def identity(self) -> bytes:
        """The 16 bytes that every slot in the folder has in its header."""
        return bytes.fromhex(os.path.basename(self.path))

    def check_socket(self, name: str) -> bool:
        """Whether `name` is a socket of this user. Raises KeeperError for any other file."""
        check_name(name)
        try:
            found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        path = os.path.join(self.path, name)
        if not stat.S_ISSOCK(found.st_mode):
            raise _refused(path, "it is no socket")
        _check_owner(found, _FILE_MODE, path)
        return True

    def open_file(self, name: str, flags: int = os.O_RDWR) -> int:
        """Open a file in the folder. Raises KeeperError if it is a link, has another owner or mode or a
        second name, FileNotFoundError."""
        check_name(name)
        path = os.path.join(self.path, name)
        try:
            descriptor = os.open(
                name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, _FILE_MODE, dir_fd=self.descriptor
            )
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _refused(path, "it is a symbolic link") from error
            if error.errno in (errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR):
                raise _refused(path, f"it cannot be opened ({error.strerror})") from error
            raise
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise _refused(path, "it is no regular file")
            _check_owner(found, _FILE_MODE, path)
            if found.st_nlink > 1:
                raise _refused(path, f"it has {found.st_nlink} names")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def inode(self, name: str) -> tuple[int, int] | None:
        """Device and inode of a file, None if it does not exist."""
        try:
            found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def names(self) -> list[str]:
        return sorted(os.listdir(self.descriptor))

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        check_name(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def rename(self, name: str, to: str) -> None:
        """Give a file another name. Raises FileNotFoundError."""
        check_name(to)
        os.rename(name, to, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def reachable(self, name: str) -> str:
        """A path to a file that is short enough for a Unix socket."""
        check_name(name)
        return f"/proc/self/fd/{self.descriptor}/{name}"

    def exists(self) -> bool:
        """Whether the folder still has its path (a cleaner may have removed it)."""
        try:
            there, here = os.stat(self.path, follow_symlinks=False), os.fstat(self.descriptor)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def renew(self) -> None:
        """Make the folder again after it was removed: this object refers to the new one then. KeeperError,
        OSError."""
        own, identity = os.path.split(self.path)
        made = RuntimeFolder.open(os.path.dirname(own), identity)
        os.dup2(made.descriptor, self.descriptor, inheritable=False)
        made.close()

    def discard(self) -> None:
        """Remove the folder if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)


@dataclass
class LifeLock:
    """The record lock that shows that this process lives. The kernel drops it at any end of the process;
    forked children and inherited descriptors do not hold it.

    This process must never open the file again: closing any descriptor of a file drops all record locks of
    the process on it. `holder_of` respects that.
    """

    name: str
    inode: tuple[int, int]
    descriptor: int

    @classmethod
    def acquire(cls, folder: RuntimeFolder, name: str) -> LifeLock | None:
        """Take the lock `name`; None if a living process, or this one, holds it."""
        with _held.guard:
            return None if folder.inode(name) in _held.locks else cls._take(folder, name, name)

    @classmethod
    def born(cls, folder: RuntimeFolder, name: str) -> LifeLock:
        """Take the lock `name`, which no other process ever takes. The name appears with its lock held: a
        name without a holder belongs to a dead process, and may be removed at any moment."""
        with _held.guard:
            made = cls._take(folder, _UNBORN + name, name)
            if made is None:
                raise KeeperError(f"Another process has the lock {name}. Nothing was started.")
            return made

    @classmethod
    def _take(cls, folder: RuntimeFolder, first: str, name: str) -> LifeLock | None:
        """Open the file `first`, lock it, and name it `name`; None if another process holds that."""
        while True:
            descriptor = folder.open_file(first, os.O_RDWR | os.O_CREAT)
            try:
                is_ours = lock_record(descriptor)
                found = os.fstat(descriptor)
                if is_ours and first != name:
                    with contextlib.suppress(FileNotFoundError):
                        folder.rename(first, name)
                stands = folder.inode(name) == (inode := (found.st_dev, found.st_ino))
            except OSError:
                os.close(descriptor)
                raise
            if is_ours and stands:
                _held.locks.add(inode)
                return cls(name, inode, descriptor)
            # The last holder removed the name between our open and our lock, or is about to drop the lock, or
            # the file was taken for that of a dead process: try again.
            os.close(descriptor)
            if stands:
                return None

    def stands(self, folder: RuntimeFolder) -> bool:
        """Whether the name still refers to this lock. It does not after the holder was replaced."""
        return folder.inode(self.name) == self.inode

    def renew(self, folder: RuntimeFolder) -> None:
        """Take the lock again after its name was removed."""
        with _held.guard:
            made = LifeLock.born(folder, self.name)
            if self.inode in _held.locks:
                _held.locks.remove(self.inode)
                os.close(self.descriptor)
            self.inode, self.descriptor = made.inode, made.descriptor

    def mark_closed(self) -> None:
        """Write into the lock's file that its holder ends in order, for a keeper that cannot be reached."""
        with _held.guard:
            if self.inode in _held.locks:
                os.pwrite(self.descriptor, _CLOSED, 0)

    def release(self, folder: RuntimeFolder) -> None:
        """Remove the name, then drop the lock, so that the name never exists without its holder."""
        with _held.guard:
            if self.inode not in _held.locks:
                return  # released before, or in a forked child
            if self.stands(folder):
                folder.remove(self.name)
            _held.locks.remove(self.inode)
            os.close(self.descriptor)


def lock_record(descriptor: int) -> bool:
    """Take the record lock of an open file. False if another process holds it. Raises OSError."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


def is_alive(folder: RuntimeFolder, name: str) -> bool:
    """Whether a living process, or this one, holds the lock `name`."""
    return holder_of(folder, name) is not None


def holder_of(folder: RuntimeFolder, name: str) -> int | None:
    """The pid of the living process that holds the lock `name`, 0 if it is of another pid namespace; None: no
    holder."""
    with _held.guard:
        inode = folder.inode(name)
        if inode is None:
            return None
        if inode in _held.locks:
            return os.getpid()
        try:
            descriptor = folder.open_file(name)
        except FileNotFoundError:
            return None
        with _opened(descriptor):
            return locker_of(descriptor)


def locker_of(descriptor: int) -> int | None:
    """The same for the open file of a lock of another process, with or without a name."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def is_trainer_lock(name: str) -> bool:
    """Whether a name is a trainer's life lock, or one that is being made."""
    return name.removeprefix(_UNBORN).startswith("trainer-") and name.endswith(".lock")


def trainer_lock_name(rank: int) -> str:
    """A new unique name for this process's life lock."""
    return f"trainer-{rank:05d}-{os.getpid()}-{secrets.token_hex(4)}.lock"


def rank_of_lock(lock: str) -> int | None:
    """The rank in the name of a trainer's life lock, or None."""
    found = _TRAINER_LOCK.fullmatch(lock)
    return int(found[1]) if found else None


def stacks_name(lock: str) -> str:
    """The file into which the trainer with this life lock writes its stacks."""
    return f"stacks-{lock.removeprefix('trainer-').removesuffix('.lock')}"


def enter(
    base: str,
    identity: str,
    lock: str,
    take: Callable[[RuntimeFolder, str], LifeLock] = LifeLock.born,
) -> tuple[RuntimeFolder, LifeLock]:
    """Open a run's runtime folder and take the life lock `lock` in it, which keeps a leaving keeper from
    removing the folder. Raises KeeperError, and the errors of `take`."""
    for _ in range(_JOIN_TRIES):
        try:
            folder = RuntimeFolder.open(base, identity)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and os.path.isdir(base):
                continue  # it was removed between its making and its opening
            raise _no_place(base, error) from error
        try:
            life = take(folder, lock)
            if folder.exists():
                return folder, life
            life.release(folder)
            folder.close()
        except FileNotFoundError:
            folder.close()
        except OSError as error:
            folder.close()
            raise _no_place(base, error) from error
        except FlashckptError:
            folder.close()
            raise
    raise KeeperError(f"No life lock can be taken in {os.path.join(base, identity)}. Nothing was started.")


def _no_place(base: str, error: OSError) -> KeeperError:
    return KeeperError(
        f"The keeper has no runtime folder: {base} cannot be used ({error.strerror or error}). Nothing was "
        "started. Make it writable, or set FLASHCKPT_RUNTIME to a folder of yours, on a tmpfs if possible.",
        path=base,
    )


class _Held:
    """The locks of this process; none in a forked child."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.locks: set[tuple[int, int]] = set()
        self.guard = threading.RLock()


_held = _Held()
os.register_at_fork(after_in_child=_held.forget)


class TrainerLocks:
    """Which trainers of a run on this node live, for a keeper that checks repeatedly.

    Keeps the file of each watched life lock open from when it was first seen held: a lock is on a file, so
    the holder of a file whose name was removed (by a cleaner of temporary files) still counts. Takes no lock.
    For one thread.
    """

    def __init__(self, folder: RuntimeFolder) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}

    def watch(self, lock: str) -> None:
        """Keep the file of a trainer's lock open, once it is seen held, until `forget`."""
        self._files.setdefault(lock, -1)
        self.holds(lock)

    def forget(self, lock: str) -> None:
        descriptor = self._files.pop(lock, -1)
        if descriptor >= 0:
            os.close(descriptor)

    def holds(self, lock: str) -> bool:
        """Whether a living process holds a lock: its watched file, or the file with its name. A file that
        others can access (a link, another mode) is no lock."""
        # The file first: a process that takes its lock again drops the old file after the new one has the
        # name.
        descriptor = self._files.get(lock, -1)
        if descriptor >= 0 and _is_locked(descriptor):
            return True
        try:
            owner = holder_of(self._folder, lock)
        except KeeperError:
            return False
        # Never open the file of a lock of this process: closing it would drop the lock.
        if lock in self._files and owner not in (None, os.getpid()):
            # Not if it was removed or exchanged meanwhile.
            with contextlib.suppress(FileNotFoundError, KeeperError):
                descriptor = self._folder.open_file(lock)
                if _is_locked(descriptor):
                    self.forget(lock)
                    self._files[lock] = descriptor
                else:
                    os.close(descriptor)
        return owner is not None

    def has_closed(self, lock: str) -> bool:
        """Whether the dead holder of a watched lock has marked that it ended in order."""
        descriptor = self._files.get(lock, -1)
        try:
            return descriptor >= 0 and os.pread(descriptor, len(_CLOSED), 0) == _CLOSED
        except OSError:
            return False

    def remove_dead(self, lock: str) -> bool:
        """Remove the files of a dead trainer. Returns whether it is dead."""
        inode = self._folder.inode(lock)
        if self.holds(lock):
            return False
        # The lock last: by it the next keeper finds the other file. A new file under the name belongs to a
        # trainer that has taken its lock again.
        for name in (stacks_name(lock), lock):
            if self._folder.inode(lock) == inode:
                self._folder.remove(name)
        return True


def _is_locked(descriptor: int) -> bool:
    try:
        return locker_of(descriptor) is not None
    except OSError:
        # On a network file system a file without a name may not be accessible: then the name decides.
        return False


def check_name(name: str) -> None:
    """Raises KeeperError for a name that could lead out of the folder."""
    is_ours = name.isascii() and 0 < len(name) <= _MAX_NAME_BYTES and name not in (".", "..")
    if not is_ours or "/" in name or "\0" in name:
        raise KeeperError(f"{name!r} is not a name of this library. It was left alone.")


def _own_folder(above: int, name: str, path: str, create: bool) -> int:
    whole = os.path.join(path, name)
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _FOLDER_MODE, dir_fd=above)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _refused(whole, "it is a link, or no folder") from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise _refused(whole, f"it cannot be opened ({error.strerror})") from error
        raise
    try:
        _check_owner(os.fstat(descriptor), _FOLDER_MODE, whole)
    except KeeperError:
        os.close(descriptor)
        raise
    return descriptor


def _check_owner(found: os.stat_result, mode: int, path: str) -> None:
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != mode:
        raise _refused(path, f"it belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}")


def _refused(path: str, reason: str) -> KeeperError:
    return KeeperError(
        f"{path} is not this user's alone: {reason}. It was left as it is, and no snapshot is kept there. "
        "Find out who made it and remove it, or name another folder (FLASHCKPT_RUNTIME, or `cache=`).",
        path=path,
    )


@contextlib.contextmanager
def _opened(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
