"""What the remote of a run has of it, as a start sees it, and which of two stores is ahead of the other.

Owns that two histories are never mixed, and that a remote which does not answer is not taken for one that
has nothing. The newest attempt that started decides what a run is, as in one store: where it is the remote's
alone, its records are brought to the local store, and the steps that it did not go on from stay there as
another branch. Of steps nothing is copied: who goes on from one reads it where it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from flashckpt.commit import attempts, holder, lineage
from flashckpt.commit.attempts import AttemptInfo, open_run
from flashckpt.commit.lineage import VisibleStep
from flashckpt.commit.step_parts import part_paths
from flashckpt.errors import DamagedError, KeeperError, NoSuchStepError, RunError, UnusableRunError
from flashckpt.format.names import AttemptName, claim_path, start_path, step_attempt_folder
from flashckpt.format.records import Holder
from flashckpt.memory.region import is_region_name
from flashckpt.memory.runtime import RuntimeFolder, is_alive
from flashckpt.persist.ledger import Event, lines_of
from flashckpt.store.base import Store
from flashckpt.tiers.attempt_records import AttemptRecords, bring

log = logging.getLogger(__name__)

# Of the remote's steps the newest count: a start goes on from one of them, or from what is here.
_MOST_STEPS, _AT_ONCE = 32, 16
# Of a URL that the ledger says, and of the attempts whose ledger is asked.
_MOST_CHARS, _MOST_ATTEMPTS = 4096, 4


@dataclass(frozen=True, kw_only=True)
class RemoteRun:
    """`above` is the highest number of an attempt there, `newest` the newest that started, `others` those it
    knows besides; `steps` are visible there, newest first. `problem` says why nobody can tell, and empty
    where somebody can. `idle`: attempts of the local store that nobody would miss, see `without_idle`."""

    store: Store
    above: int = 0
    newest: AttemptName | None = None
    others: frozenset[AttemptName] = frozenset()
    steps: tuple[VisibleStep, ...] = ()
    problem: str = ""
    idle: frozenset[AttemptName] = frozenset()

    def told(self) -> list[Any]:
        """All but the store, in plain JSON, for other ranks."""
        steps = [[each.step, str(each.attempt)] for each in self.steps]
        newest = "" if self.newest is None else str(self.newest)
        idle = sorted(map(str, self.idle))
        return [self.above, newest, sorted(map(str, self.others)), steps, self.problem, idle]

    @classmethod
    def heard(cls, store: Store, told: Sequence[Any]) -> RemoteRun:
        above, newest, others, steps, problem, idle = told
        return cls(
            store=store,
            above=above,
            newest=AttemptName.parse(newest),
            others=frozenset(filter(None, map(AttemptName.parse, others))),
            steps=tuple(VisibleStep(step, _name(attempt)) for step, attempt in steps),
            problem=problem,
            idle=frozenset(map(_name, idle)),
        )

    def knows(self, attempt: AttemptName | None) -> bool:
        return attempt is None or attempt == self.newest or attempt in self.others

    def instead(self, local: Store) -> str:
        """In words, with a space before them, what it has and what to do where a newer step of `local`, a
        node's own disk, is of no use: who goes on needs ranks that other nodes have. Empty where nobody can
        tell."""
        if self.problem:
            return ""
        url, newest = self.store.url, self.steps[0].step if self.steps else None
        there = "no step of all ranks" if newest is None else f"step {newest}, of all ranks, and not this one"
        back = (
            f" To go on from step {newest}, move {local.url} away on every node, then start again."
            if newest is not None
            else ""
        )
        return (
            f" Its remote {url} has {there}. To bring this one there, run `flashckpt recover {local.url} "
            f"--remote {url}` on each node that has ranks of it, then start again.{back}"
        )

    def visible_in(self, local: Store) -> list[VisibleStep]:
        """Its steps that follow the local store's rule of lineage, newest first."""
        last_step = {bound.attempt: bound.last_step for bound in attempts.bounds(local)} if self.steps else {}
        return [each for each in self.steps if each.step <= last_step.get(each.attempt, -1)]


