"""The ranks of a job at `attach`: a store of their own, and one way to agree.

Owns the store and its keys. Each rank says something, rank 0 decides, all read it; a rank that failed says
so, and then all fail alike. One that was killed says nothing: the others of its node see that its process is
gone and say it in its place, and rank 0 sees that nothing comes from a node any more. There is no collective
but the first broadcast, and nothing here is called by a loop. What is said is JSON, from processes that are
trusted as far as the job is.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from flashckpt import errors
from flashckpt.commit.holder import here
from flashckpt.errors import FlashckptError, KeeperError, OptionError, RunError
from flashckpt.memory.runtime import base_folder
from flashckpt.options import Environment
from flashckpt.ranks.arrival import arrive
from flashckpt.ranks.liveness import SILENT_S, Beat, ProcessId, Silence

log = logging.getLogger(__name__)

T = TypeVar("T")
Decide = Callable[[list[Any]], Any]
"""Takes what each rank has said, in their order, and gives what all are told. Called on rank 0 alone. What it
raises (a FlashckptError) is raised on all."""

PATIENCE_S = 600.0
# Reading a step is as slow as its storage.
LOADING_PATIENCE_S = 4 * 3600.0
# How long rank 0 stays for the others to hear what was decided last.
_PARTING_S = 5.0
_PAUSE_S = 0.01
# Between two waits it is looked whether the others still live.
_LEAST_S, _LONGEST_WAIT_S = 0.001, 2.0
_MOST_NAMED = 8
_KILLED = (
    "its process has ended in the middle of attach, without a word: it was killed (by the kernel for want of "
    "memory, perhaps), or it crashed. Nothing was loaded or changed by that. See why, and start all ranks "
    "again."
)
_SILENT = (
    f"nothing was heard of its node for {SILENT_S:.0f} s in the middle of attach: the node is lost, or it "
    "stands still. Nothing was loaded or changed by that. Start all ranks again."
)


@dataclass(frozen=True)
class RankFailure:
    """Why a rank ends: `rank` is None for what is nobody's own fault."""

    rank: int | None
    kind: str
    message: str


