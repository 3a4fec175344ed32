"""The protocol between trainer and keeper: bounded JSON messages over a Unix socket, with descriptors.

Owns the wire format and the checks of received messages. Snapshots do not pass here: see the control pages.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from flashckpt.errors import KeeperError, OptionError
from flashckpt.format.names import CommitName, SnapshotId, parse_at
from flashckpt.memory.cache_folder import CachePlace
from flashckpt.memory.region import is_region_name
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.options import Keep, Remote, check_interval, checked_compress

SOCKET_NAME = "keeper.socket"
ELECTION_LOCK = "keeper.lock"
LOG_NAME = "keeper.log"
PROTOCOL = 10
MAX_MESSAGE_BYTES = 64 << 10
"""Of a message in one packet. A longer one, with the options of two stores, is sent in a memfd."""
MAX_LONG_BYTES = 4 << 20
_LONG = b'{"long":true}'
MAX_DESCRIPTORS = 250
"""Of one message: Linux passes 253."""
MAX_NAMES = 64
_CREDENTIALS = struct.Struct("3i")
_MAX_NUMBER = 1 << 60


Answer = tuple[dict[str, Any], Sequence[int]]
"""The fields of an answer, and the descriptors to send with it, which stay the sender's."""
LATER: Answer = {"later": True}, ()
"""To a request that is to be repeated: memory is being taken, or the cache is being read."""


class ProtocolError(KeeperError):
    """A received message is invalid: the connection is closed."""


class Refusal(KeeperError):
    """The keeper refused a request. An immediate retry would fail as well."""


@dataclass(frozen=True)
class Failure:
    """A snapshot that could not be persisted. `errno` is 0 if the system gave none. `has_diverged`: replicas
    that were declared alike differ."""

    step: int
    generation: int
    message: str
    errno: int
    has_diverged: bool = False


@dataclass(frozen=True)
class TornSnapshot:
    """A snapshot that was discarded because its bytes were not those of its boundary. `leaves` names up to 22
    leaves that differed, none if its record or metadata was damaged."""

    step: int
    generation: int
    slot: str
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class RemoteStatus:
    """The state of the mirror. `newest`: the newest step known to be committed there, and `copying`, the step
    that is being copied: -1 for none. `waits`: a due step is not there yet. `error`: why the last try failed,
    or empty. `progress_bytes` only grows."""

    url: str
    newest: int = -1
    copying: int = -1
    waits: bool = False
    error: str = ""
    progress_bytes: int = 0


@dataclass(frozen=True)
class CacheStatus:
    """The state of this node's cache. `cached`: the newest 64 snapshots that all of its ranks have there,
    oldest first. `error`: why the last snapshot passed the cache by, or empty."""

    cached: tuple[CommitName, ...] = ()
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cached": list(map(str, self.cached))}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CacheStatus:
        return cls(**{**data, "cached": tuple(map(_commit_name, data["cached"]))})


@dataclass(frozen=True, kw_only=True)
class Status:
    """What the keeper has done for the attempt of a trainer.

    `committed`: the newest 64 steps, oldest first. `waiting`: requested steps that are not committed, cached
    ones included, `unsaved` their names; among them `for_others`, which lack only parts of other
    nodes, and `failing`, whose last try has failed, of all attempts. `persisting`: the step that is being
    written, during which `progress_bytes` grows. `diverged`: replicas that differ, `EVERY` for too many.
    `counts`: of all attempts. `remote`, `cache`: None without one."""

    keeper: str = ""
    committed: tuple[int, ...] = ()
    newest_committed: int | None = None
    persisting: int | None = None
    waiting: tuple[int, ...] = ()
    for_others: tuple[int, ...] = ()
    failing: tuple[int, ...] = ()
    unsaved: tuple[CommitName, ...] = ()
    failures: tuple[Failure, ...] = ()
    torn: tuple[TornSnapshot, ...] = ()
    diverged: tuple[str, ...] = ()
    superseded_by: str | None = None
    progress_bytes: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    remote: RemoteStatus | None = None
    cache: CacheStatus | None = None

    def to_dict(self) -> dict[str, Any]:
        cache = None if self.cache is None else self.cache.to_dict()
        return {**asdict(self), "unsaved": list(map(str, self.unsaved)), "cache": cache}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Status:
        """Raises ProtocolError unless `data` is a result of `to_dict`."""
        try:
            kinds = ("committed", "waiting", "for_others", "failing")
            steps = {key: tuple(map(int, data[key])) for key in kinds}
            failures = tuple(Failure(**each) for each in data["failures"])
            torn = [TornSnapshot(**{**each, "leaves": tuple(each["leaves"])}) for each in data["torn"]]
            remote = None if data["remote"] is None else RemoteStatus(**data["remote"])
            named: dict[str, Any] = {"diverged": tuple(map(str, data["diverged"])), "torn": tuple(torn)}
            named |= {"remote": remote, "unsaved": tuple(map(_commit_name, data["unsaved"]))}
            named["cache"] = None if data["cache"] is None else CacheStatus.from_dict(data["cache"])
            return cls(**{**data, **steps, **named, "failures": failures})
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"The keeper's status cannot be read: {error}") from error


