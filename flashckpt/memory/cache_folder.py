"""Slots in files on a disk of this node, laid out as the slot's region.

Owns the folder of a run in a cache, its lock, and the conversion of slots to files and back. A file is whole
or absent: it gets its name once its bytes are synced. Its image is read with pread and never mapped.
persist/slot_cache decides which slots are cached. See docs/memory.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from flashckpt import _native, crashpoints
from flashckpt.errors import DamagedError, KeeperError
from flashckpt.format.layout import PAGE
from flashckpt.memory import forks
from flashckpt.memory import region as page
from flashckpt.memory.region import SlotHeader, is_region_name, round_up
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.memory.slot import Sealed, Slot, SlotState, Word

LOCK_NAME = "cache.lock"
_NEW = "new-"
_PIECE_BYTES = 16 << 20
_MARGIN = 20  # without a limit a twentieth of the disk stays free


@dataclass(frozen=True)
class CachePlace:
    """The cache of a trainer: an absolute path, and the run's limit of bytes, if any."""

    path: str
    limit_bytes: int | None = None


class LockedError(KeeperError):
    """Another process, perhaps a keeper that is about to end, holds the folder."""


class CacheFolder:
    """The folder of a run in a cache, locked by one keeper."""

    def __init__(self, base: str, folder: RuntimeFolder, lock: int) -> None:
        self.base, self._folder, self._lock = base, folder, lock

    @classmethod
    def open(cls, base: str, identity: str, *, create: bool = True) -> CacheFolder:
        """Open `base/flashckpt-UID/identity` and lock it; `create`: make it if it is missing, but never
        `base`: that may be on a disk that is not mounted. Raises LockedError if another process holds its
        lock, KeeperError if others can access it, OSError."""
        folder, lock = RuntimeFolder.open(base, identity, create=create), -1
        try:
            lock = folder.open_file(LOCK_NAME, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise LockedError(
                    f"Another keeper of this run uses {folder.path}: it runs in another container, or has "
                    "been replaced and not ended yet. Nothing was changed there.",
                    path=folder.path,
                ) from error
            found = cls(base, folder, lock)
            for made in (base, os.path.dirname(folder.path)):
                descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            if not found.stands():
                raise LockedError(f"{folder.path} was removed while it was opened. It is opened again later.")
        except BaseException:
            if lock >= 0:
                os.close(lock)
            folder.close()
            raise
        return found

    @property
    def path(self) -> str:
        return self._folder.path

    def stands(self) -> bool:
        """Whether folder and lock still have their names, so that no other process can have locked it."""
        found = os.fstat(self._lock)
        return self._folder.exists() and self._folder.inode(LOCK_NAME) == (found.st_dev, found.st_ino)

    def free_bytes(self, *, has_margin: bool) -> int:
        """The free bytes of the disk, less the margin."""
        found = os.fstatvfs(self._folder.descriptor)
        margin = found.f_blocks // _MARGIN if has_margin else 0
        return (found.f_bavail - margin) * found.f_frsize

    def names(self) -> list[str]:
        """The names of the cached slots and constants. Removes unfinished files of a dead keeper."""
        found = []
        for name in self._folder.names():
            if is_region_name(name):
                found.append(name)
            elif name.startswith(_NEW):
                self._folder.remove(name)
        return found

    def slot(self, name: str) -> Slot:
        """Open a cached slot. Raises DamagedError, FormatError (another version), KeeperError (another run),
        OSError."""
        return _opened(self._folder.open_file(name, os.O_RDONLY), name, self._folder.identity)

    def remove(self, name: str) -> None:
        self._folder.remove(name)

    def mark_persisted(self, name: str, generation: int) -> None:
        """Note in the file that its snapshot is committed. Not synced: the record decides."""
        file = self._folder.open_file(name, os.O_WRONLY)
        try:
            for offset, word in _words(name, generation, generation).items():
                os.pwrite(file, word, offset)
        finally:
            os.close(file)

    def copy(self, sealed: Sealed, holds: Callable[[], bool], progress: int = 0) -> Slot:
        """Copy a sealed slot, or a region of constants, into a file, and open that. holds: returns whether
        the caller still has the pin; called before the file gets its name. progress: 0, or the address of a
        u64 that grows by the bytes written. Raises KeeperError if the pin is lost, DamagedError if the
        metadata is damaged, OSError; then nothing is left behind."""
        source = sealed.slot
        metadata = bytes(source.metadata_view[: sealed.record.metadata_bytes])
        if _native.xxh3_128(metadata) != sealed.metadata_checksum:
            raise DamagedError("A slot's metadata does not match its checksum.", step=sealed.step)
        header = source.header
        if not header.holds_constants:  # snapshots name constants by their nonce
            header = replace(header, nonce=secrets.randbits(64) or 1)
        new = f"{_NEW}{header.nonce:016x}"
        file = self._folder.open_file(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(file, header.num_bytes)
            _write(file, metadata, PAGE)
            _copy_image(source, file, header.image_offset, round_up(sealed.record.image_bytes), progress)
            _write(file, _first_page(sealed, header), 0)
            os.fsync(file)
            crashpoints.point("cache.written")
            if not holds():
                raise KeeperError("the slot was taken from this keeper while it was copied into the cache")
            self._folder.rename(new, header.name)
            os.fsync(self._folder.descriptor)
            crashpoints.point("cache.named")
            return self.slot(header.name)
        except BaseException:
            for name in (new, header.name):
                with contextlib.suppress(OSError):
                    self._folder.remove(name)
            raise
        finally:
            os.close(file)

    def discard(self, names: Iterable[str] = ()) -> None:
        """Remove these files, and the run's folder if it is empty then."""
        for name in names:
            self._folder.remove(name)
        self._folder.remove(LOCK_NAME)
        self._folder.discard()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)
        self._folder.close()


def open_cached(path: str, identity: bytes | None = None) -> Slot:
    """Open a cached slot by its path for reading: changes of words stay in this process. Raises as
    `CacheFolder.slot`."""
    folder, name = os.path.split(path)
    with contextlib.closing(RuntimeFolder.at(folder)) as opened:
        return _opened(opened.open_file(name, os.O_RDONLY), name, identity)


def cached_paths(base: str, identity: str) -> list[str]:
    """The files of cached slots and constants of a run, without the lock."""
    try:
        with contextlib.closing(RuntimeFolder.open(base, identity, create=False)) as folder:
            return [f"{folder.path}/{name}" for name in filter(is_region_name, folder.names())]
    except (OSError, KeeperError):
        return []


def caches_in(base: str) -> list[str]:
    """The identities of this user's runs with a folder in a cache."""
    try:
        return sorted(os.listdir(os.path.join(base, f"flashckpt-{os.geteuid()}")))
    except (FileNotFoundError, NotADirectoryError):
        return []


def num_bytes_of(sealed: Sealed) -> int:
    """The size of a snapshot, or region of constants, in a cache."""
    record = sealed.record
    return PAGE + round_up(record.metadata_bytes) + round_up(record.image_bytes)


def _words(name: str, home: int, persisted: int) -> dict[int, bytes]:
    """The words of a file by offset: whether its snapshot is requested at home, and committed."""
    first, second = home.to_bytes(8, "little"), persisted.to_bytes(8, "little")
    checksum = _native.xxh3_64(name.encode() + first + second).to_bytes(8, "little")
    return {
        page.PERSIST_OFFSET: first,
        page.HOME_OFFSET: first,
        page.PERSISTED_OFFSET: second,
        page.WORDS_CHECKSUM_OFFSET: checksum,
    }


def _first_page(sealed: Sealed, header: SlotHeader) -> bytes:
    """The control page of a cached slot: sealed, without owners, requested at home if the slot is."""
    found = bytearray(PAGE)
    found[: page.HEADER_END] = header.packed()
    home = sealed.generation if sealed.slot.wants_home(sealed.generation) else 0
    words = _words(header.name, home, 0)
    words[page.WORD_OFFSET] = Word(SlotState.SEALED, 0, sealed.generation).packed().to_bytes(8, "little")
    words[page.COMPLETE_OFFSET] = page.pack_complete(*sealed.slot.complete).to_bytes(8, "little")
    for offset, word in words.items():
        found[offset : offset + 8] = word
    record = slice(page.RECORD_OFFSET, page.RECORD_OFFSET + page.RECORD_BYTES)
    found[record] = sealed.slot.record_bytes()
    return bytes(found)


def _copy_image(source: Slot, file: int, offset: int, num_bytes: int, progress: int) -> None:
    """Bypass the page cache if the file system allows it: cached slots are seldom read."""
    direct = _direct(file)
    for done in range(0, num_bytes, _PIECE_BYTES):
        length = min(_PIECE_BYTES, num_bytes - done)
        start = source.image_offset + done
        with (
            mmap.mmap(
                source.image_descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start
            ) as window,
            memoryview(window) as view,
        ):
            try:
                _write(file, view, offset + done)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                direct = _direct(file, False)
                _write(file, view, offset + done)
        if not direct:
            os.fdatasync(file)  # or the whole file would be dirty at once
        if progress:
            _native.fetch_add(progress, length)
    _direct(file, False)


def _direct(file: int, wanted: bool = True) -> bool:
    flags = fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | (os.O_DIRECT if wanted else 0))
    except OSError:
        return False
    return wanted


