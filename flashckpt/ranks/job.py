"""The ranks of a job at `attach`: a store of their own, and one way to agree.

Owns the store and its keys. In a round each rank sends a value, rank 0 decides, and all read the decision; a
rank that has failed sends its error, and all raise it. The others of its node report a killed rank, whose
process is gone; rank 0 notices a silent node. There is one collective, the first broadcast, and a loop calls
nothing here. Values are JSON from processes that are trusted as far as the job is."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from flashckpt import errors
from flashckpt.commit.attempts import local_owner
from flashckpt.errors import FlashckptError, KeeperError, OptionError, RunError
from flashckpt.memory.runtime import base_folder
from flashckpt.options import Environment
from flashckpt.ranks.liveness import SILENT_S, Beat, KeyValues, ProcessId, Silence

log = logging.getLogger(__name__)

T = TypeVar("T")
Decide = Callable[[list[Any]], Any]
"""Takes the values of all ranks, in order, and returns the decision. Called on rank 0 only. Its
FlashckptError is raised on all ranks."""

TIMEOUT_S = 600.0
# A read of a step is as slow as its storage.
LOADING_TIMEOUT_S = 4 * 3600.0
# The longest wait of rank 0 until the others have read the last decision.
_PARTING_S = 5.0
_PAUSE_S = 0.01
# Waits are this long at most, to check in between whether the others live.
_LEAST_S, _LONGEST_WAIT_S = 0.001, 2.0
_MOST_NAMED = 8
_KILLED = (
    "its process has ended during attach: it was killed (by the kernel for lack of memory, perhaps), or it "
    "crashed. Nothing was loaded or changed by that. Find the cause, and start all ranks again."
)
_SILENT = (
    f"its node has been silent for {SILENT_S:.0f} s during attach: the node is lost, or it hangs. Nothing "
    "was loaded or changed by that. Start all ranks again."
)


class RankFailure(NamedTuple):
    """The error of a rank. rank: None for an error of the decision."""

    rank: int | None
    kind: str
    message: str


class Job:
    """The ranks of one job while they attach. All of them call the same methods in the same order.

    node: the ranks on this machine that share its runtime folder, ascending; nodes, on rank 0: those of all
        nodes.
    failed: an error was sent to all ranks, and no rank waits for this one.
    connect: opens another connection to the same store, for the thread that shows other nodes that this one
        lives; without it timeouts decide.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: KeyValues,
        timeout_s: float = TIMEOUT_S,
        connect: Callable[[], KeyValues] | None = None,
    ) -> None:
        self.rank, self.world, self.store = rank, world, store
        self.node: tuple[int, ...] = (rank,)
        self.nodes: tuple[tuple[int, ...], ...] = ()
        self.failed = False
        self._timeout_s, self._asked, self._connect = timeout_s, 0, connect
        self._neighbours: dict[int, ProcessId] = {}
        self._beat: Beat | None = None
        self._silence = Silence(0, time.monotonic)

    def meet(self, node_key: str, process: ProcessId | None = None) -> None:
        """Find the ranks of this node. node_key: the same on these ranks and on no others. process: of this
        rank, if it is not this one."""

        def decide(said: list[Any]) -> None:
            nodes: dict[str, list[list[Any]]] = {}
            for rank, (key, process) in enumerate(said):
                nodes.setdefault(key, []).append([rank, process])
            self.nodes = tuple(tuple(rank for rank, _ in node) for node in nodes.values())
            self._silence = Silence(len(nodes), time.monotonic)
            # Each node reads only its own key, so a read does not grow with the number of nodes.
            told = {_node_path(key): [len(nodes), node] for key, node in nodes.items()}
            self._store_all(told | {_beat_path(ranks[0]): 0 for ranks in self.nodes})

        mine = process or ProcessId.of(os.getpid())
        self.agree("who is on which node", [node_key, mine], decide)
        [told] = self._awaited([_node_path(node_key)], "who is on this node", self._timeout_s)
        count, node = json.loads(told)
        self.node = tuple(rank for rank, _ in node)
        self._neighbours = {rank: ProcessId(*process) for rank, process in node if rank != self.rank}
        if self._connect is not None and count > 1 and self.rank == self.node[0] != 0:
            self._beat = Beat(self._connect, _beat_path(self.rank))

    def agree(self, what: str, mine: Any, decide: Decide, *, timeout_s: float | None = None) -> Any:
        """Send `mine` (plain JSON) and return the decision of rank 0. Raises on all ranks the error of
        `decide` or of a rank that failed; RunError if a rank sends nothing for `timeout_s`."""
        return self._round(what, {"value": mine}, decide, timeout_s)

    def exchange(self, what: str, mine: Any, *, timeout_s: float | None = None) -> dict[int, Any]:
        """Send `mine` (plain JSON); once all ranks have sent theirs, return those of this node. Raises as
        `agree` does."""
        number = self._asked
        self._round(what, {"value": mine}, lambda rows: None, timeout_s)
        try:
            rows = self.store.multi_get([f"{number}/{rank}" for rank in self.node])
        except RuntimeError as error:
            self.failed = True
            raise _unreachable(what, error) from error
        # A rank that has left since is noticed in the next round.
        return {rank: json.loads(row).get("value") for rank, row in zip(self.node, rows, strict=True)}

    def guarded(self, what: str, operation: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Run an operation on this rank. If it fails, all ranks raise its error, with the number of the rank,
        in their next round. The operation may agree on more, on all ranks in the same order."""
        try:
            return operation()
        except Exception as error:
            if not self.failed:
                self._fail(what, error, timeout_s)
            raise

    def together(self, what: str, operation: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Run an operation on each rank; returns when all have succeeded. See `guarded`."""
        done = self.guarded(what, operation, timeout_s=timeout_s)
        self._round(what, {"value": None}, lambda rows: None, timeout_s)
        return done

    def led(self, what: str, operation: Callable[[], T]) -> T:
        """Return on all ranks the result of an operation on rank 0 (plain JSON), or raise its error."""
        done = self.guarded(what, operation) if self.rank == 0 else None
        told: T = self.agree(what, done, lambda rows: rows[0])
        return told

    def attached(self) -> None:
        """Wait, on rank 0, until all have read the last decision: the store ends with rank 0."""
        self.end()
        self._part(self._asked - 1)

    def end(self) -> None:
        """End the counter of this node."""
        if self._beat is not None:
            self._beat.end()

    def leave(self) -> None:
        """End this rank without a wait, as at an interrupt: the others learn it where they wait for it. Does
        nothing after an error was sent to all."""
        self.end()
        if self.failed:
            return
        self.failed = True
        why = "it has left attach before all ranks had attached: it was interrupted, or lost the others."
        failed = ["RunError", why]
        # The round before may be undecided too.
        numbers = range(max(0, self._asked - 1), self._asked + 1)
        said = {f"{number}/{self.rank}": {"failed": failed} for number in numbers}
        decided = {f"{number}/decided": {"failed": [[self.rank, *failed]]} for number in numbers}
        known = {_failed_path(number): True for number in numbers}
        try:
            self._store_all(said | known | (decided if self.rank == 0 else {}))
            for number in numbers:
                self.store.add(f"{number}/heard", 1)  # rank 0 does not wait for this one
        except RuntimeError as error:
            log.debug("the ranks' store is gone: %s", error)

    def _fail(self, what: str, error: Exception, timeout_s: float | None) -> None:
        """Send the error of this rank to all. If the job fails with another error, that is raised."""
        told = {"failed": [type(error).__name__, str(error)]}
        try:
            self._round(what, told, lambda rows: None, timeout_s)
        except Exception as all_raise:
            self.failed = True  # also if rank 0 was silent: `leave` must not replace the error
            if not isinstance(all_raise, FlashckptError) or type(all_raise) is not type(error):
                raise all_raise from error
            # The same error object with its attributes, with the message that all ranks raise.
            error.args, error.rank = all_raise.args, all_raise.rank

    # ---- one round

    def _round(self, what: str, mine: dict[str, Any], decide: Decide, timeout_s: float | None) -> Any:
        number, self._asked = self._asked, self._asked + 1
        timeout_s = timeout_s or self._timeout_s
        try:
            self.store.set(f"{number}/{self.rank}", json.dumps(mine))
            if "failed" in mine:
                self.store.set(_failed_path(number), "")
            refused = self._decide(number, what, decide, timeout_s) if self.rank == 0 else None
            # Rank 0 times out first: it knows which ranks are missing.
            [data] = self._awaited([f"{number}/decided"], what, 2 * timeout_s, number)
        except RuntimeError as error:  # a DistError; a lost store raises several kinds
            self.failed = True
            raise _unreachable(what, error) from error
        decided = json.loads(data)
        if "failed" not in decided:
            return decided["decided"]
        self.failed = True
        self._part(number)
        raise refused or _raised([RankFailure(*row) for row in decided["failed"]], self.world)

    def _decide(self, number: int, what: str, decide: Decide, timeout_s: float) -> FlashckptError | None:
        """Tell all ranks the decision. Return its error, with its attributes; None if it has none."""
        failures, told, refused = [], None, None
        try:
            keys = [f"{number}/{rank}" for rank in range(self.world)]
            found = self._awaited(keys, what, timeout_s, number)
            rows = {rank: json.loads(each) for rank, each in enumerate(found) if each}
            failures = [RankFailure(rank, *row["failed"]) for rank, row in rows.items() if "failed" in row]
            if not failures:
                told = _decided(what, decide, [row["value"] for row in rows.values()])
        except FlashckptError as error:
            refused = error
            failures = [RankFailure(None, type(error).__name__, str(error))]
        answer: dict[str, Any] = {"decided": told}
        if failures:
            answer = {"failed": failures[:_MOST_NAMED]}
        self.store.set(f"{number}/decided", json.dumps(answer))
        return refused

    def _part(self, number: int) -> None:
        """Wait, on rank 0, until all have read the decision: the store ends with it."""
        heard = f"{number}/heard"
        try:
            self.store.add(heard, 1)
            until_s = time.monotonic() + _PARTING_S
            while self.rank == 0 and self.store.add(heard, 0) < self.world and time.monotonic() < until_s:
                time.sleep(_PAUSE_S)
        except RuntimeError as error:
            log.debug("the ranks' store is gone: %s", error)

    def _awaited(
        self, keys: Sequence[str], what: str, timeout_s: float, number: int | None = None
    ) -> list[bytes]:
        """Return the values of keys once all exist. Raises RunError if they do not. number: of a round, in
        which errors are sent for dead ranks; and once a rank has failed, rank 0 waits for no others, whose
        values are empty then."""
        from torch.distributed import DistStoreError

        until_s = time.monotonic() + timeout_s
        while True:
            left_s = until_s - time.monotonic()
            try:
                # In short waits, between which an interrupt is handled.
                self.store.wait(list(keys), timedelta(seconds=max(_LEAST_S, min(left_s, _LONGEST_WAIT_S))))
                return list(self.store.multi_get(list(keys)))
            except DistStoreError as error:
                if left_s <= _LONGEST_WAIT_S:
                    missing = [key for key in keys if not self.store.check([key])]
                    raise _silent(what, missing, timeout_s) from error
            if number is not None:
                self._fail_for(number, self._ended_here(), _KILLED)
                if self.rank == 0 and len(self.nodes) > 1:
                    self._fail_for(number, self._silent_elsewhere(), _SILENT)
                if self.rank == 0 and self.store.check([_failed_path(number)]):
                    found = [self.store.get(key) if self.store.check([key]) else b"" for key in keys]
                    # A rank that was taken for dead may have sent its value at that moment.
                    if any("failed" in json.loads(each) for each in found if each):
                        return found

    def _ended_here(self) -> list[int]:
        """Return the ranks of this node whose processes are gone; without rank 0, which serves the store."""
        return [rank for rank, process in self._neighbours.items() if rank and process.has_ended]

    def _silent_elsewhere(self) -> list[int]:
        """Return the ranks of silent nodes."""
        beats = self.store.multi_get([_beat_path(ranks[0]) for ranks in self.nodes])
        # Rank 0's own node has no counter.
        return [rank for index in self._silence.update(beats) if index for rank in self.nodes[index]]

    def _fail_for(self, number: int, ranks: Sequence[int], why: str) -> None:
        for rank in ranks:
            if not self.store.check([key := f"{number}/{rank}"]):
                self.store.set(key, json.dumps({"failed": ["RunError", why]}))
                self.store.set(_failed_path(number), "")

    def _store_all(self, values: dict[str, Any]) -> None:
        self.store.multi_set(list(values), [json.dumps(each) for each in values.values()])


def meet(environment: Environment, timeout_s: float = TIMEOUT_S) -> Job | None:
    """Meet the other ranks of this job; None for a process that trains alone. One collective over the default
    process group.

    Raises OptionError if the launcher started several processes and there is no process group."""
    distributed = _initialised()
    if distributed is None:
        environment.check_alone()
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
    job = Job(rank, world, store, timeout_s, connect)
    job.meet(_node_key(environment, rank))
    return job


def _initialised() -> Any:
    """Return torch.distributed if it has a default process group."""
    found: Any = sys.modules.get("torch.distributed")
    is_there = found is not None and found.is_available() and found.is_initialized()
    return found if is_there else None


def _own_store(distributed: Any, rank: int) -> tuple[KeyValues, Callable[[], KeyValues]]:
    """Return a store that rank 0 serves on a free port, and a function that opens another connection. The
    others get the address by one broadcast, with any backend of the default group."""
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
    """Return a key that the processes with one keeper share: one boot of one machine, one runtime folder. A
    rank without a runtime folder counts as a node of its own until it is refused."""
    try:
        found = os.stat(base_folder(environment.runtime_folder))
    except (OSError, KeeperError):
        return f"rank {rank}"
    return f"{local_owner().boot_id} {found.st_dev}:{found.st_ino}"


def _node_path(key: str) -> str:
    return f"node/{key}"


def _failed_path(number: int) -> str:
    """Return the key that exists once a rank has failed in this round."""
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
            f"The decision for all ranks failed ({what}: {type(error).__name__}: {error}). Nothing was "
            "loaded or changed by that. This is a bug of flashckpt: please report it, with the traceback in "
            "the log of rank 0."
        ) from error


