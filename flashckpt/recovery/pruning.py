"""Retention by hand: the rules of `commit.retention`, while nobody trains the run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashckpt.commit import attempts, lineage, retention
from flashckpt.commit.attempts import open_run
from flashckpt.commit.cut_off import remove_cut_off
from flashckpt.commit.lineage import VisibleStep, visible
from flashckpt.commit.steps import read_step
from flashckpt.errors import DamagedError
from flashckpt.format.names import AttemptName
from flashckpt.options import Keep
from flashckpt.recovery.node import dead_keepers, hold, refuse_if_held, runtime_of
from flashckpt.recovery.report import Finding
from flashckpt.recovery.uploads import dead_uploads, end_dead_uploads
from flashckpt.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """One step that went, or would. `num_bytes` are those of its shards, 0 where its records are damaged."""

    step: int
    attempt: AttemptName
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """What went, oldest first, and which visible steps stay. `refusal` says why nothing may go. `uploads` are
    the files of which an upload died in the middle: its parts went, or would."""

    run: str
    dry_run: bool
    gone: tuple[Pruned, ...]
    kept: tuple[int, ...]
    refusal: str = ""
    uploads: tuple[Finding, ...] = ()


def prune(store: Store, keep: Keep, *, dry_run: bool = False) -> Pruning:
    """Delete the visible steps that `keep` lets go: never the newest two that are committed.

    Raises RunHeldError while a job or a recovery has the run; NoSuchStepError where there is no run;
    UnusableRunError where records are lost, so that nobody can tell which steps are older.
    """
    run = open_run(store, create=False)
    if dry_run:
        with runtime_of(store, run) as runtime:
            refuse_if_held(store, runtime)
            writers = dead_keepers(runtime) if runtime is not None else set[str]()
        lineage.check_records(store)
        planned = _foreseen(store, keep)
        if not planned.refusal:
            planned = replace(planned, uploads=tuple(dead_uploads(store, (), writers)))
        return planned
    with hold(store, run) as held:
        lineage.check_records(store)
        planned = _foreseen(store, keep)
        newest, gone, ended = attempts.newest_started(store), set[VisibleStep](), list[Finding]()
        if newest is not None and not planned.refusal:
            held.guard()
            gone = set(retention.prune(store, newest, keep, claimed=held.claimed))
        if not planned.refusal:
            ended = end_dead_uploads(held, dead_keepers(held.runtime))
            remove_cut_off(store)
        done = tuple(each for each in planned.gone if VisibleStep(each.step, each.attempt) in gone)
        kept = tuple(each.step for each in visible(store))
        return replace(planned, dry_run=False, gone=done, kept=kept, uploads=tuple(ended))


def _foreseen(store: Store, keep: Keep) -> Pruning:
    newest = attempts.newest_started(store)
    there = visible(store)
    going = [] if newest is None else retention.doomed(store, newest, keep)
    refusal = ""
    if newest is not None and attempts.ranks_here(store, newest) is not None:
        refusal = (
            "this is one node's own disk, and a resume needs a step that all nodes have: which that is is "
            "known while the job trains, and then what is kept no longer goes by itself."
        )
    if newest is not None and going and not any(each.attempt == newest for each in there):
        going = []
        refusal = (
            f"attempt {newest}, the newest, has not committed a step of its own yet: until then nothing that "
            "it may have to go back to is deleted. Train on to its first commit."
        )
    kept = tuple(each.step for each in there if each not in going)
    gone = tuple(Pruned(step=e.step, attempt=e.attempt, num_bytes=_num_bytes(store, e)) for e in going)
    return Pruning(run=store.url, dry_run=True, gone=gone, kept=kept, refusal=refusal)


def _num_bytes(store: Store, each: VisibleStep) -> int:
    try:
        record = read_step(store, each.step, each.attempt)
    except DamagedError:
        return 0
    return sum(shard.num_bytes for shard in record.manifest.shards)
