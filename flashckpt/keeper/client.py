"""The trainer's side of the keeper: find it or start it, get slots from it, ask it.

Owns the connection and the memory of what must be said again to a new keeper. Safe to use from any
thread; every call has a time limit. Never called by the training thread between two batches.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashckpt.errors import KeeperError, OutOfRoomError
from flashckpt.events import log
from flashckpt.keeper import start
from flashckpt.keeper.grants import SlotGrant as SlotGrant
from flashckpt.keeper.possession import Possession
from flashckpt.keeper.protocol import (
    ELECTION_LOCK,
    MAX_DESCRIPTORS,
    PROTOCOL,
    SOCKET_NAME,
    ProtocolError,
    Status,
    close_all,
    peer_uid,
    receive,
    send,
)
from flashckpt.keeper.standing import make_stand
from flashckpt.memory.runtime import LifeLock, RuntimeFolder, is_alive
from flashckpt.options import Keep

_START_TIMEOUT_S = 60.0
_PATIENCE_S = 30.0
_START_AGAIN_S = 5.0
_RETRY_S, _SOON_S = 0.05, 0.005
_TRIES = 4
_CLOSE_PATIENCE_S = 2.0
_ANY_BYTES = 1 << 46


class KeeperClient:
    """A trainer's connection to its node's keeper. A keeper that died is started again by the next call,
    told again who we are, and handed the memfds that only we still hold. `longest_pause_s`: how long one that
    would come after many that died may have to wait; until then calls raise KeeperError."""

    def __init__(
        self, run_path: str, runtime: RuntimeFolder, life: LifeLock, *, patience_s: float = _PATIENCE_S
    ) -> None:
        self._run_path = run_path
        self._runtime = runtime
        self._life = life
        self._patience_s = patience_s
        self._lock = threading.RLock()
        self._peer: socket.socket | None = None
        self._elected: tuple[int, int] | None = None
        self._said: dict[str, dict[str, Any]] = {}
        self._possession = Possession()
        self._pauses = start.Pauses()
        self.longest_pause_s = start.LONGEST_PAUSE_S
        self.restarts = 0

    # What a trainer says

    def hello(
        self,
        *,
        rank: int,
        world: int,
        attempt: str,
        keep: Keep,
        linger_s: float,
        environment: Mapping[str, Any] | None = None,
        stacks_signal: int = 0,
        kill_when_stuck: bool = False,
    ) -> None:
        """Say who this trainer is: from here on the keeper watches its life lock. `attempt` is the name of
        the attempt that was claimed; `environment` (plain JSON, at most some 10 kB) goes into every part.
        `stacks_signal` makes this process write its Python stacks into its file for them (0: none does);
        `kill_when_stuck` lets the keeper end it when it is stuck."""
        said = {
            "op": "hello",
            "protocol": PROTOCOL,
            "rank": rank,
            "world": world,
            "attempt": attempt,
            "pid": os.getpid(),
            "lock": self._life.name,
            "keep_last": keep.last,
            "keep_every": keep.every_steps or 0,
            "linger_s": linger_s,
            "environment": dict(environment or {}),
            "run": os.path.abspath(self._run_path),
            "stacks_signal": stacks_signal,
            "kill_when_stuck": kill_when_stuck,
        }
        self._call(said)
        self._said["hello"] = said

    def slots(
        self,
        count: int,
        metadata_bytes: int,
        image_bytes: int,
        *,
        minimum: int = 2,
        timeout_s: float = 3600.0,
        early: Callable[[int, int], None] | None = None,
    ) -> list[SlotGrant]:
        """Slots of at least these capacities: `count` of them, or as many as memory allows, `minimum` at
        least. What survived of this rank is among them where it is large enough. Slots that this trainer
        was given before stay until it releases them. A single slot is one to read a step into: it holds
        nothing that is committed nowhere. `early` is for that one: it is given a descriptor, to be closed by
        it, and the offset of the image in the region that is being made, to begin with what has its place
        already. The slot that is granted in the end may be another one.

        Blocks while memory is taken (about a second a GiB); the keeper serves others meanwhile. Raises
        OutOfRoomError with bytes needed and available.
        """
        until = time.monotonic() + timeout_s
        while True:
            grants, growing = self._ask(count, metadata_bytes, image_bytes, minimum, early is not None)
            if grants is not None:
                return grants
            if early is not None and growing is not None:
                early(*growing)
                early = None
            if time.monotonic() > until:
                raise KeeperError(
                    f"The keeper did not get {count} slots ready within {timeout_s:.0f} s. No snapshot is "
                    "taken until it does; training is not touched."
                )
            time.sleep(_SOON_S)

    def ask_slots(
        self,
        count: int,
        metadata_bytes: int,
        image_bytes: int,
        *,
        minimum: int = 2,
        most_image_bytes: int | None = None,
        least_bytes: tuple[int, int] | None = None,
    ) -> list[SlotGrant] | None:
        """The same without waiting: None while the keeper is still making them ready. Ask again. Slots whose
        image has room for more than `most_image_bytes`, where that is given, are not among them. With
        `least_bytes` of (metadata, image), slots that are there already do, too."""
        sizes = metadata_bytes, image_bytes
        return self._ask(count, *sizes, minimum, False, most_image_bytes, least_bytes)[0]

    def ask_constants(self, metadata_bytes: int, image_bytes: int) -> SlotGrant | None:
        """A region for the constants that this trainer's slots are to share, FREE. None while the keeper is
        still making it ready: ask again. It stays until this trainer has released it, or died, and no
        snapshot names it. Raises OutOfRoomError, or KeeperError where it would not live as long as slots."""
        asked = {"op": "constants", "metadata_bytes": metadata_bytes, "image_bytes": image_bytes}
        answer, descriptors = self._call_with_descriptors(asked)
        if answer.get("preparing"):
            close_all(descriptors)
            return None
        return self._taken(answer, descriptors)

    def keep_constants(self, name: str) -> SlotGrant:
        """The region of constants that survived under this name: this trainer goes on naming it. Raises
        KeeperError where it is gone."""
        return self._taken(*self._call_with_descriptors({"op": "constants", "name": name}))

    def _taken(self, answer: dict[str, Any], descriptors: list[int]) -> SlotGrant:
        grants = self._parsed(answer, descriptors)
        if len(grants) != 1:
            close_all(descriptors)
            raise ProtocolError("The keeper's answer is not one region.")
        self._possession.keep(grants)
        return grants[0]

    def _ask(
        self,
        count: int,
        metadata_bytes: int,
        image_bytes: int,
        minimum: int,
        early: bool,
        most_image_bytes: int | None = None,
        least_bytes: tuple[int, int] | None = None,
    ) -> tuple[list[SlotGrant] | None, tuple[int, int] | None]:
        asked = {
            "op": "slots",
            "count": count,
            "minimum": minimum,
            "metadata_bytes": metadata_bytes,
            "image_bytes": image_bytes,
            "most_image_bytes": max(image_bytes, most_image_bytes or _ANY_BYTES),
            "least_bytes": least_bytes or (metadata_bytes, image_bytes),
            "early": early,
        }
        answer, descriptors = self._call_with_descriptors(asked)
        if not answer.get("preparing"):
            return self._granted(answer, descriptors, lent=count == 1), None
        if len(descriptors) == 1 and isinstance(offset := answer.get("image_offset"), int):
            return None, (descriptors[0], offset)
        close_all(descriptors)
        return None, None

    def surviving(self) -> list[SlotGrant]:
        """This rank's slots that hold a sealed snapshot, of an earlier attempt or of this one, and regions of
        the constants that they share."""
        answer, descriptors = self._call_with_descriptors({"op": "surviving"})
        return self._granted(answer, descriptors, lent=True)

    def started(self, *, loaded: str | None, step: int) -> None:
        """`start.json` of this trainer's attempt is written: it went on from `step`, out of the slot named
        `loaded` if that was its tier."""
        said = {"op": "started", "loaded": loaded or "", "step": step}
        self._call(said)
        self._said["started"] = said

    def release(self, names: Sequence[str]) -> None:
        """This trainer maps these slots no longer: they go as soon as nothing in them is needed."""
        self._call({"op": "release", "names": list(names)})
        # Only now: a keeper that is started for this very call has what is in a memfd from us alone.
        self._possession.release(names)

    def status(self, *, awaited: bool = False) -> Status:
        """What the keeper has done. `awaited`: somebody waits for it, so that what failed is tried again
        soon and not after the pauses that many failures have made long."""
        answer = self._call({"op": "status", "awaited": awaited})
        found = answer.get("status")
        if not isinstance(found, dict):
            raise ProtocolError("The keeper's answer holds no status.")
        return Status.from_dict(found)

    def event(self, event: dict[str, Any]) -> None:
        """One line for the run's ledger. `event` names what happened; the keeper adds the time."""
        self._call({"op": "event", "event": event})

    def tend(self) -> bool:
        """Start a keeper again if it is dead or silent. Returns whether this trainer has a new one. To be
        called once a second or so."""
        with self._lock:
            before = self.restarts
            if make_stand(self._runtime, self._life):
                self._drop()
            self._call({"op": "ping"})
            return self.restarts > before

    def closing(self) -> None:
        """This trainer ends in order: what it asked for is still persisted, then the keeper may go."""
        said = {"op": "closing"}
        self._call(said)
        self._said["closing"] = said

    def close(self) -> None:
        # Another thread may wait for a keeper that is silent: then the process's end closes all this.
        if not self._lock.acquire(timeout=_CLOSE_PATIENCE_S):
            return
        try:
            self._drop()
            self._possession.close()
        finally:
            self._lock.release()

    # The connection

    def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        answer, descriptors = self._call_with_descriptors(message)
        close_all(descriptors)
        return answer

    def _call_with_descriptors(self, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            tries = 1
            while True:
                try:
                    return self._asked(self._connected(), message)
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

    def _asked(
        self, peer: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        send(peer, message, descriptors)
        answer, received = receive(peer)
        if answer.get("ok") is True:
            return answer, received
        close_all(received)
        raise _as_error(answer)

    def _connected(self) -> socket.socket:
        """The connection, made anew if there is none: with a keeper that is started if there is none."""
        if self._peer is not None:
            return self._peer
        make_stand(self._runtime, self._life)
        until = time.monotonic() + _START_TIMEOUT_S
        tried_at = -_START_AGAIN_S
        mute, mute_since = self._runtime.inode(ELECTION_LOCK), time.monotonic()
        while (peer := self._reach()) is None:
            now = time.monotonic()
            elected = self._runtime.inode(ELECTION_LOCK)
            if elected is None or elected != mute or not is_alive(self._runtime, ELECTION_LOCK):
                mute, mute_since = elected, now
            elif now - mute_since > self._patience_s + _START_AGAIN_S:
                # Elected and without a socket for so long: it hangs, and would keep others out for ever.
                self._elected = elected
                self._depose()
            if now > until:
                raise _unreachable(self._runtime, f"it did not answer within {_START_TIMEOUT_S:.0f} s")
            if now - tried_at > _START_AGAIN_S and not is_alive(self._runtime, ELECTION_LOCK):
                if self._pauses.left_s(self.longest_pause_s) > 0:
                    raise _unreachable(self._runtime, "each dies soon after its start; the next has to wait")
                start.start(self._run_path, self._runtime)
                self._pauses.started()
                tried_at = now
            time.sleep(_RETRY_S)
        self._peer = peer
        self._introduce(peer)
        return peer

    def _introduce(self, peer: socket.socket) -> None:
        """Tell a keeper that may be a new one all that the last one was told."""
        if "hello" not in self._said:
            return
        try:
            self._asked(peer, self._said["hello"])
            self._hand_over(peer)
            if self._possession.released:
                self._asked(peer, {"op": "release", "names": self._possession.released})
            for op in ("started", "closing"):
                if op in self._said:
                    self._asked(peer, self._said[op])
        except BaseException:
            self._drop()
            raise
        self.restarts += 1

    def _hand_over(self, peer: socket.socket) -> None:
        nameless = self._possession.nameless()
        try:
            # One message carries no more of them: slots, those that they replace, and what they share.
            for first in range(0, len(nameless), MAX_DESCRIPTORS):
                try:
                    self._asked(peer, {"op": "adopt"}, nameless[first : first + MAX_DESCRIPTORS])
                except KeeperError as error:
                    # One that is damaged must not keep a run from having a keeper at all.
                    log.error("the new keeper: %s", error)
        finally:
            close_all(nameless)

    def _reach(self) -> socket.socket | None:
        if not self._runtime.check_socket(SOCKET_NAME):
            return None
        self._elected = self._runtime.inode(ELECTION_LOCK)
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            peer.settimeout(self._patience_s)
            peer.connect(self._runtime.reachable(SOCKET_NAME))
            if peer_uid(peer)[1] != os.geteuid():
                raise _unreachable(self._runtime, "another user's process answers in its place")
        except (ConnectionError, FileNotFoundError, BlockingIOError):
            peer.close()
            return None
        except BaseException:
            peer.close()
            raise
        return peer

    def _depose(self) -> None:
        """Let go of a keeper that lives and does not answer (stopped, or hanging in storage): its names
        go, so that another can be elected. When it wakes it finds that it is not the keeper any more."""
        self._drop()
        # Another trainer may have been faster: the keeper that it has started stays.
        if self._runtime.inode(ELECTION_LOCK) == self._elected:
            for name in (SOCKET_NAME, ELECTION_LOCK):
                self._runtime.remove(name)

    def _drop(self) -> None:
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.close()
            self._peer = None

    def _granted(self, answer: dict[str, Any], descriptors: list[int], *, lent: bool) -> list[SlotGrant]:
        """What was granted; slots to be written, unless they are `lent`, to be looked at."""
        grants = self._parsed(answer, descriptors)
        if lent:
            self._possession.lend(grants)
        else:
            self._possession.keep(grants)
            self._possession.end_loans()
        return grants

    def _parsed(self, answer: dict[str, Any], descriptors: list[int]) -> list[SlotGrant]:
        rows = answer.get("slots")
        if not isinstance(rows, list) or len(rows) != len(descriptors):
            close_all(descriptors)
            raise ProtocolError("The keeper's answer does not say what its descriptors are.")
        return [SlotGrant(descriptor, **row) for descriptor, row in zip(descriptors, rows, strict=True)]


def connect_or_start(
    run_path: str, runtime: RuntimeFolder, life: LifeLock, *, patience_s: float = _PATIENCE_S
) -> KeeperClient:
    """A client of the run's keeper on this node, which is started if there is none.

    `life` is this process's life lock in `runtime`. A keeper that is silent for `patience_s` is replaced.
    Raises KeeperError.
    """
    client = KeeperClient(run_path, runtime, life, patience_s=patience_s)
    client.tend()
    return client


def _as_error(answer: dict[str, Any]) -> KeeperError | OutOfRoomError:
    message = str(answer.get("error", "The keeper refused without a reason."))
    if answer.get("kind") == "room":
        return OutOfRoomError(message, needed=int(answer["needed"]), available=int(answer["available"]))
    return KeeperError(message)


def _unreachable(runtime: RuntimeFolder, reason: str) -> KeeperError:
    return KeeperError(
        f"The keeper cannot be asked: {reason}. Training is not touched; what is sealed stays in memory and "
        f"is persisted as soon as a keeper runs. Its log: {os.path.join(runtime.path, 'keeper.log')}",
        path=runtime.path,
    )
