"""The keeper's socket: who may connect, and what becomes of a message that is none.

Owns the listening socket and the connections. Never blocks: a peer that does not read is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flashckpt.errors import FlashckptError, OutOfRoomError
from flashckpt.events import log
from flashckpt.keeper.protocol import (
    SOCKET_NAME,
    ProtocolError,
    close_all,
    peer_uid,
    receive,
    send,
)
from flashckpt.memory.runtime import RuntimeFolder

_MOST_CONNECTIONS = 256
_BACKLOG = 128


@dataclass
class Connection:
    """One peer. `lock` is the life lock of the trainer that it said it is."""

    peer: socket.socket
    pid: int
    lock: str | None = None


# Takes a connection, a message and its descriptors (which it must close or keep); returns the answer and
# the descriptors to send with it (which stay whose they are), or None for one that comes later (`tell`).
Answer = Callable[[Connection, dict[str, Any], list[int]], tuple[dict[str, Any], Sequence[int]] | None]


class Server:
    def __init__(self, folder: RuntimeFolder, answer: Answer) -> None:
        self._answer = answer
        self._folder = folder
        self._connections: dict[int, Connection] = {}
        # What a dead keeper left under the name goes; anything that is not ours is refused.
        if folder.check_socket(SOCKET_NAME):
            folder.remove(SOCKET_NAME)
        self._listener = self._listening()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def __len__(self) -> int:
        return len(self._connections)

    def register(self, poll: select.poll) -> None:
        poll.register(self._listener.fileno(), select.POLLIN)
        for descriptor in self._connections:
            poll.register(descriptor, select.POLLIN)

    def serve(self, ready: Sequence[int]) -> None:
        """Answer those of the ready descriptors that are ours."""
        for descriptor in ready:
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._connections:
                self._serve(self._connections[descriptor])

    def mend(self) -> None:
        """Be found again where the socket's name was removed. To be called by the elected keeper alone."""
        if self._folder.inode(SOCKET_NAME) is None:
            log.warning("the keeper's socket was removed: it is made again")
            self._listener.close()
            self._listener = self._listening()

    def _listening(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        before = os.umask(0o177)
        try:
            listener.bind(self._folder.reachable(SOCKET_NAME))
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
        return listener

    def close(self) -> None:
        self._listener.close()
        close_all([self._spare])
        for connection in list(self._connections.values()):
            self._drop(connection)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away(error)
            return
        pid, uid = peer_uid(peer)
        if uid != os.geteuid() or len(self._connections) >= _MOST_CONNECTIONS:
            log.warning("a connection of user %d, process %d was refused", uid, pid)
            peer.close()
            return
        peer.setblocking(False)
        self._connections[peer.fileno()] = Connection(peer, pid)

    def _turn_away(self, error: OSError) -> None:
        """Whoever cannot be let in for want of a descriptor is told so: it would wait for its answer."""
        close_all([self._spare])
        self._spare = -1
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return  # a thread was faster; the next try comes at once
        with contextlib.suppress(OSError):
            why = f"The keeper cannot serve another connection: {error.strerror}."
            send(peer, {"ok": False, "kind": "keeper", "error": why})
        # Open until the next one comes: who is hung up on while it speaks hears nothing.
        self._spare = peer.detach()

    def _serve(self, connection: Connection) -> None:
        try:
            message, descriptors = receive(connection.peer)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._drop(connection)
            return
        except ProtocolError as error:
            self._refuse(connection, error)
            return
        try:
            answer = self._answer(connection, message, descriptors)
        except ProtocolError as error:
            close_all(descriptors)
            self._refuse(connection, error)
        except FlashckptError as error:
            self.refuse(connection, error)
        except OSError:
            self._drop(connection)
        else:
            if answer is not None:
                self.tell(connection, *answer)

    def tell(self, connection: Connection, answer: dict[str, Any], given: Sequence[int] = ()) -> bool:
        """Answer what was asked, with descriptors, which stay the caller's. False where nobody is there to
        be told any more."""
        if not self.is_open(connection):
            return False
        try:
            send(connection.peer, {"ok": True, **answer}, given)
        except OSError:
            self._drop(connection)
            return False
        return True

    def is_open(self, connection: Connection) -> bool:
        """Whether whoever asked may still be there to be told."""
        return self._connections.get(connection.peer.fileno()) is connection

    def refuse(self, connection: Connection, error: FlashckptError) -> None:
        """Answer that it cannot be, and why."""
        if not self.is_open(connection):
            return
        answer: dict[str, Any] = {"ok": False, "kind": "keeper", "error": str(error)[:4000]}
        if isinstance(error, OutOfRoomError):
            answer |= {"kind": "room", "needed": error.needed, "available": error.available}
        try:
            send(connection.peer, answer)
        except OSError:
            self._drop(connection)

    def _refuse(self, connection: Connection, error: ProtocolError) -> None:
        log.warning("process %d: %s", connection.pid, error)
        self.refuse(connection, error)
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._connections.pop(connection.peer.fileno(), None)
        with contextlib.suppress(OSError):
            connection.peer.close()
