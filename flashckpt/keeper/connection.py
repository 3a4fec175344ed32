"""A trainer's connection to its node's keeper: found, started where there is none, and made anew.

Owns the socket, those on which an answer is waited for that takes long, the descriptors that a keeper to come
is handed, and the memory of what it is told again. What is asked, and what an answer means, `client` says.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flashckpt.errors import KeeperError, OutOfRoomError
from flashckpt.keeper import start
from flashckpt.keeper.protocol import (
    ELECTION_LOCK,
    LOG_NAME,
    MAX_DESCRIPTORS,
    SOCKET_NAME,
    Refusal,
    close_all,
    peer_uid,
    reach,
    receive,
    send,
)
from flashckpt.memory import forks
from flashckpt.memory.region import MEMFD, Region, memfds_of
from flashckpt.memory.runtime import LifeLock, RuntimeFolder, holder_of, is_alive
from flashckpt.memory.slot import Slot

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_START_AGAIN_S = 5.0
_RETRY_S = 0.05
_TRIES = 4
_CLOSE_PATIENCE_S = 2.0

T = TypeVar("T")
Answer = tuple[dict[str, Any], list[int]]
# What is made of an answer and the descriptors that came with it, which are its to close.
Taken = Callable[[dict[str, Any], list[int]], T]


@dataclass(frozen=True)
class SlotGrant:
    """A slot that the keeper handed over. `descriptor` is the receiver's to close (`open` passes it on);
    `owner` is this trainer's index in the slot; `kind` is "named" or "memfd". One that `holds_constants` is
    no slot but a region, laid out as one, of what several slots share."""

    descriptor: int
    index: int
    name: str
    owner: int
    kind: str
    num_bytes: int
    holds_constants: bool = False

    @property
    def outlives_both(self) -> bool:
        """Whether the slot survives the death of trainer and keeper together."""
        return self.kind != MEMFD

    def open(self, *, map_image: bool = True) -> Slot:
        """Map the slot, which owns the descriptor from here on. The descriptor is closed where that fails."""
        try:
            return Slot.open(self.descriptor, map_image=map_image)
        except BaseException:
            os.close(self.descriptor)
            raise


class HeldDescriptors:
    """The descriptors of regions that a trainer holds for a keeper to come, which may find no name of theirs.
    `released` names what was let go: a keeper that finds it by name has to be told."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.held: dict[str, int] = {}
        self._lent: set[str] = set()
        self._has_slots = False
        self._lock = threading.Lock()
        forks.hold(self)

    def forked(self) -> None:
        for descriptor in self.held.values():
            forks.close(descriptor)
        self.held, self._lent, self._lock = {}, set(), threading.Lock()

    def keep(self, grants: Sequence[SlotGrant], *, lent: bool = False) -> None:
        """Regions that this trainer uses, or looks at (`lent`): of those, memfds until it has slots."""
        names = {grant.name for grant in grants}
        with self._lock:
            for grant in grants:
                if grant.name not in self.held and (grant.kind == MEMFD or not lent):
                    self.held[grant.name] = os.dup(grant.descriptor)
                    self._lent |= {grant.name} if lent else set()
            self._lent -= set() if lent else names
            self.released = [name for name in self.released if name not in names]

    def lend(self, regions: Sequence[Region]) -> None:
        """Memfds of a keeper that is replaced, owned by this object from here on: until this trainer has
        slots, it may be about to resume from them."""
        with self._lock:
            for region in regions:
                if region.name in self.held or self._has_slots:
                    os.close(region.descriptor)
                else:
                    self.held[region.name] = region.descriptor
                    self._lent.add(region.name)

    def end_loans(self) -> None:
        """Slots to be written were granted: what was only looked at is not."""
        with self._lock:
            self._has_slots = True
            self._let_go(self._lent)
            self._lent.clear()

    def release(self, names: Sequence[str]) -> None:
        with self._lock:
            self._let_go(names)
            self.released = [*self.released, *names][-MAX_DESCRIPTORS:]

    def nameless(self) -> list[int]:
        """Memfds, and regions that somebody has taken the name from: nobody else finds them. Descriptors of
        the caller's own, since those here may be let go at any time."""
        with self._lock:
            return [os.dup(each) for each in self.held.values() if not os.fstat(each).st_nlink]

    def close(self) -> None:
        with self._lock:
            self._let_go(list(self.held))

    def _let_go(self, names: Collection[str]) -> None:
        # Forgotten first: a child that is forked in between must not close what has the numbers next.
        close_all([self.held.pop(name) for name in names if name in self.held])


