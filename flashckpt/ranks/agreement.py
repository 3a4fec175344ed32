"""One rank of several, and what the ranks of a job agree on while they attach: that they call alike, that
replicas are alike, and which snapshot they resume from. Rank 0 decides that from the offers of all
(commit/choice.py), and the ranks vote on each candidate that they have tried."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from flashckpt._native import xxh3_64
from flashckpt.commit.choice import CHOICE, OFFERS, Choice, RankOffers
from flashckpt.errors import MismatchError, OptionError, StateError
from flashckpt.format.checked_json import compact
from flashckpt.format.names import AttemptName
from flashckpt.memory.runtime import RuntimeFolder
from flashckpt.options import Environment
from flashckpt.ranks.coordination import Alike, Coordination, Group, SnapshotPolicy, Tables
from flashckpt.ranks.job import LOADING_TIMEOUT_S, Decide, Job, ranks_named
from flashckpt.ranks.joint_coordination import begin
from flashckpt.ranks.liveness import KeyValues
from flashckpt.restore.snapshot import Snapshot
from flashckpt.restore.step_choice import Agreement

T = TypeVar("T")
_MOST_NAMED = 8


class Ranks(Group):
    """One rank of several. store: the job's, which the leaders of nodes keep as long as they have the run;
    rank 0 serves it."""

    def __init__(self, environment: Environment, job: Job) -> None:
        self.environment, self.node, self.leads = environment, job.node, job.rank == 0
        self._job: Job | None = job
        self.store: KeyValues | None = job.store if job.rank == job.node[0] else None

    @property
    def job(self) -> Job:
        assert self._job is not None, "the ranks agree on nothing after attach"
        return self._job

    def together(self, what: str, operation: Callable[[], T], *, loads: bool = False) -> T:
        done = self.guarded(what, operation)
        self.job.agree(what, None, lambda rows: None, timeout_s=LOADING_TIMEOUT_S if loads else None)
        return done

    def guarded(self, what: str, operation: Callable[[], T]) -> T:
        # The others may be reading a step when this rank fails.
        return self.job.guarded(what, operation, timeout_s=LOADING_TIMEOUT_S)

    def led(self, what: str, operation: Callable[[], T]) -> T:
        return self.job.led(what, operation)

    def agree(self, what: str, operation: Callable[[], Any], decide: Decide) -> Any:
        return self.job.agree(what, self.guarded(what, operation), decide)

    def check_alike(
        self, what: str, operation: Callable[[], tuple[T, Alike, Tables]], *, loads: bool = False
    ) -> T:
        result, alike, tables = self.guarded(what, operation)
        check_alike(self.job, alike, tables, timeout_s=LOADING_TIMEOUT_S if loads else None)
        return result

    def agreement(self) -> Agreement:
        return RanksAgreement(self.job)

    def begin(
        self, runtime: RuntimeFolder, attempt: AttemptName, snapshot_policy: SnapshotPolicy
    ) -> Coordination:
        return begin(self.job, runtime, attempt, snapshot_policy)

    def attached(self) -> None:
        self.job.attached()
        self._job = None

    def close(self) -> None:
        if self._job is not None:
            self._job.leave()
        self._job = self.store = None


def check_alike(job: Job, alike: Alike, tables: Tables, *, timeout_s: float | None = None) -> None:
    """Raise OptionError on all ranks if two give other values for a name, StateError if two of declared
    replicas hold different leaves: other names, dtypes, shapes or placements. Sends a digest for each set of
    ranks; only two ranks that differ send their leaves. Bytes are compared at a commit."""
    mine = [dict(alike), {_key(ranks): _digest_of(leaves) for ranks, leaves in tables.items()}]

    def decide(rows: list[Any]) -> list[Any]:
        _refuse_others([names for names, _ in rows])
        return differing([digests for _, digests in rows])

    asked = job.agree("whether all ranks call alike", mine, decide, timeout_s=timeout_s)
    if asked:
        key, *pair = asked
        leaves = {_key(ranks): leaves for ranks, leaves in tables.items()}.get(key, {})
        said = dict(leaves) if job.rank in pair else None
        job.agree("how replicas differ", said, lambda rows: refuse(pair, [rows[rank] for rank in pair]))


def _refuse_others(rows: Sequence[Alike]) -> None:
    """Raise OptionError with the names in which ranks differ. A rank that lacks a name has no say in it."""
    found: list[str] = []
    for name in dict.fromkeys(name for row in rows for name in row):
        ranks: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            if name in row:
                ranks.setdefault(row[name], []).append(rank)
        if len(ranks) > 1:
            said = [f"{value} on {ranks_named(those)}" for value, those in ranks.items()]
            found.append(f"{name}: {', '.join(said[:_MOST_NAMED])}{', …' * (len(said) > _MOST_NAMED)}")
    if found:
        raise OptionError(
            "The ranks of this job do not call alike:\n"
            + "\n".join(f"  {each}" for each in found)
            + "\nNothing was started. Give all ranks the same path, options and names of state, and "
            "loaders of as many batches (a DistributedSampler does)."
        )


def differing(rows: Sequence[Mapping[str, str]]) -> list[Any]:
    """Return the first set of ranks that differ, and two of them; [] if none does."""
    for key in dict.fromkeys(key for row in rows for key in row):
        members = _members(key)
        first, *others = [rank for rank in members if rank < len(rows)]
        for rank in others:
            if rows[rank].get(key) != rows[first].get(key):
                return [key, first, rank]
    return []


def refuse(pair: Sequence[int], tables: Sequence[Mapping[str, str]]) -> None:
    """Raise StateError with the leaves in which two ranks differ."""
    one, other = tables
    wrong = [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]
    rows = [
        f"  {name}: {one.get(name, 'not there')} on rank {pair[0]}, {other.get(name, 'not there')} on rank "
        f"{pair[1]}"
        for name in wrong[:_MOST_NAMED]
    ]
    more = f"\n  … and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
    raise StateError(
        f"Ranks {pair[0]} and {pair[1]} are declared to hold the same, or parts of it, and do not:\n"
        + "\n".join(rows)
        + f"{more}\nNothing was started. Build the same model and the same optimizer on both.",
        location=wrong[0] if wrong else "",
    )


def _digest_of(leaves: Mapping[str, str]) -> str:
    whole = hashlib.sha256()
    for name in sorted(leaves):
        whole.update(f"{name}\0{leaves[name]}\0".encode())
    return whole.hexdigest()[:32]


def _key(ranks: Sequence[int]) -> str:
    """Return a key of a set of ranks; short for equal distances, as on a mesh."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}:{ranks[-1] + 1}:{step}"
    return ",".join(map(str, ranks))


