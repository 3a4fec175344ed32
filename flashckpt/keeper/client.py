"""The trainer's side of the keeper: find it or start it, get slots from it, ask it.

Owns the words of each request and what is held of an answer; the connection is the line's. Safe to use from
any thread; every call has a time limit. Never called by the training thread between two batches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashckpt.errors import KeeperError
from flashckpt.keeper.grants import SlotGrant as SlotGrant
from flashckpt.keeper.line import Line
from flashckpt.keeper.possession import Possession
from flashckpt.keeper.protocol import PROTOCOL, ProtocolError, Status, close_all
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
from flashckpt.options import Keep

_PATIENCE_S = 30.0
_SOON_S = 0.005
_ANY_BYTES = 1 << 46


class KeeperClient:
    """A trainer's connection to its node's keeper. A keeper that died is started again by the next call,
    told again who we are, and handed the memfds that only we still hold. `longest_pause_s`: how long one that
    would come after many that died may have to wait; until then calls raise KeeperError."""

    def __init__(
        self, run_path: str, runtime: RuntimeFolder, life: LifeLock, *, patience_s: float = _PATIENCE_S
    ) -> None:
        self._run_path, self._life = run_path, life
        self._possession = Possession()
        self._line = Line(run_path, runtime, life, self._possession, patience_s)

    @property
    def restarts(self) -> int:
        """How many keepers this one has had after its first."""
        return self._line.restarts

    @property
    def longest_pause_s(self) -> float:
        return self._line.longest_pause_s

    @longest_pause_s.setter
    def longest_pause_s(self, pause_s: float) -> None:
        self._line.longest_pause_s = pause_s

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
        ranks: Sequence[int] = (),
    ) -> None:
        """Say who this trainer is: from here on the keeper watches its life lock. `attempt` is the name of
        the attempt that was claimed; `environment` (plain JSON, at most some 10 kB) goes into every part.
        `stacks_signal` makes this process write its Python stacks into its file for them (0: none does);
        `kill_when_stuck` lets the keeper end it when it is stuck. `ranks` are those of its node, itself alone
        where none are given: what they seal of a step makes one part."""
        said = {
            "op": "hello",
            "protocol": PROTOCOL,
            "rank": rank,
            "world": world,
            "ranks": list(ranks) or [rank],
            "attempt": attempt,
            "pid": os.getpid(),
            "lock": self._life.name,
            "keep_last": keep.last,
            "keep_every": keep.every_steps or 0,
            "linger_s": linger_s,
            "environment": dict(environment or {}),
            "run": self._run_path,
            "stacks_signal": stacks_signal,
            "kill_when_stuck": kill_when_stuck,
        }
        self._line.say(said)

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
        answer, descriptors = self._line.call_with_descriptors(asked)
        if answer.get("preparing"):
            close_all(descriptors)
            return None
        return self._taken(answer, descriptors)

    def keep_constants(self, name: str) -> SlotGrant:
        """The region of constants that survived under this name: this trainer goes on naming it. Raises
        KeeperError where it is gone."""
        return self._taken(*self._line.call_with_descriptors({"op": "constants", "name": name}))

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
        answer, descriptors = self._line.call_with_descriptors(asked)
        if not answer.get("preparing"):
            return self._granted(answer, descriptors, lent=count == 1), None
        if len(descriptors) == 1 and isinstance(offset := answer.get("image_offset"), int):
            return None, (descriptors[0], offset)
        close_all(descriptors)
        return None, None

    def surviving(self) -> list[SlotGrant]:
        """This rank's slots that hold a sealed snapshot, of an earlier attempt or of this one, and regions of
        the constants that they share."""
        answer, descriptors = self._line.call_with_descriptors({"op": "surviving"})
        return self._granted(answer, descriptors, lent=True)

    def started(self, *, loaded: str | None, step: int) -> None:
        """`start.json` of this trainer's attempt is written: it went on from `step`, out of the slot named
        `loaded` if that was its tier."""
        said = {"op": "started", "loaded": loaded or "", "step": step}
        self._line.say(said)

    def release(self, names: Sequence[str]) -> None:
        """This trainer maps these slots no longer: they go as soon as nothing in them is needed."""
        self._line.call({"op": "release", "names": list(names)})
        # Only now: a keeper that is started for this very call has what is in a memfd from us alone.
        self._possession.release(names)

    def status(self, *, awaited: bool = False) -> Status:
        """What the keeper has done. `awaited`: somebody waits for it, so that what failed is tried again
        soon and not after the pauses that many failures have made long."""
        answer = self._line.call({"op": "status", "awaited": awaited})
        found = answer.get("status")
        if not isinstance(found, dict):
            raise ProtocolError("The keeper's answer holds no status.")
        return Status.from_dict(found)

    def event(self, event: dict[str, Any]) -> None:
        """One line for the run's ledger. `event` names what happened; the keeper adds the time."""
        self._line.call({"op": "event", "event": event})

    def tend(self) -> bool:
        """Start a keeper again if it is dead or silent. Returns whether this trainer has a new one. To be
        called once a second or so."""
        return self._line.tend()

    def closing(self) -> None:
        """This trainer ends in order: what it asked for is still persisted, then the keeper may go."""
        self._line.say({"op": "closing"})

    def close(self) -> None:
        self._line.close()

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
