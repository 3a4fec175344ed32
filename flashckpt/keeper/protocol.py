"""What trainer and keeper say to each other: bounded JSON messages over a Unix socket, descriptors beside.

Owns the wire and the checks of what comes over it. The data path is not here: it is the control pages.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flashckpt.errors import FlashckptError, KeeperError, OptionError, OutOfRoomError
from flashckpt.memory.region import is_region_name
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.options import Keep, Remote, check_interval, checked_compress

SOCKET_NAME = "keeper.socket"
ELECTION_LOCK = "keeper.lock"
LOG_NAME = "keeper.log"
PROTOCOL = 7
MAX_MESSAGE_BYTES = 64 << 10
"""Of a message in one packet. A longer one, with the options of two stores, stands in a memfd beside it."""
MAX_LONG_BYTES = 4 << 20
_LONG = b'{"long":true}'
MAX_DESCRIPTORS = 32
_CREDENTIALS = struct.Struct("3i")
_MAX_NUMBER = 1 << 60
_MOST_NAMES = 64


class ProtocolError(KeeperError):
    """What came over the socket is not what this library sends: the connection is closed."""


class Refusal(KeeperError):
    """The keeper's answer is that it cannot: to ask again at once would be in vain."""


@dataclass(frozen=True)
class Failure:
    """A snapshot that was to be persisted and could not be. `errno` is 0 where the system gave none.
    `has_diverged`: what ranks hold alike by declaration is not alike in it."""

    step: int
    generation: int
    message: str
    errno: int
    has_diverged: bool = False


@dataclass(frozen=True)
class TornSnapshot:
    """A snapshot that was discarded: its bytes were not those of its boundary. `leaves` names up to 22 of
    the leaves that differed, none where the record or the metadata itself was damaged."""

    step: int
    generation: int
    slot: str
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class RemoteStatus:
    """What has become of the copies to a remote. `newest`: the newest step that is known to be committed
    there, -1 for none; `copying`: the one that is being copied, -1 for none; `waits`: not all that is due is
    there; `error`: why the last try failed, empty where it did not. `progress_bytes` only grows."""

    url: str
    newest: int = -1
    copying: int = -1
    waits: bool = False
    error: str = ""
    progress_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Status:
    """What the keeper has done for the attempt of who asks. Steps in `committed` are the newest 64, oldest
    first; `persisting` is being written now; `waiting` were asked for and are not done (failed ones included,
    and those in `for_others`, of which only parts of other nodes are missing; `failing` are those of them, of
    whatever attempt, whose last try has failed). `progress_bytes` only grows:
    as long as it does, the keeper is writing. `diverged` names leaves that ranks were to hold alike and do
    not; where they are too many, `EVERY` alone stands for all. `counts` are of all attempts. `remote`: None
    where this keeper copies nothing."""

    keeper: str = ""
    committed: tuple[int, ...] = ()
    newest_committed: int | None = None
    persisting: int | None = None
    waiting: tuple[int, ...] = ()
    for_others: tuple[int, ...] = ()
    failing: tuple[int, ...] = ()
    failures: tuple[Failure, ...] = ()
    torn: tuple[TornSnapshot, ...] = ()
    diverged: tuple[str, ...] = ()
    superseded_by: str | None = None
    progress_bytes: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    remote: RemoteStatus | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Status:
        """Raises ProtocolError unless `data` is what `to_dict` gave."""
        try:
            kinds = ("committed", "waiting", "for_others", "failing")
            steps = {key: tuple(map(int, data[key])) for key in kinds}
            failures = tuple(Failure(**each) for each in data["failures"])
            torn = [TornSnapshot(**{**each, "leaves": tuple(each["leaves"])}) for each in data["torn"]]
            remote = None if data["remote"] is None else RemoteStatus(**data["remote"])
            named = {"diverged": tuple(map(str, data["diverged"])), "torn": tuple(torn), "remote": remote}
            return cls(**{**data, **steps, **named, "failures": failures})
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"The keeper's status cannot be read: {error}") from error


@dataclass(eq=False)
class Connection:
    """One peer of the keeper, which waits for none: one that does not read is hung up on. `lock` is the life
    lock of the trainer that it said it is."""

    peer: socket.socket
    pid: int
    lock: str | None = None
    is_open: bool = True

    def tell(self, answer: dict[str, Any], given: Sequence[int] = ()) -> bool:
        """Answer what was asked, with descriptors, which stay the caller's. False where nobody is there to
        be told any more; ProtocolError for what is too long."""
        return self._send({"ok": True, **answer}, given)

    def refuse(self, error: FlashckptError) -> None:
        """Answer that it cannot be, and why."""
        answer: dict[str, Any] = {"ok": False, "kind": "keeper", "error": str(error)[:4000]}
        if isinstance(error, OutOfRoomError):
            answer |= {"kind": "room", "needed": error.needed, "available": error.available}
        self._send(answer)

    def _send(self, message: dict[str, Any], given: Sequence[int] = ()) -> bool:
        try:
            if self.is_open:
                send(self.peer, message, given)
        except OSError:
            self.close()
        return self.is_open

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(OSError):
            self.peer.close()