def _members(key: str) -> list[int]:
    if ":" in key:
        return list(range(*map(int, key.split(":"))))
    return list(map(int, key.split(",")))


# ---- the step to resume from


def verdict(proposals: Sequence[dict[str, Any]]) -> str:
    """Return why a snapshot is not taken; "" if all ranks have loaded it. Raises MismatchError if leaves of
    it have a place on no rank."""
    without = [(rank, each["reason"]) for rank, each in enumerate(proposals) if each["reason"]]
    if without:
        rank, reason = without[0]
        more = f" ({len(without)} ranks could not)" if len(without) > 1 else ""
        return f"rank {rank} could not load it: {reason}{more}"
    _check_taken([each["untaken"] for each in proposals])
    return ""


def _check_taken(untaken: Sequence[Sequence[Any]]) -> None:
    """Raise MismatchError if all ranks leave the same leaves of a step: the model lacks them. Leaves that
    only some ranks leave are divided among them, as the stages of a pipeline are."""
    count, digest, names = untaken[0]
    if count and all(each[1] == digest for each in untaken):
        raise _lost(count, names)


def _lost(count: int, names: Sequence[str]) -> MismatchError:
    shown = ", ".join(names) + (", …" if count > len(names) else "")
    return MismatchError(
        f"The step is of another model: {count} of its leaves have no place on any rank ({shown}). "
        "Nothing was loaded, the live model is as it was, and no older step is tried. Make the program "
        "build what was saved, or give this model a run folder of its own."
    )


def _judged(proposals: Sequence[dict[str, Any]]) -> tuple[str, int | None]:
    """Return the verdict, and the rank with the fewest leaves that it leaves to others, if any does: leaves
    with a place on no rank are among these, so it names them next."""
    why = verdict(proposals)
    left = [(each["elsewhere"], rank) for rank, each in enumerate(proposals) if each["elsewhere"]]
    return why, None if why or not left else min(left)[1]


class RanksAgreement(Agreement):
    """Agrees with the other ranks, on all in one order."""

    def __init__(self, job: Job) -> None:
        self._job, self.node = job, job.node

    def choose(self, mine: RankOffers, decide: Callable[[Sequence[RankOffers]], Choice]) -> Choice:
        """Return the decision of rank 0 from the offers of all ranks. Raises its error on all ranks."""

        def decided(rows: list[Any]) -> Any:
            return CHOICE.dump(decide(list(map(OFFERS.load, rows))))

        what = "which step all ranks resume from"
        # The keepers of other nodes may save for as long as storage takes.
        found = self._job.agree(what, OFFERS.dump(mine), decided, timeout_s=LOADING_TIMEOUT_S)
        return CHOICE.load(found)

    def saved(self) -> None:
        """Report that this node's keeper has saved what it can. Returns when all have: a rank that lists the
        steps before may lack one that others find."""
        what = "what only memory has, saved"
        self._job.agree(what, None, lambda rows: None, timeout_s=LOADING_TIMEOUT_S)

    def exchange(self, what: str, mine: Any) -> dict[int, Any]:
        """Send plain JSON, and return that of each rank of this node once all ranks have sent theirs."""
        return self._job.exchange(what, mine, timeout_s=LOADING_TIMEOUT_S)

    def vote(self, reason: str, snapshot: Snapshot | None = None) -> bool:
        """See Agreement. A rank that ends does not vote: it raises, which notifies all."""
        left = () if snapshot is None else snapshot.untaken
        untaken = [len(left), xxh3_64(compact(left)), left[:_MOST_NAMED]]
        elsewhere = 0 if snapshot is None else len(snapshot.elsewhere)
        mine = {"reason": reason, "untaken": untaken, "elsewhere": elsewhere}
        why, asked = self._job.agree("the vote on a step", mine, _judged, timeout_s=LOADING_TIMEOUT_S)
        if asked is not None:
            assert snapshot is not None
            self._check_elsewhere(snapshot, asked)
        return not why

    def _check_elsewhere(self, snapshot: Snapshot, asked: int) -> None:
        """Raise MismatchError on all ranks if a leaf that the rank `asked` leaves to others has a place on
        none of them."""
        own = list(snapshot.elsewhere) if self._job.rank == asked else None
        names = self._job.agree("what has its place on another rank", own, lambda rows: rows[asked])
        here = [index for index, name in enumerate(names) if name in snapshot.names]

        def check(rows: list[list[int]]) -> None:
            lost = sorted(set(range(len(names))).difference(*rows))
            if lost:
                raise _lost(len(lost), [names[index] for index in lost[:_MOST_NAMED]])

        self._job.agree("where it has its place", here, check)
