"""`flashckpt ls | verify | branch | prune | export`: the committed steps of a run."""

from __future__ import annotations

import time
from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from flashckpt.cli import command
from flashckpt.cli.command import (
    AsJson,
    Bar,
    ExitCode,
    Remote,
    Run,
    ends,
    notices,
    number,
    remote_of,
    results,
    size,
    step_name,
    text,
    word,
    write_json,
)
from flashckpt.cli.history import (
    StepRow,
    lost_records,
    step_rows,
)
from flashckpt.cli.ranks import plain_waiting, waiting, waiting_text
from flashckpt.commit.assets import read_assets
from flashckpt.commit.attempts import open_run, read_start
from flashckpt.commit.lineage import VisibleStep, marked_here
from flashckpt.commit.verification import Report
from flashckpt.commit.verification import verify as read_again
from flashckpt.errors import DamagedError, OptionError
from flashckpt.format.names import AttemptName
from flashckpt.format.records import Start
from flashckpt.format.replicas import in_words, numbers
from flashckpt.options import Keep
from flashckpt.store import open_store
from flashckpt.store.base import Store
from flashckpt.tiers.nearest import known_remote

if TYPE_CHECKING:
    from flashckpt.export.step import Exported as ExportResult
    from flashckpt.recovery.pruning import Pruning


class Format(str, Enum):
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"
    HF = "hf"


AllBranches = Annotated[bool, typer.Option("--all", help="Show the steps of other branches too.")]
Shown = Annotated[str | None, typer.Argument(metavar="STEP[@ATTEMPT]", help="The newest if left out.")]
Target = Annotated[
    str, typer.Argument(metavar="STEP[@ATTEMPT]", help="A visible step, or one of another branch.")
]
KeepLast = Annotated[
    int, typer.Option("--keep-last", metavar="N", min=1, help="Keep the newest N; at least 2 always stay.")
]
EverySteps = Annotated[
    int | None, typer.Option("--every-steps", metavar="K", min=1, help="Keep every multiple of K, too.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")]
Verified = Annotated[
    str | None, typer.Argument(metavar="STEP[@ATTEMPT]", help="Every visible one if left out.")
]
Out = Annotated[str, typer.Argument(metavar="OUT", help="The file or folder to write.")]
Exported = Annotated[
    str | None,
    typer.Option("--step", metavar="STEP[@ATTEMPT]", help="The one a resume would take if left out."),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="A part of the state (model), or a leaf. May be repeated."),
]
As = Annotated[
    Format,
    typer.Option(
        "--format",
        help="torch: a file for torch.load(weights_only=True). dcp: a folder for torch's DCP. hf: a folder "
        "for from_pretrained.",
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="Of floating-point tensors: bf16, fp16, fp32.")
]
MaxShardSize = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size", metavar="SIZE", help="A folder of files up to SIZE (5GB), and an index."
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FOLDER", help="hf: take config and tokenizer from here, not from the run."
    ),
]
ByRank = Annotated[
    bool, typer.Option("--by-rank", help="A folder with a file for what each rank's own files hold.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")]


# ---- ls


@ends
def ls(run: Run, all_branches: AllBranches = False, as_json: AsJson = False) -> ExitCode:
    """List the committed steps, newest last. Ends with 1 if the records of one are damaged, or if records of
    attempts are lost: then all branches are listed, and a resume is refused until one is chosen."""
    store = open_store(run)
    run_id = open_run(store, create=False).run_id
    lost = lost_records(store)
    rows, waits = step_rows(store, all_branches=all_branches or bool(lost)), waiting(store)
    remote = known_remote(store)
    if as_json:
        told = {
            "steps": [_plain_row(row) for row in rows],
            "waiting": [plain_waiting(each) for each in waits],
            "remote": remote or None,
        }
        write_json({"run": store.url, "run_id": run_id, **told, "problem": lost or None})
    elif rows:
        results().print(_step_table(rows, all_branches or bool(lost)))
    else:
        notices().print(f"{store.url} has no committed step yet.")
    if remote and not as_json:
        notices().print(f"The run has a remote: {remote}")
    for each in () if as_json else waits:
        notices().print(waiting_text(each), style="yellow")
    if lost:
        notices().print(lost, style="red")
    return ExitCode.DAMAGED if lost or any(row.problem for row in rows) else ExitCode.WELL


def _step_table(rows: list[StepRow], all_branches: bool) -> Table:
    noted = any(_notes(row) for row in rows)
    several = any(row.world is not None and row.world > 1 for row in rows)
    columns = [number("step", "bold"), word("attempt"), *[number("ranks")] * several, number("size")]
    columns += [number("leaves"), word("committed")]
    columns += [word("branch")] * all_branches + [text("notes")] * noted
    table = command.table(*columns)
    for row in rows:
        cells = [
            str(row.step),
            str(row.attempt),
            *[_ranks(row)] * several,
            "?" if row.num_bytes is None else size(row.num_bytes),
            "?" if row.leaves is None else f"{row.leaves:,}",
            command.local_time(row.committed_at_s),
        ]
        cells += ["this" if row.visible else "other"] * all_branches + [_notes(row)] * noted
        table.add_row(*cells, style="red" if row.problem else None)
    return table