class KeyValues(Protocol):
    """What is used of a `torch.distributed.TCPStore`. A wait that is over raises DistStoreError, a store that
    is gone another RuntimeError."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def multi_set(self, keys: list[str], values: list[str], /) -> None: ...


class Job:
    """The ranks of one job while they attach. All of them call the same methods in the same order.

    `node` are the ranks on the machine of this one that share its runtime folder, ascending; `nodes`, on rank
    0, are those of all nodes. `failed`: an error was told to all, and nobody waits for this rank any more.
    `connect` gives another connection to the same store, for a thread; without it no other node is told that
    this one lives, and patience decides.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: KeyValues,
        patience_s: float = PATIENCE_S,
        connect: Callable[[], KeyValues] | None = None,
    ) -> None:
        self.rank, self.world, self.store = rank, world, store
        self.node: tuple[int, ...] = (rank,)
        self.nodes: tuple[tuple[int, ...], ...] = ()
        self.failed = False
        self._patience_s, self._asked, self._connect = patience_s, 0, connect
        self._neighbours: dict[int, ProcessId] = {}
        self._beat: Beat | None = None
        self._silence = Silence(0, time.monotonic)

    def meet(self, node_key: str, process: ProcessId | None = None) -> None:
        """Find out who shares this node. `node_key` is the same on its ranks and on no others; `process` is
        that of this rank, if not this one."""

        def decide(said: list[Any]) -> None:
            nodes: dict[str, list[list[Any]]] = {}
            for rank, (key, process) in enumerate(said):
                nodes.setdefault(key, []).append([rank, process])
            self.nodes = tuple(tuple(rank for rank, _ in node) for node in nodes.values())
            self._silence = Silence(len(nodes), time.monotonic)
            # Each node reads its own: what a rank reads does not grow with their number.
            told = {_node_path(key): [len(nodes), node] for key, node in nodes.items()}
            self._store_all(told | {_beat_path(ranks[0]): 0 for ranks in self.nodes})

        mine = process or ProcessId.of(os.getpid())
        self.agree("who is on which node", [node_key, mine], decide)
        [told] = self._awaited([_node_path(node_key)], "who is on this node", self._patience_s)
        count, node = json.loads(told)
        self.node = tuple(rank for rank, _ in node)
        self._neighbours = {rank: ProcessId(*process) for rank, process in node if rank != self.rank}
        if self._connect is not None and count > 1 and self.rank == self.node[0] != 0:
            self._beat = Beat(self._connect, _beat_path(self.rank))

    def agree(self, what: str, mine: Any, decide: Decide, *, patience_s: float | None = None) -> Any:
        """Say `mine` (plain JSON) and hear what rank 0 decides. Raises on all ranks what `decide` raises, and
        what a rank has told with `fail` instead of this; RunError where one says nothing for `patience_s`."""
        return self._round(what, {"said": mine}, decide, patience_s)

    def beside(self, what: str, mine: Any, *, patience_s: float | None = None) -> dict[int, Any]:
        """Say `mine` (plain JSON) and hear, once all ranks have said theirs, what those of this node have:
        no rank but 0 is told more. Raises as `agree` does."""
        number = self._asked
        self._round(what, {"said": mine}, lambda rows: None, patience_s)
        try:
            rows = self.store.multi_get([f"{number}/{rank}" for rank in self.node])
        except RuntimeError as error:
            self.failed = True
            raise _unreachable(what, error) from error
        # One that has left since is heard of in the next round.
        return {rank: json.loads(row).get("said") for rank, row in zip(self.node, rows, strict=True)}

    def together(self, what: str, deed: Callable[[], T], *, patience_s: float | None = None) -> T:
        """Do something on each rank, and hear that all could. Where a rank could not, all raise alike, and
        the message names it. In the deed the ranks may agree on more, all of them in the same order."""
        try:
            done = deed()
        except Exception as error:
            if not self.failed:
                self._fail(what, error, patience_s)
            raise
        self._round(what, {"said": None}, lambda rows: None, patience_s)
        return done

    def led(self, what: str, deed: Callable[[], T]) -> T:
        """What rank 0 gets from a deed (plain JSON), told to all; its error otherwise."""
        done = self.together(what, deed) if self.rank == 0 else self.together(what, lambda: None)
        told: T = self.agree(what, done, lambda rows: rows[0])
        return told

    def attached(self) -> None:
        """All have heard the last decision: the store may go with rank 0, which may end at once."""
        self.end()
        self._part(self._asked - 1)

    def end(self) -> None:
        """Nothing more is said of this node."""
        if self._beat is not None:
            self._beat.end()

    def leave(self) -> None:
        """This rank ends and waits for nobody, as at an interrupt: the others hear of it where they wait for
        it. Nothing where all have been told of an error."""
        self.end()
        if self.failed:
            return
        self.failed = True
        why = "it has left attach before all ranks had attached: it was interrupted, or lost the others."
        failed = ["RunError", why]
        # Also of the round before: it may not be decided yet.
        numbers = range(max(0, self._asked - 1), self._asked + 1)
        said = {f"{number}/{self.rank}": {"failed": failed} for number in numbers}
        decided = {f"{number}/decided": {"failed": [[self.rank, *failed]]} for number in numbers}
        known = {_failed_path(number): True for number in numbers}
        try:
            self._store_all(said | known | (decided if self.rank == 0 else {}))
            for number in numbers:
                self.store.add(f"{number}/heard", 1)  # rank 0 does not stay for this one
        except RuntimeError as error:
            log.debug("the ranks' store is gone: %s", error)

    def _fail(self, what: str, error: Exception, patience_s: float | None) -> None:
        """Tell all that this rank ends. Where others ended with another error, that is raised."""
        told = {"failed": [type(error).__name__, str(error)]}
        try:
            self._round(what, told, lambda rows: None, patience_s)
        except Exception as all_raise:
            if not isinstance(all_raise, FlashckptError) or type(all_raise) is not type(error):
                raise all_raise from error
            # The same error, with whatever it carries, in the words that all ranks use.
            error.args, error.rank = all_raise.args, all_raise.rank

    # ---- one round

    def _round(self, what: str, mine: dict[str, Any], decide: Decide, patience_s: float | None) -> Any:
        number, self._asked = self._asked, self._asked + 1
        patience_s = patience_s or self._patience_s
        try:
            self.store.set(f"{number}/{self.rank}", json.dumps(mine))
            if "failed" in mine:
                self.store.set(_failed_path(number), "")
            if self.rank == 0:
                self._decide(number, what, decide, patience_s)
            # Rank 0 is to find out first who says nothing: it knows whom to name.
            [data] = self._awaited([f"{number}/decided"], what, 2 * patience_s, number)
        except RuntimeError as error:  # a DistError; of a store that is gone there are several
            self.failed = True
            raise _unreachable(what, error) from error
        decided = json.loads(data)
        if "failed" not in decided:
            return decided["decided"]
        self.failed = True
        self._part(number)
        raise _raised([RankFailure(*row) for row in decided["failed"]], self.world)

    def _decide(self, number: int, what: str, decide: Decide, patience_s: float) -> None:
        failures, told = [], None
        try:
            keys = [f"{number}/{rank}" for rank in range(self.world)]
            found = self._awaited(keys, what, patience_s, number)
            rows = {rank: json.loads(each) for rank, each in enumerate(found) if each}
            failures = [RankFailure(rank, *row["failed"]) for rank, row in rows.items() if "failed" in row]
            if not failures:
                told = _decided(what, decide, [row["said"] for row in rows.values()])
        except FlashckptError as error:
            failures = [RankFailure(None, type(error).__name__, str(error))]
        answer: dict[str, Any] = {"decided": told}
        if failures:
            answer = {"failed": [[each.rank, each.kind, each.message] for each in failures[:_MOST_NAMED]]}
        self.store.set(f"{number}/decided", json.dumps(answer))

    def _part(self, number: int) -> None:
        """The store goes with rank 0: it stays until all have heard what was decided."""
        heard = f"{number}/heard"
        try:
            self.store.add(heard, 1)
            until_s = time.monotonic() + _PARTING_S
            while self.rank == 0 and self.store.add(heard, 0) < self.world and time.monotonic() < until_s:
                time.sleep(_PAUSE_S)
        except RuntimeError as error:
            log.debug("the ranks' store is gone: %s", error)

    def _awaited(
        self, keys: Sequence[str], what: str, patience_s: float, number: int | None = None
    ) -> list[bytes]:
        """The values of keys, once all are there. RunError where they do not come. Of a round, its number:
        what others do not say in it, since they have died, is said in their place; and where one has failed
        rank 0 waits for no others, whose values are empty then: they hear of it when they come."""
        from torch.distributed import DistStoreError

        until_s = time.monotonic() + patience_s
        while True:
            left_s = until_s - time.monotonic()
            try:
                # In short waits: an interrupt is heard between them.
                self.store.wait(list(keys), timedelta(seconds=max(_LEAST_S, min(left_s, _LONGEST_WAIT_S))))
                return list(self.store.multi_get(list(keys)))
            except DistStoreError as error:
                if left_s <= _LONGEST_WAIT_S:
                    missing = [key for key in keys if not self.store.check([key])]
                    raise _silent(what, missing, patience_s) from error
            if number is not None:
                self._say_for(number, self._ended_here(), _KILLED)
                if self.rank == 0 and len(self.nodes) > 1:
                    self._say_for(number, self._silent_elsewhere(), _SILENT)
                if self.rank == 0 and self.store.check([_failed_path(number)]):
                    found = [self.store.get(key) if self.store.check([key]) else b"" for key in keys]
                    # Who was taken for dead, and spoke in that moment, has not failed.
                    if any("failed" in json.loads(each) for each in found if each):
                        return found

    def _ended_here(self) -> list[int]:
        """Ranks of this node whose processes are gone. Where rank 0's is, so is the store."""
        return [rank for rank, process in self._neighbours.items() if rank and process.has_ended]

    def _silent_elsewhere(self) -> list[int]:
        """Ranks of nodes from which nothing comes any more."""
        beats = self.store.multi_get([_beat_path(ranks[0]) for ranks in self.nodes])
        # Rank 0's own node has no beat.
        return [rank for index in self._silence.look(beats) if index for rank in self.nodes[index]]

    def _say_for(self, number: int, ranks: Sequence[int], why: str) -> None:
        for rank in ranks:
            if not self.store.check([key := f"{number}/{rank}"]):
                self.store.set(key, json.dumps({"failed": ["RunError", why]}))
                self.store.set(_failed_path(number), "")

    def _store_all(self, values: dict[str, Any]) -> None:
        self.store.multi_set(list(values), [json.dumps(each) for each in values.values()])


