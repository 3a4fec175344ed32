"""Every byte of the visible steps at rest. Owns what is marked. Deletes nothing: a mark puts a step last, on
this host."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flashckpt.commit import attempts, lineage, marks, steps
from flashckpt.commit.lineage import VisibleStep
from flashckpt.commit.verification import Row, verify
from flashckpt.errors import DamagedError
from flashckpt.events import Event
from flashckpt.format.names import AttemptName, step_attempt_folder
from flashckpt.format.records import Manifest
from flashckpt.persist.at_rest import Rest
from flashckpt.persist.ledger import Ledger
from flashckpt.recovery.report import Finding, Kind, Outcome, Watcher
from flashckpt.store.base import Store

_SHOWN = 4


@dataclass
class Examined:
    """What the verification of the visible steps came to. `num_bytes` is 0 where nothing was read."""

    findings: list[Finding] = field(default_factory=list)
    whole: set[VisibleStep] = field(default_factory=set)
    damaged: set[VisibleStep] = field(default_factory=set)
    to_mark: list[tuple[VisibleStep, str]] = field(default_factory=list)
    num_bytes: int = 0


def parts_found(rest: Rest, outcome: Outcome, detail: str = "", *, damage: bool = False) -> Finding:
    """A step without a manifest."""
    shards = [rank.shard.num_bytes for part in rest.parts for rank in part.ranks]
    return Finding(
        kind=Kind.PARTS,
        outcome=outcome,
        place=rest.folder,
        step=rest.step,
        attempt=rest.attempt,
        num_bytes=sum(shards),
        detail=detail,
        damage=damage,
    )


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
    for each, reason in examined.to_mark:
        try:
            marks.mark(store, each.step, each.attempt, marks.this_host(), reason)
        except OSError as error:
            examined.findings = [_unmarked(found, each, error) for found in examined.findings]
            continue
        ledger.add(
            str(each.attempt), Event.ERROR, what="damaged", step=each.step, message=reason, by="recover"
        )


def _judge(store: Store, each: VisibleStep, wrong: list[Row], examined: Examined) -> None:
    there = marks.marked_here(store, each)
    folder = step_attempt_folder(each.step, each.attempt)
    if not wrong:
        examined.whole.add(each)
        if there is not None:
            why = f"it is whole now, and last on {there.host} until the mark-*.json in its folder is deleted"
            examined.findings.append(_found(each, folder, Outcome.WAS_MARKED, why))
        return
    examined.damaged.add(each)
    reason = "; ".join(
        f"{row.file.rpartition('/')[2]} is {row.status}: {row.detail}" for row in wrong[:_SHOWN]
    )
    if not steps.is_committed(store, each.step, each.attempt):
        # Nobody sees it as it is; whoever puts its files back is to find it unmarked.
        outcome = Outcome.KEPT
    elif all(row.status == "unreadable" for row in wrong):
        outcome, reason = Outcome.FAILED, f"{reason}; not marked: the storage failed, it may be whole"
    elif there is not None:
        outcome = Outcome.WAS_MARKED
    else:
        outcome = Outcome.MARKED
        examined.to_mark.append((each, reason))
    examined.findings.append(_found(each, folder, outcome, reason, damage=outcome is not Outcome.FAILED))


def _unmarked(found: Finding, each: VisibleStep, error: OSError) -> Finding:
    if (found.step, found.attempt) != (each.step, each.attempt):
        return found
    return replace(found, outcome=Outcome.FAILED, detail=f"{found.detail}; it could not be marked: {error}")


def _listed(store: Store) -> Examined:
    """Without reading: what has a manifest and all its files with their lengths."""
    examined = Examined(whole=set(lineage.newest_first(store)))
    known = attempts.attempts(store)
    for each in lineage.in_lineage(store, lineage.bounds(known)):
        folder = step_attempt_folder(each.step, each.attempt)
        try:
            found = steps.read_manifest(store, each.step, each.attempt)
            if not isinstance(found, Manifest):
                continue
            missing = steps.missing_files(store, found)
            why = f"missing or cut short: {', '.join(missing[:_SHOWN])}" if missing else ""
        except DamagedError as error:
            why = str(error)
        if why:
            examined.damaged.add(each)
            examined.findings.append(_found(each, folder, Outcome.KEPT, why, damage=True))
        elif (there := marks.marked_here(store, each)) is not None:
            examined.findings.append(_found(each, folder, Outcome.WAS_MARKED, there.reason, damage=True))
    return examined


def _found(each: VisibleStep, folder: str, outcome: Outcome, why: str, *, damage: bool = False) -> Finding:
    return Finding(
        kind=Kind.STEP,
        outcome=outcome,
        place=folder,
        step=each.step,
        attempt=each.attempt,
        detail=why,
        damage=damage,
    )