def look(
    local: Store, remote: Store, run_id: str, in_memory: Callable[[], bool] = lambda: True
) -> tuple[str, RemoteRun]:
    """The id of the run, made in the remote where that has none yet, and what is there. `run_id`: that of the
    local store, empty where it has no run. `in_memory`: as for `without_idle`.

    OSError where the remote does not answer: see `unanswered`. RunError where it cannot be used at all, and
    where it is another run or another history than the local one. Nothing is changed then.
    """
    with suppress(NoSuchStepError):
        # First what tells at once whether anybody answers: what is written is tried more often.
        open_run(remote, create=False)
    found = open_run(remote, create=True, run_id=run_id).run_id
    there = seen(remote)
    if run_id not in ("", found):
        raise UnusableRunError(
            f"{local.url} and its remote {remote.url} hold different runs ({run_id} and {found}). Nothing "
            "was loaded or changed. To go on with the remote's run, name a local folder that is empty; to go "
            "on with the local one, name a remote of its own.",
            path=local.url,
        )
    if run_id:
        there = without_idle(local, there, in_memory)
        is_ahead(local, there)
    if there.steps:
        for each, reason in lineage.incomplete(remote.at_once(), there.steps[0].step):
            log.error(
                "cannot resume from step %d of attempt %s (remote): %s", each.step, each.attempt, reason
            )
    return found, there


def unanswered(local: Store, remote: Store, run_id: str, problem: str) -> RemoteRun:
    """What is known of a remote that does not answer. RunError where there is no run here: an id of its own
    would keep the remote's out for good."""
    if not run_id:
        raise _unreached(local, remote, problem, "there is no run here")
    return RemoteRun(store=remote, problem=problem)


def seen(remote: Store) -> RemoteRun:
    """What a store has of the run that it holds. OSError where it cannot be read."""
    found, before = _seen(remote), list[VisibleStep]()
    while not (found.steps or found.problem):
        # A living job may have deleted all that were listed before they were read: then there are newer ones.
        now = list(lineage.everything(remote.at_once()))
        if now in ([], before):
            break
        found, before = _seen(remote), now
    return found


def _seen(remote: Store) -> RemoteRun:
    look = remote.at_once()
    above = attempts.highest_number(look)
    try:
        lineage.check_records(look)
        newest = attempts.newest_started(look)
        others = {*attempts.names(look).values(), *(bound.attempt for bound in attempts.bounds(look))}
        steps = tuple(islice(lineage.newest_first(look, at_once=_AT_ONCE), _MOST_STEPS))
        if not steps:
            lineage.check_usable(look)
    except (UnusableRunError, DamagedError) as error:
        return RemoteRun(store=remote, above=above, problem=str(error))
    return RemoteRun(store=remote, above=above, newest=newest, others=frozenset(others), steps=steps)


def without_idle(local: Store, remote: RemoteRun, in_memory: Callable[[], bool]) -> RemoteRun:
    """The same, that knows which attempts the local store alone has and that are no history of their own:
    over, without a part or a manifest of any step, and without a snapshot in memory. `in_memory` says whether
    this node may have one of the run; whatever another node or container had is out of sight, so the attempt
    was this one's alone, or has ended in order."""
    alone = [each for each in attempts.attempts(local) if each.has_started and not remote.knows(each.name)]
    if remote.newest is None or not alone or in_memory():
        return remote
    begun = {each.attempt for each in lineage.everything(local)}
    over = {each.name for each in alone if _is_over(each, has_begun=each.name in begun)}
    return replace(remote, idle=frozenset(over - _with_parts(local)))


def _is_over(each: AttemptInfo, *, has_begun: bool) -> bool:
    """`has_begun`: a file of a step is there. A keeper elsewhere may be at it, though all ended in order."""
    is_alone = each.start is not None and each.start.world == 1
    is_idle = each.closed and not has_begun
    return is_idle or (is_alone and each.claim is not None and _is_gone(each.claim.holder))