def meet(environment: Environment, patience_s: float = PATIENCE_S) -> Job | None:
    """Meet the other ranks of this job; None for a process that trains alone. Collective over the default
    process group, once.

    Raises OptionError where the launcher started several processes and no process group is there to meet
    in."""
    distributed = _initialised()
    if distributed is None:
        _check_alone(environment)
        return None
    rank, world = distributed.get_rank(), distributed.get_world_size()
    given = environment.rank if environment.names_rank else rank
    if environment.world > 1 and (given, environment.world) != (rank, world):
        raise OptionError(
            f"RANK={environment.rank} of WORLD_SIZE={environment.world}, and torch.distributed says rank "
            f"{rank} of {world}. Nothing was started. All processes of the launcher's job must be in the "
            "default process group, with the ranks that the launcher gave them."
        )
    if world == 1:
        return None
    arrive(distributed, rank, world)
    store, connect = _own_store(distributed, rank)
    job = Job(rank, world, store, patience_s, connect)
    job.meet(_node_key(environment, rank))
    return job


def placed(environment: Environment, job: Job | None) -> Environment:
    """The environment with this process's place in the job, also where only torch.distributed knows it."""
    return environment if job is None else replace(environment, rank=job.rank, world=job.world)


def _initialised() -> Any:
    """torch.distributed, where it has a default process group."""
    found: Any = sys.modules.get("torch.distributed")
    is_there = found is not None and found.is_available() and found.is_initialized()
    return found if is_there else None


