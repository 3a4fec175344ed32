"""What a trainer asks of its keeper. Owns the words of each request and what is held of an answer. Never
called by the training thread between two batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from flashckpt.errors import FlashckptError
from flashckpt.format.names import AttemptName
from flashckpt.keeper.connection import KeeperConnection, Taken, asked
from flashckpt.keeper.connection import SlotGrant as SlotGrant
from flashckpt.keeper.protocol import PROTOCOL, ProtocolError, Status, close_all, reach, remote_to_dict
from flashckpt.memory.control_page import SlotSize
from flashckpt.memory.held_regions import sealed_in
from flashckpt.memory.numa import NO_NODE
from flashckpt.memory.runtime import LifeLock, RuntimeFolder
from flashckpt.memory.slot import Slot
from flashckpt.options import Keep, Remote
from flashckpt.store import options_of

_PATIENCE_S = 30.0
# For a keeper that need not be asked: one that is silent for so long is replaced soon after.
_SHORT_PATIENCE_S = 5.0


class KeeperClient(KeeperConnection):
    """What a trainer asks of its node's keeper. One that died is started again by the next call, told again
    who we are, and handed the memfds that only we still hold."""

    def __init__(
        self, run_path: str, runtime: RuntimeFolder, life: LifeLock, *, patience_s: float = _PATIENCE_S
    ) -> None:
        super().__init__(run_path, runtime, life, patience_s)
        self.available_bytes = 0  # what the node had left when slots were granted last

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
        remote: Remote | None = None,
        grace_s: float = 60.0,
    ) -> None:
        """Say who this trainer is: from here on the keeper watches its life lock. `attempt` is the name of
        the attempt that was claimed; `environment` (plain JSON, at most some 10 kB) goes into every part.
        `stacks_signal` makes this process write its Python stacks into its file for them (0: none does);
        `kill_when_stuck` lets the keeper end it when it is stuck. `ranks` are those of its node, itself alone
        where none are given: what they seal of a step makes one part. `remote` is where committed steps are
        copied to, with the options of its store: also a keeper that lives already has them from here alone.
        `grace_s`: for how long the keeper, after the last trainer, stays for a remote that takes nothing."""
        said = {
            "op": "hello",
            "protocol": PROTOCOL,
            "rank": rank,
            "world": world,
            "ranks": list(ranks) or [rank],
            "attempt": attempt,
            "lock": self._life.name,
            "keep_last": keep.last,
            "keep_every": keep.every_steps or 0,
            "linger_s": linger_s,
            "environment": dict(environment or {}),
            "run": self._run_path,
            # Those of a keeper that lives already may be of credentials that have been replaced.
            "storage": options_of(self._run_path),
            "stacks_signal": stacks_signal,
            "kill_when_stuck": kill_when_stuck,
            "grace_s": grace_s,
            "remote": None if remote is None else remote_to_dict(remote),
        }
        self.say(said)

    def slots(
        self,
        count: int,
        needed: SlotSize,
        wanted: SlotSize | None = None,
        have: Sequence[str] = (),
        node: int = NO_NODE,
    ) -> list[SlotGrant]:
        """Slots for this trainer to write, each with room for `needed`, and for `wanted` where there is
        memory: what survived of this rank, where it is large enough, and new ones. `count` of them (0: as
        many as the keeper finds right), less those in `have` that are large enough already: the names of all
        that this trainer holds, which are never given. Where memory does not allow the number, two. New ones
        come from the NUMA node `node` where it has memory.

        Blocks while memory is taken (a second a GiB or less). Raises OutOfRoomError with bytes needed and
        available, KeeperError.
        """

        def taken(answer: dict[str, Any], descriptors: list[int]) -> list[SlotGrant]:
            self.available_bytes = int(answer.get("available", 0))
            grants = self._kept(answer, descriptors)
            self._held.end_loans()
            return grants

        return self._requested("slots", count, needed, wanted or needed, have, node, taken)

    def constants(self, size: SlotSize, node: int = NO_NODE) -> SlotGrant:
        """A region for the constants of this trainer, FREE. It stays until this trainer has released it, or
        died, and no snapshot names it. Blocks and raises as `slots`."""
        return _one(self._requested("constants", 1, size, size, (), node, self._kept))

    def _requested(
        self,
        purpose: str,
        count: int,
        needed: SlotSize,
        wanted: SlotSize,
        have: Sequence[str],
        node: int,
        taken: Taken[list[SlotGrant]],
    ) -> list[SlotGrant]:
        asked = {"purpose": purpose, "count": count, "needed": needed, "wanted": wanted, "have": list(have)}
        return self.call_apart({"op": "memory", **asked, "node": node}, taken)

    def keep_constants(self, name: str) -> SlotGrant:
        """The region of constants that survived under this name: this trainer goes on naming it. Raises
        KeeperError where it is gone."""
        return _one(self.call_with_descriptors({"op": "keep", "name": name}, self._kept))

    def surviving(self) -> list[SlotGrant]:
        """This rank's slots that hold a sealed snapshot, of an earlier attempt or of this one, and regions of
        the constants that they share."""
        return self.call_with_descriptors({"op": "surviving"}, self._lent)

    def of_same_boundary(self, attempt: AttemptName, step: int, boundary: int) -> list[Slot]:
        """The slots of this node's other ranks that hold their snapshot of this boundary, mapped to be looked
        at, and the caller's to close. Nothing keeps them as they are but what their ranks do."""
        found: list[Slot] = []
        asked = {"op": "same_boundary", "attempt": str(attempt), "step": step, "boundary": boundary}

        def taken(answer: dict[str, Any], descriptors: list[int]) -> bool:
            while descriptors:
                found.append(_looked_at(descriptors.pop(0), descriptors))
            return answer.get("is_all") is not False

        try:
            first = 0
            while not self.call_with_descriptors({**asked, "first": first}, taken):
                first = max(slot.rank for slot in found) + 1
        except BaseException:
            for slot in found:
                slot.close()
            raise
        return found

    def started(self, parent: AttemptName, step: int, boundary: int) -> None:
        """`start.json` of this trainer's attempt is written: it went on from this boundary of another
        one, out of memory."""
        self.say({"op": "started", "parent": str(parent), "step": step, "boundary": boundary})

    def status(self, *, awaited: bool = False, common: Sequence[int] = ()) -> Status:
        """What the keeper has done. `awaited`: somebody waits for it, so that what failed is tried again
        soon and not after the pauses that many failures have made long. `common`: boundaries of this attempt
        that every node has committed, where nodes have folders of their own."""
        answer = self.call({"op": "status", "awaited": awaited, "common": list(common)})
        found = answer.get("status")
        if not isinstance(found, dict):
            raise ProtocolError("The keeper's answer holds no status.")
        return Status.from_dict(found)

    def event(self, event: dict[str, Any]) -> None:
        """One line for the run's ledger. `event` names what happened; the keeper adds the time."""
        self.call({"op": "event", "event": event})

    def closing(self) -> None:
        """This trainer ends in order: what it asked for is still persisted, then the keeper may go."""
        self.say({"op": "closing"})

    def _kept(self, answer: dict[str, Any], descriptors: list[int], *, lent: bool = False) -> list[SlotGrant]:
        """Regions that this trainer uses from now on, or looks at (`lent`)."""
        rows = answer.get("slots")
        try:
            if not isinstance(rows, list) or len(rows) != len(descriptors):
                raise ProtocolError("The keeper's answer does not say what its descriptors are.")
            grants = [SlotGrant(each, **row) for each, row in zip(descriptors, rows, strict=True)]
            self._held.keep(grants, lent=lent)
        except BaseException:
            close_all(descriptors)
            raise
        return grants

    def _lent(self, answer: dict[str, Any], descriptors: list[int]) -> list[SlotGrant]:
        return self._kept(answer, descriptors, lent=True)


def _looked_at(descriptor: int, others: Sequence[int]) -> Slot:
    try:
        return Slot.open(descriptor, map_image=True)
    except BaseException:
        close_all([descriptor, *others])
        raise


def _one(grants: list[SlotGrant]) -> SlotGrant:
    if len(grants) != 1:
        close_all([grant.descriptor for grant in grants])
        raise ProtocolError("The keeper's answer is not one region.")
    return grants[0]


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


def newest_in_memory(runtime: RuntimeFolder) -> tuple[AttemptName, int] | None:
    """The newest attempt of which this node's memory has a snapshot, and the newest step of it. The keeper
    knows them all; without one, or where it does not answer, only named regions are found."""
    found = [(each.attempt, each.step) for each in sealed_in(runtime)]
    with contextlib.suppress(FlashckptError, OSError, EOFError):
        if (peer := reach(runtime, _SHORT_PATIENCE_S)) is not None:
            with peer:
                answer, _ = asked(peer, {"op": "describe"})
            rows = [row for row in answer["keeper"]["regions"] if not row["constants"]]
            named = ((AttemptName.parse(row["attempt"] or ""), row["step"]) for row in rows)
            found += [(attempt, step) for attempt, step in named if attempt is not None]
    return max(found, default=None)