def _is_gone(of: Holder) -> bool:
    """Whether this machine had the memory of who claimed an attempt, and has it no more."""
    me = holder.here()
    if (of.host, of.boot_id) != (me.host, me.boot_id):
        return of.host == me.host
    if not of.runtime:
        return True  # `flashckpt branch`, which has none
    try:
        with closing(RuntimeFolder.at(of.runtime)) as runtime:
            # A region may have no name: then it is there as long as its keeper lives.
            names = runtime.names()
            locks = (name for name in names if name.endswith(".lock"))
            return not any(map(is_region_name, names)) and not any(is_alive(runtime, name) for name in locks)
    except FileNotFoundError:
        return True
    except (OSError, KeeperError):
        return False


def _with_parts(local: Store) -> set[AttemptName]:
    """The attempts that have saved something of a step, committed or not."""
    return {
        each.attempt
        for each in lineage.everything(local)
        if lineage.has_manifest(local, each)
        or part_paths(local, step_attempt_folder(each.step, each.attempt))
    }


def is_ahead(local: Store, remote: RemoteRun) -> bool:
    """Whether the run has gone on in the remote, by an attempt that the local store does not know.
    UnusableRunError where it has gone on in both, each in its own way."""
    if remote.newest is None:
        return False
    started = {each.name for each in attempts.attempts(local) if each.has_started}
    if remote.newest in started | {bound.attempt for bound in attempts.bounds(local)}:
        return False
    newest = max(started - remote.idle, default=None)
    if newest is None or remote.knows(newest):
        return True
    # Such an attempt died before its first commit. Its records here were removed as those of a dead attempt.
    if newest.number > remote.newest.number and len(remote.visible_in(local)) == len(remote.steps):
        return False
    raise _different_ways(local, remote, newest)


def _different_ways(local: Store, remote: RemoteRun, newest: AttemptName) -> UnusableRunError:
    there = remote.steps[0].step if remote.steps else None
    its = f"with step {there} as its newest" if there is not None else "and has no step in the remote"
    back = (
        f"To go on from step {there} of the remote, move {local.url} away, with a disk on each node on every "
        "node, and start again: an empty folder takes the remote's run."
        if there is not None
        else f"To go on with attempt {remote.newest}, start the job where the folder is that it was "
        "trained in."
    )
    return UnusableRunError(
        f"{local.url} and its remote {remote.store.url} have gone different ways: attempt {newest} is known "
        f"here alone, and attempt {remote.newest} in the remote alone, {its}. Each was trained in a folder, "
        "or on a node's own disk, that did not know the other. Nothing was loaded or changed: the steps of "
        "both stay where they are, and no start can go on from both. Starting again as before is refused "
        f"again. {back} To go on with what is here, name another remote.",
        path=local.url,
    )


def take_over(local: Store, remote: RemoteRun, ours: AttemptName) -> None:
    """Where the remote is ahead, make its newest attempt known to the local store, which `ours` has claimed.
    It may be killed anywhere, and is done again by the next attempt. UnusableRunError as of `is_ahead`,
    RunError where the remote does not give the records any more."""
    if remote.idle:
        remote = replace(remote, idle=remote.idle - _with_parts(local))
    if not is_ahead(local, remote):
        return
    assert remote.newest is not None
    hidden = next(lineage.newest_first(local), None)
    try:
        records = AttemptRecords.of(remote.store, remote.newest)
    except OSError as error:
        raise _unreached(local, remote.store, str(error), "the run has gone on there") from error
    if records is None or not records.start:
        raise RunError(
            f"{remote.store.url}: attempt {remote.newest} has gone while its records were read. Nothing was "
            "loaded. Start again.",
            path=remote.store.url,
        )
    for name in sorted(remote.idle):
        if name.number >= remote.newest.number:
            local.remove(start_path(name))  # as if it had never been
    _make_way(local, remote.newest, ours)
    bring(local, [records])
    if hidden is None and not remote.steps:
        log.warning(
            "%s: the run was trained elsewhere, as attempt %s, and neither here nor in its remote %s is a "
            "step of it: unless one is in memory here, it begins anew. If the folder that it was trained in "
            "is still there, stop, and go on there",
            local.url, remote.newest, remote.store.url,
        )  # fmt: skip
    last = {bound.attempt: bound.last_step for bound in attempts.bounds(local)}
    if hidden is not None and hidden.step > last.get(hidden.attempt, -1):
        log.warning(
            "%s: the run has gone on as attempt %s in %s, from before step %d of attempt %s, which is here: "
            "that step stays as another branch, and `flashckpt branch %s %d@%s` gets it back",
            local.url, remote.newest, remote.store.url, hidden.step, hidden.attempt, local.url, hidden.step,
            hidden.attempt,
        )  # fmt: skip