def _check_alone(environment: Environment) -> None:
    if environment.world > 1:
        raise OptionError(
            f"WORLD_SIZE={environment.world}: this process was started as one of several, and there is no "
            "process group. Nothing was started. Call torch.distributed.init_process_group before "
            "flashckpt.attach or flashckpt.loop; for a process that a launcher started among others and that "
            "trains by itself, unset RANK and WORLD_SIZE."
        )


def _own_store(distributed: Any, rank: int) -> tuple[KeyValues, Callable[[], KeyValues]]:
    """A store that rank 0 serves on a port that was free, and how to connect to it once more; the others are
    told by one broadcast, with whatever backend the default group has."""
    place: list[Any] = [None, None]
    store: KeyValues | None = None
    if rank == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        served = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        store, place = served, [host, served.port]
    distributed.broadcast_object_list(place, src=0)

    def connect() -> KeyValues:
        found: KeyValues = distributed.TCPStore(place[0], place[1], is_master=False, wait_for_workers=False)
        return found

    return store or connect(), connect


def _node_key(environment: Environment, rank: int) -> str:
    """The same for the processes that share a keeper: one boot of one machine, one runtime folder. Where
    there is none to be had, this rank is on a node of its own until it is refused."""
    try:
        found = os.stat(base_folder(environment.runtime_folder))
    except (OSError, KeeperError):
        return f"rank {rank}"
    return f"{here().boot_id} {found.st_dev}:{found.st_ino}"


def _node_path(key: str) -> str:
    return f"node/{key}"


def _failed_path(number: int) -> str:
    """There once a rank has failed in that round."""
    return f"{number}/failed"


def _beat_path(leader: int) -> str:
    return f"beat/{leader}"


def _decided(what: str, decide: Decide, said: list[Any]) -> Any:
    try:
        return decide(said)
    except FlashckptError:
        raise
    except Exception as error:
        log.exception("%s", what)
        raise RunError(
            f"What the ranks said could not be judged ({what}: {type(error).__name__}: {error}). Nothing was "
            "loaded or changed by that. This is a fault of flashckpt: please report it, with the traceback "
            "that rank 0 has logged."
        ) from error


def _raised(failures: list[RankFailure], world: int) -> FlashckptError:
    """The error that all ranks raise. Of several, the first one's kind."""
    own = [each for each in failures if each.rank is not None]
    first = failures[0]
    kind = getattr(errors, first.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, FlashckptError)):
        kind = RunError
        own = own or failures
    if not own:
        return kind(first.message)
    named = "\n".join(
        f"rank {each.rank} of {world}: {each.message}" if kind.__name__ == each.kind else
        f"rank {each.rank} of {world}: {each.kind}: {each.message}"
        for each in own
    )  # fmt: skip
    raised = kind(f"{named}\nAll ranks of the job end here.")
    raised.rank = first.rank
    return raised


def _silent(what: str, missing: list[str], patience_s: float) -> RunError:
    ranks = [key.rpartition("/")[2] for key in missing[:_MOST_NAMED]]
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    who = f"rank {', '.join(ranks)}{more}" if "decided" not in ranks else "rank 0"
    return RunError(
        f"{who} said nothing for {patience_s:.0f} s where all ranks were to agree ({what}). Nothing was "
        "loaded or changed by that. See why it hangs or has ended, and start all ranks again."
    )


def _unreachable(what: str, error: Exception) -> RunError:
    return RunError(
        f"The ranks' own store, which rank 0 serves while they attach, cannot be reached ({what}: {error}). "
        "Rank 0 has ended, or the network between the nodes failed. Nothing was changed by that. Start all "
        "ranks again."
    )