class KeeperConnection:
    """`restarts` counts the keepers after the first; `longest_pause_s` is how long one that would come after
    many that died may have to wait: until then calls raise KeeperError. Safe to use from any thread; every
    call but `call_apart` has a time limit. A keeper that is silent for `patience_s` is replaced."""

    def __init__(self, run_path: str, runtime: RuntimeFolder, life: LifeLock, patience_s: float) -> None:
        self._run_path, self._runtime, self._life = run_path, runtime, life
        self._patience_s = patience_s
        self._held = HeldDescriptors()
        self._lock = threading.RLock()
        self._peer: socket.socket | None = None
        # Those on which an answer is waited for. Closed by who waits alone; shut down to end the wait.
        self._waiting: set[socket.socket] = set()
        self._closed = False
        self._elected: tuple[int, int] | None = None
        self._known: tuple[tuple[int, int] | None, int] | None = None
        self._said: dict[str, dict[str, Any]] = {}
        self._pauses = start.Pauses()
        self._begun = -1  # at its end once the keeper that was started last has ended
        self.longest_pause_s = start.LONGEST_PAUSE_S
        self.restarts = 0
        forks.hold(self)

    def forked(self) -> None:
        # The connection is the parent's: a word of the child's on it would be taken for the parent's.
        if self._peer is not None:
            forks.close(self._peer.detach())
        for peer in self._waiting:
            forks.close(peer.detach())
        if self._begun >= 0:
            forks.close(self._begun)
        self._waiting = set()
        self._peer, self._begun, self._lock = None, -1, threading.RLock()

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises KeeperError, or OutOfRoomError where that is the answer."""
        return self.call_with_descriptors(message, _alone)

    def say(self, message: dict[str, Any]) -> None:
        """The same for what each new keeper is to be told again."""
        with self._lock:  # one that comes right then is told, too
            self.call(message)
            self._said[message["op"]] = message

    def release(self, names: Sequence[str]) -> None:
        """This trainer maps these slots no longer: they go as soon as nothing in them is needed."""
        with self._lock:
            self.call({"op": "release", "names": list(names)})
            # Only now: a keeper that is started for this very call has what is in a memfd from us alone.
            self._held.release(names)

    def call_with_descriptors(self, message: dict[str, Any], taken: Taken[T]) -> T:
        """The same, given to `taken`. What that holds of it is handed to the next keeper, whenever that
        comes."""
        with self._lock:
            tries = 1
            while True:
                try:
                    found = _exchanged(self._connected(), message)
                    break
                except (OSError, EOFError) as error:
                    self._drop()
                    if tries >= _TRIES:
                        raise _unreachable(self._runtime, f"it does not answer ({error})") from error
                    if isinstance(error, TimeoutError):
                        self._depose()
                        tries = _TRIES
                    else:
                        # A keeper that is being killed takes connections until its listener is closed.
                        time.sleep(_RETRY_S)
                        tries += 1
                except BaseException:
                    # Interrupted: what is answered now would be taken for the answer to the next question.
                    self._drop()
                    raise
            return taken(*_accepted(*found))

    def call_apart(self, message: dict[str, Any], taken: Taken[T]) -> T:
        """The same for a request that may take long. Its answer is waited for on a socket of its own, so that
        this thread alone waits. A keeper that dies meanwhile, or is replaced, has answered nothing: its
        successor is asked.

        Raises KeeperError, OutOfRoomError; KeeperError once `stop_waiting` was called, too.
        """
        tries, restarts = 0, -1
        while not self._closed:
            self.call({"op": "ping"})  # there is a keeper, and it knows what this trainer has
            tries, restarts = (tries + 1, restarts) if restarts == self.restarts else (1, self.restarts)
            try:
                return self._answered_apart(message, taken)
            except (OSError, EOFError) as error:
                if tries >= _TRIES or isinstance(error, TimeoutError):
                    raise _unreachable(self._runtime, f"it does not answer ({error})") from error
                time.sleep(_RETRY_S)
        raise KeeperError("The run was let go while it waited for its keeper.")

    def _answered_apart(self, message: dict[str, Any], taken: Taken[T]) -> T:
        with self._lock:
            elected = self._runtime.inode(ELECTION_LOCK)
            peer = None if self._closed else self._reach()
            if peer is None:
                raise EOFError("nobody listens")
            keeper = elected, peer_uid(peer)[0]
            self._waiting.add(peer)
        try:
            if "hello" in self._said:
                asked(peer, self._said["hello"])
            peer.settimeout(None)
            answer, received = _exchanged(peer, message)
        finally:
            with self._lock:
                self._waiting.discard(peer)
            peer.close()
        with self._lock:
            if self._known != keeper:
                # A newer one was handed all that is held here: it would never hear of this. Or it is the same
                # one, and came between a look at its lock and the connection: it is made anew.
                close_all(received)
                self._drop()
                raise EOFError("another keeper has come")
            return taken(*_accepted(answer, received))

    def stop_waiting(self) -> None:
        """The run ends: nobody waits for an answer any more."""
        self._closed = True
        self._shut_waiting()

    def _shut_waiting(self) -> None:
        for peer in list(self._waiting):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def tend(self) -> bool:
        """Start a keeper again if it is dead or silent. Returns whether this trainer has a new one. To be
        called once a second or so."""
        with self._lock:
            before = self.restarts
            if self._was_swept():
                self._drop()
            self.call({"op": "ping"})
            return self.restarts > before

    def close(self) -> None:
        """Hang up, and let go of what was held for a keeper to come."""
        # Another thread may wait for a keeper that is silent: then the process's end closes all this.
        if not self._lock.acquire(timeout=_CLOSE_PATIENCE_S):
            return
        try:
            self._drop()
            self._begin(-1)
            self._held.close()
        finally:
            self._lock.release()

    def _connected(self) -> socket.socket:
        """The connection, made anew if there is none: with a keeper that is started if there is none."""
        if self._peer is not None:
            return self._peer
        self._was_swept()
        until = time.monotonic() + _START_TIMEOUT_S
        tried_at = -_START_AGAIN_S
        mute, mute_since = self._runtime.inode(ELECTION_LOCK), time.monotonic()
        while (peer := self._reached()) is None:
            now, elected = time.monotonic(), self._elected
            if elected is None or elected != mute or not is_alive(self._runtime, ELECTION_LOCK):
                mute, mute_since = elected, now
            elif now - mute_since > self._patience_s + _START_AGAIN_S:
                # Elected and without a socket for so long: it hangs, and would keep others out for ever.
                self._depose()
            if now > until:
                raise _unreachable(self._runtime, f"it did not answer within {_START_TIMEOUT_S:.0f} s")
            is_due = now - tried_at > _START_AGAIN_S or self._has_ended()
            if is_due and not is_alive(self._runtime, ELECTION_LOCK):
                if self._pauses.left_s(self.longest_pause_s) > 0:
                    raise _unreachable(self._runtime, "each dies soon after its start; the next has to wait")
                self._begin(start.start(self._run_path, self._runtime))
                self._pauses.started()
                tried_at = now
            time.sleep(_RETRY_S)
        self._begin(-1)
        self._peer = peer
        self._introduce(peer)
        return peer

    def _was_swept(self) -> bool:
        """Whether runtime folder or life lock had to be made again, since somebody has removed them (a logout
        that clears shared memory, a cleaner of temporary files): no keeper knows this trainer then."""
        runtime, life = self._runtime, self._life
        is_gone = not runtime.exists()
        if is_gone:
            runtime.renew()
        if life.stands(runtime):
            return False
        life.renew(runtime)
        log.warning(
            "%s was removed while this run was trained. It was made again, and what is in memory is handed "
            "to a new keeper; if all processes die before the next commit, memory is lost with them. Keep "
            "whatever removes it away, or set FLASHCKPT_RUNTIME to another folder.",
            runtime.path if is_gone else f"{runtime.path}/{life.name}",
        )
        return True

    def _begin(self, descriptor: int) -> None:
        """Keep what tells of the end of the keeper that was started last; -1 where nobody asks any more."""
        if self._begun >= 0:
            os.close(self._begun)
        self._begun = descriptor

    def _has_ended(self) -> bool:
        """Whether the keeper that was started last is gone: killed as it began, or ended because another one
        was elected, which may be gone itself by now. Never where many have died: then the next waits."""
        if self._begun < 0 or self._pauses.left_s() > 0:
            return False
        poll = select.poll()
        poll.register(self._begun, 0)
        return bool(poll.poll(0))

    def _introduce(self, peer: socket.socket) -> None:
        """Tell a keeper that may be a new one all that the last one was told."""
        # The next keeper may take over the lock's file, so the process counts, too.
        found = self._elected, peer_uid(peer)[0]
        try:
            if "hello" not in self._said:
                self._hand_over(peer)
                self._known = found
                return
            asked(peer, self._said["hello"])
            self._hand_over(peer)
            if self._held.released:
                asked(peer, {"op": "release", "names": self._held.released})
            for op in ("started", "closing"):
                if op in self._said:
                    asked(peer, self._said[op])
        except BaseException:
            self._drop()
            raise
        self.restarts += self._known != found
        self._known = found

    def _hand_over(self, peer: socket.socket) -> None:
        nameless = self._held.nameless()
        try:
            # One message carries no more of them: slots, those that they replace, and what they share.
            for first in range(0, len(nameless), MAX_DESCRIPTORS):
                try:
                    asked(peer, {"op": "adopt"}, nameless[first : first + MAX_DESCRIPTORS])
                except KeeperError as error:
                    # One that is damaged must not keep a run from having a keeper at all.
                    log.error("the new keeper: %s", error)
        finally:
            close_all(nameless)

    def _reached(self) -> socket.socket | None:
        self._elected = self._runtime.inode(ELECTION_LOCK)
        return self._reach()

    def _reach(self) -> socket.socket | None:
        return reach(self._runtime, self._patience_s)

    def _depose(self) -> None:
        """Let go of a keeper that lives and does not answer (stopped, or hanging in storage): its names
        go, so that another can be elected. When it wakes it finds that it is not the keeper any more."""
        self._drop()
        # Another trainer may have been faster: the keeper that it has started stays.
        if self._runtime.inode(ELECTION_LOCK) == self._elected:
            self._take_memfds()
            for name in (SOCKET_NAME, ELECTION_LOCK):
                self._runtime.remove(name)

    def _take_memfds(self) -> None:
        """Keep the memfds of a silent keeper, which have no name, for its successor: one may be the newest
        snapshot, and a start must not resume from an older one because the keeper is slow."""
        pid = holder_of(self._runtime, ELECTION_LOCK)
        try:
            if pid is not None:
                self._held.lend(memfds_of(pid))
        except OSError as error:
            log.error(
                "The keeper %d of %s does not answer and is replaced, and its memory cannot be read (%s). "
                "Snapshots in memfds that are not committed are lost; those in named regions are kept. Give "
                "the processes of this user one pid namespace, or /dev/shm room for the slots.",
                pid, self._runtime.path, error,
            )  # fmt: skip

    def _drop(self) -> None:
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.close()
            self._peer = None
        self._shut_waiting()  # of a keeper that is silent, too, they would wait for ever


def _exchanged(peer: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> Answer:
    send(peer, message, descriptors)
    return receive(peer)


def _accepted(answer: dict[str, Any], received: list[int]) -> Answer:
    if answer.get("ok") is True:
        return answer, received
    close_all(received)
    message = str(answer.get("error", "The keeper refused without a reason."))
    if answer.get("kind") == "room":
        raise OutOfRoomError(message, needed=int(answer["needed"]), available=int(answer["available"]))
    raise Refusal(message)


def _alone(answer: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    close_all(descriptors)
    return answer


def asked(peer: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> Answer:
    """The keeper's answer to a message, with its descriptors. Raises what it refuses with, OSError,
    EOFError."""
    return _accepted(*_exchanged(peer, message, descriptors))


def _unreachable(runtime: RuntimeFolder, reason: str) -> KeeperError:
    return KeeperError(
        f"The keeper cannot be asked: {reason}. Training is not touched; what is sealed stays in memory and "
        f"is persisted as soon as a keeper runs. Its log: {os.path.join(runtime.path, LOG_NAME)}",
        path=runtime.path,
    )