def _write(file: int, data: bytes | memoryview, offset: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


def _read(file: int, num_bytes: int, offset: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = os.pread(file, num_bytes - len(data), offset + len(data))
        if not piece:
            raise DamagedError("A cached slot is truncated. It is not used.")
        data = data + piece if data else piece
    return data


def _opened(file: int, name: str, identity: bytes | None) -> Slot:
    """The slot of a cache file, which it closes. Copies control page and metadata into private memory."""
    memory = -1
    try:
        first = _read(file, PAGE, 0)
        header = SlotHeader.unpacked(first[: page.HEADER_END])
        if header.name != name:
            raise DamagedError(f"{name} holds the slot {header.name}. It is not used.")
        if identity is not None and header.identity != identity:
            raise KeeperError(f"{name} is a slot of another run. It was left alone.")
        if os.fstat(file).st_size != header.num_bytes:
            raise DamagedError(f"{name} has a wrong length. It is not used.")
        memory = os.memfd_create(f"cached-{name}", os.MFD_CLOEXEC)
        os.ftruncate(memory, header.num_bytes)  # sparse: only control page and metadata are written
        _write(memory, first, 0)
        slot = Slot(memory, header, map_image=False, image=file)
    except BaseException:
        forks.close(file)
        if memory >= 0:
            forks.close(memory)
        raise
    sealed = slot.sealed()
    if sealed is None:
        raise DamagedError(f"{name} holds no sealed snapshot. It is not used.")
    _write(slot.descriptor, _read(file, sealed.record.metadata_bytes, PAGE), PAGE)
    slot.metadata(sealed)
    home = int.from_bytes(first[page.HOME_OFFSET :][:8], "little")
    expected = _words(name, home, slot.persisted)
    if any(first[offset : offset + 8] != word for offset, word in expected.items()):
        # Request it at home: that costs one request if it is committed already.
        slot.request_persist(sealed.generation)
        slot.set_persisted(0)
    return slot