def send(peer: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message. Raises ProtocolError if it is too long, OSError if the peer is gone."""
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
    """Receive one message and its descriptors, which the caller closes. Raises EOFError if the peer is gone,
    and ProtocolError for an invalid message; then no descriptor is left open."""
    space = socket.CMSG_SPACE((MAX_DESCRIPTORS + 1) * 4)
    data, ancillary, flags, _ = peer.recvmsg(MAX_MESSAGE_BYTES + 1, space, socket.MSG_CMSG_CLOEXEC)
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
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ProtocolError("A message is not an object. The connection was closed.")
        return message, descriptors
    except (ValueError, RecursionError) as error:
        close_all(descriptors)
        raise ProtocolError("A message is not JSON. The connection was closed.") from error
    except BaseException:
        close_all(descriptors)
        raise


def _read_long(descriptor: int) -> bytes:
    """Read a long message from its file, and close that. Never blocks: reads regular files only, which the
    peer may cut short meanwhile."""
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_LONG_BYTES:
            raise ProtocolError("A message is too long. The connection was closed.")
        return os.pread(descriptor, found.st_size, 0)
    finally:
        os.close(descriptor)


def peer_uid(peer: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected; the pid is 0 for a process of another namespace."""
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def connect(runtime: RuntimeFolder, timeout_s: float) -> socket.socket | None:
    """Connect to the keeper of a runtime folder; None if no process listens. Raises KeeperError if a process
    of another user answers, OSError."""
    if not runtime.check_socket(SOCKET_NAME):
        return None
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        peer.settimeout(timeout_s)
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
    """Remove the socket of a dead keeper, and, once no region is left, its log, which explains them."""
    with contextlib.suppress(KeeperError):  # a name that is no socket of ours stays
        if runtime.check_socket(SOCKET_NAME):
            runtime.remove(SOCKET_NAME)
    if not any(map(is_region_name, runtime.names())):
        runtime.remove(LOG_NAME)


def number(message: dict[str, Any], key: str, least: int = 0, most: int = _MAX_NUMBER) -> int:
    """A whole number of a message. Raises ProtocolError if it is out of bounds, as all of these."""
    value: Any = message.get(key)
    _check(key, type(value) is int and least <= value <= most)
    return int(value)


def numbers(message: dict[str, Any], key: str, count: int, most: int) -> list[int]:
    """A list of `count` positive numbers of a message."""
    found: Any = message.get(key)
    _check(key, isinstance(found, list) and len(found) == count)
    return [number({key: each}, key, 1, most) for each in found]


def names(message: dict[str, Any], key: str) -> list[str]:
    """A list of names of regions."""
    found: Any = message.get(key)
    _check(key, isinstance(found, list) and len(found) <= MAX_NAMES)
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


_MOST_TEXT = 4096
_MOST_OPTIONS = 256


def keep_of(message: dict[str, Any]) -> Keep:
    """The retention of a hello, or of its remote."""
    return _read("keep", Keep, message.get("keep"))


def remote_of(message: dict[str, Any]) -> Remote | None:
    """The remote of a hello. Raises ProtocolError, which shows none of its options."""
    named: Any = message.get("remote")
    if named is None:
        return None
    _check("remote", isinstance(named, dict))
    remote = _read("remote", Remote, {**named, "keep": keep_of(named)})
    text(named, "url", _MOST_TEXT)
    try:
        check_interval(remote.every, "remote_every")
        checked_compress(remote.compress)
    except OptionError:
        _check("remote", False)
    options: Any = remote.options
    _check("options", isinstance(options, dict) and len(options) <= _MOST_OPTIONS)
    _check("options", all(type(each) in (str, int, float, bool) for each in options.values()))
    return remote


def cache_of(message: dict[str, Any]) -> CachePlace | None:
    """The cache of a hello. Raises ProtocolError."""
    named: Any = message.get("cache")
    if named is None:
        return None
    place = _read("cache", CachePlace, named)
    _check("cache", os.path.isabs(text(named, "path", _MOST_TEXT)))
    _check("cache", place.limit_bytes is None or number(named, "limit_bytes", 1) > 0)
    return place


T = TypeVar("T")


def _read(key: str, kind: Callable[..., T], fields: Any) -> T:
    """The object whose fields, as `asdict` gives them, a message has under a key."""
    try:
        return kind(**fields)
    except (TypeError, OptionError) as error:
        raise ProtocolError(f"A message's {key!r} is invalid. The connection was closed.") from error


def _check(key: str, is_good: bool) -> None:
    if not is_good:
        raise ProtocolError(f"A message's {key!r} is missing or out of bounds. The connection was closed.")


def _commit_name(text: str) -> CommitName:
    """Raises ValueError."""
    step, _, at = str(text).partition("@")
    found = parse_at(at)
    if not isinstance(found, SnapshotId):
        raise ValueError(f"{text!r} names no snapshot")
    return CommitName(int(step), found.attempt, found.boundary)