def _ranks(row: StepRow) -> str:
    """How many made it, and which of them this folder has, where it has not all."""
    if row.world is None:
        return "?"
    return f"{row.world:,}" if row.here is None else f"{in_words(row.here)} of {row.world:,}"


def _notes(row: StepRow) -> str:
    notes = [f"marked on {mark.host}: {mark.reason}" for mark in row.marks]
    return "; ".join([row.problem, *notes] if row.problem else notes)


def _plain_row(row: StepRow) -> dict[str, object]:
    return {
        "step": row.step,
        "attempt": str(row.attempt),
        "visible": row.visible,
        "world": row.world,
        "ranks_here": numbers(row.here),
        "num_bytes": row.num_bytes,
        "leaves": row.leaves,
        "committed_at": command.iso_time(row.committed_at_s),
        "marks": [{"host": mark.host, "reason": mark.reason} for mark in row.marks],
        "problem": row.problem or None,
    }


# ---- branch


@ends
def branch(run: Run, step: Target, as_json: AsJson = False) -> ExitCode:
    """Go on from another step: the next start of the run resumes there. Nothing is deleted.

    Refused while a job holds the run; a job on another machine is watched for a few seconds first.
    """
    from flashckpt.runs import branch as start_at

    store = open_store(run)
    target, attempt = step_name(step)
    name = start_at(run, target, None if attempt is None else str(attempt))
    made = AttemptName.parse(name)
    start = None if made is None else read_start(store, made)
    parent = None if start is None else str(start.parent)
    mark = _mark(store, start) or None
    if as_json:
        write_json({"run": store.url, "attempt": name, "step": target, "parent": parent, "mark": mark})
    else:
        results().print(
            f"The next start of {store.url} goes on from step {target} of attempt {parent}. Later steps stay "
            f"as another branch: `flashckpt ls {run} --all` shows them. (This branch is attempt {name}.)"
        )
    if mark:
        notices().print(
            f"flashckpt: step {target} is marked on this host: {mark}. A start here goes on from an older "
            "step, where there is one without a mark. If its files are whole again (`flashckpt verify`), "
            "delete the mark-*.json beside them.",
            style="yellow",
        )
    return ExitCode.WELL


def _mark(store: Store, start: Start | None) -> str:
    """Why this host would pass over the step, empty where it would not."""
    if start is None or start.parent is None:
        return ""
    found = marked_here(store, VisibleStep(start.step, start.parent))
    return "" if found is None else found.reason


# ---- prune