def send(peer: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message. Raises ProtocolError if it is too long, OSError where the peer is gone."""
    data = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_LONG_BYTES:
        raise ProtocolError(f"A message of {len(data)} bytes is too long for the keeper. It was not sent.")
    if len(data) <= MAX_MESSAGE_BYTES:
        _send(peer, data, descriptors)
        return
    with open(os.memfd_create("flashckpt-message"), "wb", buffering=0) as file:
        if file.write(data) != len(data):
            raise OSError(errno.EFBIG, "a message could not be written whole")
        _send(peer, _LONG, [file.fileno(), *descriptors])


def _send(peer: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    peer.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def receive(peer: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One message and the descriptors that came with it, which are the caller's to close.

    Raises EOFError where the peer is gone, ProtocolError for anything that is no message (then no
    descriptor is left open).
    """
    room = socket.CMSG_SPACE((MAX_DESCRIPTORS + 1) * 4)
    data, ancillary, flags, _ = peer.recvmsg(MAX_MESSAGE_BYTES + 1, room, socket.MSG_CMSG_CLOEXEC)
    received = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(content[: len(content) - len(content) % received.itemsize])
    descriptors = received.tolist()
    try:
        if not data:
            raise EOFError("the peer has closed the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError("A message is too long. The connection was closed.")
        if data == _LONG and descriptors:
            data = _read_long(descriptors.pop(0))
        return _parsed(data), descriptors
    except BaseException:
        close_all(descriptors)
        raise


def _read_long(descriptor: int) -> bytes:
    """The bytes of a long message, whose file is closed here. Never blocks: it is read only where it is a
    file, and its peer may cut it short meanwhile."""
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_LONG_BYTES:
            raise ProtocolError("A message is too long. The connection was closed.")
        return os.pread(descriptor, found.st_size, 0)
    finally:
        os.close(descriptor)


def peer_uid(peer: socket.socket) -> tuple[int, int]:
    """(pid, uid) of whoever made the connection; the pid is 0 where it is of another namespace."""
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def reach(runtime: RuntimeFolder, patience_s: float) -> socket.socket | None:
    """A connection to the keeper of a runtime folder, None where nobody listens. Raises KeeperError where
    another user's process answers, OSError."""
    if not runtime.check_socket(SOCKET_NAME):
        return None
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        peer.settimeout(patience_s)
        peer.connect(runtime.reachable(SOCKET_NAME))
        if peer_uid(peer)[1] != os.geteuid():
            why = "Another user's process answers in the keeper's place. Nothing was changed."
            raise KeeperError(why, path=runtime.path)
    except (ConnectionError, FileNotFoundError, BlockingIOError):
        peer.close()
        return None
    except BaseException:
        peer.close()
        raise
    return peer


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def remove_names(runtime: RuntimeFolder) -> None:
    """Of a keeper that is gone, socket and log. The log explains the regions: it goes when none is left."""
    with contextlib.suppress(KeeperError):  # what is no socket of ours is left alone
        if runtime.check_socket(SOCKET_NAME):
            runtime.remove(SOCKET_NAME)
    if not any(map(is_region_name, runtime.names())):
        runtime.remove(LOG_NAME)


def number(message: dict[str, Any], key: str, least: int = 0, most: int = _MAX_NUMBER) -> int:
    """A whole number of a message. Raises ProtocolError if it is none or out of bounds, as all of these."""
    value: Any = message.get(key)
    _check(key, type(value) is int and least <= value <= most)
    return int(value)


def numbers(message: dict[str, Any], key: str, count: int, most: int) -> list[int]:
    """So many whole numbers of a message, from 1 on."""
    found: Any = message.get(key)
    _check(key, isinstance(found, list) and len(found) == count)
    return [number({key: each}, key, 1, most) for each in found]


def names(message: dict[str, Any], key: str) -> list[str]:
    """Names of regions, as many as one keeper holds at most."""
    found: Any = message.get(key)
    _check(key, isinstance(found, list) and len(found) <= _MOST_NAMES)
    _check(key, all(isinstance(name, str) for name in found))
    return list(found)


def text(message: dict[str, Any], key: str, most: int = 256) -> str:
    value: Any = message.get(key)
    _check(key, isinstance(value, str) and 0 < len(value) <= most and "\0" not in value)
    return str(value)


def flag(message: dict[str, Any], key: str) -> bool:
    value: Any = message.get(key)
    _check(key, isinstance(value, bool))
    return bool(value)


def seconds(message: dict[str, Any], key: str) -> float:
    value: Any = message.get(key)
    _check(key, type(value) in (int, float) and 0 <= value <= 1e9)
    return float(value)


_REMOTE_FIELDS = {"url", "every", "keep_last", "keep_every", "options", "compress"}
_MOST_TEXT = 4096
_MOST_OPTIONS = 256


def remote_to_dict(remote: Remote) -> dict[str, Any]:
    """A remote as a trainer says it; `remote_of` reads it."""
    return {
        "url": remote.url,
        "every": remote.every,
        "keep_last": remote.keep.last,
        "keep_every": remote.keep.every_steps or 0,
        "options": dict(remote.options),
        "compress": remote.compress,
    }


def remote_of(message: dict[str, Any]) -> Remote | None:
    """The remote that a trainer names. Raises ProtocolError, which shows none of its options."""
    said: Any = message.get("remote")
    if said is None:
        return None
    _check("remote", isinstance(said, dict) and set(said) == _REMOTE_FIELDS)
    every, options = said["every"], said["options"]
    try:
        check_interval(every, "remote_every")
        compress = checked_compress(said["compress"])
    except OptionError:
        _check("every", False)
    plain = isinstance(options, dict) and all(
        type(each) in (str, int, float, bool) for each in options.values()
    )
    _check("options", plain and len(options) <= _MOST_OPTIONS)
    keep = Keep(last=number(said, "keep_last", 1), every_steps=number(said, "keep_every") or None)
    url = text(said, "url", _MOST_TEXT)
    return Remote(url=url, every=every, keep=keep, options=options, compress=compress)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("A message is no JSON. The connection was closed.") from error
    if not isinstance(message, dict):
        raise ProtocolError("A message is no object. The connection was closed.")
    return message


def _check(key: str, is_good: bool) -> None:
    if not is_good:
        raise ProtocolError(f"A message's {key!r} is missing or out of bounds. The connection was closed.")
