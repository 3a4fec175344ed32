"""A recovery's work on storage: every byte of the visible steps read, damaged steps marked, debris removed.

A mark puts a step last, on this host; no step is ever deleted here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from flashckpt.commit import attempts, lineage, steps
from flashckpt.commit.lineage import VisibleStep
from flashckpt.commit.verification import Row, verify
from flashckpt.format.names import AttemptName, step_attempt_folder
from flashckpt.persist.deletions import Unused, is_unused_still, remove, unused_files
from flashckpt.persist.ledger import Event, Ledger
from flashckpt.persist.stored_steps import Completeness, StoredStep, stored_step
from flashckpt.recovery.node import Hold
from flashckpt.recovery.report import Fate, Finding, Kind, Watcher
from flashckpt.store.base import Store

_SHOWN = 4
_MOST_NAMED = 100


@dataclass
class Examined:
    """What the verification of the visible steps came to. `num_bytes` is 0 where nothing was read."""

    findings: list[Finding] = field(default_factory=list)
    whole: set[VisibleStep] = field(default_factory=set)
    damaged: set[VisibleStep] = field(default_factory=set)
    num_bytes: int = 0

    def say(self, each: VisibleStep, outcome: Fate, why: str, *, damage: bool = False) -> None:
        place = step_attempt_folder(each.step, each.attempt)
        self.findings.append(Finding(Kind.STEP, outcome, place, each.step, each.attempt, 0, why, damage))


def parts_found(stored: StoredStep, outcome: Fate, detail: str = "", *, damage: bool = False) -> Finding:
    """A step without a manifest."""
    num_bytes = sum(rank.shard.num_bytes for head in stored.heads for rank in head.ranks)
    about = stored.folder, stored.step, stored.attempt, num_bytes
    return Finding(Kind.PARTS, outcome, *about, detail, damage)


def examine(store: Store, watcher: Watcher, *, read: bool) -> Examined:
    """The visible steps; with `read` every byte of them. Changes nothing."""
    if not read:
        return _listed(store)
    report = verify(store, progress=watcher.progress)
    examined = Examined(num_bytes=report.num_bytes)
    by_step: dict[VisibleStep, list[Row]] = {}
    for row in report.rows:
        attempt = AttemptName.parse(row.attempt)
        assert attempt is not None
        by_step.setdefault(VisibleStep(row.step, attempt), []).append(row)
    for each, rows in by_step.items():
        _judge(store, each, [row for row in rows if row.status != "ok"], examined)
    return examined


def mark(store: Store, examined: Examined, ledger: Ledger) -> None:
    """Put the steps that are damaged last, on this host. Where that cannot be written, their findings say so:
    without a mark a resume finds the damage itself, and passes over it."""
    for index, found in enumerate(examined.findings):
        if found.outcome is not Fate.MARKED or found.step is None or found.attempt is None:
            continue
        try:
            lineage.mark(store, found.step, found.attempt, lineage.this_host(), found.detail)
        except OSError as error:
            why = f"{found.detail}; it could not be marked: {error}"
            examined.findings[index] = replace(found, outcome=Fate.FAILED, detail=why)
            continue
        ledger.add(
            str(found.attempt), Event.ERROR,
            what="damaged", step=found.step, message=found.detail, by="recover",
        )  # fmt: skip


def _judge(store: Store, each: VisibleStep, wrong: list[Row], examined: Examined) -> None:
    there = lineage.marked_here(store, each)
    if not wrong:
        examined.whole.add(each)
        if there is not None:
            why = f"it is whole now, and last on {there.host} until the mark-*.json in its folder is deleted"
            examined.say(each, Fate.WAS_MARKED, why)
        return
    examined.damaged.add(each)
    reason = "; ".join(
        f"{row.file.rpartition('/')[2]} is {row.status}: {row.detail}" for row in wrong[:_SHOWN]
    )
    if not steps.is_committed(store, each.step, each.attempt):
        # Nobody sees it as it is; whoever puts its files back is to find it unmarked.
        outcome = Fate.KEPT
    elif all(row.status == "unreadable" for row in wrong):
        outcome, reason = Fate.FAILED, f"{reason}; not marked: the storage failed, it may be whole"
    else:
        outcome = Fate.MARKED if there is None else Fate.WAS_MARKED
    examined.say(each, outcome, reason, damage=outcome is not Fate.FAILED)


def _listed(store: Store) -> Examined:
    """Without reading: what has a manifest and all its files with their lengths."""
    examined = Examined(whole=set(lineage.newest_first(store)))
    for each in lineage.in_lineage(store, attempts.bounds(store)):
        found = stored_step(store, each.step, each.attempt)
        if found.completeness in (Completeness.MISSING, Completeness.UNREADABLE):
            examined.damaged.add(each)
            examined.say(each, Fate.KEPT, found.problem, damage=True)
        elif found.completeness is Completeness.COMMITTED:
            there = lineage.marked_here(store, each)
            if there is not None:
                examined.say(each, Fate.WAS_MARKED, there.reason, damage=True)
    return examined


def clear(hold: Hold, writers: Collection[str], ledger: Ledger) -> list[Finding]:
    """Delete debris, that of dead keepers included: `writers` are their nonces. RunHeldError once a job has
    begun meanwhile."""
    unused, failed = list[Unused](), dict[str, str]()
    for each in unused_files(hold.store, (), writers):
        hold.guard()
        try:
            if not is_unused_still(hold.store, each):
                continue
            unused.append(each)
            remove(hold.store, each)
        except OSError as error:
            failed[each.path] = str(error)
    if unused:
        paths = [each.path for each in unused]
        ledger.add(
            None, Event.PRUNE, what="debris", paths=paths[:_MOST_NAMED], count=len(paths), by="recover"
        )
    found = debris_found([each for each in unused if each.path not in failed])
    left = [(each, failed[each.path]) for each in unused if each.path in failed]
    return found + [replace(_finding(each), outcome=Fate.FAILED, detail=why) for each, why in left]


def debris_found(unused: list[Unused]) -> list[Finding]:
    """One row a file; of empty folders nothing is said."""
    return [_finding(each) for each in unused if each.kind != "folder"]


def _finding(each: Unused) -> Finding:
    about = each.path, each.step, each.attempt, each.num_bytes
    return Finding(Kind.DEBRIS, Fate.REMOVED, *about, each.why)