def _raised(failures: list[RankFailure], world: int) -> FlashckptError:
    """Return the error that all ranks raise; of several, with the type of the first."""
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


def ranks_named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def _silent(what: str, missing: list[str], timeout_s: float) -> RunError:
    ranks = [int(last) for key in missing if (last := key.rpartition("/")[2]).isdigit()]
    who = ranks_named(ranks) if ranks else "rank 0"  # it decides
    return RunError(
        f"{who} said nothing for {timeout_s:.0f} s where all ranks were to agree ({what}). Nothing was "
        "loaded or changed by that. See why it hangs or has ended, and start all ranks again."
    )


def _unreachable(what: str, error: Exception) -> RunError:
    return RunError(
        f"The ranks' own store, which rank 0 serves while they attach, cannot be reached ({what}: {error}). "
        "Rank 0 has ended, or the network between the nodes failed. Nothing was changed by that. Start all "
        "ranks again."
    )


# ---- arrival at attach, by the default group's own store
#
# `if rank == 0: attach(…)` would hang in the one collective below until the group's timeout, and then fail
# with an error that does not name it. If that store is not available, arrival is not checked.


# When missing ranks are logged; the least timeout, and its share of the group's timeout.
WORD_AFTER_S, LEAST_TIMEOUT_S, SHARE_OF_TIMEOUT = 30.0, 600.0, 0.5
_DEFAULT_TIMEOUT_S = 1800.0
_ARRIVAL_WAIT_S, _ARRIVAL_PAUSE_S = 1.0, 0.2