@ends
def prune(
    run: Run,
    keep_last: KeepLast,
    every_steps: EverySteps = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> ExitCode:
    """Delete the older visible steps. Refused while a job holds the run.

    Never goes: the newest two committed steps, the newest two that no verification failed on, and steps of
    other branches. Ends with 3 where nothing may be deleted yet.
    """
    from flashckpt.recovery.pruning import prune as delete_older

    done = delete_older(open_store(run), Keep(last=keep_last, every_steps=every_steps), dry_run=dry_run)
    if as_json:
        write_json(
            {
                "run": done.run,
                "dry_run": done.dry_run,
                "gone": [asdict(each) | {"attempt": str(each.attempt)} for each in done.gone],
                "kept": list(done.kept),
                "refusal": done.refusal or None,
                "uploads": [each.to_dict() for each in done.uploads],
            }
        )
    else:
        _print_pruned(done)
    return ExitCode.UNUSABLE_RUN if done.refusal else ExitCode.WELL


def _print_pruned(done: Pruning) -> None:
    if done.refusal:
        notices().print(f"flashckpt: nothing was deleted: {done.refusal}", style="red")
        return
    if done.gone:
        gone = "would go" if done.dry_run else "gone"
        table = command.table(number(gone), word("attempt"), number("size"))
        for each in done.gone:
            table.add_row(str(each.step), str(each.attempt), size(each.num_bytes))
        results().print(table)
    total = size(sum(each.num_bytes for each in done.gone))
    kept = ", ".join(map(str, done.kept)) or "none"
    deleted = "would delete" if done.dry_run else "deleted"
    results().print(f"{deleted} {command.count(len(done.gone), 'step')}, {total}; kept: {kept}")
    for found in done.uploads:
        results().print(f"{found.outcome.value}: {found.place}: {found.detail}")


# ---- verify


@ends
def verify(
    run: Run,
    step: Verified = None,
    all_branches: AllBranches = False,
    remote: Remote = None,
    as_json: AsJson = False,
) -> ExitCode:
    """Read every byte again and compare. Ends with 1 if anything is damaged or missing; changes nothing.

    Where records of attempts are lost, all branches are read: which is the run's nobody can tell."""
    store = open_store(run)
    open_run(store, create=False)
    far = remote_of(store, remote)
    told, code, here = _verified(store, step, all_branches=all_branches, as_json=as_json)
    if far is not None:
        if not as_json:
            results().print(f"the remote, {far.url}:", soft_wrap=True)
        told["remote"], theirs, there = _verified(far, step, all_branches=all_branches, as_json=as_json)
        code = max(code, theirs)
        if not as_json:
            _print_repairs((store, here), (far, there))
    if as_json:
        write_json(told)
    return code


def _verified(
    store: Store, step: str | None, *, all_branches: bool, as_json: bool
) -> tuple[dict[str, object], ExitCode, Report]:
    """One store: as JSON has it, with which code it would end, and what was found."""
    at, attempt = step_name(step) if step is not None else (None, None)
    open_run(store, create=False)
    lost = lost_records(store) if step is None else ""
    all_branches = all_branches or bool(lost)
    began_s = time.monotonic()
    with Bar(notices(), "verifying") as bar:
        report = read_again(store, at, attempt=attempt, all_steps=all_branches, progress=bar.progress)
    if not as_json:
        _print_report(report, time.monotonic() - began_s)
    if step is None and not lost:
        lost = _assets_problem(store)
    if lost:
        notices().print(lost, style="red")
    files = [asdict(row) | {"detail": row.detail or None} for row in report.rows]
    is_whole = report.ok and not lost
    told: dict[str, object] = {"run": store.url, "ok": is_whole, "num_bytes": report.num_bytes}
    told |= {"files": files, "problem": lost or None, "remote": None}
    return told, ExitCode.WELL if is_whole else ExitCode.DAMAGED, report


def _assets_problem(store: Store) -> str:
    """What is wrong with the assets of a run, empty where nothing is."""
    try:
        read_assets(store)
    except DamagedError as error:
        return str(error)
    return ""


def _print_report(report: Report, seconds: float) -> None:
    if report.damaged:
        table = command.table(number("step"), *map(text, ("attempt", "file", "status", "what is wrong")))
        for row in report.damaged:
            table.add_row(str(row.step), row.attempt, row.file.rpartition("/")[2], row.status, row.detail)
        results().print(table)
    steps = command.count(len({(row.step, row.attempt) for row in report.rows}), "step")
    read = f"{len(report.rows)} files of {steps}, {command.size(report.num_bytes)} read in {seconds:.1f} s"
    if report.ok:
        results().print(f"whole: {read}")
    else:
        results().print(f"not whole: {len(report.damaged)} of {read}")


def _print_repairs(*two: tuple[Store, Report]) -> None:
    """How each is mended by the other, of what was read of both."""
    for (store, report), (other, theirs) in (two, two[::-1]):
        damaged = {(row.step, row.attempt) for row in report.damaged}
        whole = {(row.step, row.attempt) for row in theirs.rows} - {
            (row.step, row.attempt) for row in theirs.damaged
        }
        for step, attempt in sorted(damaged):
            name = f"step {step} of attempt {attempt} is damaged in {store.url}"
            if (step, attempt) in whole:
                how = f"flashckpt copy {other.url} {store.url} --step {step}@{attempt} --repair"
                text = f"flashckpt: {name} and whole in {other.url}: `{how}` mends it."
            else:
                text = f"flashckpt: {name}, and not whole in {other.url}: nothing mends it from there."
            notices().print(text, style="yellow", soft_wrap=True)


# ---- export


@ends
def export(
    run: Run,
    out: Out,
    format: As = Format.SAFETENSORS,
    step: Exported = None,
    only: Only = None,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = None,
    config: Config = None,
    by_rank: ByRank = False,
    force: Force = False,
    as_json: AsJson = False,
) -> ExitCode:
    """Write the tensors of a step to a file or folder, each whole, whatever number of ranks made it. Every
    byte is verified before the name OUT is given."""
    number, attempt = step_name(step) if step is not None else (None, None)
    with Bar(notices(), "exporting") as bar:
        done = _export(
            open_store(run),
            out,
            format,
            config=config,
            by_rank=by_rank,
            step=number,
            attempt=attempt,
            only=only or (),
            dtype=dtype,
            max_shard_size=max_shard_size,
            force=force,
            progress=bar.progress,
        )
    if as_json:
        files = [{"file": name, "num_bytes": num_bytes} for name, num_bytes in done.files]
        write_json(asdict(done) | {"attempt": str(done.attempt), "files": files})
    else:
        total = size(sum(num_bytes for _, num_bytes in done.files))
        results().print(
            f"{done.leaves} leaves of step {done.step} of attempt {done.attempt}, {total}, in {out}"
        )
    return ExitCode.WELL


def _export(
    store: Store, out: str, format: Format, *, config: str | None, by_rank: bool, **options: Any
) -> ExportResult:
    if format is not Format.HF:
        from flashckpt.export.step import export as export_step

        if config is not None:
            raise OptionError("--config is for --format hf. Nothing was written.")
        return export_step(store, out, format=format.value, by_rank=by_rank, **options)
    from flashckpt.transformers.exporting import export_step as export_hf

    if by_rank:
        raise OptionError("--by-rank is not for --format hf. Nothing was written.")
    return export_hf(store, out, config=config, **options)