def _make_way(local: Store, name: AttemptName, ours: AttemptName) -> None:
    """An attempt that died before it started is as if it had never been, but that its number is taken."""
    there = attempts.names(local, least=name.number).get(name.number)
    is_dead = there not in (None, name, ours) and name.number < ours.number
    if there is not None and is_dead and attempts.read_start(local, there) is None:
        local.remove(claim_path(name.number))


def check_reached(local: Store, remote: RemoteRun, step: int | None) -> None:
    """RunError where the remote could not be read, and what is here (`step`, None for nothing) is older than
    what the run is known to have gone on from: the remote may have it. UnusableRunError where nothing is here
    or there any more, and the run has gone on from what the remote had."""
    if not remote.problem:
        if step is None and left_elsewhere(local):
            raise UnusableRunError(
                f"{local.url}: the run has gone on from a step that it read in {remote.store.url}, its "
                "remote, and neither here nor there is a step of it any more. Nothing was loaded, and it is "
                "not taken for a fresh run. Put back what the remote had, or begin anew in another folder, "
                "with another remote.",
                path=local.url,
            )
        return
    newest = attempts.newest_started(local)
    start = None if newest is None else attempts.read_start(local, newest)
    if step is None:
        raise _unreached(local, remote.store, remote.problem, "there is no step here")
    if start is not None and start.parent is not None and step < start.step:
        why = f"the run has gone on from step {start.step} of attempt {start.parent}, and here is step {step}"
        raise _unreached(local, remote.store, remote.problem, why)
    log.warning(
        "the remote %s cannot be read (%s): what is here, step %d, is gone on from. If the run has gone on "
        "elsewhere since, stop and start again when the remote answers",
        remote.store.url, remote.problem, step,
    )  # fmt: skip


def known_remote(store: Store) -> str:
    """The URL of the newest attempt's remote, as its ledger says; empty where it had none, or nothing tells.
    For people: a resume, and all else that must be right, is told by its caller."""
    for _, name in sorted(attempts.names(store).items(), reverse=True)[:_MOST_ATTEMPTS]:
        for line in lines_of(store, str(name)):
            if line["event"] == Event.ATTACH.value:
                url = line.get("remote")
                return url if isinstance(url, str) and url.isprintable() and len(url) <= _MOST_CHARS else ""
    return ""


def left_elsewhere(store: Store, step: int = -1) -> str:
    """Why a run of which step `step` is the newest here (-1: none is) does not go on from that, or begin: it
    has gone on from a later one, which it read in its remote. Empty where nothing says so."""
    newest = attempts.newest_started(store)
    start = None if newest is None else attempts.read_start(store, newest)
    if newest is None or start is None or start.parent is None or start.step <= step:
        return ""
    resumes = (line for line in lines_of(store, str(newest)) if line["event"] == Event.RESUME.value)
    if not any(line.get("tier") == "remote" for line in resumes):
        return ""
    url = known_remote(store)
    return (
        f"{store.url}: the run has gone on from step {start.step} of attempt {start.parent}, which is not "
        f"here: it was read in the run's remote{f', {url}' if url else ''}. Nothing was loaded or changed. "
        "Start it with remote= again; to go on from what is here, name a step with `flashckpt branch "
        f"{store.url} STEP`, or use another folder for another run."
    )


def _unreached(local: Store, remote: Store, problem: str, why: str) -> RunError:
    return RunError(
        f"{local.url}: {why}, and its remote {remote.url} cannot be read ({problem}). It may have newer "
        "steps: neither a fresh start nor an older step is taken instead. Nothing was loaded or changed. "
        "Start again when the remote answers; to begin or go on without it, leave remote= away.",
        path=local.url,
    )


def _name(text: str) -> AttemptName:
    name = AttemptName.parse(text)
    assert name is not None, text
    return name