# Each call has its own keys, if all ranks call alike. A call that failed does not count.
_calls = 0


def arrive(distributed: Any, rank: int, world: int) -> None:
    """Return once all ranks of the default group have called this. Raises RunError on those that have, if
    some do not."""
    global _calls
    store = _default_store(distributed)
    if store is None:
        return
    timeout_s = max(LEAST_TIMEOUT_S, SHARE_OF_TIMEOUT * _timeout_s(distributed))
    arrive_at(store, _calls, rank, world, timeout_s)
    _calls += 1


def arrive_at(store: KeyValues, call: int, rank: int, world: int, timeout_s: float) -> None:
    """Do the same at a store, in the call of this number."""
    go, keys = f"flashckpt/attach/{call}/go", [f"flashckpt/attach/{call}/{each}" for each in range(world)]
    # Without the token, keys of an earlier incarnation of the job could be taken for an answer.
    token = secrets.token_hex(8)
    store.set(keys[rank], token)
    began_s, is_said = time.monotonic(), False
    while not (_exist(store, keys) if rank == 0 else _is_let_go(store, go, token)):
        waited_s = time.monotonic() - began_s
        # Rank 0 times out first: it knows which ranks are missing.
        is_late = waited_s > timeout_s * (1 + (rank > 0))
        if not is_late and (is_said or waited_s <= WORD_AFTER_S):
            continue
        came = [store.check([key]) for key in keys]
        words = _absent([each for each, is_there in enumerate(came) if not is_there], waited_s)
        if is_late:
            if rank == 0:
                tokens = [
                    store.get(key).decode() for key, is_there in zip(keys, came, strict=True) if is_there
                ]
                store.set(go, json.dumps([words, tokens]))
            raise RunError(words)
        is_said = True
        log.warning("%s", words)
    if rank == 0:
        store.set(go, json.dumps(["", []]))


