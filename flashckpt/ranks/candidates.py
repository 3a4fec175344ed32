"""Which step all ranks go on from: the contents that every one of them can read, newest first, and the vote
on each.

A content is a step of an attempt at one of its boundaries. Where a rank has it (in its node's memory, in the
store) is its own affair: one may take it from memory and another from storage. Pure but for `RanksVoter`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashckpt._native import xxh3_64
from flashckpt.errors import MismatchError, UnusableRunError
from flashckpt.format.checked_json import compact
from flashckpt.format.names import AttemptName
from flashckpt.ranks.job import LOADING_PATIENCE_S, Job
from flashckpt.restore.step_choice import Ballot, Candidate

log = logging.getLogger(__name__)

# Of what one rank says. All that a node has in memory is far fewer; of steps at rest the newest count. Where
# nodes have disks of their own and one is far behind, what all have may be older: then more are said.
MOST_CANDIDATES, _MORE = 64, 16
_MOST_NAMED = 8


@dataclass(frozen=True)
class Readable:
    """What one rank can read. `boundary` is None for a step at rest, of which it stands in its part.
    `is_marked`: this machine could not verify it once, and takes it last. `is_remote`: the remote has it."""

    step: int
    attempt: str
    boundary: int | None
    is_marked: bool = False
    is_remote: bool = False

    @property
    def at(self) -> tuple[int, str]:
        return self.step, self.attempt


@dataclass(frozen=True)
class Content:
    """One step that all ranks can read. `boundary` None: at rest for all of them. `is_remote`: from the
    remote on all of them, where some could read it nearer, and one may have found it damaged there."""

    step: int
    attempt: str
    boundary: int | None
    is_remote: bool = False


def common(rows: Sequence[Sequence[Readable]]) -> list[Content]:
    """What all ranks can read, in the order in which it is tried: newest step first, of one step the newest
    attempt and the newest boundary, what some rank has marked last."""
    if not rows:
        return []
    everywhere = set.intersection(*({each.at for each in row} for row in rows))
    found: list[tuple[bool, Content]] = []
    for step, attempt in everywhere:
        of_step = [[each for each in row if each.at == (step, attempt)] for row in rows]
        for boundary in {each.boundary for row in of_step for each in row} | {None}:
            # One that has it at rest finds out while it reads which boundary that is.
            here = [[each for each in row if each.boundary in (boundary, None)] for row in of_step]
            if all(here):
                is_marked = any(all(each.is_marked for each in row) for row in here)
                found.append((is_marked, Content(step, attempt, boundary)))
        is_anywhere_else = any(not each.is_remote for row in of_step for each in row)
        if is_anywhere_else and all(any(each.is_remote for each in row) for row in of_step):
            found.append((False, Content(step, attempt, None, is_remote=True)))
    return [content for _, content in sorted(found, key=_order)]


def _order(row: tuple[bool, Content]) -> tuple[bool, int, int, int, bool]:
    marked, content = row
    boundary = -1 if content.boundary is None else content.boundary
    return marked, -content.step, -_number(content.attempt), -boundary, content.is_remote


def _number(attempt: str) -> int:
    name = AttemptName.parse(attempt)
    return 0 if name is None else name.number


def lacking(rows: Sequence[Sequence[Readable]], found: Sequence[Content]) -> str:
    """What is newer than all that every rank can read, and which ranks cannot read it. Empty where nothing
    is."""
    newest = max((each for row in rows for each in row if not each.is_marked), key=_age, default=None)
    if newest is None or any(each.step >= newest.step for each in found):
        return ""
    without = [rank for rank, row in enumerate(rows) if all(each.at != newest.at for each in row)]
    shown = ", ".join(map(str, without[:_MOST_NAMED]))
    more = f" and {len(without) - _MOST_NAMED} more" if len(without) > _MOST_NAMED else ""
    return f"step {newest.step} of attempt {newest.attempt} cannot be read by rank {shown}{more}"


def is_behind(rows: Sequence[Sequence[Readable]]) -> bool:
    """Whether some rank has something in memory that is newer than all that every rank can read: its keeper
    may still save it for all of them."""
    newest = max((_age(each) for row in rows for each in row if each.boundary is not None), default=None)
    return newest is not None and all((each.step, _number(each.attempt)) < newest for each in common(rows))


def _age(each: Readable) -> tuple[int, int]:
    return each.step, _number(each.attempt)


def decide(rows: Sequence[Sequence[Readable]]) -> tuple[list[Content], str]:
    """What is tried, and what is said of what is not. Raises UnusableRunError where some rank has committed
    steps and there is none that all can read: that is no fresh run."""
    found = common(rows)
    said = lacking(rows, found)
    if not found and any(each.boundary is None for row in rows for each in row):
        raise UnusableRunError(
            "There are committed steps, and none that every rank can read: "
            f"{said or 'each lacks another one'}. Nothing was loaded or changed, and it is not taken for a "
            "fresh run. Give all ranks the storage that has the run's steps, or bring back the node whose "
            "memory or disk has the others'. Where nodes have disks of their own, start as many ranks as "
            "made the step, each where its folder is. If the run died before its first step was on all of "
            "them, there is nothing to go on from: name another path."
        )
    return found, said


def verdict(ballots: Sequence[dict[str, Any]]) -> str:
    """Why a content is not taken; empty where all ranks have loaded the same one. MismatchError where leaves
    of it have a place on none."""
    without = [(rank, each["reason"]) for rank, each in enumerate(ballots) if each["boundary"] is None]
    if without:
        rank, reason = without[0]
        more = f" ({len(without)} ranks could not)" if len(without) > 1 else ""
        return f"rank {rank} could not load it: {reason}{more}"
    boundaries = {each["boundary"] for each in ballots}
    if len(boundaries) > 1:
        return (
            f"what the ranks have of it are different boundaries ({', '.join(map(str, sorted(boundaries)))})"
        )
    _check_taken([each["untaken"] for each in ballots])
    return ""


def _check_taken(untaken: Sequence[Sequence[Any]]) -> None:
    """Raises MismatchError where all ranks leave the very same leaves of a step: the model has lost them.
    What one rank leaves and another does not is divided among them, as stages of a pipeline are."""
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


def _judged(ballots: Sequence[dict[str, Any]]) -> tuple[str, int | None]:
    """The verdict, and the rank that is to name what it has no place for, where one has left something: that
    of the fewest leaves. What no rank has a place for is among them."""
    why = verdict(ballots)
    left = [(each["elsewhere"], rank) for rank, each in enumerate(ballots) if each["elsewhere"]]
    return why, None if why or not left else min(left)[1]


class RanksVoter:
    """Agrees with the other ranks, step by step, all in one order."""

    def __init__(self, job: Job) -> None:
        self._job, self.node = job, job.node
        self.why = ""

    def common(
        self, own: Sequence[Candidate], *, has_more: bool, is_saved: bool
    ) -> list[list[Candidate]] | None:
        """Of each content that all can read this rank's candidates, nearest first. None, once, where memory
        has something newer."""
        most, decide = MOST_CANDIDATES, partial(_decide, is_saved=is_saved)
        # The other nodes' keepers may have had as much to save as storage takes time for.
        patience_s = LOADING_PATIENCE_S if is_saved else None
        while True:
            mine = [has_more, [_row(each) for each in own[:most]], len(own) > most]
            found, said, is_cut = self._job.agree(
                "which steps all ranks can read", mine, decide, patience_s=patience_s
            )
            if not is_cut:
                break
            most *= _MORE
        if found is None:
            return None
        if said:
            log.warning("%s: an older step is gone on from, or none", said)
        contents = [Content(*each) for each in found]
        return [[each for each in own if _is_of(each, content)] for content in contents]

    def saved(self) -> None:
        """This node's keeper has saved what it can. Returns when all have: who lists the steps before that
        may lack one that others find."""
        what = "what only memory has, saved"
        self._job.agree(what, None, lambda rows: None, patience_s=LOADING_PATIENCE_S)

    def beside(self, what: str, mine: Any) -> dict[int, Any]:
        """What each rank of this node has said, once all ranks have said theirs."""
        return self._job.beside(what, mine, patience_s=LOADING_PATIENCE_S)

    def vote(self, ballot: Ballot) -> bool:
        """Whether all ranks could load it. One that ends says so by raising, to all of them."""
        if ballot.ends:
            return False
        untaken = [len(ballot.untaken), xxh3_64(compact(ballot.untaken)), ballot.untaken[:_MOST_NAMED]]
        elsewhere = len(ballot.elsewhere)
        mine = {
            "boundary": ballot.boundary, "reason": ballot.reason, "untaken": untaken, "elsewhere": elsewhere,
        }  # fmt: skip
        self.why, asked = self._job.agree("the vote on a step", mine, _judged, patience_s=LOADING_PATIENCE_S)
        if asked is not None:
            self._check_elsewhere(ballot, asked)
        return not self.why

    def _check_elsewhere(self, ballot: Ballot, asked: int) -> None:
        """Raises MismatchError, on all ranks, where one of the leaves that the rank that is asked leaves to
        others has a place on none of them."""
        own = list(ballot.elsewhere) if self._job.rank == asked else None
        names = self._job.agree("what has its place on another rank", own, lambda rows: rows[asked])
        here = [index for index, name in enumerate(names) if name in ballot.names]

        def check(rows: list[list[int]]) -> None:
            lost = sorted(set(range(len(names))).difference(*rows))
            if lost:
                raise _lost(len(lost), [names[index] for index in lost[:_MOST_NAMED]])

        self._job.agree("where it has its place", here, check)


def _decide(said_by: list[Any], *, is_saved: bool) -> tuple[list[list[Any]] | None, str, bool]:
    """What all try, what is said of what is not tried, and whether the rows are too short to tell."""
    rows = [[Readable(*each) for each in row] for _, row, _ in said_by]
    if any(is_cut for *_, is_cut in said_by) and not common(rows):
        return None, "", True
    if not is_saved and (any(has_more for has_more, *_ in said_by) or is_behind(rows)):
        return None, "", False
    found, said = decide(rows)
    rows_found = [[each.step, each.attempt, each.boundary, each.is_remote] for each in found]
    return rows_found, said, False


def _row(each: Candidate) -> list[Any]:
    boundary = None if each.held is None else each.boundary
    return [each.step, str(each.attempt), boundary, each.is_marked, each.is_remote]


def _is_of(each: Candidate, content: Content) -> bool:
    if (each.step, str(each.attempt)) != (content.step, content.attempt):
        return False
    if content.is_remote:
        return each.is_remote
    return each.held is None or each.boundary == content.boundary