def _is_let_go(store: KeyValues, go: str, token: str) -> bool:
    """Whether rank 0 has seen all ranks. Raises its error of this call."""
    if not _exist(store, [go]):
        return False
    words, came = json.loads(store.get(go))
    if token in came:
        raise RunError(words)
    if words:
        time.sleep(_ARRIVAL_PAUSE_S)  # of an earlier call
    return not words


def _exist(store: KeyValues, keys: list[str]) -> bool:
    """Wait a moment for these keys."""
    try:
        # In short waits: an interrupt is handled in between, and torch's threads use the store too.
        store.wait(keys, timedelta(seconds=_ARRIVAL_WAIT_S))
    except RuntimeError:  # each store has its own for a timeout; a lost one raises again
        return store.check(keys)
    return True


def _absent(ranks: Sequence[int], waited_s: float) -> str:
    who = ranks_named(ranks) if ranks else "rank 0"
    return (
        f"flashckpt.attach (or loop) was called {waited_s:.0f} s ago, and {who} of the default process group "
        "did not call it. Nothing was started or changed. Every rank must call it, not rank 0 alone: each "
        "saves and loads its own state. If the call depends on the rank, remove that condition; else find "
        "out what blocks the others."
    )


def _default_store(distributed: Any) -> KeyValues | None:
    try:
        found: KeyValues | None = distributed.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError) as error:
        log.debug("the default group's store cannot be asked: %s", error)
        return None
    return found


def _timeout_s(distributed: Any) -> float:
    """Return the timeout of the default group, if it is known."""
    try:
        import torch

        group = distributed.distributed_c10d._get_default_group()
        kinds = [torch.device(kind) for kind in ("cpu", "cuda") if torch.device(kind) in group._device_types]
        return float(min(group._get_backend(kind).options._timeout.total_seconds() for kind in kinds))
    except (AttributeError, RuntimeError, ValueError, TypeError):
        return _DEFAULT_TIMEOUT_S
